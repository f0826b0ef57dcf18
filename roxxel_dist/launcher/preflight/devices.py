"""Are the accelerators of the hosts right, and as fast as the others? The judgement of what was measured.

A device is slow if its best time is larger than `FACTOR` times the median of the others of its kind, on whatever host,
and stays so when it is measured again. It is wrong if a sum of integers is not exact.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.preflight.checks import CheckResult, Level, Questions, fold
from roxxel_dist.process.exit_codes import pip_install

FACTOR, FACTOR_OF_CPU = 1.5, 4.0
"""Slower than the median of the others by this factor is slow. CPUs have other programs beside the check."""
ROUNDS = 3
"""How often a host that looks slow is measured, and those that it is compared with; the best times count. It looks slow
from half of what `FACTOR` adds: other programs may have disturbed those that it is compared with."""
NAMES = {"product": "a product of matrices", "copy": "a copy in its memory", "sum": "a sum over a host's devices"}
DEVICE, COMMAND, VENDOR = "device", "preflight", "driver"
"""The names of the checks."""

Figures = dict[tuple[int, str], float]
"""Milliseconds by (the place of a device on its host, or -1 for all of them; the work)."""


@dataclass(kw_only=True)
class Measured:
    """The devices of one host, as they were measured."""

    kind: tuple[str, str, int]
    """Platform, `jax.Device.device_kind`, and how many there are: only such hosts are compared."""
    times: Figures

    def merge(self, other: "Measured") -> None:
        """Keep the better time of each work."""
        for key, value in other.times.items():
            self.times[key] = min(value, self.times.get(key, value))


def collect(questions: Questions, hosts: Sequence[str]) -> dict[str, Message]:
    """Collect what the programs of hosts have found, when all have ended. Hosts that do not answer are left out."""
    answers: dict[str, Message] = {}
    pending = [host for host in hosts if host not in questions.unreachable]
    while pending:
        replies = questions.ask({host: {"ask": "checked"} for host in pending})
        answers |= {host: reply for host, reply in replies.items() if "problems" in reply}
        pending = [host for host, reply in replies.items() if reply.get("pending")]
    return answers


def figures(answer: Mapping[str, Any]) -> Measured:
    """The times of `devices.device_check.measure`."""
    times: Figures = {
        (int(device["device"]), work): float(value)
        for device in answer["devices"]
        for work, value in device["times"].items()
    }
    if "sum" in answer:
        times[-1, "sum"] = float(answer["sum"])
    return Measured(kind=(answer["platform"], answer["kind"], len(answer["devices"])), times=times)


def unlike_hosts(measured: Mapping[str, Measured], hosts: Sequence[str]) -> Iterator[CheckResult]:
    """The hosts on which jax finds fewer devices than on most hosts, or a CPU where most have another."""
    kinds = Counter(one.kind for one in measured.values())
    platform, kind, count = max(kinds, key=lambda key: (kinds[key], key[0] != "cpu", key[2]), default=("cpu", "", 1))
    for host in hosts:
        if host in measured:
            own = measured[host].kind
            fewer = own[:2] == (platform, kind) and own[2] < count
            if fewer or (own[0] == "cpu" and platform != "cpu"):
                text = f"{host}: jax finds {own[2]} devices ({own[1]}) there, and {count} ({kind}) on most hosts"
                yield CheckResult("error", DEVICE, (host,), text, suspect=True)


def slow_devices(
    hosts: Sequence[str], measured: Mapping[str, Measured], part: float = 1.0
) -> dict[str, list[CheckResult]]:
    """Devices by host that are slower than the others on all measured hosts of its kind, by 1 and this part of the
    excess of the factor over 1."""
    alike: dict[tuple[object, str], list[float]] = {}
    for one in measured.values():
        for (_, work), value in one.times.items():
            alike.setdefault((one.kind, work), []).append(value)
    for values in alike.values():
        values.sort()
    found: dict[str, list[CheckResult]] = {}
    for host in hosts:
        own = measured[host]
        factor = 1 + part * ((FACTOR_OF_CPU if own.kind[0] == "cpu" else FACTOR) - 1)
        for (place, work), value in own.times.items():
            usual = _median_of_others(alike[own.kind, work], value)
            if usual is not None and value > factor * usual:
                which = f"all devices need {value:.1f} ms" if place < 0 else f"device {place} needs {value:.1f} ms"
                times = f"{value / usual:.1f} times the median of others ({usual:.1f} ms)"
                text = f"{host}: {which} for {NAMES[work]}, {times}"
                found.setdefault(host, []).append(CheckResult("warning", DEVICE, (host,), text, suspect=True))
    return found


def _median_of_others(values: Sequence[float], value: float) -> float | None:
    """The median of sorted values without this one of them; None where it is the only one."""
    place, rest = bisect_left(values, value), len(values) - 1
    middle = [values[number + (number >= place)] for number in {(rest - 1) // 2, rest // 2} if rest]
    return sum(middle) / len(middle) if middle else None


def findings_of(host: str, answer: Mapping[str, Any]) -> list[CheckResult]:
    """The findings in what a host's checks have found there, its times left out."""
    found: list[tuple[Level, str, str, bool]] = []
    if why := answer.get("command"):
        found.append(("error", COMMAND, f"the command of --preflight {why}", True))
    for level, text in answer.get("problems", ()):
        found.append(("error" if level == "error" else "warning", VENDOR, text, level != "warning"))
    devices = answer.get("devices", {})
    if why := devices.get("why"):
        found.append(("error", DEVICE, why, True))
    if unused := devices.get("unused"):  # without a word of JAX_PLATFORMS
        extra = pip_install("tpu" if "GPU" not in unused else "cuda12")
        text = f"it has {unused}, and jax uses the CPU: {extra}, or set JAX_PLATFORMS=cpu if the CPU is meant"
        found.append(("warning", DEVICE, text, False))
    for device in devices.get("devices", ()):
        for work in device["wrong"]:
            text = f"device {device['device']} is wrong in {NAMES[work]}: the result is not exact; do not use this host"
            found.append(("error", DEVICE, text, True))
    return [CheckResult(level, check, (host,), f"{host}: {text}", suspect=bad) for level, check, text, bad in found]


def devices_made(answers: Mapping[str, Message]) -> list[CheckResult]:
    """Which devices jax has made, on which hosts."""
    groups: dict[str, list[str]] = {}
    for host, answer in answers.items():
        if "count" in (found := answer.get("devices", {})):
            kind = "" if found["kind"] == found["platform"] else f" ({found['kind']})"
            groups.setdefault(f"jax makes {found['count']} {found['platform']} device(s){kind}", []).append(host)
    return [CheckResult("ok", "jax", tuple(hosts), f"{text} on {fold(hosts)}") for text, hosts in groups.items()]


def excuse_all(results: dict[str, list[CheckResult]], answers: Mapping[str, Message]) -> None:
    """Blame the check of devices, and not the hosts, where it can run on none of them: one warning."""
    asked = [host for host, answer in answers.items() if "devices" in answer]
    broken = [host for host in asked if "why" in answers[host]["devices"]]
    if asked and broken == asked:
        for host in asked:
            results[host] = [result for result in results[host] if result.check != DEVICE]
        text = f"the devices could not be checked on any of {len(asked)} hosts: {answers[asked[0]]['devices']['why']}"
        results[asked[0]].append(CheckResult("warning", DEVICE, tuple(asked), text))
