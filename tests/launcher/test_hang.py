"""Which rank is named as stuck: the decision over records and a clock, and real ranks that stop."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.launcher.agent.ranks import ask_for_stack
from roxxel_dist.launcher.control.supervisor import environment_report, hang_report
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.launcher.policy.hang import LEAST_S, LIMITS_S, UNKNOWN_S, HangDetector, StepTimes
from roxxel_dist.process.progress import ACTIVITIES, Record

Launch = Callable[..., Any]
STILL_S = Limits().still_s
Alive = Callable[[int], bool]


def at(entered: int, activity: str = "step", when: float = 0.0, phase: int = 0) -> Record:
    return Record(entered=entered, activity=activity, time=when, phase=phase, pid=1)


def watch(*records: Record, step_timeout: float | None = 10.0) -> HangDetector:
    """A watch that saw rank 0, 1, … at time 0."""
    one = HangDetector(step_timeout, still_s=STILL_S)
    for rank, record in enumerate(records):
        one.observe(rank, record, 0.0)
    return one


def looked(one: HangDetector, until: float) -> Any:
    """What it says at `until`, having been asked every second."""
    for now in range(int(until)):
        assert one.check(now) is None, f"too early, at {now}"
    return one.check(until)


def test_the_rank_that_is_behind_is_named_when_its_time_is_over() -> None:
    hang = looked(watch(at(6), at(5, phase=2), at(6), at(7)), 10.5)
    assert (hang.rank, hang.step, hang.phase, hang.activity, hang.limit, hang.tied) == (1, 5, 2, "step", 10.0, 1)
    assert hang.seconds == 10.5


@one_test("activity", sorted(name for name, limit in LIMITS_S.items() if limit < math.inf))
def test_what_is_no_step_has_a_limit_of_its_own_and_excuses_the_others(activity: str) -> None:
    hang = looked(watch(at(6), at(5, activity), at(6)), LIMITS_S[activity] + 0.5)
    assert (hang.rank, hang.activity, hang.limit) == (1, activity, LIMITS_S[activity])
    assert activity in hang_report(hang, "h")


@pytest.mark.parametrize(
    "records",
    [
        (at(6), at(5, "save")),
        (at(5), at(5, "save")),  # rank 0 waits in the barrier of the save, and has said nothing about it
        (at(6), Record()),  # a rank that has not begun
        (at(6), at(6, "")),  # a program that does something else after its training
    ],
)
def test_nobody_is_stuck_while_somebody_has_time_left(records: tuple[Record, ...]) -> None:
    assert looked(watch(*records), 100) is None


def test_a_rank_that_moves_is_not_stuck_and_one_that_ended_is_forgotten() -> None:
    one = watch(at(5), at(5))
    for now in range(1, 30):
        one.observe(0, at(5 + now), now)
        one.observe(1, at(5 + now // 5), now)
        assert one.check(now) is None
    one.forget(1)
    assert one.check(30) is None


def test_ranks_that_do_not_wait_for_each_other_are_named_too() -> None:
    one = watch(at(5), at(5))
    for now in range(1, 11):
        one.observe(0, at(5 + now), now)
        assert one.check(now) is None
    hang = one.check(11)
    assert hang is not None
    assert hang.rank == 1


def test_the_limit_follows_the_median_step_of_the_phase() -> None:
    one = watch(at(1), step_timeout=None)
    assert one.limit(at(1)) == UNKNOWN_S
    for step, when in ((2, 20.0), (4, 60.0), (5, 500.0)):  # 20 s, twice 20 s, and a slow one
        one.observe(0, at(step, when=when), when)
    assert one.limit(at(5)) == 200.0
    assert one.limit(at(5, phase=1)) == UNKNOWN_S, "another phase may have longer steps"
    assert watch(at(1), step_timeout=3.0).limit(at(5)) == 3.0
    quick = watch(at(1), step_timeout=None)
    for step in range(2, 9):
        quick.observe(0, at(step, when=step / 100), step / 100)
    assert quick.limit(at(8)) == LEAST_S


def attempt(times: StepTimes, *steps: tuple[int, float], phase: int = 1) -> HangDetector:
    """One in which a rank restores a checkpoint and then enters these steps at these times."""
    one = HangDetector(times=times, still_s=STILL_S)
    one.observe(0, at(0, "restore"), 0.0)
    for step, when in steps:
        one.observe(0, at(step, when=when, phase=phase), when)
    return one


@one_test(
    ("earlier", "now", "limit"),
    [
        ([(1, 0.0), (2, 30.0), (3, 50.0), (4, 70.0), (5, 90.0)], [(5, 0.0)], 300.0),  # the first step compiles
        ([(1, 0.0), (2, 30.0), (3, 50.0), (4, 70.0), (5, 90.0)], [(5, 0.0), (6, 40.0)], 200.0),  # a later one does not
        ([(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)], [(4, 0.0)], LEAST_S),
        ([(1, 0.0), (2, 900.0), (3, 901.0), (4, 902.0), (5, 903.0)], [(5, 0.0)], 9000.0),
        ([(1, 0.0), (2, 30.0)], [(5, 0.0)], UNKNOWN_S),  # too little is known
        ([], [(5, 0.0)], UNKNOWN_S),
    ],
)
def test_the_times_of_steps_survive_an_attempt(
    earlier: list[tuple[int, float]], now: list[tuple[int, float]], limit: float
) -> None:
    times = StepTimes()
    attempt(times, *earlier)
    one = attempt(times, *now)
    begun = now[-1][1]
    assert one.check(begun) is None
    for second in range(int(limit)):
        assert one.check(begun + second) is None
    hang = one.check(begun + limit + 1)
    assert hang is not None
    assert (hang.rank, hang.limit) == (0, limit)


def test_the_times_of_another_phase_say_nothing_and_no_rank_is_measured_by_the_first_step_of_another() -> None:
    times = StepTimes()
    attempt(times, (1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0))
    assert attempt(times, (5, 0.0), phase=2).limit(at(5, phase=2), first=True) == UNKNOWN_S
    compiles = HangDetector(times=StepTimes(), still_s=STILL_S)
    compiles.observe(0, at(1), 0.0)
    compiles.observe(0, at(1, "compile", when=1.0), 1.0)  # within the step
    compiles.observe(0, at(1, when=200.0), 200.0)
    compiles.observe(0, at(2, when=210.0), 210.0)
    assert compiles.times.first == {0: 210.0}
    assert dict(compiles.times.usual) == {0: deque([10.0])}


def test_what_happened_between_steps_is_not_the_time_of_a_step() -> None:
    one = watch(at(1), step_timeout=None)
    for n in range(2, 30):
        one.observe(0, at(n - 1, "save", when=100.0 * n), 100.0 * n)
        one.observe(0, at(n, when=100.0 * n + 50), 100.0 * n + 50)
    assert one.limit(at(30)) == UNKNOWN_S


def test_a_launcher_that_stood_still_blames_nobody() -> None:
    one = watch(at(6), at(5))
    assert looked(one, 3) is None
    assert one.check(3600) is None
    assert one.check(3602) is None
    assert not any(one.check(now) for now in range(3603, 3608))
    hang = one.check(3610)
    assert hang is not None
    assert hang.rank == 1


def test_what_is_heard_after_a_pause_of_the_launcher_is_of_no_later_time() -> None:
    one = watch(at(6), at(5))
    assert looked(one, 3) is None
    for rank in (0, 1):
        one.observe(rank, at(7), 3600.0)
    assert [one.check(now) is None for now in (3600, 3602, 3606, 3609)] == [True] * 4
    assert one.check(3611) is not None


def test_a_stopped_rank_is_named_first_then_one_that_is_behind_and_does_not_answer() -> None:
    one = watch(at(6), at(6), at(7))
    hang = looked(one, 11)
    assert (hang.rank, hang.tied) == (0, 2)
    assert "it may be another" in hang_report(hang, "h")
    asked = {"now": 12.0}
    assert one.refine(hang, stopped=(), silent=(), **asked) == hang
    assert one.refine(hang, stopped={2}, silent={2, 1}, **asked).rank == 2
    assert one.refine(hang, stopped=(), silent={2, 1}, **asked).rank == 1
    assert one.refine(hang, stopped=(), silent={2}, **asked) == hang, "ahead of the others, and perhaps only slow"
    assert one.refine(hang, stopped={0, 1, 2}, silent=(), **asked) == hang


def test_a_rank_that_does_not_come_to_join_the_others_is_named() -> None:
    """Whether it has said nothing at all or hangs in its imports; jax would abort those that wait for it."""
    waits, starts, silent = at(0, "join"), at(0, "start"), Record()
    for absent in (starts, silent):
        one = watch(waits, absent, waits)
        hang = looked(one, LIMITS_S["join"] + 1)
        assert (hang.rank, hang.step, hang.limit, hang.tied) == (1, 0, LIMITS_S["join"], 1)
        assert one.refine(hang, stopped=(), silent={0}, now=290.0) == hang, "a rank that waits is not to blame"
        assert one.refine(hang, stopped={1}, silent={0}, now=290.0).rank == 1
        assert "rank 1 on host h is stuck: it has not come to jax.distributed.initialize" in hang_report(hang, "h")
    assert looked(watch(starts, silent), LIMITS_S["join"] + 1) is None
    hang = looked(watch(waits, waits), LIMITS_S["join"] + 1)
    assert (hang.rank, hang.tied, hang.activity) == (0, 2, "join")


@one_test(
    ("step_timeout", "records", "heard", "now", "stuck"),
    [
        (90, (Record(), Record()), None, 91, 0),  # no rank of a program without steps has printed a line
        (90, (Record(), Record()), 10, 95, None),  # rank 0 prints for all
        (90, (Record(), Record()), 10, 101, 0),
        (None, (Record(), Record()), None, 500, None),  # without a limit
        (90, (at(3), Record()), None, 500, None),  # one that reports may be slow to come to it
        (90, (Record(activity="join"),), None, 100, None),  # that has a limit of its own
        (1, (Record(), Record()), None, 30, None),  # a start takes longer than a step
    ],
)
def test_a_program_that_reports_no_steps_is_limited_by_its_silence(
    step_timeout: float | None, records: tuple[Record, ...], heard: float | None, now: float, stuck: int | None
) -> None:
    detector = HangDetector(step_timeout, still_s=STILL_S)
    for rank, record in enumerate(records):
        detector.observe(rank, record, 0.0)
    if heard is not None:
        detector.hear(heard)
    hang = looked(detector, now)
    assert (None if hang is None else hang.rank) == stuck
    if hang is not None and heard is not None:
        assert "no rank has printed a line, for 91 s (limit 90 s; --step-timeout sets it" in hang_report(hang, "h")


def test_what_the_environment_holds_is_said_of_a_hang() -> None:
    assert environment_report({}) == []
    (line,) = environment_report({"NCCL_SOCKET_IFNAME": "eth9", "http_proxy": "http://10.9.9.9:3128"})
    assert "can part them: NCCL_SOCKET_IFNAME=eth9, http_proxy=http://10.9.9.9:3128" in line


def test_the_report_names_all() -> None:
    hang = looked(watch(at(6), at(5, phase=2)), 11)
    assert hang_report(hang, "node") == (
        "rank 1 on host node is stuck: in step 5, phase 2, for 11 s (limit 10 s; --step-timeout sets it)"
    )
    plain = looked(watch(at(6), at(5)), 11)
    assert "is stuck: in step 5, for 11 s" in hang_report(plain, "node")
    assert set(LIMITS_S) == set(ACTIVITIES) - {"", "step"}


def test_a_launcher_that_is_slow_finds_a_hang_all_the_same() -> None:
    """It has listened in each of its turns; one that stood still, once, has not."""
    slow = watch(at(6), at(5))
    assert [slow.check(now) is not None for now in (0, 6, 12, 18)] == [False, False, False, True]
    stopped = watch(at(6), at(5))
    assert [stopped.check(now) for now in (0, 1, 1000, 1001, 2000, 2001)] == [None] * 6


def test_a_process_that_catches_a_signal_for_its_own_ends_is_not_asked() -> None:
    script = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('mine')); print(); time.sleep(1000)"
    words = [sys.executable, "-uc", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert ask_for_stack(process.pid, process.pid)[1] is False
        process.kill()
        assert process.stdout.read() == b""


# Every rank enters step n + 1 when all have finished step n, as in training; rank `STUCK` sleeps in step 5.
RANKS = """
import faulthandler, os, signal, time
from pathlib import Path
from roxxel_dist.process.exit_codes import STACK_SIGNAL
from roxxel_dist.process.progress import Progress
faulthandler.register(STACK_SIGNAL, all_threads=True)
rank, size = int(os.environ["ROXXEL_PROCESS_ID"]), int(os.environ["ROXXEL_NUM_PROCESSES"])

