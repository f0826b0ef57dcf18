import logging

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from models import with_numbers

import roxxel_dist


class Small(nnx.Module):
    """Parameters, running statistics and a random stream."""

    def __init__(self, rngs, width=16):
        self.inner = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.inner(x)))))


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def make(seed, width=16):
    model = with_numbers(lambda: Small(nnx.Rngs(seed), width), seed)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def host(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


def losses(model, optimizer, steps):
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    return [float(train_step(model, optimizer, x)) for _ in range(steps)]


def test_it_goes_on_as_if_it_had_not_stopped(tmp_path):
    model, optimizer = make(0)
    with roxxel_dist.Checkpointer(tmp_path / "c", model, optimizer) as checkpointer:
        assert checkpointer.restore() == 0
        losses(model, optimizer, 3)
        checkpointer.save(3, {"val_loss": np.float32(2.5), "accuracy": 0.5})
        expected = losses(model, optimizer, 4)  # at once: while it is being saved
    model, optimizer = make(1)
    with roxxel_dist.Checkpointer(str(tmp_path / "c"), model, optimizer) as checkpointer:
        assert checkpointer.restore() == 3
        assert int(optimizer.step[...]) == 3
        assert losses(model, optimizer, 4) == expected


def test_the_newest_are_kept_and_the_best(tmp_path):
    model, optimizer = make(0)
    with roxxel_dist.Checkpointer(tmp_path / "c", model, optimizer, max_to_keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"val_loss": step})
        checkpointer.wait()
        assert sorted(path.name for path in (tmp_path / "c").glob("[0-9]*")) == ["1", "3"]


def test_without_an_optimizer(tmp_path):
    (first, _), (second, _) = make(0), make(1)
    checkpointer = roxxel_dist.Checkpointer(tmp_path / "c", first, None)
    checkpointer.save(7)
    checkpointer.close()
    checkpointer = roxxel_dist.Checkpointer(tmp_path / "c", second, None)
    assert checkpointer.restore() == 7
    checkpointer.close()
    for a, b in zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True):
        np.testing.assert_array_equal(host(a), host(b))


def test_another_model(tmp_path):
    with roxxel_dist.Checkpointer(tmp_path / "c", *make(0)) as checkpointer:
        checkpointer.save(1)
    with (
        roxxel_dist.Checkpointer(tmp_path / "c", *make(0, width=8)) as checkpointer,
        pytest.raises(
            ValueError, match=r"of another model or optimizer .* is float32\(16,\) in it and float32\(8,\) here"
        ),
    ):
        checkpointer.restore()


def test_a_step_that_is_there_is_not_saved_over_in_silence(tmp_path):
    """As when training begins again in an old folder, without `restore`."""
    model, optimizer = make(0)
    with roxxel_dist.Checkpointer(tmp_path / "c", model, optimizer) as checkpointer:
        checkpointer.save(3)
        with pytest.raises(ValueError, match=r"has a checkpoint of step 3 already: call restore\(\) first .*\(3\)"):
            checkpointer.save(3)
    with (
        roxxel_dist.Checkpointer(tmp_path / "c", *make(1)) as checkpointer,
        pytest.raises(ValueError, match="has a checkpoint of step 3 already"),
    ):
        checkpointer.save(3)


def test_orbax_is_heard_again_afterwards(tmp_path):
    """The user's own code may use Orbax, and is to see what it says."""
    before = list(logging.getLogger("absl").filters)
    with roxxel_dist.Checkpointer(tmp_path / "c", *make(0)) as checkpointer:
        checkpointer.save(1)
        assert len(logging.getLogger("absl").filters) == len(before) + 1
    assert logging.getLogger("absl").filters == before
