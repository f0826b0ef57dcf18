"""The command that tells what a run would be."""

import dataclasses
import os
import sys

from roxxel_dist.cli.arguments import Switch, parse_config
from roxxel_dist.config import UsageError, usage_errors
from roxxel_dist.run_directory import CONFIG


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """What a run would be: phases, tokens, parameters, memory, time. No run directory is made, and nothing is trained.

    `plan --config my.yaml --data_path data [options]`, or `plan RUN [options]`: the config, the data and the speed of a
    run directory. Exits with 2 where `train` would refuse, and where a phase does not fit the memory of a device.
    """

    config: str | None = None
    """A YAML file of the fields below; flags win over it."""
    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`."""
    devices: int | None = None
    """Plan for so many devices, simulated on CPU; those that are there where not given."""
    processes: int | None = None
    """Plan for so many processes that share the devices."""
    tokens_per_s: float | None = None
    """The speed over all devices, for the time."""
    device_memory_gb: float | None = None
    """What a device has, in GB of 10^9 bytes; what it says itself where not given."""
    arrays: Switch = False
    """A line for every array of parameters: shape, and how it is cut."""
    json: Switch = False
    """Print JSON instead of text."""


def plan(words: list[str]) -> int:
    """Tell what a run would be, before it is launched: steps, parameters, memory, time."""
    with usage_errors():
        run = words[0] if words and not words[0].startswith("-") else None
        saved = os.path.join(run, CONFIG) if run else ""
        args, config = parse_config(
            PlanArgs, words[1:] if run else words, "plan", saved if os.path.exists(saved) else None
        )
    # A look at a device that is at work elsewhere must not take its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from pathlib import Path

    from roxxel_dist.cluster.distributed import is_primary
    from roxxel_dist.outlook.look import Asked, outlook
    from roxxel_dist.outlook.table import table

    with usage_errors():
        asked = Asked(
            run=Path(run) if run else None, devices=args.devices, processes=args.processes,
            tokens_per_s=args.tokens_per_s, device_memory_gb=args.device_memory_gb,
        )  # fmt: skip
    found = outlook(config, args.data_path, asked)
    if is_primary():
        if args.json:
            import json

            told = dataclasses.asdict(found)
            print(json.dumps(told if args.arrays else told | {"arrays": None}, indent=2))
        else:
            print(table(found, every_array=args.arrays))
        sys.stdout.flush()
    if found.problems:
        raise UsageError("\n".join(found.problems))
    return 0
