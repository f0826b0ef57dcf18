"""The list of jobs: what a controller writes of itself, when it is lost, and what is taken away."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from machines import stuck_disk

from roxxel_dist.cli import jobs as cli_jobs
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control import index, record
from roxxel_dist.launcher.control.index import find
from roxxel_dist.launcher.control.record import WRITE_S, JobRecord, JobRecorder
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.process import file_lock
from roxxel_dist.process.exit_codes import UserError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def spec(run_id: str = "20260102_030405", folder: str = "runs/one", **more: object) -> JobSpec:
    values = {"command": ("train", "--api-key", "s3cr3t"), "nprocs": 2, "log_dir": Path(folder, "logs"), **more}
    return JobSpec(run_id=run_id, **values)  # pyright: ignore[reportArgumentType]


def only() -> JobRecord:
    (entry,) = index.entries()
    return entry


def test_a_job_is_entered_and_its_entry_follows_it(tmp_path: Path) -> None:
    with JobRecorder(spec(), LocalBackend()) as register:
        entry = only()
        assert (entry.state, entry.attempt, entry.step, entry.code, entry.nprocs) == ("starting", 0, 0, None, 2)
        assert entry.run_dir == str(tmp_path / "runs" / "one")
        assert entry.path == tmp_path / "runs" / "one" / "logs" / "launcher.json"
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
    assert index.state_dir().stat().st_mode & 0o777 == 0o700
    assert [path.is_symlink() for path in index.state_dir().iterdir()] == [True]


def test_steps_are_not_written_each(state: Path) -> None:
    with JobRecorder(spec(), LocalBackend()) as register:
        register.update(state="running")
        path = register.entry.path
        before = path.stat().st_mtime_ns
        register.update(step=1)
        assert path.stat().st_mtime_ns == before
        register._wrote -= WRITE_S
        register.update(step=1)
        assert only().step == 1


def test_an_exception_of_the_launcher_ends_the_entry() -> None:
    register = JobRecorder(spec(), LocalBackend())
    with pytest.raises(RuntimeError), register:
        raise RuntimeError(register.update(state="running"))
    assert (only().state, only().code) == ("ended", 1)


@pytest.mark.parametrize("place", ["file", "/proc"])
def test_a_list_that_cannot_be_written_is_said_once_and_ends_nothing(place, state, monkeypatch, capfd) -> None:
    state.write_text("a file where a folder should be")
    if place != "file":
        monkeypatch.setenv("XDG_STATE_HOME", place)
    with JobRecorder(spec(), LocalBackend()) as register:
        register.update(state="running")
        register.update(state="stopping")
        register.end(0)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"roxxel-dist: cannot write {index.state_dir() if place == 'file' else '/proc/roxxel-dist'}")
    assert line.endswith("`ps` does not show how this job goes; set XDG_STATE_HOME to a folder that can be written")
    assert index.entries() == []


def test_one_without_a_home_as_well(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "~")
    with JobRecorder(spec(), LocalBackend()) as register:
        register.update(state="running")
        register.end(0)
    assert "set HOME or XDG_STATE_HOME" in capfd.readouterr().err


CONTROLLER = """
import sys, time
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.control.record import JobRecorder
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
    """The record of a job that ended, or with `changes`, beside a lock that no process holds."""
    recorder = JobRecorder(spec(run_id, folder), LocalBackend())
    with recorder:
        recorder.update(state="running")
        recorder.end(0)
    entry = dataclasses.replace(recorder.entry, **changes)  # pyright: ignore[reportArgumentType]
    entry.path.write_text(json.dumps(dataclasses.asdict(entry)))
    return entry


def test_a_second_launch_into_a_run_directory_is_refused_by_name(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CONTROLLER]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = (tmp_path / "logs" / "launcher.json").read_text()
        refused = JobRecorder(spec("b", str(tmp_path)), LocalBackend())
        with pytest.raises(UserError, match=f"^run a goes on in {tmp_path}: its launcher is pid {process.pid} on "):
            refused.__enter__()
        assert (tmp_path / "logs" / "launcher.json").read_text() == before
        process.kill()
        process.wait()
    with JobRecorder(spec("b", str(tmp_path)), LocalBackend()):
        assert only().run_id == "b"


