import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster import parameter_sharding
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
from roxxel_dist.cluster.parameter_sharding import table_spec
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.sharding import transformer_axes
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.train.train_state import _places, init_state

MLA = {"mla": True, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 4}
MOE = {"use_moe": True, "n_experts": 4}
UNTIED = {"weight_tying": False, "pos_encoding": "learned", "no_sink": True}
SMALL = {"dim": 32, "num_blocks": 1, "vocab_size": 64, "max_context": 32, "head_size": 8, "kv_heads": 2}
ADAPTERS = {"use_lora": True, "lora_rank": 4, "lora_targets": "all"}
FSDP, TENSOR_FSDP, ALL_THREE, NO_FSDP = {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}


def shapes_of(**fields):
    config = ModelConfig(**SMALL | fields)
    return jax.eval_shape(lambda: nnx.state(Transformer(config, nnx.Rngs(params=0)), nnx.Param))


def named(state):
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(state)
    }


@pytest.mark.parametrize("fields", [UNTIED, MLA | UNTIED, MOE, MOE | {"use_swiglu": False}, {"scan_layers": True}])
def test_every_matrix_is_in_the_table(fields):
    mesh, found = make_mesh(fsdp=2, tensor=2), {}
    for name, shape in named(shapes_of(dim=256, vocab_size=512, **fields)).items():
        axes = transformer_axes(name)
        assert len(axes) in (0, len(shape), len(shape) - 1), name
        assert axes or name.endswith(("scale", "bias")), f"{name} is whole on every device"
        found[name.split("blocks.")[-1]] = table_spec(shape, mesh, axes, fsdp=True)
    assert found["embedding.embedding"] == P("tensor", "fsdp")
    if fields is UNTIED:
        assert found["0.attention.qkv.kernel"] == found["0.feedforward.gate_up.kernel"] == P("fsdp", "tensor")
        assert found["0.attention.out.kernel"] == found["0.feedforward.down.kernel"] == P("tensor", "fsdp")
        assert found["head.kernel"] == P("fsdp", "tensor")
    if fields is MOE:
        assert found["0.feedforward.down"] == P(None, "tensor", "fsdp")


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("blocks.0.attention.qkv.lora_a", ("fsdp", None)),
        ("blocks.0.attention.qkv.lora_b", (None, "tensor")),
        ("blocks.attention.out.lora_a", ("tensor", None)),
        ("blocks.3.feedforward.gate_up.lora_b", (None, "tensor")),
        ("blocks.3.feedforward.down_adapter.lora_a", ("tensor", None)),
        ("blocks.0.attention_norm.scale", ()),
        ("position.embedding", (None, "fsdp")),
    ],
)
def test_adapters_lie_as_what_they_are_added_to(name, axes):
    assert transformer_axes(name) == axes


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
    assert table_spec(shape, make_mesh(fsdp=4, tensor=2), axes, fsdp=fsdp) == spec


def losses_and_gradients(fields, mesh, *, fsdp):
    config = ModelConfig(**SMALL | fields)
    parts, state, settings = init_state(
        lambda: Transformer(config, nnx.Rngs(params=0, dropout=1)), lambda params: {}, mesh, fsdp=fsdp
    )
    batch = jax.device_put(
        np.asarray(jax.random.randint(jax.random.key(0), (8, 17), 0, 64), np.int32), batch_sharding(mesh)
    )

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


def test_own_models_keep_the_one_rule():
    class Own(nnx.Module):
        def __init__(self):
            self.embedding = nnx.Embed(512, 256, rngs=nnx.Rngs(0))

    parts, state, _ = init_state(Own, lambda params: {}, make_mesh(fsdp=2, tensor=2), fsdp=True)
    assert parts.axes is None
    assert state.params["embedding.embedding"].sharding.spec == P("fsdp")
    assert _places(parts, state.params, make_mesh(), True)["embedding.embedding"].spec == P("data")
