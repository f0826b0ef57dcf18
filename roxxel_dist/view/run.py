"""A run on disk, read as it grows: each byte of its logs once, and in portions if there are many."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from pathlib import Path
from typing import Any

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, DAMAGED, TABLE, MetaFile, read_cursor
from roxxel_dist.launcher.control.record import JobRecord, Restart
from roxxel_dist.place.directory import CONFIG, METRICS, is_held
from roxxel_dist.process.process_stat import STATE, stat
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.train.log.csv_jsonl import Tail
from roxxel_dist.train.log.timeline import FINISHED, NAME, TimeSpent
from roxxel_dist.view.curve import Bucket, Curves, Points, number_of, points_of, step_of

PORTION_BYTES, LEAST_BYTES = 512 << 10, 16 << 10
"""Bytes of a log between two looks at the time, and those that are read if there is no time left."""
END_BYTES = 32 << 10
"""Bytes at the end of the metrics that are read first, for the newest numbers of a long run."""
SLICE_S = 0.25
"""CPU seconds that a look of a viewer may take for logs that are not read yet."""
NO_CURVE = ("step", "digest")
"""Keys of a row that are not metrics."""
STATES = {"": "runs", "step": "in a step"}
"""Displayed names of a rank's activities, if they differ."""


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
    """The newest value of each metric; NaN if it is not finite."""
    best_val_loss: float | None = None
    buckets: Mapping[str, tuple[Bucket, ...]]
    """The curve of each metric."""
    gaps: Mapping[str, list[tuple[int, int]]]
    """(first step, number) of neighbouring values that are not finite, by metric."""
    read_share: float = 1.0
    """The share of its logs that is read: curves and times are those of that part."""
    phases: tuple[PhaseSpan, ...] = ()
    realised: Mapping[str, float]
    """Share of each data set in the rows that the current phase has read; empty if the plan is not on disk yet."""
    layout: str = ""
    """The way in which devices shared the newest batches; empty where each had whole rows of its own."""
    ranks: tuple[RankState, ...] = ()
    job: str = ""
    """Its newest job on this host."""
    attempts: int = 0
    """Processes that have trained in it."""
    resumes: tuple[int, ...] = ()
    """The first step after each start but the first, and after each time that the run went back, in order of time."""
    restarts: tuple[Restart, ...] = ()
    """The restarts of its newest job."""
    spent: Mapping[str, float]
    """Seconds by kind, from its timeline."""
    checkpoints: tuple[CheckpointState, ...] = ()
    updated: float = 0.0
    """The time of the last row."""

    @property
    def curves(self) -> dict[str, Points]:
        """(step, value) of each metric: of many rows the first, the last, the least and the largest of each bucket."""
        return {name: points_of(buckets) for name, buckets in self.buckets.items()}

    @property
    def losses(self) -> Points:
        """The curve of train_loss."""
        return points_of(self.buckets.get("train_loss", ()))

    @property
    def validations(self) -> Points:
        """The curve of val_loss."""
        return points_of(self.buckets.get("val_loss", ()))

    @property
    def phase(self) -> int:
        """The index of the current phase, from 0."""
        return current_phase(self.phases, self.step)

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of a training run, at the rate of the newest row."""
        rate = self.row.get("tokens_per_s")
        if self.state != "training" or not rate or math.isnan(rate) or not self.phases:
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


def current_phase(phases: Sequence[PhaseSpan], step: int) -> int:
    """The index of the phase of a step, from 0."""
    return next((i for i, phase in enumerate(phases) if step <= phase.last), len(phases) - 1)


class MetricsTail:
    """The curves of a `metrics.jsonl`, extended by new rows: `curves` are those of the rows that are read, `row` has
    the newest value of each metric, also of a file that is not read to its end yet."""

    def __init__(self, path: Path) -> None:
        self.tail: Tail = Tail(path)
        self.curves: Curves = Curves(NO_CURVE)
        self.row: dict[str, float] = {}

    def read(self, deadline: float | None = None) -> None:
        """Add the new rows; until a time of `time.thread_time`, else all."""
        for rows in portions(self.tail, deadline):
            if self.tail.restarted:
                self.curves = Curves(NO_CURVE)
            self.curves.add(rows)
        self.row = dict(self.curves.row)
        if self.tail.unread_bytes:
            for row in self.tail.end(END_BYTES):
                if step_of(row) is not None:
                    pairs = ((name, number_of(value)) for name, value in row.items())
                    self.row |= {name: value for name, value in pairs if value is not None}


class TimelineTail:
    """The sums of a `timeline.jsonl`, extended by new rows."""

    def __init__(self, path: Path) -> None:
        self.tail: Tail = Tail(path)
        self.times: TimeSpent = TimeSpent()

    def read(self, deadline: float | None = None) -> None:
        """Add the new rows; until a time of `time.thread_time`, else all."""
        for rows in portions(self.tail, deadline):
            if self.tail.restarted:
                self.times = TimeSpent()
            for row in rows:
                with suppress(KeyError, TypeError, ValueError):
                    self.times.add(row)


def portions(tail: Tail, deadline: float | None) -> Iterator[list[dict[str, Any]]]:
    """The objects of the new lines of a file in portions; after a time of `time.thread_time` one small portion more."""
    while True:
        is_late = deadline is not None and time.thread_time() >= deadline
        yield tail.objects(LEAST_BYTES if is_late else PORTION_BYTES)
        if not tail.unread_bytes or is_late:
            return


class RunReader:
    """Reads one run; call `read` for each update. `brief` omits values that a line in a list does not show."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path: Path = path
        self.name: str = name or str(path)
        self._metrics, self._timeline = MetricsTail(path / METRICS), TimelineTail(path / NAME)
        self._rates = RankRates()

    def read(self, job: JobRecord | None = None, *, brief: bool = False, deadline: float | None = None) -> RunState:
        """The current state of the run; `job` is its newest job. At the time `deadline` of `time.thread_time` it stops
        to read logs, and the next call continues; by default it reads all."""
        metrics, times = self._metrics, TimeSpent()
        metrics.read(deadline)
        tails = [metrics.tail]
        if not brief:
            self._timeline.read(deadline)
            tails.append(self._timeline.tail)
            times = self._timeline.times
        row, cursor = metrics.row, read_cursor(self.path)
        state = "training" if self.is_trained() else "finished" if cursor.get("finished") else "stopped"
        if job is not None and job.state in ("starting", "restarting", "stopping"):
            state = job.state
        checkpoints = _checkpoints(self.path / CHECKPOINTS)
        plan, best = _plan(self.path, checkpoints)
        title, tags, planned = _of_config(self.path / CONFIG, modified_time(self.path / CONFIG))
        phases = _phases_of(plan["amendments"][-1]["shapes"]) if plan else () if brief else planned
        step = max(int(row.get("step", 0)), 0 if job is None or job.is_over else job.step - 1)
        if state == "stopped":  # it has saved a step after its last row, because not every step has a row
            step = max(step, *(checkpoint.step for checkpoint in checkpoints if not checkpoint.set_aside), 0)
            state = "finished" if times.last.get("activity") == FINISHED else state
        buckets = {name: curve.buckets for name, curve in metrics.curves.curves.items()}
        gaps = {
            name: [(bucket.begin, bucket.rows) for bucket in gap.buckets]
            for name, gap in metrics.curves.gaps.items()
            if gap.buckets
        }
        losses = [bucket.low for bucket in buckets.get("val_loss", ())]
        last = cursor.get("last_step")  # max_steps may end a run before its phases do
        if phases and not (last and step <= last):  # no checkpoint yet, or none since a resume with more steps
            last = phases[-1].last
        realised, size = {}, sum(tail.size for tail in tails)
        if plan and phases and step and not brief:
            with suppress(ValueError, KeyError, TypeError, IndexError):
                current = phases[current_phase(phases, step)]
                realised = _realised(json.dumps(plan), current.first - 1, min(step, phases[-1].last))
        return RunState(
            name=self.name,
            path=str(self.path),
            title=title,
            tags=tags,
            state=state,
            step=step,
            last_step=last,
            row=row,
            best_val_loss=min([*losses, *([] if best is None else [best])], default=None),
            buckets=buckets,
            gaps=gaps,
            read_share=1.0 - sum(tail.unread_bytes for tail in tails) / size if size else 1.0,
            phases=phases,
            realised=realised,
            layout=str(times.last_step.get("layout", "")),
            ranks=() if job is None else self._rates.read(job),
            job=job.run_id if job else "",
            attempts=times.attempts,
            resumes=tuple(times.resumes),
            restarts=job.restarts if job else (),
            spent=dict(times.spent),
            checkpoints=checkpoints,
            updated=modified_time(self.path / METRICS),
        )

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
            begun, since = self._first.setdefault((rank.rank, rank.pid), (rank.step, rank.changed_at))
            steps, seconds = rank.step - begun, rank.changed_at - since
            ranks.append(
                RankState(
                    rank=rank.rank,
                    host=rank.host,
                    pid=rank.pid,
                    state=state,
                    step=rank.step,
                    behind=most - rank.step,
                    still_s=max(0.0, now - rank.changed_at) if rank.changed_at else None,
                    ms_per_step=1000 * seconds / steps if steps > 0 and seconds > 0 else None,
                )
            )
            if seconds > 30:
                self._first[rank.rank, rank.pid] = rank.step, rank.changed_at
        return tuple(ranks)


