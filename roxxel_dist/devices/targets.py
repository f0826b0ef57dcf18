"""Accelerators that are not here, for which their compiler runs on this machine: names, and devices to compile for."""

import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from roxxel_dist.process.exit_codes import UserError

FORMS = (
    "TPU slices are named by chips, as v5e:4x4, v5p:2x2x2 or v6e:4x4 ({tpu}); GPUs by hosts x GPUs of a host, as "
    "h100:2x8 ({gpu})"
)


class Tpu(NamedTuple):
    """What libtpu asks of a version of TPUs, and how they are connected."""

    machine: str
    """Its name of a machine with four chips."""
    axes: int
    """Of a slice: a torus of two or three dimensions."""
    pod: int
    """Chips of the largest slice. Source: Google Cloud documentation, the page of each version."""
    chip: str = "default"
    """How the cores of a chip are devices, by libtpu's name. Training on v4 has one device a chip ("megacore"), which
    is not libtpu's default for compilation; a chip of tpu7x has two devices."""


TPUS = {
    "v4": Tpu("v4-8", 3, 4096, "megacore"),
    "v5e": Tpu("v5litepod-4", 2, 256),
    "v5p": Tpu("v5p-8", 3, 8960),
    "v6e": Tpu("v6e-4", 2, 256),
    "tpu7x": Tpu("tpu7x-8", 3, 9216),
}
"""By libtpu's name of a version."""


