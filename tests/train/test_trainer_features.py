"""What the loop compiles and fetches, and the kinds of models, losses and precisions it takes."""

import sys
import threading
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.array import ArrayImpl
from jax.sharding import PartitionSpec as P
from models import with_numbers
from runs import PHASES, losses, make, model, rows, told, train

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.loss import next_token_loss, token_losses

BACK_AND_FORTH = [Phase(3, 8, 17), Phase(3, 8, 33), Phase(3, 8, 17), Phase(3, 8, 33)]
BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled(fresh):
    """Counts what XLA compiles, by the name of the jitted function; a program from jax's cache counts too."""
    counts: Counter[str] = Counter()

    def listen(event, seconds, **more):
        if event == BACKEND_COMPILE:
            counts[more.get("fun_name", "")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


def test_each_shape_is_compiled_once(corpus, tmp_path, compiled):
    """Four phases of two shapes, cut in the second one: each process compiles two steps and two evaluations."""
    for part, (cut, start) in enumerate([({"max_steps": 5}, 0), ({}, 5)], start=1):
        assert train(corpus, tmp_path, BACK_AND_FORTH, **cut).start_step == start
        found = {name: count for name, count in compiled.items() if name in ("jit(step)", "jit(evaluate)")}
        assert found == {"jit(step)": 2 * part, "jit(evaluate)": 2 * part}, compiled
    assert len(losses(tmp_path)) == 12


def test_to_make_a_trainer_compiles_opens_and_starts_nothing(corpus, tmp_path, compiled):
    threads = {*threading.enumerate()}
    options = {"mesh": make_mesh(2), "val_fraction": 0.1, "fsdp": True}
    Trainer(model, optax.adam(3e-2), Curriculum(corpus, PHASES), next_token_loss, tmp_path / "run", **options)
    assert not compiled
    assert {*threading.enumerate()} <= threads
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh")
def test_the_next_phase_is_compiled_before_its_boundary(corpus, tmp_path):
    """Where the phase is long enough: here a validation in its midst waits until the compiler has nothing to do."""
    made, waited = None, []

    def until_compiled(state):
        end = time.monotonic() + 120
        compiler = made.loop.held.compiler
        while not all(compiler.is_ready(key) for key in list(compiler._programs)):
            assert time.monotonic() < end
            time.sleep(0.01)
        waited.append((int(state.step), len(compiler.seconds)))

    made = make(corpus, tmp_path, [Phase(4, 8, 17), Phase(4, 8, 33)], eval_fn=until_compiled, eval_every=3)
    made.run()
    made.close()
    # After the first step: the running digest, a step and an evaluation of each shape.
    assert waited[:2] == [(1, 5), (3, 5)]
    assert len(made.loop.held.compiler.seconds) == 5
    *before, after = told(tmp_path).split("phase 2/2 from step 5")
    assert len(before) == 1
    assert "for this phase's program to be compiled" not in after


def test_numbers_are_fetched_once_a_log_interval(corpus, tmp_path, monkeypatch):
    outside, inside, value = [], [], ArrayImpl._value

    def counting(array):
        if threading.current_thread() is threading.main_thread() and array._npy_value is None:
            names, frame = [], sys._getframe(1)
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            (inside if "fetch" in names else outside).append(names)
        return value.fget(array)

    made = make(corpus, tmp_path, log_every=5, eval_every=100, checkpoint_every=3, val_fraction=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ArrayImpl, "_value", property(counting))
        made.run()
        fetched = len(inside)
        assert float(made.state.params["norm.scale"].sum()) != 0
        assert outside, "the patch does not see conversions"
    made.close()
    assert len(outside) == 1, outside
    assert [row["step"] for row in rows(tmp_path)] == [1, 5, 10, 13]
    saves = 4  # of steps 3, 6, 9, 12: the health is looked at before, for it is not logged then
    assert made.fetches == 4 + saves
    assert fetched > made.fetches


def test_no_save_no_further_fetch(corpus, tmp_path):
    made = train(corpus, tmp_path, log_every=5, eval_every=100, checkpoint_every=100, val_fraction=0.0)
    assert made.fetches == len(rows(tmp_path)) == 4


def test_a_module_trains_as_a_callable_does(corpus, finished_run, tmp_path):
    train(corpus, tmp_path, model=nnx.jit(model)(), max_steps=6)
    assert [x for _, x, _ in losses(tmp_path)] == pytest.approx([x for _, x, _ in losses(finished_run)[:6]], rel=1e-4)


class Partitioned(nnx.Module):
    """Asks for its own place on the mesh."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(500, 16, rngs=rngs)
        self.head = nnx.Linear(16, 504, kernel_init=nnx.with_partitioning(normal, (None, "data")), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.embed(tokens))


def test_what_a_module_asks_for_is_honoured(corpus, tmp_path):
    train(corpus, tmp_path, PHASES[:1], model=Partitioned, max_steps=4)
    made = train(corpus, tmp_path, PHASES[:1], model=Partitioned)
    assert made.start_step == 4
    assert made.state.params["head.kernel"].sharding.spec == P(None, "data")
    assert made.state.optimizer[0].mu["head.kernel"].sharding.spec == P(None, "data")
    assert made.state.params["embed.embedding"].is_fully_replicated
    assert losses(tmp_path)[-1][1] < losses(tmp_path)[0][1]


class Wide(nnx.Module):
    """One matrix, large enough to be cut."""

    def __init__(self) -> None:
        self.embedding = nnx.Embed(512, 128, rngs=nnx.Rngs(0))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embedding.attend(self.embedding(tokens))


def test_parameters_cut_over_eight_devices_go_on_over_four(corpus, tmp_path):
    def run(path, devices, **more):
        options = {"model": with_numbers(Wide), "mesh": make_mesh(devices), "optimizer": optax.adam(1e-3)}
        return train(corpus, tmp_path / path, [Phase(8, 8, 17)], **options, **more)

    first = run("cut", 8, fsdp=True, max_steps=5)
    assert first.state.params["embedding.embedding"].addressable_shards[0].data.shape == (64, 128)
    assert first.state.flops_per_token()(16) == 6 * 512 * 128, "of all parts; this module does not say it itself"
    second = run("cut", 4, fsdp=True)
    assert second.start_step == 5
    embedding = second.state.params["embedding.embedding"]
    assert [shard.data.shape for shard in embedding.addressable_shards] == [(128, 128)] * 4
    assert second.state.optimizer[0].nu["embedding.embedding"].sharding == embedding.sharding
    run("whole", 1)
    cut = {step: (loss, val) for step, loss, val in losses(tmp_path / "cut")}
    for step, loss, val in losses(tmp_path / "whole"):
        assert cut[step][0] == pytest.approx(loss, rel=1e-4)
        assert val is None or cut[step][1] == pytest.approx(val, rel=1e-4)


def with_aux(model, batch):
    scalars = {"largest": batch.max(), "nested": jnp.float32(2.5), "balance_loss": jnp.float32(0.25)}
    return next_token_loss(model, batch), {**scalars, "rows": batch[:, 0]}


def as_dict(model, batch):
    scalars = {"largest": batch.max(), "nested": jnp.float32(2.5), "balance_loss": jnp.float32(0.25)}
    return {"loss": next_token_loss(model, batch), **scalars}


@pytest.mark.parametrize(("loss_fn", "accumulate"), [(with_aux, 2), pytest.param(as_dict, 1, marks=pytest.mark.long)])
def test_every_scalar_of_a_loss_is_logged(corpus, tmp_path, loss_fn, accumulate):
    """Accumulated over micro-batches of 8 rows, for 8 devices."""
    options = {"loss_fn": loss_fn, "grad_accum_steps": accumulate, "mesh": make_mesh(8)}
    made = train(corpus, tmp_path, [Phase(3, 16, 17)], **options)
    assert len(rows(tmp_path)) == 3
    for row in rows(tmp_path):
        offsets = made.plan.rows(row["step"] - 1).offset
        largest = [corpus.read(offsets[i::accumulate], 17, np.int32).max() for i in range(accumulate)]
        assert row["largest"] == np.mean(largest)
        assert row["nested"] == 2.5
        assert {"grad_norm", "update_norm"} <= set(row)
        assert row["train_bal"] == 0.25
        assert not {"rows", "balance_loss"} & set(row)
    last = rows(tmp_path)[-1]
    assert last["val_bal"] == 0.25
    assert f"(Bal: 0.2500) | Val: {last['val_loss']:.4f} (Bal: 0.2500)" in told(tmp_path)


def test_the_loss_of_each_data_set_in_a_blend_by_row(corpus, tmp_path):
    other = Roxxel(tmp_path / "other_*.rox")
    other.write((np.full(300, 7, np.uint16) for _ in range(60)), vocab_size=500)  # learned at once
    phases = [Phase(12, 8, 17, weights={"self": 1, "other": 1}, blend="row")]
    curriculum = Curriculum(corpus, phases, {"other": other})
    with other:
        options = {"mesh": make_mesh(2), "log_every": 1, "val_fraction": 0.0}
        made = Trainer(model, optax.adam(3e-2), curriculum, token_losses, tmp_path / "run", **options)
        made.run()
        made.close()
    found = rows(tmp_path / "run")
    assert all({"loss/self", "loss/other"} <= set(row) for row in found)
    assert found[-1]["loss/other"] < 3 < found[-1]["loss/self"]
    for row in found:
        share = (np.array(made.plan.rows(row["step"] - 1).dataset) == 0).mean()
        assert row["train_loss"] == pytest.approx(share * row["loss/self"] + (1 - share) * row["loss/other"], rel=1e-5)


@pytest.mark.parametrize(
    ("option", "kept", "computed"),
    [
        pytest.param("use_bf16", jnp.bfloat16, jnp.bfloat16, marks=pytest.mark.long),
        ("bf16_compute", jnp.float32, jnp.bfloat16),
    ],
)
def test_precision(corpus, tmp_path, option, kept, computed):
    seen = set()

    def loss_fn(model, batch):
        seen.add(model.norm.scale[...].dtype)
        return next_token_loss(model, batch)

    train(corpus, tmp_path, PHASES[:1], loss_fn=loss_fn, max_steps=3, **{option: True})
    made = train(corpus, tmp_path, PHASES[:1], loss_fn=loss_fn, **{option: True})
    assert made.start_step == 3
    assert {leaf.dtype for leaf in made.state.params.values()} == {jnp.dtype(kept)}
    assert {leaf.dtype for leaf in jax.tree.leaves(made.state.optimizer[0].mu)} == {jnp.dtype(kept)}
    assert seen == {jnp.dtype(computed)}
    assert losses(tmp_path)[-1][1] < losses(tmp_path)[0][1]
