"""A run on disk, read repeatedly at a cost that does not grow with its length."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, DAMAGED, TABLE, MetaFile, read_cursor
from roxxel_dist.cluster.process_stat import STATE, stat
from roxxel_dist.launcher.control.record import JobRecord, Restart
from roxxel_dist.place.directory import CONFIG, METRICS, is_held
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.train.log.timeline import FINISHED, NAME, time_spent
from roxxel_dist.view.tail import SAMPLES, Tail, sample

END_BYTES = 256 << 10
"""Bytes at the end of the metrics and of the timeline that are read completely."""
VALIDATION_SAMPLES, VALIDATION_BYTES = 100, 256 << 10
"""Rows with a validation are rare: places of a long file that are searched for one, and bytes read at each."""
BRIEF = 8
"""A line in a list reads this many times fewer bytes of the metrics."""
MAX_POINTS = 2000
NO_CURVE = ("step", "digest")
"""Keys of a row that are not metrics."""
STATES = {"": "runs", "step": "in a step"}
"""Displayed names of a rank's activities, if they differ."""

Points = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """A phase of a run: its steps, from 1, both included."""

    first: int
    last: int
    batch_size: int
    seq_len: int
    weights: Mapping[str, float]
    """Planned share of each data set; they sum to 1."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A running rank."""

    rank: int
    host: str
    pid: int
    state: str
    """"stopped" if the process is stopped, otherwise its activity."""
    step: int
    behind: int
    """Number of steps behind the first rank."""
    still_s: float | None
    """Seconds since its last progress; None if unknown."""
    ms_per_step: float | None
    """Measured between two readings, so None in the first."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """A checkpoint on disk."""

    name: str
    """Its step; with the suffix `.damaged` if it was set aside."""
    step: int
    saved: float
    """Seconds since 1970."""
    digests: bool
    """Whether it has a table of digests, which a restore verifies."""
    set_aside: bool


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run at one moment. Missing numbers are None."""

    name: str
    path: str
    title: str = ""
    """The name that its config gives it, for people."""
    tags: tuple[str, ...] = ()
    state: str
    """"training", "finished", "stopped", or the state of its job."""
    step: int = 0
    last_step: int | None = None
    row: Mapping[str, float]
    """The newest value of each metric."""
    best_val_loss: float | None = None
    curves: Mapping[str, Points]
    """(step, value) of each metric, thinned."""
    phases: tuple[PhaseSpan, ...] = ()
    realised: Mapping[str, float]
    """Share of each data set in the rows that the current phase has read; empty if the plan is not on disk yet."""
    layout: str = ""
    """How devices shared the newest batches; empty where each had whole rows of its own."""
    ranks: tuple[RankState, ...] = ()
    job: str = ""
    """Its newest job on this host."""
    attempts: int = 0
    """Processes that have trained in it."""
    restarts: tuple[Restart, ...] = ()
    """The restarts of its newest job."""
    spent: Mapping[str, float]
    """Seconds by kind, from `time_spent`, of the newest part of the timeline that is read."""
    checkpoints: tuple[CheckpointState, ...] = ()
    updated: float = 0.0
    """The time of the last row."""

    @property
    def losses(self) -> Points:
        """(step, train_loss)."""
        return self.curves.get("train_loss", [])

    @property
    def validations(self) -> Points:
        """(step, val_loss)."""
        return self.curves.get("val_loss", [])

    @property
    def phase(self) -> int:
        """The index of the current phase, from 0."""
        return next((i for i, phase in enumerate(self.phases) if self.step <= phase.last), len(self.phases) - 1)

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of a training run, at the rate of the newest row."""
        rate = self.row.get("tokens_per_s")
        if self.state != "training" or not rate or not self.phases:
            return None
        left, end = 0, self.last_step or self.phases[-1].last
        for phase in self.phases:
            steps = max(0, min(phase.last, end) - max(self.step, phase.first - 1))
            left += steps * phase.batch_size * (phase.seq_len - 1)  # a speed is of inputs: the last of a row is none
        return left / rate

    @property
    def goodput(self) -> float | None:
        """The share of time in training, without repeated steps."""
        total = sum(self.spent.values())
        return self.spent["training"] / total if total else None


class MetricsTail:
    """The curves of a `metrics.jsonl`: thinned if it is long, complete at its end, and extended by new rows."""

    def __init__(self, path: Path, less: int = 1) -> None:
        self._tail, self._less = Tail(path, END_BYTES // less), less
        self._clear()

    def _clear(self) -> None:
        self.row: dict[str, float] = {}
        self.curves: dict[str, Points] = {}

    def read(self) -> None:
        """Add the new rows."""
        rows = self._tail.objects()
        if self._tail.restarted:
            self._clear()
            if start := self._tail.start:
                with suppress(OSError):
                    path = self._tail.path
                    self._add(sample(path, start, "train_loss", SAMPLES // self._less))
                    count, size = VALIDATION_SAMPLES // self._less, VALIDATION_BYTES // self._less
                    validations = sample(path, start, "val_loss", count, size)
                    self.curves |= {name: _points(validations, name) for name in self.curves if name.startswith("val")}
                    self.curves["val_loss"] = _points(validations, "val_loss")
        self._add(rows)

    def _add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.row |= {name: value for name, value in row.items() if isinstance(value, int | float)}
        for name in dict.fromkeys(name for row in rows for name in row if name not in NO_CURVE):
            if points := _points(rows, name):
                self.curves[name] = _thinned(self.curves.get(name, []) + points)


class RunReader:
    """Reads one run; call `read` for each update. `brief` omits values that a line in a list does not show."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path: Path = path
        self.name: str = name or str(path)
        self._brief, self._full = MetricsTail(path / METRICS, BRIEF), MetricsTail(path / METRICS)
        self._timeline, self._rows = Tail(path / NAME, END_BYTES), list[dict[str, Any]]()
        self._spent: dict[str, float] = {}
        self._rates = RankRates()

    def read(self, job: JobRecord | None = None, *, brief: bool = False) -> RunState:
        """The current state of the run; `job` is its newest job."""
        metrics = self._brief if brief else self._full
        metrics.read()
        row, cursor = metrics.row, read_cursor(self.path)
        state = "training" if self.is_trained() else "finished" if cursor.get("finished") else "stopped"
        if job is not None and job.state in ("starting", "restarting", "stopping"):
            state = job.state
        checkpoints = _checkpoints(self.path / CHECKPOINTS)
        plan, best = _plan(self.path, checkpoints)
        phases = _phases_of(plan["amendments"][-1]["shapes"]) if plan else () if brief else _planned(self.path)
        step = max(int(row.get("step", 0)), 0 if job is None or job.is_over else job.step - 1)
        if state == "stopped":  # it has saved a step after its last row, because not every step has a row
            step = max(step, *(checkpoint.step for checkpoint in checkpoints if not checkpoint.set_aside), 0)
        losses = [loss for _, loss in metrics.curves.get("val_loss", [])]
        last = cursor.get("last_step")  # max_steps may end a run before its phases do
        if phases and not (last and step <= last):  # no checkpoint yet, or none since a resume with more steps
            last = phases[-1].last
        title, tags = _about(self.path / CONFIG, changed(self.path / CONFIG))
        now = RunState(
            name=self.name,
            path=str(self.path),
            title=title,
            tags=tags,
            state=state,
            step=step,
            last_step=last,
            row=dict(row),
            best_val_loss=min([*losses, *([] if best is None else [best])], default=None),
            curves=dict(metrics.curves),
            phases=phases,
            realised={},
            ranks=() if job is None else self._rates.read(job),
            job=job.run_id if job else "",
            restarts=job.restarts if job else (),
            spent={},
            checkpoints=checkpoints,
            updated=changed(self.path / METRICS),
        )
        if brief:
            return now
        rows = self._timeline.objects()
        if rows or self._timeline.restarted:
            self._rows = [*([] if self._timeline.restarted else self._rows), *rows][-3000:]
            with suppress(KeyError, TypeError):
                self._spent = time_spent(self._rows)
        attempts = 1 + int(self._rows[-1].get("attempt", 0)) if self._rows else 0
        steps = next((row for row in reversed(self._rows) if row.get("activity") == "step"), {})
        if state == "stopped" and self._rows and self._rows[-1].get("activity") == FINISHED:
            now = replace(now, state="finished")
        realised = {}
        if plan and phases and step:
            with suppress(ValueError, KeyError, TypeError, IndexError):
                realised = _realised(json.dumps(plan), phases[now.phase].first - 1, min(step, phases[-1].last))
        layout = str(steps.get("layout", ""))
        return replace(now, spent=self._spent, attempts=attempts, realised=realised, layout=layout)

    def is_trained(self) -> bool:
        """Whether a process trains in it now."""
        return is_held(self.path, unknown=False)


