"""Trials of a program of the user's own: what starts it, and what its ranks are before they become it (`main`).

The program is any one that logs to W&B under the metric's name; it runs with an unmodified client. Its parameters come
as W&B's agent gives them: in its words, by the macros of `command`, and in `wandb.config`. `tail.WandbTail` reads what
it logs.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.trial.process import TrialTask, client_environment, environment, launch_command
from roxxel_dist.sweep.trial.tail import MARK, trial_token

CONFIG_ENV = "ROXXEL_TRIAL_PARAMETERS"
"""The parameters of the trial as the client reads them, as JSON, with the mark of rank 0."""
PARAMETERS_ENV = "WANDB_SWEEP_PARAM_PATH"
DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
OURS = "train_sweep.py"
MACRO = re.compile(r"\$\{(.*)\}")
ENVVAR = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
PARAMETERS, PARAMETERS_JSON = "parameters.yaml", "parameters.json"
ENDED = "ended.json"
"""The file in the folder of a trial whose program has ended well: it is not run again."""
RANK_PROGRAM = "roxxel_dist.sweep.trial.program"


def write_parameters(file: Path, config: Mapping[str, Any]) -> None:
    """Write parameters as W&B's agent does, in YAML."""
    import yaml

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")


def command_of(
    program: str | None, command: Sequence[str] | None, directory: str | Path | None = None
) -> list[str] | None:
    """The words of a sweep's own program, macros and all; None where its trials are trainings of a Config.
    `train_sweep.py` stands for such a training, where no file of that name does something else.

    Raises ValueError where there is no such program in the directory (None: that of this process).
    """
    words = list(command or DEFAULT_COMMAND)
    if (first := MACRO.fullmatch(str(words[0]))) and first[1].startswith("args"):
        raise UserError(
            f"command: its first word is {words[0]}, a parameter, and no program: begin with ${{interpreter}} or with "
            f"${{env}}, and name ${{program}}"
        )
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
    params = task.params
    folder.mkdir(parents=True, exist_ok=True)  # the client writes elsewhere where there is none
    (folder / PARAMETERS_JSON).write_text(json.dumps(params), encoding="utf-8")
    mark = {"trial": trial_token(folder), "attempt": str(task.attempt), "rank": 0}
    wandb_config = {"wandb_version": 1, **{name: {"value": value} for name, value in {**params, MARK: mark}.items()}}
    write_parameters(folder / PARAMETERS, wandb_config)
    words = expand(task.program or (), params, folder / PARAMETERS_JSON)
    own = {
        "WANDB_MODE": "online" if task.config.get("wandb") == "online" else "offline",
        PARAMETERS_ENV: str(folder / PARAMETERS),
        "WANDB_RUN_GROUP": folder.parent.parent.name,
        **client_environment(folder),
        **({"WANDB_PROJECT": task.config["wandb_project"]} if task.config.get("wandb_project") else {}),
        **task.environment,
    }
    if task.count > 1:
        words = words[1:] if words[0] == "/usr/bin/env" else words  # the launcher prepares a Python program itself
        words = ["/usr/bin/env", sys.executable, "-m", RANK_PROGRAM, *words]
        own[CONFIG_ENV] = json.dumps(wandb_config)
    return launch_command(task, words, env=own), environment(own)


def main(words: Sequence[str]) -> NoReturn:
    """One rank of a trial: give the W&B client the rank's mark, and become the program.

    All ranks have the environment of the trial. The file of parameters, which the client copies into a run's config, is
    the only thing that says in every run, wherever the program puts it, which rank began it. The launcher's worker runs
    the program as it would without this one.
    """
    config, rank = json.loads(os.environ.pop(CONFIG_ENV)), os.environ["ROXXEL_PROCESS_ID"]
    mark = config[MARK]["value"]
    mark |= {"rank": int(rank), "attempt": f"{mark['attempt']}.{os.environ.get('ROXXEL_ATTEMPT', '0')}"}
    file = Path(os.environ["WANDB_DIR"], f"parameters-{rank}.yaml")
    write_parameters(file, config)
    os.environ[PARAMETERS_ENV] = str(file)
    os.execv(sys.executable, [sys.executable, "-u", "-m", "roxxel_dist.launcher.host.worker", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
