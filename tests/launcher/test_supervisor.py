"""Whole jobs: their codes, their last words, and that nothing is left of them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.process.interrupt import FORWARD_S

pytestmark = pytest.mark.xdist_group("launch")  # not beside test_worker.py, of whose ranks a launch would tell
Launch = Callable[..., Any]
Alive = Callable[[int], bool]
Until = Callable[[Callable[[], Any], str], None]

# Rank 1 does something when everybody is there; the others stay, with a child behind a shell in another process group.
OTHERS = """
if [ $ROXXEL_PROCESS_ID != 1 ]; then
    timeout 1000 bash -c 'trap "" TERM; sleep 1000 & echo $! > pid.$ROXXEL_PROCESS_ID; wait'
fi
until [ -s pid.0 ] && [ -s pid.2 ]; do sleep 0.02; done
"""


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("echo bye; exit 7", 7, "exit code 7"),
        ("kill -KILL $$", 137, "signal SIGKILL"),
        pytest.param(
            "exec env python3 -X faulthandler -c 'import os; os.kill(os.getpid(), 11)'",
            139,
            "signal SIGSEGV",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_first_failure_ends_the_job(end: str, code: int, words: str, launch: Launch, alive: Alive) -> None:
    job = launch("bash", "-c", OTHERS + end, nprocs=3)
    got, out, err = job.wait()
    assert (got, out) == (code, "")
    assert f"rank 1 failed first: {words} (host {socket.gethostname()}, pid " in err
    last = {7: "bye", 137: "it printed nothing", 139: ""}[code]
    assert last in err.splitlines()[-1]
    if code == 139:
        assert "Fatal Python error: Segmentation fault" in err
    left = [int((job.folder / f"pid.{rank}").read_text()) for rank in (0, 2)]
    assert not any(map(alive, left))
    assert list((job.folder / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGSEGV, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_the_one_that_failed_first_counts_not_those_who_followed(number: int, launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = """
    if [ $ROXXEL_PROCESS_ID = 2 ]; then exec 3> fifo; sleep 0.1; kill -$NUMBER $$; fi
    if [ $ROXXEL_PROCESS_ID = 0 ]; then exec 3< fifo; read -u 3 line; exit 5; fi
    sleep 1000"""
    code, _, err = launch("bash", "-c", script, nprocs=3, env={"NUMBER": str(int(number))}).wait()
    assert code == 128 + number, err
    assert "rank 2 failed first" in err


def test_a_failure_that_a_rank_has_told_needs_no_end_of_it(launch: Launch) -> None:
    """Its connections are still open, so no other rank can have failed because of it."""
    tell = """echo bye; echo '{"failed": 7}' >&${ROXXEL_PIPE%:*}"""
    script = f"[ $ROXXEL_PROCESS_ID != 1 ] || {{ {tell}; }}; sleep 1000"
    code, _, err = launch("bash", "-c", script, nprocs=3).wait()
    assert code == 7
    assert "rank 1 failed first: exit code 7 (" in err
    assert err.splitlines()[-1] == "bye"


def test_success_says_nothing_and_takes_along_what_ranks_left(launch: Launch, alive: Alive, tmp_path: Path) -> None:
    job = launch("bash", "-c", "sleep 1000 & echo $! > pid.$ROXXEL_PROCESS_ID")
    assert job.wait() == (0, "", "")
    assert not any(alive(int(path.read_text())) for path in job.marks("pid.*", 2))
    names = [path.name for path in (tmp_path / "logs").iterdir()]
    assert sorted(names) == ["launcher.json", "launcher.lock"], "no line, no log"


STEP = """
import os, sys
from roxxel_dist.process.progress import Progress
rank = int(os.environ["ROXXEL_PROCESS_ID"])
Progress.from_env(rank).enter(10 + rank)
if rank == 1:
    raise ValueError("bug in the program")
