from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.by_parameter import decay_mask
from roxxel_dist.train.step.optimizer import NamedOptimizer, as_optimizer, clip, global_norm

OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("nadamw", "lion")]
TRIED = ["adamw", "adafactor", "sgd", "muon", *OTHERS]
SHAPES = {
    "embed.embedding": (160, 12),
    "blocks.0.attention.qkv.kernel": (130, 140),  # large enough for adafactor to factor
    "blocks.0.attention.qkv.bias": (140,),
    "blocks.0.norm.scale": (12,),
    "blocks.experts.kernel": (2, 12, 5),
    "blocks.norms.scale": (2, 12),
    "lm_head.kernel": (12, 160),
}
MATRICES = ("embed.embedding", "blocks.0.attention.qkv.kernel", "blocks.experts.kernel", "lm_head.kernel")


def tree(seed):
    rng = np.random.default_rng(seed)
    return jax.device_put({name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()})


def scalars(optimizer, total):
    return jax.device_put({name: np.float32(value) for name, value in optimizer.settings(total).items()})


def make(optimizer):
    """(jitted step, jitted init, a list that grows with each trace of the step)."""
    traces = []

    def step(settings, step, params, opt_state, grads):
        traces.append(step)
        updates, opt_state = optimizer.build(settings, step).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def init(settings, params):
        return optimizer.build(settings, 0).init(params)

    return jax.jit(step), jax.jit(init), traces


def mask(params):
    return {name: name in MATRICES for name in params}


def muon_reference(rate, decay):
    inner = "blocks.0.attention.qkv.kernel"
    return optax.partition(
        {
            "muon": optax.contrib.muon(rate, beta=0.95, weight_decay=decay, consistent_rms=0.2),
            "adamw": optax.adamw(
                rate, 0.9, 0.95, weight_decay=decay, mask=lambda p: {n: n in MATRICES and n != inner for n in p}
            ),
        },
        {name: "muon" if name == inner else "adamw" for name in SHAPES},
    )


REFERENCES = {
    "adamw": lambda rate, decay: optax.adamw(rate, 0.9, 0.95, weight_decay=decay, mask=mask),
    "nadamw": lambda rate, decay: optax.nadamw(rate, 0.9, 0.95, weight_decay=decay, mask=mask),
    "lion": lambda rate, decay: optax.lion(rate, 0.9, 0.99, weight_decay=decay, mask=mask),
    "adafactor": lambda rate, decay: optax.adafactor(
        rate, multiply_by_parameter_scale=False, weight_decay_rate=rate * decay, weight_decay_mask=mask
    ),
    "sgd": lambda rate, decay: optax.chain(
        optax.trace(0.9), optax.add_decayed_weights(decay, mask), optax.scale_by_learning_rate(rate)
    ),
    "muon": muon_reference,
}


@partial(jax.jit, static_argnums=0)
def reference_step(name, limit, rate, decay, params, state, grads):
    """By optax alone."""
    grads, _ = optax.clip_by_global_norm(limit).update(grads, optax.EmptyState())
    updates, state = REFERENCES[name](rate, decay).update(grads, state, params)
    return optax.apply_updates(params, updates), state


SETTINGS = (
    {"lr": 0.01, "weight_decay": 0.1, "grad_clip": 1.0},
    {"lr": 0.3, "weight_decay": 0.0, "grad_clip": 1.0, "warmup_steps": 3},
    {"lr": 0.01, "weight_decay": 0.1, "grad_clip": 0.0, "warmup_steps": 5, "decay_steps": 7},
    {"lr": 0.002, "weight_decay": 0.0, "grad_clip": 0.0, "decay_steps": 15},
    {"lr": 0.01, "weight_decay": 0.1, "grad_clip": 1e6},
)


