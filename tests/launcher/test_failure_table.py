"""The table of failures, on real clusters: over ssh and in a SLURM job the same failure has the same outcome."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import ROOT, Cluster
from slurm_desk import OVER, Desk, words_of

pytestmark = pytest.mark.cluster
Until = Callable[[Callable[[], object], str], None]

PROGRAM = """
import os, signal, sys, time
from roxxel_dist.cluster.progress import Progress
rank, attempt, how = int(os.environ["ROXXEL_PROCESS_ID"]), int(os.environ["ROXXEL_ATTEMPT"]), sys.argv[1]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
progress = Progress.from_env(rank)
for step in range(1, 200):
    progress.enter(step)
    if asked:
        print("saved", flush=True)
        sys.exit(42)
    if step == 3:
        open(f"up.{attempt}.{rank}", "w").close()
    if step > 3 and (how, rank) == ("user's bug", 1):
        raise KeyError("a bug")
    if step > 3 and rank == 1 and (attempt == 0 or how == "runtime error twice"):
        if how.startswith("runtime error"):
            import jax
            raise jax.errors.JaxRuntimeError("INTERNAL: an uncorrectable ECC error")
        if how == "abort":
            os.abort()
        if how == "hang":
            time.sleep(1000)
    if step > 20 and attempt > 0:
        break
    progress.finish(step)
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Row:
    """A failure and what has to come of it."""

    code: int
    """Of the launcher in its last attempt."""
    said: str
    """A pattern in its words."""
    attempts: int = 2
    options: tuple[object, ...] = ()


KILLED = r"rank 1 failed first: signal SIGKILL, in step \d+ \(host h2"
TABLE = {
    "kill -9 of a rank": Row(0, KILLED),
    "kill -9 of an agent": Row(0, r"the agent on host h2 ended before its ranks"),
    "kill -9 of a rank, no restart left": Row(137, KILLED, 1, ("--max-restarts", 0)),
    "abort": Row(0, r"rank 1 failed first: signal SIGABRT, in step 4 \(host h2"),
    "runtime error": Row(0, r"rank 1 failed first: .*\(host h2"),
    "user's bug": Row(1, r"rank 1 failed first: .*\(host h2", 1),
    "hang": Row(0, r"rank 1 .*stuck", 2, ("--step-timeout", 5)),
    "SIGTERM of the launcher": Row(42, "stopped on request|SLURM asked it to end", 1),
}


class Over:
    """A launch over ssh."""

    def __init__(self, hosts: Cluster, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    def start(self, *words: object) -> None:
        program = [sys.executable, "-m", "roxxel_dist", "launch", "ssh", "--hosts", "h1,h2"]
        command = [*program, "--ssh-config", self.hosts.ssh_config, *words]
        with (self.folder / "said").open("wb") as said:
            self.process = self.hosts.popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(90)
        return code, (self.folder / "said").read_text()


class Within:
    """A launch in a SLURM job."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.hosts, self.folder = desk, desk.slurm.hosts, desk.folder

    def start(self, *words: object) -> None:
        self.number = self.desk.launch("--nodes", 2, "--max-requeues", 0, *words)

    def terminate(self) -> None:  # as `#SBATCH --signal=B:TERM@…` before the time limit
        self.desk.slurm.run("scancel", "--batch", "--signal=TERM", self.number)

    def end(self) -> tuple[int, str]:
        job = self.desk.slurm.wait(self.number, *OVER, limit=90)
        return int(job["ExitCode"].partition(":")[0]), self.desk.log()


@pytest.mark.parametrize("failure", TABLE)
@pytest.mark.parametrize("backend", ["ssh", "slurm"])
def test_the_same_failure_has_the_same_outcome(
    backend: str, failure: str, tmp_path: Path, until: Until, request: pytest.FixtureRequest
) -> None:
    place = (
        Over(request.getfixturevalue("cluster")(2), tmp_path)
        if backend == "ssh"
        else Within(request.getfixturevalue("desk")())
    )
    row, program = TABLE[failure], place.folder / "program.py"
    program.write_text(PROGRAM)
    words = ["--env", f"PYTHONPATH={ROOT}", "--env", "JAX_PLATFORMS=cpu", *row.options]
    place.start(*words, "--", "python", program, failure)
    until(lambda: len(list(place.folder.glob("up.0.*"))) == 2, "the third step of both ranks")
    victim = {"rank": "host.worker python", "agent": "host.agent"}.get(
        failure.partition(" of a")[2].lstrip("n ").split(",")[0]
    )
    if victim is not None:
        pids = [pid for pid in place.hosts.processes("h2") if victim in words_of(pid) and "srun" not in words_of(pid)]
        os.kill(max(pids) if "worker" in victim else min(pids), signal.SIGKILL)
    elif failure == "SIGTERM of the launcher":
        place.terminate()
    code, said = place.end()
    assert code == row.code, said
    assert re.search(row.said, said), said
    assert len(list(place.folder.glob("up.*.0"))) == row.attempts, said

    def left() -> list[str]:
        words = [words_of(pid) for name in place.hosts.names for pid in place.hosts.processes(name)]
        return [one for one in words if "roxxel_dist" in one or "program.py" in one]

    until(lambda: not left(), "everything to be gone")
