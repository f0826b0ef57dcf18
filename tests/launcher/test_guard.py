"""The guard kills what a dead agent leaves, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.reaper import kill_sessions

# Stands for an agent: a guard, a rank behind a shell and `timeout` (its own process group), and one that it forgets.
AGENT = """
import os, subprocess, sys, time
from pathlib import Path
from roxxel_dist.launcher.guard import Guard
folder = Path(sys.argv[1]); (folder / "progress").write_text("x")
guard = Guard(folder)
def start(*command):
    return subprocess.Popen(command, start_new_session=True, preexec_fn=guard.watch, stdout=subprocess.PIPE)
rank = start("bash", "-c", "timeout 1000 bash -c 'sleep 1000 & echo $!; wait'; true")
forgotten = start("bash", "-c", "sleep 1000 & echo $!; wait"); guard.forget(forgotten.pid)
print(guard.pid, rank.pid, int(rank.stdout.readline()), int(forgotten.stdout.readline()), flush=True)
time.sleep(1000)
"""


Alive = Callable[[int], bool]
Until = Callable[[Callable[[], Any], str], None]


def test_an_agent_killed_with_9_leaves_nothing(tmp_path: Path, alive: Alive, until: Until) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", AGENT, str(folder)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        guard, rank, grandchild, forgotten = map(int, agent.stdout.readline().split())
        assert all(map(alive, (guard, rank, grandchild, forgotten)))
        assert os.getpgid(grandchild) != rank, "in a process group of its own, or this test shows nothing"
        agent.kill()
    until(lambda: not alive(guard), "the guard to end")
    assert not alive(rank)
    assert not alive(grandchild)
    assert not folder.exists()
    assert alive(forgotten)
    os.kill(forgotten, signal.SIGKILL)


def test_kill_sessions_returns_when_all_are_dead(alive: Alive) -> None:
    script = "trap '' TERM; for i in 1 2 3; do timeout 1000 sleep 1000 & done; echo $!; wait"
    leaders = [
        subprocess.Popen(["bash", "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    inner = [int(leader.stdout.readline()) for leader in leaders if leader.stdout]
    kill_sessions(leader.pid for leader in leaders)
    assert not any(map(alive, inner))
    assert [leader.wait() for leader in leaders] == [-signal.SIGKILL] * 2
    assert alive(bystander.pid)
    bystander.kill()
    bystander.wait()
    for leader in leaders:
        leader.communicate()
