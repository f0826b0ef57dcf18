"""Updates of which each device computes its slices, held against the same on one device: every bit is equal."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
from roxxel_dist.model.split import Matrix
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.exact.layout import Layout
from roxxel_dist.train.exact.reduction import Tree, subtrees, total_of
from roxxel_dist.train.exact.sliced_update import SlicedFunction
from roxxel_dist.train.exact.slices import Cut
from roxxel_dist.train.exact.update import check_slices
from roxxel_dist.train.step.bad_steps import LossMonitorState
from roxxel_dist.train.step.optimizer import FixedOptimizer, InitialState, NamedOptimizer, for_model
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Loss, apply_gradient

SHAPES = {"blocks.up.kernel": (2, 16, 24), "embed.kernel": (40, 16), "norm.scale": (16,), "out.kernel": (16, 32)}
MATRICES = {"blocks.up.kernel": Matrix(stacked=True)}
CUT_ALONG = {"blocks.up.kernel": 2, "embed.kernel": 0, "out.kernel": 1}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))
OPTIMIZERS = {
    "adamw, clipped": (NamedOptimizer(OptimizerConfig(grad_clip=0.1)), {}),
    "adamw, with an average, steps left out": (NamedOptimizer(OptimizerConfig()), {"average": True, "skip": True}),
    "muon": (NamedOptimizer(OptimizerConfig(optimizer="muon", grad_clip=0.1)), {}),
    "adafactor": (NamedOptimizer(OptimizerConfig(optimizer="adafactor", grad_clip=0.1)), {}),
    "adamw, bfloat16": (NamedOptimizer(OptimizerConfig(grad_clip=0.1)), {"dtype": jnp.bfloat16}),
    "muon, bfloat16": (NamedOptimizer(OptimizerConfig(optimizer="muon", grad_clip=0.1)), {"dtype": jnp.bfloat16}),
    "lion": (NamedOptimizer(OptimizerConfig(optimizer="lion", grad_clip=0.1)), {}),
    "sgd": (NamedOptimizer(OptimizerConfig(optimizer="sgd", grad_clip=0.1)), {}),
    "nadamw": (NamedOptimizer(OptimizerConfig(optimizer="nadamw", grad_clip=0.1)), {}),
    "schedule-free": (NamedOptimizer(OptimizerConfig(optimizer="schedule_free_adamw", lr_schedule="constant")), {}),
    "your own, which takes a norm": (FixedOptimizer(CLIPPED), {}),
}
LIKE_OTHERS = ("muon, bfloat16", "lion", "sgd", "nadamw")
"""What they do is in others too: one number at a time, or what `muon` does."""


def test_any_devices_add_one_tree():
    """Every way to give out 8 and 16 shards: the sums of subtrees, and the rest, are the tree of one device."""
    for count in (1, 2, 8, 16):
        whole = Tree(lambda left, right: f"({left}{right})")
        for shard in range(count):
            whole.put(chr(97 + shard))
        total = whole.total()
        for devices in range(1, count + 1):
            known = {}
            for device in range(devices):
                own = range(count * device // devices, count * (device + 1) // devices)
                tree = Tree(lambda left, right: f"({left}{right})", own.start)
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


def compiled_on_one(jitted, args, mesh):
    with jax.set_mesh(mesh):
        return jitted.lower(*args).compile()


def compiled_for_each(jitted, args, devices):
    programs = []
    for device in devices:
        place = jax.sharding.SingleDeviceSharding(device)
        own = jax.tree.map(lambda x, at=place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), args)
        programs.append(jitted.lower(*own).compile())
    return programs


def state_of(optimizer, options):
    rng = np.random.default_rng(0)
    dtype = options.get("dtype", jnp.float32)
    params = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    init = InitialState(for_model(optimizer, MATRICES), average=options.get("average", False))
    return TrainState(jnp.int32(0), params, {}, init(params), LossMonitorState.initial())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LIKE_OTHERS else []) for name in OPTIMIZERS]
)
def test_slices_have_the_bits_of_the_whole(name):
    optimizer, options = OPTIMIZERS[name]
    optimizer = for_model(optimizer, MATRICES)
    hparams = {key: jnp.float32(value) for key, value in optimizer.settings(10).items()}
    hparams |= {"spike_factor": jnp.float32(0), "ema": jnp.float32(0.9)}

    def finish(state, sums, hparams):
        grads = {key: (grad / sums["weight"]).astype(state.params[key].dtype) for key, grad in sums["grads"].items()}
        loss = Loss(sums["loss"] / sums["weight"], {}, None)
        return apply_gradient(optimizer, state, hparams, grads, {}, loss, skip_bad=options.get("skip", False))

    state = state_of(optimizer, options)
    layout = Layout(8, batch_sharding(make_mesh(4, fsdp=4)))
    cut = Cut(layout, 4)

    def dimension(path, leaf):
        name = next((key for key in SHAPES if key in jax.tree_util.keystr(path)), "")
        return CUT_ALONG.get(name) if SHAPES.get(name) == leaf.shape else None

    def cuts(tree):
        return [dimension(path, leaf) for path, leaf in jax.tree.leaves_with_path(tree)]

    def sums(step):
        rng = np.random.default_rng(step)
        grads = {key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in SHAPES.items()}
        return {"grads": grads, "loss": jnp.float32(rng.normal()), "weight": jnp.float32(7)}

    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, sums(0), hparams))
    sliced = SlicedFunction.compiled(finish, args, cuts(args), cuts, cut, compiled_on_one, compiled_for_each)
    whole = jax.jit(finish)

    def slices(tree, number):
        leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, tree))  # no two are one buffer
        parts = [
            x if along is None else np.split(x, 4, along)[number] for x, along in zip(leaves, cuts(tree), strict=True)
        ]
        return jax.device_put(jax.tree.unflatten(treedef, parts), layout.devices[number])

    parts = [slices(state, number) for number in range(4)]
    inputs = [jax.device_put(hparams, device) for device in layout.devices]
    for step in range(3):
        state, metrics = whole(state, sums(step), hparams)
        own = [slices(sums(step), number) for number in range(4)]
        results = sliced.run(list(zip(parts, own, inputs, strict=True)))
        parts = [result[0] for result in results]
        for number, (part, numbers) in enumerate(results):
            wanted = jax.tree.leaves((slices(state, number), metrics))
            for got, expected in zip(jax.tree.leaves((part, numbers)), wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize(
    ("tx", "words"), [(CLIPPED, ""), (optax.chain(optax.centralize(), CLIPPED), "takes reduce_sum")]
)
def test_an_own_optimizer_of_more_than_norms_is_refused(tx, words):
    mesh = make_mesh(4, fsdp=4)
    optimizer = FixedOptimizer(tx)

    def placed(path, leaf):
        key = next((key for key in SHAPES if key in jax.tree_util.keystr(path)), "")
        along = CUT_ALONG.get(key) if SHAPES.get(key) == leaf.shape else None
        spec = P() if along is None else P(*[None] * along, "fsdp")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    like = jax.tree.map_with_path(placed, state_of(optimizer, {}))
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_slices(optimizer, like, Layout(8, batch_sharding(mesh)))


def test_an_axis_of_the_users_own_is_refused():
    mesh = make_mesh(8, fsdp=4)
    layout = Layout(8, batch_sharding(mesh))
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data", "fsdp")))
    with pytest.raises(UserError, match="virtual_shards cuts arrays over 'fsdp' alone, and w is partitioned as"):
        Cut.of(layout, {"w": leaf})
