"""The list of jobs: what a controller writes of itself, when it is lost, and what is taken away."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roxxel_dist.cli import jobs as cli_jobs
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.jobs import record
from roxxel_dist.launcher.jobs.record import JobRecord, JobRecorder, find
from roxxel_dist.launcher.spec import JobSpec


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def spec(run_id: str = "20260102_030405", folder: str = "runs/one", **more: object) -> JobSpec:
    values = {"command": ("train", "--api-key", "s3cr3t"), "nprocs": 2, "log_dir": Path(folder, "logs"), **more}
    return JobSpec(run_id=run_id, **values)  # pyright: ignore[reportArgumentType]


def only() -> JobRecord:
    (entry,) = record.entries()
    return entry


def test_a_job_is_entered_and_its_entry_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with JobRecorder(spec(), LocalBackend()) as register:
        entry = only()
        assert (entry.state, entry.attempt, entry.step, entry.code, entry.nprocs) == ("starting", 0, 0, None, 2)
        assert entry.run_dir == str(tmp_path / "runs" / "one")
        assert entry.log_dir == str(tmp_path / "runs" / "one" / "logs")
        assert entry.directory == str(tmp_path)
        assert entry.command == "train --api-key '***'"
        assert entry.controller.pid == os.getpid()
        register.update(state="running", attempt=1)
        assert (only().state, only().attempt) == ("running", 1)
        register.update(step=7)
        register.update(step=9)
        register.update(state="stopping")
        assert (only().state, only().step) == ("stopping", 9)
        register.update(step=0)  # a new attempt has not reached a step
        assert register.end(42) == 42
    assert (only().state, only().step, only().code) == ("ended", 9, 42)
    assert only().ended is not None
    assert record.folder().stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in record.folder().iterdir()] == [".json"]


def test_steps_are_not_written_each(state: Path) -> None:
    with JobRecorder(spec(), LocalBackend()) as register:
        register.update(state="running")
        (path,) = record.folder().glob("*.json")
        before = path.stat().st_mtime_ns
        register.update(step=1)
        assert path.stat().st_mtime_ns == before
        register._wrote -= record.WRITE_S
        register.update(step=1)
        assert only().step == 1


def test_an_exception_of_the_launcher_ends_the_entry() -> None:
    with pytest.raises(RuntimeError), JobRecorder(spec(), LocalBackend()):
        raise RuntimeError
    assert (only().state, only().code) == ("ended", 1)


def test_a_list_that_cannot_be_written_is_said_once_and_ends_nothing(state: Path, capfd) -> None:
    state.write_text("a file where a folder should be")
    with JobRecorder(spec(), LocalBackend()) as register:
        register.update(state="running")
        register.update(state="stopping")
        register.end(0)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("roxxel-dist: cannot write ")
    assert line.endswith("`ps` does not show how this job goes")
    assert record.entries() == []


def test_one_without_a_home_as_well(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "~")
    with JobRecorder(spec(), LocalBackend()) as register:
        register.end(0)
    assert "set HOME or XDG_STATE_HOME" in capfd.readouterr().err


CONTROLLER = """
import sys, time
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.jobs.record import JobRecorder
job = JobSpec(run_id="a", command=("true",), nprocs=1, log_dir=Path("logs"))
with JobRecorder(job, LocalBackend()) as register:
    register.update(state="running")
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_controller_that_was_killed_is_lost(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CONTROLLER]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert only().state == "running"
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert only().state == "lost", "a process that waits to be reaped is gone"
    assert only().state == "lost"
    assert json.loads(only().path.read_text())["state"] == "running"


def test_another_process_of_that_number_is_not_the_controller() -> None:
    me = record.this_process()
    assert record.is_alive(me)
    assert record.is_alive(dataclasses.replace(me, host="elsewhere"))  # a container of Ray has another name
    assert not record.is_alive(dataclasses.replace(me, start=me.start - 1))
    assert not record.is_alive(dataclasses.replace(me, boot="before the last boot"))


