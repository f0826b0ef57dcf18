from types import SimpleNamespace

import jax
import numpy as np
import pytest
import warm
from commands import environment

from roxxel_dist.devices.accelerators import peak_flops
from roxxel_dist.train.step.throughput import mfu, peak_memory_gb, peak_rss_bytes

KINDS = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA B200": 2250,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362.05,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71,
    "TPU v2": 22.5,
    "TPU v3": 61.5,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5": 459,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
    "TPU v6e": 918,
}
UNKNOWN = [
    "cpu",
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "TPU v4 lite",
]


@pytest.mark.parametrize(("kind", "tera"), KINDS.items())
def test_known_peaks(kind, tera):
    assert peak_flops(kind, "bfloat16") == pytest.approx(tera * 1e12)
    assert peak_flops(kind, jax.numpy.bfloat16) == peak_flops(kind)
    assert peak_flops(kind, np.float32) is None


@pytest.mark.parametrize(
    ("kind", "tera"), [("Tesla V100-SXM2-16GB", 125), ("Tesla V100-PCIE-32GB", 112), ("Tesla T4", 65)]
)
def test_cards_without_bfloat16(kind, tera):
    assert peak_flops(kind, "float16") == pytest.approx(tera * 1e12)
    assert peak_flops(kind, "bfloat16") is None


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_is_not_guessed(kind):
    assert peak_flops(kind, "bfloat16") is None


def test_utilisation_is_of_all_devices():
    cards = [SimpleNamespace(device_kind="NVIDIA H200")] * 2
    assert mfu(1e6, 989.4e6, cards) == pytest.approx(0.5)
    assert mfu(1e6, 989.4e6, [*cards, SimpleNamespace(device_kind="cpu")]) is None
    assert mfu(1e6, 989.4e6, jax.devices()) is None
    assert mfu(1e6, 989.4e6, cards, "float32") is None
    assert mfu(1e6, 1e6, []) is None


def test_memory_of_the_fullest_device():
    def card(stats):
        return SimpleNamespace(memory_stats=lambda: stats)

    full = [card({"peak_bytes_in_use": 3 * 10**9}), card({"peak_bytes_in_use": 10**9}), card(None)]
    assert peak_memory_gb(full) == {"vram_gb": 3.0}
    assert peak_memory_gb([card({"bytes_in_use": 1}), card(None)]).keys() == {"ram_gb"}


def test_memory_of_the_process_where_devices_do_not_say(tmp_path):
    code = """
from roxxel_dist.train.step.throughput import peak_memory_gb, peak_rss_bytes
before = peak_rss_bytes()
block = bytearray(b"x") * 50_000_000
del block
print(peak_rss_bytes() - before, peak_memory_gb())
"""
    ran = warm.run([], tmp_path, environment(), source=code)
    assert ran.returncode == 0, ran.stderr
    grown, memory = ran.stdout.split(" ", 1)
    assert int(grown) > 45_000_000, "the peak counts, not what is held now"
    assert memory.startswith("{'ram_gb': ")
    assert 0.2e9 < peak_rss_bytes() < 1e12
