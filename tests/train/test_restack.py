"""The weights of a run for a model with `scan_layers` where the run had none, and the other way round."""

import jax
import numpy as np
import pytest
from flax import nnx

from roxxel_dist.cluster import parameter_sharding
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.scan_layers import stacked
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.train import scan_layers as restack
from roxxel_dist.train.checkpoint.store import CheckpointStore
from roxxel_dist.train.train_state import init_state


def state(mesh, scan, *, seed=0, **fields):
    shape = ModelConfig(**{"dim": 32, "num_blocks": 2, "vocab_size": 40, "max_context": 16} | fields, scan_layers=scan)
    return init_state(lambda: Transformer(shape, nnx.Rngs(params=seed)), lambda params: {}, mesh, fsdp=True)[1]


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.long), True])
def test_restored_in_the_other_form(scan, tmp_path, monkeypatch):
    monkeypatch.setattr(parameter_sharding, "FSDP_MIN_SIZE", 1)
    saved, mesh = state(make_mesh(1), scan), make_mesh(fsdp=4, tensor=2)
    store = CheckpointStore(tmp_path / "c")
    store.save(1, saved, {})
    store.wait()
    like = state(mesh, not scan, seed=5).params
    cut = {axis for leaf in like.values() for axis in leaf.sharding.spec if axis}
    assert cut == {"fsdp", "tensor"}
    found = restack.restore_params(store, 1, like)
    assert list(found) == list(like)
    assert {name: leaf.sharding for name, leaf in found.items()} == {name: leaf.sharding for name, leaf in like.items()}
    expected, restored = stacked(jax.device_get(saved.params)), stacked(jax.device_get(found))
    for name, leaf in expected.items():
        assert np.array_equal(restored[name], leaf), name
    same = restack.restore_params(store, 1, state(mesh, scan, seed=5).params)
    assert all(np.array_equal(same[name], leaf) for name, leaf in saved.params.items())
    for other in (state(mesh, not scan, num_blocks=3), state(mesh, scan, dim=16)):
        with pytest.raises(ValueError, match="of another model"):
            restack.restore_params(store, 1, other.params)
    store.close()


def test_each_adapter_keeps_what_it_counts():
    names = ["blocks.0.attention.qkv", "blocks.1.attention.qkv", "head"]
    leaves = {f"{name}.lora_a": np.zeros((4, 2)) for name in names}
    scales = {"blocks.attention.qkv": 2.0, "head": 3.0}
    apart = dict(zip(names, (2.0, 2.0, 3.0), strict=True))
    assert restack.scales_by_form(leaves, scales) == apart
    assert restack.scales_by_form(stacked(leaves), apart) == scales
    with pytest.raises(ValueError, match=r"blocks.attention.qkv\): .*scan_layers"):
        restack.scales_by_form(stacked(leaves), {**apart, names[0]: 1.0})
