"""The commands around a run: what is found out before it."""

import dataclasses
import importlib.util
from pathlib import Path

from roxxel_dist.cli.arguments import Switch, parse_config
from roxxel_dist.config import UsageError, usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class FindLrArgs:
    """Find a learning rate: a short training whose rate grows at each step. Nothing of a run is touched."""

    config: str | None = None
    """A YAML file of the fields below; flags win over it."""
    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`."""
    min_lr: float = 1e-6
    """The rate of the first step."""
    max_lr: float = 0.1
    """The rate of the last step, if the loss does not diverge before; sgd wants more."""
    num_steps: int = 100
    """Steps of the sweep."""
    plot: Switch = False
    """Draw the loss by the rate."""
    out: str = "lr_finder.png"
    """Where the picture goes."""


def find_lr(words: list[str]) -> int:
    """Find a learning rate by a short training whose rate grows."""
    with usage_errors():
        args, config = parse_config(FindLrArgs, words, "find-lr")
        if args.plot and importlib.util.find_spec("matplotlib") is None:  # known before the sweep, not after it
            raise ValueError("--plot needs matplotlib: pip install 'roxxel-dist[plot]'")
    from roxxel_dist.cluster.distributed import is_primary
    from roxxel_dist.experiment import Experiment
    from roxxel_dist.train.lr_finder import plot_sweep, smooth

    suggested, rates, losses = Experiment(config).find_lr(
        args.data_path, min_lr=args.min_lr, max_lr=args.max_lr, num_steps=args.num_steps
    )
    if not is_primary():
        return 0
    curve = smooth(losses, args.num_steps)
    early = "" if len(losses) == args.num_steps else f" of {args.num_steps}, where the loss diverged"
    print(f"{len(losses)} steps{early}, learning rates {rates[0]:.2e} to {rates[-1]:.2e}")
    print(f"smoothed loss: {curve[0]:.4f} at first, {min(curve):.4f} at its lowest")
    problem = ""
    if args.plot:
        try:
            plot_sweep(rates, losses, args.num_steps, suggested, Path(args.out))
            print(f"picture: {args.out}")
        except OSError as error:  # the sweep was not in vain
            problem = f"--out {args.out} cannot be written: {error.strerror}"
    print(f"Suggested LR: {suggested:.2e}", flush=True)
    if problem:
        raise UsageError(problem)
    return 0
