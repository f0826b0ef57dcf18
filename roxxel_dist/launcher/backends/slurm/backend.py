"""Ranks on the nodes of a SLURM job: one agent a node, each in a job step of its own, whose `srun` is the channel.

And the launcher inside such a job: which nodes it has, and whether the job is queued again when it ends. Decision 26.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from pathlib import Path
from signal import SIGTERM
from typing import ClassVar

from roxxel_dist.launcher.backends.slurm.grow import GrowJobs
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.control.supervisor import JobResult, supervise
from roxxel_dist.launcher.host.command import answer_of
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import python_words
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import header, info
from roxxel_dist.launcher.policy.outcome import INFRASTRUCTURE, PREEMPTED, Decision
from roxxel_dist.launcher.transport.connection import start_near
from roxxel_dist.process.exit_codes import EXIT_DRAINED, EXIT_HANG, EXIT_USAGE, SCHEDULER_SIGNALS, UserError

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
    """Folders for the container, beside the working directory, as `/path` or `/path:/inside`."""
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
        # `srun` hands the launcher's own variables on, but for those that SLURM sets on each node.
        self.environment: Mapping[str, str] = {
            name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
        }

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
        return left_of(answer_of(words, ASK_S).stdout, datetime.now())

    def _job_of(self, host: str) -> str:
        """The job that a node belongs to."""
        return self.job_id if self.grow is None else self.grow.jobs.get(host, self.job_id)

    def check_joining(self, hosts: Sequence[str]) -> None:
        """Check that hosts are nodes of the job, or of one that joins it. Raises UserError."""
        known = {*self.hosts, *(() if self.grow is None else self.grow.jobs)}
        if strange := [host for host in hosts if host not in known]:
            raise UserError(f"{', '.join(strange)} is no node of this SLURM job, and of none of its --grow-jobs")

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on a node."""
        return start_near(self.argv(host, module, *words), step_environment(os.environ))


def left_of(text: str, now: datetime) -> float | None:
    """Seconds from `now` to the end of a job that is being preempted, by what scontrol shows of it; or None."""
    fields = dict(re.findall(r"\b(PreemptTime|EndTime)=(\S+)", text))
    try:
        datetime.fromisoformat(fields["PreemptTime"])
        return max(0.0, (datetime.fromisoformat(fields["EndTime"]) - now).total_seconds())
    except (KeyError, ValueError):
        return None


def check_container(container: str | None, runtime: str | None, mounts: Sequence[str]) -> None:
    """Check image, runtime and mounts. Raises ValueError where the three do not make sense together."""
    if container is None and (runtime is not None or mounts):
        raise UserError(f"--{'runtime' if runtime else 'mount'} is for a container: give --container IMAGE too")
    if container is not None and runtime is None:
        raise UserError(f"--container {container}: say what runs it: --runtime pyxis or --runtime apptainer")


def step_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The variables for an srun: those of the allocation would become options of the step (`SLURM_NTASKS=8`)."""
    of_slurm = ("SLURM_", "SRUN_", "SBATCH_")
    return {name: value for name, value in outer.items() if name in KEPT or not name.startswith(of_slurm)}


KILLED_IN_S = 120.0
"""How long SLURM may take to end a job that it will queue again."""
ALIVE_STATES = ("RUNNING", "SIGNALING")
"""States of a job that SLURM has not begun to end; the second one while it sends the signal before the time limit."""
DAEMON_S, SCONTROL_S = 10.0, 60.0
"""How long a daemon that is away is asked again, and one answer may take."""
NO_DAEMON = re.compile("Unable to contact|timed out|Connection refused", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The job that this process is in, from SLURM's variables."""

    job_id: str
    nodelist: str
    batch: bool
    """Started by sbatch: it can be queued again."""
    restarts: int
    """How often it was."""
    node: str
    """The node of this process; empty on a login node, with salloc."""


def current_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The job that this process is in, or None.

    None also in a rank of a launch, which is in a job too: its own launches do not use that job.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id or "ROXXEL_PROCESS_ID" in environ:
        return None
    return Allocation(
        job_id=job_id,
        nodelist=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""),
        batch=environ.get("ENVIRONMENT") == "BATCH",
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        node=environ.get("SLURMD_NODENAME", ""),
    )


def refuse_copies(environ: Mapping[str, str]) -> None:
    """Refuse to be one of several launchers of one job: `srun roxxel-dist launch …` starts one for each task.

    The first task says why, and the others only end. A launcher that is the one task of its step runs.

    Raises:
        UserError: in the first of several tasks.
        SystemExit: in the others.
    """
    tasks, is_batch = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("ENVIRONMENT") == "BATCH"
    if not tasks.isdecimal() or (tasks == "1" and not is_batch) or "ROXXEL_PROCESS_ID" in environ:
        return
    # A job that was submitted from a step has the variables of that step, so SLURM is asked what steps it has.
    job, step = (environ.get(f"SLURM_{name}_ID", "") for name in ("JOB", "STEP"))
    steps = re.findall(r"^StepId=(\S+)", _scontrol("show", "step", "-o", job).stdout, re.MULTILINE)
    if steps and f"{job}.{step}" not in steps:
        return
    alone = "" if is_batch else ", or as one task: `srun --nodes=1 --ntasks=1 roxxel-dist launch …`"
    if tasks == "1":
        info(
            "warning: this launcher was started by srun, which kills it where SLURM asks the job to end: nothing would "
            "be saved at the time limit. Start it without srun: `exec roxxel-dist launch …`"
        )
    elif environ.get("SLURM_PROCID", "0") == "0":
        raise UserError(
            f"srun runs this launcher {tasks} times (step {job}.{step}), and each would start the whole job; one "
            f"launcher starts the ranks on all nodes itself. Start it without srun: `roxxel-dist launch …`{alone}"
        )
    else:  # one message is enough
        sys.exit(EXIT_USAGE)


