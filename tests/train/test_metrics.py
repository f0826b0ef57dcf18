import jax
import numpy as np
import pytest
from runs import PHASES, train
from runs import rows as logged

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.train import metrics as report
from roxxel_dist.train import programs, steps
from roxxel_dist.train.log.base import LogQueue
from roxxel_dist.train.metrics import loss_by_dataset, make_row
from roxxel_dist.train.step import throughput
from roxxel_dist.train.step.bad_steps import LossMonitorState
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.step.step import Metrics
from roxxel_dist.train.step.throughput import StepTimer


def test_a_row_begins_with_what_the_csv_promises():
    row = make_row(7, {"loss": 2.0, "balance_loss": 0.1, "lr": 1e-3}, {"val_loss": 2.5}, {"phase": 1})
    assert list(row) == ["step", "train_loss", "train_bal", "val_loss", "val_bal", "phase", "lr"]
    assert (row["step"], row["train_loss"], row["train_bal"], row["val_bal"]) == (7, 2.0, 0.1, 0.0)


def test_a_loss_functions_own_numbers_are_no_validation():
    scalars = {"loss": 2.0, "val_loss": 1.0, "val_loss/code": 1.0, "train_eval_loss": 1.0, "step": 9.0, "accuracy": 0.5}
    row = make_row(3, scalars, {}, {"lr": 0.1})
    assert row == {"step": 3, "train_loss": 2.0, "train_bal": 0.0, "lr": 0.1, "accuracy": 0.5}
    twice = make_row(3, {"loss": 2.0, "accuracy": 0.5, "val_accuracy": 0.6}, {}, {})
    assert "val_accuracy" not in twice, "that is the name of the first one in a validation"


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, {"loss/self": 2.0, "loss/math": 4.0}),
        ([1, 1, 1, 1], {"loss/self": 2.0, "loss/math": 4.0}),
        ([3, 1, 1, 0], {"loss/self": 1.5, "loss/math": 2.0}),  # tokens that each row predicts
        ([1, 0, 1, 0], {"loss/self": 2.0}),  # no token of math is predicted
    ],
)
def test_the_mean_loss_of_the_rows_of_each_data_set(weights, expected):
    row_loss = np.float32([1, 2, 3, 6 if weights is None or weights[3] else np.nan])
    metrics = Metrics(
        {}, row_loss, None if weights is None else np.float32(weights), LossMonitorState.initial(np.zeros)
    )
    assert loss_by_dataset(metrics, np.int32([0, 2, 0, 2]), ("self", "code", "math")) == pytest.approx(expected)


def test_the_time_that_is_left_is_that_of_the_tokens_that_are_left(corpus, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(report, "SHOW_EVERY_S", 0)
    monkeypatch.setattr(LogQueue, "status", lambda _, record: shown.append(record))
    train(corpus, tmp_path, PHASES[:1])
    timed = [record for record in shown if record["eta_s"]]
    assert timed
    for record in timed:
        left = (PHASES[0].steps - record["step"]) * PHASES[0].batch_size * (PHASES[0].seq_len - 1)
        assert record["eta_s"] == pytest.approx(left / record["tokens_per_s"])


def test_speed_and_mfu_count_what_is_computed(corpus, tmp_path, monkeypatch):
    """The last token of a row is predicted and no input: `tokens` counts it, as it is read, and a speed does not.

    Of the devices that are here, those of the mesh count.
    """
    steps, lengths, counted, phase = [], [], [], PHASES[0]
    monkeypatch.setattr(report, "mfu", lambda speed, flops, devices: counted.append(len(devices)))
    begun = StepTimer.step
    monkeypatch.setattr(StepTimer, "step", lambda timer, tokens: (steps.append(tokens), begun(timer, tokens)))
    monkeypatch.setattr(TrainView, "flops_per_token", lambda _: lambda length: lengths.append(length) or 1.0)
    train(corpus, tmp_path, PHASES[:1], mesh=make_mesh(2))
    assert set(counted) == {2} != {len(jax.devices())}
    assert set(steps) == {phase.batch_size * (phase.seq_len - 1)}
    assert set(lengths) == {phase.seq_len - 1}
    assert logged(tmp_path)[-1]["tokens"] == phase.steps * phase.batch_size * phase.seq_len


def test_hfu_counts_what_the_compiled_program_computes(corpus, finished_run, tmp_path, monkeypatch):
    """Of each phase its own program."""

    assert "hfu" not in logged(finished_run)[-1], "the peak of a CPU is not known"
    for module in (throughput, programs):
        monkeypatch.setattr(module, "peak_flops", lambda *kind: 1e12)
    train(corpus, tmp_path / "known", PHASES[1:])
    ratios = [row["hfu"] / row["mfu"] for row in logged(tmp_path / "known") if "mfu" in row]
    assert len(ratios) > 1
    # The usual count has all parameters in products: here the head's 16 x 500 alone are.
    assert ratios == pytest.approx([8000 / 16_016] * len(ratios), rel=1e-6)

    def unreadable(*_):
        raise ValueError

    monkeypatch.setattr(steps, "program_cost", unreadable)
    train(corpus, tmp_path / "unreadable", PHASES[:1])
    row = logged(tmp_path / "unreadable")[-1]
    assert "mfu" in row
    assert "hfu" not in row