@pytest.mark.parametrize("name", TRIED)
def test_settings_are_inputs_and_give_what_optax_gives_with_constants(name):
    """One program for all settings, and for the state of `init` and of a step."""
    step, init, traces = make(NamedOptimizer(OptimizerConfig(optimizer=name, lr_schedule="wsd")))
    structures, begun = set(), jax.jit(REFERENCES[name](0.1, 0.1).init)(tree(0))
    for i, fields in enumerate(SETTINGS):
        total = 20 + i
        config = OptimizerConfig(optimizer=name, lr_schedule="wsd", **fields)
        ours = NamedOptimizer(config)
        settings, params = scalars(ours, total), tree(0)
        state = init(settings, params)
        structures.add(jax.tree.structure(state))

        expected, reference_state = params, begun
        for now in (0, 1):
            grads, rate = tree(10 + now), float(ours.rate(ours.settings(total), now))
            numbers = config.grad_clip or np.inf, rate, config.weight_decay
            expected, reference_state = reference_step(name, *numbers, expected, reference_state, grads)
            params, state = step(settings, np.int32(now), params, state, grads)
        for key, got in params.items():
            np.testing.assert_allclose(got, expected[key], rtol=1e-6, atol=1e-6, err_msg=f"{key} {fields}")
            assert not np.array_equal(got, tree(0)[key])
    assert len(structures) == 1
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert init._cache_size() == 1


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16])
def test_it_learns_a_regression_and_keeps_every_dtype(name, dtype):
    """Whole state donated: jax warns, hence fails here, where a buffer of another dtype comes back."""
    rates = {"sgd": 0.1, "muon": 0.2}
    config = OptimizerConfig(optimizer=name, lr=rates.get(name, 0.03), weight_decay=1e-4)
    optimizer, steps = NamedOptimizer(config), 60
    settings = scalars(optimizer, steps)
    rng = np.random.default_rng(1)
    x, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 16), (16, 8)))
    y = x @ weights * np.float32(0.3) + np.float32(0.5)
    params = jax.device_put({"layer.kernel": np.zeros((16, 8), dtype), "layer.bias": np.zeros(8, dtype)})

    def loss_of(params):
        return jnp.mean((x @ params["layer.kernel"] + params["layer.bias"] - y) ** 2)

    def step(state, settings):
        now, params, opt_state = state
        # float32 gradients, as a sum over micro-batches has them
        loss, grads = jax.value_and_grad(loss_of)(jax.tree.map(jnp.float32, params))
        updates, opt_state = optimizer.build(settings, now).update(grads, opt_state, params)
        return (now + 1, optax.apply_updates(params, updates), opt_state), loss

    jitted = jax.jit(step, donate_argnums=0)
    state = (jax.device_put(np.int32(0)), params, jax.jit(lambda p: optimizer.build(settings, 0).init(p))(params))
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    moments = [leaf for leaf in jax.tree.leaves(state[2]) if leaf.ndim and leaf.shape != (3,)]  # (3,): Muon's constants
    assert moments
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(dtype)}
    first = None
    for _ in range(steps):
        donated = state
        state, loss = jitted(state, settings)
        first = float(loss) if first is None else first
        # Adafactor's placeholders of one zero are never read, hence never taken.
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated) if leaf.size > 1)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == kinds
    assert jitted._cache_size() == 1
    assert float(loss) < 0.1 * first


def test_decay_spares_norms_and_biases():
    assert {name for name, yes in decay_mask(tree(0)).items() if yes} == set(MATRICES)
    assert decay_mask({"scaler.kernel": np.ones((2, 2)), "x.bias": np.ones((2, 2))}) == {
        "scaler.kernel": True,
        "x.bias": False,
    }


def test_muon_moves_inner_matrices_alone():
    """Its updates are orthogonal matrices: of a gradient of rank one, adamw's would be as large in every entry."""
    shapes = {
        "embed.embedding": (32, 16),
        "token_embedder.kernel": (16, 16),
        "head.kernel": (16, 16),
        "lm_head.kernel": (16, 16),
        "heads.kernel": (16, 16),
        "blocks.0.ahead.kernel": (16, 16),
        "norm.scale": (16,),
        "experts": (2, 16, 16),
    }
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    optimizer = NamedOptimizer(OptimizerConfig(optimizer="muon", lr=1.0, grad_clip=0, warmup_steps=0))
    step, init, _ = make(optimizer)
    settings = scalars(optimizer, 10)
    grads = {
        name: np.broadcast_to(np.arange(shape[-1]) == 0, shape).astype(np.float32) for name, shape in shapes.items()
    }
    after, _ = step(settings, 0, params, init(settings, params), grads)
    moved = {name: float(-np.ravel(new)[0]) for name, new in after.items()}
    muon = {"heads.kernel", "blocks.0.ahead.kernel"}
    for name, size in moved.items():
        if name in muon:  # 0.2 x sqrt(16) x about 1/sqrt(16)
            assert 0.1 < size < 0.3, name
        else:
            assert size == pytest.approx(1.0, rel=1e-3), name


