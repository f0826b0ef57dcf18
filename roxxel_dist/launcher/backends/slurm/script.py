"""The script that SLURM gets: the launch itself, run on the first node of the job, behind `#SBATCH` lines."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roxxel_dist.launcher.environment import is_secret

PREFIX = "--slurm-"
SLACK_S = 15
"""From the end of the ranks' grace to the time limit: for the kill of those that stay, and for the requeue."""
REFUSED = {
    "gpus-per-task": "it hides the GPUs of a node from each other's tasks (jax#23452, #28194); use --gpus-per-host",
    "ntasks": "use --nodes and --procs-per-host",
    "ntasks-per-node": "use --procs-per-host",
    "nodes": "use --nodes, without slurm",
    "wrap": "the command comes after `--`",
    "chdir": "use --directory",
    "wait": "submit, then `roxxel-dist attach RUN`, which ends with the code of the job",
    "array": "each run has a folder of its own; submit one job a run",
}
OURS = {
    "ENVIRONMENT", "SLURM_RESTART_COUNT",
    "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_REQUEUE", "SBATCH_SIGNAL", "SBATCH_WAIT",
}  # fmt: skip
"""Variables that a shell within a job may have."""
KEY = re.compile(r"[a-z][a-z-]*")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of SLURM."""

    nodes: int
    """Spare ones included."""
    procs_per_host: int
    output: str
    """The file for the launcher's lines; SLURM fills in %j, the number of the job."""
    directory: str
    grace: float
    gpus_per_host: int | None = None
    stays: bool = False
    """The job goes on when a node fails."""
    requeue: bool = True
    options: Mapping[str, str | None] = field(default_factory=dict)
    """More `#SBATCH` lines, which win over ours; None: an option without a value."""


def take_options(words: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Part `--slurm-KEY VALUE` (`--slurm-KEY=VALUE`, or `--slurm-KEY` alone) from the launcher's own options.

    Raises:
        ValueError: a key that SLURM cannot have, or that is not for it; one given twice.
    """
    options: dict[str, str | None] = {}
    own: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith(PREFIX):
            own.append(word)
            continue
        name, equals, value = word.removeprefix(PREFIX).partition("=")
        key = name.replace("_", "-")
        if not KEY.fullmatch(key):
            raise ValueError(f"{word}: write --slurm-KEY VALUE, with the name of an option of sbatch for KEY")
        if key in REFUSED:
            raise ValueError(f"--slurm-{key}: {REFUSED[key]}")
        if key in options:
            raise ValueError(f"--slurm-{key} is given twice: give it once")
        if not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        if "\n" in value:
            raise ValueError(f"--slurm-{key}: its value holds a line end, which a #SBATCH line cannot: take it out")
        options[key] = value if equals else None
    return options, own


def script(request: Request, command: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The sbatch script that runs `command`; `notes` are comments at its head."""
    ours: dict[str, str | None] = {
        "job-name": "roxxel-dist",
        "nodes": str(request.nodes),
        "ntasks-per-node": str(request.procs_per_host),
        "chdir": request.directory,
        "output": request.output,
        "open-mode": "append",
        # The launcher is the batch shell's process (exec), so B: is the launcher.
        "signal": f"B:TERM@{int(request.grace) + SLACK_S}",
        "requeue" if request.requeue else "no-requeue": None,
    }
    if request.gpus_per_host is not None and not any(key.startswith(("gpu", "gres")) for key in request.options):
        ours["gres"] = f"gpu:{request.gpus_per_host}"
    if request.stays:
        ours["no-kill"] = None
    lines = [_directive(key, value) for key, value in {**ours, **request.options}.items()]
    return "\n".join(
        ["#!/bin/bash", *lines, *(f"# {note}" for note in notes), "", "set -eu", f"exec {_join(command)}", ""]
    )


def _directive(key: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{key}"
    quoted = value if re.fullmatch(r"[^\s\"'\\#]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{key}={quoted}"


def _join(words: Sequence[str]) -> str:
    """The words for a shell; that of the job's own number is for it to fill in."""
    return " ".join(word if word == JOB_RUN_ID else shlex.quote(word) for word in words)


JOB_RUN_ID = '"slurm-$SLURM_JOB_ID"'
"""A run id that stays when the job is requeued, for a script that may be submitted many times."""


def hide_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """`--env K=V` as `--env K` where the name K is that of a secret, and these variables: sbatch hands them on.

    So that no secret is in a script, which SLURM keeps and shows (`scontrol write batch_script`).
    """
    shown: list[str] = []
    secrets: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--env" and rest:
            shown.append(word)
            word = rest.pop(0)
            flag = ""
        elif word.startswith("--env="):
            flag, word = "--env=", word.removeprefix("--env=")
        else:
            shown.append(word)
            continue
        name, equals, value = word.partition("=")
        if equals and is_secret(name):
            secrets[name], word = value, name
        shown.append(flag + word)
    return shown, secrets


class NotSubmittedError(Exception):
    """sbatch refused the job; the message is its own."""


def output_for(log: str) -> str:
    """A file as `--output` takes it. Raises ValueError for one that it cannot name."""
    if "\\" in log:
        raise ValueError(f"{log!r}: SLURM cannot write to a path with a backslash; choose another run directory")
    return log.replace("%", "%%")


def submit(text: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Give a script to sbatch; the job's number, and what sbatch said beside it. Raises NotSubmittedError.

    Variables of a job that this may be part of, and those of sbatch that say what the script says, do not go along.
    """
    kept = {name: value for name, value in environment.items() if name not in OURS}
    told = subprocess.run(["sbatch", "--parsable"], input=text, env=kept, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        raise NotSubmittedError(told.stderr.strip() or f"sbatch ended with {told.returncode} and said nothing")
    return told.stdout.strip().partition(";")[0], told.stderr.strip()
