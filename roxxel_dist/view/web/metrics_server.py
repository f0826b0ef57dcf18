"""`top --metrics`: the numbers of runs, jobs and studies as OpenMetrics text, served on this machine with a token.
(https://prometheus.io/docs/specs/om/open_metrics_spec/)"""

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Literal

from roxxel_dist.launcher.control.record import Restart
from roxxel_dist.process.durable import state_dir
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.view.items import Item, JobState, State, is_active, keep_readers, read
from roxxel_dist.view.run import SLICE_S, RankState, RunState
from roxxel_dist.view.web.server import TokenHandler, TokenServer

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0"
Kind = Literal["gauge", "counter", "info"]
FAMILIES: Mapping[str, tuple[Kind, str]] = {
    "roxxel_run": ("info", "A run or a job: its folder, and the name that its config gives it."),
    "roxxel_active": ("gauge", "1 while it trains, searches or starts; 0 when it has ended."),
    "roxxel_step": ("gauge", "The newest step."),
    "roxxel_last_step": ("gauge", "The last planned step."),
    "roxxel_train_loss": ("gauge", "The newest logged loss of a training step."),
    "roxxel_val_loss": ("gauge", "The loss of the newest validation."),
    "roxxel_best_val_loss": ("gauge", "The smallest loss of a validation."),
    "roxxel_tokens_per_second": ("gauge", "The newest logged rate of the whole run: computed tokens."),
    "roxxel_logged": ("gauge", "The newest value of each logged metric, by its name."),
    "roxxel_goodput_ratio": ("gauge", "Share of the time in steps that are done for the first time."),
    "roxxel_spent_seconds": ("gauge", "Where the time went: training, repeated, saving and so on."),
    "roxxel_left_seconds": ("gauge", "Time to the end, at the newest rate."),
    "roxxel_logged_timestamp_seconds": ("gauge", "When the newest row of the log was written."),
    "roxxel_checkpoint_step": ("gauge", "The newest checkpoint on disk."),
    "roxxel_restarts": ("counter", "Attempts of the job that ended and were followed by another one."),
    "roxxel_ranks": ("gauge", "Ranks that run."),
    "roxxel_rank_step": ("gauge", "The step of each rank."),
    "roxxel_rank_wait_seconds": ("gauge", "Time since a rank has made progress."),
    "roxxel_study_trials": ("gauge", "Trials by their state."),
    "roxxel_study_best": ("gauge", "The best value of the metric of a study."),
}
"""Type and help of each family, in the order of the text."""
UNITS = ("seconds", "ratio")
"""The last word of a name whose family has a unit."""


Sample = tuple[str, Mapping[str, str], float]
"""A number: its family, its labels, its value."""


def exposition(states: Sequence[State]) -> str:
    """The text of a scrape. A number that is not known has no line."""
    families: dict[str, list[Sample]] = {name: [] for name in FAMILIES}
    for state in states:
        for sample in _samples(state):
            families[sample[0]].append(sample)
    lines: list[str] = []
    for name, samples in families.items():
        if samples:
            kind, text = FAMILIES[name]
            suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
            lines += [f"# TYPE {name} {kind}", f"# HELP {name} {text}"]
            lines += [f"# UNIT {name} {unit}" for unit in UNITS if name.endswith(f"_{unit}")]
            lines += [f"{name}{suffix}{_labels(labels)} {_number(value)}" for _, labels, value in samples]
    return "\n".join([*lines, "# EOF", ""])


def _samples(state: State) -> Iterator[Sample]:
    if isinstance(state, RunState):
        yield from _of_run(state)
    elif isinstance(state, JobState):
        job = state.record
        labels = {"run": job.run_dir, "run_id": job.run_id}
        yield from _known_samples(labels, roxxel_active=float(is_active(state)), roxxel_step=job.step)
        yield from _of_job(labels, job.restarts, state.ranks)
    else:
        labels = {"study": state.study.place}
        yield from _known_samples(labels, roxxel_active=float(is_active(state)))
        for name, count in state.study.counts().items():
            yield "roxxel_study_trials", {**labels, "state": name}, count
        yield from _known_samples(labels, roxxel_study_best=next((trial.value for trial in state.study.done), None))


