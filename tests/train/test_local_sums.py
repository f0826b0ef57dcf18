"""What devices send with micro-batches: once a step what can be, and the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from models import transformer, with_numbers
from runs import Bigram
from states import init_state

from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, row_axes, row_shards, scalars_on
from roxxel_dist.data.packing import Packed
from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import auto_chunks, next_token_loss, token_losses
from roxxel_dist.train.step import local_sums
from roxxel_dist.train.step.local_sums import accumulation
from roxxel_dist.train.step.optimizer import InitialState, as_optimizer
from roxxel_dist.train.step.step import make_step

ROWS, LENGTH, COUNT = 32, 9, 4
SHAPE = {"dim": 16, "n_heads": 2, "num_blocks": 1, "vocab_size": 64, "max_context": 16}
TOKENS = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
PLACES = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), TOKENS.shape)
MICRO = np.arange(ROWS)[:, None] % COUNT
"""The micro-batch of each row."""
SEGMENTS = np.where(MICRO == 0, PLACES, np.where(MICRO == 1, PLACES // (2 + np.arange(ROWS)[:, None] % 3), 0))
"""In the first micro-batch no token counts, in the second fewer than in the others, and not as many in each row."""
PACKED = Packed(TOKENS, SEGMENTS, PLACES)
CHUNKS = {"loss_chunk": 8, "weight_tying": False}
EXPERTS = {"use_moe": True, "n_experts": 2, "top_k_mlp": 1}
PROGRAMS: dict[tuple, jax.stages.Compiled] = {}


@pytest.fixture(autouse=True)
def cut_small_arrays(monkeypatch):
    monkeypatch.setattr("roxxel_dist.cluster.parameter_sharding.FSDP_MIN_SIZE", 256)


def taken(mesh, *, fsdp=True, model=None, **fields):
    """(the split model, its state, the hparams) of a Transformer, or of what `model` makes."""
    made = transformer(**SHAPE | fields) if model is None else model()
    split, state, hparams = init_state(made, InitialState(as_optimizer(optax.sgd(1.0))), mesh, fsdp=fsdp)
    return split, state, hparams | scalars_on(mesh, {"spike_factor": 0.0})


def compiled(mesh, batch, *, count=COUNT, dtype=None, loss_fn=token_losses, **fields):
    """(the compiled step, its state, its arguments behind that). The same program for equal settings."""
    split, state, hparams = taken(mesh, **fields)
    batch = jax.device_put(batch, batch_sharding(mesh))
    key = mesh, jax.tree.structure(batch), count, dtype, loss_fn, tuple(fields.items())
    if key not in PROGRAMS:
        args = split, loss_fn, as_optimizer(optax.sgd(1.0)), state, batch_sharding(mesh)
        step = make_step(*args, grad_accum=count, compute_dtype=dtype)
        with jax.set_mesh(mesh):
            PROGRAMS[key] = step.lower(state, hparams, batch).compile()
    return PROGRAMS[key], state, (hparams, batch)


def measured(mesh, packed, **how):
    """(the gradient, by a step with a learning rate of 1; the metrics; the step)."""
    step, state, args = compiled(mesh, PACKED if packed else TOKENS, **how)
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = step(state, *args)
    return {name: before[name] - np.asarray(after.params[name]) for name in before}, jax.device_get(metrics), step


def own():
    return with_numbers(lambda: Bigram(ModelConfig(dim=16, vocab_size=64), nnx.Rngs(params=0)))


def collectives_in_loops(text):
    """The lines of a program that send more than 64 numbers within a loop."""
    lines = [line for line in text.splitlines() if "/while/" in line and "channel_id" in line]
    return [line for line in lines if np.prod([int(n) for n in line.split("[")[1].split("]")[0].split(",") if n]) > 64]


@pytest.mark.parametrize(
    ("axes", "packed", "how"),
    [
        pytest.param({"fsdp": 8}, False, {}, id="fsdp", marks=pytest.mark.long),
        pytest.param({"fsdp": 4}, True, {"z_loss": 1e-3}, id="copies of fsdp, packed"),
        pytest.param({"fsdp": 4}, True, {"loss_fn": next_token_loss}, id="one number", marks=pytest.mark.long),
        pytest.param({}, False, {"fsdp": False, "scan_layers": True}, id="data", marks=pytest.mark.long),
        pytest.param({"fsdp": 4, "tensor": 2}, False, CHUNKS, id="tensor", marks=pytest.mark.long),
        pytest.param({"fsdp": 8}, False, {"dtype": jnp.bfloat16}, id="bfloat16", marks=pytest.mark.long),
        pytest.param({"fsdp": 8}, True, {"model": own}, id="a model of one's own"),
        pytest.param({"fsdp": 8}, True, EXPERTS | {"dropout_rate": 0.2}, id="experts, dropout", marks=pytest.mark.long),
    ],
)
def test_numbers_are_those_of_one_device_and_no_loop_of_sums_sends(axes, packed, how):
    bound = 2e-2 if "dtype" in how else 2e-5
    grads, metrics, step = measured(make_mesh(**axes), packed, **how)
    alone, expected, _ = measured(make_mesh(1), packed, **how)
    norm = float(expected.scalars["grad_norm"])
    for name, grad in grads.items():
        assert np.linalg.norm(grad - alone[name]) < bound * norm, name
    assert metrics.scalars.keys() == expected.scalars.keys()
    for name, value in expected.scalars.items():
        np.testing.assert_allclose(metrics.scalars[name], value, rtol=bound, err_msg=name)
    if expected.row_loss is not None:
        np.testing.assert_allclose(metrics.row_loss, expected.row_loss, rtol=bound)
        np.testing.assert_equal(metrics.row_weight, expected.row_weight)
    if "tensor" not in axes and not how.keys() & {
        "use_moe",
        "dropout_rate",
        "model",
    }:  # along "tensor" the layers themselves send
        assert not collectives_in_loops(step.as_text())


def test_a_step_that_predicts_nothing_has_no_gradient():
    nothing = Packed(TOKENS, PLACES, PLACES)
    step, state, args = compiled(make_mesh(fsdp=4), nothing, z_loss=1e-3)
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = step(state, *args)
    assert float(metrics.scalars["loss"]) == 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after.params))


@pytest.mark.parametrize(
    "axes", [pytest.param({"fsdp": 8}, id="fsdp", marks=pytest.mark.long), pytest.param({"fsdp": 4}, id="copies")]
)
def test_micro_batches_send_what_a_whole_batch_sends(axes):
    def sent(count):
        step, *_ = compiled(make_mesh(**axes), PACKED, count=count, z_loss=1e-3)
        return sum(program_cost(step.as_text(), [0] * 8).collectives.values())

    assert sent(4) <= 1.1 * sent(1)


def told(mesh=None, loss_fn=token_losses, rows=ROWS, **fields):
    mesh = mesh or make_mesh(fsdp=8)
    split, state, hparams = taken(mesh, **fields)
    return accumulation(split, loss_fn, state, hparams, batch_sharding(mesh), (rows, LENGTH), COUNT, None)


class Inside(nnx.Module):
    """A part of a Transformer that is the user's own."""

    def __call__(self, x, *_):
        return x - x.mean(0)


