"""Low-rank adapters: what they compute, what they are merged to, which parameters are theirs."""

import jax
import numpy as np
import pytest
from flax import nnx

from roxxel_dist.lora import LoRALinear, merge_adapters
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.split import split_module
from roxxel_dist.model.transformer import Transformer

SHAPE = {"dim": 32, "num_blocks": 2, "head_size": 8, "kv_heads": 2, "vocab_size": 50, "max_context": 24}
MLA = {"mla": True, "kv_heads": None, "down_dim_q": 16, "down_dim_kv": 12, "rope_dim": 8}
MOE = {"use_moe": True, "n_experts": 3, "top_k_mlp": 2}
VARIANTS = {
    "attention": {"lora_targets": "attention", "no_sink": True},
    "plain feed-forward": {"lora_targets": "mlp", "use_swiglu": False},
    "latent attention, experts": {**MLA, **MOE, "lora_targets": "all"},
    "latent attention, absorbed": {**MLA, "inference": True},
}
MORE = ["plain feed-forward", "latent attention, absorbed"]


def made(**fields):
    """A model in evaluation mode whose parameters are any numbers: nothing is compiled to make them."""
    config = ModelConfig(**{**SHAPE, "lora_rank": 4, **fields})
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param, ...)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.device_put((rng.normal(size=leaf.shape) / 8).astype(leaf.dtype)), params)
    rest = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), rest)
    model = nnx.merge(graphdef, params, rest)
    model.eval()
    return model


def adapted(**fields):
    return made(use_lora=True, **fields)


def with_weights(model, params):
    """The same model with other arrays of these names."""
    parts, _, rest, settings = split_module(model)
    return parts.merge(params, rest, settings, training=False)


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def tokens(length=20):
    return np.random.default_rng(7).integers(0, 50, (2, length), np.int32)


def test_a_layer_is_what_the_paper_says():
    layer = nnx.jit(lambda: LoRALinear(6, 5, rank=2, alpha=8.0, rngs=nnx.Rngs(0)))()
    run = nnx.jit(lambda layer, x: (layer(x), x @ layer.kernel[...], layer.merge_weights()))
    draws = np.random.default_rng(1)
    x = draws.normal(size=(3, 6)).astype(np.float32)
    found, without, _ = run(layer, x)
    np.testing.assert_array_equal(found, without)  # B is zero at first
    layer.lora_b[...] = jax.device_put(draws.normal(size=(2, 5)).astype(np.float32))
    kernel, a, b = (np.asarray(one[...], np.float64) for one in (layer.kernel, layer.lora_a, layer.lora_b))
    whole = kernel + 8.0 / 2 * a @ b
    found, _, merged = run(layer, x)
    np.testing.assert_allclose(found, np.asarray(x, np.float64) @ whole, atol=1e-5)
    np.testing.assert_allclose(merged, whole, atol=1e-6)
    assert 0.1 < np.abs(a).max() <= 6**-0.5


@pytest.mark.parametrize(
    "name",
    ["attention", *(pytest.param(name, marks=pytest.mark.long) for name in ("latent attention, experts", *MORE))],
)
def test_merged_it_is_a_plain_model_that_does_the_same(name):
    fields = VARIANTS[name]
    model, plain = adapted(**fields), made(**fields)
    parts, params, _, frozen = split_module(model)
    names = split_module(plain)[0].params.names
    weights = jax.jit(lambda leaves: merge_adapters(leaves, parts.scales))(frozen | params)
    assert set(weights) == set(names) | (set(frozen) - set(parts.frozen.names))
    found = np.asarray(logits(with_weights(plain, weights), tokens()))
    np.testing.assert_allclose(found, logits(model, tokens()), atol=1e-5 * np.abs(found).max())
    alone = logits(with_weights(plain, {name: frozen[name] for name in names}), tokens())
    assert np.abs(alone - found).max() > 1e-2, "the adapters count"


@pytest.mark.long
def test_with_a_cache_it_reads_the_same():
    model = adapted(**MLA, lora_targets="all")
    step = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    first, cache = step(model, tokens()[:, :13], model.empty_cache(2))
    last, _ = step(model, tokens()[:, 13:], cache)
    whole = np.asarray(logits(model, tokens()))
    np.testing.assert_allclose(np.concatenate([first, last], 1), whole, atol=1e-5 * np.abs(whole).max())


def test_few_parameters_are_adapters():
    config = ModelConfig(dim=1024, num_blocks=12, vocab_size=32000, use_lora=True, lora_rank=8)
    shapes = jax.eval_shape(lambda: split_module(Transformer(config, nnx.Rngs(0)))[1:])
    trained, frozen = (sum(leaf.size for leaf in leaves.values()) for leaves in (shapes[0], shapes[2]))
    assert all(name.endswith(("attention.qkv.lora_a", "qkv.lora_b", "out.lora_a", "out.lora_b")) for name in shapes[0])
    assert trained / (trained + frozen) < 0.02
    assert trained == 12 * 8 * (1024 + 3 * 1024 + 1024 + 1024)


def test_dropout_is_on_the_adapters_path_alone():
    layer = nnx.jit(lambda: LoRALinear(6, 5, dropout=0.5, rngs=nnx.Rngs(0, dropout=1)))()
    run = nnx.jit(lambda layer, x: (layer(x), layer(x), x @ layer.kernel[...], x @ layer.merge_weights()))
    x = np.ones((4, 6), np.float32)
    found, _, without, _ = run(layer, x)
    np.testing.assert_array_equal(found, without)
    layer.lora_b[...] = jax.device_put(np.ones((8, 5), np.float32))
    found, again, *_ = run(layer, x)
    assert not np.array_equal(found, again)
    layer.eval()
    found, again, _, merged = run(layer, x)
    np.testing.assert_array_equal(found, again)
    np.testing.assert_allclose(found, merged, atol=1e-5)


def test_the_modules_of_a_model():
    config = ModelConfig(**SHAPE, use_lora=True, lora_targets="all")

    def of_each():
        modules = [one for one in Transformer(config, nnx.Rngs(0)).modules() if isinstance(one, LoRALinear)]
        return [(one.merge_weights(), one.kernel[...]) for one in modules]

    found = jax.eval_shape(of_each)
    assert len(found) == 4  # each of all blocks
    assert all(merged.shape == kernel.shape for merged, kernel in found)


def test_operations_count_no_gradient_of_what_is_frozen():
    few, all_of_it = adapted().flops_per_token(16), made().flops_per_token(16)
    assert 2 / 3 < few / all_of_it < 0.9
