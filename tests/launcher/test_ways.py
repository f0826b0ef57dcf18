"""The files that two starts, four failures, a restart and a join cross, as the launcher's README lists them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from hosts import ROOT
from slurm_desk import Desk

import roxxel_dist
from roxxel_dist.launcher.control.inbox import mailbox

pytestmark = pytest.mark.long
PACKAGE = Path(roxxel_dist.__file__).parent
README = PACKAGE / "launcher" / "README.md"

# A module of the launcher, of which each call is written down. A fork goes on with it; what is started does not.
WATCHED = """
import inspect, os, runpy, sys, threading, time
PACKAGE, FOLDER = os.environ["WATCH_PACKAGE"] + "/", os.environ["WATCH_FOLDER"]
OFTEN = {  # what goes on each half second anyway, with all that it calls
    ("control/record.py", "note_progress"),
    ("transport/pool.py", "_beat"),
    ("control/attempt.py", "_check_for_a_hang"),
    ("control/attempt.py", "_on_progress"),
    ("agent/agent.py", "_report"),
    ("agent/spares.py", "start_when_ranks_work"),
}
if os.environ["WATCH_ALL"] != "1":  # the hosts of the job stay
    OFTEN.add(("control/attempt.py", "_note_progress"))
local = threading.local()
def note(frame, event, _):
    inside = getattr(local, "inside", 0)
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
        return  # of another package, or the import of a module
    if code.co_name.startswith("<") and not frame.f_back.f_code.co_flags & inspect.CO_OPTIMIZED:
        return  # a part of an import
    call = code.co_filename.removeprefix(PACKAGE).removeprefix("launcher/"), code.co_name
    if event == "call" and call in OFTEN:
        local.inside = inside = inside + 1
    if event in ("call", "return") and not inside:
        with open(f"{FOLDER}/{os.getpid()}", "a") as file:
            print(time.monotonic(), event, *call, file=file)
    if event == "return" and call in OFTEN:
        local.inside = inside - 1
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.setprofile(note)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

CONTROLLER = """
import json, os, sys, threading
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.control.supervisor import run
from watched import note
class Backend(LocalBackend):  # two agents on this machine stand for two hosts
    hosts = ("a", "b")
    takes_hosts = os.environ["WATCH_ALL"] == "1"
    is_local = not takes_hosts
    def check_joining(self, hosts):
        pass
    def argv(self, host, module, *words):
        return [sys.executable, "-u", "watched.py", module, *words]
job = json.loads(sys.argv[1])
limits = Limits().scaled(job.pop("scale"))
spec, backend = JobSpec(command=tuple(sys.argv[2:]), limits=limits, log_dir=Path("logs"), **job), Backend()
sys.setprofile(note)
threading.setprofile(note)
code = run(spec, backend)
sys.setprofile(None)
threading.setprofile(None)
sys.exit(code)
"""

# In a SLURM job: in what is typed on the login node, in the launcher of the job, and in its agents.
SITE = """
import sys
if {"launch", "roxxel_dist.launcher.agent.agent"} & {*sys.orig_argv}:
    import threading
    from watched import note
    sys.setprofile(note)
    threading.setprofile(note)
"""

RANK = """
import os, signal, time
from roxxel_dist.process.progress import Progress
rank = os.environ["ROXXEL_PROCESS_ID"]
def leave(*_):
    print("saved", flush=True)
    os._exit(42)
signal.signal(signal.SIGTERM, leave)
progress = Progress.from_env(int(rank))
for step in range(1, 6 if rank == "1" else 7):  # rank 1 is behind
    progress.enter(step)
    time.sleep(0.02)
name = f"{os.environ['ROXXEL_ATTEMPT']}.{rank}"
with open(f"at.{name}", "w") as file:
    print(time.monotonic(), os.getpid(), file=file)
os.rename(f"at.{name}", f"ready.{name}")
progress.finish(step)
time.sleep(1000)
"""


@dataclass(frozen=True)
class Call:
    """That a function was entered, or left."""

    time: float
    event: str
    file: str
    function: str


