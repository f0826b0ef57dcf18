"""When a job is started again: the tables, and whole jobs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.launcher.policy.outcome import (
    AttemptResult,
    AttemptSummary,
    Cause,
    HostLost,
    RankExit,
    classify,
    has_come_to_nothing,
    next_action,
    summary,
)
from roxxel_dist.process.exit_codes import EXIT_FILES, EXIT_LOST_RANK, EXIT_PORT, EXIT_RUNTIME

Launch = Callable[..., Any]
Alive = Callable[[int], bool]


def ends(*codes: int, step: int = 0) -> list[RankExit]:
    """Rank 0 ended first and by itself; a 9 after it is the launcher's doing."""
    return [
        RankExit(rank=n, host="h", pid=n + 1, code=code, killed_by_us=n > 0 and code == -9, step=step)
        for n, code in enumerate(codes)
    ]


LOST = HostLost(host="h", code=137, text="the agent is gone")
HANG = Hang(rank=2, step=7, phase=0, activity="step", seconds=61, limit=60)
DONE, REQUESTED, PREEMPTED, INFRA, USER = Cause


@one_test(
    ("codes", "more", "cause"),
    [
        ((0, 0), {}, DONE),
        ((42, 42), {}, PREEMPTED),
        ((42, 0), {}, PREEMPTED),
        ((-signal.SIGTERM, -9), {}, PREEMPTED),
        ((128 + signal.SIGTERM, -9), {}, PREEMPTED),
        ((-signal.SIGHUP, -9), {}, PREEMPTED),
        ((-signal.SIGKILL, -6), {}, INFRA),
        ((128 + signal.SIGKILL, -9), {}, INFRA),
        ((-signal.SIGBUS, -9), {}, INFRA),
        ((-signal.SIGSEGV, 1), {}, INFRA),
        ((-signal.SIGABRT, -9), {}, INFRA),
        ((1, -signal.SIGKILL), {}, USER),  # the launcher killed rank 1
        ((1, -signal.SIGSEGV), {}, INFRA),  # that crash is why rank 0 gave up
        ((-signal.SIGILL, -9), {}, USER),
        ((-signal.SIGFPE, -9), {}, USER),
        ((-signal.SIGINT, -9), {}, USER),
        ((1, -9), {}, USER),
        ((EXIT_RUNTIME, -9), {}, INFRA),
        ((EXIT_RUNTIME, 1), {}, INFRA),
        ((2, -9), {}, USER),
        ((7, -9), {}, USER),
        ((126, -9), {}, USER),
        ((127, -9), {}, USER),
        ((0, -9), {"late": True}, USER),
        ((-9, -9), {"hang": HANG}, INFRA),
        ((), {"lost": LOST}, INFRA),
        ((1,), {"lost": LOST}, INFRA),  # the connections to that host broke
        ((), {"lost": LOST, "hosts": 2, "cut": {LOST.host, "other"}}, PREEMPTED),  # what all go through was replaced
        ((), {"lost": LOST, "hosts": 3, "cut": {LOST.host, "other"}}, INFRA),
        ((), {"lost": LOST, "hosts": 1, "cut": {LOST.host}}, INFRA),  # the host, or its link
        ((), {"lost": LOST, "departing": [LOST.host]}, PREEMPTED),  # it went before its ranks had saved
        ((), {"lost": LOST, "departing": ["other"]}, INFRA),
        ((143, -9), {"host_change": "h2 was asked to end", "departing": ["h2"]}, PREEMPTED),
        ((42, 42), {"requested": 2}, REQUESTED),
        ((-15, -15), {"requested": 15}, REQUESTED),
        ((-9, -6), {"requested": 15}, REQUESTED),
        ((0, 0), {"requested": 15}, REQUESTED),
    ],
)
def test_why_an_attempt_ended(codes: tuple[int, ...], more: dict[str, Any], cause: Cause) -> None:
    assert classify(AttemptResult(exits=ends(*codes), **more)) is cause


@pytest.mark.parametrize("code", [EXIT_PORT, EXIT_FILES, EXIT_LOST_RANK])
def test_what_is_of_no_ranks_making_is_tried_again(code: int) -> None:
    """A port that was taken, a file system that is away: it comes before the first step each time, from one rank."""
    told = [summary(AttemptResult(exits=ends(code)), seconds=1.0, counts=True)] * 2
    assert told[0].cause is INFRA
    assert next_action(told, 3).again
    assert next_action(told, 1).code == 75


