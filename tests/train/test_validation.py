"""Validation while training: the data, the messages, the best checkpoint, and early stopping."""

import numpy as np
import pytest
from flax import nnx
from runs import PHASES, STILL, losses, make, model, rows, saved, stop_after, told, train

from roxxel_dist import Curriculum, Phase, Roxxel
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.train.step import compile as programs
from roxxel_dist.train.step.digest_chain import absorb
from roxxel_dist.train.validation.evaluator import HELD_OUT, TRAIN, summarize

ONE_SHAPE = [Phase(13, 8, 17)]


def write(pattern, documents):
    with Roxxel(pattern) as data:
        data.write((np.asarray(one, np.uint16) for one in documents), vocab_size=500)
    return Roxxel(pattern)


NAN = float("nan")


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ({"v": [(2.0, 1), (10.0, 9)]}, {"val_loss": 9.2, "val_loss/v": 9.2, "val_bal": 0.0}),  # no mean of means
        ({"v": [(2.0, 0.1), (10.0, 0.9)]}, {"val_loss": 9.2, "val_loss/v": 9.2, "val_bal": 0.0}),  # shares
        ({"v": [(2.0, 3), (NAN, 0), (0.0, 0)]}, {"val_loss": 2.0, "val_loss/v": 2.0, "val_bal": 0.0}),
        ({"v": [(2.0, 3), (NAN, 1)]}, {"val_loss": NAN, "val_loss/v": NAN, "val_bal": 0.0}),  # a real NaN is seen
        ({"v": [(NAN, 0)], "w": [(1.0, 2)]}, {"val_loss": 1.0, "val_loss/v": NAN, "val_loss/w": 1.0, "val_bal": 0.0}),
        (
            {"v": [(1.0, 2), (4.0, 1)], "w": [(7.0, 1)], TRAIN: [(5.0, 1), (1.0, 3)]},
            {"val_loss": 3.25, "val_loss/v": 2.0, "val_loss/w": 7.0, "train_eval_loss": 2.0, "val_bal": 0.0},
        ),
        ({HELD_OUT: [(-2.0, 1), (-4.0, 3)]}, {"val_loss": -3.5, "val_bal": 0.0}),
        ({}, {}),
    ],
)
def test_a_validation_is_a_mean_over_the_tokens_that_are_predicted(batches, expected):
    losses = {
        name: [{"loss": loss, "loss_weight": weight} for loss, weight in pairs] for name, pairs in batches.items()
    }
    assert summarize(losses) == pytest.approx(expected, nan_ok=True)


def test_scalars_of_a_loss_are_means_by_its_weights():
    """Of all sets, and of each; the names of the built-in numbers are theirs."""
    batch = {"loss": 1.0, "loss_weight": 1, "acc": 0.0, "bpb": 7.0, "bal": 7.0, "bytes": 9.0, "loss/x": 3.0}
    other = {"loss": 2.0, "loss_weight": 3, "acc": 1.0, "bpb": 7.0, "bal": 7.0, "bytes": 9.0, "loss/x": 3.0}
    found = summarize({"v": [batch, other], "w": [other], TRAIN: [batch]})
    assert found["val_acc"] == pytest.approx(6 / 7)
    assert {name for name in found if "acc" in name} == {"val_acc", "val_acc/v", "val_acc/w"}
    assert (found["val_acc/v"], found["val_acc/w"], found["val_bytes"]) == (0.75, 1.0, 9.0)
    assert {name for name in found if "bpb" in name or "bal" in name} == {"val_bal"}
    assert found["val_bal"] == 0.0
    assert "val_loss/x" not in found
    assert {name for name in summarize({HELD_OUT: [batch]}) if "acc" in name} == {"val_acc"}


def test_text_is_said_and_a_dictionary_is_logged(corpus, tmp_path):
    """At every `eval_every`, without data to validate on too; the state is the one after that step."""
    seen, tokens = [], corpus.read(np.zeros(1, np.int64), 16, np.int32)
    called = nnx.jit(lambda model, tokens: ((logits := model(tokens)), logits.std()))

    def evaluate(state):
        logits, spread = called(state.model, tokens)
        assert logits.shape == (1, 16, 500)
        assert int(state.step) == int(state.step[...])
        seen.append(int(state.step))
        if seen[-1] == 5:
            return f"after {int(state.step)} steps"
        return {"spread": spread, "twice": 2 * seen[-1]} if seen[-1] == 10 else None

    train(corpus, tmp_path, ONE_SHAPE, eval_fn=evaluate, val_fraction=0.0)
    assert seen == [1, 5, 10, 13]
    found = {row["step"]: row for row in rows(tmp_path)}
    assert found[10]["twice"] == 20
    assert 0 < found[10]["spread"] < 10
    assert all("twice" not in row and "val_loss" not in row for step, row in found.items() if step != 10)
    assert told(tmp_path).count("after 5 steps") == 1


