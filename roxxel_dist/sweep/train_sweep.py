"""One trial of a sweep as a separate program, for `wandb agent` and for use without a controller.

    train_sweep.py [--config FILE] [--data_path PATH] --NAME=VALUE …

The parameters are fields of the config. They come as words, or in the file that W&B's agent names (what `wandb.config`
has), whose values win because they have their types. The training is `roxxel-dist train`, with the agent's W&B run.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from roxxel_dist.place.directory import default_run_dir
from roxxel_dist.process.exit_codes import EXIT_USAGE, UserError
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.settings.training import TRIAL
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.sweep.trial.process import ROXXEL, Ranks, launch_command
from roxxel_dist.sweep.trial.trial import config_of

CONFIG_ENV, DATA_ENV = "ROXXEL_SWEEP_CONFIG", "ROXXEL_SWEEP_DATA"
"""The base config and the data, where no words name them."""
RUN_DIR_ENV = "ROXXEL_SWEEP_RUN_DIR"
"""The run directory; `runs/sweep_ID/RUN` where it is not given."""
RANKS_ENV = "ROXXEL_SWEEP_RANKS"
"""The ranks of a trial, as JSON: the fields of `Ranks`."""
DEFAULT_CONFIG, DEFAULT_DATA = "configs/default_config.yaml", "data/corpus.txt"
WRITTEN = "trial.yaml"
MODES = {"offline": "offline", "dryrun": "offline", "disabled": "off", "online": "online"}


def main(words: Sequence[str]) -> NoReturn:
    """Become the training of a trial; its exit code is that of `train`."""
    try:
        with usage_errors():
            command = _command(words, os.environ)
            os.environ[TRIAL] = "1"
    except ValueError as error:
        print(f"roxxel-dist: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USAGE)
    os.execv(command[0], command)


def _command(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The words of the training, whose config is written into its run directory."""
    params = _parameters(words)
    if path := env.get("WANDB_SWEEP_PARAM_PATH"):
        items = {name: item["value"] for name, item in load_yaml(path).items() if isinstance(item, Mapping)}
        params |= {name: value for name, value in items.items() if not _is_clients(name)}
    config_file = params.pop("config", None) or env.get(CONFIG_ENV)
    if config_file is None and Path(DEFAULT_CONFIG).exists():
        config_file = DEFAULT_CONFIG
    base = load_yaml(config_file) if config_file else {}
    data = params.pop("data_path", None) or env.get(DATA_ENV)
    if data is None and not (base.get("datasets") or (base.get("data") or {}).get("datasets")):
        data = DEFAULT_DATA
    mode = MODES.get(env.get("WANDB_MODE", ""), "online" if "WANDB_SWEEP_ID" in env else None)
    config = config_of(base, {**params, "wandb": mode} if mode else params)
    folder = _folder(env)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_yaml(folder / WRITTEN)
    train = ["train", "--config", str(folder / WRITTEN), "--run_dir", str(folder), "--resume"]
    train += ["--data_path", data] if data else []
    theirs = [TRIAL, *(name for name in env if name.startswith("WANDB_"))]
    return launch_command(Ranks(**json.loads(env.get(RANKS_ENV) or "{}")), train, ROXXEL, env=theirs)


def _parameters(words: Sequence[str]) -> dict[str, Any]:
    """Names and values of the words that W&B's agent makes of parameters, by any of its macros; values as in YAML. The
    words are `--name=value`, `--name value`, `name=value`, `+name=value`, `--name` for true, and a JSON object or the
    path of a file with one."""
    texts: dict[str, Any] = {}
    waiting: str | None = None
    for word in words:
        name, equals, value = word.lstrip("-+").partition("=")
        names = bool(equals) and name.replace(".", "_").isidentifier()
        if waiting is not None and not word.startswith("--") and not names:
            texts[waiting], waiting = word, None
        elif word.startswith("{"):
            texts |= _object_in(word)
        elif word.endswith(".json") and Path(word).is_file():
            texts |= _object_in(Path(word).read_text(encoding="utf-8"))
        elif equals:
            texts[name], waiting = value, None
        elif word.startswith("--"):
            texts[name], waiting = True, name
        else:
            raise UserError(f"{word!r} is no parameter: write --name=value")
    return {name: _value_of(name, text) for name, text in texts.items() if not _is_clients(name)}


def _is_clients(name: str) -> bool:
    """Whether W&B has put this among the parameters: `_wandb` of a run that is handed out again, `wandb_version`."""
    return name.startswith("_") or name == "wandb_version"


def _object_in(word: str) -> dict[str, Any]:
    try:
        return dict(json.loads(word))
    except ValueError as error:
        raise UserError(f"{word!r} is no JSON object of parameters ({error})") from error


def _value_of(name: str, text: Any) -> Any:
    """The value of a word: as in YAML, and None as Python writes it."""
    import yaml

    if not isinstance(text, str) or text == "None":
        return None if text == "None" else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--{name}={text}: this is no value in YAML ({' '.join(str(error).split())})") from error


def _folder(env: Mapping[str, str]) -> Path:
    if given := env.get(RUN_DIR_ENV):
        return Path(given)
    if "WANDB_SWEEP_ID" in env and "WANDB_RUN_ID" in env:
        return Path("runs", f"sweep_{env['WANDB_SWEEP_ID']}", env["WANDB_RUN_ID"])
    return default_run_dir()


if __name__ == "__main__":
    main(sys.argv[1:])
