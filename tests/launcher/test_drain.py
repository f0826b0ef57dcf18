"""Requests to the ranks to save and exit: which processes get them, and what the launcher reports."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import is_waiting_spare, write_namesakes

from roxxel_dist.launcher.control.supervisor import saved
from roxxel_dist.launcher.policy.outcome import AttemptResult, HostLost, RankExit, is_drain
from roxxel_dist.process import interrupt

Launch = Callable[..., Any]


def ends(*codes: int, killed: bool = False) -> list[RankExit]:
    return [
        RankExit(rank=n, host="h", pid=n + 1, code=code, killed_by_us=killed, step=3) for n, code in enumerate(codes)
    ]


@pytest.mark.parametrize(
    ("more", "drain"),
    [
        ({"requested": signal.SIGINT}, True),
        ({"host_change": "to go on with h2"}, True),
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
        pytest.param([sys.executable, "pool.py"], marks=pytest.mark.long),  # workers of a pool
        pytest.param(["bash", "-c", f"{sys.executable} pool.py; exit $?"], marks=pytest.mark.long),  # of a shell
        ["bash", "-c", f"bash -c '{sys.executable} pool.py; exit $?'; exit $?"],
        pytest.param(["env", "A=b", sys.executable, "pool.py"], marks=pytest.mark.long),
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
        ("launcher", signal.SIGUSR2),
        ("steps", signal.SIGTERM),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("launcher", signal.SIGXCPU),
                ("launcher", signal.SIGTERM),
                ("launcher", signal.SIGUSR1),
                ("steps", signal.SIGUSR1),
                ("steps", signal.SIGUSR2),
            )
        ),
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
    assert re.search(rf"{signal.Signals(number).name}( at \S+)?: the ranks get 30 s to save and exit", err)


SAVES = (
    "trap 'sleep .4; touch saved.$ROXXEL_PROCESS_ID; exit 42' TERM; touch up.$ROXXEL_PROCESS_ID; "
    "while :; do sleep .1; done"
)
TERM, HUP, INT, USR1 = signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1


@pytest.mark.parametrize(
    ("numbers", "tree"),
    [([TERM, HUP], True), ([INT, INT], False),
     *(pytest.param(*row, marks=pytest.mark.long)
       for row in (([USR1, TERM], False), ([TERM, HUP], False), ([HUP, TERM], True), ([INT, TERM], False),
                   ([TERM, TERM], True)))],
    ids=lambda value: "+".join(number.name for number in value) if isinstance(value, list) else "",
)  # fmt: skip
def test_two_signals_of_a_system_are_one_request(
    numbers: list[signal.Signals], tree: bool, launch: Launch, tmp_path: Path
) -> None:
    """To the launcher, or, as systemd stops a session, to each process of the tree."""
    job = launch("bash", "-c", SAVES, nprocs=2)
    job.marks("up.*", 2)
    asked = [job.process.pid, *(job.family()["all"] if tree else [])]
    for number in numbers:
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.02)
    code, _, err = job.wait()
    assert (code, len(list(tmp_path.glob("saved.*")))) == (42, 2), err
    assert "killing" not in err


@pytest.mark.skipif(shutil.which("timeout") is None, reason="GNU timeout is not here")
def test_the_request_of_gnu_timeout_is_one(tmp_path: Path) -> None:
    """It signals the launcher, and then its own process group, in which the launcher is."""
    words = ["timeout", "--signal=TERM", "2", sys.executable, "-m", "roxxel_dist", "launch", "local", "--nprocs", "2"]
    done = subprocess.run(
        [*words, "--", "bash", "-c", SAVES],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 124, done.stderr
    assert "every rank saved and exited (42)" in done.stderr


def test_a_person_repeats_a_request_to_kill(launch: Launch, tmp_path: Path) -> None:
    job = launch("bash", "-c", "trap 'touch asked' TERM; touch up; while :; do sleep .1; done", nprocs=1)
    job.marks("up", 1)
    job.process.send_signal(INT)
    job.marks("asked", 1)
    time.sleep(interrupt.FORWARD_S)
    job.process.send_signal(INT)
    code, _, err = job.wait()
    assert code == 130, err
    assert "Ctrl-C or stop again: killing the ranks" in err


PHASES = (
    "trap 'sleep 1; touch saved.$ROXXEL_PROCESS_ID; exit 42' TERM; touch up.$ROXXEL_PROCESS_ID.$ROXXEL_ATTEMPT; "
    "[ $ROXXEL_ATTEMPT = 0 ] || exit 0; while :; do sleep .1; done"
)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("flags", "ranks_after", "words"),
    [
        (["--min-hosts", "1"], 1, "going on without h2: 1 of 2 devices"),
        ([], 2, "the job needs h2: it starts again there"),
        (["--max-restarts", "0"], 0, "SIGTERM at h2: the ranks get 30 s to save and exit"),
    ],
    ids=["elastic", "all needed", "no restarts"],
)
def test_sigterm_at_an_agent_is_a_preemption_of_its_host(
    flags: list[str], ranks_after: int, words: str, cluster: Callable[..., Any], until: Callable[..., None],
    tmp_path: Path,
) -> None:  # fmt: skip
    """As an init system signals the processes of a host that goes down: all ranks save, not those there alone."""
    hosts = cluster(2)
    launch = ["launch", "ssh", "--hosts", "h1,h2", "--ssh-config", hosts.ssh_config, *flags]
    job = hosts.popen(
        [sys.executable, "-m", "roxxel_dist", *launch, "--", "bash", "-c", PHASES],
        cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until(lambda: len(list(tmp_path.glob("up.*.0"))) == 2, "the ranks")
    agents = [pid for pid in hosts.processes("h2") if "launcher.agent.agent" in " ".join(psutil.Process(pid).cmdline())]
    for pid in agents:
        os.kill(pid, TERM)
    until(lambda: len(list(tmp_path.glob("saved.*"))) == 2, "both saves")
    if ranks_after == 2:  # the machine goes down, and comes back
        for pid in hosts.processes("h2"):
            with suppress(psutil.NoSuchProcess):
                if "roxxel_dist.launcher." in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == (0 if ranks_after else 42), out
    assert len(list(tmp_path.glob("up.*.1"))) == ranks_after, out
    assert words in out
    assert "restart 1 of" not in out, "a preemption counts for nothing"


EARLY = """
import os, runpy, signal, sys
class Sends:  # SIGTERM to this process when it comes to an import
    def __init__(self, name):
        self.name = name
    def find_spec(self, name, *_):
        if name == self.name:
            self.name = ""
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Sends(sys.argv[1]))
sys.argv[1:] = "launch local --nprocs 1 -- touch started".split()
runpy.run_module("roxxel_dist", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    "module", ["roxxel_dist.process.interrupt", "roxxel_dist.cli", "roxxel_dist.launcher.control.supervisor"]
)
def test_the_first_process_of_a_container_hears_a_request_from_its_first_moment_on(module: str, tmp_path: Path) -> None:
    """The kernel drops signals for which that process has no handler."""
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", EARLY, module]
    done = subprocess.run(words, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / "started").exists()) == (143, False), done.stderr


def test_a_rank_that_a_batch_system_has_ended_was_preempted(launch: Launch, tmp_path: Path) -> None:
    job = launch("bash", "-c", "[ $ROXXEL_ATTEMPT = 1 ] || kill -USR1 $$; sleep 1", nprocs=1, max_restarts=1)
    code, _, err = job.wait()
    assert code == 0
    assert re.search(r"preempted; restart .* [(]it counts for nothing[)]", err)


MAIN = """
import os, sys, time
from roxxel_dist.process.progress import Progress
rank, attempt = int(os.environ["ROXXEL_PROCESS_ID"]), int(os.environ["ROXXEL_ATTEMPT"])
progress = Progress.from_env(rank)
for step in range(1000 * attempt + 1, 1000 * attempt + (10 if attempt else 900)):
    progress.enter(step)
    if os.path.exists("go") and attempt == 0:
        os.kill(os.getpid(), 9)
    time.sleep(0.1)
print("it ran as", os.getpid())
"""


@pytest.mark.long
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
