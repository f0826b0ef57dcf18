"""Everything that changes a step or its state: with virtual shards the bits are those of one device, in slices too."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from roxxel_dist import Config, Experiment, Roxxel
from roxxel_dist.audit.record import RunRecord

FIELDS = {
    "dim": 192, "num_blocks": 1, "head_size": 96, "max_context": 32, "dropout_rate": 0.1, "lr": 0.01,
    "virtual_shards": 8, "log_every": 1, "eval_every": 2, "eval_iters": 1, "checkpoint_every": 3, "wandb": "off",
    "memory_checkpoint_every": 0, "phases": [{"steps": 3, "batch_size": 16, "seq_len": 17}],
}  # fmt: skip
LORA = {"use_lora": True, "lora_rank": 4, "lora_targets": "all"}
SKIP = {"on_bad_step": "skip", "spike_factor": 1.0001}
PACKED = [{"steps": 3, "batch_size": 16, "seq_len": 17, "packing": "documents"}]
CASES = {
    "tied embeddings are cut, clipped": {"grad_clip": 0.01, "vocab_size": 384},
    "adapters": LORA,
    "adapters, accumulated": {**LORA, "grad_accum": 2},
    "average": {"ema": 0.9},
    "schedule-free": {"optimizer": "schedule_free_adamw", "lr_schedule": "constant", "warmup_steps": 1},
    "experts": {"use_moe": True, "n_experts": 4, "top_k_mlp": 2},
    "experts with a capacity, accumulated": {
        "use_moe": True, "n_experts": 4, "top_k_mlp": 2, "expert_capacity_factor": 0.75, "grad_accum": 2,
    },
    "experts, bf16_compute, Muon": {
        "use_moe": True, "n_experts": 4, "top_k_mlp": 2, "bf16_compute": True, "optimizer": "muon",
    },
    "own model with running statistics": {"model": f"{__name__}:build"},
    "own model, accumulated": {"model": f"{__name__}:build", "grad_accum": 2},
    "bf16_compute": {"bf16_compute": True},
    "use_bf16": {"use_bf16": True},
    "use_bf16, Adafactor": {"use_bf16": True, "optimizer": "adafactor"},
    "bad steps skipped": {**SKIP, "grad_accum": 2},
    "bad steps skipped, average, Lion": {**SKIP, "ema": 0.9, "optimizer": "lion"},
    "packed documents": {"phases": PACKED},
    "scanned layers, recomputed": {"scan_layers": True, "num_blocks": 2, "gradient_checkpointing": True},
    "mup": {"parametrization": "mup", "base_dim": 96},
    "loss in chunks, untied": {"loss_chunk": 8, "weight_tying": False},
    "matrices that 7 devices cut and 8 do not": {"dim": 94, "head_size": 94, "hidden_dim": 1001, "vocab_size": 1001},
    "8 rows, then 1": {
        "phases": [{"steps": 2, "batch_size": 8, "seq_len": 17}, {"steps": 1, "batch_size": 1, "seq_len": 33}],
    },
}  # fmt: skip
LAYOUTS = {
    "one device": {"n_devices": 1},
    "copies": {"n_devices": 8},
    "slices": {"n_devices": 8, "fsdp": True},
    "copies of slices": {"n_devices": 6, "fsdp": True, "fsdp_devices": 3},
    "slices of three": {"n_devices": 3, "fsdp": True},
}
SEVEN = {"slices of seven": {"n_devices": 7, "fsdp": True}}
LAYOUTS_OF = {
    "matrices that 7 devices cut and 8 do not": {"one device": LAYOUTS["one device"], **SEVEN},
}
"""Of these cases not all."""


class Net(nnx.Module):
    """A model with running statistics, one matrix of which is cut."""

    def __init__(self, size, rngs):
        self.embed = nnx.Embed(size, 192, rngs=rngs)
        self.wide = nnx.Linear(192, 384, rngs=rngs)
        self.norm = nnx.BatchNorm(384, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(384, size, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.drop(self.norm(self.wide(jnp.cumsum(self.embed(tokens), 1)))))


def build(config, rngs):
    return Net(config.vocab_size, rngs)


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """The size that a run with 8 shards has; that of this process is another one, and the same for all runs here."""
    jax.devices()
    monkeypatch.setenv("PJRT_NPROC", "16")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "one.rox"
    rng = np.random.default_rng(1)
    with Roxxel(path) as file:
        file.write([rng.integers(1, 60, 400).astype(np.uint8) for _ in range(40)], vocab_size=60)
    return path


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    """The run that adapters stand on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_NPROC", "16")
        run = tmp_path_factory.mktemp("base") / "run"
        Experiment(Config(**FIELDS, n_devices=2, fsdp=True, max_steps=1)).fit(data, run)
    return str(run)


@pytest.mark.long
def test_a_loss_is_no_sum_over_micro_batches_or_devices(data, tmp_path):
    """Of the first step, before any update: a log that forgets to divide shows another number."""
    losses = set()
    for number, more in enumerate(({}, {"grad_accum": 2}, {"n_devices": 8, "fsdp": True}, {"virtual_shards": 0})):
        run = tmp_path / str(number)
        fields = FIELDS | {"dropout_rate": 0.0, "max_steps": 1, "n_devices": 1} | more
        Experiment(Config(**fields)).fit(data, run)
        losses.add(round(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["train_loss"], 4))
    assert len(losses) == 1, losses


def hash_of(run):
    """Of all numbers of the log and of all bytes of the weights file."""
    names = ("step", "train_loss", "train_bal", "expert_dropped", "val_loss", "grad_norm", "update_norm", "digest")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = (run / "model_weights.msgpack").read_bytes()
    return hashlib.sha256(repr([[row.get(name) for name in names] for row in rows]).encode() + weights).hexdigest()[:12]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_one_device(name, data, base, tmp_path):
    fields = FIELDS | CASES[name] | ({"init_from": base} if "use_lora" in CASES[name] else {})
    hashes, cut = {}, {}
    for layout, devices in LAYOUTS_OF.get(name, LAYOUTS).items():
        run = tmp_path / layout.replace(" ", "-")
        Experiment(Config(**fields, **devices)).fit(data, run)
        hashes[layout] = hash_of(run)
        blocks = RunRecord.read(run).checkpoint(3)[1].blocks
        cut[layout] = any(len(each) > 1 for each in blocks.values())
    assert len(set(hashes.values())) == 1, hashes
    if "use_lora" not in fields:  # the weights that adapters stand on are cut, and no part of the checkpoint
        assert [layout for layout in cut if cut[layout]] == [layout for layout in hashes if "slices" in layout], cut
