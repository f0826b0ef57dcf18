"""Ranks on the nodes of a SLURM job: one agent a node, each in a job step of its own, whose `srun` is the channel."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roxxel_dist.launcher.host.process_tree import HEARTBEAT_TIMEOUT_S, start_near

RUNTIMES = ("pyxis", "apptainer")
Runtime = Literal["pyxis", "apptainer"]
OPTIONS = (
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # probe and agent share the node, and a step of the user's own may be there
    "--mpi=none",
    "--unbuffered",
    "--wait=0",
    "--kill-on-bad-exit=0",
    "--quiet",
)
KEPT = ("SLURM_CONF", "SLURM_JWT")


class SlurmBackend:
    """One agent a node of a job that SLURM has started, from anywhere where `srun` works.

    Args:
        job_id: of the job.
        hosts: names of its nodes, in the order of the ranks.
        python: the interpreter there; by default the path of this one, or `python3` of the container.
        directory: the working directory there; by default that of this process.
        container: an image, in which agents and ranks run.
        runtime: what runs it: pyxis (a plugin of srun) or apptainer.
        mounts: of the container, beside the working directory, as `/path` or `/path:/inside`.
        gpus: whether the ranks use GPUs: apptainer has to be told.
        binds: whether this SLURM would bind the agent, and with it its ranks, to some of the CPUs of the job.

    Raises:
        ValueError: a runtime that there is not.
    """

    address: str | None = None
    heartbeat_timeout_s: float | None = HEARTBEAT_TIMEOUT_S

    def __init__(
        self,
        job_id: str,
        hosts: Sequence[str],
        *,
        python: str | None = None,
        directory: str | None = None,
        container: str | None = None,
        runtime: str | None = None,
        mounts: Sequence[str] = (),
        gpus: bool = False,
        binds: bool = True,
    ) -> None:
        check_container(container, runtime, mounts)
        self.job_id = job_id
        self._hosts = tuple(hosts)
        self._python = python or ("python3" if container else sys.executable)
        self._directory = directory or os.getcwd()
        self._container, self._runtime, self._mounts, self._gpus = container, runtime, tuple(mounts), gpus
        self._binds = binds

    @property
    def hosts(self) -> Sequence[str]:
        """The nodes, in the order in which SLURM names them."""
        return self._hosts

    @property
    def python(self) -> str:
        """The interpreter on the nodes."""
        return self._python

    @property
    def environment(self) -> Mapping[str, str]:
        """`srun` hands the launcher's own variables on, but for those that SLURM sets on each node."""
        return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The srun that `start` runs."""
        step = ["srun", f"--jobid={self.job_id}", f"--nodelist={host}", *OPTIONS, f"--job-name={module}"]
        step += ["--cpu-bind=none"] if self._binds else []
        program = [self._python, "-u", "-m", module, *words]
        if self._container is None:
            return [*step, f"--chdir={self._directory}", *program]
        binds = [self._directory, *self._mounts]
        if self._runtime == "pyxis":
            image = [f"--container-image={self._container}", f"--container-workdir={self._directory}"]
            return [*step, *image, f"--container-mounts={','.join(map(_both_sides, binds))}", *program]
        inside = ["apptainer", "exec", *(["--nv"] if self._gpus else []), f"--pwd={self._directory}"]
        return [*step, *inside, *(f"--bind={bind}" for bind in binds), self._container, *program]

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on a node. Call it from the main thread: srun ends with the thread."""
        return start_near(self.argv(host, module, *words), step_environment(os.environ))

    def describe(self) -> Mapping[str, Any]:
        """What `backends.make` needs."""
        return {
            "kind": "slurm",
            "job_id": self.job_id,
            "hosts": list(self._hosts),
            "python": self._python,
            "directory": self._directory,
            "container": self._container,
            "runtime": self._runtime,
            "mounts": list(self._mounts),
            "gpus": self._gpus,
            "binds": self._binds,
        }


def check_container(container: str | None, runtime: str | None, mounts: Sequence[str]) -> None:
    """Raises ValueError where the three do not make sense together."""
    if runtime is not None and runtime not in RUNTIMES:
        raise ValueError(f"--runtime {runtime}: there are {' and '.join(RUNTIMES)}")
    if container is None and (runtime is not None or mounts):
        raise ValueError(f"--{'runtime' if runtime else 'mount'} is for a container: give --container IMAGE too")
    if container is not None and runtime is None:
        raise ValueError(f"--container {container}: say what runs it: --runtime {' or --runtime '.join(RUNTIMES)}")


def step_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The variables for an srun: those of the allocation would become options of the step (`SLURM_NTASKS=8`)."""
    told = ("SLURM_", "SRUN_", "SBATCH_")
    return {name: value for name, value in outer.items() if name in KEPT or not name.startswith(told)}


def _both_sides(mount: str) -> str:
    """pyxis wants the place inside too."""
    return mount if ":" in mount else f"{mount}:{mount}"
