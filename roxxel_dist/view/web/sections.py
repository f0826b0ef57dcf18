"""The data of one item on the page, in sections: JSON texts by name, so that only changed sections are sent again."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.control.record import Restart
from roxxel_dist.place.directory import CONFIG
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.run.report import read_fields
from roxxel_dist.sweep.report.text import STATES
from roxxel_dist.sweep.space.distributions import EXACT
from roxxel_dist.sweep.study.folder import flat
from roxxel_dist.sweep.study.journal import Trial
from roxxel_dist.train.log.timeline import SPENT
from roxxel_dist.utils.display import plain
from roxxel_dist.view.items import State
from roxxel_dist.view.job import JobState
from roxxel_dist.view.run import Points, RankState, RunState, changed
from roxxel_dist.view.study import StudyState

LISTED = ("train_loss", "val_loss", "tokens")
"""The curves of a run in a list."""
LISTED_POINTS, OPEN_POINTS = 400, 1500
"""Points of a curve in a list, and of an open run."""
IN_HEAD = ("train_loss", "val_loss", "tokens_per_s", "ms_per_step", "mfu", "vram_gb", "ram_gb", "lr", "tokens")

Sections = dict[str, str]


def item_id(kind: str, name: str) -> str:
    """The id of an item in the address of the page: the same on every server."""
    return hashlib.blake2s(f"{kind} {name}".encode(), digest_size=6).hexdigest()


def sections(state: State, *, brief: bool = False) -> Sections:
    """The sections of an item; `brief` for the list."""
    if isinstance(state, RunState):
        return {name: _text(value) for name, value in _run(state, brief)}
    if isinstance(state, StudyState):
        return {name: _text(value) for name, value in _study(state, brief)}
    return {name: _text(value) for name, value in _job(state, brief)}


def _text(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)


def _run(run: RunState, brief: bool) -> Iterator[tuple[str, Any]]:
    yield (
        "head",
        {
            "kind": "run",
            "name": run.name,
            "path": run.path,
            "title": run.title,
            "tags": run.tags,
            "state": run.state,
            "step": run.step,
            "last_step": run.last_step,
            "best": run.best_val_loss,
            "left_s": run.left_s,
            "updated": run.updated,
            "row": {name: run.row[name] for name in IN_HEAD if name in run.row},
            "goodput": run.goodput,
        },
    )
    for metric, points in run.curves.items():
        if not brief or metric in LISTED:
            yield f"curve/{metric}", _columns(points, LISTED_POINTS if brief else OPEN_POINTS)
    if brief:
        return
    phases = [dataclasses.asdict(phase) for phase in run.phases]
    current = run.phase if run.phases else None
    yield "phases", {"phases": phases, "current": current, "realised": run.realised, "layout": run.layout}
    yield "ranks", {"job": run.job, "attempts": run.attempts, **_ranks(run.ranks, run.restarts)}
    yield "time", {"kinds": SPENT, "spent": run.spent, "goodput": run.goodput}
    tier = "disk" if bucket_url(run.name) is None else "bucket"
    yield "checkpoints", {"tier": tier, "checkpoints": [dataclasses.asdict(one) for one in run.checkpoints]}
    yield "config", _config(run.path, changed(Path(run.path, CONFIG)))


@lru_cache(maxsize=64)
def _config(run: str, _changed: float) -> Mapping[str, Any]:
    return flat(read_fields(Path(run)))


def _study(state: StudyState, brief: bool) -> Iterator[tuple[str, Any]]:
    study, history = state.study, state.study.history
    sweep, best = study.sweep, history.best
    counts = {name: history.count(kind) for kind, name in STATES.items()}
    yield (
        "head",
        {
            "kind": "study",
            "name": study.name,
            "path": study.place,
            "state": state.state,
            "counts": counts,
            "trials": len(history.trials),
            "cap": sweep.run_cap,
            "began": state.began,
            "left_s": state.left_s,
            "steps_left": state.steps_left,
            "metric": sweep.metric,
            "goal": sweep.goal,
            "method": history.method or sweep.method,
            "scheduler": (sweep.early_terminate or {}).get("type"),
            "best": best and best.value,
            "best_trial": best and best.number,
        },
    )
    if not brief:
        yield "parameters", list(sweep.space.names)
        yield "log", [one.name for one in sweep.space.free if "log" in one.distribution.name]
        for trial in history.trials.values():
            yield f"trial/{trial.number}", _trial(trial)


def _trial(trial: Trial) -> dict[str, Any]:
    stop = trial.stop if trial.state in ("stopped", "paused") else None
    return {
        "number": trial.number, "state": STATES[trial.state], "value": trial.value, "seconds": trial.seconds,
        "attempts": trial.attempts, "node": trial.node, "params": _params(trial), "began": trial.began,
        "why": f"{stop['rule']} at step {stop['step']}" if stop else trial.reason,
        "reports": _columns(trial.reports, LISTED_POINTS),
    }  # fmt: skip


def _params(trial: Trial) -> dict[str, Any]:
    """The parameters, without nesting; inf and nan as texts, and whole numbers that JavaScript would round."""
    return {
        name: str(value) if isinstance(value, int | float) and not abs(value) <= EXACT else value
        for name, value in flat(trial.params).items()
    }


def _job(state: JobState, brief: bool) -> Iterator[tuple[str, Any]]:
    job = state.record
    yield (
        "head",
        {
            "kind": "job",
            "name": job.run_id,
            "path": job.run_dir,
            "state": job.state,
            "code": job.code,
            "attempt": job.attempt,
            "step": job.step,
            "begun": job.begun,
            "updated": job.updated,
            "hosts": job.hosts,
            "nprocs": job.nprocs,
            "command": job.command,
        },
    )
    if not brief:
        yield "ranks", {"job": job.run_id, "attempts": job.attempt + 1, **_ranks(state.ranks, job.restarts)}
        yield "lines", state.lines


def _ranks(ranks: Sequence[RankState], restarts: Sequence[Restart]) -> dict[str, Any]:
    return {
        "ranks": [dataclasses.asdict(rank) for rank in ranks],
        "restarts": [dataclasses.asdict(restart) for restart in restarts],
    }


def _columns(points: Points | Sequence[tuple[int, float]], most: int) -> list[list[Any]]:
    """[steps, values] of at most about `most` points; numbers with as many digits as a screen can show."""
    every = max(1, math.ceil(len(points) / most))
    kept = [*points[: len(points) - 1 : every], *points[-1:]]
    return [[step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]]


def message(ids: Sequence[str], items: Mapping[str, Sections]) -> str:
    """The JSON text of all item ids in order, and of the sections of some items."""
    parts = (
        f"{json.dumps(item)}:{{{','.join(f'{json.dumps(name)}:{text}' for name, text in given.items())}}}"
        for item, given in items.items()
    )
    return f'{{"ids":{json.dumps(list(ids))},"items":{{{",".join(parts)}}}}}'
