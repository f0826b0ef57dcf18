"""Sweeps for tests: in this process or in one of their own, on a Ray that several tests share."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trial_bodies

from roxxel_dist.sweep.driver.controller import Ending, run_sweep
from roxxel_dist.sweep.driver.options import SweepOptions
from roxxel_dist.sweep.local_ray import TOKEN, WAIT_ENV, WAIT_S
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.space.sweep_file import sweep_of
from roxxel_dist.sweep.study.journal import read_history, without_torn_tail

ONE = {"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0}}}
HOLDER = """
import os, sys, tempfile
import ray
with tempfile.TemporaryDirectory(prefix="r") as folder:
    for number in range(3):  # Ray gives its node 30 s to start, which a machine with much to do may not have
        try:
            ray.init(
                address="local", num_cpus=int(sys.argv[1]), object_store_memory=80_000_000, include_dashboard=False,
                log_to_driver=False, configure_logging=False, _temp_dir=os.path.join(folder, str(number)),
            )
            break
        except Exception:
            ray.shutdown()
            if number == 2:
                raise
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


@contextmanager
def shared_ray(workers: int) -> Iterator[str]:
    """The address of a Ray with room for so many trials; this process and those it starts know its token."""
    here = Path(__file__).parent  # Ray's workers have the environment of who started Ray
    with tempfile.TemporaryDirectory(prefix="r") as folder, pytest.MonkeyPatch.context() as patch:
        token = Path(folder, "token")
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(WAIT_ENV, str(WAIT_S))
        env = {**os.environ, "PYTHONPATH": f"{here.parents[1]}:{here}"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        with subprocess.Popen([sys.executable, "-c", HOLDER, str(workers)], **pipes) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            address = holder.stdout.readline().strip()
            assert address, "Ray has not started"
            patch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # must not be used
            yield address
            holder.stdin.close()


class Study:
    """A study, and how often it was run."""

    def __init__(self, path: Path, address: str | None) -> None:
        self.path, self.address = path, address
        self.said: list[str] = []
        self.more: dict[str, Any] = {}
        """Further settings of a driver that runs in its own process."""
        self.extras: dict[str, Any] = {}
        """The second file of the sweep."""
        self.changed: Callable[[Any, int | None], None] = lambda history, number: None
        self.changes = 0
        path.mkdir(exist_ok=True)

    def run(
        self, body: Callable[..., Any], sweep: dict[str, Any] | None = None, resources: Any = None, **options: Any
    ) -> Ending:
        """In this process."""

        def changed(history: Any, number: int | None) -> None:
            self.changes += 1
            self.changed(history, number)

        given = sweep_of(sweep or ONE, self.extras)
        return run_sweep(
            self.path, given, lambda: make(given, seed=1), body, self.task,
            SweepOptions(ray_address=self.address, **options), {"CPU": 1.0, **(resources or {})},
            on_change=changed, log=self.said.append,
        )  # fmt: skip

    def start(self, body: str, sweep: dict[str, Any] | None = None, **options: Any) -> "subprocess.Popen[str]":
        """In a process of its own, in a process group of its own."""
        told = {"sweep": sweep or ONE, "extras": self.extras, "body": body, **self.more}
        told |= {"options": {"ray_address": self.address, **options}}
        return subprocess.Popen(
            [sys.executable, trial_bodies.__file__, str(self.path), json.dumps(told)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, process_group=0,
        )  # fmt: skip

    def task(self, trial: int, params: dict[str, Any], attempt: int) -> dict[str, Any]:
        folder, log = str(self.path), str(self.path / "logs" / f"{trial}.log")
        more = self.more.get("task", {})
        return {"trial": trial, "params": params, "attempt": attempt, "folder": folder, "log": log, **more}

    @property
    def history(self) -> Any:
        return read_history(self.path)

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.path / "journal.jsonl"
        lines = without_torn_tail(path.read_bytes()).splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def ends(self) -> list[int]:
        """Which trials have a result or a failure, once for each."""
        return sorted(event["trial"] for event in self.events if event["event"] in ("result", "fail"))