def test_who_is_to_blame() -> None:
    failed = summary(AttemptResult(exits=ends(-9, -6, step=5), reached=6), seconds=3.0, counts=False)
    assert failed == AttemptSummary(
        cause=INFRA, code=137, rank=0, host="h", step=5, reached=6, counts=True, seconds=3.0
    )
    hung = summary(AttemptResult(exits=ends(-9, -9), hang=HANG, hang_host="b"), seconds=3.0, counts=True)
    assert (hung.rank, hung.host, hung.step, hung.code, hung.counts) == (2, "b", 7, 124, True)
    assert not summary(AttemptResult(exits=ends(-9)), seconds=1, counts=False).counts


def failure(rank: int | None, step: int, reached: int | None = None, **more: Any) -> AttemptSummary:
    fields = {"cause": INFRA, "code": 137, "counts": True, **more}
    return AttemptSummary(rank=rank, step=step, reached=step if reached is None else reached, **fields)


PREEMPTION = AttemptSummary(cause=PREEMPTED, code=42, reached=5, counts=True, seconds=1000)
IDLE = AttemptSummary(cause=PREEMPTED, code=42, reached=5, counts=True, seconds=1)
CRASHES = [failure(0, step) for step in (5, 6, 7, 8)]


@one_test(
    ("attempts", "limit", "again", "code", "words"),
    [
        (CRASHES[:1], 3, True, 0, "restart 1 of 3, immediately"),
        (CRASHES[:3], 3, True, 0, "restart 1 of 3, immediately (the job got on, so the count began anew)"),
        (CRASHES, 1, True, 0, "restart 1 of 1, immediately"),
        ([CRASHES[0], failure(1, 4)], 3, True, 0, "restart 2 of 3, in 0.5 s"),
        ([CRASHES[3], *CRASHES[:3]], 9, True, 0, "restart 4 of 9, in 8 s"),
        ([CRASHES[0], failure(1, 4), CRASHES[1]], 9, True, 0, "restart 1 of 9, immediately"),
        (
            CRASHES[:1] + [failure(n, 4) for n in (1, 2, 3)],
            3,
            False,
            75,
            "no restart is left: --max-restarts is 3, and",
        ),
        (CRASHES[:1], 0, False, 137, ""),
        ([PREEMPTION] * 20 + CRASHES[:1], 3, True, 0, "restart 1 of 3"),
        (
            [failure(0, 5), failure(1, 5), failure(0, 5)],
            9,
            False,
            137,
            "rank 0 failed in step 5 in an earlier attempt too",
        ),
        ([failure(0, 5), failure(0, 6, 9), failure(1, 6)], 9, True, 0, "restart 2 of 9"),
        ([failure(1, 0)], 3, True, 0, "restart 1 of 3, immediately"),  # starts of many hosts fail for many reasons
        ([failure(1, 0), failure(0, 0)], 3, True, 0, "restart 2 of 3, in 0.5 s"),
        ([failure(1, 0)] * 2, 3, False, 137, "rank 1 failed before its first step in an earlier attempt too"),
        ([failure(1, 0), *CRASHES[:1], failure(1, 0)], 3, True, 0, "restart 2 of 3"),
        # weeks and 80,000 steps between two starts that fail, or two failures in one step that lies behind
        ([failure(0, 0), failure(1, 40_000), PREEMPTION, failure(0, 0)], 9, True, 0, "restart 2 of 9, in 2 s"),
        ([failure(0, 0, code=77), failure(1, 4_000), failure(1, 8_000), failure(0, 0)], 99, True, 0, "restart 2 of 99"),
        ([failure(0, 5), failure(0, 5, 6)], 9, False, 137, "rank 0 failed in step 5"),  # the others may be a step ahead
        ([failure(0, 5, 9)] * 2, 9, False, 137, "rank 0 failed in step 5"),
        ([PREEMPTION, failure(0, 6, 6), failure(0, 6, 7)], 9, False, 137, "rank 0 failed in step 6"),
        ([failure(0, 5), failure(1, 80_000), failure(0, 5)], 9, True, 0, "restart 2 of 9"),
        ([failure(0, 5), failure(1, 80_000), failure(0, 5), failure(0, 5)], 9, True, 0, "restart 3 of 9"),  # it passed
        ([failure(0, 5), failure(1, 6), failure(0, 5)], 9, False, 137, "rank 0 failed in step 5"),  # it did not
        ([failure(1, 80_000)] + [failure(0, 0)] * 5, 9, True, 0, "restart 6 of 9, in 60 s"),
        ([failure(1, 80_000)] + [failure(0, 0)] * 9, 9, False, 75, "no restart is left: --max-restarts is 9"),
        ([failure(1, 5), failure(2, 9, cause=USER), failure(1, 5)], 9, True, 0, "restart 1 of 9"),
        ([failure(1, 0, counts=False)], 3, True, 0, "restart 1 of 3, immediately"),
        ([failure(1, 0, counts=False)] * 2, 3, True, 0, "restart 2 of 3, in 0.5 s"),
        ([failure(None, 0, 4)] * 2, 3, True, 0, "restart 2 of 3"),
        ([failure(1, 5), failure(1, 0)], 3, True, 0, "restart 2 of 3"),
        ([failure(1, 5), failure(1, 0), failure(1, 0)], 3, True, 0, "restart 3 of 3"),
        ([failure(2, 7, code=124)], 3, True, 0, "restart 1 of 3"),
        ([failure(2, 7, code=124)] * 2, 3, False, 124, "failed in step 7 in an earlier attempt too"),
        # a year that gets on: new steps, steps saved below one that was entered, an hour where nothing is known
        ([failure(n, 9 * n) for n in range(1, 400)], 1, True, 0, "restart 1 of 1, immediately (the job got on"),
        ([failure(0, 90), *(failure(n, 9, saved=9 * n) for n in range(1, 9))], 1, True, 0, "restart 1 of 1"),
        ([failure(1, 0, counts=False, seconds=3600.0)] * 400, 1, True, 0, "restart 1 of 1"),
        (
            [failure(1, 0, counts=False, seconds=3500.0)] * 2,
            1,
            False,
            75,
            "1, and since the first of them no attempt last",
        ),
        (
            [failure(n, 90 * (n == 0), saved=9) for n in range(4)],
            3,
            False,
            75,
            "is 3, and since the first of them no att",
        ),
        ([failure(None, 0, 90)] * 4, 3, False, 75, "no restart is left"),  # lost hosts are no progress either
        (
            [failure(None, 0, 90), PREEMPTION, failure(None, 0, 90), IDLE, failure(1, 8)],
            3,
            True,
            0,
            "restart 3 of 3, in",
        ),
        ([failure(1, 90), replace(PREEMPTION, reached=95), failure(2, 8)], 1, True, 0, "restart 1 of 1, in 0.5 s"),
        ([CRASHES[0], AttemptSummary(cause=USER, code=1, reached=9)], 3, False, 1, ""),
        ([CRASHES[0], AttemptSummary(cause=DONE, code=0, reached=9)], 3, False, 0, ""),
        ([AttemptSummary(cause=REQUESTED, code=42, reached=9)], 3, False, 42, ""),
        ([PREEMPTION] * 50, 3, True, 0, "preempted; restart immediately"),
        ([PREEMPTION], 0, False, 42, ""),
        ([PREEMPTION] + [IDLE] * 9, 3, True, 0, "preempted; restart in 60 s"),
        ([PREEMPTION] + [IDLE] * 10, 3, False, 42, "preempted 10 times in a row"),
        ([PREEMPTION] + [IDLE] * 9 + [CRASHES[0]] + [IDLE], 3, True, 0, "preempted; restart in 0.5 s"),
    ],
)
def test_what_follows(attempts: list[AttemptSummary], limit: int, again: bool, code: int, words: str) -> None:
    decision = next_action(attempts, limit)
    assert (decision.again, decision.code) == (again, code)
    assert words in decision.why
    assert bool(decision.why) == bool(words)


