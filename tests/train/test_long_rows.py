"""A phase whose rows are fewer than the devices: each device computes a part of each row, and the numbers stay."""

import math
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from models import transformer, with_numbers
from own_model import Attending
from states import init_state

from roxxel_dist.cluster.mesh import batch_sharding, fit_sharding, make_mesh, scalars_on
from roxxel_dist.data.packing import Packed
from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.model.loss import token_losses
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.optimizer import InitialState, NamedOptimizer, OptimizerConfig, as_optimizer
from roxxel_dist.train.step.step import SPIKE_FACTOR, make_eval_step, make_step

SMALL = {"dim": 64, "num_blocks": 2, "vocab_size": 128, "max_context": 4096, "head_size": 16, "kv_heads": 2}
MLA = {"mla": True, "down_dim_q": 32, "down_dim_kv": 32, "rope_dim": 8}
WINDOW = {"sliding_window": True, "context_window": 24}
FEATURES = {
    "plain": {},
    "window, gate, learned positions": WINDOW | {"no_sink": True, "pos_encoding": "learned"},
    "mla, remat, scan": MLA | {"gradient_checkpointing": True, "scan_layers": True},
    "experts": {"use_moe": True, "n_experts": 4},
    "dropout, logits in chunks": {"dropout_rate": 0.2, "loss_chunk": 32, "scan_layers": True},
}
ONE_LAYER = {"dropout_rate": 0.2, "loss_chunk": 32, "num_blocks": 1, "gradient_checkpointing": True}


def batch(seed, shape, place, packed):
    rng = np.random.default_rng(seed)
    tokens = jax.device_put(rng.integers(0, 128, shape).astype(np.int32), place)
    if not packed:
        return tokens
    segments = np.sort(rng.integers(0, 3, shape), 1).astype(np.int32)
    starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=-1) != 0, np.arange(shape[1]), 0), 1)
    positions = (np.arange(shape[1]) - starts).astype(np.int32)
    return Packed(tokens, *jax.device_put((segments, positions), place))


def compiled(mesh, fields, shape, *, packed=False, fsdp=False, grad_accum=1, lr=1e-2, optimizer=None):
    """(the compiled training step, state, hparams, a function of a seed that makes a batch).

    `fields` of the built-in model, or another model.
    """
    optimizer = optimizer or NamedOptimizer(OptimizerConfig(lr=lr, warmup_steps=0))
    model = transformer(**SMALL | fields) if isinstance(fields, dict) else fields
    split, state, hparams = init_state(model, InitialState(optimizer), mesh, fsdp=fsdp, dtype=None)
    hparams |= scalars_on(mesh, {**optimizer.settings(100), SPIKE_FACTOR: 0.0})
    sharding = batch_sharding(mesh)
    step = make_step(split, token_losses, optimizer, state, sharding, grad_accum=grad_accum)
    fitted = fit_sharding(sharding, shape, grad_accum)

    compiler = AotCompiler(mesh)

    def batch_of(seed):
        return batch(seed, shape, fitted, packed)

    compiler.prepare("step", step, state, hparams, batch_of(0))
    program = compiler.get("step")
    compiler.close()
    return program, state, hparams, batch_of


def losses(mesh, fields, shape, steps=3, **options):
    return losses_of(compiled(mesh, fields, shape, **options), steps)


def losses_of(training, steps):
    """Of the first steps of what `compiled` gives."""
    (program, state, hparams, batch_of), found = training, []
    for step in range(steps):
        state, metrics = program(state, hparams, batch_of(step))
        found.append((float(metrics.scalars["loss"]), float(metrics.scalars["grad_norm"])))
    return found


def cases():
    """Every feature with 1, 2 and 6 rows, and with axes of parameters."""
    meshes = {
        "data 8": {},
        "fsdp 8": {"fsdp": 8},
        "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
        "data 6": {"n_devices": 6},
    }
    for name, fields in FEATURES.items():
        for rows in (1, 2, 6):
            for label, axes in meshes.items():
                for packed in (False, True):
                    yield pytest.param(fields, rows, axes, packed, id=f"{name}, {rows} x {label}, {packed}")


@pytest.mark.long
@pytest.mark.parametrize(("fields", "rows", "axes", "packed"), list(cases()))
def test_losses_are_those_of_one_device(fields, rows, axes, packed):
    options = {"fsdp": "fsdp" in axes, "packed": packed}
    steps = 3 if not fields else 2
    found = losses(make_mesh(**axes), fields, (rows, 131), steps, **options)
    alone = losses(make_mesh(1), fields, (rows, 131), steps, packed=packed)
    np.testing.assert_allclose(found, alone, rtol=2e-5)


