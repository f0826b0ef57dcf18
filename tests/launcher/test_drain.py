"""Requests to the ranks to save and exit: which processes get them, and what the launcher reports."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import is_waiting_spare, write_namesakes

from roxxel_dist.launcher.control.report import saved
from roxxel_dist.launcher.policy.outcome import AttemptResult, HostLost, RankExit, is_drain

Launch = Callable[..., Any]


def ends(*codes: int, killed: bool = False) -> list[RankExit]:
    return [
        RankExit(rank=n, host="h", pid=n + 1, code=code, killed_by_us=killed, step=3) for n, code in enumerate(codes)
    ]


@pytest.mark.parametrize(
    ("more", "drain"),
    [
        ({"requested": signal.SIGINT}, True),
        ({"grows": "to go on with h2"}, True),
        ({"lost": HostLost(host="h", code=137, text="gone")}, False),
        ({}, False),
    ],
)
def test_what_is_a_request_to_leave(more: dict[str, Any], drain: bool) -> None:
    assert is_drain(AttemptResult(exits=ends(143), **more)) == drain


@pytest.mark.parametrize(
    ("exits", "words"),
    [
        (ends(42, 42), "every rank saved and exited (42)"),
        (ends(42, 0), "every rank saved and exited (42)"),
        (ends(42, -15), "1 of 2 ranks saved and exited (rank 1: signal SIGTERM)"),
        (ends(143, 143), "0 of 2 ranks saved and exited (rank 0: exit code 143; rank 1: exit code 143)"),
        (ends(-9, killed=True), "0 of 1 ranks saved and exited (rank 0: killed after the grace period)"),
    ],
)
def test_what_is_said_of_saving_is_what_was_seen(exits: list[RankExit], words: str) -> None:
    assert saved(AttemptResult(exits=exits)) == words


POOL = """
import multiprocessing as mp, os, signal, sys, time
from pathlib import Path
def work(x):
    time.sleep(0.01)
    return x
if __name__ == "__main__":
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    with mp.get_context("spawn").Pool(2) as pool:
        while True:
            pool.map(work, range(4))
            Path("up").touch()
            if asked:
                pool.map(work, range(4))  # it needs them to save
                Path("saved").touch()
                sys.stdout.flush()
                os._exit(42)
"""


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "pool.py"],  # workers of a pool
        ["bash", "-c", f"{sys.executable} pool.py; exit $?"],  # a program of a shell
        ["bash", "-c", f"bash -c '{sys.executable} pool.py; exit $?'; exit $?"],
        ["env", "A=b", sys.executable, "pool.py"],
    ],
    ids=["program", "shell", "two shells", "env"],
)
def test_the_request_reaches_the_program_and_not_its_workers(
    command: list[str], launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    job = launch(*command, nprocs=1, grace=20)
    job.marks("up", 1)
    job.process.send_signal(signal.SIGINT)
    _, _, err = job.wait()
    assert (tmp_path / "saved").exists(), err


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("launcher", signal.SIGTERM),
        ("launcher", signal.SIGUSR1),
        ("launcher", signal.SIGUSR2),
        ("launcher", signal.SIGXCPU),
        ("steps", signal.SIGUSR1),
        ("steps", signal.SIGUSR2),
    ],
)
def test_signals_of_batch_systems_are_requests(where: str, number: int, launch: Launch, tmp_path: Path) -> None:
    """`sbatch --signal=B:USR1@60` signals the launcher, without B: the processes of the steps."""
    job = launch("bash", "-c", "trap 'exit 42' TERM; touch up; for i in $(seq 300); do sleep .1; done", nprocs=1)
    job.marks("up", 1)
    family = job.family()
    for pid in [job.process.pid] if where == "launcher" else [*family["guard"], *family["agent"], *family["keepers"]]:
        os.kill(pid, number)
    code, _, err = job.wait()
    assert code == 42, err
    assert f"{signal.Signals(number).name}: the ranks get 30 s to save and exit" in err


def test_a_rank_that_a_batch_system_has_ended_was_preempted(launch: Launch, tmp_path: Path) -> None:
    job = launch("bash", "-c", "[ $ROXXEL_ATTEMPT = 1 ] || kill -USR1 $$; sleep 1", nprocs=1, max_restarts=1)
    code, _, err = job.wait()
    assert code == 0
    assert re.search(r"preempted; restart .* [(]it counts for nothing[)]", err)


MAIN = """
import os, sys, time
from roxxel_dist.cluster.progress import Progress
rank, attempt = int(os.environ["ROXXEL_PROCESS_ID"]), int(os.environ["ROXXEL_ATTEMPT"])
progress = Progress.from_env(rank)
for step in range(1000 * attempt + 1, 1000 * attempt + (10 if attempt else 900)):
    progress.enter(step)
    if os.path.exists("go") and attempt == 0:
        os.kill(os.getpid(), 9)
    time.sleep(0.1)
