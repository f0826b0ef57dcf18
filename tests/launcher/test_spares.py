"""Spare processes: what becomes of them, that a program does not see that it runs in one, and that none is left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import is_waiting_spare
from tables import one_test

from roxxel_dist.launcher.agent.spares import Rank, RankCommand, Spare, choose
from roxxel_dist.launcher.host.worker import JOINING, imports_of
from roxxel_dist.launcher.job.spec import program_of
from roxxel_dist.process.process_stat import free_bytes

pytestmark = pytest.mark.xdist_group("launch")  # not beside test_worker.py, of whose ranks a launch would tell
Launch = Callable[..., Any]
Alive = Callable[[int], bool]
Until = Callable[[Callable[[], Any], str], None]

TRAINING = (*JOINING, *program_of(["train"]).imports)
READ = "0 " if os.uname().machine == "x86_64" else "63 "
"""The number of the system call in which a spare waits."""

# Three steps, and more until it is killed; in later attempts it tells what it sees.
PROGRAM = """
import json, os, resource, signal, sys, threading, time
from pathlib import Path
from roxxel_dist.process.progress import Progress
import jax

attempt = int(os.environ["ROXXEL_ATTEMPT"])
progress = Progress.from_env(0)
facts = {"argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(), "stdin": os.readlink("/proc/self/fd/0"),
         "handlers": {n: str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (9, 19)},
         "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "timer": signal.getitimer(signal.ITIMER_PROF),
         "threads": [thread.name for thread in threading.enumerate()], "path": sys.path, "name": __name__,
         "comm": Path("/proc/self/comm").read_text(), "oom": Path("/proc/self/oom_score_adj").read_text(),
         "words": Path("/proc/self/cmdline").read_text(), "priority": [os.getpriority(0, 0), os.sched_getscheduler(0)],
         "session": os.getsid(0) == os.getpid(), "devices": jax.device_count(), "umask": os.umask(0o22),
         "pipes": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") for fd in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{fd}"))}
print("I am here", attempt, flush=True)
Path("tmp.facts").write_text(json.dumps(facts | {"pid": os.getpid()}))
os.rename("tmp.facts", f"facts.{attempt}")
step = 0
while attempt == 0 or not Path("end").exists():
    step += 1
    progress.enter(step + 100 * attempt)
    time.sleep(0.05)
