"""`expert_devices`: each device has some of the experts, tokens go there and back, and the losses are those of one."""

from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import transformer, with_numbers
from runs import losses as of_run
from states import init_state

from roxxel_dist import Config, Experiment, Roxxel
from roxxel_dist.cluster.mesh import batch_sharding, fit_sharding, make_mesh, scalars_on
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.packing import Packed
from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.experts import moe
from roxxel_dist.model.experts.moe import MixtureOfExperts
from roxxel_dist.model.generate import Sampling, generate_rows
from roxxel_dist.model.loss import token_losses
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.exact.layout import check_shapes
from roxxel_dist.train.step.optimizer import InitialState, NamedOptimizer, OptimizerConfig
from roxxel_dist.train.step.step import EMA, SPIKE_FACTOR, make_step

SMALL = {
    "dim": 32, "num_blocks": 1, "head_size": 16, "vocab_size": 64, "max_context": 64, "use_moe": True, "n_experts": 8,
    "alpha_balance": 0.05,
}  # fmt: skip
FEW = {"expert_capacity_factor": 1.0}
LORA = {"use_lora": True, "lora_rank": 4, "lora_targets": "all"}
FEATURES = {
    "plain": ({}, {}),
    "accumulation": ({}, {"grad_accum": 2}),
    "packing": ({}, {"packed": True}),
    "long rows": ({}, {"rows": 4}),
    "window": ({"sliding_window": True, "context_window": 8}, {}),
    "fsdp": ({}, {"fsdp": True}),
    "tensor": ({}, {"tensor": 2}),
    "fsdp, tensor, accumulation": ({}, {"fsdp": True, "tensor": 2, "grad_accum": 2}),
    "adapters of experts": (LORA, {}),
    "Muon": ({}, {"optimizer": "muon"}),
    "average": ({}, {"ema": 0.9}),
    "scan, remat, z-loss": ({"scan_layers": True, "gradient_checkpointing": True, "z_loss": 1e-3}, {}),
    "one expert, gelu, dropout": (
        {"top_k_mlp": 1, "use_swiglu": False, "activation": "gelu", "dropout_rate": 0.1}, {},
    ),
    "capacity": (FEW, {}),
    "capacity, long rows": (FEW, {"rows": 4}),
    "capacity, long rows, accumulation": (FEW, {"rows": 8, "grad_accum": 2}),
    "capacity, packing, fsdp, tensor, accumulation": (
        FEW, {"packed": True, "fsdp": True, "tensor": 2, "grad_accum": 2},
    ),
    "capacity, adapters, scan, remat": (FEW | LORA | {"scan_layers": True, "gradient_checkpointing": True}, {}),
    "latent attention": ({"mla": True, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 8}, {}),
}  # fmt: skip


def batch(seed, rows, place, packed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 64, (rows, 33)).astype(np.int32)
    if not packed:
        return jax.device_put(tokens, place)
    segments = np.sort(rng.integers(0, 3, tokens.shape), 1).astype(np.int32)
    starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=-1) != 0, np.arange(33), 0), 1)
    return Packed(*jax.device_put((tokens, segments, (np.arange(33) - starts).astype(np.int32)), place))


def training(mesh, fields, *, rows=16, packed=False, fsdp=False, grad_accum=1, optimizer="adamw", ema=0.0, lr=1e-3):
    """(the compiled step, its state, its hparams, a function from a seed to a batch)."""
    named = NamedOptimizer(OptimizerConfig(optimizer=optimizer, lr=lr, warmup_steps=0))
    split, state, hparams = init_state(transformer(**SMALL | fields), InitialState(named, ema > 0), mesh, fsdp=fsdp)
    hparams |= scalars_on(mesh, {**named.settings(100), SPIKE_FACTOR: 0.0, EMA: ema})
    sharding = batch_sharding(mesh)
    step = make_step(split, token_losses, named, state, sharding, grad_accum=grad_accum)
    place = fit_sharding(sharding, (rows, 33), grad_accum)

    def batch_of(seed):
        return batch(seed, rows, place, packed)

    with jax.set_mesh(place.mesh):
        return step.lower(state, hparams, batch_of(0)).compile(), state, hparams, batch_of


def trained(mesh, fields, steps, *, changed=0.0, **options):
    """(loss, balance loss and norm of the gradient of each step, its choices of each expert); `changed` parameters
    begin at so many times 1 + that."""
    return ran(training(mesh, fields, **options), steps, changed=changed)


