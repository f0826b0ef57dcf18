"""Two runs with other shares and other ends of phases differ by them alone: weights, dropout and held-out text."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import module, rows, told

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.loss import next_token_loss

STILL = optax.sgd(0.0)
MIXTURES = ((4, {"self": 0.9, "code": 0.1}, {"self": 0.5, "code": 0.5}), (7, {"code": 1.0, "self": 0}, {"self": 1.0}))


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "code_*.rox"
    with Roxxel(path) as data:
        data.write((np.full(90, 7 + number, np.uint16) for number in range(30)), vocab_size=500)
    return Roxxel(path)


def loss(model, batch):
    """What dropout leaves of each row's first numbers, one number for the batch."""
    left = model.dropout(jnp.ones((8, 16))) * (1.0 + jnp.arange(128).reshape(8, 16))
    return {"loss": next_token_loss(model, batch), "left": left.sum()}


def trained(corpus, code, path, mixture):
    """Ten steps of two phases."""
    end, *weights = mixture
    phases = [Phase(steps, 8, 17, weights=of, blend="row") for steps, of in zip((end, 10 - end), weights, strict=True)]
    made = Trainer(
        module(dropout_rate=0.5),
        STILL,
        Curriculum(corpus, phases, {"code": code}, passes="apart"),
        loss,
        path,
        log_every=1,
        eval_every=5,
        eval_iters=2,
        val_fraction=0.1,
        mesh=make_mesh(2),
    )
    made.run()
    return rows(path)


def test_weights_dropout_and_held_out_text(corpus, code, tmp_path):
    one, other = (trained(corpus, code, tmp_path / str(n), mixture) for n, mixture in enumerate(MIXTURES))
    assert [row["left"] for row in one] == [row["left"] for row in other], "dropout, by step and row"
    assert len({row["left"] for row in one}) == 10
    assert [row["train_loss"] for row in one] != [row["train_loss"] for row in other], "the shares are others"
    validated = [[row["val_loss"] for row in run if "val_loss" in row] for run in (one, other)]
    assert validated[0] == validated[1], "the weights, which nothing trains here, and the held-out text"
    assert "phase 2/2" in told(tmp_path / "0")
