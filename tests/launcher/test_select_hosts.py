"""Which hosts are selected where some are missing; the hosts themselves are in test_ssh.py."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roxxel_dist.cli.launch import device_needs
from roxxel_dist.launcher.backends.ssh import SshBackend
from roxxel_dist.launcher.fleet import driver, step
from roxxel_dist.launcher.fleet.driver import Driver, NotReadyError
from roxxel_dist.launcher.fleet.state import State
from roxxel_dist.launcher.fleet.step import fleet_of
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import Console
from roxxel_dist.launcher.policy.outcome import AttemptSummary, Cause
from roxxel_dist.launcher.preflight.checks import CheckResult
from roxxel_dist.launcher.preflight.run import PreflightReport
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.process.interrupt import SignalPipe
from roxxel_dist.process.platforms import DeviceNeeds

Asked = list[tuple[str, ...]]
ENDED = AttemptSummary(cause=Cause.INFRASTRUCTURE, code=137)


def selector_of(
    job: JobSpec, backend: SshBackend, signals: SignalPipe, screen: Console, pool: HostPool, attempt: int
) -> Driver:
    now = time.monotonic()  # the driver's clock: a host is set aside for a day of it
    fleet, _ = fleet_of(job, backend.hosts, now=now)
    return Driver((replace(fleet, attempts=(ENDED,) * attempt), []), backend, signals, screen, pool)


def move(selector: Driver, state: State, *hosts: str) -> None:
    selector.fleet.move(hosts, state)


def select(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gone: set[str],
    attempt: int,
    slow: tuple[str, ...] = (),
    spare: bool | None = None,
    then: Sequence[tuple[set[str], tuple[str, ...]]] = (),
    **more: Any,
) -> Asked:
    """The hosts that were looked at, in order, until some can start: the last ones. `spare`: whether one is left.

    `then`: which hosts are gone before attempts that follow, and which are back.
    """
    asked: Asked = []
    gone = {*gone}

    def check_job_hosts(job: JobSpec, backend: Any, hosts: tuple[str, ...], **more: Any) -> PreflightReport:
        asked.append(hosts)
        assert len(asked) < 9
        away = {host: "no route" for host in hosts if host in gone}
        return PreflightReport(address="10.0.0.1", port=1, findings=(), unreachable=away)

    monkeypatch.setattr(driver, "check_job_hosts", check_job_hosts)
    job = JobSpec(**{"command": ("true",), "nprocs": 4, "run_id": "r", "log_dir": tmp_path, **more})
    backend = SshBackend(["a", "b", "c", "d"])
    with Console(all_ranks=False) as screen, SignalPipe(screen.info) as signals, HostPool(backend) as pool:
        selector = selector_of(job, backend, signals, screen, pool, attempt)
        move(selector, State.ASIDE, *slow)
        ready = selector.select({})
        for gone_then, back in then:
            gone.clear()
            gone.update(gone_then)
            selector.fleet = replace(selector.fleet, attempts=(*selector.fleet.attempts, ENDED))
            move(selector, State.WARM, *back)
            ready = selector.select({})
        assert spare in (None, selector.fleet.has_spare)
    assert ready.assignment.hosts == asked[-1]
    assert ready.assignment.job.nprocs == 2 * len(asked[-1])
    return asked


def test_spare_hosts_wait_until_another_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(tmp_path, monkeypatch, set(), 0, spare_hosts=2) == [("a", "b")]
    assert select(tmp_path, monkeypatch, {"d"}, 0, spare_hosts=2) == [("a", "b")]
    assert select(tmp_path, monkeypatch, {"a"}, 0, spare_hosts=2) == [("a", "b"), ("b", "c")]
    patient: dict[str, Any] = {"spare_hosts": 2, "host_timeout": 1000}
    assert select(tmp_path, monkeypatch, {"b", "c"}, 1, **patient) == [("a", "b"), ("a", "c"), ("a", "d")]


def test_a_slow_host_is_used_only_where_too_few_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two: dict[str, Any] = {"spare_hosts": 2, "host_timeout": 1000}  # no wait: a slow host is there
    assert select(tmp_path, monkeypatch, set(), 1, ("a",), spare=True, **two) == [("b", "c")]
    assert select(tmp_path, monkeypatch, set(), 1, ("a", "c"), spare=False, **two) == [("b", "d")]
    assert select(tmp_path, monkeypatch, {"b"}, 1, ("a",), spare=False, **two) == [("b", "c"), ("c", "d")]
    assert select(tmp_path, monkeypatch, {"b"}, 1, ("a", "c"), **two) == [("b", "d"), ("a", "c")]


def test_fewer_hosts_than_work_when_the_spare_ones_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"b", "c", "d"}
    with pytest.raises(NotReadyError, match="host d cannot be used"):
        select(tmp_path, monkeypatch, gone, 1, spare_hosts=2, host_timeout=0)
    less = select(tmp_path, monkeypatch, gone, 1, spare_hosts=2, host_timeout=0, min_hosts=1)
    assert less == [("a", "b"), ("a", "c"), ("a", "d"), ("a",)]


def test_the_config_is_read_at_the_launch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours later, when a host is lost, its file is that of the next experiment, or gone."""
    config = tmp_path / "run.yaml"
    config.write_text("phases: [{steps: 2, batch_size: 6, seq_len: 9}]\ntensor_devices: 4")
    command = ("train", "--config", str(config), "--data_path", "data")
    needs = device_needs(command)
    assert needs == DeviceNeeds(tensor=4)
    config.unlink()
    train = {"command": command, "device_needs": needs, "host_timeout": 0}
    assert select(tmp_path, monkeypatch, {"a"}, 1, spare_hosts=2, **train) == [("a", "b"), ("b", "c")]
    less = select(tmp_path, monkeypatch, {"a"}, 1, nprocs=8, min_hosts=1, **train)
    assert less == [("a", "b", "c", "d"), ("b", "c")], "of 6 devices on three hosts, 4 work"


