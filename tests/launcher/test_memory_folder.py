"""The folder of a job in shared memory: who has it, and that nothing is left of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roxxel_dist.launcher.agent import agent as memory_folder

Launch = Callable[..., Any]
Alive = Callable[[int], bool]
Until = Callable[[Callable[[], Any], str], None]

FILL = """
mkdir -p "$ROXXEL_MEMORY/steps/$ROXXEL_PROCESS_ID" && ln -sfn / "$ROXXEL_MEMORY/steps/$ROXXEL_PROCESS_ID/root"
touch "$ROXXEL_MEMORY/steps/$ROXXEL_PROCESS_ID/block"
echo "$ROXXEL_MEMORY" > tmp.$ROXXEL_PROCESS_ID; mv tmp.$ROXXEL_PROCESS_ID folder.$ROXXEL_PROCESS_ID
"""


def folders(job: Any) -> set[Path]:
    return {Path(path.read_text().strip()) for path in job.marks("folder.*", 2)}


def test_ranks_of_a_host_share_a_folder_that_ends_with_the_job(launch: Launch, tmp_path: Path) -> None:
    show = """stat -c %a "$ROXXEL_MEMORY" "$ROXXEL_MEMORY/key"; cat "$ROXXEL_MEMORY/key"; ls "$ROXXEL_MEMORY" """
    job = launch("bash", "-c", show + FILL, max_restarts=1, environ={"ROXXEL_MEMORY": "/stale"})
    assert job.wait()[::2] == (0, "")
    (folder,) = folders(job)
    assert folder.parent == Path("/dev/shm")
    mode, key_mode, line = job.lines(0)[:3]
    assert (mode, key_mode) == ("700", "600")
    key = line.removesuffix("key")
    assert len(bytes.fromhex(key)) == 32
    assert not folder.exists()


def test_a_job_without_restarts_has_none(launch: Launch) -> None:
    job = launch("bash", "-c", "echo ${ROXXEL_MEMORY-none}", nprocs=1, environ={"ROXXEL_MEMORY": "/stale"})
    assert job.wait()[0] == 0
    assert job.lines(0) == ["none"]


def test_two_jobs_on_a_host_have_two(launch: Launch, until: Until, tmp_path: Path) -> None:
    script = (
        "echo $ROXXEL_MEMORY; cat $ROXXEL_MEMORY/key; echo; touch up.$NAME; until [ -e end.$NAME ]; do sleep 0.02; done"
    )
    jobs = {
        name: launch("bash", "-c", script, nprocs=1, max_restarts=1, env={"NAME": name}, run_id=f"{name}{os.getpid()}",
                     log_dir=str(tmp_path / name))
        for name in ("one", "two")
    }  # fmt: skip
    jobs["one"].marks("up.*", 2)
    logs = [tmp_path / name / "rank-0.log" for name in jobs]
    until(lambda: all(log.exists() and len(log.read_text().splitlines()) == 3 for log in logs), "the lines")
    lines = [log.read_text().splitlines()[1:] for log in logs]
    folders, keys = ([line[number].split(" | ")[1] for line in lines] for number in (0, 1))
    assert len(set(folders)) == len(set(keys)) == 2
    (tmp_path / "end.one").touch()
    assert jobs["one"].wait()[0] == 0
    assert [os.path.exists(folder) for folder in folders] == [False, True]
    (tmp_path / "end.two").touch()
    assert jobs["two"].wait()[0] == 0
    assert not os.path.exists(folders[1])


@pytest.mark.parametrize(
    "victims",
    [
        "launcher",
        "agent and guard",
        "agent that is stopped",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("agent", "guard")),
    ],
)
def test_kill_9_leaves_no_folder(victims: str, launch: Launch, alive: Alive, until: Until) -> None:
    job = launch("bash", "-c", FILL + "exec sleep 1000", max_restarts=1)
    (folder,) = folders(job)
    assert folder.is_dir()
    family = job.family()
    if victims == "agent that is stopped":
        os.kill(family["agent"][0], signal.SIGSTOP)
        os.kill(job.process.pid, signal.SIGKILL)
        os.kill(family["guard"][0], signal.SIGKILL)
    elif victims == "launcher":
        job.process.kill()
    else:
        os.kill(job.process.pid, signal.SIGSTOP)  # it would start the job again, in a folder of its own
        for name in victims.split(" and "):
            os.kill(family[name][0], signal.SIGKILL)
    until(lambda: not any(map(alive, family["all"])), "all processes to be gone")
    until(lambda: not folder.exists(), "the folder to be gone")
    assert Path("/").exists(), "a link in it was not followed"


def test_a_folder_that_nobody_was_left_to_remove_goes_with_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "NEW_S", 0.0)
    make = "import sys; from roxxel_dist.launcher.agent.agent import create_memory; create_memory(sys.argv[1], 'ab');"
    used, abandoned = memory_folder.new_memory(), memory_folder.new_memory()
    assert used is not None
    assert abandoned is not None
    words = [sys.executable, "-c", make + "print(flush=True); input()", used]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        subprocess.run([sys.executable, "-c", make, abandoned], check=True)
        memory_folder.remove_abandoned_memory()
        assert os.path.isdir(used), "its agent lives"
        assert not os.path.exists(abandoned)
        owner.communicate(b"\n")
    memory_folder.remove_abandoned_memory()
    assert not os.path.exists(used)
