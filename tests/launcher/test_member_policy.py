"""Which hosts join a job and which leave it, and how many of them work: the rules alone."""

import os
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control import inbox
from roxxel_dist.launcher.control.inbox import HostList, Inbox
from roxxel_dist.launcher.control.members import MemberHangs
from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.state import Change, Stays, Wanted, change_to, working_number
from roxxel_dist.launcher.job.placement import assign
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.launcher.policy.outcome import AttemptSummary, Cause, next_action
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import DeviceNeeds


@one_test(
    ("wanted", "members", "there", "least", "change"),
    [
        ("ab", "ab", "ab", 1, Change()),
        ("ba", "ab", "ab", 1, Change()),  # another order is no change
        ("abc", "ab", "ab", 1, Change(newcomers=("c",))),
        ("a", "ab", "ab", 1, Change(leaves=("b",))),
        ("a", "ab", "ab", 2, Change(kept=("b",))),
        ("a", "abc", "abc", 2, Change(leaves=("b",), kept=("c",))),  # as many as may leave
        ("a", "abc", "ab", 2, Change(leaves=("c",), kept=("b",))),  # a lost one may
        ("a", "ab", "a", 2, Change()),  # it was to leave, and is lost: too few are left to go on
        ("ac", "ab", "a", 2, Change(newcomers=("c",))),
        ("ac", "abc", "ac", 2, Change(leaves=("b",))),
        ("cd", "ab", "ab", 2, Change(newcomers=("c", "d"), kept=("a", "b"))),
        ("cd", "abcd", "abcd", 2, Change(leaves=("a", "b"))),
        ("", "ab", "a", 3, Change(kept=("a",))),  # fewer than the least are there already
    ],
)
def test_what_makes_the_hosts_those_that_are_wanted(
    wanted: str, members: str, there: str, least: int, change: Change
) -> None:
    assert change_to(list(wanted), list(members), {*there}, least) == change


def test_lists_and_requests_together_say_which_hosts_are_wanted() -> None:
    wanted = Wanted(given=("a",), listed=("b", "a", "c"))
    assert wanted.hosts == ("a", "b", "c")
    assert wanted.with_leave(["a"]).hosts == ("b", "c")
    assert wanted.with_leave(["a"]).with_join(["a"]).hosts == ("a", "b", "c")
    assert wanted.with_join(["d"]).with_list(["b"]).hosts == ("a", "b", "d")
    assert wanted.with_join(["d"]).with_leave(["d"]).hosts == ("a", "b", "c")
    left = wanted.with_leave(["c"])
    assert left.with_list(["c", "b"]).hosts == ("a", "b"), "the list had it all the time"
    assert left.with_list(["b"]).with_list(["b", "c"]).hosts == ("a", "b", "c"), "it is in the list anew"


@one_test(
    ("events", "joins"),
    [
        ("+0", 0),
        ("+0 -3000 +3060", 3060),  # it came back, and had been there long
        ("+0 -100 +110", 110),  # once is no habit
        ("+0 -100 +110 -120 +130", 130 + 60),
        ("+0 -100 +110 -120 +130 -189 +200", 200 + 60),  # it never joined: that cost nothing
        ("+0 -100 +110 -120 +130 -191 +200", 200 + 120),
        ("+0 -100 +110 -120 +130 -789 +800", 800 + 120),
        ("+0 -100 +110 -120 +130 -790 +800", 800),  # it stayed for ten minutes after it had joined
        ("+0 -1 +2 -3 +4 -65 +66 -187 +188", 188 + 240),
        (" ".join(f"+{n * 4000} -{n * 4000 + 3999}" for n in range(9)) + " +36000", 36000),
        (" ".join(f"+{n * 1000} -{n * 1000 + 500}" for n in range(9)) + " +9000", 9000 + 960),
    ],
)
def test_a_host_whose_stays_are_short_waits_before_it_joins_anew(events: str, joins: float) -> None:
    """The last line: it is held 60, 120, 240 and 480 s, and then longer than it stays: no restart follows."""
    stays = Stays(since={"a": 0.0})
    for event in events.split():
        stays = stays.with_list(["a", "b"] if event[0] == "+" else ["a"], float(event[1:]))
    now = float(events.rpartition(" ")[2][1:])
    assert stays.joins_at("b") == joins
    assert stays.held(now) == ({"b"} if joins > now else set())
    assert stays.held(joins) == stays.forget_short().held(now) == set()
    assert stays.joins_at("a") == 0.0
    for times in (99, 5000):
        longest = Stays(since={"b": now}, short={"b": times})
        assert longest.joins_at("b") == now + 3600


