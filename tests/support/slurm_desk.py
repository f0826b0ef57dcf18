"""A user of a SLURM: submits launches, waits, and looks at what came of them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from hosts import ROOT
from slurm_cluster import Slurm

LIMIT_S = 700.0
UNLIKE = {"ms_per_step", "tokens_per_s", "ram_gb"}
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass
class Desk:
    """A user of a SLURM, in a folder that all nodes see."""

    slurm: Slurm
    folder: Path

    def launch(self, *words: object, **env: str) -> str:
        """Submit a job, and return its number."""
        variables = {"PYTHONPATH": str(ROOT), **env}
        command = [sys.executable, "-m", "roxxel_dist", "launch", "slurm", *words]
        told = self.slurm.run(*command, cwd=self.folder, env=variables)
        assert told.returncode == 0, told.stderr
        return told.stdout.strip()

    def look(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """Another command, from the login node."""
        return self.slurm.run(
            sys.executable, "-m", "roxxel_dist", *words, cwd=self.folder, env={"PYTHONPATH": str(ROOT)}
        )

    def up(self, count: int) -> None:
        """Wait for so many ranks."""
        self.until(lambda: len(list(self.folder.glob("up.*"))) == count, "the ranks")

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"waited for {what}: {self.log()}"
            time.sleep(0.05)

    def pid(self, host: str, part: str) -> int:
        """The one process of a host (the oldest of several) whose command line holds `part`."""
        return min(pid for pid in self.slurm.hosts.processes(host) if part in words_of(pid))

    def step(self) -> int:
        """How many steps were logged."""
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def rows(self, run: str = "run") -> list[dict[str, object]]:
        """All that must be the same in every run, a row a step."""
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in UNLIKE} for line in lines]

    def log(self) -> str:
        """What the launcher has said."""
        return "".join(path.read_text() for path in self.folder.rglob("launcher.log"))

    def left(self) -> list[str]:
        """What runs on the nodes beside SLURM's own."""
        hosts = self.slurm.hosts
        found = [words_of(pid) for name in hosts.names for pid in hosts.processes(name)]
        return [words for words in found if words and "slurmd -D" not in words and "slurmstepd" not in words]


def words_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""
