"""The table of failures, on real clusters: the same failure has the same outcome over ssh, by any command, in a SLURM
job, on the nodes of Ray, and where each host has a launcher of its own that another system starts."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hosts import ROOT, Cluster
from ray_nodes import RayNodes, words
from slurm_desk import OVER, Desk, words_of

from roxxel_dist.launcher.backends.kubernetes.forms import PREEMPTION_CODES, RETRY_CODES

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("ray")]  # one worker: a cluster of Ray at a time
Until = Callable[[Callable[[], object], str], None]

PROGRAM = """
import os, signal, sys, time
from roxxel_dist.process.progress import Progress
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
        with open(f"tmp.{rank}", "w") as file:
            file.write(os.uname().nodename)
        os.rename(f"tmp.{rank}", f"up.{attempt}.{rank}")
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
    """A pattern in its words; HOST is the one of rank 1."""
    attempts: int = 2
    options: tuple[object, ...] = ()


KILLED = r"rank 1 failed first: signal SIGKILL, in step \d+ \(host HOST"
TABLE = {
    "kill -9 of a rank": Row(0, KILLED),
    "kill -9 of an agent": Row(0, r"the agent on host HOST ended before its ranks"),
    "kill -9 of a rank, no restart left": Row(137, KILLED, 1, ("--max-restarts", 0)),
    "abort": Row(0, r"rank 1 failed first: signal SIGABRT, in step 4 \(host HOST"),
    "runtime error": Row(0, r"rank 1 failed first: exit code 77 .*\(host HOST"),
    "runtime error twice": Row(77, r"rank 1 failed in step 4 in an earlier attempt too"),
    "user's bug": Row(1, r"rank 1 failed first: .*\(host HOST", 1),
    "hang": Row(0, r"rank 1 .*stuck", 2, ("--step-timeout", 5)),
    "SIGTERM of the launcher": Row(42, "stopped on request|SLURM asked it to end", 1),
}
LIMIT_S = 240.0
"""Only a hang reaches it."""


class Over:
    """A launch over ssh, or by a command that enters each host."""

    def __init__(self, hosts: Cluster, folder: Path, way: str = "ssh") -> None:
        self.hosts, self.folder, self.way = hosts, folder, way

    def start(self, *words: object) -> None:
        command = [sys.executable, "-m", "roxxel_dist", *self.hosts.launch(self.way), *words]
        with (self.folder / "said").open("wb") as said:
            self.process = self.hosts.popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def name(self, host: str) -> str:
        """How the launcher calls it."""
        return host

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(LIMIT_S)
        return code, (self.folder / "said").read_text()