def test_a_host_that_is_asked_for_by_name_is_not_held_back() -> None:
    wanted = Wanted(given=("a",), listed=("a", "b", "c")).with_join(["c"])
    assert wanted.without({"a", "b", "c"}) == ("a", "c")


@one_test(
    ("hosts", "spare", "first", "most", "number"),
    [(3, 0, 3, None, 3), (4, 0, 3, None, 4), (5, 0, 3, 4, 4), (2, 0, 3, None, 2), (4, 1, 3, None, 3),
     (3, 1, 3, None, 3), (2, 1, 3, None, 2), (5, 1, 3, None, 4), (1, 2, 1, None, 1)],
)  # fmt: skip
def test_how_many_hosts_work(hosts: int, spare: int, first: int, most: int | None, number: int) -> None:
    assert working_number(hosts, spare, first, most) == number


@pytest.mark.parametrize(
    ("needs", "hosts", "most", "per_host", "works", "devices"),
    [
        ({}, "abcdefg", None, 1, "abcdefg", 7),
        ({}, "abcde", 3, 1, "abc", 3),
        ({"virtual_shards": 8}, "abcdefg", None, 1, "abcdefg", 7),
        ({"virtual_shards": 4}, "abcde", None, 1, "abcd", 4),
        ({"virtual_shards": 8}, "abcde", None, 2, "abcd", 8),
        ({"tensor": 2}, "abc", None, 1, "ab", 2),
        ({"tensor": 2}, "abc", None, 2, "abc", 6),
        ({"fsdp": 0}, "abcdefg", None, 1, "abcdefg", 7),
        ({"fsdp": 4}, "abcdefg", None, 1, "abcd", 4),
        ({"fsdp": 3, "tensor": 2}, "abcde", None, 2, "abc", 6),
        ({"fsdp": 0, "tensor": 2}, "abcde", None, 3, "abcd", 12),
        ({"n_devices": 4}, "abc", None, 1, "abc", 3),  # too few: the program says so
    ],
)
def test_as_many_hosts_work_as_the_program_can_use(
    needs: dict[str, int], hosts: str, most: int | None, per_host: int, works: str, devices: int, tmp_path: Path
) -> None:
    count = len(hosts) if most is None else min(len(hosts), most)
    job = JobSpec(
        command=("true",), nprocs=count, run_id="r", log_dir=tmp_path, max_hosts=most, devices_per_proc=per_host,
        device_needs=DeviceNeeds(**needs),
    )  # fmt: skip
    found = assign(job, list(hosts), list(hosts), elastic=True)
    assert ("".join(found.hosts), found.devices) == (works, devices)
    assert "without" not in found.note
    idle = [host for host in hosts[:count] if host not in works]
    assert all(f"{host} ({per_host})" in found.note for host in idle)


def test_changes_of_hosts_are_no_failures_however_many_follow_each_other() -> None:
    change = AttemptSummary(cause=Cause.PREEMPTED, code=42, seconds=1.0, changes_hosts=True)
    decision = next_action([change] * 50, 3)
    assert (decision.again, decision.wait) == (True, 0.0)
    idle = AttemptSummary(cause=Cause.PREEMPTED, code=42, seconds=1.0)
    assert next_action([idle] * 9 + [change] * 50, 3).again
    assert not next_action([idle] * 5 + [change] * 50 + [idle] * 5, 3).again


