"""Runs that begin with another run's state or weights."""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import PHASES, losses, make, model, module, saved, told, train

from roxxel_dist import Phase
from roxxel_dist.checkpoint.metadata import CheckpointRef, ResumeSpec
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.optimizer import NamedOptimizer

DECAY = {"lr": 1e-2, "lr_schedule": "wsd", "warmup_steps": 2, "decay_steps": 5}
STABLE = {"lr": 1e-2, "lr_schedule": "constant", "warmup_steps": 2}


def by(**fields):
    return NamedOptimizer(OptimizerConfig(**fields))


def fork(path, step):
    return ResumeSpec(fork=CheckpointRef(path, step))


def numbers(path):
    """Training losses by step, to the bit."""
    return {step: loss for step, loss, _ in losses(path)}


def contents(path):
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() + str(file.stat().st_mtime_ns)
        for file in path.rglob("*")
        if file.is_file()
    }


def test_a_stable_phase_and_a_fork_are_one_long_run(corpus, tmp_path):
    """Both are equal to the bit, decay and dropout included; the run that is forked goes on as if nothing was."""

    def trained(name, fields, **options):
        options |= {"model": module(dropout_rate=0.2), "val_fraction": 0.0}  # a module each: training changes it
        return train(corpus, tmp_path / name, [Phase(13, 8, 17)], optimizer=by(**fields), **options)

    whole = trained("whole", DECAY)
    trained("stable", STABLE, checkpoint_every=4, max_to_keep=None)
    before = contents(tmp_path / "stable")
    made = trained("fork", DECAY, origin=fork(tmp_path / "stable", 8))
    assert contents(tmp_path / "stable") == before
    assert made.start_step == 8
    joined = {step: loss for step, loss in numbers(tmp_path / "stable").items() if step <= 8}
    joined |= numbers(tmp_path / "fork")
    assert joined == numbers(tmp_path / "whole")
    assert numbers(tmp_path / "stable") != numbers(tmp_path / "whole")
    for name, leaf in whole.state.params.items():
        assert (np.asarray(leaf) == np.asarray(made.state.params[name])).all(), name
    text = told(tmp_path / "fork")
    assert f"forked from {tmp_path / 'stable'}@8, with its parameters" in text
    assert "learning rate of the last step: 0.01 at step 13 before, 0.00" in text
    assert f"resuming after step 8 of 13, from the checkpoint {tmp_path / 'stable'}@8" in text


@pytest.mark.long
def test_a_fork_with_phases_of_its_own_reads_nothing_twice(corpus, finished_run, tmp_path):
    made = train(corpus, tmp_path / "fork", [*PHASES[:2], Phase(9, 4, 33)], origin=fork(finished_run, 8))
    assert sorted(numbers(tmp_path / "fork")) == list(range(9, 20))
    read = [made.plan.rows(step) for step in range(19)]
    tokens = np.concatenate([np.add.outer(r.offset, np.arange(r.seq_len)).ravel() for r in read])
    assert len(np.unique(tokens)) == len(tokens)
    assert "the plan from step 9 on:" in told(tmp_path / "fork")
    assert made.start.record == {"forked_from": {"run": str(finished_run), "step": 8}}


def test_a_fork_that_died_begins_again_or_goes_on_alone(corpus, run, tmp_path):
    origin = fork(run, 8)
    make(corpus, tmp_path / "fork", origin=origin).close()  # before anything was saved
    assert saved(tmp_path / "fork") == []
    train(corpus, tmp_path / "fork", origin=origin, max_steps=9)
    assert saved(tmp_path / "fork")[0] == 8
    run.rename(tmp_path / "away")
    made = train(corpus, tmp_path / "fork", origin=origin)
    assert (made.start_step, made.step) == (9, 13)
    assert numbers(tmp_path / "fork") == {s: x for s, x in numbers(tmp_path / "away").items() if s > 8}


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (7, {}, r"has no checkpoint of step 7; nearest is 4 or 8, kept are 1, 4, .*8, .*keep_every"),
        (8, {"seed": 1}, "seed is 1, and .*run@8 has 42"),
        (8, {"max_steps": 8}, "the new run ends at step 8: give it longer phases, or a larger max_steps"),
        (8, {"val_fraction": 0.3}, "in a fork, shards may be added"),
        (8, {"optimizer": optax.sgd(1e-2)}, "is of another model or optimizer"),
    ],
)
def test_what_cannot_be_forked(corpus, finished_run, tmp_path, step, options, message):
    with pytest.raises(ValueError, match=message):
        make(corpus, tmp_path / "fork", origin=fork(finished_run, step), **options)
    with pytest.raises(ValueError, match="nowhere has no checkpoint"):
        make(corpus, tmp_path / "fork", origin=fork(tmp_path / "nowhere", 8))


