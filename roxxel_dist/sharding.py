"""What a program of one's own needs to lay arrays on devices."""

from roxxel_dist.cluster.mesh import make_mesh, num_devices, replicate, shard_batch

__all__ = ["make_mesh", "num_devices", "replicate", "shard_batch"]