def enter(run_id: str, folder: str, **changes: object) -> JobRecord:
    """Write the entry of a job that is over."""
    register = JobRecorder(spec(run_id, folder), LocalBackend())
    entry = dataclasses.replace(register.entry, **{"state": "ended", "code": 0, **changes})  # pyright: ignore[reportArgumentType]
    record.write(entry)
    return entry


def test_a_machine_without_a_boot_id_and_a_folder_that_is_gone_end_no_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    read = Path.read_text

    def masked(path: Path, *args: str | None, **kwargs: str | None) -> str:  # as a container with /proc/sys masked
        if path.is_relative_to("/proc/sys"):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", masked)
    with JobRecorder(spec(), LocalBackend()) as register:
        assert only().state == "starting"
        register.end(0)
    assert only().state == "ended"


def elsewhere(run_id: str, **changes: object) -> JobRecord:
    """Write the entry of a job that runs on a machine of another name."""
    there = dataclasses.replace(record.this_process(), host="h9")
    enter(run_id, f"runs/{run_id}").path.unlink()
    return enter(run_id, f"runs/{run_id}", **{"controller": there, "state": "running", "code": None, **changes})


def test_of_a_job_elsewhere_host_and_age_are_told_and_the_way_there(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere("home", updated=time.time() - 600)  # a home that both machines have
    elsewhere("away", reach=("ssh", "-F", "c", "n9", "py", "-m", "roxxel_dist"), copied=True)
    elsewhere("queue", slurm_job="17")
    assert cli_jobs.ps([]) == 0
    head, *lines = capfd.readouterr().out.splitlines()
    state = head.index("STATE")
    assert {line.split()[0]: line[state:].split("  ")[0] for line in lines}["home"] == "running 10 min ago"
    assert all(" h9 " in line for line in lines)
    cli_jobs.ps(["--json"])
    assert {job["state"] for job in json.loads(capfd.readouterr().out)} == {"unknown"}
    ways = {
        ("home", "stop"): "runs on h9: use `ssh h9 roxxel-dist stop home`",
        ("away", "stop"): "use `ssh -F c n9 py -m roxxel_dist stop away`",
        ("away", "attach"): "use `ssh -F c n9 py -m roxxel_dist attach away`",
        ("queue", "stop"): "`scancel --batch --signal=INT 17` asks",
    }
    for (run, command), words in ways.items():
        with pytest.raises(UserError) as refused:
            getattr(cli_jobs, command)([run])
        assert words in str(refused.value)
    log = tmp_path / "runs" / "queue" / "logs" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("# 2026-01-01 00:00:00 attempt 0, run queue: x\na line\n")
    assert cli_jobs.logs(["queue"]) == 0
    assert capfd.readouterr().out.endswith("\na line\n"), "what is on a disk of both is shown"


def test_ps_forgets(capfd: pytest.CaptureFixture[str]) -> None:
    day = 25 * 3600
    enter("over", "runs/over")
    enter("lost", "runs/lost", state="lost", code=None, updated=time.time())
    enter("long-lost", "runs/long-lost", state="lost", code=None, updated=time.time() - day)
    elsewhere("heard")
    elsewhere("unheard", updated=time.time() - day)

    def listed(*words: str) -> set[str]:
        capfd.readouterr()
        assert cli_jobs.ps(list(words)) == 0
        return {line.split()[0] for line in capfd.readouterr().out.splitlines()[1:]}

    assert listed() == {"lost", "heard", "unheard"}
    assert listed("--all") == {"over", "lost", "long-lost", "heard", "unheard"}
    assert listed("--prune") == {"heard"}
    assert listed("--all") == {"heard"}


def test_what_is_over_for_a_week_is_taken_away() -> None:
    now = time.time()
    ages = {"fresh": 0, "old": 8, "running": 8, "elsewhere": 8, "unheard": 61}
    for number, (name, days) in enumerate(ages.items()):
        there = dataclasses.replace(record.this_process(), host="h9", pid=number)
        controller = there if name in ("elsewhere", "unheard") else record.this_process()
        changes = {"controller": controller} | ({} if name in ("fresh", "old") else {"state": "running", "code": None})
        entry = dataclasses.replace(enter(name, "runs/x"), **changes)  # pyright: ignore[reportArgumentType]
        enter(name, "runs/x").path.unlink()
        record.write(entry)
        os.utime(entry.path, (now - days * 86400,) * 2)
    (record.folder() / "left.tmp").write_text("")
    os.utime(record.folder() / "left.tmp", (0, 0))
    record.forget(over_s=record.KEPT_S, unheard_s=record.UNHEARD_S)
    assert {entry.run_id for entry in record.entries()} == {"fresh", "running", "elsewhere"}
    assert not (record.folder() / "left.tmp").exists()


def test_what_is_no_entry_is_no_job() -> None:
    enter("a", "runs/a")
    for name, text in {"empty": "", "list": "[]", "half": '{"run_id": "x", "hosts": []}'}.items():
        (record.folder() / f"{name}.json").write_text(text)
    assert only().run_id == "a"


def test_a_run_is_found_by_id_beginning_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = enter("20260101_000000", "runs/one", begun=1.0)
    again = enter("20260102_000000", "runs/one", begun=2.0)
    other = enter("20260102_000000_2", "runs/two", begun=3.0)
    jobs = record.entries()
    assert jobs == [first, again, other]
    assert find("20260102_000000", jobs) == again, "an id is meant before a beginning"
    assert find("20260101", jobs) == first
    assert find("runs/one/", jobs) == again
    assert find(str(tmp_path / "runs" / "two"), jobs) == other
    assert find(first.path.stem, jobs) == first


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("20260103_000000", ["there is no run '20260103_000000': did you mean 2026010"]),
        ("runs/none", ["there is no run 'runs/none', and no job runs; `roxxel-dist ps --all` lists 2 that ended"]),
        ("2026", ["2 runs are meant by '2026': say which", "20260101_000000"]),
        ("", ["no job runs; say which run:\n", "20260101_000000", "runs/two"]),
    ],
)
def test_a_run_that_is_not_there(name: str, words: list[str]) -> None:
    enter("20260101_000000", "runs/one")
    enter("20260102_000000", "runs/two")
    with pytest.raises(ValueError, match="run") as problem:
        find(name, record.entries())
    assert all(word in str(problem.value) for word in words)


