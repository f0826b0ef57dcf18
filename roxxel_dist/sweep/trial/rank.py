"""One rank of a trial of a program of the user's own: it gives the W&B client the rank's mark, and becomes the program.

All ranks have the environment of the trial. The file of parameters, which the client copies into a run's config, is the
only thing that says in every run, wherever the program puts it, which rank began it.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

CONFIG_ENV = "ROXXEL_TRIAL_PARAMETERS"
"""The parameters of the trial as the client reads them, as JSON, with the mark of rank 0."""
PARAMETERS_ENV = "WANDB_SWEEP_PARAM_PATH"
MARK = "_roxxel"
"""The entry of a run's config that says whose run it is: trial, attempt and rank. `wandb.config` hides such names."""


def write_parameters(file: Path, config: Mapping[str, Any]) -> None:
    """Write parameters as W&B's agent does, in YAML."""
    import yaml

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")


def main(words: Sequence[str]) -> NoReturn:
    """Become the program of this rank; the launcher's worker runs it as it would without this one."""
    config, rank = json.loads(os.environ.pop(CONFIG_ENV)), os.environ["ROXXEL_PROCESS_ID"]
    mark = config[MARK]["value"]
    mark |= {"rank": int(rank), "attempt": f"{mark['attempt']}.{os.environ.get('ROXXEL_ATTEMPT', '0')}"}
    file = Path(os.environ["WANDB_DIR"], f"parameters-{rank}.yaml")
    write_parameters(file, config)
    os.environ[PARAMETERS_ENV] = str(file)
    os.execv(sys.executable, [sys.executable, "-u", "-m", "roxxel_dist.launcher.host.worker", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
