"""Programs that check this host before a start, while it answers other questions: vendor's tools, devices, the user's.

They are asked for with the facts of the host (`probe.py`), run beside each other, and are collected later.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from roxxel_dist.launcher.host import process_tree, vendor
from roxxel_dist.launcher.host.command import LOOK_S, Command
from roxxel_dist.launcher.job.limits import Limits

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
        """What they found, when all have ended; {"pending": True} where that takes longer than a moment."""
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

    def _vendor(self, *, compute: bool) -> list[vendor.Problem]:
        """What the vendor's tools say. Where the accelerators have computed meanwhile, a failure is one of the tool."""
        problems: list[vendor.Problem] = []
        if (program := self._programs.get("nvidia-smi")) is not None:
            if program.timed_out:
                text = f"nvidia-smi did not answer within {self._limits.tool_s:g} s: "
                text += "is persistence mode off?" if compute else "the driver or a GPU is stuck"
                return [*problems, vendor.Problem("warning" if compute else "error", text)]
            problems += vendor.gpu_problems(program.text, program.code, compute=compute)
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