def test_restarts_that_come_to_nothing_for_hours_wait_a_minute_each() -> None:
    """The pause is a power of their number, and 0.5 * 4 ** 512 is no float: the launcher ended with a traceback."""
    decision = next_action([failure(None, 0)] * 600, 1000)
    assert (decision.again, decision.wait) == (True, 60.0)


def on(host: str, rank: int = 1, step: int = 5, **more: Any) -> AttemptSummary:
    return failure(rank, step, host=host, **more)


@one_test(
    ("attempts", "spare", "again", "aside"),
    [
        ([on("b")], True, True, ""),
        ([on("b"), on("b")], True, True, "b"),
        ([on("b"), on("b", 3, 9)], True, True, "b"),  # another rank of that host
        ([on("b", code=EXIT_RUNTIME), on("b", step=8, code=124)], True, True, "b"),
        ([on("b"), on("a", 0, 7)], True, True, ""),
        ([on("b"), on("b", 3, 9, seconds=50_000.0)], True, True, "b"),
        ([on("b"), on("b", 3, 9, seconds=90_000.0)], True, True, ""),  # a day apart they mean nothing
        ([on("b"), on("a", 0, 7, seconds=90_000.0), on("b", 3, 9)], True, True, ""),
        ([on("b"), on("b")], False, False, ""),
        ([on("b"), on("b", step=8)], False, True, ""),
        ([on("b"), on("b"), on("c")], True, False, ""),  # the same step on another host: the program's
        ([on("c", 0, 3), on("b"), on("b"), on("c")], True, False, ""),  # and however often that host had failed
        ([on("a", 0, 9), on("b"), on("c")], True, True, ""),  # a step that the job has passed before
        ([on("b", counts=False), on("b", counts=False)], True, True, "b"),
        ([on("b"), failure(None, 0, 5)], True, True, ""),  # a lost host has rules of its own
    ],
)
def test_a_host_whose_ranks_fail_twice_is_set_aside(
    attempts: list[AttemptSummary], spare: bool, again: bool, aside: str
) -> None:
    decision = next_action(attempts, 9, can_replace=lambda host: spare)
    assert (decision.again, decision.set_aside) == (again, aside)
    assert (f"without host {aside}, whose ranks failed in 2 attempts" in decision.why) == bool(aside)