def with_a_part():
    model = transformer(**SHAPE)
    model.norm = Inside()
    return model


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"loss_fn": lambda model, batch: 0.0}, "a loss of your own"),
        ({"model": own}, "a model of your own"),
        ({"model": with_a_part}, "a model of your own"),
        (EXPERTS, "the balance of experts"),
        ({"dropout_rate": 0.1}, "dropout"),
        ({"rows": 4 * COUNT}, "the devices do not divide its rows"),
    ],
    ids=["loss", "model", "part of a model", "experts", "dropout", "rows"],
)
def test_what_is_of_all_rows_is_not_summed_on_a_device(how, text):
    """The parameters are gathered once all the same."""
    found = told(**how)
    assert found.local is None
    assert text in found.text
    assert found.text.startswith("the parameters of fsdp are sent once a step")
    assert all(axis is None for sharding in found.whole.values() for axis in sharding.spec)


@pytest.mark.parametrize(("share", "local", "whole"), [(1, True, True), (3, False, True), (5, False, False)])
def test_memory_decides(monkeypatch, share, local, whole):
    """Copies of the parameters in float32, and as much for the sums."""
    mesh = make_mesh(fsdp=8)
    _, state, _ = taken(mesh)
    cut = [leaf for leaf in state.params.values() if any(leaf.sharding.spec)]
    assert cut
    more = sum(leaf.nbytes * 7 // 8 for leaf in cut)
    monkeypatch.setattr(local_sums, "UNKNOWN_MEMORY", 8 * more * 4 // share)
    found = told(mesh)
    assert (found.local is not None, found.whole is not None) == (local, whole)
    if not local:
        assert "may take at most an eighth of its memory" in found.text


@pytest.mark.parametrize("mesh", [{"n_devices": 1}, {"n_devices": 2, "tensor": 2}], ids=["one device", "tensor"])
def test_nothing_is_said_where_nothing_is_sent(mesh):
    assert told(make_mesh(**mesh)) == (None, None, "")


def test_without_fsdp_it_costs_no_memory(monkeypatch):
    monkeypatch.setattr(local_sums, "UNKNOWN_MEMORY", 0)
    found = told(fsdp=False, mesh=make_mesh())
    assert found.local is not None
    assert found.text == "the gradient of 4 micro-batches is summed on each device, and sent once"
    assert told(fsdp=False, mesh=make_mesh(), dropout_rate=0.1).whole is None


def test_a_program_of_the_rows_of_a_device_counts_those_alone():
    """Else its logits would be cut into too few chunks, and kernels would not find whole rows."""
    mesh, chunks = make_mesh(fsdp=4, tensor=2), []

    def within(tokens):
        inside = jax.sharding.get_abstract_mesh()
        assert (row_axes(inside), row_shards(inside)) == ((), 1)
        chunks.append(auto_chunks(*tokens.shape, 1 << 14))
        return tokens

    with jax.set_mesh(mesh):
        tokens = np.zeros((64, 1024), np.int32)
        outside = auto_chunks(*tokens.shape, 1 << 14)
        mapped = jax.shard_map(
            within, in_specs=P(row_axes(mesh)), out_specs=P(row_axes(mesh)), axis_names={"fsdp"}, check_vma=False
        )
        jax.jit(mapped).lower(tokens)
    assert chunks == [outside]
    assert outside > 1
