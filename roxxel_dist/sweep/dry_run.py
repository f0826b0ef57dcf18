"""What a sweep would be, before it is run: trials, devices, hours.

How long trials would take: a few are looked at, and one may be tried for some steps.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from roxxel_dist.config import UsageError
from roxxel_dist.launcher.output.bar import clock
from roxxel_dist.run_directory import METRICS
from roxxel_dist.sweep.execution.corpus import make_shards
from roxxel_dist.sweep.journal import History
from roxxel_dist.sweep.samplers import Engine, SpaceExhausted
from roxxel_dist.sweep.study import flat, short
from roxxel_dist.train.loggers.csv_jsonl import read_rows

if TYPE_CHECKING:
    from roxxel_dist.estimate import Cost

STEPS = 12
"""Of the trial that is tried; the first two are not counted."""
TRY_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What some steps of a trial showed about this machine."""

    flops_per_s: float
    start_s: float
    """Until the first step was done, compilation included."""


def try_out(config: Any, data_path: str | None, look: "Cost") -> Tried | None:
    """Train a trial for a few steps in a folder that is gone afterwards; None where it does not get there."""
    with tempfile.TemporaryDirectory(prefix=".sweep-", dir=Path.cwd(), ignore_cleanup_errors=True) as place:
        short = type(config).from_dict(
            {**config.to_dict(), "max_steps": min(STEPS, look.steps), "log_every": 1, "eval_every": 10**9,
             "checkpoint_every": 10**9, "wandb": "off", "export_weights": False}
        )  # fmt: skip
        short.save_yaml(Path(place) / "try.yaml")
        words = ["train", "--config", f"{place}/try.yaml", "--run_dir", f"{place}/run"]
        words += [] if data_path is None else ["--data_path", data_path]
        begun = time.monotonic()
        try:
            subprocess.run(
                [sys.executable, "-m", "roxxel_dist", *words], check=True, capture_output=True, timeout=TRY_LIMIT_S
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        whole = time.monotonic() - begun
        rows = read_rows(Path(place) / "run" / METRICS)
        paces = [row["ms_per_step"] / 1e3 for row in rows if "ms_per_step" in row]
    if not paces:
        return None
    pace = statistics.median(paces[2:] or paces)
    return Tried(flops_per_s=look.flops / look.steps / pace, start_s=max(0.0, whole - pace * min(STEPS, look.steps)))


def trial_seconds(looks: Sequence["Cost"], tried: Tried) -> float:
    """How long the trials that were looked at would take, on average."""
    return statistics.fmean(tried.start_s + look.flops / tried.flops_per_s for look in looks)


def hours(seconds: float, trials: int, workers: int) -> float:
    """Of all trials, so many at once."""
    return seconds * -(-trials // workers) / 3600


LOOKS = 5
"""Trials that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a sweep before its trials run."""

    study: Path
    what: str
    count: int | None
    size: int | None
    """Points of the space; None: endless."""
    workers: int
    hosts: int
    procs_per_host: int
    gpus_per_host: int | None
    ray_address: str | None
    max_time_s: float | None
    history: History


def trials(plan: Plan) -> str:
    """How many, in a line."""
    known = len(plan.history.trials)
    return (
        ("trials until Ctrl-C" if plan.count is None else f"{plan.count} trials")
        + (f", {known} of them begun before" if known else "")
        + ("" if plan.size is None else f"; the space has {plan.size:,} points")
        + (f"; {plan.workers} at once" if plan.workers > 1 else "")
    )


def forecast(plan: Plan, engine: Engine, config_of: Callable[[Mapping[str, Any]], Any] | None, data: str | None) -> str:
    """All of it, as text.

    Args:
        plan: what is known.
        engine: a new one, that gives some trials to look at.
        config_of: from parameters to a Config; None where trials are a program of the user's own.
        data: the data path.

    Raises:
        UsageError: a trial could not run.
    """
    asked: list[Mapping[str, Any]] = []
    try:
        for _ in range(min(LOOKS, plan.count or LOOKS)):
            asked.append(engine.ask()[1])
    except SpaceExhausted as error:
        if not asked:
            raise UsageError(str(error)) from error
    procs = plan.hosts * plan.procs_per_host
    gpus = "" if plan.gpus_per_host is None else f", {plan.gpus_per_host} GPU(s) on each host"
    where = f"the Ray cluster at {plan.ray_address}" if plan.ray_address else "a Ray of its own on this machine"
    lines = [
        f"study {plan.study}: {plan.what}",
        f"trials: {trials(plan)}",
        *(f"  for instance {', '.join(f'{k} {short(v)}' for k, v in flat(one).items())}" for one in asked[:2]),
        f"devices: {plan.hosts} host(s) and {procs} process(es) a trial{gpus}, in {where}",
    ]
    return "\n".join([*lines, *_hours(plan, asked, config_of, data)])


def _hours(
    plan: Plan,
    asked: Sequence[Mapping[str, Any]],
    config_of: Callable[[Mapping[str, Any]], Any] | None,
    data: str | None,
) -> list[str]:
    known = [one.seconds for one in plan.history.trials.values() if one.seconds is not None]
    if known:
        return [_time(plan, fmean(known), f"as the {len(known)} trial(s) that have ended took")]
    if config_of is None or plan.ray_address or plan.hosts * plan.procs_per_host > 1 or not asked:
        if plan.max_time_s is not None:
            return [_time(plan, plan.max_time_s, "at most: --max_trial_time")]
        return ["hours: not known before the first trial has ended (--max_trial_time would bound them)"]
    from roxxel_dist.estimate import Cost, cost  # jax

    looks: list[tuple[Any, str | None, Cost]] = []
    refusal: UsageError | ValueError | None = None
    with TemporaryDirectory(prefix=".sweep-", dir=Path.cwd()) as folder:  # text is made into shards for all of them
        for params in asked:
            try:
                config = config_of(params)
                shards = make_shards(config, data, Path(folder))
                looks.append((config, shards, cost(config, shards)))
            except (UsageError, ValueError) as error:
                refusal = refusal or error
        if not looks:
            raise UsageError(f"none of {len(asked)} trials that were looked at can run: {refusal}")
        tried = try_out(*looks[0])
    costs = [one for *_, one in looks]
    steps, sizes = [one.steps for one in costs], [one.parameters for one in costs]
    told = (
        f"  the first {len(asked)}: {min(steps):,} to {max(steps):,} steps, {min(sizes):,} to {max(sizes):,} parameters"
    )
    if refusal is not None:
        told += f"; {len(asked) - len(looks)} of them cannot run ({refusal})"
    if tried is None:
        return [told, "hours: not known: the first trial could not be tried here; see what `train` says of it"]
    seconds = min(trial_seconds(costs, tried), plan.max_time_s or float("inf"))
    return [told, _time(plan, seconds, f"from {STEPS} steps of the first of them on this machine")]


def _time(plan: Plan, seconds: float, why: str) -> str:
    each = f"{clock(seconds)} a trial"
    if plan.count is None:
        return f"hours: {each}, {why}; no end: give --count"
    left = max(0, plan.count - sum(one.state != "running" for one in plan.history.trials.values()))
    whole = hours(seconds, left, plan.workers)
    return f"hours: about {whole:.2g} ({clock(3600 * whole)}) for {left} trial(s), {each}, {why}"
