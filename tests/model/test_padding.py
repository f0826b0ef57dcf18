"""Rows that are padded once for the kernel of attention: results are those of rows without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_by_xla import cudnn_by_xla
from flax import nnx
from models import transformer

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.data.packing import Packed
from roxxel_dist.model.attention import attend
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import Transformer

__all__ = ["cudnn_by_xla"]
SMALL = {"dim": 32, "num_blocks": 2, "vocab_size": 50, "max_context": 63, "head_size": 16}
LEARNED = {"pos_encoding": "learned", "norm_type": "layernorm", "norm_position": "both"}
EXPERTS = {"use_moe": True, "n_experts": 4, "alpha_balance": 1.0, "dropout_rate": 0.3}
LATENT = {"mla": True, "down_dim_q": 8, "down_dim_kv": 8, "rope_dim": 4, "norm_position": "after"}
ADAPTERS = {"use_lora": True, "lora_targets": "all", "loss_chunk": 32, "z_loss": 1e-3}


def build(**fields):
    return transformer(**SMALL | fields)


def computed(batch, **fields):
    """(the gradient, the losses) of a new model."""
    model = build(**fields)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        found = token_losses(nnx.merge(graph, params, rest, copy=True), batch)
        return found["loss"] + found.get("balance_loss", 0), found

    return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.mark.parametrize(
    ("fields", "packed"),
    [
        (EXPERTS | LATENT | {"num_blocks": 1}, True),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ({}, False),
                (ADAPTERS | LEARNED | {"sliding_window": True, "context_window": 9, "num_blocks": 1}, False),
                (LEARNED, False),
                ({"pos_encoding": "absolute", "qk_norm": "head", "no_sink": True}, True),
                ({"dropout_rate": 0.3, "gradient_checkpointing": True, "scan_layers": True}, True),
                (EXPERTS | LATENT | {"gradient_checkpointing": True, "scan_layers": True}, True),
                (EXPERTS, False),
                (EXPERTS | {"gradient_checkpointing": True, "scan_layers": True}, True),
                (LATENT, True),
                ({"parametrization": "mup", "base_dim": 16, "sliding_window": True, "context_window": 9}, False),
                (ADAPTERS, False),
                ({"use_lora": True, "lora_dropout": 0.2}, False),  # its draws are those of whole arrays
            )
        ),
    ],
)
def test_padding_changes_no_result(fields, packed, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 50, (3, 64), np.int32)
    places = np.broadcast_to(np.arange(64, dtype=np.int32) % 20, tokens.shape)
    batch = Packed(tokens, np.cumsum(places == 0, 1, dtype=np.int32) - 1, places) if packed else tokens
    plain = computed(batch, **fields)
    lengths = []
    monkeypatch.setattr(attend, "_kernel_tokens", lambda *a, **k: lengths.append(a[2]) or 64)
    found = computed(batch, **fields)
    assert set(lengths) == {63}
    for mine, whole in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(mine, whole, atol=1e-6 + 2e-6 * np.abs(whole).max(), rtol=1e-5)


def test_layers_have_the_length_of_the_kernel(cudnn_by_xla, monkeypatch):
    """bfloat16 rows of 1,023 inputs on a GPU: 1,024 in all layers, and no array of 1,023 between them."""
    monkeypatch.setattr(attend, "kernel_for", lambda *a, **k: "cudnn")
    config = ModelConfig(**SMALL | {"max_context": 2000}, scan_layers=True)
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))

    def shapes(length):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda state, tokens: nnx.merge(graph, state).states(tokens)[0])(state, tokens)
        (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        return str(loop.params["jaxpr"]), jaxpr.out_avals[0].shape

    inside, out = shapes(1023)
    assert ",1024,32]" in inside
    assert "1023" not in inside
    assert out == (1, 1023, 32)
    short, _ = shapes(31)  # 1 of 31 tokens is more than 1/32: the kernel pads in each layer
    assert ",31,32]" in short


def test_what_is_padded(monkeypatch):
    config = ModelConfig(**SMALL)

    def length(rows, tokens, kernel, packed=False):
        monkeypatch.setattr(attend, "kernel_for", lambda *a, **k: kernel)
        x = jax.ShapeDtypeStruct((rows, tokens, 32), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32) if packed else None

        def padded(x, ids):
            found, metadata = attend.pad_rows(config, x, attend.AttentionMetadata(jnp.arange(tokens), segments_BxL=ids))
            assert metadata.position_L.shape == found.shape[1:2]
            assert not packed or metadata.segments_BxL.shape == found.shape[:2]
            assert metadata.layer.length == (None if found.shape[1] == tokens else tokens)
            return found

        return jax.eval_shape(padded, x, ids).shape[1]

    assert [length(1, n, "cudnn") for n in (1022, 1023, 1024, 31, 32, 33)] == [1022, 1024, 1024, 31, 32, 34]
    assert [length(1, n, "cudnn", packed=True) for n in (1023, 1100, 2047, 3071)] == [1024, 1100, 2048, 3072]
    assert [length(1, n, "splash") for n in (1023, 1100, 1151)] == [1024, 1100, 1152]
    assert [length(1, n, "xla") for n in (1023, 1151)] == [1023, 1151]
    with jax.set_mesh(phase_mesh(make_mesh(8), 1)):  # tokens of a row are on several devices
        assert length(1, 1023, "cudnn") == 1023
