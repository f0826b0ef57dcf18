"""Runs with virtual shards on some of the devices of one process; in several processes: tests/multiprocess."""

import hashlib
import json

import exact_rows
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_rows import hash_of as hash_of_steps
from exact_rows import trained
from flax import nnx
from models import transformer
from runs import module

from roxxel_dist import Config, Experiment, Roxxel
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.exact.compiled_step import SumTree, subtrees, total_of
from roxxel_dist.train.exact.gradient import check_statistics, pack, unpack
from roxxel_dist.train.exact.layout import check_virtual_shards
from roxxel_dist.train.step.optimizer import NamedOptimizer, as_optimizer

SMALL = {
    "dim": 16, "num_blocks": 1, "n_heads": 2, "max_context": 32, "dropout_rate": 0.1, "lr": 0.01, "virtual_shards": 8,
    "log_every": 1, "eval_every": 3, "eval_iters": 2, "checkpoint_every": 2, "memory_checkpoint_every": 0,
    "wandb": "off",
}  # fmt: skip
PHASE = [{"steps": 6, "batch_size": 16, "seq_len": 17, "weights": {"self": 0.5, "more": 0.5}, "blend": "row"}]


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """The size that a run with 8 shards has; that of this process is another one, and the same for all runs here."""
    jax.devices()  # which are there before a run would choose another size
    monkeypatch.setenv("PJRT_NPROC", "16")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(1)
    for name in ("one", "more"):
        with Roxxel(folder / f"{name}.rox") as file:
            file.write([rng.integers(1, 60, 400).astype(np.uint8) for _ in range(40)], vocab_size=60)
    return folder


def hash_of(run):
    names = ("step", "train_loss", "val_loss", "grad_norm", "update_norm", "digest")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = (run / "model_weights.msgpack").read_bytes()
    return hashlib.sha256(repr([[row.get(name) for name in names] for row in rows]).encode() + weights).hexdigest()


