import itertools
import math
import re
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import with_numbers
from own_model import Attending

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.data.packing import Packed
from roxxel_dist.devices.traced_flops import traced_flops
from roxxel_dist.model import cross_entropy as entropy
from roxxel_dist.model import loss as loss_module
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import auto_chunks, next_token_loss, token_losses
from roxxel_dist.model.mlp import Balance
from roxxel_dist.model.split import cast, split_module
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.compile import StepMemory

SMALL = {"dim": 16, "num_blocks": 1, "vocab_size": 50, "max_context": 64, "head_size": 8}


class Through(nnx.Module):
    """A stack of one block that does nothing."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(1))
        self.deterministic = False

    def __call__(self, x, metadata, cache):
        return x, Balance(jnp.zeros(())), cache


@cache
def taken(**fields):
    """Without its blocks: what is between embedding and loss is all one to the loss, and takes long to compile."""

    config = ModelConfig(**SMALL | fields)

    def make():
        model = Transformer(config, nnx.Rngs(params=0, dropout=1))
        model.blocks = Through()
        return model

    return split_module(with_numbers(make, alpha_balance=config.alpha_balance))


def measure(batch, dtype=None, **fields):
    parts, params, rest, settings = taken(**fields)

    def loss(params):
        told = token_losses(parts.merge(cast(params, dtype), rest, settings, training=True), batch)
        return told["loss"], told

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def words(*shape, vocabulary=50):
    return np.random.default_rng(0).integers(0, vocabulary, shape, np.int32)


def batches():
    tokens = words(3, 24)
    places = np.stack([np.arange(24, dtype=np.int32) % size for size in (7, 24, 10)])
    segments = np.stack([np.arange(24, dtype=np.int32) // size for size in (7, 24, 10)])
    return tokens, Packed(tokens, segments, places)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    ("chunk", "fields"),
    [
        (17, {"weight_tying": False, "use_moe": True}),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, {}), (17, {}), (1000, {}))),
    ],
)
def test_chunks_give_the_same_numbers(chunk, fields, packed):
    """23 targets a row: 5 at a time with two places left over, one at a time, and all of them."""
    batch = batches()[packed]
    (_, expected), gradients = measure(batch, **fields)
    (_, found), chunked = measure(batch, **fields, loss_chunk=chunk)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)
    for name, leaf in gradients.items():
        np.testing.assert_allclose(chunked[name], leaf, atol=1e-6, err_msg=name)


def by_hand(x_BxLxD, matrix, targets, weights, z_loss, cap):
    """Of float64 numbers: (the sum, the losses, the gradients of the states and of the matrix [vocabulary, width])."""
    x, w = np.asarray(x_BxLxD, np.float64), np.asarray(matrix, np.float64)
    raw = x @ w.T
    logits = cap * np.tanh(raw / cap) if cap else raw
    most = logits.max(-1, keepdims=True)
    sums = np.log(np.exp(logits - most).sum(-1)) + most[..., 0]
    losses = sums - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    d = np.exp(logits - sums[..., None]) * (1 + 2 * z_loss * sums)[..., None] - np.eye(len(w))[targets]
    d *= weights[..., None] * (1 - (logits / cap) ** 2 if cap else 1)
    of_matrix = np.einsum("blv,bld->vd", d, x)
    return (weights * (losses + z_loss * sums**2)).sum(), losses, d @ w, of_matrix


EVERY_PAIR = [  # of a tied head, z-loss, cap, chunks and scale: each value of one with each of another
    (True, 0.0, None, 0, 30.0),
    (False, 0.01, 3.0, 0, 0.3),
    (True, 0.0, 3.0, 3, 0.3),
    (False, 0.01, None, 3, 30.0),
    (True, 0.01, None, 10, 0.3),
    (False, 0.0, 3.0, 10, 30.0),
]
ALL = list(itertools.product([True, False], [0.0, 0.01], [None, 3.0], [0, 3, 10], [0.3, 30.0]))


@pytest.mark.parametrize("cases", [EVERY_PAIR, pytest.param(ALL, marks=pytest.mark.long)], ids=["pairs", "all"])
@pytest.mark.parametrize("passes", ["one", "three"])
def test_losses_and_gradients_are_those_by_hand(monkeypatch, passes, cases):
    """Float64 by numpy: tied or not, with z-loss, a soft cap, weights of 0, in chunks or not, of large logits too; by
    the one pass of GPUs, and by that of others."""
    platform = "gpu" if passes == "one" else "cpu"
    monkeypatch.setattr(entropy, "device_type", lambda mesh: SimpleNamespace(platform=platform))
    random, wrong, wanted, drawn, ways = np.random.default_rng(0), [], [], [], []
    targets = random.integers(0, 40, (3, 10))
    weights = np.float32(random.random((3, 10)) * (random.random((3, 10)) < 0.7))
    for tied, z_loss, cap, chunks, scale in cases:
        x, matrix = np.float32(scale * random.standard_normal((3, 10, 8))), np.float32(random.standard_normal((40, 8)))
        head = entropy.ProductHead(tied=tied, cap=cap)

        def total(x, matrix, head=head, chunks=chunks, z_loss=z_loss, tied=tied):
            arrays = [matrix if tied else matrix.T]
            return entropy.weighted_cross_entropy(head, arrays, x, targets, weights, chunks, z_loss=z_loss)

        def plain(x, matrix, head=head, chunks=chunks, z_loss=z_loss, tied=tied):
            found = entropy.cross_entropy(head, [matrix if tied else matrix.T], x, targets, chunks)
            return (weights * (found.losses + z_loss * found.log_sums**2)).sum(), found

        for way in (total, plain):
            ways.append(jax.value_and_grad(way, (0, 1), has_aux=True))
            drawn.append((x, matrix))
            wanted.append(by_hand(x, matrix, targets, weights, z_loss, cap))
    results = jax.jit(lambda all_: [way(*each) for way, each in zip(ways, all_, strict=True)])(drawn)
    for number, (((value, found), gradients), expected) in enumerate(zip(results, wanted, strict=True)):
        case, scale = cases[number // 2], cases[number // 2][-1]
        for name, one, other in zip(
            ("sum", "losses", "of x", "of the matrix"), (value, found.losses, *gradients), expected, strict=True
        ):
            error = np.abs(np.asarray(one, np.float64) - other).max() / np.abs(other).max()
            if not error < 3e-6 * max(scale, 1):  # logits of 200 are off by as much
                wrong.append((("total", "plain")[number % 2], name, *case, error))
    assert not wrong


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_logit_that_is_no_number_is_seen(monkeypatch, odd):
    """As by `jax.nn.logsumexp`: what masks a word with -inf is fine, anything else makes the loss no number."""
    logits, targets = np.zeros((2, 5), np.float32), np.array([1, 1])
    logits[0, 3] = odd
    found = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(entropy, "device_type", lambda mesh, of=platform: SimpleNamespace(platform=of))
        losses = jax.jit(lambda logits: entropy.losses_of_logits(logits, targets).losses)(logits)
        found.append(np.asarray(losses))
    assert [bool(np.isfinite(losses[0])) for losses in found] == [odd == -np.inf] * 2
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


def test_a_single_number_of_the_losses_has_its_own_gradient():
    """What an own loss makes of `token_losses`: its mean of some rows, without the second loss."""
    tokens, _ = batches()
    parts, params, rest, settings = taken(z_loss=0.1, weight_tying=False, loss_chunk=17)

    picks = (
        lambda found: found["loss"] + found["balance_loss"],
        lambda found: found["loss"],
        lambda found: found["balance_loss"],
        lambda found: found["row_loss"].mean(),
    )

    @jax.jit
    def gradients(params):
        def loss(params, pick):
            return pick(token_losses(parts.merge(params, rest, settings, training=True), tokens))

        return [jax.grad(loss)(params, pick)["head.kernel"] for pick in picks]

    both, *apart, of_rows = map(np.asarray, gradients(params))
    np.testing.assert_allclose(both, sum(apart), atol=1e-6)
    np.testing.assert_allclose(of_rows, apart[0], atol=1e-6)
    assert min(np.abs(one).max() for one in apart) > 1e-4


@pytest.mark.parametrize(
    "devices", [*(pytest.param(one, marks=pytest.mark.long) for one in ("8 of fsdp", "tensor")), "tokens"]
)
def test_the_head_is_sent_once(devices):
    """In its own type, and its gradient in float32: no loop holds a collective."""
    mesh = {
        "8 of fsdp": lambda: make_mesh(fsdp=8),
        "tensor": lambda: make_mesh(fsdp=4, tensor=2),
        "tokens": lambda: phase_mesh(make_mesh(fsdp=8), 4),
    }[devices]()
    parts, params, rest, settings = taken(vocab_size=8192, dim=64, loss_chunk=16, z_loss=1e-3)
    shardings = {name: NamedSharding(mesh, P()) for name in params}
    shardings["embedding.embedding"] = NamedSharding(
        mesh, P(None, ("fsdp", "tokens") if devices == "tokens" else "fsdp")
    )
    tokens = words(8 if devices != "tokens" else 4, 24, vocabulary=8192)

    def loss(params, tokens):
        return next_token_loss(parts.merge(cast(params, jnp.bfloat16), rest, settings, training=True), tokens)

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), in_shardings=(shardings, None), out_shardings=(None, shardings))
        step = step.lower(params, tokens).compile()
        text, (value, gradients) = step.as_text(), step(jax.device_put(params, shardings), tokens)
    expected, of_all = jax.jit(jax.value_and_grad(loss))(params, tokens)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    found, whole = (np.asarray(leaves["embedding.embedding"]) for leaves in (gradients, of_all))
    assert np.linalg.norm(found - whole) < 0.02 * np.linalg.norm(whole)
    inside = [
        line
        for body in loop_bodies(text)
        for line in body
        if re.search(r" (all-gather|all-reduce|reduce-scatter)", line)
    ]
    large = [
        line for line in inside if math.prod(map(int, re.findall(r"\d+", re.search(r"\[([\d,]*)\]", line)[1]))) > 8192
    ]
    assert not large


def loop_bodies(text):
    """The lines of each computation that is the body of a loop."""
    names = set(re.findall(r"body=%?([\w.-]+)", text))
    blocks = re.split(r"\n(?=%|ENTRY)", text)
    return [block.splitlines() for block in blocks if block.split(" ")[0].lstrip("%") in names]


def test_gradients_of_bfloat16_are_added_up_in_float32():
    """One token at a time, so that there is much to add up."""
    tokens = words(2, 64)
    exact = np.asarray(measure(tokens)[1]["embedding.embedding"])

    def off(**fields):
        return np.linalg.norm(measure(tokens, jnp.bfloat16, **fields)[1]["embedding.embedding"] - exact)

    assert off(loss_chunk=2) < 1.5 * off()


@pytest.mark.parametrize("logits", [2, 3, 5, 60, 64, 100], ids=str)
def test_many_chunks_have_few_empty_places(logits, monkeypatch):
    """Where a chunk is a few tokens of a row, chunks are not more than hold all tokens: 64 a row, so many logits at a
    time."""
    monkeypatch.setattr("roxxel_dist.model.loss.CHUNK_BYTES", 4 * 50 * logits)
    parts, params, rest, settings = taken()
    tokens = jax.ShapeDtypeStruct((2, 65), jnp.int32)
    loss = jax.make_jaxpr(lambda params, x: token_losses(parts.merge(params, rest, settings, training=True), x)["loss"])
    whole = 2 * 2 * 64 * SMALL["dim"] * SMALL["vocab_size"]
    assert whole <= traced_flops(loss(params, tokens)) <= 1.1 * whole


def test_the_logits_are_never_there_at_once():
    """A vocabulary so large that logits are most of the memory."""

    def peak(chunk):
        parts, params, rest, settings = taken(vocab_size=20_000, loss_chunk=chunk)
        loss = jax.grad(lambda p, x: token_losses(parts.merge(p, rest, settings, training=True), x)["loss"])
        return StepMemory.of_program(
            jax.jit(loss).lower(params, jax.ShapeDtypeStruct((8, 65), jnp.int32)).compile()
        ).peak

    assert peak(64) < 0.5 * peak(0)


def test_a_number_of_tokens():
    with pytest.raises(ValueError, match="loss_chunk is -1: it must be auto, a number of tokens, or 0"):
        ModelConfig(loss_chunk=-1)


class Whole(Attending):
    """It makes all logits at once."""

    states = None

    def __call__(self, *batch):
        return self.logits(Attending.states(self, *batch))


def of_own(kind, batch, dtype=None, vocabulary=50):
    parts, params, rest, settings = split_module(with_numbers(lambda: kind(vocabulary, 16, 1, 2, nnx.Rngs(0))))

    def loss(params):
        found = token_losses(parts.merge(cast(params, dtype), rest, settings, training=True), batch)
        return found["loss"], found

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), params


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_model_of_ones_own_in_chunks(packed, monkeypatch):
    """5 tokens of each of 3 rows at a time, in float32 and, of whole rows, in bfloat16."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 3 * 5 * 50)
    batch = batches()[packed]
    step, params = of_own(Attending, batch)
    assert "f32[3,23,50]" not in str(step.trace(params).jaxpr)
    (_, found), gradients = step(params)
    (_, expected), whole = of_own(Whole, batch)[0](params)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)
    for name, leaf in whole.items():
        np.testing.assert_allclose(gradients[name], leaf, atol=1e-6, err_msg=name)
    if packed:
        return
    half = of_own(Attending, batch, jnp.bfloat16)[0](params)[1]
    off, plain_off = (
        np.linalg.norm(np.asarray(found["out.kernel"]) - whole["out.kernel"])
        for found in (half, of_own(Whole, batch, jnp.bfloat16)[0](params)[1])
    )
    assert off < 1.5 * plain_off


