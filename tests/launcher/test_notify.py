"""`--notify`: the command gets each event, and whatever it does, the job goes as without it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_schemas import messages
from jsonschema import Draft202012Validator

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.notify import Notifier
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.process.exit_codes import UserError

pytestmark = pytest.mark.xdist_group("launch")
Launch = Callable[..., Any]
APPEND = "cat >> events.jsonl"
SECRET = "zq81secret"
STUCK = """
import os, time
from roxxel_dist.process.progress import Progress
progress = Progress.from_env(int(os.environ["ROXXEL_PROCESS_ID"]))
for step in range(1, 4):
    progress.enter(step)
    time.sleep(0.05)
time.sleep(1000)
"""
SHORT = """
import os, resource, sys
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.notify import Notifier
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.launcher.job.spec import JobSpec
limits = Limits(notify_s=float(sys.argv[1]), notify_end_s=float(sys.argv[2]))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # as of a job of 300 hosts
shell = ("bash", "-c", "exit 7")
job = JobSpec(command=shell, nprocs=1, run_id="short", log_dir=Path("logs"), notify=sys.argv[3], limits=limits)
sys.exit(run(job, LocalBackend()))
"""


def events(folder: Path) -> list[dict[str, Any]]:
    """Those that the commands have written down, in their order, each as its schema says."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    found.sort(key=lambda event: event["number"])
    for event in found:
        Draft202012Validator(messages()["launch ssh --notify"]).validate(event)
    assert [event["number"] for event in found] == list(range(len(found)))
    return found


def test_a_restart_and_the_end_without_secrets(launch: Launch, tmp_path: Path) -> None:
    crash = f"API_TOKEN={SECRET}; [ $ROXXEL_ATTEMPT = 1 ] || [ $ROXXEL_PROCESS_ID = 0 ] || kill -9 $$"
    job = launch("bash", "-c", crash, max_restarts=1, notify=APPEND)
    code, _, err = job.wait()
    assert code == 0, err
    restart, end = events(tmp_path)
    assert (restart["event"], restart["rank"], restart["code"], restart["attempt"]) == ("restart", 1, 137, 0)
    assert len(restart["about"]) == 1
    assert "rank 1 failed first: signal SIGKILL" in restart["words"]
    assert restart["words"].endswith("restart 1 of 1, immediately")
    assert (end["event"], end["code"], end["attempt"], end["words"]) == ("end", 0, 1, "the job is done")
    assert end["run"] == str(tmp_path)
    assert SECRET not in (tmp_path / "events.jsonl").read_text()
    assert "API_TOKEN=***" in end["command"]


def test_a_hang_names_its_rank_and_host(launch: Launch, tmp_path: Path) -> None:
    job = launch("env", sys.executable, "-c", STUCK, nprocs=1, step_timeout=1.0, notify=APPEND)
    assert job.wait()[0] == 124
    hang, end = events(tmp_path)
    assert (hang["event"], hang["rank"], hang["step"], hang["code"]) == ("hang", 0, 3, 124)
    assert "is stuck: in step 3" in hang["words"]
    assert (end["event"], end["code"]) == ("end", 124)


def test_a_host_that_is_set_aside(launch: Launch, tmp_path: Path) -> None:
    """The ranks of host b fail twice, and c takes its place."""
    fail = "[ $ROXXEL_ATTEMPT = 2 ] || [ $ROXXEL_PROCESS_ID = 0 ] || kill -9 $$"
    job = launch("bash", "-c", fail, hosts=["a", "b", "c"], spare_hosts=1, max_restarts=3, notify=APPEND)
    code, _, err = job.wait()
    assert code == 0, err
    found = events(tmp_path)
    assert [event["event"] for event in found] == ["restart", "restart", "set_aside", "end"]
    assert (found[2]["about"], found[2]["hosts"], found[2]["code"]) == (["b"], ["a", "b", "c"], None)
    assert found[2]["words"] == "going on without b, with c instead"