class OnRay(Over):
    """A launch on the nodes of a cluster of Ray, which knows hosts by their addresses."""

    def __init__(self, nodes: RayNodes, folder: Path) -> None:
        super().__init__(nodes.hosts, folder)
        self.nodes = nodes

    def start(self, *options: object) -> None:
        command, env = words(self.nodes.address, 2, *options), self.nodes.environment
        with (self.folder / "said").open("wb") as said:
            self.process = self.hosts.popen(
                command, on="h1", cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def name(self, host: str) -> str:
        return self.hosts.address(host)


class Members(Over):
    """A launch a host, and a system that does with them what the rules of the JobSet say."""

    def start(self, *options: object) -> None:
        self.options, self.deleted = options, False
        self.start_all(0)

    def start_all(self, attempt: int) -> None:
        self.members = [self.start_one(number, attempt) for number in range(2)]

    def start_one(self, number: int, attempt: int) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "roxxel_dist", "launch", "member", "--hosts", 2, "--index", number]
        program += ["--first", "h1", "--run-id", "mine", "--attempt", attempt, "--grace", 5, *self.options]
        env = {"PYTHONPATH": str(ROOT)}
        with (self.folder / f"said.{attempt}.{number}").open("wb") as said:
            return self.hosts.popen(
                program,
                on=f"h{number + 1}",
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def terminate(self) -> None:  # as of pods that are deleted
        self.deleted = True
        for member in self.members:
            member.terminate()

    def end(self) -> tuple[int, str]:
        attempt, most = 0, 0 if "--max-restarts" in self.options else 3
        while (code := self.first_failure()) in (*RETRY_CODES, *PREEMPTION_CODES) and attempt < most:
            if all(member.returncode == 42 for member in self.members):  # it was deleted
                break
            attempt += 1
            self.start_all(attempt)
        return code, "".join(path.read_text() for path in sorted(self.folder.glob("said.*")))

    def first_failure(self) -> int:
        """The code of the pod that fails first, when the others have been ended; 0 where all end well."""
        end, living = time.monotonic() + LIMIT_S, list(self.members)
        while living:
            assert time.monotonic() < end
            for member in [member for member in living if member.poll() is not None]:
                living.remove(member)
                if member.returncode != 0:
                    for other in living:
                        if not self.deleted:  # a second request kills the ranks
                            other.terminate()
                        other.wait(LIMIT_S)
                    return member.returncode
            time.sleep(0.02)
        return 0


class Within:
    """A launch in a SLURM job."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.hosts, self.folder = desk, desk.slurm.hosts, desk.folder

    def start(self, *words: object) -> None:
        self.number = self.desk.launch("--nodes", 2, "--max-requeues", 0, *words)

    def name(self, host: str) -> str:
        return host

    def terminate(self) -> None:  # as `#SBATCH --signal=B:TERM@…` before the time limit
        self.desk.slurm.run("scancel", "--batch", "--signal=TERM", self.number)

    def end(self) -> tuple[int, str]:
        job = self.desk.slurm.wait(self.number, *OVER, limit=LIMIT_S)
        return int(job["ExitCode"].partition(":")[0]), self.desk.log()


def place_of(backend: str, folder: Path, request: pytest.FixtureRequest) -> Over | Within:
    match backend:
        case "slurm":
            return Within(request.getfixturevalue("desk")())
        case "ray":
            return OnRay(request.getfixturevalue("nodes"), folder)
        case "member":
            return Members(request.getfixturevalue("cluster")(2), folder)
        case _:
            return Over(request.getfixturevalue("cluster")(2), folder, backend)


def oldest(hosts: Cluster, host: str, part: str) -> int:
    """Of the processes of a host whose command holds `part`: the others are spares, or forks of it."""
    found = [psutil.Process(pid) for pid in hosts.processes(host) if part in words_of(pid)]
    return min((one for one in found if "srun" not in one.cmdline()[0]), key=psutil.Process.create_time).pid


CASES = [(backend, failure) for backend in ("ssh", "exec", "slurm", "ray", "member") for failure in TABLE]
CASES.remove(("member", "runtime error twice"))  # only the JobSet knows of earlier attempts, and it counts them


@pytest.mark.parametrize(("backend", "failure"), CASES)
@pytest.mark.timeout(600)
def test_the_same_failure_has_the_same_outcome(
    backend: str, failure: str, tmp_path: Path, until: Until, request: pytest.FixtureRequest
) -> None:
    place = place_of(backend, tmp_path, request)
    row, program = TABLE[failure], place.folder / "program.py"
    program.write_text(PROGRAM)
    options = ["--env", f"PYTHONPATH={ROOT}", "--env", "JAX_PLATFORMS=cpu", *row.options]
    place.start(*options, "--", "python", program, failure)
    until(lambda: len(list(place.folder.glob("up.0.*"))) == 2, "the third step of both ranks")
    host = (place.folder / "up.0.1").read_text()
    if failure.startswith("kill -9"):
        part = "host.agent" if "agent" in failure else "host.worker python"
        place.hosts.signal(host, oldest(place.hosts, host, part), signal.SIGKILL)
    elif failure == "SIGTERM of the launcher":
        place.terminate()
    code, said = place.end()
    assert code == row.code, said
    assert re.search(row.said.replace("HOST", re.escape(place.name(host))), said), said
    assert len(list(place.folder.glob("up.*.0"))) == row.attempts, said

    def left() -> list[str]:
        words = [words_of(pid) for name in place.hosts.names for pid in place.hosts.processes(name)]
        return [one for one in words if "roxxel_dist" in one or "program.py" in one]

    until(lambda: not left(), "everything to be gone")