def _of_run(state: RunState) -> Iterator[Sample]:
    labels = {"run": state.name, "run_id": state.job}  # `job` is a label of Prometheus' own
    yield "roxxel_run", {**labels, "path": state.path, "title": state.title}, 1.0
    saved = [checkpoint.step for checkpoint in state.checkpoints if not checkpoint.set_aside]
    yield from _known_samples(
        labels,
        roxxel_active=float(is_active(state)),
        roxxel_step=state.step,
        roxxel_last_step=state.last_step,
        roxxel_train_loss=state.row.get("train_loss"),
        roxxel_val_loss=state.row.get("val_loss"),
        roxxel_best_val_loss=state.best_val_loss,
        roxxel_tokens_per_second=state.row.get("tokens_per_s"),
        roxxel_goodput_ratio=state.goodput,
        roxxel_left_seconds=state.left_s,
        roxxel_logged_timestamp_seconds=state.updated or None,
        roxxel_checkpoint_step=max(saved, default=None),
    )
    for name, value in state.row.items():
        yield "roxxel_logged", {**labels, "metric": name}, value
    for name, seconds in state.spent.items():
        yield "roxxel_spent_seconds", {**labels, "activity": name}, seconds
    if state.job:
        yield from _of_job(labels, state.restarts, state.ranks)


def _of_job(labels: Mapping[str, str], restarts: Sequence[Restart], ranks: Sequence[RankState]) -> Iterator[Sample]:
    count = restarts[-1].attempt + 1 if restarts else 0  # the record keeps the last ones only
    yield from _known_samples(labels, roxxel_restarts=count, roxxel_ranks=len(ranks))
    for rank in ranks:
        own = {**labels, "rank": str(rank.rank), "host": rank.host}
        yield from _known_samples(own, roxxel_rank_step=rank.step, roxxel_rank_wait_seconds=rank.still_s)


def _known_samples(labels: Mapping[str, str], **values: float | None) -> Iterator[Sample]:
    yield from ((family, labels, value) for family, value in values.items() if value is not None)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    text = value.encode(errors="backslashreplace").decode()  # parts of no character, as in the name of a file
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


PATH = "/metrics"
KEPT_S = 1.0
"""A scrape within this time gets the text of the last one."""
LEAST = 16
"""Characters of a token."""


class Scrapes:
    """The text of a scrape. Thread-safe. `find` finds the items; its ValueError means that there are none. `all_items`:
    also those that had ended before the first scrape."""

    def __init__(self, find: Callable[[], Sequence[Item]], *, all_items: bool) -> None:
        self._find, self._all = find, all_items
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._shown: set[tuple[str, str]] = set()
        self._text, self._until = "", float("-inf")

    def text(self) -> str:
        """The numbers of all items as they are now."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._text = exposition(self._read())
                self._until = time.monotonic() + KEPT_S
            return self._text

    def _read(self) -> list[State]:
        found: Sequence[Item] = []
        try:
            found = self._find()
        except OSError:  # a folder is being deleted or created: the items stay
            found = self._items
        except ValueError:
            pass
        self._items = keep_readers(self._items, found)
        states, deadline = list[State](), time.thread_time() + SLICE_S
        for item in self._items:
            with suppress(OSError, ValueError):  # it is being deleted or created
                if self._all or item.key in self._shown or is_active(read(item, brief=True, deadline=0.0)):
                    self._shown.add(item.key)
                    states.append(read(item, deadline=deadline))
        return states


class MetricsServer(TokenServer):
    """A server of the text of scrapes at `PATH`, to requests with the header `Authorization: Bearer TOKEN`. Raises
    ValueError where the port is not available."""

    def __init__(self, scrapes: Scrapes, port: int, token: str) -> None:
        self.scrapes: Scrapes = scrapes
        super().__init__(_MetricsHandler, port=port, token=token)


class _MetricsHandler(TokenHandler):
    """Answers scrapes."""

    server: MetricsServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        """Answer as to GET, without the text (`curl -I`)."""
        self.do_GET()

    def token(self, query: dict[str, list[str]]) -> str:
        """The token of the header: an address, and a token in it, may stand in the logs of a proxy."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    def refuse_token(self) -> None:
        """Say what is missing."""
        text = "send the token of the token file: Authorization: Bearer TOKEN"
        self.refuse(HTTPStatus.UNAUTHORIZED, text, WWW_Authenticate="Bearer")

    def answer_page(self, path: str, query: dict[str, list[str]]) -> None:
        """The text of a scrape."""
        if path == PATH:
            self.answer(HTTPStatus.OK, CONTENT_TYPE, self.server.scrapes.text().encode())
        else:
            self.refuse(HTTPStatus.NOT_FOUND, f"there is only {PATH}")


def default_token_file() -> Path:
    """The file in the folder of this user's state. Raises FileNotFoundError if there is no home directory."""
    return state_dir().parent / "metrics-token"


def token_of(path: Path) -> str:
    """The token in a file; a new file gets a new one, and only this user can read it. Raises ValueError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII"
        raise UserError(f"the token file {path} cannot be used ({reason}); name another file") from error
    if len(token) < LEAST or len(token.split()) != 1:
        raise UserError(
            f"the token file {path} must hold one word of {LEAST} characters or more; delete it, and a new one is made"
        )
    return token