@pytest.mark.parametrize(
    ("given", "hosts", "said"),
    [
        ("echo a; echo; echo ' b # the second'; echo a", ["a", "b"], ""),
        ("printf 'a slots=2\\r\\nb slots=2\\r\\n'", ["a", "b"], ""),
        ("sleep 100 & echo a", ["a"], ""),
        ("echo a; exec >&- 2>&-; sleep 0.2", ["a"], ""),
        ("no-such-file.txt", [], "there is no such file, and no such command"),
        ("true", [], "no host is in the list"),
        ("echo '# a'", [], "no host is in the list"),
        ("echo a; echo the API is away >&2; exit 3", [], "failed (exit code 3): the API is away"),
        ("kill -9 $$", [], "failed (signal 9)"),
        ("echo a; sleep 100", [], "did not end within 1 s, and was killed"),
        ("yes", [], "printed more than 1,048,576 bytes, and was killed"),
        ("echo NAME READY STATUS", [], "line 1: 'NAME READY STATUS': write a host, or `host slots=N`"),
        ("echo 'a slots=1'; echo b", [], "every host must have the same slots=N"),
        ("/", [], "failed (exit code 126)"),
        ("a\0b", [], "cannot be run"),
    ],
)
def test_what_a_command_lists(given: str, hosts: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LIST_RUN_S", 1.0)
    if said:
        with pytest.raises(UserError) as caught:
            HostList(given).read()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        assert HostList(given).read()[0] == hosts


def test_a_file_of_hosts_is_read_and_a_program_is_run(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes("\ufeffa\nb\n".encode())
    path.chmod(0o755)  # as every file of some disks
    assert HostList(str(path)).read() == (["a", "b"], None)
    path.write_text("#!/bin/sh\necho c slots=2\n")
    assert HostList(str(path)).read() == (["c"], 2)
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(UserError, match="cannot be read \\(it is not UTF-8\\)"):
        HostList(str(path)).read()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="failed"):  # not waited for
        HostList(str(tmp_path / "pipe")).read()


def test_a_list_that_is_being_written_changes_nothing(
    tmp_path: Path, until: Callable[[Callable[[], bool], str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change holds when it is the same at the next look."""
    path = tmp_path / "hosts"
    path.write_text("a\nb\n")
    job = JobSpec(command=("true",), nprocs=2, run_id="r", log_dir=tmp_path, hosts_from=str(path))
    monkeypatch.setattr(inbox, "AGAIN_S", 0.02)
    monkeypatch.setattr(inbox, "FILE_S", 0.02)
    backend = LocalBackend()
    backend.listed = ("a", "b")
    read, texts = HostList.read, iter([*("a\n" + "b\n" * (look % 2) + "c" * look for look in range(12)), "a\nb\nc\n"])

    def read_on(source: HostList) -> Any:
        """As the list is read where a writer that never rests is within another line at each look."""
        if (text := next(texts, None)) is not None:
            path.write_text(text)
        return read(source)

    monkeypatch.setattr(HostList, "read", read_on)
    happened = SimpleQueue[Any]()
    backend.check_joining = lambda hosts: None  # pyright: ignore[reportAttributeAccessIssue]
    with Inbox(job, backend, happened):
        until(lambda: not happened.empty(), "the list")
        assert happened.get()[0] == events.Asked(by="list", hosts=("a", "b", "c"))
        path.unlink()
        until(lambda: not happened.empty(), "the fault")
        assert isinstance(happened.get()[0], events.Say)
        path.write_text("a\nb\nc\nd\n")
        until(lambda: not happened.empty(), "the next list")
        assert happened.get()[0] == events.Asked(by="list", hosts=("a", "b", "c", "d"))
    assert happened.empty()


def test_launchers_of_one_job_find_the_hang_that_all_wait_for_by_one_look_at_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once listed the folder of all logs three times. What an earlier job with other members left is gone."""

    def member(first_rank: int) -> MemberHangs:
        return MemberHangs(
            JobSpec(command=("true",), nprocs=2, world=8, first_rank=first_rank, run_id="r", log_dir=tmp_path / "logs"),
            0,
        )

    def hang(rank: int, step: int, tied: int = 1) -> Hang:
        return Hang(rank=rank, step=step, phase=1, activity="step", seconds=70.0, limit=60.0, tied=tied)

    member(3).write(hang(3, 1), "of another day")
    members = {number: member(number) for number in (0, 2, 4, 6)}
    found = {0: hang(1, 7, 2), 2: hang(2, 6), 4: hang(4, 7), 6: hang(6, 7, 2)}
    for number, each in members.items():
        each.write(found[number], f"h{number}")
    listed = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or real(path))
    monkeypatch.setattr(os, "scandir", None)
    assert {number: each.first(found[number], f"h{number}") for number, each in members.items()} == {
        0: (found[2], "h2"),
        2: (found[2], "h2"),
        4: (found[2], "h2"),
        6: (found[2], "h2"),
    }
    assert len(listed) == len(members)
    (tmp_path / "logs" / ".hangs-0" / "2-6-2-1.json").unlink()
    assert members[0].first(found[0], "h0") == (hang(1, 7, 5), "h0"), "five are tied"
