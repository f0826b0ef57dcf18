import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from models import transformer
from states import init_state

from roxxel_dist.cluster import parameter_sharding
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
from roxxel_dist.cluster.parameter_sharding import axes_spec
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.split import split_module
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.train.step.state import _placed

MLA = {"mla": True, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 4}
MOE = {"use_moe": True, "n_experts": 4}
UNTIED = {"weight_tying": False, "pos_encoding": "learned", "no_sink": True}
SMALL = {"dim": 32, "num_blocks": 1, "vocab_size": 64, "max_context": 32, "head_size": 8, "kv_heads": 2}
ADAPTERS = {"use_lora": True, "lora_rank": 4, "lora_targets": "all"}
FSDP, TENSOR_FSDP, ALL_THREE, NO_FSDP = {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}


def parts_of(**fields):
    config = ModelConfig(**SMALL | fields)
    return split_module(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))


@pytest.mark.parametrize("fields", [UNTIED, MLA | UNTIED, MOE, MOE | {"use_swiglu": False}, ADAPTERS])
def test_every_matrix_has_its_axes(fields):
    mesh, found = make_mesh(fsdp=2, tensor=2), {}
    parts, params, _, frozen = parts_of(dim=256, vocab_size=512, **fields)
    for part in (parts.params, parts.frozen):
        for name, axes in zip(part.names, part.axes, strict=True):
            shape = (params | frozen)[name].shape
            if axes is None:
                assert name.endswith(("scale", "bias")), f"{name} is cut by the rule alone"
                continue
            assert len(axes) == len(shape) - name.startswith("blocks."), name
            found[name] = axes_spec(shape, mesh, axes, fsdp=True)
    assert found["embedding.embedding"] == P("tensor", "fsdp")
    if fields is UNTIED:
        assert found["blocks.attention.qkv.kernel"] == found["blocks.attention.gate.score.kernel"]
        assert found["blocks.attention.qkv.kernel"] == P(None, "fsdp", "tensor")
        assert found["blocks.feedforward.gate_up.kernel"] == P(None, "fsdp", None, "tensor")
        assert found["blocks.attention.out.kernel"] == found["blocks.feedforward.down.kernel"]
        assert found["blocks.attention.out.kernel"] == P(None, "tensor", "fsdp")
        assert found["head.kernel"] == P("fsdp", "tensor")
    if fields is MOE:
        assert found["blocks.feedforward.down"] == P(None, None, "tensor", "fsdp")
        assert found["blocks.feedforward.gate_up"] == P(None, None, "fsdp", None, "tensor")


def test_a_single_key_head_is_whole():
    """Its queries are cut all the same, by the matrix behind them."""
    parts, params, _, _ = parts_of(dim=512, kv_heads=1, head_size=64)
    axes, mesh = dict(zip(parts.params.names, parts.params.axes, strict=True)), make_mesh(tensor=4)
    for layer, spec in (("qkv", P()), ("out", P(None, "tensor"))):
        name = f"blocks.attention.{layer}.kernel"
        assert axes_spec(params[name].shape, mesh, axes[name], fsdp=False) == spec


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("attention.qkv.lora_a", ("fsdp", None)),
        ("attention.qkv.lora_b", (None, "tensor", None, None)),
        ("attention.out.lora_a", ("tensor", None)),
        ("feedforward.gate_up_adapter.lora_b", ("expert", None, None, "tensor")),
        ("feedforward.down_adapter.lora_a", ("expert", "tensor", None)),
    ],
)
def test_adapters_lie_as_what_they_are_added_to(name, axes):
    parts = parts_of(**ADAPTERS, **MOE)[0].params
    assert parts.axes[parts.names.index(f"blocks.{name}")] == axes


@pytest.mark.parametrize(
    ("shape", "axes", "fsdp", "spec"),
    [
        ((1024, 512), ("fsdp", "tensor"), True, P("fsdp", "tensor")),
        ((1024, 512), ("fsdp", "tensor"), False, P(None, "tensor")),
        ((7, 1024, 512), ("fsdp", "tensor"), True, P(None, "fsdp", "tensor")),  # seven layers
        ((50_257, 1024), ("tensor", "fsdp"), True, P(None, "fsdp")),
        ((1026, 512), ("fsdp", None), True, P(None, "fsdp")),
        ((1025, 514), ("fsdp", "tensor"), True, P(None, "tensor")),
        ((1025, 513), ("fsdp", "tensor"), True, P()),
        ((100, 256, 255), ("fsdp", "tensor"), True, P()),  # each layer is small
        ((1 << 20,), (), True, P()),
    ],
)
def test_what_does_not_divide(shape, axes, fsdp, spec):
    assert axes_spec(shape, make_mesh(fsdp=4, tensor=2), axes, fsdp=fsdp) == spec


