"""Runs with virtual shards: the same bits on any number of devices, in any number of processes."""

import hashlib

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
VARIANTS = {
    "adamw": {},
    "muon": {"optimizer": "muon", "grad_accum": 2, "phases": [{"steps": 8, "batch_size": 16, "seq_len": 33}]},
    "bfloat16": {"bf16_compute": True, "phases": BLEND + CONFIG["phases"][1:], "datasets": {"more": "data"}},
    "own": {"model": "own:build", "phases": [{"steps": 6, "batch_size": 16, "seq_len": 33}]},
    "experts": {"use_moe": True, "n_experts": 4, "top_k_mlp": 2, "use_bf16": True},
}
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
    """(the losses and the digest of every step, the hash of the last weights) of a run."""
    done = run(*launched(processes, devices, f"runs/{name}", *more), cwd=desk)
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [
        (step, row["train_loss"], row.get("val_loss"), row["digest"])
        for step, row in rows(desk / "runs" / name).items()
    ]
    weights = desk / "runs" / name / "model_weights.msgpack"
    return logged, hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None


def test_a_run_that_changes_its_devices_has_the_bits_of_one_that_does_not_and_is_audited_on_others(desk):
    write_config(desk)
    whole = trained(desk, 2, 2, "whole")
    trained(desk, 1, 1, "parts", "--max_steps", 6)
    assert trained(desk, 1, 4, "parts", "--max_steps", 12, "--resume") == whole
    audit = run("audit", "runs/parts", "--devices", 2, cwd=desk)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "equal to the bit over 12 steps" in audit.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_hash(desk, variant):
    write_config(desk, **VARIANTS[variant])
    results = {t: trained(desk, *t, f"{variant}-{t[0]}x{t[1]}") for t in TOPOLOGIES}
    assert {t: result == results[1, 1] for t, result in results.items()} == dict.fromkeys(TOPOLOGIES, True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"virtual_shards": 6}, "virtual_shards is 6: it must be a power of two"),
        ({"virtual_shards": 32}, "phase 1: batch_size is 16, which does not divide by virtual_shards (32)"),
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
