"""One bit that flips in a run, from outside of the loop: in a parameter, a moment, a gradient or a batch.

In a run with virtual shards also in what one device has of the parameters ("slice"), and in no gradient.
"""

import contextlib
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from roxxel_dist.audit.record import RunRecord
from roxxel_dist.audit.replay import first_difference
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.cli import main
from roxxel_dist.model.loss import token_losses
from roxxel_dist.train import steps
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.step import make_step

KINDS = ("parameter", "moment", "gradient", "batch")


@dataclass(frozen=True)
class Flip:
    kind: str
    step: int
    """In which it happens, from 1."""
    seed: int
    """Chooses array, element and bit."""


def flipped(array, rng, bits):
    """A copy with one of the lowest `bits` bits of one element flipped, where the array lies."""
    values = np.array(array)
    words = values.reshape(-1).view({4: np.uint32, 2: np.uint16}[values.itemsize])
    words[rng.integers(words.size)] ^= words.dtype.type(1 << int(rng.integers(bits)))
    return jax.device_put(values, array.sharding)


def flipped_on_last(array, rng):
    """A copy with one bit flipped in what the last of its devices has, and in no other copy of that."""
    parts = [shard.data for shard in array.addressable_shards]
    parts[-1] = flipped(parts[-1], rng, 31)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def pick(leaves, rng):
    """The name or number of an array of floats that is not tiny."""
    chosen = [key for key, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 8]
    return chosen[int(rng.integers(len(chosen)))]


@contextlib.contextmanager
def flipping(flip):
    """Within it the step of every trainer has the fault."""
    rng, programs = np.random.default_rng(flip.seed), {}

    def making(split, loss_fn, optimizer, like, *args, **kwargs):
        name = pick(list(like.params.items()), rng)
        index, delta = int(rng.integers(like.params[name].size)), float(2.0 ** -int(rng.integers(4, 34)))

        def faulty(model, batch):
            """The same loss, and a gradient that is off in one element."""
            weights = jax.tree.leaves(nnx.state(model, nnx.Param))[split.params.names.index(name)]
            extra = weights.reshape(-1)[index] * delta
            result = token_losses(model, batch)
            return {**result, "loss": result["loss"] + (extra - jax.lax.stop_gradient(extra))}

        programs["faulty"] = make_step(split, faulty, optimizer, like, *args, **kwargs)
        return make_step(split, loss_fn, optimizer, like, *args, **kwargs)

    def get(self, key, real=AotCompiler.get_together):
        program = real(self, key)
        if key[0] == "evaluate":
            return program

        def step(state, hparams, batch):
            whole = getattr(state, "whole", state)
            if int(whole.step) + 1 != flip.step:
                return program(state, hparams, batch)
            state = whole
            if flip.kind == "gradient":
                return programs["faulty"](state, hparams, batch)
            if flip.kind == "batch":
                return program(state, hparams, flipped(batch, rng, 6))
            if flip.kind == "slice":
                name = pick(list(state.params.items()), rng)
                state = state._replace(params=state.params | {name: flipped_on_last(state.params[name], rng)})
            elif flip.kind == "parameter":
                name = pick(list(state.params.items()), rng)
                state = state._replace(params=state.params | {name: flipped(state.params[name], rng, 31)})
            else:
                leaves, tree = jax.tree.flatten(state.opt_state)
                at = pick(list(enumerate(leaves)), rng)
                leaves[at] = flipped(leaves[at], rng, 31)
                state = state._replace(opt_state=jax.tree.unflatten(tree, leaves))
            return program(state, hparams, batch)

        return step

    with mock.patch.object(steps, "make_step", making), mock.patch.object(AotCompiler, "get_together", get):
        yield


def audit(capsys, run, *words):
    """(exit code, verdict)"""
    capsys.readouterr()
    code = main(["audit", str(run), *words])
    return code, capsys.readouterr().out.strip()


def truth(run, clean):
    """The first row or checkpoint of a run that is not that of the run without the flip: "step 8", or None."""
    mine, theirs = RunRecord.read(run), RunRecord.read(clean)
    store = CheckpointReader(clean / "checkpoints")
    names = ("train_loss", "val_loss", "grad_norm", "update_norm", "train_eval_loss", "digest")
    try:
        for step in sorted({*mine.rows, *mine.steps}):
            if step in mine.rows and any(mine.rows[step].get(n) != theirs.rows[step].get(n) for n in names):
                return f"step {step} differs"
            if step in mine.steps and step in theirs.steps and (name := first_difference(mine, step, store)):
                return f"the checkpoint of step {step} differs: {name}"
    finally:
        store.close()
    return None