def test_names_of_checkpoints():
    assert CheckpointRef.parse("runs/a@120") == CheckpointRef(Path("runs/a"), 120)
    assert str(CheckpointRef.parse("runs/a@120")) == "runs/a@120"
    assert CheckpointRef.parse("runs/me@home") == CheckpointRef(Path("runs/me@home"), None)
    with pytest.raises(ValueError, match="it must say at which step, as in runs/a@1000"):
        ResumeSpec(fork=CheckpointRef.parse("runs/a"))
    with pytest.raises(ValueError, match="add fork=RUN@STEP"):
        ResumeSpec(skip_steps=(3, 4))
    with pytest.raises(ValueError, match="both above 5"):
        ResumeSpec(fork=CheckpointRef.parse("runs/a@5"), skip_steps=(5, 6))


def test_weights_alone(corpus, finished_run, tmp_path):
    """Of a callable and of a module: the parameters are theirs, and all else is new."""
    first = make(corpus, tmp_path / "other", init_from=f"{finished_run}@8")
    last = make(corpus, tmp_path / "other2", init_from=str(finished_run), model=module())
    end = make(corpus, finished_run)
    fresh = make(corpus, tmp_path / "fresh")
    for made in (first, last, end, fresh):
        made.close()
    for name, leaf in end.state.params.items():
        assert (np.asarray(last.state.params[name]) == np.asarray(leaf)).all(), name
        assert (np.asarray(first.state.params[name]) != np.asarray(leaf)).any(), name
    assert int(first.state.step) == 0
    mine, new = (json.dumps([np.asarray(x).tolist() for x in _leaves(made)]) for made in (last, fresh))
    assert mine == new
    assert first.start.record["initialized_from"]["step"] == 8


def _leaves(made):
    state = made.loop.position.state
    rest = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves(state.rest)]  # fmt: skip
    return [*jax.tree.leaves(state.opt_state), *rest]


def test_a_run_with_the_weights_of_another_needs_it_once(corpus, run, tmp_path):
    source = {"init_from": str(run)}
    train(corpus, tmp_path / "tuned", PHASES[:1], **source)
    assert numbers(tmp_path / "tuned")[1] < numbers(run)[1]
    assert "the weights are those of" in told(tmp_path / "tuned")
    train(corpus, tmp_path / "parts", PHASES[:1], max_steps=3, **source)
    run.rename(tmp_path / "away")
    train(corpus, tmp_path / "parts", PHASES[:1], **source)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "tuned")


def test_an_optimizer_that_copies_the_weights_copies_the_right_ones(corpus, finished_run, tmp_path):
    def copying():
        return optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, state))

    made = make(corpus, tmp_path / "tuned", init_from=str(finished_run), optimizer=copying())
    made.close()
    for kept, leaf in zip(_leaves(made), made.state.params.values(), strict=False):
        assert (np.asarray(kept) == np.asarray(leaf)).all()


def test_weights_that_do_not_fit_are_named(corpus, finished_run, tmp_path):
    with pytest.raises(
        ValueError, match=r"init_from is .*run@13: .*of another model .params/.* is float32.* in it and .* here"
    ):
        make(corpus, tmp_path / "x", init_from=str(finished_run), model=lambda: model(dim=32))
    with pytest.raises(ValueError, match="has no checkpoint of step 7; nearest is 4 or 8, kept are 1, 4"):
        make(corpus, tmp_path / "x", init_from=f"{finished_run}@7")


