"""`plan --mtbf`: what failures cost, by simulation, beside the formulas for it, and what is refused."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roxxel_dist.cli import main
from roxxel_dist.launcher.fleet.simulation import Work
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.estimate import failures
from roxxel_dist.run.estimate.failures import DAY_S, Cluster, estimate_failures, measured_times, young


@pytest.mark.parametrize("save_s", [5.0, 30.0])
def test_the_best_interval_is_young_s_and_the_goodput_daly_s(save_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crashes alone, whose restart takes a known time: what is lost is a save an interval, and at each crash the
    start and half an interval."""
    monkeypatch.setattr(failures, "TIMES", (0.25, 1.0, 4.0))
    monkeypatch.setattr(failures, "failures", partial(failures.failures, shares={"crash": 1.0}))
    cluster = Cluster(mtbf_days=2.0, hosts=8, step_s=0.5, save_s=save_s, start_s=60.0)
    mtbf_s = 2.0 * DAY_S / 8
    best_s = young(Work(step_s=0.5, save_s=save_s), mtbf_s)
    found = estimate_failures(cluster, checkpoint_every=round(best_s / 0.5), copies=False, run=None)
    expected = 1 - save_s / (best_s + save_s) - (60.0 + best_s / 2) / mtbf_s
    assert found.goodput == pytest.approx(expected, abs=0.01)
    assert found.goodput + sum(found.lost.values()) == pytest.approx(1.0)
    assert found.best.goodput - found.goodput < 0.01
    without = [choice for choice in (found.given, found.best) if not choice.memory_copies]
    assert all(math.log2(choice.checkpoint_every * 0.5 / best_s) == pytest.approx(0.0, abs=1.1) for choice in without)


@pytest.fixture
def roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few settings and short histories, where no number is held against a formula."""
    monkeypatch.setattr(failures, "TIMES", (0.7, 1.4))
    monkeypatch.setattr(failures, "FAILURES", 50)


@pytest.mark.usefixtures("roughly")
def test_spares_pay_where_repairs_are_long_and_not_where_they_are_short() -> None:
    few = Cluster(mtbf_days=20.0, hosts=64, step_s=1.0, save_s=5.0, repair_hours=48.0)
    assert estimate_failures(few, checkpoint_every=500, copies=False, run=None).best.spare_hosts > 0
    short = Cluster(mtbf_days=2000.0, hosts=8, step_s=1.0, save_s=5.0, repair_hours=0.5)
    assert estimate_failures(short, checkpoint_every=500, copies=False, run=None).best.spare_hosts == 0


def rows(*of: tuple[int, str, float, Any]) -> str:
    keys = ("attempt", "activity", "seconds", "steps")
    return "".join(json.dumps({"begin": 0.0, **dict(zip(keys, row, strict=True))}) + "\n" for row in of)


@pytest.mark.usefixtures("roughly")
def test_times_are_those_that_the_run_measured(tmp_path: Path) -> None:
    (tmp_path / "timeline.jsonl").write_text(
        rows((0, "start", 3.0, None), (0, "compile", 9.0, None), (0, "step", 30.0, [1, 1]), (0, "step", 20.0, [2, 11]))
        + rows((0, "save", 4.0, None), (0, "step", 22.0, [12, 21]), (1, "start", 2.0, None), (1, "restore", 6.0, None))
        + rows((1, "step", 40.0, [12, 31]), (1, "save", 6.0, None))
    )
    assert measured_times(tmp_path) == {"step_s": 2.0, "save_s": 5.0, "start_s": 10.0}
    cluster = Cluster(mtbf_days=9.0, hosts=4, save_s=1.5)
    found = estimate_failures(cluster, checkpoint_every=100, copies=True, run=tmp_path)
    assert (found.step_s, found.save_s, found.start_s) == (2.0, 1.5, 10.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mtbf 0 --hosts 4 --step_s 1", "--mtbf 0.0: must be days between two failures of a host, more than 0"),
        ("--mtbf nan --hosts 4 --step_s 1", "--mtbf nan: must be days"),
        ("--mtbf 9 --step_s 1", "--mtbf 9: of how many hosts? Give --hosts too"),
        ("--mtbf 9 --hosts 0 --step_s 1", "--hosts 0: must be at least 1"),
        ("--mtbf 9 --hosts 4", "the time of a step is not known (no run is named): give --step_s SECONDS"),
        ("empty --mtbf 9 --hosts 4", "the time of a step is not known (empty has no timeline of steps)"),
        ("--mtbf 9 --hosts 4 --step_s 0", "--step_s 0.0: must be seconds, more than 0"),
        ("--mtbf 9 --hosts 4 --step_s 1 --save_s -1", "--save_s -1.0: must be seconds, 0 or more"),
        ("--mtbf 9 --hosts 4 --step_s 1 --spare_hosts 4", "--spare_hosts 4: there are 4 hosts, and one has to work"),
        ("--hosts 4", "--hosts is for --mtbf"),
        ("--mtbf 9 --hosts 4 --target v5e:2x2", "--mtbf 9 compiles nothing: leave --target out, or --mtbf"),
        ("--mtbf 9 --hosts 4 --layouts", "--mtbf 9 compiles nothing: leave --layouts out, or --mtbf"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["plan", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.usefixtures("roughly")
def test_it_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--mtbf", "9", "--hosts", "4", "--spare_hosts", "1", "--step_s", "1", "--save_s", "3"]
    words += ["--checkpoint_every", "100"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"] + sum(found["lost"].values()) == pytest.approx(1.0)
    assert found["lost"]["spare hosts"] == 0.25
    assert found["best"]["goodput"] >= found["goodput"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert f"trains{found['goodput']:.1%}" in told.replace(" ", "")
    assert "best" in told
    assert "table 5: 77% lost hosts, 13% crashes, 8% runtime errors, 2% hangs\n" in told


def test_a_cluster_is_refused_in_python_too() -> None:
    with pytest.raises(UserError, match=r"mtbf=-1.0: must be days"):
        Cluster(mtbf_days=-1.0, hosts=3)
