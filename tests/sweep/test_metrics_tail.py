"""What a training that is a trial reports."""

import json
import math
from pathlib import Path

import pytest

from roxxel_dist.place.directory import METRICS
from roxxel_dist.sweep.trial.metrics import MetricsTail, Report


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
    tail.close()
    assert str(found) == str(reports)