def ran(made, steps, *, changed=0.0):
    """The same of what `training` gives."""
    (step, state, hparams, batch_of), found, loads = made, [], []
    if changed:
        params = {name: jax.device_put(leaf * (1 + changed), leaf.sharding) for name, leaf in state.params.items()}
        state = state._replace(params=params)
    for number in range(steps):
        state, metrics = step(state, hparams, batch_of(number))
        found.append([float(metrics.scalars[name]) for name in ("loss", "balance_loss", "grad_norm")])
        loads.append(np.asarray(metrics.load))
    return np.array(found), np.array(loads)


@cache
def alone(name, steps):
    """The losses of one device."""
    fields, options = FEATURES[name]
    return trained(make_mesh(1), fields, steps, **{key: value for key, value in options.items() if key != "tensor"})[0]


def cases():
    for name in FEATURES:
        for devices, experts in ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)):
            if FEATURES[name][1].get("tensor", 1) * experts <= devices and FEATURES[name][1].get("rows", 16) >= experts:
                yield pytest.param(name, devices, experts, id=f"{name}, {experts} of {devices}")


@pytest.mark.long
@pytest.mark.parametrize(("name", "devices", "experts"), list(cases()))
def test_losses_are_those_of_one_device(name, devices, experts):
    fields, options = FEATURES[name][0], dict(FEATURES[name][1])
    axes = {"tensor": options.pop("tensor", 1), "fsdp": 0 if options.get("fsdp") else 1}
    found, _ = trained(make_mesh(devices, expert=experts, **axes), fields, 30, **options)
    rtol = 1e-6 if axes["tensor"] == 1 else 2e-6  # sums in two parts are off by as much with all experts on each device
    assert_those_of_one_device(found, alone(name, 30), rtol)


def assert_those_of_one_device(found, expected, rtol):
    np.testing.assert_allclose(found[:, :2], expected[:, :2], rtol=rtol)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.long
def test_a_token_between_two_experts_moves_a_run_of_one_device_as_far():
    """At a large rate, in step 27: a token's two experts are alike to the last bit, and each layout takes another. As
    far moves a run of one device whose parameters begin a last bit away; until then all losses are the same."""

    def of_mesh(mesh, **options):
        losses, load = trained(mesh, {}, 30, lr=1e-2, **options)
        return losses[:, 0], load

    (one, of_one), (moved, of_moved), (spread, of_spread) = (
        of_mesh(make_mesh(1)), of_mesh(make_mesh(1), changed=2**-23), of_mesh(make_mesh(8, expert=8)),
    )  # fmt: skip
    drifts = []
    for losses, load in ((moved, of_moved), (spread, of_spread)):
        others = np.abs(load - of_one).max((1, 2)) > 1e-6
        first = int(others.argmax()) if others.any() else len(others)
        np.testing.assert_allclose(losses[:first], one[:first], rtol=1e-6)
        drifts.append(np.abs(losses / one - 1).max())
    assert drifts[1] < 10 * max(drifts[0], 1e-6)


def test_each_device_has_its_experts_and_no_other_is_sent():
    """Neither parameters nor moments, in a step with micro-batches of rows that are cut either; what is sent are the
    tokens. The losses are those of one device.
    """
    case = "capacity, long rows, accumulation"
    fields, options = FEATURES[case]
    step, state, *_ = made = training(make_mesh(8, expert=4), fields, **options)
    of_experts = [
        leaf for path, leaf in jax.tree.leaves_with_path(state) if "feedforward" in (name := str(path)) and
        ("gate_up" in name or "down" in name)
    ]  # fmt: skip
    assert len(of_experts) == 6, "two matrices, each with two moments"
    for leaf in of_experts:
        assert leaf.sharding.spec == P(None, "expert"), leaf.sharding
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    cost = program_cost(step.as_text(), [0] * 8)
    assert cost.collectives["all-to-all"] > 0
    assert max(cost.gathered.values(), default=0) < 1 << 16, "no matrices of experts"
    assert_those_of_one_device(ran(made, 3)[0], alone(case, 3), 1e-6)


@pytest.mark.long
def test_a_run_goes_on_with_experts_on_other_devices(tmp_path):
    """Checkpoint, resume, validation and text, on 4 devices, then 2, then 1: the losses of one device."""
    data = tmp_path / "one.rox"
    rng = np.random.default_rng(1)
    with Roxxel(data) as file:
        file.write([rng.integers(1, 60, 400).astype(np.uint8) for _ in range(40)], vocab_size=60)
    fields = SMALL | {
        "batch_size": 8, "max_context": 16, "lr": 1e-2, "warmup_steps": 0, "log_every": 1, "eval_every": 2, "ema": 0.9,
        "eval_iters": 1, "checkpoint_every": 2, "memory_checkpoint_every": 0, "vocab_size": 60,
        "lr_schedule": "constant",
    }  # fmt: skip
    for devices, experts, steps in ((4, 4, 2), (4, 2, 4), (1, 1, 6)):
        config = Config(**fields, n_devices=devices, expert_devices=experts, max_steps=steps)
        Experiment(config).fit(data, tmp_path / "moved", resume=steps > 2)
    Experiment(Config(**fields, n_devices=1, max_steps=6)).fit(data, tmp_path / "alone")
    moved, alone = ([row[1] for row in of_run(tmp_path / name)] for name in ("moved", "alone"))
    np.testing.assert_allclose(moved, alone, rtol=2e-6)


