import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from runs import model, module
from states import init_state

from roxxel_dist.cluster.mesh import make_mesh, scalars_on
from roxxel_dist.cluster.parameter_sharding import FSDP_MIN_SIZE
from roxxel_dist.model.layers import DynamicScalar
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.split import split_module
from roxxel_dist.train.step.optimizer import as_optimizer
from roxxel_dist.train.step.state import _init_programs, _optimizer_program, _placed, trace_module
from roxxel_dist.train.step.step import make_step

FIELDS = {"dim": 128, "vocab_size": 512}


def build(dropout_rate=0.1):
    return model(**FIELDS, dropout_rate=dropout_rate)


def built(dropout_rate=0.1):
    """A module, which no program makes."""
    return module(**FIELDS, dropout_rate=dropout_rate)


def two_axes():
    return Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))


def lower(parts, loss_fn, optimizer, state, settings, batch):
    """(the step's program, not compiled, all of its settings)."""
    mesh = batch.sharding.mesh
    settings = settings | scalars_on(mesh, {"spike_factor": 0.0})
    step = make_step(parts, loss_fn, as_optimizer(optimizer), state, NamedSharding(mesh, P("data", None)))
    return step.lower(state, settings, batch), settings


def same_bits(one, two):
    """Whether two trees hold the same arrays; random keys by their data."""

    def data(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(data(a), data(b)), one, two)
    return all(jax.tree.leaves(same))


class Net(nnx.Module):
    """A matrix that asks for its place, and running statistics beside it."""

    def __init__(self, asked, rngs, width=6, **metadata):
        init = nnx.with_partitioning(nnx.initializers.normal(1.0), asked, **metadata)
        self.inner = nnx.Linear(8, width, use_bias=False, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.inner(x))


def test_values_do_not_depend_on_the_devices():
    optimizer = optax.adamw(1e-3)
    states = [
        init_state(build, optimizer.init, make_mesh(devices), fsdp=fsdp)[1] for devices, fsdp in ((1, False), (8, True))
    ]
    assert {leaf.sharding.is_fully_replicated for leaf in states[1].params.values()} == {True, False}
    assert "dropout.rngs.key" in states[0].rest
    assert same_bits(*states)


def test_a_callable_and_its_module_make_the_same_state():
    """Random streams to the bit; numbers may differ in the last bit, since XLA fuses what it compiles as one."""
    sgd, mesh = optax.sgd(0.1), make_mesh()
    parts, made, settings = init_state(build, sgd.init, mesh)
    own_parts, copied, own_settings = init_state(nnx.jit(build)(), sgd.init, mesh)
    assert same_bits(made.rest, copied.rest)
    assert same_bits(settings, own_settings)
    for one, two in ((parts.params, own_parts.params), (parts.rest, own_parts.rest)):
        assert (one.names, one.partition_spec) == (two.names, two.partition_spec)
    assert [*made.params] == [*copied.params]
    for one, two in zip(made.params.values(), copied.params.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("devices", "dtype"),
    [
        pytest.param(1, None, marks=pytest.mark.long),
        (8, None),
        pytest.param(8, jnp.bfloat16, marks=pytest.mark.long),
    ],
)
def test_a_device_never_holds_much_more_than_its_share(devices, dtype):
    """By XLA's own account of the two programs: parameters first, then the moments while the parameters stay.

    On CPU random numbers take scratch of three float32 arrays as large as the largest parameter: with no moments (sgd),
    or few and large bfloat16 arrays, it may hold more.
    """

    def wide():
        return model(dim=256, vocab_size=512, dropout_rate=0.1)

    mesh, init = make_mesh(devices), optax.adamw(1e-3).init
    traced = trace_module(wide, mesh)
    like = _placed(traced.split, traced.shapes, mesh, True, dtype)
    first = [p.lower().compile().memory_analysis() for p in _init_programs(traced.split, traced, like, mesh)]
    _, state, _ = init_state(wide, init, mesh, fsdp=True, dtype=dtype)
    then = _optimizer_program(init, state.params, mesh).lower(state.params).compile().memory_analysis()
    params, moments = (
        sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        for tree in (state.params, state.opt_state)
    )
    share, total = params + moments, sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    peaks = [stage.output_size_in_bytes + stage.temp_size_in_bytes for stage in (*first, then)]
    peaks[-1] += params
    assert share <= max(peaks) <= 1.2 * share
    assert share < 1.05 * total / devices


@pytest.mark.parametrize("how", ["callable", "module"])
def test_what_a_module_asks_for_holds(how):
    mesh = two_axes()

    def make():
        return Net(("model", None), nnx.Rngs(0))

    if how == "module":
        with jax.set_mesh(mesh):
            model = make()
    _, state, _ = init_state(make if how == "callable" else model, optax.adam(0.1).init, mesh, fsdp=True)
    assert state.params["inner.kernel"].sharding.spec == P("model", None)
    assert state.opt_state[0].mu["inner.kernel"].sharding.spec == P("model", None)
    assert state.rest["norm.mean"].sharding.is_fully_replicated


