"""Train from one YAML file: `python examples/train.py --config configs/moe.yaml --data_path text.txt --lr 5e-4`.

Every field of the config is a flag as well, and flags win. Where a new run names no --config,
configs/default_config.yaml of the working directory is taken, if it is there. Otherwise it is what `roxxel-dist train`
does, and it can be launched on many processes and hosts:
`roxxel-dist launch local --nprocs 2 -- python examples/train.py …`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from roxxel_dist import Trainer
from roxxel_dist.cli.arguments import parse_train
from roxxel_dist.launcher.job.spec import flags_in
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.usage_errors import usage_errors

DEFAULT = Path("configs/default_config.yaml")


def main(words: Sequence[str]) -> int:
    """Train, and return the exit code: 2 where what was asked for cannot be, 42 where the run was asked to stop."""
    begins = not {"config", "resume", "fork"} & flags_in(words).keys()
    given = ["--config", str(DEFAULT)] if begins and DEFAULT.exists() else []
    try:
        with usage_errors():
            args, config = parse_train([*given, *words])
        training = Trainer(config)
        run_dir = training.fit(args.data_path, args.run_dir, args.resume, args.amend)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    print(f"Saved to: {run_dir}")
    return 42 if training.stopped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