HERE, ELSEWHERE = {"state": "running", "code": None, "ran": True}, {"host": "h9"}
JOBS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "one that runs, and a later one that was refused": [("a", HERE), ("b", {"code": 69})],
    "one that runs, and a later one that failed in its ranks": [("a", HERE), ("b", {"code": 2, "ran": True})],
    "one that runs, and a later one in preflight": [("a", HERE), ("b", {"state": "starting", "code": None})],
    "one that restarts, and a later one that was refused": [("a", HERE | {"state": "restarting"}), ("b", {"code": 69})],
    "the newest of those that were started": [("x", {"ran": True}), ("a", {"ran": True}), ("b", {"code": 69})],
    "a later one that runs": [("b", {"ran": True}), ("a", HERE)],
    "one in preflight after one that ended": [("b", {"ran": True}), ("a", {"state": "starting", "code": None})],
    "one that runs here after one elsewhere": [("b", HERE | ELSEWHERE), ("a", HERE)],
    "one that ended here after one elsewhere": [("b", HERE | ELSEWHERE), ("a", {"ran": True})],
    "one elsewhere, and a later one that was refused here": [("a", HERE | ELSEWHERE), ("b", {"code": 69})],
    "a lost one, and a later one that was refused": [("a", HERE | {"pid": -1}), ("b", {"code": 69})],
    "refused ones alone": [("b", {"code": 69}), ("a", {"code": 69})],
}


