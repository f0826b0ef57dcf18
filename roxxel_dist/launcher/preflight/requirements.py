"""What a job needs to find on its hosts, taken from its command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roxxel_dist.launcher.spec import JobSpec, flag, log_dir_for


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a job needs to find on its hosts."""

    run_id: str | None = None
    run_dir: str | None = None
    """Where the hosts write; None where they do not."""
    shared: bool = False
    """Whether all hosts must see the same run directory."""
    data_path: str | None = None
    resume: bool = False
    gpus_per_host: int | None = None
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, where somebody set it for all ranks."""
    platforms: str | None = None
    """JAX_PLATFORMS, where the job sets it."""


def requirements_of(job: JobSpec, outer: Mapping[str, str], *, writes: bool) -> Requirements:
    """What a job needs.

    Args:
        job: what shall run.
        outer: the variables that ranks have beside those of the job, as far as they are known.
        writes: whether its logs are written on the host, whatever the command.
    """
    train = job.command[0] == "train"
    return Requirements(
        run_id=job.run_id,
        run_dir=str(job.log_dir.parent) if train or writes else None,
        shared=train,
        data_path=flag(job.command, "data_path") if train else None,
        resume=train and _resumes(job.command),
        gpus_per_host=job.gpus_per_host,
        visible={**outer, **job.env}.get("CUDA_VISIBLE_DEVICES"),
        platforms=job.env.get("JAX_PLATFORMS") or ("cpu" if job.devices_per_proc else None),
    )


def requirements_by_hand(
    command: Sequence[str], *, run_dir: str | None, data_path: str | None, gpus: int | None
) -> Requirements:
    """What somebody wants to know who has no job yet; `command` may be empty."""
    train = command[:1] == ["train"]
    if train and run_dir is None:
        run_dir = str(log_dir_for(tuple(command), "new").parent)
    return Requirements(
        run_dir=run_dir or "runs",
        shared=run_dir is not None,
        data_path=data_path or (flag(command, "data_path") if train else None),
        resume=train and _resumes(command),
        gpus_per_host=gpus,
    )


def _resumes(command: Sequence[str]) -> bool:
    return "--resume" in command and (flag(command, "resume") or "").lower() != "false"
