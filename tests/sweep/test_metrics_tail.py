"""What a training that is a trial reports."""

import json
import math
from pathlib import Path

import pytest

from roxxel_dist.place.directory import METRICS
from roxxel_dist.sweep.trial.tail import MetricsTail, Report


@pytest.mark.parametrize(
    ("written", "reports"),
    [
        ([(1, 7.0), (20, 5.0), (40, 4.0)], [(20, 5.0), (40, 4.0)]),
        ([(1, 7.0), (2, 6.0), (3, 5.0)], [(1, 7.0), (2, 6.0), (3, 5.0)]),
        ([(1, 7.0)], [(1, 7.0)]),
        ([(1, math.nan)], [(1, math.nan)]),
        ([(20, 5.0), (40, 4.0)], [(20, 5.0), (40, 4.0)]),
    ],
    ids=["later", "each step", "no other", "not finite", "goes on"],
)
def test_value_at_step_1_is_a_report_where_it_stands_for_a_step(
    written: list[Report], reports: list[Report], tmp_path: Path
) -> None:
    tail, found = MetricsTail(tmp_path, "val_loss"), []
    for step, value in written:
        with (tmp_path / METRICS).open("a") as file:
            file.write(json.dumps({"step": step, "val_loss": None if math.isnan(value) else value}) + "\n")
        found += tail.read()
    found += tail.read(last=True)
    assert str(found) == str(reports)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"val_loss/a": 2.0, "val_loss/b": 4.0}], [(20, 3.5)]),
        ([{"val_loss/a": 2.0, "val_loss/b": 4.0, "val_loss/c": 9.0}, {"train_loss": 1.0}], [(20, 3.5)]),
        ([{"val_loss/a": 2.0, "val_loss/b": None}], [(20, math.nan)]),
        ([{"val_loss/a": 2.0}], []),
    ],
    ids=["mean", "others", "not finite", "absent"],
)
def test_a_mean_over_data_sets(rows: list[dict[str, float | None]], expected: list[Report], tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path, "mean_loss", {"val_loss/a": 0.25, "val_loss/b": 0.75})
    with (tmp_path / METRICS).open("w") as file:
        file.writelines(json.dumps({"step": 20 * number, **row}) + "\n" for number, row in enumerate(rows, 1))
    found = tail.read(last=True)
    assert str(found) == str(expected)
    assert list(tail.losses) == [step for step, _ in expected]
    assert all(set(of_sets) == {"a", "b"} for of_sets in tail.losses.values())
    if not expected:
        assert "and not val_loss/b: name those sets in `validation`" in tail.missing_message()