SHARDS = ("--virtual_shards", "8")


@pytest.mark.parametrize(
    ("words", "rows", "present", "chosen"),
    [
        # three hosts of two devices are left, or two, or none is lost; rows that devices do not divide are cut
        (SHARDS, [16], {"d"}, ("a", "b", "c")),
        (SHARDS, [16], {"c", "d"}, ("a", "b")),
        (SHARDS, [2], {"d"}, ("a", "b", "c")),
        (SHARDS, [16, 1], {"d"}, ("a", "b", "c")),
        ((), [16, 1], {"d"}, ("a", "b", "c")),
        ((), [16, 2], {"d"}, ("a", "b", "c")),
        ((), [7], {"d"}, ("a", "b", "c")),
        (("--grad_accum", "4"), [16], {"d"}, ("a", "b", "c")),
        (("--fsdp", "True"), [16], {"d"}, ("a", "b", "c")),
        (("--fsdp", "True", "--fsdp_devices", "4"), [16], {"d"}, ("a", "b")),
        (("--tensor_devices", "4"), [16], {"d"}, ("a", "b")),
    ],
)
def test_hosts_that_are_left_work_as_far_as_the_trainer_can_use_them(
    words: tuple[str, ...], rows: list[int], present: set[str], chosen: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    phases = ", ".join(f"{{steps: 2, batch_size: {count}, seq_len: 33}}" for count in rows)
    command = ("train", *words, "--phases", f"[{phases}]", "--data_path", "data")
    job: dict[str, Any] = {"command": command, "nprocs": 8, "min_hosts": 1, "host_timeout": 0}
    job["device_needs"] = device_needs(command)
    assert select(tmp_path, monkeypatch, present, 1, **job)[-1] == chosen


def test_what_no_single_host_is_to_blame_for_ends_the_selection_with_idle_hosts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four hosts are there, two work (the batch asks for it), and those two do not reach each other."""
    asked: list[tuple[str, ...]] = []

    def check_job_hosts(job: JobSpec, backend: Any, hosts: tuple[str, ...], **more: Any) -> PreflightReport:
        asked.append(hosts)
        assert len(asked) < 5
        gone = {"d": "no route"} if "d" in hosts else {}
        wrong = () if gone else (CheckResult("error", "port", hosts, "b does not reach a"),)
        return PreflightReport(address="10.0.0.1", port=1, findings=wrong, unreachable=gone)

    monkeypatch.setattr(driver, "check_job_hosts", check_job_hosts)
    job = JobSpec(command=("true",), nprocs=4, run_id="r", log_dir=tmp_path, min_hosts=2, host_timeout=0)
    job = replace(job, device_needs=DeviceNeeds(fsdp=2))
    backend = SshBackend(["a", "b", "c", "d"])
    with (
        Console(all_ranks=False) as screen,
        SignalPipe(screen.info) as signals,
        HostPool(backend) as pool,
        pytest.raises(NotReadyError, match="b does not reach a"),
    ):
        selector_of(job, backend, signals, screen, pool, 1).select({})
    assert asked == [("a", "b", "c", "d"), ("a", "b")]


def test_the_least_number_of_hosts_is_enough_for_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job: dict[str, Any] = {"nprocs": 8, "min_hosts": 3, "host_timeout": 1000}
    assert select(tmp_path, monkeypatch, {"b"}, 0, **job) == [("a", "b", "c", "d"), ("a", "c", "d")]
    said = capfd.readouterr().err
    assert "host b cannot be used: no route" in said
    assert "going on without b: 6 of 8 devices" in said
    with pytest.raises(NotReadyError, match="host b cannot be used"):
        select(tmp_path, monkeypatch, {"b", "d"}, 0, **{**job, "host_timeout": 0})
    with pytest.raises(NotReadyError, match="host b cannot be used"):
        select(tmp_path, monkeypatch, {"b"}, 0, **{**job, "min_hosts": None})


NEVER = 99


@pytest.mark.parametrize(
    ("from_look", "job", "looks"),
    [
        # hosts that start, with the look from which on each is there; 2 hosts of (a, b, c) work with a spare one
        ({"b": 3}, {}, ["abc", "abc", "abc"]),
        ({"b": 2, "c": 4}, {}, ["abc", "abc", "abc", "abc"]),
        ({"b": 3}, {"spare_hosts": 1}, ["ab", "ac"]),
        ({"b": NEVER, "c": 3}, {"spare_hosts": 1}, ["ab", "ac", "ab", "ac"]),
        ({"b": 3, "c": NEVER}, {"spare_hosts": 1}, ["ab", "ac", "ab"]),
        ({"b": NEVER}, {"min_hosts": 2}, ["abc", "ac"]),
        ({"b": NEVER}, {"host_timeout": 0}, ["abc", None]),
        ({"b": NEVER, "c": NEVER}, {"spare_hosts": 1, "host_timeout": 0}, ["ab", "ac", None]),
    ],
)
def test_a_start_waits_for_hosts_that_start_themselves(
    from_look: dict[str, int], job: dict[str, Any], looks: list[str | None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[str | None] = []

    def check_job_hosts(job: JobSpec, backend: Any, hosts: tuple[str, ...], **more: Any) -> PreflightReport:
        asked.append("".join(hosts))
        assert len(asked) < 9
        away = {host: "starts" for host in hosts if from_look.get(host, 0) > len(asked)}
        return PreflightReport(address="10.0.0.1", port=1, unreachable=away, starting=tuple(away))

    monkeypatch.setattr(driver, "check_job_hosts", check_job_hosts)
    monkeypatch.setattr(step, "RETRY_S", 0.0)
    given: dict[str, Any] = {
        "nprocs": 3 - job.get("spare_hosts", 0),
        "host_timeout": 1000,
        **job,
    }
    backend = SshBackend(["a", "b", "c"])
    with Console(all_ranks=False) as screen, SignalPipe(screen.info) as signals, HostPool(backend) as pool:
        spec = JobSpec(command=("true",), run_id="r", log_dir=tmp_path, **given)
        try:
            selector_of(spec, backend, signals, screen, pool, 0).select({})
        except NotReadyError:
            asked.append(None)
    assert asked == looks


def test_a_host_that_is_left_out_is_asked_again_when_it_is_back_or_too_few_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: dict[str, Any] = {"nprocs": 8, "min_hosts": 2, "host_timeout": 0}
    everyone, three = ("a", "b", "c", "d"), ("a", "b", "c")
    start = [everyone, three]
    assert select(tmp_path, monkeypatch, {"d"}, 0, then=[({"d"}, ())], **job) == [*start, three]
    assert select(tmp_path, monkeypatch, {"d"}, 0, then=[(set(), ("d",))], **job) == [*start, everyone]
    assert select(tmp_path, monkeypatch, {"d"}, 0, then=[({"d"}, ("d",))], **job) == [*start, everyone, three]
    two = select(tmp_path, monkeypatch, {"d"}, 0, then=[({"a", "b"}, ())], **job)
    assert two == [*start, three, everyone, ("c", "d")]


def test_a_host_that_was_back_and_is_lost_again_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: dict[str, Any] = {"nprocs": 8, "min_hosts": 2, "host_timeout": 1000}
    then: list[tuple[set[str], tuple[str, ...]]] = [(set(), ("d",)), ({"d"}, ())]
    everyone, three = ("a", "b", "c", "d"), ("a", "b", "c")
    assert select(tmp_path, monkeypatch, {"d"}, 0, then=then, **job) == [everyone, three, everyone, everyone, three]
