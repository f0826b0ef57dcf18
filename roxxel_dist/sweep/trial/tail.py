"""Reports of a trial, read while it runs: from the metrics of its run directory, or from the W&B run of its rank 0,
wherever the user's program lets the client put it."""

import json
import math
import operator
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import Any

from roxxel_dist.place.directory import METRICS, SUMMARY
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.distributions import is_finite, is_number
from roxxel_dist.sweep.space.values import excerpt
from roxxel_dist.train.log.csv_jsonl import DIGEST, Tail

Report = tuple[int, float]
SUMMARIZED = {
    "train_loss": operator.itemgetter(-1),
    "tokens": operator.itemgetter(-1),
    "vram_gb": max,
    "ram_gb": max,
    "ms_per_step": median,
    "tokens_per_s": median,
}
"""Metrics that are kept with a result, and which of their values."""


class MetricsTail:
    """The reports in `metrics.jsonl` of a run, whose directory need not exist yet.

    `weights` are of the logged metrics of which `metric` is a mean; empty where it is logged itself. Attributes:
    `names` of all metrics that came; `losses`, by step, what each of the metrics of `weights` was, by the name of its
    data set.
    """

    def __init__(self, run: Path, metric: str, weights: Mapping[str, float] | None = None) -> None:
        self._run, self._metric, self._log = run, metric, Tail(run / METRICS)
        self._weights = weights or {}
        self.losses: dict[int, dict[str, float]] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._reported = -1
        self._first: list[Report] = []
        self.names: set[str] = set()

    def read(self, *, last: bool = False) -> list[Report]:
        """(step, value) for each new value of the metric, in order of steps; one that is not finite is NaN. `last`: the
        run has ended, this is the last call.

        A run evaluates after step 1 too, where all trials are alike. That value is a report only if the next one is of
        step 2, or if there is no other.
        """
        reports: list[Report] = []
        for row in self._log.rows():  # from the first again where a run that goes on has cut its log to its checkpoint
            row.pop(DIGEST, None)  # no metric
            step = int(row.pop("step", None) or 0)
            reports += self._add(step, row, self._value(step, row))
        if reports and reports[0][0] == 1 and math.isfinite(reports[0][1]):
            self._first = [reports.pop(0)]
        if reports or last:
            counts = not reports or reports[0][0] == 2
            reports, self._first = (self._first if counts else []) + reports, []
        return reports

    def _value(self, step: int, row: Mapping[str, Any]) -> float | None:
        """The metric in a row, NaN where it is not finite; None where the row has it not."""
        wanted = self._weights or {self._metric: 1.0}
        if not wanted.keys() <= row.keys():
            return None
        values = {name: math.nan if row[name] is None else row[name] for name in wanted}
        if not self._weights:
            return values[self._metric]
        self.losses[step] = {name.partition("/")[2]: value for name, value in values.items()}
        return math.fsum(weight * values[name] for name, weight in wanted.items())

    @property
    def problem(self) -> str | None:
        """The reason why the run has no value that can be relied on; None where it may have one."""
        return None

    def missing_message(self) -> str:
        """A message: what the run logged instead of the metric, and what to change."""
        logged = f"it logged {', '.join(sorted(self.names))}" if self.names else "it logged nothing"
        if absent := sorted(self._weights.keys() - self.names):
            return f"{logged}, and not {', '.join(absent)}: name those sets in `validation`, or leave out their weights"
        return f"{logged}; name one of those under `metric`, or log {self._metric!r}"

    def _add(self, step: int, row: Mapping[str, Any], value: float | None) -> list[Report]:
        """Keep a row; the report in it, unless its step was reported: a run goes back to its checkpoint."""
        self._rows.setdefault(step, {}).update(row)
        self.names |= {name for name in row if not name.startswith("_")}
        if value is None or step <= self._reported:
            return []
        self._reported = step
        return [(step, value)]

    def summarize(self) -> dict[str, Any]:
        """The steps that the run came to, its last losses, most memory, usual speed and size, where it has them."""
        summary: dict[str, Any] = {"steps": max(self._rows)} if self._rows else {}
        for name, choose in SUMMARIZED.items():
            values = [row[name] for _, row in sorted(self._rows.items()) if isinstance(row.get(name), int | float)]
            summary |= {name: choose(values)} if values else {}
        try:
            written = json.loads((self._run / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return summary
        return summary | {name: written[name] for name in ("parameters", "trainable_parameters") if name in written}


MARK = "_roxxel"
"""The entry of a run's config that says whose run it is: trial, attempt and rank. `wandb.config` hides such names."""
HEAD = b":W&B"
HEAD_SIZE, BLOCK = 7, 1 << 15
PIECE = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbFile:
    """The file that a W&B client writes beside a run, offline or online (`run-ID.wandb`), read while it is written.

    It is a log as LevelDB has it: blocks of 32 KiB, in them pieces with a header of 7 bytes (checksum, length, kind),
    where a record may be several pieces. A record is a protocol buffer of the client's own schema. The client writes
    what it has every second (`process.client_environment`; by itself every 15 s), and at the end. Attributes: `run_id`,
    None until the client has written it; `config` of the run as it began, with the entries that begin with `_`;
    `summary` as it stands; `exit_code` of the program, once the client has written it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, HEAD_SIZE
        self._step = -1
        self.run_id: str | None = None
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(step, what was logged) of all that has come since the last call; the run's id and config come before these.
        Raises ValueError for a file of another kind, or a damaged one."""
        from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

        for data in self._records():
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = flatten_items(record.history.item)
                self._step = int(row.get("_step", max(record.history.step.num, self._step)))
                yield self._step, row
            elif kind == "run" and self.run_id is None:
                self.run_id, self.config = record.run.run_id, flatten_items(record.run.config.update)
            elif kind == "summary":
                self.summary |= flatten_items(record.summary.update)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def _records(self) -> Iterator[bytes]:
        """The records that are complete; the position is kept behind the last one that was taken."""
        with self._path.open("rb") as file:
            head = file.read(HEAD_SIZE)
            if not HEAD.startswith(head[:4]):
                raise UserError(f"{self._path} is no file of a W&B client")
            record, position = b"", self._position
            while True:
                left = BLOCK - position % BLOCK
                position += left if left < PIECE.size else 0
                file.seek(position)
                header = file.read(PIECE.size)
                if len(header) < PIECE.size:
                    return
                _, length, kind = PIECE.unpack(header)
                if (length, kind) == (0, 0):
                    return  # zeros: what was written there cannot be seen from this host yet
                piece = file.read(length)
                if len(piece) < length:
                    return
                if kind not in (FULL, FIRST, MIDDLE, LAST):
                    raise UserError(f"{self._path} is damaged at byte {position:,}")
                position += PIECE.size + length
                record = piece if kind in (FULL, FIRST) else record + piece
                if kind in (FULL, LAST):
                    self._position = position
                    yield record


def flatten_items(items: Any) -> dict[str, Any]:
    """Names and values of a record's items; what is nested has names with points between, and its own name too."""
    values: dict[str, Any] = {}
    for item in items:
        try:
            value = json.loads(item.value_json)  # NaN and Infinity as Python has them
        except ValueError:
            continue  # a picture, a table
        _put(values, item.key or ".".join(item.nested_key), value)
    return values


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    values[name] = value
    for key, nested in value.items() if isinstance(value, dict) else ():
        _put(values, f"{name}.{key}", nested)


TOKEN = "token"
"""The file of a trial's folder with the name by which its runs are known."""
KINDS = {str: "a text", bool: "a truth value", list: "a list", dict: "a mapping, whose numbers have names with points"}
SEARCH_S = 2.0
"""Seconds between searches of the folders below the program's own for its runs."""


def trial_token(folder: Path) -> str:
    """The name that the runs of a trial have in their config, one for all its attempts; made where there is none."""
    file = folder / TOKEN
    with suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8").strip()
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{token_hex(8)}\n", encoding="utf-8")
    return trial_token(folder)


class WandbTail(MetricsTail):
    """The reports in the W&B runs of a trial's rank 0, of all its attempts.

    They are in `wandb/` of `run`, the trial's folder, or, where the program gives `wandb.init` a `dir`, in `wandb/` of
    `directory`, in which the program runs, or of a folder directly below it. A run belongs to the trial by the mark in
    its config, which also names the rank, or by the id that an agent has given it (`agents_run`, None until it is
    known). A run without a mark in the trial's folder is that of rank 0. Dots separate the levels in the name of a
    nested metric.
    """

    def __init__(
        self, run: Path, metric: str, directory: str | Path, agents_run: Callable[[], str | None] | None = None
    ) -> None:
        super().__init__(run, metric)
        self._directory, self._agents_run = Path(directory), agents_run
        self._token = "" if agents_run else trial_token(run)
        self._files: dict[Path, tuple[int, WandbFile]] = {}
        self._foreign: set[Path] = set()
        self._searched, self._made = -math.inf, time.time()
        self._elsewhere: list[Path] = []
        self._other_ranks: set[int] = set()
        self._unusable: str | None = None
        """The value that the metric was logged as, where that is no number."""
        self._reporting: dict[str, set[str]] = {}
        """The ids of the runs that have logged the metric, by attempt."""

    def read(self, *, last: bool = False) -> list[Report]:
        """The new reports, as of `MetricsTail.read`; what was only put into the summary comes with the last call."""
        reports: list[Report] = []
        for path in sorted(self._paths(last=last), key=_begun):
            size, file = self._files.get(path) or (-1, WandbFile(path))
            grown = path.stat().st_size
            if grown > size:
                self._files[path] = (grown, file)
                for step, row in file.rows():
                    if not self._is_ours(path, file):
                        break
                    if (value := self._value_in(row)) is not None:
                        self._note(file)
                    reports += self._add(step, row, value)
                if file.run_id is not None and not self._is_ours(path, file):
                    self._foreign.add(path)
                    del self._files[path]
        if last and self._reported < 0:
            for file in self._runs():
                self.names.update(name for name in file.summary if not name.startswith("_"))
                if (value := self._value_in(file.summary)) is not None:
                    self._note(file)
                    reports.append((int(_number(file.summary.get("_step")) or 0), value))
        return reports

    def _value_in(self, values: Mapping[str, Any]) -> float | None:
        """The metric among what was logged; None where it is not there, or no number."""
        found = values.get(self._metric)
        if (value := _number(found)) is None and found is not None:
            self._unusable = f"{excerpt(found)}, {KINDS.get(type(found), type(found).__name__)}"
        return value

    @property
    def problem(self) -> str | None:
        """The reason why the trial has no value that can be relied on: several of its runs have logged the metric."""
        for ids in self._reporting.values():
            if len(ids) > 1:
                return (
                    f"{len(ids)} W&B runs of the trial logged {self._metric!r} ({', '.join(sorted(ids))}), and a trial "
                    f"has the value of one: log {self._metric!r} in one run, or under another name in the others"
                )
        return None

    def missing_message(self) -> str:
        """A message: what the program logged instead of the metric, and what to change."""
        if self._unusable is not None:
            return f"it logged {self._metric!r} as {self._unusable}: log a number"
        if self._runs():
            return super().missing_message()
        if self._other_ranks:
            ranks = ", ".join(map(str, sorted(self._other_ranks)))
            return f"only rank {ranks} called wandb.init: call it, and log {self._metric!r}, on rank 0"
        empty = [path for path in self._files if path.exists() and path.stat().st_mtime >= self._made]
        if empty:
            return (
                f"the W&B client began {empty[0].parent} and wrote nothing there: call finish() on the run before its "
                "process ends, which a process of multiprocessing does not do by itself"
            )
        return (
            f"no W&B run of it was found in {self._run}/wandb, {self._directory}/wandb or {self._directory}/*/wandb: "
            "call wandb.init without `dir` and without `mode`"
        )

    def exit_code(self) -> int | None:
        """The exit code of the program that the client of the last run recorded; None if it recorded none."""
        runs = self._runs()
        return runs[-1].exit_code if runs else None

    @property
    def has_begun(self) -> bool:
        """Whether a run of the trial has begun."""
        return bool(self._runs())

    def _runs(self) -> list[WandbFile]:
        """The runs of rank 0, in the order in which they began."""
        known = sorted(self._files.items(), key=lambda item: _begun(item[0]))
        return [file for _, (_, file) in known if file.run_id is not None]

    def _paths(self, *, last: bool) -> list[Path]:
        """The files of runs that may be the trial's."""
        now = time.monotonic()
        if last or now >= self._searched + SEARCH_S:
            folders = [self._directory, *_folders_in(self._directory)]
            self._elsewhere = [path for folder in folders for path in _run_files(folder)]
            self._searched = now
        return [path for path in {*_run_files(self._run), *self._elsewhere} - self._foreign if path.exists()]

    def _is_ours(self, path: Path, file: WandbFile) -> bool:
        if self._agents_run is not None:
            return file.run_id == self._agents_run()
        mark = file.config.get(MARK)
        if not isinstance(mark, dict):
            return path.is_relative_to(self._run)
        if mark.get("trial") != self._token:
            return False
        if mark.get("rank"):
            self._other_ranks.add(int(mark["rank"]))
        return not mark.get("rank")

    def _note(self, file: WandbFile) -> None:
        mark = file.config.get(MARK)
        attempt = str(mark.get("attempt")) if isinstance(mark, dict) else file.run_id or ""
        self._reporting.setdefault(attempt, set()).add(file.run_id or "")


def _folders_in(folder: Path) -> Iterator[Path]:
    """The folders directly below one."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _run_files(folder: Path) -> list[Path]:
    """The files of the runs that a client has kept for this folder; the client takes `.wandb` where that exists."""
    found = [path for name in ("wandb", ".wandb") for path in folder.glob(f"{name}/*run-*/run-*.wandb")]
    return [path for path in found if not path.parent.is_symlink()]  # latest-run


def _begun(path: Path) -> str:
    """The key that orders files of runs: the folder of a run has the second of its start in its name."""
    return path.parent.name.removeprefix("offline-")


def _number(value: Any) -> float | None:
    """A value as a number; the client writes those that are not finite as text."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return math.nan
    if not is_number(value):
        return None
    return float(value) if is_finite(value) else math.nan
