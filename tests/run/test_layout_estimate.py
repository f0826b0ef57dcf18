"""What is known of a layout before its step is compiled, and how many are."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from roxxel_dist import Config
from roxxel_dist.cluster.mesh import fit_sharding, make_mesh
from roxxel_dist.devices.accelerators import HALF, Accelerator
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.run.estimate import target_layouts
from roxxel_dist.run.estimate.target_layouts import estimated_seconds, least_bytes, scanned_fields
from roxxel_dist.train.step.optimizer import NamedOptimizer, OptimizerConfig
from roxxel_dist.train.step.step import SPIKE_FACTOR
from roxxel_dist.train.steps import StepOptions, make_steps


def test_a_deep_model_is_compiled_as_one_block():
    """So that an answer takes minutes; a model of the user's own is as it is."""
    for fields, is_scanned in (
        ({"num_blocks": 12}, False), ({"num_blocks": 13}, True), ({"num_blocks": 96, "scan_layers": True}, False),
        ({"num_blocks": 96, "model": "own:build"}, False),
    ):  # fmt: skip
        assert scanned_fields(Config(**fields)) == ({"scan_layers": True} if is_scanned else {})


def step_of(devices, fsdp=False, **fields):
    """(config, mesh, args) of the training step of a layout, on simulated devices; nothing is computed."""
    config = Config(vocab_size=50_304, dim=768, num_blocks=2, bf16_compute=True, n_devices=devices, fsdp=fsdp, **fields)
    needs = config.device_needs
    mesh = make_mesh(devices, fsdp=needs.fsdp, expert=needs.expert, tensor=needs.tensor)
    optimizer, options = NamedOptimizer(OptimizerConfig(lr=1e-3)), StepOptions(fsdp=fsdp)
    builder = TransformerBuilder(config.part(ModelConfig), 0, 1)
    numbers = optimizer.settings(9) | {SPIKE_FACTOR: 0.0}
    steps = make_steps(builder, token_losses, optimizer, mesh, options, numbers)
    sharding = fit_sharding(steps.sharding, (64, 1025))
    batch = jax.ShapeDtypeStruct((64, 1025), np.int32, sharding=sharding)
    return config, mesh, steps.args("training", batch)


def test_what_a_layout_sends_is_known_before_it_is_compiled(monkeypatch):
    """Times of a device whose links alone are slow: fsdp sends parameters twice in bfloat16, and the gradient."""
    slow = Accelerator("cpu", 1e9, 80, HALF, "", 1e9, 1.0)
    monkeypatch.setattr(target_layouts, "accelerator", lambda kind: slow)
    config, mesh, args = step_of(8, fsdp=True)
    numbers = sum(leaf.size for leaf in args[0].params.values())
    cut = [leaf for leaf in args[0].params.values() if not leaf.sharding.is_fully_replicated]
    assert sum(leaf.size for leaf in cut) > 0.99 * numbers
    assert estimated_seconds(config, mesh, args, 0.0) == pytest.approx(8 * numbers * 7 / 8 / 1e9, rel=0.02)
    config, mesh, args = step_of(8)
    assert estimated_seconds(config, mesh, args, 0.0) == pytest.approx(2 * 4 * numbers * 7 / 8 / 1e9, rel=0.02)
    tokens = 64 * 1025 / 4 * 768 * 2
    config, mesh, args = step_of(8, tensor_devices=2)
    own = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in args[0].params.values())
    sent = 2 * 4 * own * 3 / 4 + 2 * 8 * tokens / 2
    assert estimated_seconds(config, mesh, args, 0.0) == pytest.approx(sent / 1e9, rel=0.02)
    config, mesh, args = step_of(8, use_moe=True, n_experts=8, top_k_mlp=2, expert_devices=8)
    own = sum(leaf.size for leaf in args[0].params.values() if leaf.sharding.is_fully_replicated)
    sent = 2 * 4 * own * 7 / 8 + 2 * 4 * (64 * 1025 / 8 * 768 * 2) * 2 * 9 / 8 * 7 / 8
    assert estimated_seconds(config, mesh, args, 0.0) == pytest.approx(sent / 1e9, rel=0.02)


def test_what_a_step_needs_at_least():
    """The inputs of blocks where these are computed again, and more where they are not; less in micro-batches."""
    config, mesh, args = step_of(8)
    state, inputs = target_layouts.device_bytes(args), 64 * 1025 / 8 * 768 * 2 * 2
    for fields, times in (({}, 4), ({"gradient_checkpointing": True}, 1), ({"grad_accum": 4}, 1)):
        assert least_bytes(dataclasses.replace(config, **fields), mesh, args) == state + times * inputs