@pytest.mark.parametrize("limit", [0.0, 0.5, pytest.param(1e9, marks=pytest.mark.long)])
def test_clipping_is_optaxs_and_zero_is_none(limit):
    grads = tree(3)
    got, _ = jax.jit(lambda limit, g: clip(limit).update(g, optax.EmptyState()))(np.float32(limit), grads)
    reference = jax.jit(lambda g: optax.clip_by_global_norm(limit).update(g, optax.EmptyState())[0])
    want = reference(grads) if limit else grads
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6), got, want)
    if limit == 0.5:
        assert float(jax.jit(global_norm)(got)) == pytest.approx(0.5, rel=1e-5)


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    """In bfloat16, 256 + 1 is 256: many small leaves beside a large one would be lost."""
    grads = {"large": np.full(1, 16, jnp.bfloat16)} | {f"small{i}": np.ones(1, jnp.bfloat16) for i in range(32)}
    norm = jax.jit(global_norm)(grads)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx((256 + 32) ** 0.5, rel=1e-6)


def test_optax_and_nnx_optimizers_are_taken_as_they_are():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.nadamw(optax.linear_schedule(1e-3, 0, 10)))
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    named = NamedOptimizer(OptimizerConfig())
    assert as_optimizer(named) is named
    for given in (tx, nnx.Optimizer(model, tx, wrt=nnx.Param)):
        optimizer = as_optimizer(given)
        assert optimizer.settings(100) == {}
        assert optimizer.build({}, 0) is tx
        assert optimizer.rate({}, 0) is None


def test_multi_steps_updates_with_the_mean_of_so_many_gradients():
    tx = as_optimizer(optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2)).build({}, 0)
    params, updates = {"w": np.zeros(3, np.float32)}, []
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for gradient in (1.0, 3.0):
        found, state = update({"w": np.full(3, gradient, np.float32)}, state, params)
        updates.append(found["w"].tolist())
    assert updates == [[0, 0, 0], [-1, -1, -1]]


def test_what_is_no_optimizer_is_told():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"wrt=.*BatchStat.*: only nnx.Param is trained, so make it with wrt=nnx"):
        as_optimizer(nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.BatchStat))
    with pytest.raises(ValueError, match=r"optimizer is a str: give an optax.GradientTransformation, an nnx.Optimizer"):
        as_optimizer("adamw")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": float("inf")}, "lr is inf: it must be above 0, and finite"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1: it must be 0 or more"),
        ({"grad_clip": float("nan")}, "grad_clip is nan: it must be 0 or more"),
        ({"beta1": 1.0}, "beta1 is 1.0: it must be at least 0 and below 1"),
        ({"beta2": -0.5}, "beta2 is -0.5"),
        ({"momentum": 1.5}, "momentum is 1.5"),
        ({"lr_schedule": "wsd", "decay_steps": 0}, "decay_steps is 0: it must be at least 1"),
        ({"decay_steps": 5}, "decay_steps is 5, and lr_schedule is cosine, .* use lr_schedule wsd"),
    ],
)
def test_errors_name_the_field_the_value_and_the_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


def test_betas_and_momentum_reach_the_optimizer():
    """Their usual values are those of the references above."""
    cases = (
        ("sgd", {"momentum": 0.5}),
        ("muon", {"momentum": 0.5}),
        ("adamw", {"beta2": 0.5}),
        ("adamw", {"beta1": 0.5}),
        ("lion", {"beta2": 0.5}),
    )
    grads = [{"a.kernel": np.asarray(tree(now)["lm_head.kernel"])} for now in range(2)]

    def trained(name, **fields):
        optimizer, params = NamedOptimizer(OptimizerConfig(optimizer=name, **fields)), grads[0]
        settings = scalars(optimizer, 10)
        state = optimizer.build(settings, 0).init(params)
        for now in range(2):
            updates, state = optimizer.build(settings, now).update(grads[now], state, params)
            params = optax.apply_updates(params, updates)
        return params["a.kernel"]

    usual, given = jax.jit(
        lambda: (
            {name: trained(name) for name in {name for name, _ in cases}},
            [trained(name, **fields) for name, fields in cases],
        )
    )()
    for (name, fields), result in zip(cases, given, strict=True):
        assert not np.allclose(usual[name], result, rtol=1e-6), fields