def test_a_validation_loss_of_ones_own_decides_which_is_best(corpus, tmp_path):
    def evaluate(state):
        return {"val_loss": abs(int(state.step) - 5)}

    options = {"val_fraction": 0.0, "max_to_keep": 1, "checkpoint_every": 100, "keep_best": True}
    made = train(corpus, tmp_path, ONE_SHAPE, eval_fn=evaluate, **options)
    assert (made.store.best_step(), saved(tmp_path)) == (5, [5, 13])


@pytest.mark.parametrize(
    ("options", "steps", "best"),
    [
        ({"checkpoint_every": 100}, [1, 13], 1),
        ({"checkpoint_every": 5}, [1, 5, 10, 13], 10),
        ({"checkpoint_every": 100, "keep_best": True}, [1, 2, 4, 6, 13], 6),
        ({"checkpoint_every": 100, "patience": 2}, [1, 10], 10),
    ],
)
def test_a_better_validation_is_saved_where_that_is_asked_for(corpus, tmp_path, options, steps, best):
    def evaluate(state):
        return {"val_loss": abs(int(state.step) - 7)}

    options = {"eval_every": 2, "val_fraction": 0.0, "max_to_keep": None, **options}
    made = train(corpus, tmp_path, ONE_SHAPE, eval_fn=evaluate, **options)
    assert (saved(tmp_path), made.store.best_step()) == (steps, best)


def test_named_sets_and_their_weighted_mean(corpus, tmp_path):
    """The small set has a single batch of the two that are asked for, so it weighs half as much."""
    rng = np.random.default_rng(5)
    small = write(tmp_path / "small_*.rox", [rng.integers(1, 500, 200)])
    large = write(tmp_path / "large_*.rox", [np.full(300, 7) for _ in range(20)])
    with small, large:
        train(corpus, tmp_path / "run", PHASES[:1], validation={"train": small, "sevens": large})
        bad = [Phase(2, 256, 17)]
        with pytest.raises(
            ValueError, match=r"validation 'noise': 201? tokens are held out, too few for a batch of 256"
        ):
            make(corpus, tmp_path / "bad", bad, validation={"noise": small})
    found = [row for row in rows(tmp_path / "run") if "val_loss" in row]
    assert [row["step"] for row in found] == [1, 5, 6]
    for row in found:
        noise, sevens = row["val_loss/train"], row["val_loss/sevens"]
        assert row["val_loss"] == pytest.approx((noise + 2 * sevens) / 3, rel=1e-6)
        assert abs(noise - sevens) > 1e-3
        assert "train_eval_loss" in row
    assert not (tmp_path / "bad" / "logs").exists()


def test_what_is_held_out_is_never_trained_on(corpus, tmp_path):
    """Three passes over the training part in two phases: all of it is read, and nothing else."""
    training, held_out = Curriculum(corpus, [Phase(1, 8, 17)]).hold_out(0.2)
    out = np.concatenate([np.arange(start, start + length) for start, length in held_out.ranges])
    assert 0.15 < len(out) / corpus.num_tokens < 0.25
    phases = [Phase(epochs=1.5, batch_size=32, seq_len=33), Phase(epochs=1.5, batch_size=16, seq_len=65)]
    made = make(corpus, tmp_path, phases, val_fraction=0.2, eval_every=1000, checkpoint_every=1000, log_every=1000)
    planned = [made.plan.rows(step) for step in range(made.plan.total_steps)]
    made.close()
    trained = np.unique(np.concatenate([np.add.outer(r.offset, np.arange(r.seq_len)).ravel() for r in planned]))
    assert not np.isin(out, trained).any()
    assert len(trained) > 0.9 * (corpus.num_tokens - len(out))
    assert training.primary_streamer.num_tokens + len(out) == corpus.num_tokens


