"""Devices before a start: what is slow or wrong is named and replaced; hosts are agents of this machine."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu_quota import group, missing
from device_hosts import SLOW_CPUS, DeviceHosts, check
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.launcher.backends.exec import ExecBackend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.preflight import run as preflight
from roxxel_dist.launcher.preflight.devices import Measured, slow_devices, unlike_hosts
from roxxel_dist.launcher.preflight.run import DeviceChecks, forget_failures, known_failures, remember_failure

pytestmark = pytest.mark.xdist_group("launch")
SAY = ("bash", "-c", "echo $HOST >> ranks; sleep 0.2")


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[str]]]:
    """Run a job on such hosts in this process: its code, its messages, and the hosts of its ranks."""
    for name in [name for name in os.environ if name.startswith("ROXXEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def start_one(
        hosts: str, command: tuple[str, ...] = SAY, faults: Mapping[str, str] | None = None, **job: Any
    ) -> tuple[int, str, list[str]]:
        Path("ranks").write_text("")
        values = {"nprocs": 2, "check_devices": "on", **job}
        spec = JobSpec(command=command, run_id="devices", log_dir=Path("logs"), **values)
        code = run(spec, DeviceHosts(Path("hosts"), tuple(hosts), faults or {}))
        return code, capfd.readouterr().err, sorted(Path("ranks").read_text().split())

    return start_one


def test_a_wrong_device_is_replaced_and_remembered(
    start: Callable[..., tuple[int, str, list[str]]], capfd: pytest.CaptureFixture[str]
) -> None:
    code, err, ranks = start("bc", nprocs=1, spare_hosts=1, faults={"b": "wrong"})
    assert (code, ranks) == (0, ["c"]), err
    wrong = "device 0 is wrong in a product of matrices: the result is not exact"
    assert f"host b is set aside: b: {wrong}" in err
    assert "going on without b, with c instead" in err
    code, err, ranks = start("bc", nprocs=1, spare_hosts=1, check_devices="off")
    assert (code, ranks) == (0, ["c"]), err
    (line,) = [line for line in err.splitlines() if "failed in the last day" in line]
    assert f"b ({wrong}" in line
    code, err, ranks = start("b", nprocs=1, check_devices="off")
    assert (code, ranks) == (0, ["b"])
    assert "used in any case, for too few others are left: b" in err
    for words, shown in (("none", "forgotten: no host"), ("b", "forgotten: b"), ("all", "forgotten: no host")):
        assert main(["doctor", "--forget", words]) == 0
        assert shown in capfd.readouterr().out


@pytest.mark.long
def test_without_a_spare_host_a_wrong_device_is_refused(start: Callable[..., tuple[int, str, list[str]]]) -> None:
    code, err, ranks = start("ab", faults={"b": "wrong"})
    assert (code, ranks) == (69, [])
    assert "roxxel-dist: b: device 0 is wrong in a product of matrices" in err


@pytest.mark.long
def test_a_host_that_passes_again_is_forgotten(start: Callable[..., tuple[int, str, list[str]]]) -> None:
    assert start("ab", faults={"b": "wrong"})[0] == 69
    code, err, ranks = start("ab")
    assert (code, ranks) == (0, ["a", "b"]), "it passed"
    assert "failed in the last day" in err
    assert "failed in the last day" not in start("ab", check_devices="off")[1]


def test_the_command_of_the_user(
    start: Callable[..., tuple[int, str, list[str]]], tmp_path: Path, alive: Callable[[int], bool]
) -> None:
    command = "echo looking; [ $HOST != a ] || { echo no data on $HOST; exit 9; }"
    code, err, ranks = start("abc", spare_hosts=1, check_devices="off", preflight=command)
    assert (code, ranks) == (0, ["b", "c"]), err
    assert "host a is set aside: a: the command of --preflight ended with code 9: no data on a" in err
    code, err, _ = start("ab", check_devices="off", preflight="sleep 1000 & echo $! > child; exit 1")
    assert not alive(int((tmp_path / "child").read_text())), "what it has left behind"
    assert code == 69
    assert err.count("the command of --preflight ended with code 1: it printed nothing") == 2


def test_a_host_whose_rank_crashed_is_checked_again(start: Callable[..., tuple[int, str, list[str]]]) -> None:
    """And no other one: the command says which hosts were asked."""
    crash = (
        "bash",
        "-c",
        "echo $HOST$ROXXEL_ATTEMPT >> ranks; [ $HOST$ROXXEL_ATTEMPT != b0 ] || kill -SEGV $$; sleep 1",
    )
    asked = "echo asked-$HOST >> ranks"
    code, err, ranks = start("ab", crash, check_devices="off", preflight=asked, max_restarts=1)
    assert code == 0, err
    assert [line for line in ranks if line.startswith("asked")] == ["asked-a", "asked-b", "asked-b"]
    assert "b1" in ranks


def test_a_check_that_runs_nowhere_is_a_warning_and_one_of_simulated_devices_has_all_works(tmp_path: Path) -> None:
    faults = {"a": "broken", "b": "broken"}
    report = check(DeviceHosts(tmp_path, ("a", "b"), faults))
    assert report.passed
    assert not report.suspects
    (text,) = [one.text for one in report.findings if one.check == "device"]
    assert "could not be checked on any of 2 hosts" in text
    assert "no driver here" in text
    checks = DeviceChecks(mode="on", command=None, pending={"a", "b"}, simulated=2)
    report = check(DeviceHosts(tmp_path, ("a", "b"), {"b": "broken"}), checks)
    assert not report.passed
    assert report.suspects == {"b": "b: the check of its devices ended with code 1: SystemExit: no driver here"}
    times = checks.measured["a"].times
    assert sorted(times) == [(-1, "sum"), *[(place, work) for place in range(2) for work in ("copy", "product")]]


def measured(*products: float, kind: str = "H100", **more: float) -> Measured:
    times = {(place, "product"): value for place, value in enumerate(products)}
    times |= {(-1, name): value for name, value in more.items()}
    return Measured(kind=("gpu", kind, len(products)), times=times)


# (the hosts, (host, words) of each slow device)
JUDGED: dict[str, tuple[dict[str, Measured], list[tuple[str, str]]]] = {
    "one of eight": ({"a": measured(*[10.0] * 3, 16.0, *[10.0] * 4)}, [("a", "device 3 needs 16.0 ms")]),
    "within the noise": ({"a": measured(10.0, 12.0, 11.0, 14.0)}, []),
    "on another host": ({"a": measured(10.0, 10.0), "b": measured(10.0, 25.0)}, [("b", "2.5 times the median")]),
    "a whole host": (
        {"a": measured(10.0), "b": measured(20.0), "c": measured(10.0)},
        [("b", "device 0 needs 20.0 ms for a product of matrices")],
    ),
    "its network between devices": (
        {"a": measured(10.0, 10.0, sum=1.0), "b": measured(10.0, 10.0, sum=3.0)},
        [("b", "all devices need 3.0 ms for a sum")],
    ),
    "another kind is no comparison": ({"a": measured(10.0), "b": measured(90.0, kind="T4")}, []),
    "one alone": ({"a": measured(90.0)}, []),
    "of two the slower one": ({"a": measured(10.0), "b": measured(30.0)}, [("b", "3.0 times")]),
    "a fast one makes no other slow": ({"a": measured(1.0, 10.0, 10.0, 10.0)}, []),
    "two of eight": ({"a": measured(*[10.0] * 6, 40.0, 40.0)}, [("a", "device 6"), ("a", "device 7")]),
}


@one_test("case", JUDGED)
def test_slow_against_the_median_of_the_others(case: str) -> None:
    hosts, expected = JUDGED[case]
    found = [result for results in slow_devices(list(hosts), hosts).values() for result in results]
    assert [(result.hosts, result.level, result.suspect) for result in found] == [
        ((host,), "warning", True) for host, _ in expected
    ]
    for result, (_, words) in zip(found, expected, strict=True):
        assert words in result.text


class Answers:
    """Hosts that have these times, one after the other; the last one stays."""

    def __init__(self, **times: list[float]) -> None:
        self.unreachable: dict[str, str] = {}
        self.times = times

    def ask(self, questions: Mapping[str, Message]) -> dict[str, Message]:
        return {host: self.answer(self.times[host], **question) for host, question in questions.items()}

    def answer(self, times: list[float], ask: str, **_: Any) -> Message:
        if ask == "checks":
            del times[: len(times) > 1]
            return {}
        devices = [{"device": 0, "times": {"product": times[0]}, "wrong": []}]
        return {"problems": [], "devices": {"platform": "gpu", "kind": "H100", "devices": devices}}


# (times of hosts a, b and c, the hosts that are named)
MEASURED_AGAIN = {
    "b was disturbed": (([10.0], [30.0, 10.0], [10.0]), []),
    "b is slow": (([10.0], [30.0], [10.0]), ["b"]),
    "b is slow, and the others were disturbed": (([19.0, 10.0], [30.0, 28.0], [19.0, 10.0]), ["b"]),
    "b is slow, and the others were so disturbed that it was not the slower one": (
        ([21.0, 10.0], [30.0, 28.0], [23.0, 10.0]),
        ["b"],
    ),
    "b is a little slow": (([10.0], [14.0], [10.0]), []),
    "b is slow, and has a good moment": (([10.0], [30.0, 14.0, 30.0], [10.0]), []),
}


@one_test("case", MEASURED_AGAIN)
def test_a_host_that_looks_slow_is_measured_again_with_the_others(case: str) -> None:
    (a, b, c), named = MEASURED_AGAIN[case]
    checks = DeviceChecks(mode="on", command=None, pending={*"abc"})
    found = checks.check(Answers(a=[*a], b=[*b], c=[*c]), "abc", "abc")
    assert [result.hosts[0] for result in found if result.suspect] == named


def test_a_host_with_fewer_devices_or_none() -> None:
    cpu = Measured(kind=("cpu", "cpu", 1), times={})
    hosts = {"a": measured(1.0, 1.0), "b": measured(1.0), "c": cpu, "d": measured(1.0, 1.0)}
    found = {result.hosts[0]: result.text for result in unlike_hosts(hosts, list(hosts))}
    assert found.keys() == {"b", "c"}
    assert found["c"] == "c: jax finds 1 devices (cpu) there, and 2 (H100) on most hosts"
    assert not list(unlike_hosts({"a": cpu, "b": cpu}, ["a", "b"]))


def test_a_day_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    backend = DeviceHosts(tmp_path / "hosts", ("a", "b/../c", "d"), {})
    for host in backend.hosts:
        remember_failure(backend, host, f"{host}: slow")
    assert list(known_failures(backend)) == ["a", "b/../c", "d"]
    forget_failures(backend, ["d"])
    now = time.time()
    monkeypatch.setattr(preflight.time, "time", lambda: now + preflight.FAILURE_KEPT_S - 60)
    assert known_failures(backend) == {"a": "a: slow", "b/../c": "b/../c: slow"}
    monkeypatch.setattr(preflight.time, "time", lambda: now + preflight.FAILURE_KEPT_S + 60)
    assert known_failures(backend) == {}
    for path in tmp_path.rglob("*.json"):
        path.write_text("{")
    assert known_failures(backend) == {}
    pods = [ExecBackend(["a"], f"env NAMESPACE={name} {{host}}") for name in "xy"]
    remember_failure(pods[0], "a", "slow")
    assert [list(known_failures(one)) for one in pods] == [["a"], []], "another pod of this name"


@pytest.mark.long
def test_a_device_with_a_tenth_of_a_core_is_named(tmp_path: Path) -> None:
    """`python tests/support/device_hosts.py 200` counts more of them."""
    if why := missing():
        pytest.skip(why)
    with group(f"roxxel-devices-{os.getpid()}", SLOW_CPUS) as slow:
        report = check(DeviceHosts(tmp_path, ("a", "b", "c"), {"b": "slow"}, slow))
    assert list(report.suspects) == ["b"]
    assert report.passed, "it is slow, and right"
    assert "times the median of others" in report.suspects["b"]