class RankRates:
    """The ranks of a job, and the time of a step in each, measured between readings."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], tuple[int, float]] = {}

    def read(self, job: JobRecord) -> tuple[RankState, ...]:
        """The running ranks."""
        now, ranks, most = time.time(), [], max((rank.step for rank in job.ranks), default=0)
        for rank in job.ranks:
            state = STATES.get(rank.activity, rank.activity)
            if job.is_here and rank.host in (job.controller.host, "localhost"):
                with suppress(OSError):
                    state = "stopped" if stat(rank.pid)[STATE] in b"Tt" else state
            begun, since = self._first.setdefault((rank.rank, rank.pid), (rank.step, rank.moved))
            steps, seconds = rank.step - begun, rank.moved - since
            ranks.append(
                RankState(
                    rank=rank.rank,
                    host=rank.host,
                    pid=rank.pid,
                    state=state,
                    step=rank.step,
                    behind=most - rank.step,
                    still_s=max(0.0, now - rank.moved) if rank.moved else None,
                    ms_per_step=1000 * seconds / steps if steps > 0 and seconds > 0 else None,
                )
            )
            if seconds > 30:
                self._first[rank.rank, rank.pid] = rank.step, rank.moved
        return tuple(ranks)


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> Points:
    points = [(row.get("step"), row.get(metric)) for row in rows]
    return [(int(s), float(v)) for s, v in points if isinstance(s, int | float) and isinstance(v, int | float)]


def _thinned(points: Points) -> Points:
    return points if len(points) <= MAX_POINTS else _thinned([*points[:-1:2], points[-1]])


def changed(path: Path) -> float:
    """The time of the last write of a file; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _checkpoints(folder: Path) -> tuple[CheckpointState, ...]:
    states = []
    with suppress(OSError):
        for place in os.scandir(folder):
            step, damaged, _ = place.name.partition(DAMAGED)
            if step.isdecimal():
                with suppress(OSError):
                    states.append(
                        CheckpointState(
                            name=place.name,
                            step=int(step),
                            saved=place.stat().st_mtime,
                            digests=os.path.exists(os.path.join(place.path, TABLE)),
                            set_aside=bool(damaged),
                        )
                    )
    return tuple(sorted(states, key=lambda state: (state.step, state.name)))