@dataclass
class Job:
    """A job of two ranks on two hosts, of which all calls are written down."""

    process: subprocess.Popen[bytes]
    folder: Path
    ranks: list[int] = field(default_factory=list)
    """The processes of its ranks."""
    started: float = 0.0
    """When the last of them was at its steps."""

    def ready(self, attempt: int, ranks: int) -> list[tuple[float, int]]:
        """When each rank of an attempt was at its steps, which is waited for, and its process."""
        return wait_for_ranks(self.folder, attempt, ranks)

    def calls(self) -> tuple[list[Call], list[Call]]:
        """Those of the controller, and those of agents and keepers; in order."""
        of_process = calls_in(self.folder / "calls")
        here = of_process.pop(str(self.process.pid))
        return here, sorted((call for calls in of_process.values() for call in calls), key=lambda call: call.time)


def wait_for_ranks(folder: Path, attempt: int, ranks: int) -> list[tuple[float, int]]:
    end = time.monotonic() + 60
    while len(ready := sorted(folder.glob(f"ready.{attempt}.*"))) < ranks:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.05)
    return [(float(when), int(pid)) for when, pid in (file.read_text().split() for file in ready)]


def calls_in(folder: Path) -> dict[str, list[Call]]:
    """The calls of each process, in order."""
    found: dict[str, list[Call]] = {}
    for file in folder.iterdir():
        lines = (line.split(" ") for line in file.read_text().splitlines())
        found[file.name] = [Call(float(when), *words) for when, *words in lines]
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[subprocess.Popen[bytes]] = []
    family: list[psutil.Process] = []

    def begin(**job: object) -> Job:
        (tmp_path / "calls").mkdir()
        (tmp_path / "watched.py").write_text(WATCHED)
        (tmp_path / "rank.py").write_text(RANK)
        outer = {name: value for name, value in os.environ.items() if not name.startswith("ROXXEL_")}
        spec = {"nprocs": 2, "run_id": f"ways_{os.getpid()}", "max_restarts": 0, "scale": 0.2, **job}
        process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, json.dumps(spec), "env", sys.executable, "rank.py"],
            cwd=tmp_path,
            env={
                **outer,
                "WATCH_PACKAGE": str(PACKAGE),
                "WATCH_FOLDER": str(tmp_path / "calls"),
                "WATCH_ALL": str(int("min_hosts" in job)),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        begun = Job(process, tmp_path)
        marks = begun.ready(0, 2)
        family.extend(psutil.Process(process.pid).children(recursive=True))
        time.sleep(1)  # and what came with the start is over
        begun.ranks, begun.started = [pid for _, pid in marks], max(when for when, _ in marks)
        return begun

    yield begin
    for process in [*started, *family]:  # those of a lost host are stopped
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for process in started:
        process.wait()


def table() -> dict[str, dict[str, int]]:
    """The README's table: of each way its files, with their places in order."""
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in README.read_text().split("## Eight ways\n")[1].split("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    ways: dict[str, dict[str, int]] = {name: {} for name in head[1:-1]}
    for file, *places, _ in rows:
        for way, place in zip(ways, places, strict=True):
            if place:
                ways[way][file.strip("`")] = int(place)
    return ways


def files(*calls: Call) -> list[str]:
    """Their files, in the order in which they are crossed first."""
    return list(dict.fromkeys(call.file for call in calls))


def fault(way: str, job: Job) -> float:
    """Make a fault, and return when."""
    keeper, agent, guard = psutil.Process(job.ranks[1]).parents()[:3]
    when = time.monotonic()
    match way:
        case "kill -9":
            os.kill(job.ranks[1], signal.SIGKILL)
        case "hang":
            os.kill(job.ranks[1], signal.SIGSTOP)
        case "lost host":
            for process in (guard, agent, keeper):
                process.suspend()
        case _:
            job.process.send_signal(signal.SIGINT)
    return when


@pytest.mark.parametrize(
    ("way", "more", "code"),
    [
        ("kill -9", {}, 137),
        ("hang", {"step_timeout": 2.0}, 124),
        ("lost host", {}, 137),
        ("Ctrl-C", {}, 42),
    ],
)
def test_a_failure_crosses_these_files(way: str, more: dict[str, float], code: int, start: Callable[..., Job]) -> None:
    """From the fault to the decision what follows, and on to the last words."""
    job = start(**more)
    begun = fault(way, job)
    assert job.process.wait(60) == code
    here, there = job.calls()
    (decided,) = [call.time for call in here if (call.event, call.function) == ("return", "next_action")]
    last = ("return", "control/supervisor.py", "_run")
    (over,) = [call.time for call in here if (call.event, call.file, call.function) == last]
    crossed = sorted([call for call in here + there if begun <= call.time <= decided], key=lambda call: call.time)
    after = [call for call in here if decided < call.time <= over]
    assert set(files(*crossed)) == set(table()[way]), "\n".join(files(*crossed))
    assert {"control/supervisor.py", "output.py"} < set(files(*after)) <= set(table()["report"])


def test_the_files_of_a_start(start: Callable[..., Job]) -> None:
    job = start()
    job.process.send_signal(signal.SIGQUIT)
    assert job.process.wait(60) == 131
    here, there = job.calls()
    crossed = sorted([call for call in here + there if call.time <= job.started], key=lambda call: call.time)
    assert set(files(*crossed)) == set(table()["start"]), "\n".join(files(*crossed))


def test_the_files_of_a_start_by_slurm(desk: Callable[[], Desk], tmp_path: Path) -> None:
    """From `launch slurm` on the login node, which submits the job, until every rank is in its program."""
    here, watch = desk(), tmp_path / "watch"
    (watch / "calls").mkdir(parents=True)
    (watch / "watched.py").write_text(WATCHED)
    (watch / "sitecustomize.py").write_text(SITE)
    (here.folder / "rank.py").write_text(RANK)
    env = {"PYTHONPATH": f"{watch}:{ROOT}", "WATCH_PACKAGE": str(PACKAGE), "WATCH_FOLDER": str(watch / "calls")}
    here.launch("--nodes", 2, "--", "env", sys.executable, "rank.py", WATCH_ALL="0", **env)
    started = max(when for when, _ in wait_for_ranks(here.folder, 0, 2))
    made = sorted((call for calls in calls_in(watch / "calls").values() for call in calls), key=lambda call: call.time)
    crossed = [file for file in files(*(call for call in made if call.time <= started)) if is_counted(file)]
    assert set(crossed) == set(table()["SLURM"]), "\n".join(crossed)


def is_counted(file: str) -> bool:
    """Whether a file is the launcher's, or of `process/`: `cli/` reads the words of all commands."""
    return file.startswith("process/") or (PACKAGE / "launcher" / file).exists()


def crossed(job: Job, begun: float, until: float) -> set[str]:
    """The files of the launcher and of `process/` that were crossed meanwhile; ends the job."""
    job.process.send_signal(signal.SIGQUIT)
    job.process.wait(60)
    here, there = job.calls()
    return {call.file for call in here + there if begun <= call.time <= until}


def test_a_restart_crosses_these_files(start: Callable[..., Job]) -> None:
    """From `kill -9` to the steps of the next attempt."""
    job = start(max_restarts=1)
    begun = fault("kill -9", job)
    again = max(when for when, _ in job.ready(1, 2))
    files_crossed = crossed(job, begun, again)
    assert files_crossed == set(table()["restart"]), "\n".join(sorted(files_crossed))


def test_a_join_crosses_these_files(start: Callable[..., Job]) -> None:
    """From a request to the steps of the attempt that has the host."""
    job = start(max_restarts=1, min_hosts=1)
    begun = time.monotonic()
    mailbox(job.folder / "logs").post({"joins": True, "hosts": ["c"]})
    joined = max(when for when, _ in job.ready(1, 3))
    files_crossed = crossed(job, begun, joined)
    assert files_crossed == set(table()["join"]), "\n".join(sorted(files_crossed))


def test_the_table_is_in_order() -> None:
    for way, places in table().items():
        assert sorted(places.values()) == list(range(1, len(places) + 1)), way