def test_a_fork_leaves_rows_out(corpus, run, tmp_path):
    """It begins at step 4 without the data of steps 7 and 8: earlier steps are the same, a resume needs no words."""
    unchanged, before, plain = contents(run), numbers(run), make(corpus, run).plan
    origin = ResumeSpec(fork=CheckpointRef(run, 4), skip_steps=(7, 8))
    made = train(corpus, tmp_path / "fork", origin=origin, max_steps=9, max_to_keep=None)
    assert contents(run) == unchanged
    after = numbers(tmp_path / "fork")
    assert sorted(after) == list(range(5, 10))
    assert {s: after[s] for s in (5, 6)} == {s: before[s] for s in (5, 6)}
    assert after[7] != before[7]
    used = {int(offset) for step in range(10) for offset in made.plan.rows(step).offset}
    assert not used & {int(offset) for step in (6, 7) for offset in plain.rows(step).offset}
    assert "position in the data, without what steps 7 to 8 read" in told(tmp_path / "fork")
    assert made.start.record == {"forked_from": {"run": str(run), "step": 4, "skipped": [7, 8]}}
    run.rename(tmp_path / "away")
    on = train(corpus, tmp_path / "fork")
    assert (on.start_step, on.step) == (9, 13)
    assert on.plan.fingerprint == made.plan.fingerprint


@pytest.mark.long
def test_it_does_what_a_rewind_does(corpus, finished_run, tmp_path):
    """The rows of step 7 left out by hand, or because its loss is no number: the same run to the bit."""
    bad = corpus.read(make(corpus, tmp_path / "plain").plan.rows(6).offset, 17, np.int32)

    def loss_fn(m, batch):
        loss = next_token_loss(m, batch)
        return loss * jnp.where((batch == bad).all(), jnp.nan, 1.0) if batch.shape == bad.shape else loss

    train(corpus, tmp_path / "rewound", loss_fn=loss_fn, on_bad_step="rewind", checkpoint_every=4, max_to_keep=None)
    origin = ResumeSpec(fork=CheckpointRef(finished_run, 4), skip_steps=(7, 7))
    train(corpus, tmp_path / "hand", loss_fn=loss_fn, origin=origin)
    assert numbers(tmp_path / "hand") == {s: x for s, x in numbers(tmp_path / "rewound").items() if s > 4}
    again = ResumeSpec(fork=CheckpointRef(tmp_path / "rewound", 4), skip_steps=(6, 6))  # its plan changes behind it
    with pytest.raises(ValueError, match="was changed from step 7 on already: leave out steps after that"):
        make(corpus, tmp_path / "again", origin=again)


def test_steps_that_cannot_be_left_out(corpus, finished_run, tmp_path):
    origin = ResumeSpec(fork=CheckpointRef(finished_run, 4), skip_steps=(6, 14))
    with pytest.raises(ValueError, match="skip_steps is 6:14, and the plan has 13 steps"):
        make(corpus, tmp_path / "fork", origin=origin)
    origin = ResumeSpec(fork=CheckpointRef(finished_run, 8), skip_steps=(9, 9))
    train(corpus, tmp_path / "one", origin=origin, max_to_keep=None)
    again = ResumeSpec(fork=CheckpointRef(tmp_path / "one", 8), skip_steps=(10, 11))
    made = make(corpus, tmp_path / "two", origin=again)
    made.close()
    assert [(a.from_step, a.skip) for a in made.plan.amendments] == [(0, 0), (8, 1), (9, 2)]


def test_a_fork_with_other_phases_leaves_rows_of_those_out(corpus, finished_run, tmp_path):
    origin = ResumeSpec(fork=CheckpointRef(finished_run, 8), skip_steps=(10, 11))
    made = make(corpus, tmp_path / "fork", [*PHASES[:2], Phase(9, 4, 33)], origin=origin)
    made.close()
    assert [(a.from_step, a.skip) for a in made.plan.amendments] == [(0, 0), (8, 0), (9, 2)]
