"""Weights & Biases: a run directory is one run of it, however often training is killed and started again.

Online W&B's own `resume="allow"` continues the run of the id in `wandb.json`; rows up to the step that its server has
are not sent again. Offline the client writes a folder a process, for `wandb sync`.

W&B cannot take rows back: when training goes back to an earlier step and does it otherwise (a rewind, an amendment), it
keeps its first rows of those steps, and `metrics.jsonl` has the new ones. It has no rows that a killed process did not
get to send.
"""

import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import pip_install
from roxxel_dist.process.process_stat import is_ending
from roxxel_dist.train.log.base import TrackerError
from roxxel_dist.train.log.csv_jsonl import read_rows

LIMITS_S = {"init_timeout": 30.0, "finish_timeout": 20.0}
SERVICE = "wandb-core"
"""The program that the client starts to write and to send."""


class WandbTracker:
    """Sends every scalar of every logged step; the summary says the best. For rank 0 alone.

    The client is imported and the run begins at the first row, on the thread that calls: a missing package, no login or
    a dead server costs one line and no training.

    Args:
        run_dir: the run directory, with `metrics.jsonl`; `wandb.json` and `wandb/` are put there.
        mode: "online", or "offline": files for `wandb sync`, and no account.
        project: of the run.
        name: of the run, for people; the run directory's name if None.
        config: what W&B shows as the run's config.
        notes, tags: of the run, where people search and read.
    """

    def __init__(
        self,
        run_dir: Path,
        mode: Literal["online", "offline"],
        project: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        self._folder, self._project = Path(run_dir).absolute(), project
        self._mode: Literal["online", "offline"] = mode
        self._name, self._config = name or self._folder.name, dict(config or {})
        self._notes, self._tags = notes, tags
        self._run: Any = None
        self._last = -1
        self._best = math.inf
        self._exit_code = 0

    @staticmethod
    def log(text: str) -> None:
        """Tell people a line; the log puts its own way here."""
        print(text, file=sys.stderr, flush=True)

    def row(self, row: Mapping[str, float]) -> None:
        """Send one logged step."""
        if self._run is None:
            self._begin()
        assert self._run is not None
        step = int(row["step"])
        if step > self._last:
            metrics = {name: value for name, value in row.items() if name != "step" and math.isfinite(value)}
            self._run.log(metrics, step=step, commit=True)
            self._last = step
        self._summarize([row])

    def rewind(self, step: int) -> None:
        """Training goes back to `step`."""
        if self._run is None:
            return
        self._best = math.inf
        self._summarize(read_rows(self._folder / "metrics.jsonl"))
        if self._last > step:
            self.log(
                f"W&B cannot take back steps {step + 1} to {self._last}: it keeps the rows that it has and gets those "
                f"after step {self._last}; metrics.jsonl has the new ones"
            )

    def crash(self, text: str) -> None:
        """The run failed."""
        self._exit_code = 1

    def close(self) -> None:
        """Hand over the rest and end; gives up after 20 s, or WANDB_FINISH_TIMEOUT."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=self._exit_code)
        except TimeoutError:
            raise TrackerError("W&B did not take everything in time: the rows are in metrics.jsonl") from None
        if self._mode == "offline":
            self.log(f"W&B: `wandb sync {self._folder / 'wandb'}/offline-run-*` sends this run")

    def abandon(self, hangs: bool) -> None:
        """The client has failed, or hangs: where its service is dead or hangs too, end both.

        Otherwise the client waits for its service at the end of the process, or shows a traceback about it.
        """
        services = _services()
        if services and not hangs:
            return  # a run of the user's own in this process may use it
        for pid in services:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(not is_ending(pid) for pid in services):
            time.sleep(0.05)
        if (wandb := sys.modules.get("wandb")) is not None:
            with suppress(Exception):  # it misses its service
                wandb.teardown()

    def _begin(self) -> None:
        """Start the client's run, or continue it."""
        try:
            self._run = self._init()
        except Exception as error:  # whatever a client, a server or a network can do
            reason = " ".join(str(error).split()) or repr(error)
            raise TrackerError(
                f"W&B is off now: {reason}. Training continues, and the rows are in metrics.jsonl"
            ) from error
        self._last = self._run.step - 1  # the last step that the server has
        self._summarize(read_rows(self._folder / "metrics.jsonl"))
        self.log(f"W&B: {self._run.url if self._mode == 'online' else f'offline, {self._run.dir}'}")

    def _init(self) -> Any:
        run_id = _run_id(self._folder / "wandb.json")
        # Reports to the client's maker retry at the end of the process where there is no network.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = _client()
        wandb.setup(settings=wandb.Settings(silent=True))  # else it asks for a login on the terminal
        settings: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True}
        # What the user says in the environment wins; older clients know fewer settings.
        for name, value in (LIMITS_S | {"finish_timeout_raises": True}).items():
            if f"WANDB_{name.upper()}" not in os.environ and name in wandb.Settings.model_fields:
                settings[name] = value
        by_agent = bool(os.environ.get("WANDB_SWEEP_ID"))  # an agent of W&B has said which run of which project this is
        return wandb.init(
            project=None if by_agent else self._project,
            name=self._name,
            notes=self._notes,
            tags=self._tags,
            id=None if by_agent else run_id,
            dir=self._folder,
            config=self._config,
            mode=self._mode,
            resume="allow" if self._mode == "online" else None,
            reinit="create_new",  # a run of the user's own in this process is another one
            settings=wandb.Settings(**settings),
        )

    def _summarize(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Have the summary say the lowest val_loss, with these rows."""
        best = min(rows, key=lambda row: row.get("val_loss", math.inf), default={})
        if best.get("val_loss", math.inf) < self._best:
            self._best = best["val_loss"]
            self._run.summary.update({"best_val_loss": self._best, "best_step": int(best["step"])})


def _services() -> list[int]:
    """The services of W&B's client that this process has started, and that live."""
    found: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            for pid in map(int, children.read_text().split()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == SERVICE and not is_ending(pid):
                    found.append(pid)
    return found


def _client() -> Any:
    """The package wandb.

    Where two threads parse at once, Python may end one with SystemError (python/cpython issue 106905). The main thread
    traces and imports meanwhile, so an import that is broken off is begun anew.
    """
    try:
        try:
            import wandb
        except SystemError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
                del sys.modules[name]
            import wandb
    except ImportError as error:
        raise ImportError(f"the package wandb is missing: {pip_install('wandb')}") from error
    return wandb


def _run_id(record: Path) -> str:
    """The id of the W&B run of a run directory, or a new one."""
    try:
        return str(json.loads(record.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        name = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        write_file(record, json.dumps({"id": name}) + "\n")
        return name