def test_a_row_of_documents_on_eight_devices_and_what_they_gather():
    """The losses are those of one device, and keys and values alone are gathered; with parameters that are cut too."""
    alone, cut = (
        compiled(mesh, ONE_LAYER, (1, 131), packed=True, fsdp=fsdp, optimizer=as_optimizer(optax.sgd(0.1)))
        for mesh, fsdp in ((make_mesh(1), False), (make_mesh(fsdp=8), True))
    )
    np.testing.assert_allclose(losses_of(cut, 2), losses_of(alone, 2), rtol=2e-5)
    assert_keys_and_values_alone_are_gathered(cut[0], (16, 1, 2, 9, 16), layers=1, lengths=(130, 144))


THIRTY = {
    "grouped heads, rotary": ({}, {}),
    "a head for each": ({"kv_heads": 4}, {}),
    "latent attention": (MLA, {}),
    "window": (WINDOW, {}),
    "gate": ({"no_sink": True}, {}),
    "learned positions": ({"pos_encoding": "learned"}, {}),
    "sinusoids": ({"pos_encoding": "absolute"}, {}),
    "no positions": ({"pos_encoding": "none"}, {}),
    "stretched positions": ({"rope_scale_factor": 4.0, "rope_trained_context": 64}, {}),
    "dropout": ({"dropout_rate": 0.1}, {}),
    "remat": ({"gradient_checkpointing": True}, {}),
    "scan": ({"scan_layers": True}, {}),
    "logits in chunks": ({"loss_chunk": 16}, {}),
    "untied, layernorm, gelu": ({"weight_tying": False, "norm_type": "layernorm", "use_swiglu": False}, {}),
    "packed": ({}, {"packed": True}),
    "packed, window": (WINDOW, {"packed": True}),
    "fsdp": ({}, {"axes": {"fsdp": 8}, "fsdp": True}),
    "tensor": ({"head_size": 16}, {"axes": {"tensor": 2}}),
    "fsdp and tensor, packed": ({}, {"axes": {"fsdp": 4, "tensor": 2}, "fsdp": True, "packed": True}),
    "accumulation": ({}, {"rows": 4, "grad_accum": 2}),
    "accumulation, packed": ({}, {"rows": 4, "grad_accum": 2, "packed": True}),
    "three rows": ({}, {"rows": 3}),
    "soft caps, z-loss": ({"attn_softcap": 2.0, "logit_softcap": 5.0, "z_loss": 1e-3}, {}),
    "soft caps, packed": ({"attn_softcap": 2.0}, {"packed": True}),
    "local and global layers": (WINDOW | {"sliding_window_pattern": 2, "rope_local_theta": 50.0}, {}),
    "local and global layers, scanned": (WINDOW | {"sliding_window_pattern": 2, "scan_layers": True}, {"packed": True}),
    "queries and keys normed, biases": ({"qk_norm": "head", "qkv_bias": True}, {}),
    "the projection normed, tensor": (
        {"qk_norm": "projection", "norm_position": "after", "head_size": 16}, {"axes": {"tensor": 2}},
    ),
    "layers without positions": ({"no_rope_layer_interval": 2, "partial_rotary_factor": 0.5}, {}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", THIRTY)
def test_thirty_steps_are_those_of_one_device(name):
    """The largest relative difference of a loss is a line in the output of `pytest -rA`."""
    fields, options = THIRTY[name]
    options = dict(options)
    axes, rows = options.pop("axes", {}), options.pop("rows", 1)
    found = losses(make_mesh(**axes), fields, (rows, 129), 30, lr=3e-4, **options)
    options.pop("fsdp", None)
    alone = losses(make_mesh(1), fields, (rows, 129), 30, lr=3e-4, **options)
    mine, whole = (np.array(each)[:, 0] for each in (found, alone))
    print(f"{name}: {np.abs(mine / whole - 1).max():.1e}")
    np.testing.assert_allclose(mine, whole, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "shape", "packed"),
    [
        (2, (1, 8), True),  # 7 tokens, of which none is dropped
        (4, (1, 3000), False),
        (6, (1, 98), True),
        (7, (3, 50), False),
    ],
)
def test_lengths_that_devices_do_not_divide(devices, shape, packed):
    fields = {"num_blocks": 1}
    found = losses(make_mesh(devices), fields, shape, 2, packed=packed)
    np.testing.assert_allclose(found, losses(make_mesh(1), fields, shape, 2, packed=packed), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
def test_the_validation_of_a_long_row_is_that_of_one_device(packed):
    """Neither the devices nor what each has of the tokens are in its losses and its weight."""
    found = []
    for devices in (1, 8):
        mesh = make_mesh(devices)
        model = transformer(**SMALL | {"num_blocks": 1})
        split, state, hparams = init_state(model, InitialState(NamedOptimizer(OptimizerConfig())), mesh)
        rows = batch(0, (1, 131), fit_sharding(batch_sharding(mesh), (1, 131)), packed)
        compiler = AotCompiler(mesh)
        compiler.prepare("evaluate", make_eval_step(split, token_losses), state.params, state.rest, hparams, rows)
        losses_here = compiler.get("evaluate")(state.params, state.rest, hparams, rows)
        compiler.close()
        found.append({name: float(value) for name, value in losses_here.items()})
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.long
def test_micro_batches_of_long_rows():
    found = losses(make_mesh(), {}, (4, 65), 2, grad_accum=2)
    np.testing.assert_allclose(found, losses(make_mesh(1), {}, (4, 65), 2, grad_accum=2), rtol=2e-5)


def arrays_of(program, kind):
    """The shapes of the results of a kind of collective."""
    lines = [line for line in program.as_text().splitlines() if re.search(rf" {kind}(?:-start)?\(", line)]
    return [
        tuple(map(int, found.split(",")))
        for line in lines
        for found in re.findall(r"f32\[([\d,]+)\]", line.split(f" {kind}")[0])
    ]


@pytest.mark.long
def test_one_row_of_2049_tokens_on_eight_devices():
    """Memory, work and what is sent. The temporaries of one device are dominated by the row, as in a real phase."""
    fields, shape = {"loss_chunk": 0, "dim": 128, "head_size": 32, "vocab_size": 2048}, (1, 2049)
    alone = compiled(make_mesh(1), fields, shape)[0]
    cut = compiled(make_mesh(), fields, shape)[0]
    flops = [program.cost_analysis()["flops"] for program in (alone, cut)]
    assert flops[1] * 8 <= 1.15 * flops[0]
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (alone, cut)]
    assert temporaries[1] <= temporaries[0] / 4


def assert_keys_and_values_alone_are_gathered(program, keys, layers, lengths):
    """Once a layer and direction, keys and values each in blocks of tokens (blocks, rows, heads, tokens, width).

    An activation would have one of the `lengths`.
    """
    gathered = arrays_of(program, "all-gather")
    long = [shape for shape in gathered if len(shape) > 3 or not set(lengths).isdisjoint(shape)]
    assert set(long) == {keys}
    assert len(long) == 2 * 2 * layers
    assert {shape for shape in arrays_of(program, "reduce-scatter") if len(shape) > 3} == {(2, *keys[1:])}


REMAT = {"gradient_checkpointing": True}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        ({}, {}),
        (REMAT | {"num_blocks": 1}, {}),
        (REMAT | {"scan_layers": True}, {"fsdp": 8}),
        ({"kv_heads": 4, "dropout_rate": 0.1}, {"fsdp": 2}),
    ],
)
def test_keys_and_values_alone_are_gathered_once_a_layer_and_direction(fields, axes):
    """Bytes and shapes from the compiled program: remat gathers nothing again, and no activation is gathered."""
    program = compiled(make_mesh(**axes), fields, (1, 2049), fsdp="fsdp" in axes)[0]
    layers, heads, width = fields.get("num_blocks", 2), fields.get("kv_heads", 2), 16
    keys = 16, 1, heads, 128, width  # in blocks of 128 tokens
    loops = 1 if "scan_layers" in fields else layers
    assert_keys_and_values_alone_are_gathered(program, keys, layers=loops, lengths=(2048,))
    if not axes:
        sent = program_cost(program.as_text(), [0] * 8).collectives["all-gather"]
        assert sent == 2 * 2 * layers * math.prod(keys) * 4 * 7 / 8


def own(plain=False):
    return with_numbers(lambda: Attending(128, 64, 2, 4, nnx.Rngs(0), plain))


@pytest.mark.parametrize(
    ("rows", "length", "packed"),
    [
        pytest.param(1, 1001, False, marks=pytest.mark.long),
        pytest.param(1, 1002, True, marks=pytest.mark.long),
        pytest.param(2, 515, False, marks=pytest.mark.long),
    ],
)
def test_a_model_of_ones_own(rows, length, packed):
    """Losses of one device, and its work: 1,000 inputs, and 1,001 and 514 that do not divide."""
    alone, cut = (compiled(mesh, own(), (rows, length), packed=packed) for mesh in (make_mesh(1), make_mesh()))
    np.testing.assert_allclose(losses_of(cut, 2), losses_of(alone, 2), rtol=2e-5)
    assert cut[0].cost_analysis()["flops"] * 8 <= 1.15 * alone[0].cost_analysis()["flops"]