print("it ran as", os.getpid())
"""


def test_files_of_the_working_folder_are_no_modules_of_the_launcher(tmp_path: Path, until: Callable[..., None]) -> None:
    """Nor of the ranks: the first one is a fresh process, the second one has waited to be a rank."""
    write_namesakes(tmp_path)
    (tmp_path / "main.py").write_text(MAIN)
    words = [Path(sys.executable).with_name("roxxel-dist"), "launch", "local", "--warm-spares", "on"]
    words += ["--devices-per-proc", "1", "--", "python", "-m", "main"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, **pipes) as job:

        def waiting() -> list[int]:
            family = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
            return [one.pid for one in family if is_waiting_spare(one.pid)]

        until(lambda: job.poll() is not None or waiting(), "a spare")
        (had,) = waiting() or [0]
        (tmp_path / "go").touch()
        out, err = job.communicate()
    assert (job.returncode, out.count("it ran as")) == (0, 1), err
    assert "was imported" not in out + err
    assert f"it ran as {had}" in out


@pytest.mark.cluster
def test_keepers_are_reaped(launch: Launch, until: Callable[..., None]) -> None:
    job = launch(
        "bash", "-c", "touch ready.$ROXXEL_ATTEMPT.$ROXXEL_PROCESS_ID; [ $ROXXEL_ATTEMPT = 3 ] || exit 42; sleep 60",
        max_restarts=1,
    )  # fmt: skip
    job.marks("ready.3.*", 2)
    agent = psutil.Process(job.family()["agent"][0])

    def zombies() -> list[Any]:
        return [child for child in agent.children() if child.status() == psutil.STATUS_ZOMBIE]

    until(lambda: not zombies(), "the keepers of three attempts")
    assert len(agent.children()) == 2, "the keepers of the attempt that runs"
    job.process.send_signal(signal.SIGQUIT)
    code, _, err = job.wait()
    assert (code, err.count("every rank saved and exited (42)")) == (131, 3), err


def test_a_rank_that_cannot_be_started_is_named(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "env").write_text(f"BIG={'x' * 140_000}\n")
    done = cli("launch", "local", "--env-from", "env", "--", "true", cwd=tmp_path)
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert "rank 0 cannot be started: Argument list too long: its variables and words are too large" in said
    assert "Traceback" not in said
    assert "restart" not in said


@pytest.mark.cluster
def test_a_login_file_of_a_host_does_not_replace_variables_of_the_user(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """A bash that takes each `bash -c` under sshd for a login reads ~/.bashrc again."""
    hosts = cluster(2)
    for host in hosts.names:
        (hosts.home(host) / ".bashrc").write_text("export NCCL_DEBUG=WARN CUDA_VISIBLE_DEVICES=0\n")
    words = ["launch", "ssh", "--hosts", "h1,h2", "--ssh-config", hosts.ssh_config, "--all-ranks"]
    words += ["--env", "CUDA_VISIBLE_DEVICES=0,1", "--env", "NCCL_DEBUG=INFO"]
    done = hosts.run(
        [sys.executable, "-m", "roxxel_dist", *words, "--", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES $NCCL_DEBUG"],
        cwd=tmp_path,
    )
    assert done.stdout.count("0,1 INFO") == 2, done.stdout + done.stderr