@pytest.mark.long
def test_experts_muon_bf16_and_steps_left_out_on_1_device_and_on_2_and_then_1(data, tmp_path):
    fields = SMALL | {
        "phases": PHASE, "datasets": {"more": str(data / "more.rox")}, "optimizer": "muon", "bf16_compute": True,
        "use_moe": True, "n_experts": 4, "top_k_mlp": 2, "on_bad_step": "skip", "spike_factor": 1.0001,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Experiment(Config(**fields, n_devices=1)).fit(data / "one.rox", whole)
    Experiment(Config(**fields, n_devices=2, max_steps=3)).fit(data / "one.rox", parts)
    Experiment(Config(**fields, n_devices=1)).fit(run_dir=parts, resume=True)
    assert hash_of(parts) == hash_of(whole)


class Net(nnx.Module):
    """A model with running statistics."""

    def __init__(self, size, rngs):
        self.embed = nnx.Embed(size, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, size, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.norm(self.drop(jnp.cumsum(self.embed(tokens), 1))))


def build(config, rngs):
    return Net(config.vocab_size, rngs)


def loss(model, batch):
    """Two scalars beside it, whose names come before and after those of the built-in numbers."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    mean = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return {"loss": mean, "accuracy": (logits.argmax(-1) == targets).mean(), "twice": 2 * mean}


@pytest.mark.long
def test_an_own_model_with_micro_batches_on_1_and_2_devices(data, tmp_path):
    fields = SMALL | {
        "model": f"{__name__}:build", "phases": [{"steps": 3, "batch_size": 16, "seq_len": 17}], "grad_accum": 2,
        "loss": f"{__name__}:loss",
    }  # fmt: skip
    scalars = []
    for count in (1, 2):
        run = Experiment(Config(**fields, n_devices=count)).fit(data / "one.rox", tmp_path / f"on-{count}")
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[2])
        assert row["val_twice"] == pytest.approx(2 * row["val_loss"], rel=1e-6)
        assert 0 <= row["val_accuracy"] <= 1
        scalars.append([row[name] for name in ("val_twice", "val_accuracy", "twice", "accuracy")])
    assert scalars[0] == scalars[1]
    assert hash_of(tmp_path / "on-1") == hash_of(tmp_path / "on-2")


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "counts"), [("muon", (1, 3, 7)), ("adamw", (1, 3, 7))])
def test_any_number_of_devices(data, tmp_path, optimizer, counts):
    fields = SMALL | {
        "phases": [{"steps": 2, "batch_size": 16, "seq_len": 17}], "optimizer": optimizer, "grad_accum": 2,
        "grad_clip": 0.1, "ema": 0.9,
    }  # fmt: skip
    hashes = set()
    for count in counts:
        Experiment(Config(**fields, n_devices=count)).fit(data / "one.rox", tmp_path / str(count))
        hashes.add(hash_of(tmp_path / str(count)))
    assert len(hashes) == 1


WIDE = {"dim": 192, "head_size": 96, "num_blocks": 1}  # of which 2, 3 and 4 devices cut matrices
WITH_FSDP = {
    "muon": {"optimizer": "muon"},
    "adamw": {},
    "adafactor": {"optimizer": "adafactor"},
    "lion": {"optimizer": "lion"},
    "schedule-free": {"optimizer": "schedule_free_adamw", "lr_schedule": "constant"},
    "own": optax.chain(optax.centralize(), optax.adam(0.01)),
}


def bigrams():
    """A model whose matrices are cut too, and that compiles soon."""
    return module(dim=192, vocab_size=384)


def attending():
    return transformer(**exact_rows.SMALL | WIDE)


QUICK = ("adamw", (8, 9), 2, [(1, 0), (3, 3)])
MORE = [
    QUICK,
    ("muon", (4, 9), 1, [(1, 0), (3, 3)]),
    ("adamw", (1, 17), 1, [(1, 0), (2, 2)]),
    *(
        (name, *case)
        for name in WITH_FSDP
        for case in (((8, 17), 2, [(2, 0), (3, 3), (4, 2)]), ((1, 33), 1, [(2, 0), (4, 2)]))
    ),
]


@pytest.mark.parametrize(
    ("name", "shape", "grad_accum", "layouts", "build"),
    [(*QUICK, bigrams), *(pytest.param(*case, attending, marks=pytest.mark.long) for case in MORE)],
)
def test_slices_of_the_state_have_the_bits_of_the_whole(name, shape, grad_accum, layouts, build):
    """Of matrices large enough to be cut; in rows, and in one that is cut where the devices divide its shards."""
    kind = WITH_FSDP[name]
    if isinstance(kind, dict):
        kind = NamedOptimizer(OptimizerConfig(lr=1e-2, warmup_steps=0, grad_clip=0.1, **kind))
    options = {
        "optimizer": as_optimizer(kind), "steps": 2, "average": name == "adamw", "skip_bad": name == "lion",
        "grad_accum": grad_accum, "shards": 4,
    }  # fmt: skip
    model = build()
    hashes = {
        layout: hash_of_steps(trained(layout[0], WIDE, [shape], fsdp=layout[1], model=model, **options))
        for layout in layouts
    }
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.long
def test_a_resume_goes_from_slices_to_the_whole_and_to_other_slices(data, tmp_path):
    fields = SMALL | {
        "dim": 192,
        "phases": [{"steps": 6, "batch_size": 8, "seq_len": 17}, {"steps": 3, "batch_size": 1, "seq_len": 33}],
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Experiment(Config(**fields, n_devices=1)).fit(data / "one.rox", whole)
    Experiment(Config(**fields, n_devices=4, fsdp=True, max_steps=3)).fit(data / "one.rox", parts)
    Experiment(Config(**fields, n_devices=1, max_steps=6)).fit(run_dir=parts, resume=True)
    Experiment(Config(**fields, n_devices=8, fsdp=True, fsdp_devices=4)).fit(run_dir=parts, resume=True)
    assert hash_of(parts) == hash_of(whole)


def test_any_devices_add_one_tree():
    """Every way to give out 8 and 16 shards: the sums of subtrees, and the rest, are the tree of one device."""
    for count in (1, 2, 8, 16):
        whole = SumTree(lambda left, right: f"({left}{right})")
        for shard in range(count):
            whole.put(chr(97 + shard))
        total = whole.total()
        for devices in range(1, count + 1):
            known = {}
            for device in range(devices):
                own = range(count * device // devices, count * (device + 1) // devices)
                tree = SumTree(lambda left, right: f"({left}{right})", own.start)
                for shard in own:
                    tree.put(chr(97 + shard))
                known |= zip(subtrees(own), tree.sums(), strict=True)
            joined = total_of({key: Sum(text) for key, text in known.items()}, 0, count)
            assert joined == total


class Sum(str):
    """Shows how it was added."""

    __slots__ = ()

    def __add__(self, other):
        return Sum(f"({self}{other})")


def test_the_pool_must_be_that_of_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "8")
    with pytest.raises(UserError, match="virtual_shards is 8 and needs a thread pool of 16 in XLA"):
        Experiment(Config(**SMALL)).fit(data / "one.rox", tmp_path / "run")


def shape(batch_size):
    return Shape(steps=1, batch_size=batch_size, seq_len=9, weights=(("self", 1.0),))


@pytest.mark.parametrize(
    ("count", "batch_size", "grad_accum", "mesh", "words"),
    [
        (
            8,
            16,
            4,
            {"n_devices": 2},
            r"batch_size is 16, .* virtual_shards \(8\) x grad_accum \(4\): .* multiple of 32",
        ),
        (2, 16, 1, {"n_devices": 4}, "virtual_shards is 2, and there are 4 devices"),
        (8, 16, 1, {"n_devices": 4, "tensor": 2}, "devices that share a product add it in another order"),
    ],
)
def test_what_does_not_divide_is_refused(count, batch_size, grad_accum, mesh, words):
    with pytest.raises(ValueError, match=words):
        check_virtual_shards(count, [shape(8 * count * grad_accum), shape(batch_size)], grad_accum, make_mesh(**mesh))


def test_what_has_no_mean_is_refused():
    check_statistics({"mean": np.zeros(2, jnp.bfloat16)})
    with pytest.raises(ValueError, match="the model changes 'calls' of int32"):
        check_statistics({"calls": np.zeros(2, np.int32)})


def test_a_packed_tree_is_the_tree_in_the_types_of_sums():
    tree = {"a": np.ones((2, 3), jnp.bfloat16), "b": np.arange(4, dtype=np.float32), "c": [np.float32(5)]}
    packed = jax.jit(pack)(tree)
    assert {name: array.shape for name, array in packed.items()} == {"float32": (1, 11)}
    again = jax.jit(unpack)(packed, tree)
    assert again["a"].dtype == jnp.float32
    assert [again["a"].tolist(), again["b"].tolist(), float(again["c"][0])] == [[[1] * 3] * 2, [0, 1, 2, 3], 5]