@one_test(
    ("attempt", "before", "nothing"),
    [
        (failure(1, 0, 0), 0, True),
        (failure(1, 30, 30), 30, True),
        (failure(1, 31, 31), 30, False),
        (failure(1, 0, 0, cause=USER, code=1), 30, True),  # a package that is not there any more
        (failure(None, 0, 0), 30, True),
        (failure(1, 0, counts=False, seconds=5.0), 0, True),
        (failure(1, 0, counts=False, seconds=500.0), 0, False),
        (PREEMPTION, 5, False),
    ],
)
def test_an_attempt_with_hosts_that_were_back_counts_for_nothing_where_it_came_to_nothing(
    attempt: AttemptSummary, before: int, nothing: bool
) -> None:
    assert has_come_to_nothing(attempt, before) == nothing
    if nothing:
        grown = replace(attempt, failed_growth="b, c")
        decision = next_action([CRASHES[0], grown], 1)
        assert (decision.again, decision.wait) == (True, 0.0)
        assert "goes on without b, c, as before" in decision.why
        assert next_action([CRASHES[0], grown, failure(1, 4)], 2).why == "restart 2 of 2, in 0.5 s"


@one_test(
    ("code", "again"), [(1, True), (7, True), (128 + signal.SIGFPE, True), (2, False), (126, False), (127, False)]
)
def test_a_job_may_be_started_again_after_any_failure(code: int, again: bool) -> None:
    ended = [summary(AttemptResult(exits=ends(code, step=4)), seconds=1.0, counts=True)]
    assert next_action(ended, 3, "any").again == again
    assert not next_action(ended, 3).again
    assert next_action(ended, 3, "any").code == (0 if again else code)
    assert not next_action(ended * 2, 3, "any").again  # the same rank in the same step


# Each rank enters a step a moment after the others have entered theirs, as collectives would have it. `DIE` says how
# rank 1 ends in which step of which attempt: "attempt step action; …".
STEPS = """
import os, sys, time
from pathlib import Path
from roxxel_dist.process.progress import Progress
rank, attempt = int(os.environ["ROXXEL_PROCESS_ID"]), os.environ["ROXXEL_ATTEMPT"]
size = int(os.environ["ROXXEL_NUM_PROCESSES"])
progress = Progress.from_env(rank)
print("I am", os.environ["ROXXEL_COORDINATOR"], flush=True)
for step in range(1, 9):
    progress.enter(step)
    Path(f"at.{attempt}.{step}.{rank}").touch()
    while any(not Path(f"at.{attempt}.{step}.{other}").exists() for other in range(size)):
        time.sleep(0.01)
    for entry in os.environ["DIE"].split(";"):
        if rank == 1 and entry.split()[:2] == [attempt, str(step)]:
            exec(entry.split(maxsplit=2)[2])
    progress.finish(step)
time.sleep(0.05)
"""
KILL = "os.kill(os.getpid(), 9)"


