"""Runs with virtual shards: the same bits on any number of devices, in any number of processes."""

import hashlib
from pathlib import Path

import pytest
import yaml
from commands import TINY, launched, make_corpus, rows, run

CONFIG = yaml.safe_load(TINY) | {
    "phases": [{"steps": 8, "batch_size": 16, "seq_len": 33}, {"steps": 4, "batch_size": 8, "seq_len": 65}],
    "virtual_shards": 8, "wandb": "off",
}  # fmt: skip
BLEND = [{"steps": 8, "batch_size": 16, "seq_len": 33, "weights": {"self": 0.5, "more": 0.5}, "blend": "row"}]
OWN_MODEL = """
from flax import nnx
import jax.numpy as jnp

class Net(nnx.Module):
    def __init__(self, size, rngs):
        self.embed = nnx.Embed(size, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.out = nnx.Linear(32, size, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.norm(self.drop(jnp.cumsum(self.embed(tokens), 1))))

def build(config, rngs):
    return Net(config.vocab_size, rngs)
"""
BLENDED = BLEND + CONFIG["phases"][1:]
VARIANTS = {
    "AdamW, float32": {},
    "Muon, `grad_accum: 2`": {"optimizer": "muon", "grad_accum": 2, "phases": CONFIG["phases"][:1]},
    "AdamW, `bf16_compute`, two phases of which one blends by row": {
        "bf16_compute": True,
        "phases": BLENDED,
        "datasets": {"more": "data"},
    },
    "Muon, `use_bf16`, the same phases": {
        "optimizer": "muon",
        "use_bf16": True,
        "phases": BLENDED,
        "datasets": {"more": "data"},
    },
    "experts (`use_moe`), AdamW, `use_bf16`": {"use_moe": True, "n_experts": 4, "top_k_mlp": 2, "use_bf16": True},
    "your own model with running statistics, AdamW": {
        "model": "own:build",
        "phases": [{"steps": 6, "batch_size": 16, "seq_len": 33}],
    },
    "adapters (`use_lora`) on another run": {"use_lora": True, "init_from": "runs/base"},
}
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "exactness.md"
TOPOLOGIES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 2)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    make_corpus(folder)
    return folder


def write_config(desk, **more):
    (desk / "own.py").write_text(OWN_MODEL)
    (desk / "tiny.yaml").write_text(yaml.safe_dump(CONFIG | more))


def trained(desk, processes, devices, name, *more):
    """The losses and the digest of every step, and the last weights, of a run, as one hash."""
    done = run(*launched(processes, devices, f"runs/{name}", *more), cwd=desk)
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [
        (step, row["train_loss"], row.get("val_loss"), row["digest"])
        for step, row in rows(desk / "runs" / name).items()
    ]
    weights = (desk / "runs" / name / "model_weights.msgpack").read_bytes()
    return hashlib.sha256(repr(logged).encode() + weights).hexdigest()


def test_a_run_of_two_processes_is_audited_on_four_devices_of_one(desk):
    write_config(desk, phases=CONFIG["phases"][:1])
    trained(desk, 2, 1, "two")
    audit = run("audit", "runs/two", "--devices", 4, cwd=desk)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "equal to the bit over 8 steps" in audit.stdout


def table_row(variant, hashes):
    """A line of the table in docs/concepts/exactness.md, of the hash of each topology."""
    topologies = ", ".join(f"{processes}x{devices}" for processes, devices in hashes)
    return f"| {variant} | {topologies} | {'one' if len(set(hashes.values())) == 1 else 'several'} |"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_hash(desk, variant):
    """The whole table of docs/concepts/exactness.md; `-s` shows the hashes."""
    write_config(desk)
    if "init_from" in VARIANTS[variant] and not (desk / "runs" / "base").exists():
        trained(desk, 1, 1, "base", "--max_steps", 3)
    write_config(desk, **VARIANTS[variant])
    number = list(VARIANTS).index(variant)
    hashes = {t: trained(desk, *t, f"{number}-{t[0]}x{t[1]}") for t in TOPOLOGIES}
    print(variant, {t: digest[:8] for t, digest in hashes.items()})
    assert table_row(variant, hashes) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"virtual_shards": 6}, "virtual_shards is 6: it must be a power of two"),
        ({"virtual_shards": 32}, "phase 1: batch_size is 16, which is not a multiple of virtual_shards (32)"),
        ({"fsdp": True}, "virtual_shards is 8 and fsdp is true"),
        ({"tensor_devices": 2}, "without tensor_devices and fsdp, or set virtual_shards to 0"),
        ({"virtual_shards": 2}, "virtual_shards is 2, which 4 device(s) do not divide"),
    ],
)
def test_what_is_refused(desk, more, words):
    write_config(desk, **more)
    done = run("train", "--config", "tiny.yaml", "--data_path", "data", "--run_dir", "runs/no", cwd=desk,
               XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in " ".join((done.stdout + done.stderr).split())
    assert not (desk / "runs" / "no").exists()
