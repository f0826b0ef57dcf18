"""Functions for programs that place arrays on devices themselves."""

from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, num_devices, replicate, shard_batch

__all__ = ["batch_sharding", "make_mesh", "num_devices", "replicate", "shard_batch"]