def worst_ranks(ranks: Sequence[RankState], most: int) -> list[RankState]:
    """The worst ranks, in their order: those that are stopped, then those that are most steps behind."""
    found = nsmallest(most, ranks, key=lambda rank: (rank.state != "stopped", -rank.behind, rank.rank))
    return sorted(found, key=lambda rank: rank.rank)


def modified_time(path: Path) -> float:
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
                    return plan, meta["early_stopping"]["best_loss"]
    return {}, None


@lru_cache(maxsize=1024)
def _meta(checkpoint: Path, _saved: float) -> Mapping[str, Any]:
    return MetaFile.read(checkpoint).meta


def _phases_of(shapes: Sequence[Mapping[str, Any]]) -> tuple[PhaseSpan, ...]:
    phases, first = [], 1
    for shape in shapes:
        weights = dict(shape["weights"])
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()}
        sizes = {name: shape[name] for name in ("batch_size", "seq_len")}
        phases.append(PhaseSpan(first=first, last=first + shape["steps"] - 1, weights=shares, **sizes))
        first += shape["steps"]
    return tuple(phases)


@lru_cache(maxsize=4096)  # the list of the page has a line a run
def _of_config(config: Path, _changed: float) -> tuple[str, tuple[str, ...], tuple[PhaseSpan, ...]]:
    """The name and the tags that a config gives its run, and its phases, if all of them give their steps."""
    name, tags = "", ()
    with suppress(OSError, ValueError, KeyError, TypeError):
        fields = load_yaml(config)
        name, tags = str(fields.get("name") or ""), tuple(map(str, fields.get("tags") or ()))
        phases = fields.get("phases") or ()
        return name, tags, _phases_of([{**phase, "weights": phase.get("weights") or {"self": 1.0}} for phase in phases])
    return name, tags, ()


def _realised(plan: str, first: int, stop: int) -> Mapping[str, float]:
    """Share of each data set in the rows of steps [first, stop)."""
    rows = _plan_of(plan).rows_read(first, stop)
    total = sum(rows.values())
    return {name: count / total for name, count in rows.items()} if total else {}


@lru_cache(maxsize=16)
def _plan_of(state: str) -> Any:
    from roxxel_dist.curriculum.plan import Plan  # imports numpy, which other frames do not need

    return Plan.from_state(json.loads(state))
