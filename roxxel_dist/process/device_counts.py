"""Which numbers of devices a training can use: integers, without jax."""

import math
from dataclasses import dataclass

from roxxel_dist.process.exit_codes import UserError


def mesh_shape(
    devices: int, *, n_devices: int = 0, fsdp: int = 1, expert: int = 1, tensor: int = 1
) -> tuple[int, int, int, int]:
    """The sizes of the axes "data", "fsdp", "expert" and "tensor" of a mesh.

    Args:
        devices: how many there are.
        n_devices: how many to use, 0 for all.
        fsdp: size of "fsdp", 0 for all that "expert" and "tensor" leave; "data" gets the rest.
        expert: size of "expert".
        tensor: size of "tensor".

    Raises:
        UserError: more devices are asked for than there are, or they cannot be shared out so.
    """
    if n_devices < 0 or n_devices > devices:
        raise UserError(
            f"n_devices is {n_devices}, but {devices} device(s) are here: use 0 for all, or launch more "
            f"(`roxxel-dist launch local --nprocs N --devices-per-proc M -- CMD…`)"
        )
    count = n_devices or devices
    if tensor < 1 or count % tensor:
        raise UserError(f"tensor_devices is {tensor}: it must be at least 1, and divide the {count} device(s)")
    share, left = f"{count} device(s)" + (f" / tensor_devices ({tensor})" if tensor > 1 else ""), count // tensor
    if expert < 1 or left % expert:
        best = max(size for size in range(1, left + 1) if left % size == 0 and size <= max(expert, 1))
        raise UserError(f"expert_devices is {expert}: it must divide {share}, as {best} does")
    share, left = share + (f" / expert_devices ({expert})" if expert > 1 else ""), left // expert
    fsdp = fsdp or left
    if fsdp < 1 or left % fsdp:
        raise UserError(f"fsdp_devices is {fsdp}: it must divide {share}; 0 stands for all of them")
    return left // fsdp, fsdp, expert, tensor


def check_shard_count(count: int, devices: int) -> None:
    """Check the number of devices. Raises UserError where there are more than `count` virtual shards."""
    if devices > count:
        raise UserError(
            f"virtual_shards is {count}, and there are {devices} devices, of which each has one shard at least: set "
            f"n_devices to {count} or fewer"
        )


def largest_divisor(count: int, most: int) -> int:
    """The largest number up to `most` that divides `count`; 1 where `most` is below."""
    return max(n for n in range(1, max(1, min(count, most)) + 1) if count % n == 0)


@dataclass(frozen=True, kw_only=True)
class DeviceNeeds:
    """Needs of a training as to the number of its devices. Its batches ask nothing: any number shares their rows."""

    n_devices: int = 0
    """Devices to use; 0: all."""
    fsdp: int = 1
    """Devices that share one copy of the parameters; 0: all that "expert" and "tensor" leave."""
    expert: int = 1
    """Devices that share the experts."""
    tensor: int = 1
    """Devices that compute on the same rows."""
    virtual_shards: int = 0
    """At least the devices; 0: none."""

    def check(self, devices: int) -> None:
        """Check that the training can use so many devices. Raises UserError with the reason."""
        shape = mesh_shape(devices, n_devices=self.n_devices, fsdp=self.fsdp, expert=self.expert, tensor=self.tensor)
        if self.virtual_shards:
            check_shard_count(self.virtual_shards, math.prod(shape))

    def refusal(self, devices: int) -> str:
        """The reason why the training cannot use so many devices; empty where it can."""
        try:
            self.check(devices)
        except UserError as error:
            return str(error)
        return ""
