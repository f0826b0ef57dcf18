"""What the vendor's tools say of a host's accelerators: pure functions of their output. No device is opened.

nvidia-smi is asked for XML, which is the same in every language; names of its elements differ between versions.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NamedTuple
from xml.etree import ElementTree

Level = Literal["error", "doubt", "warning"]
"""error: nothing may run there. doubt: another host is better, if there is one. warning: a person should know it."""
LOST = re.compile(r"Unable to determine the device handle for (?:GPU\s*)?([0-9A-Fa-f:.]+):\s*(.*)")
NONE = ("", "N/A", "None", "No", "0", "[N/A]", "[Not Supported]", "Not Supported")
FATAL = {
    "remapped_row_failure": "a row of its memory could not be replaced",
    "unrepairable_memory": "its memory cannot be repaired",
    "sram_threshold_exceeded": "its SRAM has had too many uncorrectable errors",
    "reset_required": "it must be reset",
}
"""Elements that say Yes where a GPU cannot be used."""
PENDING = {
    "remapped_row_pending": "a row of its memory waits for a reset to be replaced",
    "pending_retirement": "a page of its memory waits for a reset to be retired",
    "pending_blacklist": "a page of its memory waits for a reset to be retired",
    "channel_repair_pending": "a memory channel waits for a reset to be repaired",
    "tpc_repair_pending": "a processor cluster waits for a reset to be repaired",
    "drain_and_reset_recommended": "the driver recommends a drain and a reset",
}
"""Elements that say Yes where a GPU should be reset soon."""
SLOW = {
    "hw_slowdown": "its hardware slows it down",
    "hw_thermal_slowdown": "it is too hot, and its hardware slows it down",
    "hw_power_brake_slowdown": "its power supply slows it down",
    "sw_thermal_slowdown": "it is too hot, and the driver slows it down",
}
"""Reasons for lower clocks that are no setting and no idle state."""


class Problem(NamedTuple):
    """What is wrong with one accelerator."""

    level: Level
    text: str


def gpu_problems(text: str, code: int = 0, *, compute: bool = False) -> list[Problem]:
    """What `nvidia-smi -q -x` says: its output, in whatever state it is, and its exit code.

    `compute`: the GPUs have computed meanwhile, so that a failure is one of the tool.
    """
    problems = [Problem("error", f"GPU {bus}: {why.strip()}") for bus, why in LOST.findall(text)]
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    gpus: list[ElementTree.Element] = []
    if 0 <= start < end:
        with suppress(ElementTree.ParseError):
            gpus = ElementTree.fromstring(text[start : end + len("</nvidia_smi_log>")]).findall("gpu")
    if not gpus:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
        level: Level = "error" if code and not compute else "warning"
        return problems or [Problem(level, f"nvidia-smi failed (code {code}): {last[:200]}")]
    for number, gpu in enumerate(gpus):
        problems += [Problem(level, f"{_name(gpu, number)}: {why}") for level, why in _problems_of(gpu)]
    return problems


def _name(gpu: ElementTree.Element, number: int) -> str:
    return f"GPU {number} ({gpu.get('id', 'no address')})"


def _problems_of(gpu: ElementTree.Element) -> Iterator[tuple[Level, str]]:
    words = {element.tag: (element.text or "").strip() for element in gpu.iter() if len(element) == 0}
    for name, why in FATAL.items():
        if words.get(name) == "Yes":
            yield "error", why
    action = words.get("gpu_recovery_action", "")
    if action not in NONE:
        yield "doubt" if action.startswith("Drain") else "error", f"its recovery action is {action!r}"
    for why in dict.fromkeys(PENDING[name] for name in PENDING if words.get(name) == "Yes"):
        yield "doubt", why
    if errors := _uncorrectable(gpu):
        yield "doubt", f"{errors} uncorrectable memory errors since its driver was loaded (ECC)"
    for name, why in SLOW.items():
        reasons = (words.get(f"clocks_{kind}_reason_{name}") for kind in ("event", "throttle"))
        if "Active" in reasons:
            yield "doubt", f"{why} ({name})"
    fabric = gpu.find("fabric")
    state = "" if fabric is None else (fabric.findtext("state") or "").strip()
    status = "" if fabric is None else (fabric.findtext("status") or "").strip()
    if state not in (*NONE, "Completed") or status not in (*NONE, "Success"):
        yield "doubt", f"its NVLink fabric is not ready (state {state}, status {status})"


def _uncorrectable(gpu: ElementTree.Element) -> int:
    """Errors since the driver was loaded; old drivers count them as double bits."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return 0
    names = [element for element in volatile.iter() if "uncorrectable" in element.tag]
    counted = names or volatile.findall("double_bit/total")
    texts = [(element.text or "").strip() for element in counted]
    return sum(int(text) for text in texts if text.isdecimal())
