"""What public data sheets say of accelerators: one table, for MFU, lower bounds of a step's time, and compilation."""

import re
from typing import Any, NamedTuple

import jax

HALF = ("bfloat16", "float16")


class Accelerator(NamedTuple):
    """One jax device. None, or 0: no source says it, or nothing here needs it."""

    kind: str
    """`jax.Device.device_kind`, without "NVIDIA ", as a regular expression that matches all of it."""
    tera_flops: float
    """The most TFLOP/s of dense matrix products, sums in float32."""
    memory_gigabytes: int
    """Its own memory, the least of those with this kind, in 10^9 bytes or what the sheet calls GB."""
    dtypes: tuple[str, ...]
    """Of these matrices."""
    source: str
    """Of these figures: a public document of the vendor."""
    gigabytes_per_s: float = 0.0
    """Of its own memory, GB/s of 10^9 bytes."""
    link_gigabytes_per_s: float = 0.0
    """What it can send over all its links to other devices, GB/s: NVLink (within a host), or the interconnect of a TPU
    slice."""
    network_gigabytes_per_s: float = 0.0
    """Its share of the host's network, GB/s; 0 for a TPU, whose slice has no slower network."""
    compute_capability: str = ""
    """Of an NVIDIA GPU."""

    def seconds(self, flops: float, data: float, sent: float, network: float) -> tuple[float, float, float]:
        """The least seconds for so many operations, bytes of its own memory, and bytes that it sends, of which so many
        go over its host's network; 0 for links of which no source says a speed."""
        links = sent / (self.link_gigabytes_per_s * 1e9) if self.link_gigabytes_per_s else 0.0
        if self.network_gigabytes_per_s:
            links = max(links, network / (self.network_gigabytes_per_s * 1e9))
        return flops / (self.tera_flops * 1e12), data / (self.gigabytes_per_s * 1e9), links


def _sheet(product: str) -> str:
    return f"NVIDIA {product}, data sheet"


def _page(version: str) -> str:
    return f"Google Cloud documentation, TPU {version}"


HOPPER = "NVIDIA H100 and H200, data sheets and architecture white paper"
GEFORCE_30 = "NVIDIA Ampere GA102 GPU architecture, white paper"
GEFORCE_40 = "NVIDIA Ada GPU architecture, white paper"
# NVIDIA gives some figures "with sparsity": half of them. It gives NVLink in both directions together: half of it. What
# has no NVSwitch has NVLink to one other card, by a bridge. The network is that of NVIDIA's own systems, from the data
# sheets of DGX A100 (one 200 Gb/s port a GPU), DGX H100, H200 and B200 (one of 400 Gb/s). No Laptop, D or Ti variants,
# and no MIG slices: their kinds end otherwise.
# Google gives the interconnect of a chip in both directions together: half of it (v4: in one). A jax device is a core
# in v2, v3 and TPU7x (half a chip), else a chip.
ACCELERATORS = (
    Accelerator(r"(Tesla )?V100-SXM.*", 125.0, 16, ("float16",), _sheet("V100"), 900.0, 150.0, 0.0, "7.0"),
    Accelerator(r"(Tesla )?V100-PCIE.*", 112.0, 16, ("float16",), _sheet("V100"), 900.0, 0.0, 0.0, "7.0"),
    Accelerator(r"(Tesla )?V100S-PCIE.*", 130.0, 32, ("float16",), _sheet("V100"), 1134.0, 0.0, 0.0, "7.0"),
    Accelerator(r"(Tesla )?T4", 65.0, 16, ("float16",), _sheet("T4"), 320.0, 0.0, 0.0, "7.5"),
    Accelerator(r"A100-SXM4-40GB", 312.0, 40, HALF, _sheet("A100"), 1555.0, 300.0, 25.0, "8.0"),
    Accelerator(r"A100-PCIE-40GB", 312.0, 40, HALF, _sheet("A100"), 1555.0, 300.0, 0.0, "8.0"),
    Accelerator(r"A100-SXM4-\d+GB", 312.0, 80, HALF, _sheet("A100"), 2039.0, 300.0, 25.0, "8.0"),
    Accelerator(r"A100 80GB PCIe", 312.0, 80, HALF, _sheet("A100"), 1935.0, 300.0, 0.0, "8.0"),
    Accelerator(r"H100 \d+GB HBM3", 989.4, 80, HALF, HOPPER, 3350.0, 450.0, 50.0, "9.0"),  # SXM
    Accelerator(r"H100 PCIe", 756.0, 80, HALF, _sheet("H100"), 2000.0, 300.0, 0.0, "9.0"),
    Accelerator(r"H100 NVL", 835.5, 94, HALF, _sheet("H100"), 3900.0, 300.0, 0.0, "9.0"),
    Accelerator(r"H200", 989.4, 141, HALF, HOPPER, 4800.0, 450.0, 50.0, "9.0"),
    Accelerator(r"H200 NVL", 835.5, 141, HALF, _sheet("H200"), 4800.0, 450.0, 0.0, "9.0"),
    Accelerator(r"B200", 2250.0, 180, HALF, _sheet("DGX B200"), 8000.0, 900.0, 50.0, "10.0"),
    Accelerator(r"L4", 121.0, 24, HALF, _sheet("L4"), 300.0, 0.0, 0.0, "8.9"),
    Accelerator(r"L40S", 362.05, 48, HALF, _sheet("L40S"), 864.0, 0.0, 0.0, "8.9"),
    Accelerator(r"GeForce RTX 3090", 71.0, 24, HALF, GEFORCE_30, 936.0, 0.0, 0.0, "8.6"),
    Accelerator(r"GeForce RTX 4090", 165.2, 24, HALF, GEFORCE_40, 1008.0, 0.0, 0.0, "8.9"),
    Accelerator(r"TPU v2", 22.5, 8, ("bfloat16",), _page("v2"), 350.0),
    Accelerator(r"TPU v3", 61.5, 16, ("bfloat16",), _page("v3"), 450.0),
    Accelerator(r"TPU v4", 275.0, 32, ("bfloat16",), _page("v4"), 1200.0, 300.0),
    Accelerator(r"TPU v5 lite|TPU v5e", 197.0, 16, ("bfloat16",), _page("v5e"), 819.0, 200.0),
    Accelerator(r"TPU v5p?", 459.0, 95, ("bfloat16",), _page("v5p"), 2765.0, 600.0),
    Accelerator(r"TPU v6 lite|TPU v6e", 918.0, 32, ("bfloat16",), _page("v6e"), 1638.0, 400.0),
    Accelerator(r"TPU7x", 1153.5, 96, ("bfloat16",), "Google Cloud documentation, TPU7x", 3690.0, 300.0),
)


def accelerator(device_kind: str) -> Accelerator | None:
    """What the table has of `jax.Device.device_kind`; None for an unknown device."""
    kind = device_kind.removeprefix("NVIDIA ").strip()
    return next((each for each in ACCELERATORS if re.fullmatch(each.kind, kind)), None)


def peak_flops(device_kind: str, dtype: Any = "bfloat16") -> float | None:
    """The most FLOP/s of one jax device (`jax.Device.device_kind`) in dense matrix products of a dtype.

    None where no source says it: an unknown device, or another dtype.
    """
    name, found = jax.dtypes.canonicalize_dtype(dtype).name, accelerator(device_kind)
    return found.tera_flops * 1e12 if found is not None and name in found.dtypes else None
