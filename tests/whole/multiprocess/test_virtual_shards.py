"""Runs with virtual shards: the same bits on any number of devices, in any number of processes."""

import hashlib
import os
import signal
from functools import cache
from pathlib import Path

import pytest
import yaml
from commands import TINY, launched, make_corpus, ranks_of, rows, run, start, wait_for

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
LONG = [
    {"steps": 4, "batch_size": 8, "seq_len": 33},
    {"steps": 2, "batch_size": 2, "seq_len": 65},
    {"steps": 6, "batch_size": 1, "seq_len": 257},
]
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
    "8 rows, then 2 rows and 1 row, each cut along its tokens, AdamW, `bf16_compute`": {
        "bf16_compute": True,
        "phases": LONG,
        "max_context": 256,
    },
}
# Each number of devices up to 8 divides the largest dimension of some of its matrices that are large enough to be cut.
WIDE = {"dim": 96, "hidden_dim": 840, "phases": [{"steps": 4, "batch_size": 16, "seq_len": 33}]}
ANY = [(1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (3, 2), (1, 7), (2, 4), (4, 2)]
TABLE = {
    "AdamW, `grad_accum: 2`, `ema`": ({"grad_accum": 2, "ema": 0.9}, ANY),
    "Muon": ({"optimizer": "muon"}, ANY),
    "8 rows, then 2 rows and 1 row": ({"phases": LONG, "max_context": 256}, ANY),
}
PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "exactness.md"
TOPOLOGIES = [(1, 1), (1, 8), (2, 2), (4, 2)]
LAYOUTS = ("", "fsdp", "copies")


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
    done = run(*launched(processes, devices, f"runs/{name}", *more), cwd=desk, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [
        (step, row["train_loss"], row.get("val_loss"), row["digest"])
        for step, row in rows(desk / "runs" / name).items()
    ]
    weights = (desk / "runs" / name / "model_weights.msgpack").read_bytes()
    return hashlib.sha256(repr(logged).encode() + weights).hexdigest()


@pytest.mark.cluster
def test_a_run_of_two_processes_is_audited_on_three_devices_of_one(desk):
    write_config(desk, phases=[*CONFIG["phases"][:1], {"steps": 2, "batch_size": 1, "seq_len": 65}])
    trained(desk, 2, 1, "two")
    audit = run("audit", "runs/two", "--devices", 3, cwd=desk)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "equal to the bit over 10 steps" in audit.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_hash(desk, variant):
    """What test_exact_layouts compares in one process, in several; `-s` shows the hashes."""
    write_config(desk)
    if "init_from" in VARIANTS[variant] and not (desk / "runs" / "base").exists():
        trained(desk, 1, 1, "base", "--max_steps", 3)
    write_config(desk, **VARIANTS[variant])
    number = list(VARIANTS).index(variant)
    hashes = {t: trained(desk, *t, f"{number}-{t[0]}x{t[1]}") for t in TOPOLOGIES}
    print(variant, {t: digest[:8] for t, digest in hashes.items()})
    assert len(set(hashes.values())) == 1, hashes


@pytest.fixture(scope="module")
def of_one_device(desk):
    """The hash of a run of `TABLE` on one device, which is made once."""

    @cache
    def hash_of(variant):
        write_config(desk, **WIDE | TABLE[variant][0])
        return trained(desk, 1, 1, f"wide-{list(TABLE).index(variant)}")

    return hash_of


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", TABLE)
def test_one_hash_with_slices_of_the_state(desk, of_one_device, variant, layout):
    """The list of docs/concepts/exactness.md: on each number of devices, without fsdp, with it, and where processes x
    devices allow for it, of two copies."""
    hashes = {(1, 1): of_one_device(variant)}
    fields, topologies = TABLE[variant]
    write_config(desk, **WIDE | fields)
    for processes, devices in topologies[1:]:
        count = processes * devices
        if layout == "copies" and (count <= 2 or count % 2):
            continue
        words = ("--fsdp", True) if layout else ()
        words += ("--fsdp_devices", count // 2) if layout == "copies" else ()
        run_name = f"wide-{list(TABLE).index(variant)}-{processes}x{devices}-{layout}"
        hashes[processes, devices] = trained(desk, processes, devices, run_name, *words)
        print(variant, processes, devices, layout, hashes[processes, devices][:8], flush=True)
    assert len(set(hashes.values())) == 1, hashes
    page = PAGE.read_text(encoding="utf-8")
    assert ", ".join(f"{processes}x{devices}" for processes, devices in topologies).replace(", 4x2", " and 4x2") in page
    assert f"- {variant}" in page.splitlines()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("shards", "layouts"), [(8, [(2, 2), (1, 8), (1, 1)]), (0, [(2, 2), (1, 8), (1, 2)])])
def test_killed_within_the_long_phase_and_resumed_on_other_devices(desk, shards, layouts):
    """With virtual shards it is the same run to the bit, without them up to rounding."""
    phases = [*LONG[:2], LONG[2] | {"steps": 60}]
    write_config(desk, virtual_shards=shards, phases=phases, max_context=256, checkpoint_every=2)
    torn, told = desk / "runs" / f"torn-{shards}", desk / "started.log"
    trained(desk, *layouts[0], f"whole-{shards}")
    for number, (layout, step) in enumerate(zip(layouts, (14, 34, None), strict=True)):
        process = start(*launched(*layout, f"runs/torn-{shards}", "--resume"), cwd=desk)
        try:
            if step is not None:
                wait_for(lambda step=step: max(rows(torn), default=0) >= step, 600, f"step {step}")
                for pid in ranks_of(process).values():
                    os.kill(pid, signal.SIGKILL)
                process.wait(120)
                assert max(rows(torn)) < 66, "it was not killed in time"
            else:
                assert process.wait(600) == 0, told.read_text()
        finally:
            process.kill()
            process.wait()
        assert told.read_text().count("resuming after step") >= number
    whole, again = (rows(desk / "runs" / f"{name}-{shards}") for name in ("whole", "torn"))
    if shards:
        assert [row["train_loss"] for row in again.values()] == [row["train_loss"] for row in whole.values()]
        weights = [(desk / "runs" / f"{name}-8" / "model_weights.msgpack").read_bytes() for name in ("whole", "torn")]
        assert weights[0] == weights[1]
    else:
        for step, row in whole.items():
            assert again[step]["train_loss"] == pytest.approx(row["train_loss"], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"virtual_shards": 6}, "virtual_shards is 6: it must be a power of two"),
        ({"virtual_shards": 32, "grad_accum": 2}, "cuts each row into 2 shards, which are computed at once"),
        ({"virtual_shards": 32, "model": "own:build"}, "That needs the built-in model and its loss"),
        ({"tensor_devices": 2}, "Leave tensor_devices and meshes of your own with several axes out"),
        ({"virtual_shards": 2}, "virtual_shards is 2, and there are 4 devices, of which each has one shard"),
    ],
)
def test_what_is_refused(desk, more, words):
    write_config(desk, **more)
    done = run("train", "--config", "tiny.yaml", "--data_path", "data", "--run_dir", "runs/no", cwd=desk,
               XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in " ".join((done.stdout + done.stderr).split())
    assert not (desk / "runs" / "no").exists()
