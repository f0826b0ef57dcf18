"""Views of jobs with many ranks and of studies with many trials: CPU time and bytes that grow with their number."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pretended import LINEAR, cpu_of, exponent

from roxxel_dist.launcher.control.record import JobRecord, RankProcess, this_process
from roxxel_dist.sweep.study.journal import History
from roxxel_dist.view.frame import Look, frame
from roxxel_dist.view.items import JobState, StudyReader
from roxxel_dist.view.run import RankRates
from roxxel_dist.view.web.metrics_server import exposition
from roxxel_dist.view.web.sections import MOST_RANKS, sections

SIZES = [(500, 4000), pytest.param((1000, 8000), marks=pytest.mark.long)]
LOOK = Look(width=120, height=50)
SWEEP = "method: random\nmetric: {name: val_loss, goal: minimize}\nparameters:\n  lr: {min: 0.1, max: 0.2}\n"
TIMES = {"time": 1.0, "awake": 1.0}


def job_of(ranks: int, folder: Path) -> JobState:
    """A job with 8 ranks a host, of which the last is a step behind."""
    many = tuple(
        RankProcess(
            rank=rank, host=f"h{rank // 8}", pid=1, step=9 - (rank == ranks - 1), activity="step", changed_at=1.0
        )
        for rank in range(ranks)
    )
    record = JobRecord(
        run_id="r",
        controller=this_process(),
        hosts=tuple(f"h{host}" for host in range(ranks // 8)),
        nprocs=ranks,
        command="train",
        log_dir=str(folder),
        begun=1.0,
        updated=1.0,
        grace=30.0,
        state="running",
        ranks=many,
    )
    return JobState(record=record, ranks=RankRates().read(record), lines=())


@pytest.mark.parametrize("view", [sections, lambda state: frame([state], LOOK), lambda state: exposition([state])])
def test_a_look_costs_as_much_as_there_are_ranks(view: Callable[[JobState], object], tmp_path: Path) -> None:
    few, many = (job_of(ranks, tmp_path) for ranks in (1000, 8000))
    assert exponent(lambda ranks: cpu_of(partial(view, few if ranks == 1000 else many)), 1000, 8000) < LINEAR


def test_the_page_gets_the_ranks_that_are_behind_and_how_many_there_are_more(tmp_path: Path) -> None:
    """The time since the last step of each rank is another one each second, so all were sent each second: 1.2 MB."""
    text = sections(job_of(8000, tmp_path))["ranks"]
    sent = json.loads(text)
    assert len(text) < 64_000
    assert (len(sent["ranks"]), sent["more"]) == (MOST_RANKS, 8000 - MOST_RANKS)
    assert [rank["rank"] for rank in sent["ranks"] if rank["behind"]] == [7999]
    assert json.loads(sections(job_of(8, tmp_path))["ranks"])["more"] == 0


def study_of(trials: int, folder: Path) -> Path:
    """A study on disk, with three reports a trial."""
    folder.mkdir()
    (folder / "study.yaml").write_text(SWEEP)
    rows = [{"event": "study", "format": 1, "metric": "val_loss", "goal": "minimize", "method": "random", "seed": 0}]
    for number in range(trials):
        rows.append({"event": "ask", "trial": number, "params": {"lr": 0.1 + number / 1e6}, "point": [0.5]})
        rows.append({"event": "start", "trial": number, "attempt": 0, "node": "n", "pid": 1})
        rows += [{"event": "report", "trial": number, "step": step, "value": 1.0 / step} for step in (10, 20, 30)]
        end = {"seconds": 9.0, "stopped": False, "params": {"lr": 0.1 + number / 1e6}, "value": 0.5, "more": {}}
        rows.append({"event": "result", "trial": number, **end})
    (folder / "journal.jsonl").write_text("".join(json.dumps(row | TIMES) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("sizes", SIZES)
def test_a_study_is_read_once_and_a_look_costs_as_much_as_there_are_trials(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {trials: study_of(trials, tmp_path / str(trials)) for trials in sizes}
    assert exponent(lambda trials: cpu_of(StudyReader(folders[trials]).read), *sizes) < LINEAR
    readers = {trials: StudyReader(folder) for trials, folder in folders.items()}
    for reader in readers.values():
        reader.read()
    applied = []
    monkeypatch.setattr(History, "apply", lambda history, event: applied.append(event))
    for view in (sections, lambda state: frame([state], LOOK), lambda state: exposition([state])):
        looks_of = {trials: partial(view, reader.read()) for trials, reader in readers.items()}
        assert exponent(lambda trials, of=looks_of: cpu_of(of[trials]), *sizes) < LINEAR
    assert not applied, "a line of the journal is read twice"
