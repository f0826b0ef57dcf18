"""The loop in one process, on two simulated devices."""

import csv
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own_model import Attending
from runs import ADAM, PHASES, losses, make, model, module, rows, stop_after, train

from roxxel_dist import Checkpointer, Curriculum, Logger, Phase, Roxxel, Trainer
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.train.saves import Announcement, StepAgreement
from roxxel_dist.train.step.throughput import StepTimer


def test_first_and_last_steps_are_logged_validated_and_saved(corpus, tmp_path):
    made = train(corpus, tmp_path, log_every=100, eval_every=100, checkpoint_every=100)
    assert [(step, val is not None) for step, _, val in losses(tmp_path)] == [(1, True), (13, True)]
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [1, 13]
    assert int(made.state.step) == 13


def test_what_was_logged_after_the_last_checkpoint_is_logged_once(corpus, finished_run, tmp_path, monkeypatch):
    """The loop dies after step 7; the last checkpoint is of step 5, which was validated and the best until then."""

    def die(agreement, step):
        if step == 7:
            raise RuntimeError("power cut")
        return Announcement(next_step=step + 1)

    with monkeypatch.context() as patch:
        patch.setattr(StepAgreement, "announcement", die)
        made = make(corpus, tmp_path / "cut", keep_best=True)
        with pytest.raises(RuntimeError, match="power cut"):
            made.run()
        made.close()
    assert [step for step, *_ in losses(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]
    assert "power cut" in (tmp_path / "cut" / "logs" / "rank-0.log").read_text()
    assert train(corpus, tmp_path / "cut").start_step in (4, 5)
    assert losses(tmp_path / "cut") == losses(finished_run)
    with (tmp_path / "cut" / "training_log.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 14))


def test_asked_to_stop_it_saves_that_step(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        assert train(corpus, tmp_path, PHASES[:2]).stopped
    again = train(corpus, tmp_path, PHASES[:2])
    assert again.start_step == 6
    assert not again.stopped


def test_a_finished_run_is_left_alone(corpus, run):
    before = (run / "metrics.jsonl").read_bytes()
    assert train(corpus, run).finished
    assert (run / "metrics.jsonl").read_bytes() == before
    for what, phases, options in (("curriculum", [Phase(6, 8, 17)], {}), ("seed", PHASES, {"seed": 9})):
        with pytest.raises(ValueError, match=f"is finished, and was made with another {what} .*amend=True"):
            make(corpus, run, phases, **options)


def logits_squared(model, batch):
    return (model(batch[:, :-1]) ** 2).mean()


def test_a_model_with_too_few_logits_is_refused_before_its_first_step(corpus, tmp_path):
    """The corpus has 500 tokens. Ids behind the logits would make the loss NaN."""
    for loss_fn in (next_token_loss, logits_squared):
        with pytest.raises(ValueError, match=r"gives 300 logits .*, and the data .* has 500 tokens: .*vocab_size=500"):
            make(corpus, tmp_path, loss_fn=loss_fn, model=lambda: model(vocab_size=300))


def test_speed_counts_training_alone(finished_run):
    """Every row has a speed, the first steps of shapes too: compilation is waited for before they begin."""
    timed = {row["step"]: row["ms_per_step"] for row in rows(finished_run) if "ms_per_step" in row}
    assert set(timed) == set(range(1, 14))
    assert min(timed.values()) > 0.01 * np.median(list(timed.values()))


def test_another_corpus_or_curriculum_is_refused(corpus, tmp_path):
    train(corpus, tmp_path / "run", max_steps=2)
    with pytest.raises(ValueError, match="was made with another curriculum"):
        make(corpus, tmp_path / "run", [Phase(20, 8, 17)])
    other = Roxxel(tmp_path / "other_*.rox")
    rng = np.random.default_rng(1)
    other.write((rng.integers(1, 500, 300).astype(np.uint16) for _ in range(60)), vocab_size=500)
    with other, pytest.raises(ValueError, match="was made with another corpus"):
        make(other, tmp_path / "run")


def test_a_batch_that_accumulation_does_not_divide(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"phase 1: batch_size is 8, which is not a multiple of grad_accum \(3\)"):
        make(corpus, tmp_path, grad_accum_steps=3)


def test_a_curriculum_may_end_in_one_long_row(corpus, tmp_path):
    """Gradient accumulation cuts a batch into no more micro-batches than it has rows; a row of two tokens into none."""
    train(corpus, tmp_path, [Phase(2, 8, 17), Phase(2, 1, 65), Phase(1, 1, 2)], grad_accum_steps=4, val_fraction=0.0)
    assert len(losses(tmp_path)) == 5
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert text.count("in 1 micro-batch(es) instead of 4 because it has no more rows") == 2
    assert "1 rows x 65 tokens a step: 1 row, cut along the tokens over 2 devices" in text
    assert "1 rows x 2 tokens a step: 1 row on each device; 1 of 2 devices repeat the work of others" in text
    assert text.count("warning: ") == 1
    assert "warning: 1 of 2 devices have no work of their own in phase 3: give it more rows or longer ones" in text


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_model_and_the_optimizer_that_it_was_given_are_the_trained_ones(corpus, tmp_path, monkeypatch, stopped):
    net = module(dropout_rate=0.1)
    before = np.array(net.embedding.embedding[...])
    optimizer = nnx.Optimizer(net, ADAM, wrt=nnx.Param)
    if stopped:
        stop_after(monkeypatch, 3)
    made = train(corpus, tmp_path, [Phase(5, 8, 17)], model=net, optimizer=optimizer)
    assert made.stopped == stopped
    steps = 3 if stopped else 5
    assert int(optimizer.step[...]) == steps
    assert (before != net.embedding.embedding[...]).any()
    tokens = np.arange(16)[None]
    net.eval()
    logits = nnx.jit(lambda model, tokens: model(tokens))
    np.testing.assert_allclose(logits(net, tokens), logits(made.state.model, tokens), rtol=1e-5, atol=1e-5)
    moments = nnx.state(optimizer.opt_state)
    count, first = jax.tree.leaves(moments)[0], dict(nnx.to_flat_state(moments))
    assert int(count) == steps
    mu = next(leaf for path, leaf in first.items() if "mu" in map(str, path) and "embedding" in map(str, path))
    np.testing.assert_array_equal(mu[...], made.state.optimizer[0].mu["embedding.embedding"])
    # A user's own loop can continue with them.
    net.train()

    @nnx.jit
    def update(net, optimizer):
        optimizer.update(net, nnx.grad(next_token_loss)(net, np.arange(34).reshape(2, 17)))

    update(net, optimizer)
    assert int(optimizer.step[...]) == steps + 1


class Following(nnx.Module):
    """Each state follows from the one before it."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(500, 128, rngs=rngs)
        self.next = nnx.Linear(128, 128, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(128, 500, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens).swapaxes(0, 1)
        kernel = self.next.kernel[...]

        def follow(state, given):
            state = jnp.tanh(given + state @ kernel @ kernel)
            return state, state

        return self.head(jax.lax.scan(follow, jnp.zeros_like(x[0]), x)[1].swapaxes(0, 1))


MIXING = {
    "by the package's attention": lambda: Attending(500, 64, 1, 2, nnx.Rngs(0)),
    "one token after the other": Following,
}


@pytest.mark.long
@pytest.mark.parametrize("kind", MIXING)
def test_what_is_repeated_of_a_model_of_ones_own_is_told_once(kind, corpus, tmp_path):
    """Of a recurrent network all devices do all, and the head alone is divided."""
    is_divided = kind == "by the package's attention"
    phases = [Phase(1, 1, 129), *([] if is_divided else [Phase(1, 1, 257)])]
    train(corpus, tmp_path / "run", phases, model=MIXING[kind], val_fraction=0, mesh=make_mesh())
    text = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    told = re.findall(r"warning: in phase (\d) 8 devices do ([\d.]+) times the work of one", text)
    assert text.count("warning: ") == len(told) == (not is_divided)
    assert not told or (told[0][0] == "1" and float(told[0][1]) > 2)


def test_blends_train(corpus, tmp_path):
    other = Roxxel(tmp_path / "other_*.rox")
    rng = np.random.default_rng(1)
    other.write((rng.integers(1, 500, 300).astype(np.uint16) for _ in range(60)), vocab_size=500)
    phases = [Phase(5, 8, 17, weights={"self": 1, "other": 1}, blend="row"), Phase(3, 8, 33, weights={"other": 1})]
    curriculum = Curriculum(corpus, phases, {"other": other})
    with other:
        options = {"mesh": make_mesh(2), "log_every": 1, "val_fraction": 0.0}
        made = Trainer(model, ADAM, curriculum, next_token_loss, tmp_path / "run", **options)
        made.run()
        made.close()
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))


def test_the_meter_leaves_out_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    meter = StepTimer()
    assert meter.report() == {}
    for passed, act in (
        (1, lambda: meter.step(100)),
        (0, meter.pause),
        (50, meter.pause),
        (0, meter.resume),
        (0, lambda: meter.step(100)),
        (1, meter.mark_done),
        (7, lambda: None),
    ):
        now[0] += passed
        act()
    assert meter.report() == {"ms_per_step": 1000.0, "tokens_per_s": 100.0}
    assert meter.tokens_per_s == 100.0
    meter.step(100)
    now[0] += 3
    assert meter.report() == {"ms_per_step": 10_000.0, "tokens_per_s": 10.0}


def test_a_logger_and_a_checkpointer_of_ones_own(corpus, tmp_path, capfd):
    net = module()
    optimizer = nnx.Optimizer(net, ADAM, wrt=nnx.Param)
    logger = Logger(tmp_path / "mine", "my")
    checkpointer = Checkpointer(tmp_path / "kept", net, optimizer, max_to_keep=1)
    options = {"model": net, "optimizer": optimizer, "logger": logger, "checkpointer": checkpointer}
    made = train(corpus, tmp_path / "run", [Phase(13, 8, 17)], val_fraction=0.0, **options)
    logger.close()
    assert made.checkpointer is checkpointer
    with (tmp_path / "mine" / "my_metrics.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 14))
    assert "phase 1/1 from step 1" in (tmp_path / "mine" / "my_system.log").read_text()
    assert capfd.readouterr().out.count("phase 1/1 from step 1") == 1
    assert len(losses(tmp_path / "run")) == 13
    assert checkpointer.store.latest_step() == 13
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(ValueError, match="has the checkpoints of a Trainer, which alone saves there"):
        checkpointer.save(14)
    # Restored by a user's own program.
    again = module()
    other = nnx.Optimizer(again, ADAM, wrt=nnx.Param)
    with Checkpointer(tmp_path / "kept", again, other) as reader:
        assert reader.restore() == 13
    for mine, theirs in ((again, net), (other.opt_state, optimizer.opt_state)):
        for a, b in zip(jax.tree.leaves(nnx.state(mine)), jax.tree.leaves(nnx.state(theirs)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert int(other.step[...]) == 13
    with pytest.raises(ValueError, match="keep_every and keep_steps apply to the run's own checkpoints"):
        make(corpus, tmp_path / "more", checkpointer=checkpointer, keep_every=2)
