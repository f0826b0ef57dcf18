"""A learning rate for a Config and its data, found by a sweep that leaves nothing behind."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roxxel_dist.assemble import folder_for_now, open_corpus, recipe
from roxxel_dist.cluster.determinism import make_deterministic, pin_threads
from roxxel_dist.cluster.distributed import initialize
from roxxel_dist.config import usage_errors
from roxxel_dist.lineage import with_base
from roxxel_dist.reading import primary_path
from roxxel_dist.train.base import checkpoint_named, loader
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.lr_finder import suggest, sweep_rates
from roxxel_dist.train.lr_sweep import sweep, sweep_stream
from roxxel_dist.train.state import Leaves


def find_lr(
    config: Any, data_path: str | Path | None, *, min_lr: float, max_lr: float, num_steps: int
) -> tuple[float, list[float], list[float]]:
    """See `Experiment.find_lr`."""
    with usage_errors():
        config, _ = with_base(config)
        config.validate()
        rates = sweep_rates(min_lr, max_lr, num_steps)
        data_path = primary_path(config, data_path)
        if config.deterministic:
            make_deterministic()
    pin_threads()
    initialize()
    with contextlib.ExitStack() as held:
        with usage_errors():
            folder = held.enter_context(folder_for_now(data_path, "find-lr"))
            made = recipe(config, held.enter_context(open_corpus(config, data_path, folder)))
            options = LoopOptions(**made.options)
            stream = sweep_stream(made.curriculum, num_steps, options.seed, made.mesh(), made.grad_accum)
            weights = None if options.init_from is None else _loader(options.init_from)
        # Not within: what fails while a step is traced is the model's or the loss function's, and needs its traceback.
        losses = sweep(
            made.build, made.optimizer, stream, made.loss, rates, grad_accum=made.grad_accum, options=options,
            load=weights,
        )  # fmt: skip
    rates = rates[: len(losses)]
    with usage_errors():
        return suggest(rates, losses, num_steps), rates, losses


def _loader(init_from: str) -> Callable[[Leaves], Leaves]:
    """What gives the weights that training would begin with; those of another model are the user's to mend."""
    load = loader(checkpoint_named(init_from))

    def told(like: Leaves) -> Leaves:
        with usage_errors():
            return load(like)

    return told