def read_a_batch_that_never_comes():
    Path("stuck").touch()
    time.sleep(1000)

def wait_for_the_others(step):
    Path(f"done.{step}.{rank}").touch()
    while any(not Path(f"done.{step}.{other}").exists() for other in range(size)):
        time.sleep(0.01)

progress = Progress.from_env(rank)
for step in range(1, 7):
    progress.enter(step, phase=3)
    if step > 1:
        wait_for_the_others(step - 1)  # as a device that has a step in hand
    if step == 5 and str(rank) == os.environ.get("STUCK"):
        read_a_batch_that_never_comes()
    wait_for_the_others(f"{step}.dispatched") if os.environ.get("SYNC") else None
    if step == 5:
        Path(f"pid.{rank}").write_text(str(os.getpid()))
wait_for_the_others(6)
time.sleep(1000 if "STOP" in os.environ else 0)
"""


def assert_stuck_rank_is_named(launch: Launch, culprit: int, tmp_path: Path, command: tuple[str, ...]) -> None:
    job = launch(*command, nprocs=3, step_timeout=1.0, env={"STUCK": str(culprit)})
    code, _, err = job.wait()
    assert code == 124
    first = f"roxxel-dist: rank {culprit} on host {socket.gethostname()} is stuck: in step 5, phase 3, for "
    assert first in err, err
    assert "it may be another" not in err
    assert f"stack of rank {culprit}; its log is {tmp_path / 'logs' / f'rank-{culprit}.log'}" in err
    assert "in read_a_batch_that_never_comes" in err
    for rank in range(3):
        where = "read_a_batch_that_never_comes" if rank == culprit else "wait_for_the_others"
        assert f"in {where}" in job.log(rank)


PLAIN = ("env", sys.executable, "-c", RANKS)


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_stuck_rank_is_named_with_its_stack(culprit: int, launch: Launch, tmp_path: Path) -> None:
    assert_stuck_rank_is_named(launch, culprit, tmp_path, PLAIN)


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_a_stuck_rank_is_named_20_of_20(number: int, launch: Launch, tmp_path: Path) -> None:
    assert_stuck_rank_is_named(launch, number % 3, tmp_path, PLAIN)


@pytest.mark.long
def test_a_stuck_python_script_with_jax(launch: Launch, tmp_path: Path) -> None:
    """The worker's own answer to the question for stacks, beside the threads of jax."""
    (tmp_path / "ranks.py").write_text(RANKS.replace("faulthandler.register(STACK_SIGNAL, all_threads=True)\n", ""))
    assert "faulthandler.register" not in (tmp_path / "ranks.py").read_text()
    assert_stuck_rank_is_named(launch, 1, tmp_path, ("python", "ranks.py"))