def start(launch: Launch, die: str, **job: Any) -> Any:
    return launch("env", sys.executable, "-c", STEPS, env={"DIE": die}, **{"max_restarts": 3, **job})


def test_a_killed_rank_is_started_again_on_a_new_port_and_its_log_goes_on(launch: Launch) -> None:
    job = start(launch, f"0 3 {KILL}; 1 5 os.kill(os.getpid(), 15); 2 2 {KILL}")
    code, out, err = job.wait()
    assert code == 0
    assert [line for line in err.splitlines() if "restart" in line] == [
        "roxxel-dist: restart 1 of 3, immediately",
        "roxxel-dist: preempted; restart immediately (it counts for nothing)",
        "roxxel-dist: restart 1 of 3, in 0.5 s",  # attempt 1 came to step 5
    ]
    assert "rank 1 failed first: signal SIGKILL, in step 3" in err
    for rank in (0, 1):
        headers = [line for line in job.log(rank).splitlines() if line.startswith("# ")]
        assert [re.findall(r"attempt \d", line) for line in headers] == [[f"attempt {n}"] for n in range(4)]
    assert len(set(re.findall(r"I am (\S+)", out))) == 4, "a new port each time"


@pytest.mark.parametrize(
    ("die", "limit", "code", "words"),
    [
        pytest.param(
            f"0 2 {KILL}; 1 3 {KILL}", 1, 75, "no restart is left: --max-restarts is 1", marks=pytest.mark.long
        ),
        (f"0 2 {KILL}; 1 2 {KILL}", 3, 137, "rank 1 failed in step 2 in an earlier attempt too"),
        (f"0 2 {KILL}; 1 4 raise KeyError('bug')", 3, 1, "KeyError: 'bug'"),
    ],
)
def test_what_ends_restarts_and_that_the_first_cause_is_told(
    die: str, limit: int, code: int, words: str, launch: Launch, tmp_path: Path
) -> None:
    got, _, err = start(launch, die, max_restarts=limit).wait()
    assert got == code
    assert words in err
    assert "the first cause, of 2 attempts:\nroxxel-dist: rank 1 failed first: signal SIGKILL, in step 2" in err
    assert not list(tmp_path.glob("at.2.*"))


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise KeyError", 1),
        pytest.param("raise SystemExit(2)", 2, marks=pytest.mark.long),
        pytest.param("raise SystemExit(7)", 7, marks=pytest.mark.long),
    ],
)
def test_an_error_of_the_program_is_not_tried_again(script: str, code: int, launch: Launch, tmp_path: Path) -> None:
    script = f"import os; open('ran.' + os.environ['ROXXEL_ATTEMPT'], 'w').close(); {script}"
    got, _, err = launch("env", sys.executable, "-c", script, nprocs=1, max_restarts=3).wait()
    assert got == code
    assert [path.name for path in tmp_path.glob("ran.*")] == ["ran.0"]
    assert "restart" not in err


RAISE = """
import os, jax
if os.environ["ROXXEL_ATTEMPT"] == "0":
    raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error")
"""


@pytest.mark.long
def test_an_exception_of_the_runtime_is_infrastructure(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "ecc.py").write_text(RAISE)
    code, _, err = launch("python", "ecc.py", nprocs=1, max_restarts=3).wait()
    assert code == 0
    assert "rank 0 failed first: exit code 77" in err
    assert "JaxRuntimeError: INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE" in err
    assert "restart 1 of 3, immediately" in err


@pytest.mark.parametrize(
    ("restart_on", "code"), [("any", 0), pytest.param("infrastructure", 1, marks=pytest.mark.long)]
)
def test_an_exception_of_the_program_is_tried_again_where_the_user_says_so(
    restart_on: str, code: int, launch: Launch
) -> None:
    die = "0 3 raise KeyError('bug')"
    assert start(launch, die, restart_on=restart_on).wait()[0] == code


def test_an_agent_that_is_lost_is_infrastructure(launch: Launch, alive: Alive) -> None:
    job = launch("bash", "-c", "touch ready.$ROXXEL_ATTEMPT; [ $ROXXEL_ATTEMPT = 1 ] || sleep 1000", max_restarts=1)
    job.marks("ready.0", 1)
    family = job.family()
    os.kill(family["agent"][0], signal.SIGKILL)
    code, _, err = job.wait()
    assert code == 0
    assert "restart 1 of 1" in err
    assert not any(map(alive, family["all"]))


