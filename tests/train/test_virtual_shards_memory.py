"""What a device has of the state of a run with virtual shards and fsdp, at rest and within a step."""

import jax
import numpy as np
import pytest
from exact_rows import batch_of

from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, scalars_on
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.exact.step import init_exact_state, make_sharded_steps
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.optimizer import InitialState, NamedOptimizer
from roxxel_dist.train.step.step import SPIKE_FACTOR

MODEL = {"dim": 256, "num_blocks": 1, "n_heads": 2, "vocab_size": 1024, "max_context": 32}
DEVICES = 8


class Watched(AotCompiler):
    """Notes the shapes that each program takes and gives, and how many arrays it takes, by its name."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.seen, self.given = {}, {}

    def _compile_one(self, jitted, args, mesh):
        program = super()._compile_one(jitted, args, mesh)
        shapes = self.seen.setdefault(jitted.__name__, set())

        def run(*args):
            results = program(*args)
            self.given.setdefault(jitted.__name__, set()).add(len(jax.tree.leaves(args)))
            shapes.update(leaf.shape for leaf in jax.tree.leaves((args, results)))
            return results

        return run


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_no_device_has_more_than_a_seventh_of_the_state(optimizer):
    mesh, optimizer = make_mesh(DEVICES, fsdp=DEVICES), NamedOptimizer(OptimizerConfig(optimizer=optimizer))
    builder = TransformerBuilder(ModelConfig(**MODEL), 0, 1)
    split, state, hparams = init_exact_state(builder, InitialState(optimizer), mesh, shards=DEVICES, fsdp=True)
    hparams |= scalars_on(mesh, {**optimizer.settings(100), SPIKE_FACTOR: 0.0})
    batch = batch_of(0, (8, 9), False, batch_sharding(mesh))
    large = {leaf.shape for leaf in jax.tree.leaves(state) if not leaf.is_fully_replicated}
    assert large
    step, _ = make_sharded_steps(split, token_losses, optimizer, batch_sharding(mesh), shards=DEVICES)
    compiler = Watched(mesh)
    compiler.prepare("step", step, state, hparams, batch)
    for _ in range(2):
        assert _of_one_device(state) <= _bytes(state) / 7
        state, _ = compiler.get("step")(getattr(state, "whole", state), hparams, batch)
        state = state.whole
    compiler.close()
    assert _of_one_device(state) <= _bytes(state) / 7
    whole = {name for name, shapes in compiler.seen.items() if shapes & large}
    params = [leaf for leaf in state.params.values() if not leaf.is_fully_replicated]
    groups = {"update_group", "take_slices"} if optimizer.config.optimizer == "muon" else set()
    assert whole == {"gather_slices", "packed_sums", "numbers", *groups}  # the last one takes parameters, unused
    assert groups or compiler.given["gather_slices"] == {len(params)}, "no moments are gathered"


def _bytes(state):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _of_one_device(state):
    return max(
        sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        for device in np.asarray(jax.devices()[:DEVICES])
    )