def assert_stopped_rank_is_named(launch: Launch, culprit: int, until: Callable[..., None]) -> None:
    """A SIGSTOP in the middle of steps that all ranks do together."""
    job = launch(*PLAIN, nprocs=3, step_timeout=1.0, env={"STUCK": str(-1), "SYNC": "1", "STOP": "1"})
    files = job.marks("pid.*", 3)
    until(lambda: all(path.stat().st_size for path in files), "pids")
    pids = [int(path.read_text()) for path in files]
    os.kill(pids[culprit], signal.SIGSTOP)
    code, _, err = job.wait()
    assert code == 124
    assert f"roxxel-dist: rank {culprit} on host " in err, err
    assert f"rank {culprit} gave no stack (stopped" in err
    assert "it may be another" not in err
    for rank in {0, 1, 2} - {culprit}:
        assert "most recent call first" in job.log(rank)


@pytest.mark.parametrize("culprit", [1])
def test_a_stopped_rank_is_named(culprit: int, launch: Launch, until: Callable[..., None]) -> None:
    assert_stopped_rank_is_named(launch, culprit, until)


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_a_stopped_rank_is_named_20_of_20(number: int, launch: Launch, until: Callable[..., None]) -> None:
    assert_stopped_rank_is_named(launch, number % 3, until)