def test_a_preemption_is_no_first_cause(launch: Launch) -> None:
    code, _, err = start(launch, f"0 2 os.kill(os.getpid(), 15); 1 4 {KILL}; 2 4 {KILL}").wait()
    assert code == 137
    assert "the first cause, of 3 attempts:\nroxxel-dist: rank 1 failed first: signal SIGKILL, in step 4" in err


def test_ctrl_c_ends_the_pause_before_a_restart(launch: Launch, until: Callable[..., None]) -> None:
    job = launch("bash", "-c", "kill -9 $$", nprocs=1, max_restarts=3)
    for line in job.process.stderr:  # the third pause is one of 2 seconds
        if b"restart 3 of 3" in line:
            break
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.wait()
    assert code == 130
    assert "SIGINT: not started again" in err


TOLD = """
import os, time
from pathlib import Path
from roxxel_dist.process.progress import Progress
rank, attempt = int(os.environ["ROXXEL_PROCESS_ID"]), os.environ["ROXXEL_ATTEMPT"]
if rank == 0:  # a program whose child trains
    if os.fork():
        os.wait()
        raise SystemExit
    Progress.from_env(rank).enter(5)
Path(f"tmp.{rank}").write_text(str(os.getpid()))
os.rename(f"tmp.{rank}", f"pid.{attempt}.{rank}")
time.sleep(1000 if attempt == "0" else 0)
"""


def test_ps_tells_the_processes_that_train(launch: Launch, until: Callable[..., None], tmp_path: Path) -> None:
    job = launch("env", sys.executable, "-c", TOLD, environ={"XDG_STATE_HOME": str(tmp_path)}, max_restarts=1)
    pids = [int(path.read_text()) for path in job.marks("pid.0.*", 2)]

    def ranks() -> list[dict[str, Any]]:
        words = [sys.executable, "-m", "roxxel_dist", "ps", "--all", "--json"]
        (entry,) = json.loads(subprocess.check_output(words, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}))
        return [{name: value for name, value in rank.items() if name != "changed_at"} for rank in entry["ranks"]]

    fields = {"host": socket.gethostname()}
    expected = [{"rank": n, "pid": pids[n], "step": 5 - 5 * n, "activity": ("step", "")[n], **fields} for n in (0, 1)]
    until(lambda: ranks() == expected, "the ranks")
    os.kill(pids[1], signal.SIGTERM)
    assert job.wait()[0] == 0
    assert ranks() == []


SAME = """
import os, time
from pathlib import Path
attempt, memory = int(os.environ["ROXXEL_ATTEMPT"]), Path(os.environ["ROXXEL_MEMORY"])
(memory / f"block.{attempt}").touch()
print(memory, sorted(path.name for path in memory.iterdir()), flush=True)
Path(f"ran.{attempt}.{os.environ['ROXXEL_PROCESS_ID']}").touch()
while not Path(f"go.{attempt}").exists():
    time.sleep(0.01)
if attempt < 2:
    os.kill(os.getpid(), 9)
"""


def test_agent_and_folder_in_memory_outlive_an_attempt(
    launch: Launch, alive: Alive, until: Callable[..., None]
) -> None:
    job = launch("env", sys.executable, "-c", SAME, nprocs=1, max_restarts=2)
    families = []
    for attempt in range(3):
        job.marks(f"ran.{attempt}.0", 1)
        families.append(job.family())
        (job.folder / f"go.{attempt}").touch()
    code, out, _ = job.wait()
    assert code == 0
    assert len({(*family["guard"], *family["agent"]) for family in families}) == 1
    assert len({pid for family in families for pid in family["keepers"]}) == 3
    *_, path, names = out.splitlines()[-1].split(maxsplit=4)
    assert names == "['block.0', 'block.1', 'block.2', 'key']"
    assert not Path(path).exists()
    assert not any(alive(pid) for family in families for pid in family["all"])


def test_an_agent_that_dies_between_attempts_is_replaced(launch: Launch, until: Callable[..., None]) -> None:
    job = launch("bash", "-c", "[ $ROXXEL_ATTEMPT = 3 ] || kill -9 $$", nprocs=1, max_restarts=3)
    for line in job.process.stderr:  # the third pause is one of seconds
        if b"restart 3 of 3" in line:
            break
    family = job.family()
    os.kill(family["agent"][0], signal.SIGKILL)
    assert job.wait()[0] == 0