def test_several_launchers_of_one_job_have_a_record_each(tmp_path: Path) -> None:
    jobs = [spec("a", nprocs=2, world=4, port=9999), spec("a", nprocs=2, world=4, port=9999, first_rank=2)]
    with JobRecorder(jobs[0], LocalBackend()) as first, JobRecorder(jobs[1], LocalBackend()) as second:
        for each in (first, second):
            each.update(state="running")
        names = [job.path.name for job in index.entries()]
        assert sorted(names) == ["launcher-2.json", "launcher.json"]


@pytest.mark.parametrize("with_log", [False, True])
def test_a_job_that_was_refused_leaves_nothing_but_its_log(tmp_path: Path, with_log: bool) -> None:
    with JobRecorder(spec(), LocalBackend()) as register:
        assert only().state == "starting"
        if with_log:
            register.entry.launcher_log.touch()
        register.end(69)
    if with_log:
        assert (only().state, only().code) == ("ended", 69)
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["state"]
        assert index.entries() == [*index.state_dir().iterdir()] == []


def test_a_refused_launch_keeps_the_record_of_the_run(tmp_path: Path) -> None:
    first = enter("a", "runs/one", step=9)
    with JobRecorder(spec("b"), LocalBackend()) as register:
        assert only().run_id == "b"
        register.end(69)
    assert only() == first
    assert index.knows("a")
    assert not index.knows("b")


def test_a_copy_of_a_run_directory_is_not_the_job(tmp_path: Path) -> None:
    """It has the controller's number in its record, and a lock that no process holds."""
    with JobRecorder(spec(), LocalBackend()) as register:
        register.update(state="running")
        shutil.copytree("runs/one", "runs/copy")
        assert (find("runs/one").state, find("runs/copy").state) == ("running", "lost")
        assert (find("runs/copy").log_dir, find("runs/copy").ranks) == (str(tmp_path / "runs/copy/logs"), ())


def test_a_run_directory_that_is_moved_takes_its_job_along(tmp_path: Path) -> None:
    with JobRecorder(spec(), LocalBackend()) as register:
        register.update(state="running")
        Path("runs/one").rename("two")
        register.update(state="stopping")
        assert not Path("runs/one").exists()
        assert find("two").state == "stopping"
        Path("link").symlink_to("two")
        assert find("link").run_id == find(str(tmp_path / "two")).run_id == register.entry.run_id
    assert find("two").state == "ended"


def test_a_machine_without_a_boot_id_ends_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def masked(path: Path, *args: str | None, **kwargs: str | None) -> str:  # as a container with /proc/sys masked
        if path.is_relative_to("/proc/sys"):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", masked)
    with JobRecorder(spec(), LocalBackend()) as register:
        assert only().state == "starting"
        register.update(state="running")
        register.end(0)
    assert only().state == "ended"


def elsewhere(run_id: str, **changes: object) -> JobRecord:
    """The record of a job whose controller is on a machine of another name, which has the same disk."""
    there = dataclasses.replace(record.this_process(), host="h9")
    return enter(run_id, f"runs/{run_id}", **{"controller": there, "state": "running", "code": None, **changes})


