"""Ranks on the nodes of a SLURM job: one agent a node, each in a job step of its own, whose `srun` is the channel.

Decision 26.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import ClassVar

from roxxel_dist.launcher.backends.slurm.grow import GrowJobs
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import python_words
from roxxel_dist.launcher.transport.connection import start_near
from roxxel_dist.process.exit_codes import UserError

OPTIONS = (
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # a step of the user's own may be on the node
    "--mpi=none",
    "--unbuffered",
    "--wait=0",
    "--kill-on-bad-exit=0",
    "--quiet",
)
ASK_S = 3.0
"""SLURM's time for an answer while ranks wait to be asked."""
KEPT = ("SLURM_CONF", "SLURM_JWT")


@dataclass(eq=False)
class SlurmBackend(base.Backend):
    """One agent a node of a SLURM job, from anywhere where `srun` works. Raises ValueError as `check_container`."""

    is_remote: ClassVar[bool] = True
    job_id: str
    hosts: Sequence[str]
    """Names of its nodes, in the order of the ranks."""
    _: KW_ONLY
    python: str = ""
    """The interpreter there; empty: the path of this one, or `python3` of the container."""
    directory: str = ""
    """The working directory there; empty: that of this process."""
    container: str | None = None
    """An image, in which agents and ranks run."""
    runtime: str | None = None
    """What runs it: pyxis (a plugin of srun) or apptainer."""
    mounts: Sequence[str] = ()
    """Of the container, beside the working directory, as `/path` or `/path:/inside`."""
    gpus: bool = False
    """Whether the ranks use GPUs: apptainer needs a flag for them."""
    binds: bool = True
    """Whether this SLURM would bind the agent, and with it its ranks, to some of the CPUs of the job."""

    grow: GrowJobs | None = None
    """Other jobs, whose nodes are hosts too while these run."""

    def __post_init__(self) -> None:
        check_container(self.container, self.runtime, self.mounts)
        self.python = self.python or ("python3" if self.container else sys.executable)
        self.directory = self.directory or os.getcwd()
        self.takes_hosts: bool = self.grow is not None
        self.more_hosts: base.HostSource | None = self.grow

    @property
    def environment(self) -> Mapping[str, str]:
        """`srun` hands the launcher's own variables on, but for those that SLURM sets on each node."""
        return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The srun that `start` runs."""
        step = ["srun", f"--jobid={self._job_of(host)}", f"--nodelist={host}", *OPTIONS, f"--job-name={module}"]
        step += ["--cpu-bind=none"] if self.binds else []
        program = python_words(self.python, module, *words)
        if self.container is None:
            return [*step, f"--chdir={self.directory}", *program]
        mounts = [self.directory, *self.mounts]
        if self.runtime == "pyxis":
            both_sides = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)  # it wants both
            image = [f"--container-image={self.container}", f"--container-workdir={self.directory}"]
            return [*step, *image, f"--container-mounts={both_sides}", *program]
        inside = ["apptainer", "exec", *(["--nv"] if self.gpus else []), f"--pwd={self.directory}"]
        return [*step, *inside, *(f"--bind={mount}" for mount in mounts), self.container, *program]

    def ends_with(self, host: str) -> bool:
        """Whether it is a node of the job itself: SLURM signals all of them, and then queues or cancels the job."""
        return self.grow is None or host not in self.grow.jobs

    def left_s(self, host: str) -> float | None:
        """Seconds until the end of its job, where SLURM preempts it with a GraceTime."""
        words = ["scontrol", "show", "job", "-o", self._job_of(host)]
        try:
            told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=ASK_S).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
        return left_of(told, datetime.now())

    def _job_of(self, host: str) -> str:
        """The job that a node belongs to."""
        return self.job_id if self.grow is None else self.grow.jobs.get(host, self.job_id)

    def check_joining(self, hosts: Sequence[str]) -> None:
        """Raises UserError for a host that is no node of the job, and of none that joins it."""
        known = {*self.hosts, *(() if self.grow is None else self.grow.jobs)}
        if strange := [host for host in hosts if host not in known]:
            raise UserError(f"{', '.join(strange)} is no node of this SLURM job, and of none of its --grow-jobs")

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on a node."""
        return start_near(self.argv(host, module, *words), step_environment(os.environ))


def left_of(told: str, now: datetime) -> float | None:
    """Seconds from `now` to the end of a job that is being preempted, by what scontrol shows of it; or None."""
    fields = dict(re.findall(r"\b(PreemptTime|EndTime)=(\S+)", told))
    try:
        datetime.fromisoformat(fields["PreemptTime"])
        return max(0.0, (datetime.fromisoformat(fields["EndTime"]) - now).total_seconds())
    except (KeyError, ValueError):
        return None


def check_container(container: str | None, runtime: str | None, mounts: Sequence[str]) -> None:
    """Raises ValueError where the three do not make sense together."""
    if container is None and (runtime is not None or mounts):
        raise UserError(f"--{'runtime' if runtime else 'mount'} is for a container: give --container IMAGE too")
    if container is not None and runtime is None:
        raise UserError(f"--container {container}: say what runs it: --runtime pyxis or --runtime apptainer")


def step_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The variables for an srun: those of the allocation would become options of the step (`SLURM_NTASKS=8`)."""
    of_slurm = ("SLURM_", "SRUN_", "SBATCH_")
    return {name: value for name, value in outer.items() if name in KEPT or not name.startswith(of_slurm)}