def nodes(nodelist: str) -> list[str]:
    """The names behind `n[1-3,7]`. Raises ValueError where SLURM does not know."""
    names = _scontrol("show", "hostnames", nodelist)
    if names.returncode != 0 or not names.stdout.split():
        why = names.stderr.strip() or "it names none"
        raise UserError(f"scontrol cannot list the nodes of SLURM_JOB_NODELIST={nodelist}: {why}")
    return names.stdout.split()


def binds_cpus() -> bool:
    """Whether this SLURM binds tasks to CPUs; one that does not would complain about `--cpu-bind=none`."""
    config = _scontrol("show", "config").stdout
    return re.search(r"^TaskPlugin\s*=\s*(task/none|\(null\))$", config, re.MULTILINE) is None


def run_in_allocation(job: JobSpec, backend: SlurmBackend, allocation: Allocation, max_requeues: int) -> int:
    """Run a job on the nodes of an allocation, and have SLURM queue it again where that helps; its exit code."""
    try:  # whether SLURM writes what this process says to the job's own log
        detached = os.path.samestat(os.fstat(sys.stdout.fileno()), os.stat(job.log_dir / "launcher.log"))
    except OSError:
        detached = False
    recorder = JobRecorder(job, backend, detached=detached, slurm_job=allocation.job_id if allocation.node else "")
    if detached:
        print(header(recorder.entry.run_id, recorder.entry.command), end="", flush=True)
    decision = Decision(again=False)

    def goes_on(result: JobResult) -> bool:
        """Whether the job is in SLURM's queue again, or is to be put there."""
        nonlocal decision
        description = _scontrol("show", "job", "-o", allocation.job_id).stdout if allocation.batch else ""
        state, count = (re.search(rf"\b{name}=(\w+)", description) for name in ("JobState", "Restarts"))
        in_queue = count is not None and int(count[1]) > allocation.restarts
        before = recorder.requeues(counts=job.program.reports_steps)
        decision = requeue(
            result, allocation, max_requeues, state[1] if state else "", before=before, in_queue=in_queue
        )
        if decision.again:
            recorder.update(requeues=before + 1)
        return decision.again or in_queue

    try:
        if backend.grow is not None:
            backend.grow.submit(Path(backend.directory, job.log_dir, "grow.log"))
        result = supervise(job, backend, recorder, goes_on)
    finally:
        if backend.grow is not None:
            backend.grow.cancel()
    if decision.why:
        info(decision.why)
    if decision.again:
        answer = _scontrol("requeue", allocation.job_id)
        if answer.returncode == 0:
            time.sleep(KILLED_IN_S)  # a process that exits before SLURM ends it would show as FAILED
        else:
            recorder.settle(result.code)
            reason = answer.stderr.strip() or f"scontrol ended with {answer.returncode}"
            info(f"job {allocation.job_id} was not queued again: {reason}")
    return result.code


def requeue(
    result: JobResult, allocation: Allocation, max_requeues: int, state: str, *, before: int, in_queue: bool = False
) -> Decision:
    """Whether to requeue a job that ended so; `state` is SLURM's JobState, empty if it no longer knows the job.

    `before`: how often it was, in a row without a new step. `in_queue`: SLURM has queued it again already.

    SLURM asks with SIGTERM, or with the signal that the user chose, some time before the limit. A person asks with
    Ctrl-C or `roxxel-dist stop` (SIGINT). A job that is no longer RUNNING is ended by SLURM: after `scancel` it must
    not come back, and where it was preempted, or has lost a node, SLURM queues it again itself.
    """
    code, by_slurm = result.code, result.requested in (SIGTERM, *SCHEDULER_SIGNALS)
    if by_slurm and (code in (EXIT_HANG, *PREEMPTED) or code in INFRASTRUCTURE):
        cause = "SLURM asked it to end"
        if code != EXIT_DRAINED:
            cause += ", and the ranks did not save in time (a longer --grace would give it)"
    elif result.host_lost and (by_slurm or result.requested is None):
        cause = "a node is out of reach"
    else:
        cause = ""
    if not cause or not allocation.batch:
        return Decision(again=False)
    if result.idle:
        cause += "; there was no time for a step, which a longer --slurm-time gives"
    job = f"job {allocation.job_id}"
    if in_queue:
        return Decision(again=False, why=f"{cause}, and has queued {job} again")
    if state not in ALIVE_STATES:
        return Decision(again=False, why=f"{cause}; {job} is {state or 'unknown to SLURM'}: SLURM decides")
    if before >= max_requeues:
        limit = f"it was {before} times without a new step, and " * bool(before) + f"--max-requeues is {max_requeues}"
        return Decision(again=False, why=f"{cause}; not queued again: {limit}")
    anew = " (the job got on, so the count began anew)" if allocation.restarts and not before else ""
    return Decision(again=True, why=f"{cause}; {job} is queued again (requeue {before + 1} of {max_requeues}){anew}")


def _scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    """What scontrol answers, asked again for a while where its daemon is restarted."""
    end = time.monotonic() + DAEMON_S
    while True:
        answer = answer_of(["scontrol", *words], SCONTROL_S)
        if not NO_DAEMON.search(answer.stderr) or time.monotonic() > end:
            return answer
        time.sleep(1)