@pytest.mark.parametrize("jobs", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("name", ["runs/one", "runs/../runs/one/", "{here}/runs/one", "link", "linked/one"])
def test_a_run_directory_means_its_living_job(
    jobs: list[tuple[str, dict[str, object]]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs/one")
    (tmp_path / "linked").symlink_to("runs")
    me = record.this_process()
    for number, (run_id, given) in enumerate(jobs):
        start = 0 if "pid" in given else me.start  # another process has its number by now
        controller = dataclasses.replace(me, host=str(given.get("host", me.host)), start=start)
        changes = {key: value for key, value in given.items() if key not in ("host", "pid")}
        made = enter(run_id, "runs/one", begun=float(number))
        made.path.unlink()
        record.write(dataclasses.replace(made, controller=controller, **changes))  # pyright: ignore[reportArgumentType]
    enter("other", "runs/two", begun=99.0, **HERE)
    assert find(name.format(here=tmp_path), record.entries()).run_id == "a"


def test_several_jobs_that_run_in_a_directory_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run_id in "abc":
        enter(run_id, "runs/one", **(HERE if run_id != "c" else {"code": 69}))
    with pytest.raises(UserError, match=r"^2 jobs run in runs/one: say which, by its id:\n  b .*\n  a [^\n]*$"):
        find("runs/one", record.entries())
    assert find("a", record.entries()).run_id == "a"


def test_the_process_that_trains_in_a_directory_tells_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory was moved, or a link of its path leads to another one now."""
    monkeypatch.chdir(tmp_path)
    ranks = tuple(record.RankProcess(rank=rank, host="h1", pid=70 + rank, step=1) for rank in range(2))
    enter("a", "runs/old", ranks=ranks, **HERE)
    enter("b", "runs/new", ran=True)
    assert find("runs/new", record.entries(), ("h1", 71)).run_id == "a"
    assert find("runs/new", record.entries(), ("h2", 71)).run_id == "b", "a process of another host"
    assert find("runs/old", record.entries(), ("h1", 99)).run_id == "a"


def test_the_address_of_a_run_in_a_bucket_means_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    enter("a", "runs/run_a", command="train --run_dir s3://bucket/one --lr 1", **HERE)
    enter("b", "runs/run_b", command="train --run-dir=s3://bucket/two", **HERE)
    assert find("s3://bucket/one/", record.entries()).run_id == "a"
    assert find("s3://bucket/two", record.entries()).run_id == "b"
    with pytest.raises(UserError, match="there is no run 's3://bucket/three'"):
        find("s3://bucket/three", record.entries())


def test_no_run_at_all() -> None:
    with pytest.raises(ValueError, match="no job of this user is known here"):
        find("x", record.entries())


def test_a_copy_does_not_replace_what_is_there() -> None:
    entry = enter("a", "runs/a")
    record.write(dataclasses.replace(entry, step=5), new_only=True)
    assert only() == entry
    entry.path.unlink()
    record.write(dataclasses.replace(entry, step=5), new_only=True)
    assert only().step == 5


def test_fields_of_another_version_are_passed_over() -> None:
    """Of the job, of a rank and of a restart: else a job that runs would be in no list, and could not be stopped."""
    rank = record.RankProcess(rank=0, host="h", pid=1, step=3)
    restart = record.Restart(attempt=0, time=1.0, step=2, cause="lost")
    with JobRecorder(spec(), LocalBackend()):
        known = dataclasses.asdict(dataclasses.replace(only(), ranks=(rank,), restarts=(restart,)))
    for values in (known, known["ranks"][0], known["restarts"][0]):
        values["slow"] = 2.0
    found = record.from_values(json.loads(json.dumps(known)))
    assert (found.ranks, found.restarts) == ((rank,), (restart,))
