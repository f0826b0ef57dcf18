"""Programs are traced for the devices of their mesh, which may be others than those of this process."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from roxxel_dist import Config
from roxxel_dist.cluster.mesh import AXES, device_type, make_mesh
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.model.attention.kernels import Situation, kernel_for
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.weights.load import attention_kernel, slower_attention

DEVICES = {
    "tpu": ("TPU v5 lite", "splash"),
    "gpu": ("NVIDIA H100 80GB HBM3", "cudnn"),
    "cpu": ("cpu", "xla"),
}
SHAPE = Shape(steps=1, batch_size=8, seq_len=129)


def mesh_of(platform, kind):
    """A mesh of two devices that are not here."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return AbstractMesh((2, 1, 1, 1), AXES, (AxisType.Auto,) * 4, abstract_device=device)


def traced(platform, kind, **fields):
    """What a model's program is made of, for such devices."""
    config = ModelConfig(dim=128, n_heads=2, num_blocks=1, vocab_size=50, max_context=128, **fields)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    with jax.sharding.use_abstract_mesh(mesh_of(platform, kind)):
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state)
        tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
        return str(jax.make_jaxpr(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens))


@pytest.mark.parametrize("platform", DEVICES)
def test_attention_is_by_the_kernel_of_the_mesh(platform):
    kind, kernel = DEVICES[platform]
    if platform == "gpu" and importlib.util.find_spec("jax_cuda12_plugin") is None:
        with pytest.raises(RuntimeError, match="cuDNN is not detected"):  # jax looks for it while it traces
            traced(platform, kind)
        return
    program = traced(platform, kind)
    marks = {"splash": "splash_mha" in program, "cudnn": "dot_product_attention_fwd" in program}
    assert [name for name, found in marks.items() if found] == [kernel] * (kernel != "xla")


@pytest.mark.parametrize("platform", DEVICES)
def test_auto_is_the_kernel_of_the_mesh(platform):
    kind, kernel = DEVICES[platform]
    with jax.sharding.use_abstract_mesh(mesh_of(platform, kind)):
        assert kernel_for("auto", Situation(device=device_type(), key_size=64, bf16=True, packed=False)) == kernel
        assert device_type().platform == platform


@pytest.mark.parametrize("platform", DEVICES)
def test_experts_are_sorted_where_the_mesh_has_a_kernel_for_it(platform):
    program = traced(platform, DEVICES[platform][0], use_moe=True, n_experts=4, top_k_mlp=2, attention="xla")
    assert ("ragged_dot" in program) == (platform == "tpu")


@pytest.mark.parametrize("platform", DEVICES)
def test_the_kernel_of_a_run_is_that_of_its_devices(platform):
    kind, kernel = DEVICES[platform]
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    config = Config(dim=128, n_heads=2, bf16_compute=True, vocab_size=50)
    assert attention_kernel(config, [SHAPE], devices=[device] * 4) == kernel
    # Eight rows are cut along their tokens over sixteen: that is for the phase, and not for the run.
    assert attention_kernel(config, [SHAPE], devices=[device] * 16) == kernel


def test_a_mesh_is_made_of_the_devices_that_are_given():
    some = jax.devices()[2:6]
    mesh = make_mesh(fsdp=2, devices=some)
    assert list(mesh.devices.flat) == some
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 1}
    with pytest.raises(ValueError, match=r"n_devices is 5, but 4 device\(s\) are here"):
        make_mesh(5, devices=some)


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GTX"])
def test_the_capability_of_a_gpu_that_is_not_here(kind):
    """An abstract device does not say it; an unknown GPU has none that is known to be enough."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    found = kernel_for("auto", Situation(device=device, key_size=64, bf16=True, packed=False))
    assert found == ("xla" if kind == "NVIDIA GTX" else "cudnn")
    wide = kernel_for("auto", Situation(device=device, key_size=192, bf16=True, packed=False))
    assert wide == ("cudnn" if "H100" in kind else "xla")


@pytest.mark.parametrize(
    ("platform", "kind", "fields", "why"),
    [
        ("gpu", "Tesla V100-SXM2-16GB", {}, "cuDNN needs compute capability 8.0, and this is a Tesla V100-SXM2-16GB"),
        ("gpu", "NVIDIA H100 80GB HBM3", {"bf16_compute": False}, "cuDNN computes in bfloat16"),
        (
            "gpu",
            "NVIDIA A100-SXM4-80GB",
            {"head_size": 192},
            "cuDNN takes keys of 128 channels here, and they have 192",
        ),
        ("gpu", "NVIDIA H100 80GB HBM3", {}, ""),
        ("gpu", "Tesla V100-SXM2-16GB", {"attention": "xla"}, ""),  # asked for
        ("gpu", "Tesla V100-SXM2-16GB", {"model": "own.py:model"}, ""),
        ("tpu", "TPU v5 lite", {"bf16_compute": False}, ""),
        ("cpu", "cpu", {}, ""),
    ],
)
def test_what_xla_costs_where_a_kernel_is_missing(platform, kind, fields, why):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    config = Config(**{"dim": 128, "n_heads": 2, "bf16_compute": True, "vocab_size": 50} | fields)
    line = slower_attention(config, [SHAPE], attention_kernel(config, [SHAPE], devices=[device]), [device])
    cost = "for each row of 128 inputs a layer reads and writes about 2.10 MB of scores, which cudnn keeps on the chip"
    assert line == (f"attention is computed by XLA, as {why}: {cost}" if why else "")