class Gpu(NamedTuple):
    """What XLA's compiler for GPUs asks of one. Figures: the data sheet of each product, and NVIDIA's CUDA programming
    guide, table of technical specifications by compute capability."""

    device_kind: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    """Float32 units of a core."""
    shared_kib: int
    """Shared memory of a core; a block may have 1 KiB less."""
    l2_mb: int
    clock_ghz: float
    memory_bytes: int
    gigabytes_per_s: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164, 40, 1.41, 85_000_000_000, 2039),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228, 50, 1.98, 85_000_000_000, 3350),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 228, 50, 1.98, 150_000_000_000, 4800),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 228, 126, 1.97, 190_000_000_000, 8000),
}
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""A GPU measures cuBLAS and Triton for each matrix product, and takes the faster one. Without a GPU XLA takes Triton,
with tiles that nothing chose. All else is as on the device."""


class MissingCompiler(Exception):
    """The compiler of a target is not installed; the message has the command that installs it."""


@dataclass(frozen=True)
class Target:
    """Devices of one kind."""

    name: str
    kind: str
    """Such as "v5e" or "h100"."""
    shape: tuple[int, ...]
    """Chips of a TPU slice by axis; (hosts, GPUs of each)."""

    @property
    def is_gpu(self) -> bool:
        """Whether these are GPUs; else they are TPUs."""
        return self.kind in GPUS

    @property
    def device_count(self) -> int:
        """How many `devices` it has at most: a chip of some TPUs has two."""
        return math.prod(self.shape) * (1 if self.is_gpu else 2)

    @property
    def compiler_options(self) -> Mapping[str, Any] | None:
        """XLA's, by their names."""
        return GPU_OPTIONS if self.is_gpu else None

    def extra(self) -> str:
        """The optional part of this package that brings the compiler."""
        return "cuda12" if self.is_gpu else "tpu"

    def is_installed(self) -> bool:
        """Whether the compiler is."""
        names = ("jax_cuda12_plugin", "jax_cuda13_plugin") if self.is_gpu else ("libtpu",)
        return any(importlib.util.find_spec(name) is not None for name in names)

    def environment(self) -> dict[str, str]:
        """The variables of a process that compiles: it must neither look for accelerators of this machine nor hold
        libtpu's lock."""
        common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
        if self.is_gpu:
            return common | {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        return common | {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # takes no lock, and is not kept out by that of a job
            "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server what this machine is
            "TPU_ACCELERATOR_TYPE": TPUS[self.kind].machine,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_LOG_DIR": "disabled",
        }

    def devices(self) -> list[Any]:
        """`jax.Device`s to compile for, in a process with that `environment`. Raises ValueError, with its word, where
        the compiler refuses the topology."""
        import jax
        from jax.experimental import topologies

        try:
            if self.is_gpu:
                hosts, gpus = self.shape
                found = topologies.get_topology_desc(
                    self.kind, "cuda", target_config=gpu_config(GPUS[self.kind]), topology=f"1x{hosts}x{gpus}"
                )
            else:
                # The compiler takes a host for one of 2 x 2 chips; one chip is a machine too.
                bounds = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(self.shape) == 1 else {}
                chip = TPUS[self.kind].chip
                found = topologies.get_topology_desc(self.name, "tpu", chip_config_name=chip, **bounds)
        except jax.errors.JaxRuntimeError as error:
            word = str(error).splitlines()[0]
            raise UserError(f"target is {self.name}, which its compiler refuses: {word}") from error
        return list(found.devices)

    def device_bytes(self, device: Any) -> int | None:
        """The memory of a device that programs can have; None where its compiler does not say it.

        libtpu says it where a program does not fit, so it is given one that never does.
        """
        import jax
        import jax.numpy as jnp
        from jax.sharding import SingleDeviceSharding

        if self.is_gpu:
            return GPUS[self.kind].memory_bytes
        place = SingleDeviceSharding(device)
        huge = jax.ShapeDtypeStruct((1 << 38,), jnp.float32, sharding=place)
        try:
            jax.jit(lambda x: x + 1, out_shardings=place).lower(huge).compile()
        except jax.errors.JaxRuntimeError as error:
            return memory_in(str(error))[1]
        return None


def parse_target(name: str) -> Target:
    """The target of a name such as "v5e:4x4" or "h100:2x8". Raises ValueError, with the known ones and the form, for
    another kind or shape."""
    forms = FORMS.format(tpu=", ".join(TPUS), gpu=", ".join(GPUS))
    kind, _, text = name.partition(":")
    if kind not in TPUS and kind not in GPUS:
        raise UserError(f"target is {name!r}, which is not known: {forms}")
    shape = tuple(int(n) for n in text.split("x")) if re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", text) else ()
    if len(shape) not in ((2,) if kind in GPUS else (2, 3)):
        raise UserError(f"target is {name!r}, and {kind!r} needs its shape after a colon, numbers above 0: {forms}")
    if kind in TPUS:
        _check_slice(name, TPUS[kind], shape)
    return Target(name, kind, shape)


def _check_slice(name: str, tpu: Tpu, shape: tuple[int, ...]) -> None:
    """Raises for a slice that there is not: libtpu ends its process for some, and compiles for others."""
    if math.prod(shape[tpu.axes :]) > 1:
        raise UserError(f"target is {name}: slices of these chips have {tpu.axes} axes, so use two, as 4x4")
    if math.prod(shape) > tpu.pod:
        raise UserError(
            f"target is {name}, a slice of {math.prod(shape):,} chips: the largest has {tpu.pod:,}, so use fewer"
        )


def check_compiler(target: Target, install: str) -> None:
    """Raises MissingCompiler where the target's compiler is not installed; `install` is the command for it."""
    if not target.is_installed():
        what = "jax's CUDA plugin" if target.is_gpu else "libtpu"
        raise MissingCompiler(
            f"target is {target.name}, and its compiler ({what}) is not installed; it needs no such device: {install}"
        )


def gpu_config(gpu: Gpu) -> str:
    """The description of a GPU that XLA's compiler takes (a `GpuTargetConfigProto` as text)."""
    device = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 << 10, "shared_memory_per_core": gpu.shared_kib << 10,
        "shared_memory_per_block_optin": (gpu.shared_kib - 1) << 10,
        "core_count": gpu.cores, "fpus_per_core": gpu.fpus,
        "block_dim_limit_x": (1 << 31) - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
        "memory_bandwidth": gpu.gigabytes_per_s * 10**9, "l2_cache_size": gpu.l2_mb << 20,
        "clock_rate_ghz": gpu.clock_ghz, "device_memory_size": gpu.memory_bytes,
    }  # fmt: skip
    major, minor = gpu.capability
    fields = " ".join(f"{name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} '
        f"runtime_version {{ major: 12 minor: 9 patch: 0 }} device_description_str: {json.dumps(gpu.device_kind)}"
    )


def memory_in(message: str) -> tuple[int | None, int | None]:
    """(bytes that a program needs, bytes that a device has) from the compiler's refusal of it, where it says them."""
    amount = r"([\d.]+[KMGTPE]?)"
    for form in (
        rf"memory space hbm\. Used {amount} of {amount}",
        rf"\({amount}\) exceeds available HBM \({amount}\)",
        rf"Requires {amount}, has {amount} available",
    ):
        if found := re.search(form, message):
            return _bytes(found[1]), _bytes(found[2])
    return None, None


def is_too_large(message: str) -> bool:
    """Whether a compiler refuses a program because of the memory of a device. What a kernel has no room for in the
    chip's own fast memory (vmem, smem) is a mistake in the kernel: no smaller batch or more devices mend it."""
    space = re.search(r"memory space (\w+)", message)
    return "RESOURCE_EXHAUSTED" in message and (space is None or space[1] == "hbm")


def _bytes(amount: str) -> int:
    power = " KMGTPE".find(amount[-1])
    return int(float(amount if power < 0 else amount[:-1]) * 1024 ** max(0, power))


def hosts_of(devices: Sequence[Any]) -> list[int]:
    """The host of each device; one process of jax runs on each."""
    return [device.process_index for device in devices]
