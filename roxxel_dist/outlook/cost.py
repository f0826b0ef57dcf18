"""What training a config costs, found out in a second: nothing is compiled, and nothing allocated."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from roxxel_dist.assemble import folder_for_now, open_corpus, recipe
from roxxel_dist.cluster.determinism import pin_threads
from roxxel_dist.cluster.distributed import initialize
from roxxel_dist.config import usage_errors
from roxxel_dist.lineage import with_base
from roxxel_dist.outlook.phase import spans
from roxxel_dist.reading import absolute_paths, primary_path
from roxxel_dist.train.ahead import look_ahead
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.follow import end_of
from roxxel_dist.train.model_state import ModelState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one run."""

    steps: int
    tokens: int
    flops: float
    """Forward and backward, of all steps."""
    parameters: int


def cost(config: Any, data_path: str | Path | None) -> Cost:
    """Steps, tokens, operations and parameters of a trial of a sweep.

    Text is made into shards in a folder that is gone afterwards.

    Raises:
        UsageError: the config or the data do not allow the run.
    """
    with usage_errors(), contextlib.ExitStack() as held:
        config, _ = with_base(config)
        config = dataclasses.replace(config, **absolute_paths(config))
        config.validate()
        pin_threads()
        initialize()
        path = primary_path(config, data_path)
        folder = held.enter_context(folder_for_now(path, "cost"))
        made = recipe(config, held.enter_context(open_corpus(config, path, folder)), trial=True)
        options, plan = LoopOptions(**made.options), made.curriculum.plan(made.config.seed)
        parts, state, settings = look_ahead(made.build, made.optimizer, made.mesh(), options, plan.total_steps)
        model = ModelState(parts, state, settings)
        flops_of, last = model.flops_per_token(), end_of(plan, options)
        pieces = [
            (plan.tokens(stop) - plan.tokens(first), flops_of(plan.segment(stop - 1).shape.seq_len))
            for first, stop in spans(plan, last)
        ]
        sizes = [leaf.size for leaf in {**model.frozen, **model.params}.values()]
        return Cost(
            steps=last,
            tokens=plan.tokens(last),
            flops=sum(tokens * each for tokens, each in pieces),
            parameters=sum(sizes),
        )