def test_a_program_that_tells_no_steps_has_the_limit_that_is_said_at_the_start(launch: Launch) -> None:
    code, _, err = launch("bash", "-c", "sleep 1", step_timeout=0.2).wait()
    assert (code, err.count("\n")) == (0, 1), err
    assert "if not, no rank may print a line for 60 s" in err
    assert launch("bash", "-c", "true").wait() == (0, "", "")


def test_a_slow_save_is_no_hang(launch: Launch) -> None:
    script = """
import os, time
from roxxel_dist.process.progress import Progress
rank = int(os.environ["ROXXEL_PROCESS_ID"])
progress = Progress.from_env(rank)
if rank == 0:
    progress.enter(1)
    with progress.doing("save"):
        open("saving", "w").close()
        time.sleep(1)
        open("saved", "w").close()
        time.sleep(1)  # rank 1 has ended before the save, also on a busy machine
else:
    while not os.path.exists("saving"):
        time.sleep(0.01)
    progress.enter(1)
    while not os.path.exists("saved"):
        time.sleep(0.01)
"""
    code, out, err = launch("env", sys.executable, "-c", script, step_timeout=0.2).wait()
    assert (code, out, "stuck" in err) == (0, "", False), err


def test_a_process_that_does_not_listen_is_named_and_not_killed_by_the_question(launch: Launch) -> None:
    script = f'{sys.executable} -c "$1" || touch ended.$ROXXEL_PROCESS_ID'
    job = launch("bash", "-c", script, "bash", QUIET, step_timeout=0.5)
    code, _, err = job.wait()
    assert code == 124
    assert "is stuck: in step 1" in err
    assert "gave no stack" in err
    assert not list(job.folder.glob("ended.*")), "the question has killed a rank"


QUIET = """
import os
from roxxel_dist.process.progress import Progress
Progress.from_env(int(os.environ["ROXXEL_PROCESS_ID"])).enter(1)
__import__("time").sleep(1000)
"""


def test_a_hang_is_restarted_and_the_same_one_again_is_the_end(launch: Launch, tmp_path: Path) -> None:
    begun = time.monotonic()
    code, _, err = launch("env", sys.executable, "-c", QUIET, nprocs=1, step_timeout=0.5, max_restarts=3).wait()
    assert code == 124
    assert re.findall(r"restart \d of 3", err) == ["restart 1 of 3"]
    assert "rank 0 failed in step 1 in an earlier attempt too" in err
    assert time.monotonic() - begun < 50