def test_a_module_may_constrain_its_arrays_itself():
    def make():
        net = Net((None, None), nnx.Rngs(0))
        net.inner.kernel[...] = jax.lax.with_sharding_constraint(net.inner.kernel[...], P("model"))
        return net

    _, state, _ = init_state(make, optax.sgd(0.1).init, two_axes())
    assert np.abs(state.params["inner.kernel"]).min() > 0


def test_logical_axes_follow_their_rules():
    def make():
        return Net(("embed", "hidden"), nnx.Rngs(0), sharding_rules=(("hidden", "model"),))

    with nnx.logical_axis_rules([("embed", None)]):
        _, state, _ = init_state(make, optax.sgd(0.1).init, two_axes())
    assert state.params["inner.kernel"].sharding.spec == P(None, "model")


@pytest.mark.parametrize(
    ("asked", "width", "message"),
    [
        (("data", "tensor"), 6, r"inner.kernel is partitioned over 'tensor'.*does not have \(data, model\)"),
        (("model", "data"), 6, r"inner.kernel of shape \(8, 6\) cannot be partitioned as .*'data': 4"),
        (("model", "model"), 6, r"inner.kernel of shape \(8, 6\) cannot be partitioned"),
    ],
)
def test_places_that_the_mesh_does_not_have_are_refused(asked, width, message):
    with pytest.raises(ValueError, match=message):
        init_state(lambda: Net(asked, nnx.Rngs(0), width), optax.sgd(0.1).init, two_axes())


def test_a_callable_must_return_a_module():
    with pytest.raises(TypeError, match=r"returned a int: it must return an nnx\.Module"):
        init_state(lambda: 3, optax.sgd(0.1).init, make_mesh())  # pyright: ignore[reportArgumentType]


def test_a_callable_must_make_its_own_random_streams():
    rngs = nnx.Rngs(0)
    with pytest.raises(TraceContextError) as caught:
        init_state(lambda: Net((None, None), rngs), optax.sgd(0.1).init, make_mesh())
    assert "make its nnx.Rngs itself" in caught.value.__notes__[0]


def test_leaves_share_no_memory():
    """A donated buffer must be there once, even where the module has one array in two parameters."""
    matrix = jax.device_put(np.ones((4, 4), np.float32))

    class Twice(nnx.Module):
        def __init__(self):
            self.one, self.two = nnx.Param(matrix), nnx.Param(matrix)

    for made in (Twice, Twice()):
        _, state, _ = init_state(made, optax.contrib.schedule_free_sgd(0.1).init, make_mesh())
        doubled = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)(state.params)
        assert float(doubled["one"].sum()) == 32
        assert float(state.opt_state.z["two"].sum()) == 16
    assert float(matrix.sum()) == 16


@pytest.mark.long
def test_training_cut_is_training_whole():
    """With one compiled step, which refuses a state that lies otherwise than the first."""
    losses = []
    for fsdp in (False, True):
        mesh, optimizer = make_mesh(), optax.adamw(1e-2)
        parts, state, settings = init_state(build, optimizer.init, mesh, fsdp=fsdp)
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        batch = np.random.default_rng(0).integers(0, 512, (16, 33)).astype(np.int32)
        batch = jax.device_put(batch, NamedSharding(mesh, P("data", None)))
        lowered, settings = lower(parts, next_token_loss, optimizer, state, settings, batch)
        step = lowered.compile()
        seen = []
        for _ in range(4):
            state, metrics = step(state, settings, batch)
            seen.append(float(metrics.scalars["loss"]))
        losses.append(seen)
        kept = jax.tree.map(lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim), state, places)
        assert all(jax.tree.leaves(kept))
    assert losses[0][3] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("how", ["callable", pytest.param("module", marks=pytest.mark.long)])
def test_bfloat16_parameters_have_bfloat16_moments(how):
    model = build if how == "callable" else build()
    _, state, settings = init_state(model, optax.adam(0.1).init, make_mesh(), dtype=jnp.bfloat16)
    adam: tuple = state.opt_state  # pyright: ignore[reportAssignmentType]
    for leaves in (state.params, adam[0].mu, adam[0].nu):
        assert {leaf.dtype for leaf in leaves.values()} == {jnp.dtype(jnp.bfloat16)}
    assert settings["dropout.rate"].dtype == jnp.float32
    exact = init_state(build, optax.adam(0.1).init, make_mesh())[1].params
    for name, leaf in state.params.items():
        np.testing.assert_allclose(np.asarray(leaf, np.float32), exact[name], rtol=1 / 128, atol=1e-9)


