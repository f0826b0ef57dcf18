"""Losses that are no number, and spikes: found, named, skipped, or left out by going back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import losses, make, poisoned, rows, saved, told, train

from roxxel_dist import Curriculum, Phase, Roxxel
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.train.step.bad_steps import BadStep, LossMonitorState, describe

PHASES = [Phase(14, 8, 17)]


@pytest.fixture(scope="module")
def seventh_bad(corpus_pattern):
    """A loss that is no number in step 7: the same function for several tests, whose programs are compiled once."""
    with Roxxel(corpus_pattern) as corpus:
        return poisoned(corpus, PHASES, 7)


def test_it_is_found_at_the_next_logged_step_and_named(corpus, tmp_path, seventh_bad):
    made = make(corpus, tmp_path, PHASES, loss_fn=seventh_bad, log_every=5, eval_every=100, checkpoint_every=3)
    with pytest.raises(BadStep, match=r"step 7 went wrong: its loss is nan") as caught:
        made.run()
    made.close()
    first = int(made.plan.rows(6).offset[0])
    assert f"self token {first:,}" in str(caught.value)
    assert "known to be good is of step 3 (the weights of step 6 may be ruined" in str(caught.value)
    assert saved(tmp_path)[-1] == 6
    assert "step 7 went wrong" in told(tmp_path)


RUINED = "may be ruined, because no step after it went well"


@pytest.mark.parametrize(
    ("bad_step", "in_a_row", "skipped", "checkpoints", "words"),
    [
        (2, 1, 0, [1], f"The weights of step 1 {RUINED}: start a new run with a smaller lr"),
        (1, 1, 0, [], "There is no checkpoint to go back to: start a new run"),
        (9, 1, 0, [3, 6], "The newest checkpoint is of step 6, and is known to be good: go on from it"),
        (8, 1, 0, [3, 6], "The newest checkpoint is of step 6, and is known to be good: go on from it"),
        (
            7,
            1,
            0,
            [3, 6],
            f"known to be good is of step 3 (the weights of step 6 {RUINED}): begin a new run there with fork=RUN@3",
        ),
        (9, 3, 3, [3, 6, 8], f"known to be good is of step 3 (the weights of step 8 {RUINED})"),  # 7 to 9 were skipped
        (9, 0, 3, [3, 6], "The newest checkpoint is of step 6, and is known"),  # skipped, and all is well again
    ],
)
def test_the_way_back_is_a_checkpoint_behind_which_a_step_went_well(
    corpus, bad_step, in_a_row, skipped, checkpoints, words
):
    health = LossMonitorState(2.0, 9, bad_step, float("nan"), float("nan"), skipped, in_a_row)
    assert words in describe(health, Curriculum(corpus, PHASES).plan(42), checkpoints)


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (float("nan"), float("nan"), "its loss is nan, its gradient norm nan; the mean"),
        (6.25, float("nan"), "its gradient is not finite (norm nan), although its loss is 6.25; the mean"),
        (6.25, float("inf"), "its gradient is not finite (norm inf), although its loss is 6.25; the mean"),
        (60.0, 3.0, "its loss is 60, its gradient norm 3; the mean loss before is 2"),
    ],
)
def test_what_is_wrong_is_named(corpus, loss, norm, words):
    health = LossMonitorState(2.0, 9, 10, loss, norm, 0, 1)
    assert words in describe(health, Curriculum(corpus, PHASES).plan(42), [6])


@pytest.mark.parametrize("action", [pytest.param("raise", marks=pytest.mark.long), "rewind"])
def test_a_ruined_checkpoint_is_not_gone_on_from(corpus, tmp_path, action):
    """The update of step 6 ruins the weights, and each step after it fails, whatever it reads."""
    ruin = corpus.read(Curriculum(corpus, PHASES).plan(42).rows(5).offset, 17, np.int32)

    def loss_fn(model, batch):
        weights = model.head.kernel[...]
        loss = next_token_loss(model, batch) + jnp.where((batch == ruin).all(), 1e12, 0.0) * weights.sum()
        return loss + jnp.where(jnp.abs(weights).max() > 1e6, jnp.nan, 0.0)

    made = make(
        corpus, tmp_path, PHASES, loss_fn=loss_fn, optimizer=optax.sgd(0.1), on_bad_step=action, val_fraction=0,
        log_every=1, eval_every=100, checkpoint_every=3,
    )  # fmt: skip
    with pytest.raises(BadStep, match="step 7 went wrong") as caught:
        made.run()
    made.close()
    if action == "raise":
        assert "is of step 3 (the weights of step 6 may be ruined" in str(caught.value)
    else:
        assert "going back to step 3" in told(tmp_path)


def test_a_bad_state_is_never_saved(corpus, tmp_path, seventh_bad):
    """A save comes before the next logged step: it looks first."""
    made = make(corpus, tmp_path, PHASES, loss_fn=seventh_bad, log_every=100, eval_every=100, checkpoint_every=4)
    with pytest.raises(BadStep, match="step 7"):
        made.run()
    made.close()
    assert saved(tmp_path) == [1, 4]


def test_skipped_steps_change_nothing(corpus, tmp_path):
    made = train(corpus, tmp_path, PHASES, loss_fn=poisoned(corpus, PHASES, 5, 9), on_bad_step="skip")
    assert int(made.state.step) == 14
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made.state.params))
    found = {row["step"]: row for row in rows(tmp_path)}
    assert found[5]["train_loss"] is None  # JSON has no NaN
    assert all(np.isfinite(found[step]["train_loss"]) for step in set(found) - {5, 9})
    assert told(tmp_path).count("left out") == 2


def test_going_back_leaves_the_rows_out(corpus, tmp_path, seventh_bad):
    loss_fn = seventh_bad
    made = train(corpus, tmp_path / "run", PHASES, loss_fn=loss_fn, on_bad_step="rewind", checkpoint_every=4)
    assert [step for step, *_ in losses(tmp_path / "run")] == list(range(1, 15))
    assert all(np.isfinite(loss) for _, loss, _ in losses(tmp_path / "run"))
    curriculum, _ = Curriculum(corpus, PHASES).hold_out(0.1)
    plain = curriculum.plan(42)
    assert (made.plan.rows(5).offset == plain.rows(5).offset).all()
    used = {int(offset) for step in range(14) for offset in made.plan.rows(step).offset}
    assert not used & {int(offset) for offset in plain.rows(6).offset}
    assert "going back to step 4; the rows of step 7 are left out" in told(tmp_path / "run")
    # Started again after its end or in its midst, it follows the same plan.
    train(corpus, tmp_path / "cut", PHASES, loss_fn=loss_fn, on_bad_step="rewind", checkpoint_every=4, max_steps=10)
    train(corpus, tmp_path / "cut", PHASES, loss_fn=loss_fn, on_bad_step="rewind", checkpoint_every=4)
    # The running digest is that of the steps which count.
    assert [row["digest"] for row in rows(tmp_path / "cut")] == [row["digest"] for row in rows(tmp_path / "run")]
    assert {s: x for s, x, _ in losses(tmp_path / "cut")} == {s: x for s, x, _ in losses(tmp_path / "run")}


@pytest.mark.long
def test_going_back_to_a_step_that_is_not_known_to_be_good_says_so(corpus, tmp_path):
    """The only checkpoint is of the step before the bad one: nothing shows that its update was good."""
    train(corpus, tmp_path, PHASES, loss_fn=poisoned(corpus, PHASES, 2), on_bad_step="rewind")
    assert "going back to step 1 (its weights may be ruined, as no step after it went well" in told(tmp_path)


def test_a_rewind_holds_one_state_and_is_in_the_checkpoint_at_once(corpus, tmp_path, monkeypatch, seventh_bad):
    """A job that is killed behind a rewind and started again has counted it."""
    options = {"loss_fn": seventh_bad, "on_bad_step": "rewind", "checkpoint_every": 5, "eval_every": 100}
    made = make(corpus, tmp_path, PHASES, **options)

    def restore(step, like):
        assert not hasattr(made.loop.position, "arrays")
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((like.params, like.opt_state)))
        raise RuntimeError("killed")

    monkeypatch.setattr(made.store, "restore", restore)
    with pytest.raises(RuntimeError, match="killed"):
        made.run()
    made.close()
    assert saved(tmp_path)[-1] == 5
    again = make(corpus, tmp_path, PHASES, **options)
    assert len(again.plan.amendments) == 2
    again.run()
    again.close()
    assert again.store.meta(14)["rewinds"] == 1
    assert [step for step, *_ in losses(tmp_path)] == list(range(1, 15))


def test_going_back_has_an_end(corpus, tmp_path):
    def hopeless(model, batch):
        return next_token_loss(model, batch) * jnp.where(batch[0, 0] >= 0, jnp.nan, 1.0)

    made = make(corpus, tmp_path, PHASES, loss_fn=hopeless, on_bad_step="rewind", val_fraction=0)
    with pytest.raises(BadStep, match="step 1"):
        made.run()
    made.close()
    assert saved(tmp_path) == []


@pytest.mark.long
def test_only_so_often(corpus, tmp_path):
    """Every second batch or so is bad, the first one is not."""
    curriculum, _ = Curriculum(corpus, PHASES).hold_out(0.1)
    first = int(corpus.read(curriculum.plan(42).rows(0).offset, 17, np.int32).sum() % 2)

    def loss_fn(model, batch):
        return next_token_loss(model, batch) * jnp.where(batch.sum() % 2 == first, 1.0, jnp.nan)

    made = make(corpus, tmp_path, PHASES, loss_fn=loss_fn, on_bad_step="rewind", max_rewinds=2)
    with pytest.raises(BadStep):
        made.run()
    made.close()
    assert told(tmp_path).count("going back") == 2


def test_a_finite_spike(corpus, tmp_path):
    phases = [Phase(30, 8, 17)]
    tokens = corpus.read(Curriculum(corpus, phases).plan(42).rows(25).offset, 17, np.int32)

    def loss_fn(model, batch):
        return next_token_loss(model, batch) * jnp.where((batch == tokens).all(), 10.0, 1.0)

    seldom = {"log_every": 10, "val_fraction": 0, "checkpoint_every": 100}
    made = make(corpus, tmp_path, phases, loss_fn=loss_fn, spike_factor=3.0, **seldom)
    with pytest.raises(BadStep, match="step 26 went wrong"):
        made.run()
    made.close()
