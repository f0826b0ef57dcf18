"""One code for the job, and who is named."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from tables import one_test

from roxxel_dist.launcher.control.supervisor import failure_report, first_words, last_words, late_report
from roxxel_dist.launcher.policy.outcome import AttemptResult, HostLost, RankExit, exit_code, first_failure, how

LOST = HostLost(host="h", code=137, text="the agent is gone")
TERM, KILL = -signal.SIGTERM, -signal.SIGKILL


def ends(*codes: int) -> list[RankExit]:
    """Rank 0 ended first, then rank 1, …; a code of -9 is the launcher's doing unless it stands first."""
    return [
        RankExit(rank=n, host="h", pid=100 + n, code=code, killed_by_us=code == KILL and n > 0, step=n)
        for n, code in enumerate(codes)
    ]


@one_test(
    ("codes", "more", "code", "culprit"),
    [
        ((0, 0), {}, 0, None),
        ((7, -9), {}, 7, 0),
        ((0, 7, -9), {}, 7, 1),
        ((-9, -6), {}, 137, 0),
        ((-11, 1), {}, 139, 0),
        ((1, -11), {}, 139, 1),
        ((1, -6), {}, 1, 0),
        ((-6, 1), {}, 134, 0),
        ((2, -11), {}, 2, 0),
        ((0, 0), {"late": True}, 0, None),
        ((2, -9), {}, 2, 0),
        ((42, 42), {}, 42, None),
        ((42, 0), {}, 42, None),
        ((42, 1), {}, 1, 1),
        ((0, -9), {"late": True}, 124, None),
        ((42, 42), {"requested": 2}, 42, None),
        ((0, 0), {"requested": 2}, 0, None),
        ((TERM, TERM), {"requested": 2}, 130, None),
        ((TERM, -6), {"requested": 15}, 143, None),
        ((130, TERM), {"requested": 2}, 130, None),
        ((42, -9), {"requested": 15}, 143, None),
        ((0, -9), {}, 137, None),
        ((42, -9), {"requested": 1}, 129, None),
        ((1, 42), {"requested": 2}, 1, 0),
        ((0, -9), {"lost": LOST}, 137, None),
        ((), {"lost": LOST}, 137, None),
        ((3, -9), {"lost": LOST}, 137, None),
        ((-11, -9), {"lost": LOST}, 139, 0),
        ((2, -9), {"lost": LOST}, 2, 0),
        ((3, -9), {"lost": replace(LOST, last_seen=2.0), "failed": 1.0}, 3, 0),
        ((3, -9), {"lost": replace(LOST, last_seen=2.0, died=True), "failed": 1.0}, 137, None),
    ],
)
def test_the_code_of_a_job(codes: tuple[int, ...], more: dict[str, Any], code: int, culprit: int | None) -> None:
    outcome = AttemptResult(exits=ends(*codes), **more)
    assert exit_code(outcome) == code
    failure = first_failure(outcome)
    assert (failure.rank if failure else None) == culprit


def test_the_report_names_everything() -> None:
    failure = RankExit(rank=3, host="node", pid=77, code=-11, killed_by_us=False, step=12)
    first, *rest = failure_report(
        failure, ["noise", "Traceback (most recent call last):", "  x", "E: y"], Path("l/r.log")
    )
    for fact in ("rank 3", "node", "77", "SIGSEGV", "step 12", "l/r.log"):
        assert fact in first
    assert rest == ["Traceback (most recent call last):", "  x", "E: y"]
    cause = first_words([first, *rest])
    assert first == f"roxxel-dist: {cause}, last lines:", "the cause of a restart stands alone, without these lines"
    assert first_words([]) == ""
    quiet = failure_report(RankExit(rank=0, host="h", pid=1, code=9, killed_by_us=False, step=0), [], Path("l"))
    assert quiet == ["roxxel-dist: rank 0 failed first: exit code 9 (host h, pid 1); it printed nothing"]


def test_without_a_traceback_the_last_lines_are_fewer() -> None:
    assert last_words([str(n) for n in range(40)]) == [str(n) for n in range(25, 40)]


def test_who_stayed() -> None:
    text = late_report(AttemptResult(exits=ends(0, -9, -9), late=True), 60.0)
    assert "rank 0 had ended, but rank 1 (in step 1), 2 (in step 2) still ran 60 s later" in text


def test_what_is_told_of_connections_is_nobodys_last_word() -> None:
    crash = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 'x'"]
    gloo = "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    assert last_words([gloo, *crash, gloo]) == crash
    assert last_words([gloo, gloo]) == [gloo, gloo]


def test_what_threads_of_jax_say_within_or_behind_a_traceback_is_not_why_it_ended() -> None:
    frame, error = ["Traceback (most recent call last):", '  File "a.py", line 1', "    f()"], "KeyError: 'of rank 1'"
    lost = [
        "E1128 14:20:11.123456   1234 coordination_service_agent.cc:358] Failed to poll for errors: UNAVAILABLE",
        "Additional GRPC error information from remote target coordination_service:",
        ':UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}',
    ]
    tsl = "2026-11-28 14:20:11.123456: E external/xla/xla/tsl/distributed_runtime/agent.cc:12] lost"
    chain = ["", "The above exception was the direct cause of the following exception:", "", *frame, "ValueError: y"]
    for tail, words in (
        ([*frame, error, *lost], [*frame, error]),
        ([*frame, error, tsl, "more of it"], [*frame, error]),
        ([*lost[:1], *frame, error, *lost], [*frame, error]),
        ([*frame[:2], lost[0], *frame[2:], error, *lost], [*frame, error]),
        ([*frame, error, *chain, *lost], [*frame, error, *chain]),
        ([*frame, "ValueError: two", "lines", "of it", *lost], [*frame, "ValueError: two", "lines", "of it"]),
        (["x", *lost], ["x", *lost]),
    ):
        assert last_words(tail) == words, tail


def test_what_sigbus_means_is_said():
    assert how(-7) == "signal SIGBUS (a mapped file, such as a shard of the data, was truncated, or its disk failed)"
    assert how(-9) == "signal SIGKILL"