def test_what_preflight_refuses_is_an_end_too(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")  # where the folder of the logs is to be
    job = launch("true", notify=APPEND, log_dir=str(tmp_path / "logs" / "deeper"))
    code, _, err = job.wait()
    assert code == 69, err
    (end,) = events(tmp_path)
    assert (end["event"], end["code"]) == ("end", 69)
    assert end["words"] in err


# (notify_s, notify_end_s, the command, what the launcher says about it)
WRONG = {
    "there is no such command": (9, 9, "no-such-command-at-all", "exit code 127: "),
    "it fails and says why": (9, 9, "echo one; echo last words >&2; exit 3", "exit code 3: last words"),
    "it fails in silence": (9, 9, "exit 4", "exit code 4: it printed nothing"),
    "it dies": (9, 9, "kill -9 $$", "signal 9: it printed nothing"),
    "it writes a megabyte": (9, 9, "head -c 1000000 /dev/zero | tr '\\0' x; exit 5", f"exit code 5: {'x' * 200}"),
    "it writes what commands a terminal": (9, 9, "printf '\\033[2Jgone'; exit 6", "exit code 6: \x1b[2Jgone"),
    "it does not end": (0.3, 9, "exec sleep 1000", "the command did not end within 0.3 s: it was killed"),
    "it does not end, nor do its children": (0.3, 9, "sleep 1001; true", "did not end within 0.3 s: it was killed"),
    "the job is over before it": (
        99,
        0.3,
        "exec sleep 1000",
        "the job was over, and the command ran for",
    ),
    "it reads nothing": (9, 9, "true", ""),
    "it leaves a child with its output": (9, 9, "sleep 3 & echo $! > child", ""),
    "it closes its output": (9, 9, "exec > /dev/null 2>&1; sleep 0.2; exit 8", "exit code 8: it printed nothing"),
}


def said_of(command: str, limits: Limits, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the launcher says of a command at the end of a job."""
    said: list[str] = []
    monkeypatch.chdir(folder)
    job = JobSpec(command=("true",), nprocs=1, run_id="said", log_dir=folder / "logs", notify=command, limits=limits)
    recorder = JobRecorder(job, LocalBackend())
    notifier = Notifier(command, lambda: recorder.entry, said.append, limits)
    notifier.send("end", "the job is done", code=0)
    notifier.close(lambda seconds: time.sleep(seconds) or ())
    return said


def test_a_command_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {}
    for case, (limit, end, command, words) in WRONG.items():
        said = said_of(command, Limits(notify_s=limit, notify_end_s=end), tmp_path, monkeypatch)
        shown = "".join(said).replace("no-such-command-at-all", "")
        if len(said) != bool(words) or words not in "".join(said) or command in shown:
            wrong[case] = said
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert wrong == {}


def test_without_room_for_a_thread_an_event_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    (said,) = said_of("touch made", Limits(), tmp_path, monkeypatch)
    assert "an event is left out (can't start new thread)" in said


def test_a_job_says_what_its_command_said(tmp_path: Path) -> None:
    """With more open files than select() knows, and without what would command a terminal."""
    line = [sys.executable, "-c", SHORT, "9", "9", WRONG["it writes what commands a terminal"][2]]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    (said,) = [line for line in done.stderr.splitlines() if "--notify" in line]
    assert (done.returncode, "exit code 6: \\x1b[2Jgone" in said) == (7, True), done.stderr


def test_ctrl_c_ends_the_wait_and_the_command_with_its_children(tmp_path: Path, alive: Callable[[int], bool]) -> None:
    command = "echo $$ > pid.new; mv pid.new pid; sleep 1000"
    process = subprocess.Popen([sys.executable, "-c", SHORT, "600", "600", command], cwd=tmp_path, stderr=-1, text=True)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "it was killed" in err
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("command", ["", "  ", "a\0b"])
def test_no_command_is_refused(command: str) -> None:
    with pytest.raises(UserError, match="name a shell command"):
        JobSpec(command=("true",), nprocs=1, run_id="x", log_dir=Path("logs"), notify=command)
