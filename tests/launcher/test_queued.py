"""Jobs that SLURM has not started, or is to start again: what `ps`, `logs`, `attach` and `stop` make of its answers."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.cli import jobs as cli_jobs
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control import jobs as queued
from roxxel_dist.launcher.control import record
from roxxel_dist.launcher.control.record import JobRecord, JobRecorder
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.process.exit_codes import UserError

ME = os.getuid()
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
GONE = "slurm_load_jobs error: Invalid job id specified"
ELSEWHERE: dict[str, Any] = {"controller": dataclasses.replace(record.this_process(), host="node7", pid=1)}
RAN: dict[str, Any] = {"ran": True, **ELSEWHERE}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[[str], None]:
    """Have squeue answer so; `scancel` takes the job out of the queue. Both note what they were asked."""
    (tmp_path / "answer").write_text(GONE)
    for name, then in (("squeue", ""), ("scancel", f"echo '{GONE}' > {tmp_path}/answer")):
        tool = tmp_path / name
        answer = (
            f"if grep -q error: {tmp_path}/answer; then cat {tmp_path}/answer >&2; exit 1; fi; cat {tmp_path}/answer"
        )
        tool.write_text(f"#!/bin/sh\necho {name} $* >> {tmp_path}/asked\n{then or answer}\n")
        tool.chmod(0o755)

    def says(text: str) -> None:
        (tmp_path / "answer").write_text(text and text + "\n")

    return says


def job(number: str = "5", **changes: Any) -> JobRecord:
    """A job of which its newest launcher, if any, wrote this."""
    spec = JobSpec(run_id=f"run-{number}", command=("train",), nprocs=2, log_dir=Path(f"runs/{number}/logs"))
    recorder = JobRecorder(spec, LocalBackend(), slurm_job=number)
    recorder.queue()
    changed = dataclasses.replace(recorder.entry, **changes)
    record.write(changed, changed.path)
    return changed


@one_test(
    ("written", "answer", "state", "words"),
    [
        ({}, f"5|{ME}|PENDING|Priority", "queued", "(job 5, Priority)"),
        ({}, f"5|{ME}|PENDING|None", "queued", "SLURM (job 5):"),
        ({}, f"5|{ME}|PENDING|PartitionDown", "queued", "PartitionDown"),
        ({}, f"5|{ME}|PENDING|JobHeldUser", "queued", "`scontrol release 5`"),
        ({}, f"5|{ME}|PENDING|ReqNodeNotAvail, UnavailableNodes:h1", "queued", "UnavailableNodes:h1"),
        ({}, f"5|{ME}|PENDING|DependencyNeverSatisfied", "queued", "never start"),
        ({}, f"5|{ME}|PENDING|launch failed requeued held", "queued", "`scontrol release 5`"),
        ({}, f"5|{ME}|CONFIGURING|None", "queued", "waits in"),  # no launcher has written yet
        ({}, f"5|{ME}|RUNNING|None", "queued", "waits in"),
        ({}, "", "lost", "never began"),
        ({}, GONE, "lost", "never began"),
        ({}, f"5|{ME + 1}|PENDING|Priority", "lost", "never began"),  # another one's job has the number now
        ({}, DOWN, "queued", "waits in"),
        ({"state": "ended", "code": 42, **RAN}, f"5|{ME}|PENDING|BeginTime", "queued", "waits again"),
        ({"state": "ended", "code": 42, **RAN}, f"5|{ME}|REQUEUE_HOLD|JobHeldUser", "queued", "release 5"),
        ({"state": "ended", "code": 42, **RAN}, f"5|{ME}|COMPLETING|None", "ended", "with 42"),
        ({"state": "ended", "code": 7, **RAN}, f"5|{ME}|RUNNING|None", "ended", "with 7"),  # more lines of its script
        ({"state": "ended", "code": 42, **RAN}, f"5|{ME + 1}|PENDING|BeginTime", "ended", "with 42"),
        ({"state": "ended", "code": 42, **RAN}, GONE, "ended", "with 42"),
        ({"state": "stopping", **RAN}, f"5|{ME}|PENDING|BeginTime", "queued", "waits again"),  # killed as it saved
        ({"state": "running", **RAN}, f"5|{ME}|PENDING|BeginTime", "queued", "waits again"),  # its node went down
        ({"state": "running", **RAN}, f"5|{ME}|SPECIAL_EXIT|None", "queued", "waits again"),
        ({"state": "running", **RAN}, f"5|{ME}|COMPLETING|None", "running", ""),
        ({"state": "running", **RAN}, f"5|{ME}|SUSPENDED|None", "running", ""),
        ({"state": "running", **RAN}, GONE, "lost", "is lost"),
        ({"state": "running", **RAN}, DOWN, "running", ""),
        ({"state": "queued", "code": 42, **RAN}, f"5|{ME}|COMPLETING|None", "queued", "waits again"),
    ],
)
def test_a_job_is_what_its_record_and_slurm_say(
    written: dict[str, Any],
    answer: str,
    state: str,
    words: str,
    slurm: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = job(**written)
    slurm(answer)
    Path(before.log_dir, "rank-0.log").write_text("# 2026-01-01 00:00:00 attempt 0, run run-5: x\na line\n")
    assert queued.look(before).state == state
    assert cli_jobs.ps(["--all", "--json"]) == 0
    (shown,) = json.loads(capfd.readouterr().out)
    assert (shown["state"], shown["ranks"]) == ("unknown" if state == "running" else state, [])
    cli_jobs.logs(["run-5"])
    assert words in capfd.readouterr().err


def test_a_job_that_ended_well_or_was_no_job_of_slurm_is_asked_of_nobody(
    slurm: Callable[[str], None], tmp_path: Path
) -> None:
    job("5", state="ended", code=0, **RAN)
    job("", state="ended", code=1, **RAN)
    assert cli_jobs.ps(["--all"]) == 0
    assert not (tmp_path / "asked").exists()


def test_one_question_is_for_all_jobs(
    slurm: Callable[[str], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in ("5", "6", "7"):
        job(number)
    slurm(f"5|{ME}|PENDING|Priority\n7|{ME}|PENDING|JobHeldAdmin")
    assert cli_jobs.ps(["--all"]) == 0
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert "--jobs=5,6,7 --format=%A|" in asked, "%i would be 4_1 for a task of an array"
    rows = {line.split()[0]: line for line in capfd.readouterr().out.splitlines()[1:]}
    assert "queued (Priority)" in rows["run-5"]
    assert " lost " in rows["run-6"]
    assert "queued (JobHeldAdmin)" in rows["run-7"]


@pytest.mark.parametrize(
    ("written", "code", "words"),
    [
        ({}, 143, "had not begun: SLURM job 5 is cancelled"),
        ({"state": "queued", "code": 42, **RAN}, 42, "waited to go on: SLURM job 5 is cancelled"),
        ({"state": "running", **RAN}, 143, "waited to go on: SLURM job 5 is cancelled"),
    ],
)
def test_stop_takes_a_job_out_of_the_queue(
    written: dict[str, Any],
    code: int,
    words: str,
    slurm: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = job(**written)
    slurm(f"5|{ME}|PENDING|BeginTime")
    assert cli_jobs.stop(["run-5"]) == 0
    assert words in capfd.readouterr().err
    assert (before.now().state, before.now().code) == ("ended", code)


def test_a_job_that_started_before_stop_is_stopped_where_it_runs(slurm: Callable[[str], None], tmp_path: Path) -> None:
    """SLURM says that it starts, and no launcher has written yet: the command waits for one of both."""
    before = job()
    slurm(f"5|{ME}|RUNNING|None")
    running = dataclasses.replace(before, state="running", **RAN)
    record.write(running, tmp_path / "running")
    (tmp_path / "scancel").write_text(f"#!/bin/sh\ncp {tmp_path}/running {before.path}\n")
    with pytest.raises(UserError, match="`scancel --batch --signal=INT 5` asks its ranks"):
        cli_jobs.stop(["run-5"])


def test_attach_goes_on_while_a_job_waits_to_be_started_again(
    slurm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its launcher wrote that it stopped with 42; then SLURM says that it is queued, held, and at last starts it."""
    before = job(state="ended", code=42, detached=False, **RAN)
    Path(before.log_dir, "rank-0.log").write_text("# 2026-01-01 00:00:00 attempt 0, run run-5: x\na line\n")
    slurm(f"5|{ME}|PENDING|BeginTime")
    monkeypatch.setattr("roxxel_dist.launcher.control.jobs.ASK_S", 0.2)
    monkeypatch.setattr("roxxel_dist.launcher.control.jobs.PAUSE_MS", 50)
    ask, answers = queued.answer_of, iter([f"5|{ME}|PENDING|JobHeldUser", "", f"5|{ME}|PENDING|Priority"])

    def run(words: list[str], limit_s: float):
        said = ask(words, limit_s)
        answer = next(answers, None)
        if answer is None:  # it is started, and ends well
            record.write(dataclasses.replace(before, state="ended", code=0), before.path)
        elif answer:
            slurm(answer)
        return said

    monkeypatch.setattr(queued, "answer_of", run)
    assert cli_jobs.attach(["run-5"]) == 0
    out, err = capfd.readouterr()
    assert "a line" in out
    for reason in ("BeginTime", "JobHeldUser", "Priority"):
        assert err.count(f", {reason})") == 1, err
    assert "ended" in err.splitlines()[-1]


