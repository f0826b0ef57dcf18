"""What is asked of many hosts before a start, and what their answers mean: CPU time that grows with their number."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from pretended import LINEAR, cpu_of, exponent

from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.preflight import checks, network
from roxxel_dist.launcher.preflight.checks import CheckResult, Requirements, merge_alike
from roxxel_dist.launcher.preflight.devices import Measured, slow_devices
from roxxel_dist.launcher.preflight.network import ALL_PAIRS, Endpoint
from roxxel_dist.launcher.preflight.run import PreflightReport

SIZES = [(100, 500), pytest.param((1000, 5000), marks=pytest.mark.long)]
NEEDS = Requirements(run_dir="/r", shared=True, distinct=True, platforms="cpu")
FREE = 1 << 40


def hosts_of(count: int, **more: Any) -> dict[str, Any]:
    """What so many hosts say, all of them well but for `more`."""
    found: dict[str, Any] = {}
    for number in range(count):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        found[f"h{number:04}"] = {
            "machine": f"m{number}", "place": f"p{number}", "visible": None, "gpus": 8, "tpus": 0, "platforms": None,
            "tpu_lock": None, "cores": 96, "run_dir": {"path": "/r", "free": FREE, "why": None, "foreign": None},
            "name": f"n{number}", "resolves": [address], "owned": [address], "ssh_address": address,
            "versions": {"jax": "1"}, "data": None, "ports": (32768, 60999), **more,
        }  # fmt: skip
    return found


class Answers:
    """Hosts that answer at once. Those that `is_walled` takes (source, address) do not reach each other."""

    def __init__(self, hosts: Mapping[str, Any], is_walled: Callable[[str, str], bool] = lambda *_: False) -> None:
        self.hosts, self.is_walled, self.asked = hosts, is_walled, 0

    def ask(self, questions: Mapping[str, Message]) -> dict[str, Message]:
        return {host: self._answer(host, question) for host, question in questions.items()}

    def _answer(self, host: str, question: Message) -> Message:
        match question:
            case {"ask": "listen", "places": places}:
                return {"ports": [5000 + number for number in range(len(places))]}
            case {"ask": "addresses"}:
                return {"addresses": [self.hosts[host]["ssh_address"]]}
            case {"places": places}:
                self.asked += len(places)
                took = ["no answer within 5 s" if self.is_walled(host, address) else 1.0 for address, _ in places]
                return {"took": took, "sizes": [0] * len(places)}
            case _:
                raise AssertionError(question)


def findings(hosts: Mapping[str, Any], answers: Answers | None = None) -> list[CheckResult]:
    """All that preflight finds, without the devices."""
    answers = answers or Answers(hosts)
    found = checks.run_checks(NEEDS, hosts)
    _, _, more = network.check_network(answers, hosts, network.addresses(answers, NEEDS, hosts), None)
    return [*found, *more]


def figures(count: int) -> dict[str, Measured]:
    """Eight devices a host; of every hundredth host one is slow."""
    return {
        f"h{number:04}": Measured(
            kind=("gpu", "H100", 8),
            times={
                (place, work): 10.0 + (place + number) % 7 / 10 + 20 * (number % 100 == 5 and place == 3)
                for place in range(8)
                for work in ("product", "copy")
            },
        )
        for number in range(count)
    }


def judge_all(hosts: dict[str, Any]) -> None:
    unreachable = {f"away{number}": "No route to host" for number in range(len(hosts))}
    report = PreflightReport(findings=findings(hosts), unreachable=unreachable)
    assert len(report.problems) == 2
    assert len(report.blamed(list(hosts)[::2])) == 2 * len(hosts)
    assert not report.suspects


FULL = {"path": "/r", "free": 0, "why": None, "foreign": None}
COSTS: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "hosts that are well": (hosts_of, findings),
    "a firewall between all": (hosts_of, lambda hosts: findings(hosts, Answers(hosts, lambda *_: True))),
    "names that mean one address": (lambda count: hosts_of(count, resolves=["10.9.9.9"], owned=["10.9.9.9"]), findings),
    "one machine for all": (lambda count: hosts_of(count, place="p"), partial(checks.run_checks, NEEDS)),
    "full disks, and hosts that are away": (lambda count: hosts_of(count, run_dir=FULL), judge_all),
    "slow devices": (figures, lambda measured: slow_devices(list(measured), measured)),
}
BESIDE_LOG = {"hosts that are well", "a firewall between all", "full disks, and hosts that are away", "slow devices"}
"""In these each host tries 2 log2(n) others; the figures of devices are sorted, and each is found by bisection."""


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", COSTS)
def test_what_hosts_answer_costs_as_much_as_there_are(case: str, sizes: tuple[int, int]) -> None:
    make, judge = COSTS[case]
    found = exponent(lambda count: cpu_of(partial(judge, make(count))), *sizes, log_too=case in BESIDE_LOG)
    assert found <= LINEAR


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_a_firewall_between_many_hosts_is_said_once(count: int) -> None:
    hosts = hosts_of(count)
    report = PreflightReport(findings=findings(hosts, Answers(hosts, lambda *_: True)))
    assert 0 < len(report.problems) <= 5, report.problems
    assert f"h[0001-{count - 1:04}] do not reach h0000 at 10.0.0.0:5000 (no answer within 5 s)" in report.problems[0]


def test_some_hosts_behind_a_firewall_are_blamed_and_named_with_their_range() -> None:
    """Of 64 hosts nothing new comes in to 8: the job can go on with the others."""
    hosts = hosts_of(64)
    bad = [f"h{number:04}" for number in range(40, 48)]
    addresses = {hosts[host]["ssh_address"] for host in bad}
    report = PreflightReport(findings=findings(hosts, Answers(hosts, lambda _, address: address in addresses)))
    (text,) = report.problems
    assert text.endswith("; the same with other hosts: in all with " + ", ".join(bad))
    assert "do not reach h0042 at 10.0.0.42:5000" in text
    assert report.blamed() == {*bad}
    assert report.blamed(list(hosts)[:40]) == {*bad}


@pytest.mark.parametrize("count", [4, 20, 50])
def test_two_hosts_behind_firewalls_are_blamed_alone(count: int) -> None:
    """Each of them fails as often as the other one: once a host that reached neither was blamed with the first."""
    hosts = hosts_of(count)
    bad = {"h0001": "10.0.0.1", "h0003": "10.0.0.3"}
    report = PreflightReport(findings=findings(hosts, Answers(hosts, lambda _, address: address in bad.values())))
    assert report.blamed() == bad.keys()


def test_a_link_between_two_hosts_blames_neither() -> None:
    hosts = hosts_of(8)
    pair = {"h0002": "10.0.0.5", "h0005": "10.0.0.2"}
    report = PreflightReport(findings=findings(hosts, Answers(hosts, lambda host, to: pair.get(host) == to)))
    assert report.problems
    assert report.blamed() == frozenset()
    assert report.blamed([host for host in hosts if host != "h0005"]) == {"h0005"}


@pytest.mark.parametrize("count", [3, ALL_PAIRS, ALL_PAIRS + 1, 33, 100])
def test_hosts_try_those_some_places_before_and_behind_them(count: int) -> None:
    """Every host tries as many, and each is tried by as many: 2 log2(n), and the coordinator."""
    hosts = [f"h{number}" for number in range(count)]
    places = [Endpoint("h0", "a", 1, is_coordinator=True), *(Endpoint(host, "b", 2) for host in hosts)]
    targets = network._targets(places, hosts)

    def tries(source: int, place: Endpoint) -> bool:
        target = hosts.index(place.host)
        apart = min((source - target) % count, (target - source) % count)
        return apart > 0 and (place.is_coordinator or count <= ALL_PAIRS or apart & (apart - 1) == 0)

    for number, host in enumerate(hosts):
        assert targets[host] == [place for place in places if tries(number, place)]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_a_device_is_compared_with_the_median_of_the_others(count: int) -> None:
    """The median without the device itself, computed for all of them at once: of few it matters."""
    times = [10.0, 16.0, 10.5, 31.0, 10.0, 16.0, 9.0, 40.0, 12.0][:count]
    measured = {f"h{n}": Measured(kind=("gpu", "A", 1), times={(0, "copy"): t}) for n, t in enumerate(times)}
    found = slow_devices(list(measured), measured)
    expected = []
    for number, value in enumerate(times):
        others = sorted(times[:number] + times[number + 1 :])
        if others and value > 1.5 * (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2:
            expected.append(f"h{number}")
    assert list(found) == expected


def test_a_cause_that_many_hosts_have_is_told_once_and_kept_for_each() -> None:
    results = [
        CheckResult("error", "disk", (f"h{n:03}",), f"h{n:03}: /r has 0.{n} MiB free; make room") for n in range(1, 193)
    ]
    ((level, check, text),) = merge_alike(results)
    assert (level, check) == ("error", "disk")
    assert text == "h001: /r has 0.1 MiB free; make room; the same on h[002-192]"
    assert [text for _, _, text in merge_alike(results[:3])] == [result.text for result in results[:3]]
    assert PreflightReport(findings=results).blamed() == {f"h{n:03}" for n in range(1, 193)}
    assert not re.search(
        "the same", merge_alike([*results[:3], CheckResult("error", "port", ("h001",), "h001: no")])[-1][2]
    )
