"""A sweep over mixtures and ends of phases, with `asha`: on a table, and as real trainings whose driver is killed."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import FAST, command, environment, run, wait_for
from decided import check_decisions
from numpy.typing import ArrayLike
from sweep_desk import text_sets, write_base, write_sweep

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.data_search import with_data
from roxxel_dist.sweep.driver.recorded import RecordedSearch
from roxxel_dist.sweep.space.passes import PassBudget
from roxxel_dist.sweep.space.sweep_file import Sweep, read_sweep, sweep_of
from roxxel_dist.sweep.study.folder import read_study
from roxxel_dist.sweep.study.journal import History

SETS = ("self", "code", "math")
TOKENS = (60_000, 12_000, 6_000)
PHASES = [{"steps": steps, "batch_size": 8, "seq_len": 33, "blend": "row"} for steps in (60, 20)]
SWEEP = {
    "metric": {"name": "mean_loss", "weights": {"self": 2, "code": 1, "math": 1}},
    "parameters": {"lr": {"distribution": "log_uniform_values", "min": 1e-3, "max": 1e-1}},
    "early_terminate": {"type": "asha", "min_iter": 1, "eta": 3},
}
EXTRAS = {
    "mixtures": [
        {"phases": [1], "datasets": {"self": {"min": 0.2}, "code": {}, "math": {}}, "max_passes": 1.2},
        {"phases": [2], "datasets": {name: {} for name in SETS}},
    ],
    "phase_ends": {1: [0.4, 0.8]},
}
DECIDED = ("ask", "pause", "thaw")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, count in zip(SETS, TOKENS, strict=True):
        np.save(folder / f"{name}.npy", rng.integers(0, 64, count).astype(np.uint16))
    sets = {name: str(folder / f"{name}.npy") for name in SETS}
    return Config(datasets=sets, validation=sets, phases=PHASES, vocab_size=64, dim=32, max_context=32)


def opened(base: Config, method: str) -> Sweep:
    """As `sweep --method` opens it."""
    return replace(with_data(sweep_of(SWEEP, EXTRAS), base, None, {"lr"}), method=method)


def read_so_far(params: dict[str, Any], done: float) -> np.ndarray:
    """The shares of what a trial has read after a part of its steps: float64[3]."""
    first, second = (np.array([params[f"mixture.{phase}.{name}"] for name in SETS]) for phase in (1, 2))
    end = min(params["phase_end.1"], done)
    return (end * first + (done - end) * second) / done


def curve(params: dict[str, Any]) -> np.ndarray:
    """float64[4, 3]: the less of a set was read, the higher its loss; and there is a best rate."""
    rate = 0.05 * abs(np.log(params["lr"] / 0.01))
    return np.array([2.0 + rate + np.exp(-3.0 * done * read_so_far(params, done)) for done in (0.25, 0.5, 0.75, 1.0)])


def searched(
    sweep: Sweep, table: Callable[[dict[str, Any]], ArrayLike], count: int, workers: int, patch: pytest.MonkeyPatch
) -> tuple[RecordedSearch, list[dict[str, Any]]]:
    """A search until so many trials were asked for, and the events of its journal."""
    events: list[dict[str, Any]] = []
    apply = History.apply
    with patch.context() as held:
        held.setattr(History, "apply", lambda self, event: (events.append(dict(event)), apply(self, event))[1])
        search = RecordedSearch(sweep, table, 1)
        while len(search.history.trials) < count and search.advance(workers):
            pass
    return search, events


@pytest.mark.parametrize("method", ["random", "bayes", pytest.param("tpe", marks=pytest.mark.long)])
def test_asha_stops_mixtures_early(method: str, base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Baselines come first, no trial reads a set too often, and the decisions follow from the journal."""
    sweep = opened(base, method)
    search, events = searched(sweep, curve, 20, 2, monkeypatch)
    trials = search.history.trials
    assert search.history.steps < 0.75 * 4 * len(trials)
    assert {len(trial.reports) for trial in trials.values()} >= {1, 4}
    assert sum(event["event"] == "thaw" for event in events) >= 1
    shares = [np.concatenate(sweep.space.shares_of(trial.params)) for trial in trials.values()]
    natural, uniform = (np.concatenate(row) for row in sweep.space.baselines)
    assert np.abs(shares[0] - natural).max() < 0.02
    assert np.abs(shares[1] - uniform).max() < 0.15  # moved by what 1.2 passes over `math` leave
    budget = sweep.rules.budget
    assert isinstance(budget, PassBudget)
    assert all(budget.passes(trial.params)["math"] <= 1.2 for trial in trials.values())
    ends = {trial.params["phase_end.1"] for trial in trials.values()}
    assert len(ends) > 10
    assert all(0.4 <= end <= 0.8 for end in ends)
    assert check_decisions(json.loads(json.dumps(events)), opened(base, method)) >= 20