def test_a_job_of_another_cluster_is_asked_of_that_one(slurm: Callable[[str], None], tmp_path: Path) -> None:
    """Its number may be that of another job here; squeue prints the name of a cluster above its jobs."""
    before = job("5", slurm_cluster="far")
    slurm(f"CLUSTER: far\n5|{ME}|PENDING|JobHeldUser")
    assert "`scontrol release 5 -M far`" in queued.words(queued.look(before))
    assert cli_jobs.stop(["run-5"]) == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all("--clusters=far" in line or "-M far" in line for line in asked), asked
    assert "scancel --state=PENDING 5 -M far" in asked


def test_a_launcher_in_the_job_keeps_the_cluster_that_only_sbatch_named() -> None:
    before = job("5", slurm_cluster="far")
    spec = JobSpec(run_id="run-5", command=("train",), nprocs=2, log_dir=Path(before.log_dir))
    with JobRecorder(spec, LocalBackend(), slurm_job="5") as recorder:
        recorder.update(state="running")
        assert before.now().slurm_cluster == "far"
        recorder.end(0)


def test_a_slurm_that_does_not_answer_is_said_to_be_so(
    slurm: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = job()
    monkeypatch.setattr(queued, "ASK_S", 0.2)
    for name in ("squeue", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 60\n")
    assert queued.look(before).is_queued, "as it was known"
    with pytest.raises(UserError, match=r"run-5 is not cancelled: scancel did not answer within 0\.2 s"):
        cli_jobs.stop(["run-5"])
