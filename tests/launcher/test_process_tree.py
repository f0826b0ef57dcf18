"""Guards and keepers kill what is left of a program, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from machines import stuck_disk

Alive = Callable[[int], bool]
Until = Callable[[Callable[[], Any], str], None]
Start = Callable[..., tuple["subprocess.Popen[str]", list[int]]]

# A daemon: no child of anybody's, in a session of its own, with nothing in its environment; it tells its pid.
DAEMON = "(setsid env -i /bin/bash -c 'echo $$; exec sleep 1000 > /dev/null' &); "
START = """
import os, subprocess, sys, time
from roxxel_dist.launcher.host.process_tree import ProcessTree, beat, die_with_parent, go_on_under_guard
def tree(script):
    reads, writes = os.pipe()
    options = {"stdout": writes, "start_new_session": True, "preexec_fn": die_with_parent}
    made = ProcessTree(lambda: subprocess.Popen(["bash", "-c", script], **options), holds=(writes,), kill_s=8.0)
    os.close(writes)
    return made, open(reads)
def say(*words):
    print(*words, flush=True)
"""
AGENT = """
os.makedirs(sys.argv[1] + "/a/b"); open(sys.argv[1] + "/a/b/c", "w").close()
open(sys.argv[1] + "/progress", "w").close()
guard = os.getpid(); heartbeat = go_on_under_guard([sys.argv[1]], 8.0, float(sys.argv[2]))
rank, out = tree(sys.argv[3])
say(guard, os.getpid(), rank.keeper, rank.pid, int(out.readline()), int(out.readline()))
while True:
    beat(heartbeat)
    time.sleep(0.05)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Run Python code with `tree` and `say`; the process, and the numbers of the first line that it says."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *words: object, before: tuple[object, ...] = ()) -> Any:
        command = [*map(str, before), sys.executable, "-c", START + code, *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, [int(word) for word in process.stdout.readline().split()]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("victims", ["agent", "agent and keeper", "guard", "agent that is stopped"])
def test_kill_9_leaves_nothing(victims: str, start: Start, alive: Alive, until: Until, tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        rank = DAEMON + "trap '' TERM; timeout 1000 bash -c 'echo $$; sleep 1000; true'; true"
        limit_s = 1 if "stopped" in victims else "inf"
        process, pids = start(AGENT, tmp_path / "progress", limit_s, rank)
        guard, agent, keeper, *_ = pids
        assert (guard, psutil.Process(agent).ppid()) == (process.pid, guard)
        until(lambda: len(psutil.Process(agent).children(recursive=True)) == 6, "all processes to be there")
        below = [agent, *(child.pid for child in psutil.Process(agent).children(recursive=True))]
        assert set(pids[1:]) < set(below), "the daemon too is found below the agent"
        if victims == "guard":
            os.kill(guard, signal.SIGKILL)
        elif victims == "agent that is stopped":
            os.kill(agent, signal.SIGSTOP)
        else:
            os.kill(guard, signal.SIGSTOP)  # it would end the keeper before this test does
            os.kill(agent, signal.SIGKILL)
            if victims == "agent and keeper":
                os.kill(keeper, signal.SIGKILL)
            os.kill(guard, signal.SIGCONT)
        told = -signal.SIGKILL if victims == "guard" else 128 + signal.SIGKILL
        assert process.wait(60) == told, "the guard says how the agent ended"
        until(lambda: not any(map(alive, below)), "all processes to be gone")
        if victims != "guard":
            assert not (tmp_path / "progress").exists()
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


TWO = """
first, second = tree(sys.argv[1] + "sleep 1000; true"), tree(sys.argv[1] + "exit 7")
said = [made.pid for made, _ in (first, second)] + [int(out.readline()) for _, out in (first, second)]
second[0].receive()
say(*said, second[0].code)
for made in (second[0], first[0]):
    sys.stdin.readline()
    made.kill()
    while not made.is_empty:
        made.receive()
    say(made.code)
sys.stdin.readline()
"""


def test_a_tree_is_killed_with_its_daemons_and_without_those_of_another(start: Start, alive: Alive) -> None:
    process, (rank, ended, daemon, left, code) = start(TWO, DAEMON)
    assert process.stdin is not None
    assert process.stdout is not None
    assert code == 7
    assert all(map(alive, (rank, daemon, left)))
    for codes, gone, stays in (("7", (ended, left), (rank, daemon)), ("-9", (rank, daemon), ())):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{codes}\n"
        assert not any(map(alive, gone))
        assert all(map(alive, stays))


# The program ends while its keeper is stopped, which then finds more orders than it reads before it ends too.
LATE = """
import signal
ended, out = tree("read line < " + sys.argv[1] + "; exit 7")
os.kill(ended.keeper, signal.SIGSTOP)
os.waitid(os.P_PID, ended.keeper, os.WSTOPPED)
open(sys.argv[1], "w").close()
out.read()  # to its end
for _ in range(3):
    ended.kill()
os.kill(ended.keeper, signal.SIGCONT)
os.waitid(os.P_PID, ended.keeper, os.WEXITED | os.WNOWAIT)
while not ended.is_empty:
    ended.receive()
say(ended.code)
"""


def test_how_a_program_ended_is_told_whatever_orders_came_after(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert start(LATE, tmp_path / "fifo")[1] == [7]


# The program waits for a disk that does not answer, and has a child that does not.
STUCK = """
dead, out = tree("sleep 1000 & echo $!; exec cat " + sys.argv[1] + "/dead/x")
child = int(out.readline())
def state(pid):
    try:
        name, _, fields = open(f"/proc/{pid}/stat").read().rpartition(")")
    except FileNotFoundError:
        return "X"
    return name.partition("(")[2] + " " + fields.split()[0]
while state(dead.pid) != "cat S":
    time.sleep(0.01)
time.sleep(0.1)  # until the disk has heard of it
dead.kill()
while state(child)[-1] not in "ZX" or state(dead.pid) != "cat D":
    time.sleep(0.01)
os.set_blocking(dead.fd, False)
try:
    dead.receive()
except BlockingIOError:
    say(dead.keeper, dead.pid, state(dead.pid), dead.is_empty)
from roxxel_dist.launcher.host.process_tree import Subreaper
other = subprocess.Popen(["cat", sys.argv[1] + "/dead/y"])
while state(other.pid) not in ("cat S", "cat D"):
    time.sleep(0.01)
time.sleep(0.1)
say(Subreaper(other.pid).kill(0.1))
"""


def test_a_program_that_cannot_be_killed_holds_up_nobody(tmp_path: Path, alive: Alive, until: Until) -> None:
    """Its keeper waits for it, and what it has started is killed all the same."""
    result = subprocess.run(stuck_disk(tmp_path, sys.executable, "-c", START + STUCK, tmp_path / "disk"), **TEXT)
    assert result.returncode == 0, result.stderr
    keeper, pid, *states = result.stdout.split()
    assert states == ["cat", "D", "False", "False"], "not gone, and whoever kills it learns that"
    until(lambda: not alive(int(pid)) and not alive(int(keeper)), "the disk to be gone, and with it those who wait")


# A process with threads starts a keeper as a program. The program leaves a daemon; it heeds SIGTERM, or does not.
SPAWN = """
import threading
from roxxel_dist.launcher.host.process_tree import SpawnedTree
threading.Thread(target=sys.stdin.read, daemon=True).start()
reads, writes = os.pipe()
tree = SpawnedTree(["bash", "-c", sys.argv[1]], dict(os.environ), writes, None, float(sys.argv[2]), 8.0)
os.close(writes)
say(tree.keeper, tree.pid, *(int(line) for _, line in zip(range(int(sys.argv[3])), open(reads, closefd=False))))
if sys.argv[4] == "end":
    tree.end(float(sys.argv[5]))
else:
    while not tree.wait(1.0):
        pass
say(tree.code)
"""
SLEEPS = "echo $$; sleep 1000; true"


@pytest.mark.parametrize(
    ("script", "linger_s", "stop_s", "code"),
    [
        (DAEMON + "trap 'exit 7' TERM; " + SLEEPS.replace("sleep 1000", "sleep 1000 & wait"), 0.2, 30, 7),
        (DAEMON + "trap '' TERM; " + SLEEPS, 5, 0.2, -signal.SIGKILL),
    ],
    ids=["asked", "killed"],
)
def test_a_spawned_tree_is_asked_to_stop_and_then_killed(
    script: str, linger_s: float, stop_s: float, code: int, start: Start, alive: Alive
) -> None:
    process, pids = start(SPAWN, script, linger_s, 2, "end", stop_s)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{code}\n"
    assert not any(map(alive, pids))


def test_what_a_spawned_program_leaves_has_its_time_and_is_killed_then(start: Start, alive: Alive) -> None:
    process, pids = start(SPAWN, DAEMON + "sleep 0.3; exit 3", 0.5, 1, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "3\n"
    assert not any(map(alive, pids))


@pytest.mark.parametrize("victim", ["its parent", "its keeper"])
def test_a_spawned_tree_ends_with_its_parent_and_with_its_keeper(
    victim: str, start: Start, alive: Alive, until: Until
) -> None:
    process, (keeper, pid, daemon, _) = start(SPAWN, DAEMON + "echo $$; exec sleep 1000", 1000, 2, "wait")
    os.kill(process.pid if victim == "its parent" else keeper, signal.SIGKILL)
    until(lambda: not alive(keeper) and not alive(pid), "the program to be gone")
    if victim == "its parent":
        until(lambda: not alive(daemon), "its daemon to be gone")
    else:
        assert process.stdout is not None
        assert process.stdout.readline() == "-9\n"
        os.kill(daemon, signal.SIGKILL)


# The program has ended and left a daemon, and nobody has read the report about its end.
UNREAD = """
import select
if sys.argv[1] == "spawned":
    from roxxel_dist.launcher.host.process_tree import SpawnedTree
    reads, writes = os.pipe()
    made, out = SpawnedTree(["bash", "-c", sys.argv[2]], dict(os.environ), writes, None, 1000.0, 8.0), open(reads)
else:
    made, out = tree(sys.argv[2])
daemon = int(out.readline())
select.select([made.fd], [], [])
say(made.keeper, daemon)
time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["spawned", "forked"])
def test_a_keeper_whose_report_nobody_has_read_kills_what_is_left(
    kind: str, start: Start, alive: Alive, until: Until
) -> None:
    process, (keeper, daemon) = start(UNREAD, kind, DAEMON + "exit 0")
    assert alive(daemon)
    process.kill()
    until(lambda: not alive(keeper), "its keeper to end")
    assert not alive(daemon)


# What the agent has started waits for a disk, so its guard waits for it, and is asked to end when the agent is reaped.
GUARDED = """
import signal
reads, writes = os.pipe()
if not (guard := os.fork()):
    go_on_under_guard([sys.argv[1]], 1.0, channel=writes)
    stuck = subprocess.Popen(["cat", sys.argv[2] + "/dead/x"])
    os.write(writes, b"%d %d" % (os.getpid(), stuck.pid))
    time.sleep(1000)
agent, stuck = os.read(reads, 100).split()
while "(cat) S" not in open(f"/proc/{int(stuck)}/stat").read():
    time.sleep(0.01)
time.sleep(0.1)  # until the disk has heard of it
os.kill(int(agent), signal.SIGKILL)
while agent in open(f"/proc/{guard}/task/{guard}/children", "rb").read().split():
    time.sleep(0.005)
time.sleep(0.2)  # until it pauses between its looks at what is left
os.mkdir(sys.argv[1])  # by something that still ends
os.kill(guard, signal.SIGTERM)
say(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]), os.path.exists(sys.argv[1]))
"""


def test_a_guard_that_is_asked_to_end_behind_its_agent_does_its_work(tmp_path: Path) -> None:
    words = stuck_disk(tmp_path, sys.executable, "-c", START + GUARDED, tmp_path / "made", tmp_path / "disk")
    assert subprocess.run(words, **TEXT).stdout == "137 False\n"


TEXT: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