"""


class Job:
    """A launch of one rank that can be started again."""

    def __init__(self, launch: Launch, until: Until, folder: Path, *command: str, **more: Any) -> None:
        (folder / "program.py").write_text(PROGRAM)
        environ = {"XDG_STATE_HOME": str(folder / "state")}
        more = {"nprocs": 1, "max_restarts": 2, "devices_per_proc": 1, "warm_spares": "on", **more}
        self.launch = launch("python", "program.py", "a word", *command, environ=environ, **more)
        self.folder, self.until = folder, until

    def facts(self, attempt: int) -> dict[str, Any]:
        (path,) = self.launch.marks(f"facts.{attempt}", 1)
        return json.loads(path.read_text())

    def spare(self) -> int:
        """The process that waits to be a rank."""
        ready: list[int] = []

        def look() -> bool:
            family = psutil.Process(self.launch.process.pid).children(recursive=True)
            ready[:] = [child.pid for child in family if is_waiting_spare(child.pid)][-1:]
            return bool(ready)

        self.until(look, "a spare that is ready")
        return ready[0]

    def rank(self) -> int:
        """The process of the rank, as `ps` tells it."""
        path = self.folder / "logs" / "launcher.json"
        return next((rank["pid"] for rank in json.loads(path.read_text())["ranks"]), 0)


@pytest.fixture
def job(launch: Launch, until: Until, tmp_path: Path) -> Callable[..., Job]:
    return lambda *command, **more: Job(launch, until, tmp_path, *command, **more)


def test_a_program_does_not_see_that_it_runs_in_a_spare(job: Callable[..., Job], alive: Alive, tmp_path: Path) -> None:
    one = job()
    first, spare = one.facts(0), one.spare()
    family = one.launch.family()
    assert one.rank() == first["pid"], "a spare is no rank"
    assert "--spare" not in " ".join(psutil.Process(spare).cmdline())
    os.kill(first["pid"], signal.SIGKILL)
    second = one.facts(1)
    assert second.pop("pid") == spare
    assert first.pop("pid") != spare
    changed = {name for name in first["env"] | second["env"] if first["env"].get(name) != second["env"].get(name)}
    assert changed == {"ROXXEL_ATTEMPT", "ROXXEL_COORDINATOR"}
    del first["env"], second["env"]
    assert second == first
    (tmp_path / "end").touch()
    code, out, err = one.launch.wait()
    assert code == 0, err
    assert [line.split(" | ")[1] for line in out.splitlines()] == ["I am here 0", "I am here 1"]
    assert err.count("restart 1 of 2, immediately") == 1
    assert not any(map(alive, family["all"]))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("how", ["killed", pytest.param("stuck", marks=pytest.mark.long)])
@pytest.mark.cluster
def test_a_spare_that_dies_while_it_is_taken_is_no_failure(how: str, job: Callable[..., Job], tmp_path: Path) -> None:
    one = job()
    first, spare = one.facts(0), one.spare()
    os.kill(spare, signal.SIGSTOP)
    os.kill(first["pid"], signal.SIGKILL)
    one.until(lambda: one.rank() == spare, "the spare to be the rank")
    if how == "killed":
        os.kill(spare, signal.SIGKILL)
    second = one.facts(1)
    assert second["pid"] not in (first["pid"], spare)
    (tmp_path / "end").touch()
    code, _, err = one.launch.wait()
    assert code == 0, err
    assert err.count("failed first") == 1
    assert "restart 2" not in err


@pytest.mark.long
@pytest.mark.parametrize("end", ["Ctrl-C", "agent", "guard", "agent and guard", "keeper"])
def test_nothing_is_left_of_a_spare_that_is_taken(
    end: str, job: Callable[..., Job], alive: Alive, until: Until
) -> None:
    one = job(grace=1)
    first, spare = one.facts(0), one.spare()
    os.kill(spare, signal.SIGSTOP)
    os.kill(first["pid"], signal.SIGKILL)
    one.until(lambda: one.rank() == spare, "the spare to be the rank")
    family = one.launch.family()
    memory = psutil.Process(spare).environ()["ROXXEL_MEMORY"]
    if end == "Ctrl-C":
        one.launch.process.send_signal(signal.SIGINT)
        assert one.launch.wait()[0] == 130
    elif end == "keeper":
        os.kill(family["keepers"][0], signal.SIGKILL)
        assert one.facts(1)["pid"] != spare
        one.launch.process.kill()
    else:
        os.kill(one.launch.process.pid, signal.SIGSTOP)
        for name in end.split(" and "):
            os.kill(family[name][0], signal.SIGKILL)
    until(lambda: not any(map(alive, family["all"])), "all processes to be gone")
    until(lambda: not os.path.exists(memory), "the folder to be gone")


@pytest.mark.long
def test_without_a_spare_a_rank_starts_afresh(job: Callable[..., Job], tmp_path: Path) -> None:
    one = job()
    first, spare = one.facts(0), one.spare()
    os.kill(spare, signal.SIGKILL)
    os.kill(first["pid"], signal.SIGKILL)
    assert one.facts(1)["pid"] != spare
    (tmp_path / "end").touch()
    assert one.launch.wait()[0] == 0


STEPS = """
import os, sys, time
from roxxel_dist.process.progress import Progress
for step in range(1, 1000):
    Progress.from_env(0).enter(step)
    time.sleep(0.01)
    if os.path.exists("end"):
        sys.exit()