def test_of_a_job_elsewhere_host_and_age_are_shown_and_the_way_there(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    elsewhere("away", updated=time.time() - 600)
    elsewhere("queue", slurm_job="17")
    assert cli_jobs.ps([]) == 0
    head, *lines = capfd.readouterr().out.splitlines()
    state = head.index("STATE")
    assert {line.split()[0]: line[state:].split("  ")[0] for line in lines}["away"] == "running 10 min ago"
    assert all(" h9 " in line for line in lines)
    cli_jobs.ps(["--json"])
    assert {job["state"] for job in json.loads(capfd.readouterr().out)} == {"unknown"}
    ways = {
        "away": f"runs on h9: use `ssh h9 roxxel-dist stop {tmp_path}/runs/away`",
        "queue": "`scancel --batch --signal=INT 17` asks",
    }
    for run, words in ways.items():
        with pytest.raises(UserError) as refused:
            cli_jobs.stop([run])
        assert words in str(refused.value)
    log = tmp_path / "runs" / "queue" / "logs" / "rank-0.log"
    log.write_text("# 2026-01-01 00:00:00 attempt 0, run queue: x\na line\n")
    assert cli_jobs.logs(["queue"]) == 0
    assert capfd.readouterr().out.endswith("\na line\n"), "what is on a disk of both is shown"
    lock = file_lock.take_lock(log.with_name("launcher.lock"))  # as over NFS
    assert lock is not None
    cli_jobs.ps(["--json"])
    file_lock.release_lock(lock)
    assert {job["run_id"]: job["state"] for job in json.loads(capfd.readouterr().out)}["queue"] == "running"


def test_a_launcher_of_another_container_is_not_signalled(tmp_path: Path) -> None:
    """Its host has the same name; its number is that of another process here."""
    other = dataclasses.replace(record.this_process(), start=1)
    job = enter("a", "runs/a", controller=other, state="running", code=None)
    lock = file_lock.take_lock(job.path.with_suffix(".lock"))
    assert lock is not None
    assert find("a").state == "running"
    with pytest.raises(UserError, match=r"runs in another container of this machine: use `roxxel-dist stop .*runs/a`"):
        cli_jobs.stop(["a"])
    file_lock.release_lock(lock)
    assert find("a").state == "lost"


def test_ps_forgets(capfd: pytest.CaptureFixture[str]) -> None:
    day = 25 * 3600
    enter("over", "runs/over")
    enter("lost", "runs/lost", state="running", code=None, updated=time.time())
    enter("long-lost", "runs/long-lost", state="running", code=None, updated=time.time() - day)
    elsewhere("reported")
    elsewhere("unreported", updated=time.time() - day)
    enter("deleted", "runs/deleted")
    shutil.rmtree("runs/deleted")

    def listed(*words: str) -> set[str]:
        capfd.readouterr()
        assert cli_jobs.ps(list(words)) == 0
        return {line.split()[0] for line in capfd.readouterr().out.splitlines()[1:]}

    assert listed() == {"lost", "reported", "unreported"}
    assert listed("--all") == {"over", "lost", "long-lost", "reported", "unreported"}
    assert listed("--prune") == {"reported"}
    assert listed("--all") == {"reported"}
    assert find("runs/over").run_id == "over", "its directory has its record"


def test_what_is_over_for_a_week_is_off_the_list() -> None:
    now = time.time()
    over = {"fresh": 0, "old": 8}
    for name, days in over.items():
        enter(name, f"runs/{name}", updated=now - days * 86400)
    for name, days in {"elsewhere": 8, "unreported": 61}.items():
        elsewhere(name, updated=now - days * 86400)
    with JobRecorder(spec("runs", "runs/runs"), LocalBackend()):
        for name in ("left.tmp", "of.an.earlier.version.json"):
            (index.state_dir() / name).write_text("{}")
            os.utime(index.state_dir() / name, (0, 0))
        index.forget(over_s=index.KEPT_S, unreported_s=index.UNREPORTED_S)
        assert {entry.run_id for entry in index.entries()} == {"fresh", "runs", "elsewhere"}
    assert not list(index.state_dir().glob("*.tmp"))
    assert not list(index.state_dir().glob("*.json"))


TEXTS = ["", "[]", '{"run_id": "x", "hosts": []}', '{"run_id": "../x"}', "\0", '{"run_id": 1}']


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_record_is_no_job(text: str, tmp_path: Path) -> None:
    enter("a", "runs/a")
    (index.state_dir() / "x.h.1.json").write_text(text)
    (index.state_dir() / "link").symlink_to(tmp_path)
    enter("b", "runs/b").path.write_text(text)
    assert only().run_id == "a"
    with JobRecorder(spec("c", "runs/b"), LocalBackend()):
        assert find("runs/b").run_id == "c"


def test_a_run_is_found_by_id_beginning_and_directory(tmp_path: Path) -> None:
    first = enter("20260101_000000", "runs/one", begun=1.0)
    other = enter("20260102_000000_2", "runs/two", begun=3.0)
    again = enter("20260102_000000", "runs/three", begun=2.0)
    assert index.entries() == [first, again, other]
    assert find("20260102_000000") == again, "an id is meant before a beginning"
    assert find("20260101") == first
    assert find("runs/one/") == first
    assert find(str(tmp_path / "runs" / "two")) == other
    newer = enter("20260103_000000", "runs/one", begun=4.0)
    assert find("runs/../runs/one") == newer, "a run directory has one record"
    assert index.entries() == [again, other, newer]


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
        find(name)
    assert all(word in str(problem.value) for word in words)


def test_the_address_of_a_run_in_a_bucket_means_its_job(tmp_path: Path) -> None:
    enter("a", "runs/run_a", command="train --run_dir s3://bucket/one --lr 1")
    enter("b", "runs/run_b", command="train --run-dir=s3://bucket/two")
    assert find("s3://bucket/one/").run_id == "a"
    assert find("s3://bucket/two").run_id == "b"
    with pytest.raises(UserError, match="there is no run 's3://bucket/three'"):
        find("s3://bucket/three")


def test_no_run_at_all() -> None:
    with pytest.raises(ValueError, match="no job of this user is known here"):
        find("x")


def test_fields_of_another_version_are_passed_over() -> None:
    """Of the job, of a rank and of a restart: else a job that runs would be in no list, and could not be stopped."""
    rank = record.RankProcess(rank=0, host="h", pid=1, step=3)
    restart = record.Restart(attempt=0, time=1.0, step=2, cause="lost")
    with JobRecorder(spec(), LocalBackend()):
        known = dataclasses.asdict(dataclasses.replace(only(), ranks=(rank,), restarts=(restart,)))
    for values in (known, known["ranks"][0], known["restarts"][0]):
        values["slow"] = 2.0
    found = record.from_values(json.loads(json.dumps(known)), "/l")
    assert (found.ranks, found.restarts) == ((rank,), (restart,))


# A process that waits for the disk, whichever of its threads does, cannot end before the disk is gone (NFS lets it).
LISTED = """
import subprocess, sys
code = "from roxxel_dist.launcher.control import index; index.ANSWER_LIMIT_S = 1.0; "
code += "from roxxel_dist.cli import main; print('codes', main(['ps', '--all']), main(['ps', '--prune']), flush=True)"
listing = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(next(line for line in listing.stdout if line.startswith("codes")))
"""


def test_a_run_directory_that_does_not_answer_holds_up_no_list(tmp_path: Path, state: Path) -> None:
    dead = state / "roxxel-dist" / "jobs" / "20260102_030406.0123456789abcdef"
    dead.parent.mkdir(parents=True)
    dead.symlink_to(tmp_path / "disk" / "dead" / "logs" / "launcher.json")
    words = stuck_disk(tmp_path, sys.executable, "-c", LISTED)
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert result.stdout == "codes 0 0\n\n", result.stderr
    assert f"1 jobs are left out: their file system does not answer, such as at {dead.readlink()}" in result.stderr
    assert dead.is_symlink()


def test_records_are_read_where_no_thread_can_be_started(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {enter(f"fresh-{number}", f"runs/{number}").run_id for number in range(3)}

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert {job.run_id for job in index.entries()} == jobs
    index.forget_old()
    assert {job.run_id for job in index.entries()} == jobs


def test_a_launch_does_not_wait_for_the_disks_of_other_runs(state: Path) -> None:
    """A pipe without a writer is read as a file of a server that is gone: never."""
    folder = index.state_dir()
    folder.mkdir(parents=True)
    os.mkfifo("silent")
    for number in range(3):
        (folder / f"20260102_03040{number}.0123456789abcdef").symlink_to(os.path.abspath("silent"))
    fresh = [enter(f"fresh-{number}", f"runs/{number}") for number in range(40)]
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "ANSWER_LIMIT_S", 3600.0)
        with JobRecorder(spec(), LocalBackend()):
            pass  # it would be an hour
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "ANSWER_LIMIT_S", 1.0)
        assert {job.run_id for job in index.entries()} == {job.run_id for job in fresh}
    most = 2 * (index.READERS + 2 * 3) + 1
    assert threading.active_count() - before <= most, "not one for each job"
    for _ in range(20):  # the readers end
        with os.fdopen(os.open("silent", os.O_RDWR), "w"):
            time.sleep(0.01)