def test_the_same_batches_each_time_and_no_dropout(corpus, tmp_path):
    """Of a model that does not learn the loss stays to the bit; on its training batches dropout makes it jump."""

    def dropping():
        return model(dropout_rate=0.5)

    train(corpus, tmp_path / "cut", PHASES[:2], model=dropping, optimizer=STILL, max_steps=7)
    train(corpus, tmp_path / "cut", PHASES[:2], model=dropping, optimizer=STILL)
    train(corpus, tmp_path / "dry", PHASES[:2], optimizer=STILL)
    found = {name: [row for row in rows(tmp_path / name) if "val_loss" in row] for name in ("cut", "dry")}
    assert [row["step"] for row in found["cut"]] == [1, 5, 7, 10]
    for name in ("val_loss", "train_eval_loss"):
        assert len({row[name] for row in found["cut"]}) == 1
        assert found["cut"][0][name] == pytest.approx(found["dry"][0][name], rel=1e-5)
    assert found["cut"][0]["val_loss"] != found["cut"][0]["train_eval_loss"]
    first = {name: rows(tmp_path / name)[0]["train_loss"] for name in ("cut", "dry")}
    assert abs(first["cut"] - first["dry"]) > 1e-4, "dropout was off while training"


def test_patience_ends_a_run_for_good(corpus, tmp_path):
    """Validated after 1, 2 and 4; the first was the best."""
    options = {"phases": ONE_SHAPE, "optimizer": STILL, "eval_every": 2, "patience": 2, "checkpoint_every": 100}
    made = train(corpus, tmp_path, **options)
    assert (made.step, made.stopped, made.finished) == (4, False, True)
    assert [step for step, *_ in losses(tmp_path)] == [1, 2, 3, 4]
    assert (saved(tmp_path), made.store.best_step()) == ([1, 4], 1)
    assert "no lower val_loss in 2 validations: the run ends here" in told(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = train(corpus, tmp_path, **options)
    assert (again.start_step, again.step, again.finished) == (4, 4, True)
    assert "this run is finished: step 4 is restored" in told(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    more = train(corpus, tmp_path, **{**options, "patience": 3})
    assert (more.start_step, more.step) == (4, 6)


def test_patience_and_the_best_loss_outlive_the_process(corpus, tmp_path, monkeypatch):
    """Cut after step 5, one validation after the best. Without what was kept, it would wait for three more."""
    options = {"phases": ONE_SHAPE, "optimizer": STILL, "eval_every": 3, "patience": 3, "checkpoint_every": 1}
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert train(corpus, tmp_path, **options).stopped
    made = train(corpus, tmp_path, **options)
    assert (made.start_step, made.step) == (5, 9)
    assert made.store.metadata(9).early_stopping.best_loss == losses(tmp_path)[0][2]


def test_the_best_the_newest_and_those_that_are_kept_for_ever(corpus, tmp_path):
    options = {"max_to_keep": 1, "checkpoint_every": 2, "keep_every": 4, "keep_steps": [7], "eval_every": 3}
    made = train(corpus, tmp_path, ONE_SHAPE, optimizer=STILL, **options)
    assert saved(tmp_path) == [1, 4, 7, 8, 12, 13]
    assert (made.store.best_step(), made.store.latest_step()) == (1, 13)


def test_a_better_checkpoint_takes_the_place_of_the_best(corpus, tmp_path):
    """Also of one that another process saved."""

    def evaluate(state):
        return {"val_loss": abs(int(state.step) - 9)}

    options = {
        "phases": ONE_SHAPE,
        "eval_fn": evaluate,
        "val_fraction": 0.0,
        "max_to_keep": 1,
        "checkpoint_every": 4,
        "eval_every": 3,
        "keep_best": True,
    }
    first = train(corpus, tmp_path, max_steps=7, **options)
    assert (first.store.best_step(), saved(tmp_path)) == (7, [7])
    made = train(corpus, tmp_path, **options)
    assert (made.store.best_step(), saved(tmp_path)) == (9, [9, 13])


@pytest.mark.long
def test_a_bad_validation_is_no_best(corpus, tmp_path):
    """A model whose evaluation alone is no number: told in the log, never the best, and counted by patience."""

    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.inner, self.deterministic = model(), False

        def __call__(self, tokens):
            return self.inner(tokens) * (np.nan if self.deterministic else 1.0)

    made = train(corpus, tmp_path, model=Odd, eval_every=2, patience=2, loss_fn=next_token_loss)
    assert made.step == 2
    assert made.store.best_step() is None
    assert [row.get("val_loss", 0) for row in rows(tmp_path)] == [None, None]


def test_every_program_is_waited_for_by_all_ranks_once(corpus, tmp_path, monkeypatch):
    """Those of validation too: on CPU the first collective of a rank that comes late fails."""
    places = []
    monkeypatch.setattr(programs, "barrier", lambda name, limit_s: places.append(name))
    made = train(corpus, tmp_path)
    on_mesh = set(made.loop.held.compiler._programs) - {absorb}  # that is of one device
    assert made.loop.held.compiler._shared == on_mesh
    assert len(places) == len(on_mesh)