"""


def test_who_asks_for_spares_hears_why_there_are_none(launch: Launch, tmp_path: Path) -> None:
    job = launch("env", sys.executable, "-c", STEPS, nprocs=1, max_restarts=1, warm_spares="on")
    line = job.process.stderr.readline().decode()
    assert f"{socket.gethostname()}: --warm-spares on: this program does not run in the launcher's Python" in line
    (tmp_path / "end").touch()
    assert job.wait()[0] == 0
    _, _, err = launch("true", nprocs=1, warm_spares="on").wait()
    assert "--warm-spares on: there is no restart that would use them" in err


@one_test(
    ("command", "modules"),
    [
        (("train", "--config", "x.yaml"), TRAINING),
        (("python", "program.py"), JOINING),
        (("python", "-u", "-m", "module"), JOINING),
        (("program.py", "-c"), JOINING),
        (("python", "-O", "program.py"), ()),  # another interpreter
        (("python", "-c", "pass"), ()),
        (("python", "-m"), ()),
        (("python",), ()),
        (("bash", "-c", "true"), ()),
        (("eval", "runs/one"), ()),
    ],
)
def test_what_a_spare_imports(command: tuple[str, ...], modules: tuple[str, ...]) -> None:
    assert tuple(imports_of(command)) == modules


def test_a_spare_is_taken_for_the_variables_that_it_was_made_with_alone() -> None:
    def spare(number: int, *, ready: bool = True, **env: str) -> Spare:
        rank = Rank(number=number, tree=None, output=-1, pipe=-1)  # pyright: ignore[reportArgumentType] - no process
        program = RankCommand(("train",), {"ROXXEL_PROCESS_ID": str(number), **env})
        return Spare(rank=rank, program=program, orders=-1, ready=ready)

    program = RankCommand(["train"], {"ROXXEL_PROCESS_ID": "1", "ROXXEL_ATTEMPT": "2", "XLA_FLAGS": "a"})
    spares = [spare(0, XLA_FLAGS="a"), spare(1, XLA_FLAGS="a"), spare(2, XLA_FLAGS="b"), spare(3)]
    assert choose(spares, 1, program) is spares[1]
    assert choose(spares, 7, program) is spares[0]
    assert choose(spares[2:], 1, program) is None
    more = RankCommand(program.command, {**program.env, "PJRT_NPROC": "7"})  # the job has more ranks than before
    assert choose(spares, 1, more) is spares[1]
    assert choose([spare(1, ready=False, XLA_FLAGS="a")], 1, program) is None
    assert choose(spares, 1, RankCommand(["train", "--lr"], program.env)) is None
    assert 0 < free_bytes() <= psutil.virtual_memory().total


TRAINING = (*JOINING, *program_of(["train"]).imports)
LOOK = """
import sys, threading
from importlib import import_module
for module in sys.argv[1:]:
    import_module(module)
from roxxel_dist.cluster.jax_private import backends_are_initialized
print(backends_are_initialized(), threading.active_count())
"""


def test_the_imports_of_a_spare_touch_no_device_and_leave_no_thread() -> None:
    words = [sys.executable, "-W", "error::RuntimeWarning", "-c", LOOK, *TRAINING]
    assert subprocess.check_output(words, text=True) == "False 1\n"


# A start fails because of its variables, or because there is no room for a descriptor, at each of its pipes in turn.
FAILING = """
import os, resource, subprocess
from roxxel_dist.launcher.agent import spares
def left():
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    states = [open(f"/proc/{pid}/stat").read() for pid in children]
    return len(os.listdir("/proc/self/fd")), sum(" Z " in state for state in states)
large = spares.RankCommand(("true",), {**os.environ, "LARGE": "x" * 200_000})
before, failed, limits = left(), 0, resource.getrlimit(resource.RLIMIT_NOFILE)
for start in (spares.start_rank, spares.start_spare):
    for room in (1024, *range(before[0], before[0] + 7)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, limits[1]))
        try:
            start(0, large, [], 8.0)
        except OSError:
            failed += 1
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print(failed, before, left())
"""


def test_nothing_is_left_of_a_start_that_fails() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, check=True)
    failed, before, after = re.fullmatch(r"(\d+) (\(.*\)) (\(.*\))\n", done.stdout).groups()
    assert failed == "16"
    assert after == before
