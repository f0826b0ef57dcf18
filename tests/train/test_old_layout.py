"""Runs that were begun when blocks were apart, and qkv and gate_up side by side: they go on with the same losses.

old_layout/NAME.tar.xz is a run after its third step, and old_layout/losses.json has the losses of all six as the code
of then (272769c, layout 1) had them: grouped heads, a plain feed-forward layer, dropout and a gate (unrolled), experts
under scan_layers (scanned), muon with a single key head (muon), and adapters on the first (adapters).
"""

import json
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from commands import rows
from flax import nnx

from roxxel_dist import Config, Experiment, Transformer
from roxxel_dist.export import export_run
from roxxel_dist.train.checkpoint.layout import convert

FOLDER = Path(__file__).with_name("old_layout")
LOSSES = json.loads((FOLDER / "losses.json").read_text())


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """In a working directory that has all of them."""
    monkeypatch.chdir(tmp_path)
    for name in LOSSES:
        with tarfile.open(FOLDER / f"{name}.tar.xz") as tar:
            tar.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["unrolled", "scanned", *(pytest.param(name, marks=pytest.mark.long) for name in ("muon", "adapters"))]
)
def test_a_run_goes_on(runs, name):
    config = Config.from_yaml(runs / name / "config.yaml")
    config.max_steps, config.init_from = 6, "base" if config.use_lora else None  # it has been moved
    Experiment(config).fit(run_dir=name, resume=True)
    found = rows(runs / name)
    for step in (4, 5, 6):
        assert found[step]["train_loss"] == pytest.approx(LOSSES[name][str(step)], rel=2e-5), step
    saved = json.loads((runs / name / "checkpoints" / "6" / "meta.json").read_text())
    assert saved["layout"] == 2
    assert "params/blocks.attention.qkv.kernel" in saved["shapes"] or name == "adapters"


def test_its_weights_are_read(runs):
    """From its checkpoint, from its file of weights, and from what is exported of either."""
    tokens = jnp.arange(24).reshape(2, 12)
    logits = nnx.jit(lambda model, tokens: model(tokens))
    expected = logits(Transformer.from_pretrained("unrolled"), tokens)
    assert len(np.unique(expected)) > 1000
    export_run("unrolled", "safetensors", "exported")
    for checkpoint in (runs / "unrolled" / "checkpoints").iterdir():
        checkpoint.rename(runs / checkpoint.name)
    for folder in ("unrolled", "exported"):
        assert np.array_equal(logits(Transformer.from_pretrained(folder), tokens), expected)


def test_arrays_are_rearranged():
    """Two blocks, one key head with two queries, heads of two."""
    old = {f"blocks.{i}.attention.qkv.kernel": np.arange(24.0).reshape(3, 8) + 100 * i for i in range(2)}
    old |= {f"blocks.{i}.feedforward.up.kernel": np.ones((3, 5)) for i in range(2)} | {"norm.scale": np.ones(3)}
    shapes = {
        "blocks.attention.qkv.kernel": (2, 3, 1, 4, 2),
        "blocks.feedforward.gate_up.kernel": (2, 3, 1, 5),
        "norm.scale": (3,),
    }
    new = convert(old, shapes)
    assert {name: array.shape for name, array in new.items()} == shapes
    assert np.array_equal(new["blocks.attention.qkv.kernel"][1, 0, 0], [[100, 101], [102, 103], [104, 105], [106, 107]])
    name = "blocks.attention.qkv.kernel"
    two = convert({name: np.arange(8.0)[None, None]}, {name: (1, 1, 2, 4, 1)})
    assert np.array_equal(two[name].ravel(), [0, 1, 4, 6, 2, 3, 5, 7])
    with pytest.raises(ValueError, match=r"it has no blocks.attention.out.kernel"):
        convert(old, {"blocks.attention.out.kernel": (2, 4, 3)})
    with pytest.raises(ValueError, match=r"norm.scale is \(3,\) in it and \(4,\) here"):
        convert(old, {"norm.scale": (4,)})