NOT_POSSIBLE = [
    ({"n_experts": 6, "expert_devices": 4}, "expert_devices is 4: it must divide n_experts, which is 6, as 3 does"),
    ({"n_devices": 6, "expert_devices": 4}, "expert_devices is 4: it must divide 6 device(s), as 3 does"),
    ({"expert_devices": 8, "tensor_devices": 2}, "divide 8 device(s) / tensor_devices (2), as 4 does"),
    ({"expert_devices": 2, "fsdp": True, "fsdp_devices": 3}, "8 device(s) / expert_devices (2); 0 stands for all"),
    (
        {"expert_devices": 8, "batch_size": 12},
        "is 12, and expert_devices (8) divide the rows too: use 16, or 4",
    ),
    ({"expert_devices": 8, "grad_accum": 4}, "batch_size / grad_accum (4) is 4, and expert_devices (8) divide"),
    (
        {"expert_devices": 2, "virtual_shards": 8},
        "expert_devices is 2: an expert's product is of rows",
    ),
    ({"expert_devices": 0}, "expert_devices is 0: it must be at least 1"),
]


@pytest.mark.parametrize(("fields", "message"), NOT_POSSIBLE)
def test_what_cannot_be_is_one_line_with_the_nearest_that_works(fields, message):
    """`plan` and `train` ask the same functions."""
    config = Config(use_moe=True, **{"n_experts": 8} | fields)

    def check():
        config.validate()
        needs = config.device_needs
        mesh = make_mesh(needs.n_devices, fsdp=needs.fsdp, expert=needs.expert, tensor=needs.tensor)
        check_shapes(
            [Shape(steps=1, batch_size=config.batch_size, seq_len=33)], config.grad_accum, config.virtual_shards, mesh
        )

    with pytest.raises(UserError) as refused:
        check()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


TEXTS = [{"expert": 4}, *(pytest.param({"expert": 2, axis: 2}, marks=pytest.mark.long) for axis in ("fsdp", "tensor"))]


@pytest.mark.parametrize("axes", TEXTS)
def test_text_of_a_model_whose_experts_are_divided(axes):
    """The tokens of one device, for prompts of any length and number."""
    model = transformer(**SMALL | {"init_std": 0.3, "max_context": 256, "vocab_size": 97})
    named = NamedOptimizer(OptimizerConfig(lr=1e-3, warmup_steps=0))
    split, state, hparams = init_state(model, InitialState(named, False), make_mesh(4, **axes), fsdp="fsdp" in axes)
    divided = split.merge(state.params, state.rest, hparams, training=False)
    prompts = [list(range(1, length)) for length in (2, 9, 70)]
    options = {"max_context": 256, "sampling": Sampling(temperature=0.9), "seeds": [1, 2, 3]}
    expected = generate_rows(model, prompts, 12, **options)
    assert generate_rows(divided, prompts, 12, **options) == expected
    assert len({tuple(row) for row in expected}) == 3


def test_a_few_tokens_do_not_gather_the_experts(monkeypatch):
    """Of groups of rows, as on TPUs: XLA alone sends each device all matrices for a single token."""
    monkeypatch.setattr(moe, "uses_ragged", lambda *sizes: True)
    mesh, layer = make_mesh(4, expert=4), with_numbers(lambda: MixtureOfExperts(ModelConfig(**SMALL), nnx.Rngs(0)))
    graphdef, state = nnx.split(layer)
    x, run = np.ones((1, 3, 32), np.float32), jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)[0])
    expected = run(state, x)
    places = [NamedSharding(mesh, spec) for spec in (P(), P("expert"))]
    spread = jax.tree.map_with_path(lambda path, leaf: jax.device_put(leaf, places["router" not in str(path)]), state)
    with jax.set_mesh(mesh):
        program = run.lower(spread, x).compile()
    np.testing.assert_allclose(program(spread, x), expected, rtol=1e-4, atol=1e-8)
    sent = program_cost(program.as_text(), [0] * 4).collectives
    assert sum(sent.values()) < 4 * 2 * x.nbytes
