"""Programs that check this host before a start, while it answers other questions: vendor's tools, devices, the user's.

They are asked for with the facts of the host (`probe.py`), run beside each other, and are collected later.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

from roxxel_dist.launcher.host import process_tree
from roxxel_dist.launcher.host.command import LOOK_S, Command
from roxxel_dist.launcher.job.spec import Limits

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
    """A problem of one accelerator."""

    level: Level
    text: str


def gpu_problems(text: str, code: int = 0, *, compute: bool = False) -> list[Problem]:
    """The problems that `nvidia-smi -q -x` names, from its output, in whatever state it is, and its exit code.

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


MODULE = "roxxel_dist.devices.device_check"
CHIPS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
"""How the chips of one TPU host lie."""


class HostChecks:
    """The checks that were asked for.

    Args:
        question: `mode` (auto, on, off), `env` for all programs, `devices` (simulated ones, or None) and `command`
            (the user's, or None); `lists` where jax is to make its devices, also where they are not checked.
        info: the facts of this host.
        limits: of the job.
    """

    def __init__(self, question: Mapping[str, Any], info: Mapping[str, Any], limits: Limits) -> None:
        self._limits = limits
        self._programs: dict[str, Command] = {}
        self._problems: dict[str, str] = {}
        self._env = {**os.environ, **question["env"]}
        mode, self._info = question["mode"], info
        platforms = self._env.get("JAX_PLATFORMS") or info["platforms"] or ""
        has_devices = bool(info["gpus"] or info["tpus"]) and platforms.split(",")[0] != "cpu"
        self._tpus = info["tpus"] if has_devices else 0
        self._has_devices = has_devices
        if mode == "on" or (mode == "auto" and has_devices):
            self._start_devices(question["devices"], "measure")
            if has_devices and info["gpus"] and shutil.which("nvidia-smi", path=self._env.get("PATH")):
                self._start("nvidia-smi", ["nvidia-smi", "-q", "-x"], self._limits.tool_s)
        elif question.get("lists") and info.get("no_devices") is None:
            self._start_devices(question["devices"], "names")
        if question["command"] is not None:
            self._start("command", ["/bin/sh", "-c", question["command"]], self._limits.command_s)

    def __bool__(self) -> bool:
        """Whether there is anything to collect."""
        return bool(self._programs or self._problems)

    def _start_devices(self, simulated: int | None, find: str) -> None:
        env = {"PJRT_NPROC": str(simulated or 1)} if simulated or not self._tpus else {}
        env |= {"ROXXEL_LOCAL_DEVICES": str(simulated)} if simulated else {}
        if shape := CHIPS.get(self._tpus):  # else one host of a slice waits for all others
            env |= {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": shape}
            env |= {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost", "CLOUD_TPU_TASK_ID": "0"}
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        # It asks itself to end with this process: a fork of one that uses jax may hang, and has a warning.
        program = f"from {process_tree.__name__} import die_with_parent; die_with_parent(); "
        program += f"import {MODULE} as check; check.main(check.{find})"
        self._start("devices", [sys.executable, "-P", "-c", program], self._limits.devices_s, env)

    def _start(self, name: str, argv: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> None:
        env = {**self._env, **(env or {}), "LC_ALL": "C"} if name != "command" else self._env
        try:
            self._programs[name] = Command(argv, limit_s, env=env, forks=name != "devices")
        except OSError as error:
            self._problems[name] = f"cannot be started ({error.strerror})"

    def collect(self) -> dict[str, Any]:
        """Collect what the programs found, when all have ended; {"pending": True} while some run."""
        end = time.monotonic() + self._limits.checks_s
        while [program for program in self._programs.values() if not program.has_ended]:  # each is looked at
            if time.monotonic() >= end:
                return {"pending": True}
            time.sleep(LOOK_S)
        devices = self._devices() if "devices" in self._programs or "devices" in self._problems else {}
        compute = devices.get("platform", "cpu") != "cpu"
        found: dict[str, Any] = {"pending": False, "problems": [*self._vendor(compute=compute)]}
        if devices:
            found["devices"] = devices
        if "command" in self._programs or "command" in self._problems:
            found["command"] = self._command()
        return found

    def _devices(self) -> dict[str, Any]:
        """What `device_check.measure` gave, or `why` there is nothing."""
        if why := self._problems.get("devices"):
            return {"why": f"the check of its devices {why}"}
        program = self._programs["devices"]
        if program.timed_out:
            return {"why": f"its devices did not end the check within {self._limits.devices_s:g} s"}
        if program.code == 0:
            lines = [line for line in program.text.splitlines() if line.startswith("{")]
            with contextlib.suppress(ValueError, IndexError):
                found = dict(json.loads(lines[-1]))
                counts = {"GPUs": self._info["gpus"] or 0, "TPU chips": self._info["tpus"]}
                unused = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
                return found | ({"unused": unused} if self._has_devices and found["platform"] == "cpu" else {})
        return {"why": f"the check of its devices ended with code {program.code}: {program.last_line}"}

    def _vendor(self, *, compute: bool) -> list[Problem]:
        """What the vendor's tools say. Where the accelerators have computed meanwhile, a failure is one of the tool."""
        problems: list[Problem] = []
        if (program := self._programs.get("nvidia-smi")) is not None:
            if program.timed_out:
                text = f"nvidia-smi did not answer within {self._limits.tool_s:g} s: "
                text += "is persistence mode off?" if compute else "the driver or a GPU is stuck"
                return [*problems, Problem("warning" if compute else "error", text)]
            problems += gpu_problems(program.text, program.code, compute=compute)
        return problems

    def _command(self) -> str:
        """What is wrong by the user's command; empty where nothing is."""
        if why := self._problems.get("command"):
            return why
        program = self._programs["command"]
        if program.why:
            return program.why
        return f"ended with code {program.code}: {program.last_line}" if program.code else ""

    def close(self) -> None:
        """End what still runs."""
        for program in self._programs.values():
            program.kill()
        self._programs.clear()