COUNT = 10
REAL = {**SWEEP, "method": "bayes", "metric": {"name": "mean_loss", "weights": {"self": 1, "code": 3}}}
REAL_EXTRAS = {
    "mixtures": [{"phases": [phase], "datasets": {"self": {}, "code": {}}} for phase in (1, 2)],
    "phase_ends": EXTRAS["phase_ends"],
}


def journal(study: Path) -> list[dict[str, Any]]:
    path = study / "journal.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_killed_sweep_over_mixtures_decides_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real trainings on a real Ray; the driver is killed in trial 3 and, after the law was asked, in trial 8."""
    study, sets = tmp_path / "study", text_sets(tmp_path)
    phases = [{**phase, "steps": steps} for phase, steps in zip(PHASES, (30, 10), strict=True)]
    write_base(tmp_path, 40, 10, phases=phases, datasets=sets, validation=sets, checkpoint_every=10)
    write_sweep(tmp_path, REAL)
    (tmp_path / "extras.yaml").write_text(yaml.safe_dump(REAL_EXTRAS))
    words = ["sweep", "--sweep_config", "sweep.yaml", "--extras", "extras.yaml", "--config", "base.yaml"]
    words += ["--study", "study", "--count", str(COUNT), "--sweep_seed", "1"]

    def reported(number: int) -> bool:
        return any(event["event"] == "report" and event["trial"] >= number for event in journal(study))

    for number in (3, 8):
        with subprocess.Popen(
            command(*words), cwd=tmp_path, env=environment(XLA_FLAGS=FAST), stdout=subprocess.DEVNULL
        ) as driver:
            wait_for(lambda: reported(number), limit_s=400, what=f"a report of trial {number}")  # noqa: B023
            driver.kill()
    done = run(*words, cwd=tmp_path, timeout=400, XLA_FLAGS=FAST)
    assert done.returncode == 0, done.stdout + done.stderr

    found = read_study(study).history
    assert set(found.trials) == set(range(COUNT))
    assert all(losses.keys() == {"self", "code"} for trial in found.trials.values() for losses in trial.losses.values())
    config = Config.from_yaml(tmp_path / "base.yaml")
    sweep = with_data(read_sweep(tmp_path / "sweep.yaml", tmp_path / "extras.yaml"), config, None, {"lr"})
    rows = {json.dumps(trial.params, sort_keys=True): trial for trial in found.trials.values()}

    def recorded(params: dict[str, Any]) -> list[list[float]]:
        reports = sorted(rows[json.dumps(params, sort_keys=True)].losses.items())
        losses = [[one[name] for name in sweep.weights] for _, one in reports]
        return losses + losses[-1:] * (4 - len(losses))  # of a trial that stays paused

    recorded.steps_per_report = 10  # pyright: ignore[reportFunctionMemberAccess]
    _, events = searched(sweep, recorded, COUNT, 1, monkeypatch)
    whole = [event for event in events if event["event"] in DECIDED]
    real = [event for event in journal(study) if event["event"] in DECIDED]
    assert check_decisions(journal(study), sweep, count=COUNT) == len(real)
    assert sum(event["event"] == "thaw" for event in whole) >= 1
    for one, other in zip(whole, real[: len(whole)], strict=True):  # the real one went on after the last `ask`
        keys = one.keys() & {"event", "trial", "params", "point", "step", "value"}
        assert {key: other[key] for key in keys} == {key: one[key] for key in keys}
    # What each trial trained on is what was proposed.
    for number, trial in found.trials.items():
        phases = Config.from_yaml(study / "trials" / str(number) / "config.yaml").phases or []
        assert [sum(phase["weights"].values()) for phase in phases] == pytest.approx([1.0, 1.0])
        assert phases[0]["weights"]["code"] == trial.params["mixture.1.code"]
        assert phases[0]["steps"] == round(trial.params["phase_end.1"] * 40)
        assert sum(phase["steps"] for phase in phases) == 40