sys.stdin.read() or __import__("time").sleep(1000)
"""


def test_the_traceback_is_read_last_and_the_step_is_named(launch: Launch, tmp_path: Path) -> None:
    code, _, err = launch("env", sys.executable, "-c", STEP).wait()
    assert code == 1
    first, *rest = err.splitlines()
    assert "rank 1 failed first: exit code 1, in step 11 (" in first
    assert str(tmp_path / "logs" / "rank-1.log") in first
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: bug in the program"


@pytest.mark.parametrize("stays", [0, pytest.param(1, marks=pytest.mark.long)])
def test_who_stays_when_another_has_ended_is_a_hang(stays: int, launch: Launch) -> None:
    script = f"[ $ROXXEL_PROCESS_ID != {stays} ] || exec sleep 1000"
    code, _, err = launch("bash", "-c", script, exit_timeout=0.3).wait()
    assert code == 124
    assert f"rank {1 - stays} had ended, but rank {stays} still ran 0.3 s later" in err


STAY = {
    "a thread": "import threading; threading.Thread(target=stay).start()",
    "an exit handler": "import atexit; atexit.register(stay)",
    "its program": "stay()",
}


@pytest.mark.parametrize(
    ("how", "nprocs"),
    [
        pytest.param("a thread", 1, marks=pytest.mark.long),
        ("a thread", 2),
        pytest.param("an exit handler", 2, marks=pytest.mark.cluster),
        pytest.param("its program", 2, marks=pytest.mark.cluster),
    ],
)
def test_who_does_not_exit_is_named_with_its_stack(how: str, nprocs: int, launch: Launch, tmp_path: Path) -> None:
    """The rank beside it waits for it at the end of jax.distributed, and is not named."""
    last = nprocs - 1
    program = f"import os, time\ndef stay():\n    time.sleep(1000)\nif os.environ['ROXXEL_PROCESS_ID'] == '{last}':\n"
    (tmp_path / "stay.py").write_text(f"{program}    {STAY[how]}\n")
    code, _, err = launch("python", "stay.py", nprocs=nprocs, exit_timeout=1.0).wait()
    assert code == 124
    first, second, *stack = [line for line in err.splitlines() if "warning" not in line]
    assert re.fullmatch(
        rf"roxxel-dist: .* rank {last} .* 1 s later and was killed; --exit-timeout sets this limit", first
    )
    assert re.fullmatch(rf"roxxel-dist: rank {last} \(host \S+, pid \d+; log \S+rank-{last}\.log\).*; stack:", second)
    assert any(re.search(r'stay\.py", line 3 in stay', line) for line in stack), err


def test_exit_timeout_0_is_no_limit(launch: Launch) -> None:
    assert launch("bash", "-c", "sleep 0.$ROXXEL_PROCESS_ID", exit_timeout=0).wait()[0] == 0


READY = "touch ready.$ROXXEL_PROCESS_ID; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("number", "trap", "code", "words"),
    [
        (signal.SIGINT, "trap 'echo saved; exit 42' TERM; ", 42, "every rank saved"),
        pytest.param(signal.SIGTERM, "trap 'exit 42' TERM; ", 42, "every rank saved", marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, "trap 'exit 42' TERM; ", 42, "every rank saved", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "", 130, "before the ranks had saved", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "", 143, "before the ranks had saved", marks=pytest.mark.long),
        (signal.SIGTERM, "trap 'exit $((ROXXEL_PROCESS_ID ? 42 : 9))' TERM; ", 9, "rank 0 failed first: exit code 9"),
        (signal.SIGINT, "trap '' TERM; ", 130, "before the ranks had saved"),
    ],
)
def test_a_request_to_stop(number: int, trap: str, code: int, words: str, launch: Launch) -> None:
    job = launch("bash", "-c", trap + READY, grace=0.5 if "''" in trap else 30)
    job.marks("ready.*", 2)
    job.process.send_signal(number)
    got, _, err = job.wait()
    assert got == code
    assert "the ranks get" in err.splitlines()[0]
    assert words in err
    if "saved;" in trap:
        assert job.lines(0)[-1] == job.lines(1)[-1] == "saved"


def test_a_closed_terminal_asks_to_stop_and_the_ranks_can_still_save(launch: Launch) -> None:
    job = launch("bash", "-c", "trap 'echo saved; exit 42' TERM; " + READY)
    job.marks("ready.*", 2)
    job.process.stdout.close()
    job.process.stderr.close()
    job.process.send_signal(signal.SIGHUP)
    assert job.process.wait(60) == 42
    assert job.lines(0)[-1] == "saved"


def test_a_screen_that_goes_away_does_not_end_the_job(launch: Launch) -> None:
    job = launch("bash", "-c", "echo one; until [ -e on ]; do sleep 0.01; done; seq 1000")
    assert job.process.stdout.readline().endswith(b"0 | one\n")
    job.process.stdout.close()
    (job.folder / "on").touch()
    assert job.process.wait(60) == 0
    assert job.process.stderr.read() == b""
    assert len(job.lines(0)) == 1001


def test_the_second_ctrl_c_kills_at_once(launch: Launch, alive: Alive) -> None:
    job = launch("bash", "-c", "trap 'touch asked.$ROXXEL_PROCESS_ID' TERM; " + READY, grace=1000)
    job.marks("ready.*", 2)
    family = job.family()["all"]
    job.process.send_signal(signal.SIGINT)
    job.marks("asked.*", 2)
    time.sleep(FORWARD_S)  # sooner it may be a wrapper that hands the first one on
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.wait()
    assert code == 130
    assert "again: killing" in err
    assert not any(map(alive, family))


def test_sigquit_kills_at_once(launch: Launch, alive: Alive) -> None:
    """Ctrl-\\, or `stop --kill`: no rank is asked to save."""
    job = launch("bash", "-c", "trap 'touch asked.$ROXXEL_PROCESS_ID' TERM; " + READY, grace=1000)
    job.marks("ready.*", 2)
    family = job.family()["all"]
    job.process.send_signal(signal.SIGQUIT)
    code, _, err = job.wait()
    assert code == 131
    assert "killing the ranks" in err
    assert not any(map(alive, family))
    assert not list(job.folder.glob("asked.*"))


def test_what_a_shell_left_behind_may_finish_saving(launch: Launch, tmp_path: Path) -> None:
    inner = "trap 'sleep 0.3; echo saved > saved.$ROXXEL_PROCESS_ID; exit 42' TERM; " + READY
    job = launch("bash", "-c", 'bash -c "$1"; echo', "bash", inner)
    job.marks("ready.*", 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait()[0] == 143, "the shell died of the signal, and says so"
    assert [path.read_text() for path in job.marks("saved.*", 2)] == ["saved\n"] * 2


# In a session of its own, with nothing in its environment, and no child of anybody's in the rank.
DAEMON = """
PID=pid.$ROXXEL_PROCESS_ID
(setsid env -i /bin/bash -c "echo \\$\\$ > tmp.$PID; mv tmp.$PID $PID; exec sleep 1000" < /dev/null &> /dev/null &)
until [ -s pid.0 ] && [ -s pid.1 ]; do sleep 0.02; done
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("exit 0", 0),
        pytest.param("[ $ROXXEL_PROCESS_ID = 0 ] && exit 7; sleep 1000", 7, marks=pytest.mark.long),
        ("[ $ROXXEL_PROCESS_ID = 1 ] || kill -9 $PPID; sleep 1000", 137),
    ],
    ids=["done", "failure", "keeper killed"],
)
def test_what_has_left_the_session_of_a_rank_is_killed_too(end: str, code: int, launch: Launch, alive: Alive) -> None:
    stranger = subprocess.Popen(["sleep", "1000"])
    try:
        job = launch("bash", "-c", DAEMON + end)
        got, _, err = job.wait()
        assert got == code, err
        assert not any(alive(int(path.read_text())) for path in job.marks("pid.?", 2))
        assert alive(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()


def test_what_leaves_a_rank_lives_as_long_as_the_rank(launch: Launch, alive: Alive, until: Until) -> None:
    job = launch("bash", "-c", DAEMON + "[ $ROXXEL_PROCESS_ID = 0 ] || until [ -e on ]; do sleep 0.02; done")
    first, second = (int(path.read_text()) for path in job.marks("pid.?", 2))
    until(lambda: not alive(first), "what rank 0 left to be gone")
    assert alive(second)
    (job.folder / "on").touch()
    assert job.wait()[0] == 0
    assert not alive(second)


def named(pids: list[int], pattern: str) -> list[int]:
    """Those that `pkill -f` would take."""
    return [pid for pid in pids if re.search(pattern, " ".join(psutil.Process(pid).cmdline()))]


def test_every_process_of_a_rank_is_asked_once(launch: Launch) -> None:
    """Also in a process group of its own, where the shell's does not reach; what a handler starts is left alone."""
    inner = "trap 'echo asked >> asked.$ROXXEL_PROCESS_ID; bash -c \"sleep 0.3; echo saved\"; exit 42' TERM; " + READY
    job = launch("bash", "-c", 'set -m; trap : TERM; bash -c "$1"; exit $?', "bash", inner)
    job.marks("ready.*", 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait()[0] == 42
    assert [path.read_text() for path in job.marks("asked.*", 2)] == ["asked\n"] * 2
    assert job.lines(0)[-1] == job.lines(1)[-1] == "saved"


@pytest.mark.parametrize("victim", ["launcher", "agent", pytest.param("agent by its name", marks=pytest.mark.long)])
def test_kill_9_of_launcher_or_agent_leaves_nothing(
    victim: str, launch: Launch, alive: Alive, until: Until, tmp_path: Path
) -> None:
    script = "trap '' TERM HUP; timeout 1000 bash -c 'sleep 1000 & : > ready.$ROXXEL_PROCESS_ID; wait'; true"
    job = launch("bash", "-c", script)
    job.marks("ready.*", 2)
    family = job.family()
    assert len(family["all"]) == 2 + 2 * 5
    assert all(map(alive, family["all"]))
    victims = {
        "launcher": [job.process.pid],
        "agent": family["agent"],
        "agent by its name": named(family["all"], "roxxel_dist.launcher.agent.agent"),
    }
    assert set(family["agent"]) <= set(named(family["all"], "roxxel_dist.launcher.agent.agent"))
    for pid in victims[victim]:
        with contextlib.suppress(ProcessLookupError):  # the end of one may have ended the next
            os.kill(pid, signal.SIGKILL)
    code, _, err = job.wait()
    until(lambda: not any(map(alive, family["all"])), "all processes to be gone")
    assert list((tmp_path / "tmp").iterdir()) == []
    if victim == "launcher":
        assert code == -signal.SIGKILL
    else:
        assert code == 137
        assert "ended before its ranks (signal SIGKILL)" in err


def test_without_its_guard_an_agent_ends(launch: Launch, alive: Alive, until: Until, tmp_path: Path) -> None:
    job = launch("bash", "-c", "timeout 1000 bash -c 'sleep 1000 & : > ready.$ROXXEL_PROCESS_ID; wait'; true")
    job.marks("ready.*", 2)
    family = job.family()
    os.kill(family["guard"][0], signal.SIGKILL)
    code, _, err = job.wait()
    assert code == 137
    assert "ended before its ranks (signal SIGKILL): its guard was killed" in err
    until(lambda: not any(map(alive, family["all"])), "all processes to be gone")


def test_agent_and_guard_killed_at_once_leave_no_rank(launch: Launch, alive: Alive, until: Until) -> None:
    job = launch("bash", "-c", "touch ready.$ROXXEL_PROCESS_ID; exec sleep 1000")
    job.marks("ready.*", 2)
    family = job.family()
    for pid in (*family["guard"], *family["agent"]):
        os.kill(pid, signal.SIGKILL)
    assert job.wait()[0] in (137, 69)  # 69: the launcher had not read yet that the ranks had started
    until(lambda: not any(map(alive, family["all"])), "all ranks to be gone")


def test_a_guard_that_is_killed_wakes_an_agent_that_is_stopped(launch: Launch, alive: Alive, until: Until) -> None:
    job = launch("bash", "-c", "timeout 1000 bash -c 'sleep 1000 & : > ready.$ROXXEL_PROCESS_ID; wait'; true")
    job.marks("ready.*", 2)
    family = job.family()
    os.kill(family["agent"][0], signal.SIGSTOP)
    os.kill(family["guard"][0], signal.SIGKILL)
    assert job.wait()[0] == 137
    until(lambda: not any(map(alive, family["all"])), "all processes to be gone")


def test_a_terminal_that_ends_is_nothing_to_the_agent(launch: Launch, alive: Alive) -> None:
    job = launch("bash", "-c", "trap 'exit 42' TERM; " + READY)
    job.marks("ready.*", 2)
    family = job.family()
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(family["agent"][0], number)
        os.kill(family["guard"][0], number)
    assert all(map(alive, family["agent"] + family["guard"]))
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.wait()
    assert (code, " at " in err) == (42, False), err


CONFIG_ERROR = """
import os, sys, time
time.sleep(0.3 * (os.environ["ROXXEL_PROCESS_ID"] == os.environ["LATE"]))
if os.environ["ROXXEL_PROCESS_ID"] in os.environ["SAYS"]:
    print("roxxel-dist: dim 7 is odd: use 8", file=sys.stderr)
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("says", "late"),
    [("0", "1"), ("01", "0"), *(pytest.param(*row, marks=pytest.mark.long) for row in ("00", "10", ("01", "1")))],
)
def test_a_configuration_error_is_said_once_and_leaves_its_log(
    says: str, late: str, launch: Launch, tmp_path: Path
) -> None:
    log_dir = tmp_path / "runs" / "run_x" / "logs"
    job = launch("env", sys.executable, "-c", CONFIG_ERROR, env={"SAYS": says, "LATE": late}, log_dir=str(log_dir))
    code, out, err = job.wait()
    assert code == 2
    assert (out + err).count("dim 7 is odd: use 8\n") == 1
    assert "failed first" not in err
    assert sorted(path.name for path in log_dir.glob("*.log")) == [f"rank-{rank}.log" for rank in says]


ONE_BY_THE_OTHER = """
import os, sys, time
from roxxel_dist.process.exit_codes import EXIT_LOST_RANK
rank = int(os.environ["ROXXEL_PROCESS_ID"])
with open(f"new.{rank}", "w") as file:
    print(os.getpid(), file=file)
os.rename(file.name, f"pid.{rank}")
while not os.path.exists("go"):
    time.sleep(0.02)
if rank == 0:
    sys.exit(2)
pid = int(open("pid.0").read())
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.02)
sys.exit(EXIT_LOST_RANK)
"""


def test_a_mistake_of_the_user_counts_not_what_follows_from_it(launch: Launch, alive: Alive, until: Until) -> None:
    """The agent, which stands still meanwhile, hears of both at once."""
    job = launch("env", sys.executable, "-c", ONE_BY_THE_OTHER)
    pids = [int(path.read_text()) for path in job.marks("pid.*", 2)]
    agent = job.family()["agent"][0]
    os.kill(agent, signal.SIGSTOP)
    (job.folder / "go").touch()
    until(lambda: not any(map(alive, pids)), "the end of both ranks")
    os.kill(agent, signal.SIGCONT)
    assert job.wait()[0] == 2


@pytest.mark.cluster
def test_a_code_of_2_is_a_failure_like_others_where_a_program_has_spoken(launch: Launch) -> None:
    job = launch("bash", "-c", "echo hours of work; [ $ROXXEL_PROCESS_ID = 0 ] || exit 2; sleep 1000")
    code, _, err = job.wait()
    assert code == 2
    assert "rank 1 failed first: exit code 2" in err
    assert err.splitlines()[-1] == "hours of work"
    assert job.lines(0) == job.lines(1) == ["hours of work"]
    code, _, err = launch("bash", "-c", "exit 2", log_dir=str(job.folder / "silent")).wait()
    assert (code, "exit code 2" in err) == (2, True)


def test_a_code_of_124_is_no_hang_where_nobody_waited(launch: Launch) -> None:
    code, _, err = launch("bash", "-c", "[ $ROXXEL_PROCESS_ID = 1 ] || exit 124; sleep 1000").wait()
    assert code == 124
    assert "rank 0 failed first: exit code 124" in err


def test_a_failure_on_one_host_ends_the_others(launch: Launch, alive: Alive) -> None:
    script = "echo $$ > pid.$ROXXEL_PROCESS_ID; [ $ROXXEL_PROCESS_ID != 3 ] || exit 7; exec sleep 1000"
    job = launch("bash", "-c", f"sleep 0.2; {script}", nprocs=4, hosts=["left", "right"])
    code, _, err = job.wait()
    assert code == 7
    assert "rank 3 failed first: exit code 7 (host right" in err
    assert not any(alive(int(path.read_text())) for path in job.folder.glob("pid.*"))


def test_a_lost_agent_ends_the_other_hosts(launch: Launch, alive: Alive, until: Until) -> None:
    job = launch("bash", "-c", READY, nprocs=2, hosts=["left", "right"])
    job.marks("ready.*", 2)
    agents = [child.pid for child in psutil.Process(job.process.pid).children()]
    family = [child.pid for child in psutil.Process(job.process.pid).children(recursive=True)]
    os.kill(agents[1], signal.SIGKILL)
    code, _, err = job.wait()
    assert code == 137
    assert "the agent on host right ended before its ranks" in err
    until(lambda: not any(map(alive, family)), "all processes to be gone")


def test_an_agent_that_says_nothing_is_taken_for_gone(
    launch: Launch, alive: Alive, until: Until, limits: Limits
) -> None:
    job = launch("bash", "-c", READY, nprocs=2, hosts=["left", "right"], limits=limits)
    job.marks("ready.*", 2)
    guards = psutil.Process(job.process.pid).children()
    family = [child.pid for child in psutil.Process(job.process.pid).children(recursive=True)]
    (agent,) = guards[1].children()
    os.kill(agent.pid, signal.SIGSTOP)
    code, _, err = job.wait()
    assert code == 137
    assert f"host right has sent nothing for {limits.silent_s:g} s" in err
    until(lambda: not any(map(alive, family)), "all processes to be gone")


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = JobSpec(command=("touch", str(tmp_path / "x")), nprocs=1, run_id="r", log_dir=tmp_path, port=port)
        assert run(job, LocalBackend()) == 69
    assert f"--port {port}" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