@pytest.mark.parametrize(
    ("optimizer", "factored"),
    [
        (optax.adafactor(0.1), True),
        pytest.param(optax.lion(0.1), False, marks=pytest.mark.long),
        pytest.param(optax.contrib.muon(0.1), False, marks=pytest.mark.long),
        (optax.contrib.schedule_free_sgd(0.1), False),
    ],
)
def test_moments_lie_as_their_parameters_do(optimizer, factored):
    _, state, _ = init_state(build, optimizer.init, make_mesh(), fsdp=True)
    cut = {name: p.shape for name, p in state.params.items() if not p.sharding.is_fully_replicated}
    mirrored = 0
    for path, leaf in jax.tree.leaves_with_path(state.opt_state):
        name = path[-1].key if hasattr(path[-1], "key") else None
        if cut.get(name) == leaf.shape:
            mirrored += 1
            assert leaf.sharding == state.params[name].sharding
        else:
            assert leaf.sharding.is_fully_replicated
            assert leaf.size < FSDP_MIN_SIZE
    assert mirrored >= (0 if factored else len(cut))
    jax.jit(lambda tree: tree, donate_argnums=0)(state)  # raises if two leaves share a buffer


class Odd(nnx.Module):
    """Variables of all sorts, a matrix used twice, and a name with a dot."""

    class Mine(nnx.Variable):
        pass

    def __init__(self):
        self.matrix = nnx.Param(jax.device_put(np.eye(3, dtype=np.float32)))
        self.again = self.matrix
        self.count = self.Mine(0)
        self.cache = nnx.Cache(jax.device_put({"key": np.zeros(2, np.float32), "value": np.zeros(3, np.float32)}))
        self.table = nnx.data(jax.device_put(np.arange(4, dtype=np.int32)))
        self.empty = nnx.Variable(None)
        self.half = DynamicScalar(0.5)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3))

    def __call__(self, x):
        self.count[...] += 1
        self.seen = nnx.Intermediate(x)
        return self.dropout(x @ self.matrix[...] @ self.again[...]) * self.half[...]


@pytest.mark.parametrize("how", [pytest.param("callable", marks=pytest.mark.long), "module"])
def test_variables_of_any_kind(how):
    model = Odd if how == "callable" else Odd()
    parts, state, settings = init_state(model, optax.sgd(1.0).init, make_mesh())
    assert [*state.params] == ["again"]
    assert [*settings] == ["half"]
    rest = {"cache.key", "cache.value", "count", "dropout.rngs.count", "dropout.rngs.key", "table"}
    assert set(state.rest) == rest
    assert int(state.rest["count"]) == 0
    batch = jax.device_put(np.ones((8, 3), np.int32), NamedSharding(make_mesh(), P("data")))
    lowered, settings = lower(
        parts, lambda model, batch: model(batch.astype(jnp.float32)).mean(), optax.sgd(1.0), state, settings, batch
    )
    step = lowered.compile()  # refuses a state of other shapes, dtypes or places
    seen = set()
    for _ in range(3):
        state, metrics = step(state, settings, batch)
        seen.add(float(metrics.scalars["loss"]))
    assert len(seen) == 3
    assert int(state.rest["count"]) == 3
    assert set(state.rest) == rest


def test_names_are_one_to_one():
    model = nnx.Dict({"a.b": nnx.Param(np.ones(2)), "a": nnx.Dict(b=nnx.Param(np.ones(2)))})
    with pytest.raises(ValueError, match=r"two of the module's arrays are called a\.b"):
        split_module(model)


def test_taking_apart_leaves_the_module_alone():
    model = built()
    model.eval()
    parts, params, rest, settings = split_module(model)
    assert model.dropout.deterministic
    tokens, logits = np.arange(20)[None], nnx.jit(lambda model, tokens: model(tokens))
    merged = parts.merge(params, rest, {**settings, "lr": np.float32(1)}, training=False)
    assert np.array_equal(logits(merged, tokens), logits(model, tokens))
    assert not np.array_equal(logits(parts.merge(params, rest, settings, training=True), tokens), logits(model, tokens))


def test_the_dropout_rate_is_an_input():
    """One program for all rates, and the rate that it is given counts."""
    mesh, optimizer = make_mesh(), optax.sgd(0.0)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 33)).astype(np.int32)
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    made = [init_state(built(rate), optimizer.init, mesh) for rate in (0.1, 0.2)]
    assert [float(rate) for *_, settings in made for rate in settings.values()] == pytest.approx([0.1, 0.2])
    both = [lower(parts, next_token_loss, optimizer, state, settings, batch) for parts, state, settings in made]
    (first, tenth), (second, fifth) = both
    assert first.as_text() == second.as_text()
    step = first.compile()
    assert same_bits(made[0][1], made[1][1])
    losses = [float(step(made[i][1], rate, batch)[1].scalars["loss"]) for i, rate in enumerate((tenth, fifth))]
    again, other = (init_state(built(0.9), optimizer.init, mesh)[1] for _ in range(2))
    assert losses == [
        float(step(state, rate, batch)[1].scalars["loss"]) for state, rate in ((again, tenth), (other, fifth))
    ]
    assert losses[0] != losses[1]


def test_a_model_that_cannot_fit_is_refused_before_it_is_made(monkeypatch):
    """17 TB of parameters: nothing of them may be made, and the message has the numbers."""

    def huge():
        return nnx.Linear(2**21, 2**21, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"needs 70,368.* GB \(model 17,592.* optimizer 35,184.* gradients 17,592"):
        init_state(huge, optax.adam(1e-3).init, make_mesh())
