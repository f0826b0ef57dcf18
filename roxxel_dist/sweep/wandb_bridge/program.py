"""Trials of a program of the user's own: what starts it, and how its W&B run is read.

The program is any one that logs to W&B under the metric's name; it runs with an unmodified client. Its parameters come
as W&B's agent gives them: in its words, by the macros of `command`, and in `wandb.config`.
"""

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.sweep.execution.metrics import MetricsTail, Report
from roxxel_dist.sweep.execution.process import environment, launch_command
from roxxel_dist.sweep.execution.task import TrialTask
from roxxel_dist.sweep.wandb_bridge.run_file import WandbFile

DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
OURS = "train_sweep.py"
MACRO = re.compile(r"\$\{(.*)\}")
ENVVAR = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
PARAMETERS, PARAMETERS_JSON, ENDED = "parameters.yaml", "parameters.json", "ended.json"


def command_of(
    program: str | None, command: Sequence[str] | None, directory: str | Path | None = None
) -> list[str] | None:
    """The words of a sweep's own program, macros and all; None where its trials are trainings of a Config.

    `train_sweep.py` stands for such a training, where no file of that name does something else.

    Raises ValueError where there is no such program in the directory (None: that of this process).
    """
    words = list(command or DEFAULT_COMMAND)
    if "${program}" not in words:
        return words if command else None
    if program is None:
        return None
    path = Path(directory or os.getcwd(), program)
    if not path.exists():
        if path.name == OURS:
            return None
        raise UserError(f"program: {program} is not there (looked in {path.parent}): check the path")
    if path.name == OURS and "roxxel_dist" in path.read_text(encoding="utf-8", errors="replace"):
        return None
    return [program if word == "${program}" else word for word in words]


def expand(words: Sequence[str], params: Mapping[str, Any], json_file: Path) -> list[str]:
    """A command with W&B's macros replaced, as W&B's agent does it. Raises ValueError for a macro that there is not."""
    flags = {name: f"{name}={value}" for name, value in params.items()}
    switches = [name if params[name] is True else flags[name] for name in params if params[name] is not False]
    macros = {
        "env": ["/usr/bin/env"],
        "interpreter": [sys.executable],
        "args": [f"--{flag}" for flag in flags.values()],
        "args_no_equals": [word for name, value in params.items() for word in (f"--{name}", str(value))],
        "args_no_hyphens": list(flags.values()),
        "args_no_boolean_flags": [f"--{flag}" for flag in switches],
        "args_append_hydra": [f"+{flag}" for flag in flags.values()],
        "args_override_hydra": [f"++{flag}" for flag in flags.values()],
        "args_json": [json.dumps(params)],
        "args_json_file": [str(json_file)],
    }
    expanded: list[str] = []
    for word in words:
        text = ENVVAR.sub(lambda match: os.environ.get(match[1], match[1]), str(word))
        macro = MACRO.fullmatch(text)
        if macro and macro[1] not in macros:
            known = ", ".join(f"${{{name}}}" for name in ("program", *macros))
            raise UserError(f"command: there is no {text}: there are {known}, ${{envvar:NAME}}")
        expanded += macros[macro[1]] if macro else [text]
    return expanded


def prepare(task: TrialTask, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of a trial's program, whose W&B run is kept in `folder`. Raises ValueError."""
    import yaml

    params = task.params
    folder.mkdir(parents=True, exist_ok=True)  # the client writes elsewhere where there is none
    (folder / PARAMETERS_JSON).write_text(json.dumps(params), encoding="utf-8")
    wandb_config = {"wandb_version": 1, **{name: {"value": value} for name, value in params.items()}}
    (folder / PARAMETERS).write_text(yaml.safe_dump(wandb_config, sort_keys=False), encoding="utf-8")
    words = expand(task.program or (), params, folder / PARAMETERS_JSON)
    if task.count > 1 and words[0] == "/usr/bin/env":
        words = words[1:]  # the launcher looks for the program itself, and prepares a Python one
    own = {
        "WANDB_MODE": "online" if task.config.get("wandb") == "online" else "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SWEEP_PARAM_PATH": str(folder / PARAMETERS),
        "WANDB_RUN_GROUP": folder.parent.parent.name,
        "WANDB_ERROR_REPORTING": "false",
        **({"WANDB_PROJECT": task.config["wandb_project"]} if task.config.get("wandb_project") else {}),
        **task.environment,
    }
    return launch_command(task, words, env=own), environment(own)


def note_end(folder: Path) -> None:
    """Remember that the program has ended well: it is not run again."""
    write_file(folder / ENDED, '{"exit_code": 0}\n')


def has_ended(folder: Path) -> bool:
    """Whether `note_end` was called."""
    return (folder / ENDED).exists()


class WandbTail(MetricsTail):
    """Follows the W&B runs in a folder, those of all ranks and of all attempts: the client has them in `wandb/` there.

    Dots separate the levels in the name of a nested metric.
    """

    def __init__(self, run: Path, metric: str) -> None:
        super().__init__(run, metric)
        self._files: dict[Path, tuple[int, WandbFile]] = {}

    def read(self, *, last: bool = False) -> list[Report]:
        """As `MetricsTail.read`; what was only put into the summary comes with the last call."""
        reports: list[Report] = []
        for path in sorted(self._run.glob("wandb/*run-*/run-*.wandb")):  # in the order in which they began
            if path.parent.is_symlink():  # latest-run
                continue
            size, file = self._files.get(path) or (0, WandbFile(path))
            if path.stat().st_size > size:
                self._files[path] = (path.stat().st_size, file)
                for step, row in file.rows():
                    reports += self._add(step, row, _number(row.get(self._metric)))
        if last and self._reported < 0:
            for _, file in self._files.values():
                self.names.update(file.summary)
                if (value := _number(file.summary.get(self._metric))) is not None:
                    reports.append((int(_number(file.summary.get("_step")) or 0), value))
        return reports

    def exit_code(self) -> int | None:
        """The exit code of the program that the client of the last run recorded; None if it recorded none."""
        return self._files[max(self._files)][1].exit_code if self._files else None


def _number(value: Any) -> float | None:
    """A value as a number; the client writes those that are not finite as text."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return math.nan
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