def _plan(run: Path, checkpoints: Sequence[CheckpointState]) -> tuple[Mapping[str, Any], float | None]:
    """(`Plan.state`, the best val_loss) of the newest checkpoint that has one; empty if there is none."""
    for checkpoint in reversed(checkpoints):
        if not checkpoint.set_aside:
            with suppress(OSError, ValueError, KeyError, TypeError):
                meta = _meta(run / CHECKPOINTS / checkpoint.name, checkpoint.saved)
                if plan := meta.get("plan"):
                    return plan, meta.get("best_loss")
    return {}, None


@lru_cache(maxsize=1024)
def _meta(checkpoint: Path, _saved: float) -> Mapping[str, Any]:
    return MetaFile.read(checkpoint).meta


def _phases_of(shapes: Sequence[Mapping[str, Any]]) -> tuple[PhaseSpan, ...]:
    phases, first = [], 1
    for shape in shapes:
        weights = dict(shape["weights"])
        total = sum(weights.values())
        phases.append(
            PhaseSpan(
                first=first,
                last=first + shape["steps"] - 1,
                batch_size=shape["batch_size"],
                seq_len=shape["seq_len"],
                weights={name: weight / total for name, weight in weights.items()},
            )
        )
        first += shape["steps"]
    return tuple(phases)


def _planned(run: Path) -> tuple[PhaseSpan, ...]:
    """The phases of the config, if all of them give their steps: for a run without a checkpoint."""
    return _phases_in(run / CONFIG, changed(run / CONFIG))


@lru_cache(maxsize=4096)  # the list of the page has a line a run
def _about(config: Path, _changed: float) -> tuple[str, tuple[str, ...]]:
    """The name and the tags that a config gives its run."""
    with suppress(OSError, ValueError, TypeError):
        fields = load_yaml(config)
        return str(fields.get("name") or ""), tuple(map(str, fields.get("tags") or ()))
    return "", ()


@lru_cache(maxsize=64)
def _phases_in(config: Path, _changed: float) -> tuple[PhaseSpan, ...]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        shapes = [{"weights": {"self": 1.0}, **phase} for phase in load_yaml(config).get("phases") or ()]
        return _phases_of([shape | {"weights": shape["weights"] or {"self": 1.0}} for shape in shapes])
    return ()


def _realised(plan: str, first: int, stop: int) -> Mapping[str, float]:
    """Share of each data set in the rows of steps [first, stop)."""
    rows = _plan_of(plan).rows_read(first, stop)
    total = sum(rows.values())
    return {name: count / total for name, count in rows.items()} if total else {}


@lru_cache(maxsize=16)
def _plan_of(state: str) -> Any:
    from roxxel_dist.curriculum.plan import Plan  # imports numpy, which other frames do not need

    return Plan.from_state(json.loads(state))
