"""The data of one item on the page, in sections: JSON texts by name, so that only changed sections are sent again."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.control.record import Restart
from roxxel_dist.place.directory import CONFIG
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.run.report import read_fields
from roxxel_dist.sweep.report.text import STATES
from roxxel_dist.sweep.report.versus import versus_json
from roxxel_dist.sweep.space.distributions import CONTINUOUS, EXACT, Distribution
from roxxel_dist.sweep.study.folder import Study, flat
from roxxel_dist.sweep.study.journal import Trial
from roxxel_dist.train.log.timeline import SPENT
from roxxel_dist.utils.display import plain
from roxxel_dist.view.curve import Bucket, curve_of, reduce_buckets
from roxxel_dist.view.items import JobState, State, StudyState
from roxxel_dist.view.run import RankState, RunState, modified_time, worst_ranks

LISTED = ("train_loss", "val_loss", "tokens")
"""The curves of a run in a list."""
LISTED_BUCKETS, OPEN_BUCKETS = 400, 1024
"""Buckets of a curve in a list, and of an open run."""
MOST_RESUMES = 200
MOST_RANKS = 256
"""Ranks that are sent, each second: those that are furthest behind."""
MOST_CHOICES = 100
"""Choices of a parameter whose axis has a place for each."""
BOUNDED = [name for name, (numbers, _) in CONTINUOUS.items() if "min" in numbers]
"""Distributions whose values have ends."""
IN_HEAD = (
    "train_loss", "val_loss", "tokens_per_s", "ms_per_step", "mfu", "hfu", "vram_gb", "ram_gb", "lr", "tokens",
    "expert_load_max", "expert_dropped",
)  # fmt: skip

Sections = dict[str, str]


def item_id(kind: str, name: str) -> str:
    """The id of an item in the address of the page: the same on every server."""
    return hashlib.blake2s(f"{kind} {name}".encode(), digest_size=6).hexdigest()


def sections(state: State, *, brief: bool = False) -> Sections:
    """The sections of an item; `brief` for the list."""
    pairs = (
        _run(state, brief) if isinstance(state, RunState)
        else _study(state, brief) if isinstance(state, StudyState)
        else _job(state, brief)
    )  # fmt: skip
    return {name: _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)


def _run(run: RunState, brief: bool) -> Iterator[tuple[str, Any]]:
    head = {
        "kind": "run", "name": run.name, "path": run.path, "title": run.title, "tags": run.tags, "state": run.state,
        "step": run.step, "last_step": run.last_step, "best": run.best_val_loss, "left_s": run.left_s,
        "updated": run.updated, "row": {name: run.row[name] for name in IN_HEAD if name in run.row},
        "goodput": run.goodput, "read": run.read_share,
    }  # fmt: skip
    yield "head", head
    for metric, buckets in {**dict.fromkeys(run.gaps, ()), **run.buckets}.items():
        if not brief or metric in LISTED:
            yield f"curve/{metric}", columns(reduce_buckets(buckets, LISTED_BUCKETS if brief else OPEN_BUCKETS))
    yield "gaps", {metric: gaps for metric, gaps in run.gaps.items() if not brief or metric in LISTED}
    if brief:
        return
    phases = [dataclasses.asdict(phase) for phase in run.phases]
    current = run.phase if run.phases else None
    yield "phases", {"phases": phases, "current": current, "realised": run.realised, "layout": run.layout}
    yield "resumes", run.resumes[-MOST_RESUMES:]
    yield "ranks", {"job": run.job, "attempts": run.attempts, **_ranks(run.ranks, run.restarts)}
    yield "time", {"kinds": SPENT, "spent": run.spent, "goodput": run.goodput}
    tier = "disk" if bucket_url(run.name) is None else "bucket"
    yield "checkpoints", {"tier": tier, "checkpoints": [dataclasses.asdict(one) for one in run.checkpoints]}
    yield "config", _config(run.path, modified_time(Path(run.path, CONFIG)))


@lru_cache(maxsize=64)
def _config(run: str, _changed: float) -> Mapping[str, Any]:
    return flat(read_fields(Path(run)))


def _study(state: StudyState, brief: bool) -> Iterator[tuple[str, Any]]:
    study, history = state.study, state.study.history
    sweep, best = study.sweep, history.best
    counts = {STATES[kind]: count for kind, count in study.counts().items()}
    head = {
        "kind": "study", "name": study.name, "path": study.place, "state": state.state, "counts": counts,
        "trials": len(history.trials), "cap": sweep.run_cap, "began": state.began, "left_s": state.left_s,
        "steps_left": state.steps_left, "metric": sweep.metric, "goal": sweep.goal,
        "method": history.method or sweep.method, "scheduler": (sweep.early_terminate or {}).get("type"),
        "best": best and best.value, "best_trial": best and best.number,
    }  # fmt: skip
    yield "head", head
    if not brief and sweep.versus is not None:
        yield "versus", versus_json(study)
    if not brief:
        yield "parameters", list(sweep.space.names)
        yield "scales", {one.name: _scale(one.distribution) for one in sweep.space.free}
        for trial in history.trials.values():
            yield f"trial/{trial.number}", _trial(study, trial)


def _scale(distribution: Distribution) -> dict[str, Any]:
    """The form of the axis of a parameter: its choices, or "log" and the ends where it has some."""
    choices = distribution.choices
    if choices is not None and len(choices) <= MOST_CHOICES:
        return {"choices": [_for_page(choice) for choice in choices]}
    ends: list[float] | None = None
    if choices is not None or distribution.name.removeprefix("q_") in BOUNDED:
        with suppress(OverflowError):
            ends = [distribution.quantile(0.0), distribution.quantile(1.0)]
    return {"log": "log" in distribution.name, "ends": ends}


def _trial(study: Study, trial: Trial) -> dict[str, Any]:
    stop = trial.stop if trial.state in ("stopped", "paused") else None
    return {
        "number": trial.number, "state": STATES[study.state_of(trial)], "value": trial.value, "seconds": trial.seconds,
        "attempts": trial.attempts, "node": trial.node, "params": _params(trial), "began": trial.began,
        "why": f"{stop['rule']} at step {stop['step']}" if stop else trial.reason,
        "reports": columns(reduce_buckets(curve_of(trial.reports), LISTED_BUCKETS)),
    }  # fmt: skip


def _params(trial: Trial) -> dict[str, Any]:
    """The parameters of a trial, without nesting."""
    return {name: _for_page(value) for name, value in flat(trial.params).items()}


def _for_page(value: Any) -> Any:
    """A value of a parameter; inf, nan, and whole numbers that JavaScript would round, as texts."""
    return str(value) if isinstance(value, int | float) and not abs(value) <= EXACT else value


def _job(state: JobState, brief: bool) -> Iterator[tuple[str, Any]]:
    job = state.record
    head = {
        "kind": "job", "name": job.run_id, "path": job.run_dir, "state": job.state, "code": job.code,
        "attempt": job.attempt, "step": job.step, "begun": job.begun, "updated": job.updated, "hosts": job.hosts,
        "nprocs": job.nprocs, "command": job.command,
    }  # fmt: skip
    yield "head", head
    if not brief:
        yield "ranks", {"job": job.run_id, "attempts": job.attempt + 1, **_ranks(state.ranks, job.restarts)}
        yield "lines", state.lines


def _ranks(ranks: Sequence[RankState], restarts: Sequence[Restart]) -> dict[str, Any]:
    return {
        "ranks": [dataclasses.asdict(rank) for rank in worst_ranks(ranks, MOST_RANKS)],
        "more": max(0, len(ranks) - MOST_RANKS),
        "restarts": [dataclasses.asdict(restart) for restart in restarts],
    }


def columns(buckets: Sequence[Bucket]) -> list[list[Any]]:
    """[steps, values], or [steps, means, least, largest] where a bucket has several rows. The first and the last row
    are points of their own. Numbers have as many digits as a screen can show."""
    if all(bucket.rows == 1 for bucket in buckets):
        return [[bucket.begin for bucket in buckets], [_digits(bucket.first) for bucket in buckets]]
    first, last = buckets[0], buckets[-1]
    rows = [((bucket.begin + bucket.end) // 2, bucket.mean, bucket.low, bucket.high) for bucket in buckets]
    ends = [(first.begin, *[first.first] * 3)], [(last.end, *[last.last] * 3)]
    rows = [*ends[0][: first.rows > 1], *rows, *ends[1][: last.rows > 1]]
    steps, *values = map(list, zip(*rows, strict=True))
    return [steps, *([_digits(value) for value in column] for column in values)]


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def message(ids: Sequence[str], items: Mapping[str, Sections]) -> str:
    """The JSON text of all item ids in order, and of the sections of some items."""
    parts = (
        f"{json.dumps(item)}:{{{','.join(f'{json.dumps(name)}:{text}' for name, text in given.items())}}}"
        for item, given in items.items()
    )
    return f'{{"ids":{json.dumps(list(ids))},"items":{{{",".join(parts)}}}}}'