def test_the_gradient_of_a_chunk_is_of_what_logits_use(monkeypatch):
    """The loop over the chunks carries no sum for the embedding or the layers, and that of the head in float32."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 3 * 5 * 20_000)
    step, params = of_own(Attending, np.zeros((3, 24), np.int32), jnp.bfloat16, vocabulary=20_000)
    inside = jax.make_jaxpr(step)(params).jaxpr.eqns[0].params["jaxpr"].eqns
    summed = {var.aval.shape: var.aval.dtype for eqn in inside if eqn.primitive.name == "scan" for var in eqn.outvars}
    assert summed[16, 20_000] == jnp.float32
    assert (20_000, 16) not in summed


class Wrong(Attending):
    def states(self, tokens):
        return super().states(tokens)[:, 0]


def test_states_of_another_shape_are_refused():
    step, params = of_own(Wrong, np.zeros((3, 24), np.int32))
    with pytest.raises(UserError, match=r"states returned an array of shape \(3, 16\) for tokens of shape \(3, 23\)"):
        step(params)


@pytest.mark.parametrize(("platform", "of_32"), [("gpu", 8), ("tpu", 16)])
def test_chunks_of_an_accelerator_have_a_least_number_of_tokens(monkeypatch, platform, of_32):
    assert auto_chunks(32, 1024, 50_304) == 104  # of 64 MB on a CPU
    monkeypatch.setattr("roxxel_dist.model.loss.device_type", lambda mesh: SimpleNamespace(platform=platform))
    assert auto_chunks(32, 1024, 50_304) == of_32  # of 1 GiB on a GPU
    assert auto_chunks(32, 1024, 256_000) == 32 * 1024 // 2048
    assert auto_chunks(1, 2048, 50_304) == auto_chunks(32, 1024, 256) == 0
    assert auto_chunks(32, 1024, 1024) == (0 if platform == "gpu" else 3)  # of 64 MB, which are more tokens
    assert auto_chunks(32, 1021, 50_304) == (7 if platform == "gpu" else 16)  # nothing near divides it