def losses_and_gradients(fields, mesh, *, fsdp):
    parts, state, settings = init_state(transformer(**SMALL | fields), lambda params: {}, mesh, fsdp=fsdp)
    batch = jax.device_put(np.random.default_rng(0).integers(0, 64, (8, 17), np.int32), batch_sharding(mesh))

    def loss(params):
        told = token_losses(parts.merge(params, state.rest, settings, training=True), batch)
        return told["loss"] + told.get("balance_loss", 0.0), told["row_loss"]

    # B is zero at first, and A would have no gradient.
    params = {name: leaf + 0.05 if name.endswith("lora_b") else leaf for name, leaf in state.params.items()}
    with jax.set_mesh(mesh):
        (total, rows), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(total), np.asarray(rows), jax.device_get(gradients), params


def pairs():
    """Every variant on every mesh; `make test` has one of many parts, on all three axes."""
    variants = {"tied": {}, "untied": UNTIED, "mla": MLA, "moe": MOE, "plain moe": MOE | {"use_swiglu": False}}
    variants["adapters"] = ADAPTERS
    chunked = {"loss_chunk": 32, "scan_layers": True, "num_blocks": 2}
    quick = [("moe, untied", ALL_THREE)]
    for name, fields in (variants | {"in chunks": chunked, "moe, untied": MOE | UNTIED}).items():
        for axes in (FSDP, TENSOR_FSDP, ALL_THREE, NO_FSDP):
            marks = () if (name, axes) in quick else pytest.mark.long
            label = " x ".join(f"{axis} {size}" for axis, size in axes.items())
            yield pytest.param(fields, axes, id=f"{name}, {label}", marks=marks)


@pytest.mark.parametrize(("fields", "axes"), list(pairs()))
def test_the_same_numbers_as_on_one_device(fields, axes, monkeypatch):
    monkeypatch.setattr(parameter_sharding, "FSDP_MIN_SIZE", 1)
    total, rows, gradients, _ = losses_and_gradients(fields, make_mesh(1), fsdp=False)
    found = losses_and_gradients(fields, make_mesh(**axes), fsdp="fsdp" in axes)
    assert found[0] == pytest.approx(total, rel=1e-5)
    np.testing.assert_allclose(found[1], rows, rtol=1e-5)
    for name, leaf in gradients.items():
        np.testing.assert_allclose(found[2][name], leaf, atol=2e-6, rtol=1e-3, err_msg=name)
    specs = {axis for leaf in found[3].values() for entry in leaf.sharding.spec for axis in (entry,) if axis}
    assert specs == set(axes)


def test_activations_are_exchanged_as_seldom_as_can_be(monkeypatch):
    """Two blocks, forward and backward, data 2 x tensor 2: Megatron's two sums a block and direction, and sums alone.

    Those of the parameters' gradients over "data" are not counted: they are not of [rows, tokens, dim].
    """
    monkeypatch.setattr(parameter_sharding, "FSDP_MIN_SIZE", 1)
    mesh, model = make_mesh(4, tensor=2), transformer(**SMALL | {"num_blocks": 2, "weight_tying": False})
    parts, state, settings = init_state(model, lambda params: {}, mesh, fsdp=False)
    rows = jax.ShapeDtypeStruct((8, 17), np.int32, sharding=batch_sharding(mesh))

    def loss(params, x_BxLxD, tokens):
        model = parts.merge(params, state.rest, settings, training=True)
        model.embed = lambda *given: x_BxLxD  # the blocks alone: a cut vocabulary has sums of its own
        return (model.states(tokens)[0] ** 2).sum()

    x = jax.ShapeDtypeStruct((8, 17, 32), np.float32, sharding=batch_sharding(mesh))
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(state.params, x, rows).compile().as_text()
    count = {kind: len(re.findall(rf" {kind}(?:-start)?\(", program)) for kind in ("all-to-all", "collective-permute")}
    assert count == {"all-to-all": 0, "collective-permute": 0}
    sums = [line for line in program.splitlines() if re.search(r" all-reduce(?:-start)?\(", line)]
    assert sum("f32[4,17,32]" in line for line in sums) == 8, "\n".join(sums)


def test_own_models_keep_the_one_rule():
    class Own(nnx.Module):
        def __init__(self):
            self.embedding = nnx.Embed(512, 256, rngs=nnx.Rngs(0))

    parts, state, _ = init_state(Own, lambda params: {}, make_mesh(fsdp=2, tensor=2), fsdp=True)
    assert parts.params.axes == (None,)
    assert state.params["embedding.embedding"].sharding.spec == P("fsdp")
    assert _placed(parts, state.params, make_mesh(), True, None)["embedding.embedding"].sharding.spec == P("data")
