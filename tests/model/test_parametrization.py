"""Maximal update parametrization: what follows the width, and what does not."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import with_numbers

from roxxel_dist import Config
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.parametrization import Width, widths
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.optimizer import NamedOptimizer
from roxxel_dist.weights.load import model_builder, parameter_widths

TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) % 50
HIDDEN = "blocks.attention.qkv.kernel"


def transformer(dim, **fields):
    return Transformer(ModelConfig(dim=dim, vocab_size=50, num_blocks=1, head_size=16, **fields), nnx.Rngs(0))


def shapes(dim, **fields):
    return nnx.eval_shape(lambda: transformer(dim, **fields))


def params(model):
    leaves = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in leaves
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_tying": False},
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ({}, {"weight_tying": False, "use_moe": True}, {"mla": True, "rope_dim": 8})
        ),
    ],
)
def test_at_the_base_width_it_is_the_standard_one(fields):
    mup = {"parametrization": "mup", "base_dim": 32}
    one, other = jax.jit(lambda: [transformer(32, **fields, **more)(TOKENS) for more in ({}, mup)])()
    assert np.array_equal(one, other)


def test_what_each_kind_of_parameter_gets():
    fields = {"use_moe": True, "weight_tying": False, "parametrization": "mup", "base_dim": 32, "hidden_dim": None}
    found = widths(shapes(128, **fields), shapes(32, use_moe=True, weight_tying=False))
    hidden, output, embedding, norm = (
        found[name] for name in (HIDDEN, "head.kernel", "embedding.embedding", "norm.scale")
    )
    assert hidden == Width(4.0, 4.0, 4.0)
    assert (hidden.initial_scale, hidden.adam_rate, hidden.sgd_rate, hidden.muon_rate) == (0.5, 0.25, 1.0, 0.5)
    assert (output.initial_scale, output.adam_rate, output.sgd_rate) == (0.25, 0.25, 0.25)
    assert (embedding.initial_scale, embedding.adam_rate, embedding.sgd_rate) == (1.0, 1.0, 4.0)
    assert (norm.initial_scale, norm.adam_rate, norm.sgd_rate) == (1.0, 1.0, 4.0)
    assert found["blocks.feedforward.router.kernel"].adam_rate == 0.25
    assert found["blocks.feedforward.gate_up"].rows == 4  # the experts are not its rows


def test_initial_scales_and_logits():
    mup = {"parametrization": "mup", "base_dim": 32}
    names = HIDDEN, "embedding.embedding"

    def begun(**fields):
        found = params(transformer(128, **fields))
        return {name: found[name] for name in names}  # of the others no program is made

    ours, theirs = jax.jit(lambda: [begun(**more) for more in (mup, {})])()
    wide = shapes(128, **mup)
    assert np.allclose(ours[HIDDEN], np.asarray(theirs[HIDDEN]) / 2)
    assert np.array_equal(ours["embedding.embedding"], theirs["embedding.embedding"])
    assert wide.output_scale == 0.25
    assert wide.blocks.attention.mask.scale == 16**-0.5  # as many channels a head as at the base width
    one_head = ModelConfig(dim=128, n_heads=1, vocab_size=50, parametrization="mup", base_dim=32)
    of_one = nnx.eval_shape(lambda: Transformer(one_head, nnx.Rngs(0)))
    assert of_one.blocks.attention.mask.scale == 32**0.5 / 128


def test_a_cache_and_the_absorbed_form_have_the_same_scale():
    for fields in ({}, {"mla": True, "rope_dim": 8}):
        model = with_numbers(lambda fields=fields: transformer(64, parametrization="mup", base_dim=32, **fields))
        read = nnx.jit(lambda model: (model(TOKENS, cache=model.empty_cache(2))[0], model(TOKENS)))
        found, expected = read(model)
        assert np.allclose(found, expected, atol=1e-5)


class Own(nnx.Module):
    def __init__(self, config, rngs):
        self.embedding = nnx.Embed(config.vocab_size, config.dim, rngs=rngs)
        self.inner = nnx.Linear(config.dim, 2 * config.dim, rngs=rngs)
        self.out = nnx.Linear(2 * config.dim, config.vocab_size, rngs=rngs)

    def __call__(self, tokens):
        return self.out(jax.nn.relu(self.inner(self.embedding(tokens))))


def own(config, rngs):
    return Own(config, rngs)


def narrow(config):
    return {"dim": config.dim // 4}


BASES = {"base_dim": 64}, {"base_widths": f"{__name__}:narrow"}


@pytest.mark.parametrize("base", [BASES[0], pytest.param(BASES[1], marks=pytest.mark.long)])
def test_a_model_of_ones_own_has_the_scales_of_its_base(base, monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, __name__, __import__("types").SimpleNamespace(own=own, narrow=narrow)
    )
    config = Config(dim=256, vocab_size=300, model=f"{__name__}:own", parametrization="mup", **base)
    build = model_builder(config)
    plain = Config(dim=64, vocab_size=300)
    made = jax.jit(lambda: (params(build()), params(Own(plain, nnx.Rngs(0)))))()
    ours, theirs = jax.tree.map(np.asarray, made)  # else np.std is a program for each shape
    ratio = {name: float(np.std(ours[name]) / max(np.std(theirs[name]), 1e-9)) for name in ours}
    assert ratio["embedding.embedding"] == pytest.approx(1, rel=0.03)
    assert ratio["inner.kernel"] == pytest.approx(1 / 2, rel=0.03)
    assert ratio["out.kernel"] == pytest.approx(1 / 4, rel=0.03)
    assert not np.any(ours["out.bias"])
    found = parameter_widths(config, build)
    assert found["out.kernel"].adam_rate == 0.25
    for other in BASES:
        same = Config(**{**config.to_dict(), "base_dim": None, "base_widths": None, **other})
        assert parameter_widths(same, model_builder(same)) == found, "the same base, said in another way"


@pytest.mark.parametrize(
    "kind",
    ["adamw", "sgd", "muon", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("nadamw", "adafactor", "lion"))],
)
def test_rates_follow_the_width_and_decay_does_not(kind):
    shapes = {"a.kernel": (16, 32), "embed.embedding": (50, 16), "norm.scale": (16,)}
    of_widths = {"a.kernel": Width(4, 2, 2), "embed.embedding": Width(1, 4, 4), "norm.scale": Width(1, 4, 4)}
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    draws = np.random.default_rng(1)
    gradients = {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def updates(weights, decay, widths):
        optimizer = NamedOptimizer(OptimizerConfig(optimizer=kind, lr=1e-2, weight_decay=decay), widths=widths)
        settings = {**optimizer.settings(100), "warmup_steps": 0.0}
        transformation = optimizer.build(settings, 5)
        return transformation.update(gradients, transformation.init(weights), weights)[0]

    cases = (0.0, {}), (0.0, of_widths), (0.1, of_widths), (0.1, {})
    plain, scaled, decayed, plain_decayed = jax.tree.map(
        np.asarray, jax.jit(lambda weights: [updates(weights, *case) for case in cases])(weights)
    )
    rates = {"sgd": [0.5, 4.0, 4.0], "muon": [0.5, 1.0, 1.0]}.get(kind, [0.25, 1.0, 1.0])
    for name, rate in zip(shapes, rates, strict=True):
        assert np.allclose(scaled[name], plain[name] * rate, rtol=1e-5), name
    for name in shapes:
        assert np.allclose(decayed[name] - scaled[name], plain_decayed[name] - plain[name], atol=1e-7), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parametrization": "mup"}, "set base_dim to the dim for which lr was searched"),
        ({"base_dim": 32}, "parametrization is standard, which has no base width"),
        ({"parametrization": "mup", "base_dim": 32, "use_lora": True}, "adapters are trained with the standard one"),
        ({"parametrization": "mup", "base_dim": 31}, "base_dim is 31, and a model of that dim is not possible"),
        ({"parametrization": "muP"}, "parametrization is 'muP': it must be one of standard, mup"),
    ],
)
def test_what_does_not_fit_together(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(dim=64, **fields)


def test_models_with_other_parameters():
    with pytest.raises(ValueError, match=r"head\.kernel is in one of the models alone"):
        widths(shapes(64, weight_tying=False), shapes(32))
