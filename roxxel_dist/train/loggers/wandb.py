"""Weights & Biases: one run, however often training is killed and started again, with every step once.

The tracker follows `metrics.jsonl`, which is on disk before training goes on, and hands over what W&B does not have:

- Online, the server says which step it has last (`resume="allow"`); the rows after that are sent, those that a killed
  process never got to send too, and rows up to it are not sent again.
- Offline, the client writes a folder a process, and `wandb sync` appends them to each other. A folder that its process
  closed is kept, and `wandb.json` says up to which step it goes. One that its process did not close may lack its end
  (the client writes every 15 s): it is moved to `wandb/unclosed/` when the run goes on, out of what `wandb sync` is
  given, and its rows are written again.

What is left: W&B cannot take rows back. When training goes back to an earlier step and does it otherwise (a rewind, an
amendment), W&B keeps its first rows of those steps and `metrics.jsonl` has the new ones; a line says so. And a run that
changes from online to offline, or whose open folder was synced before it went on, has steps twice after `wandb sync`.
"""

import json
import math
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from roxxel_dist.data.commit import write_file
from roxxel_dist.train.loggers.base import TrackerError
from roxxel_dist.train.loggers.csv_jsonl import JsonlReader

RECORD = "wandb.json"
INIT_LIMIT_S = 30.0
FINISH_LIMIT_S = 20.0


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
        restored_step: the step that this process goes on from.
    """

    def __init__(
        self,
        run_dir: Path,
        mode: Literal["online", "offline"],
        project: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        restored_step: int = 0,
    ) -> None:
        self._folder, self._project = Path(run_dir).absolute(), project
        self._mode: Literal["online", "offline"] = mode
        self._name, self._config, self._restored = name or self._folder.name, dict(config or {}), restored_step
        self._reader = JsonlReader(self._folder / "metrics.jsonl")
        self._record = _load(self._folder / RECORD)
        self._run: Any = None
        self._open_folder = ""
        self._last = -1
        self._best: dict[str, float] = {}
        self._exit_code = 0

    @staticmethod
    def say(text: str) -> None:
        """Tell people a line; the logger puts its own way here."""
        print(text, file=sys.stderr, flush=True)

    def row(self, row: Mapping[str, float]) -> None:
        """Send what has come to `metrics.jsonl`: this row is among it, or was taken back meanwhile."""
        if self._run is None:
            self._run = self._begin()
        self._follow()

    def rewind(self, step: int) -> None:
        """Training goes back to `step`."""
        if not self._reader.replaced():  # what was sent is what stands there now
            return
        self._reader.restart()
        self._best = {}
        if self._last > step:
            self.say(
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
        self._follow()
        self._reader.close()
        try:
            self._run.finish(exit_code=self._exit_code)
        except TimeoutError:
            raise TrackerError(
                "W&B did not take everything in time: the rows are in metrics.jsonl, and a resumed run sends them"
            ) from None
        if self._mode == "offline":
            self._record["closed"][self._open_folder] = self._last
            _save(self._folder / RECORD, self._record)
            self.say(f"W&B: `wandb sync {self._folder / 'wandb'}/offline-run-*` sends this run")

    def _begin(self) -> Any:
        """Start the client's run and find out what W&B has of it."""
        try:
            _save(self._folder / RECORD, self._record)
            run = self._init()
            server_has = run.step - 1 if self._mode == "online" else -1
            self._tidy(run)
        except Exception as error:  # whatever a client, a server or a network can do
            reason = " ".join(str(error).split()) or repr(error)
            raise TrackerError(
                f"no W&B from here on: {reason}. Training goes on, the rows are in metrics.jsonl, and a resumed run "
                f"sends them"
            ) from error
        self._last = max([server_has, *self._record["closed"].values()])
        where = run.url if self._mode == "online" else f"offline, {run.dir}"
        has = f"; it keeps the rows up to step {self._last} that it has" if self._last > self._restored else ""
        self.say(f"W&B: {where}{has}")
        return run

    def _init(self) -> Any:
        # Reports to the client's maker retry at the end of the process where there is no network.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise ImportError("the package wandb is missing: pip install 'roxxel-dist[wandb]'") from error

        wandb.setup(settings=wandb.Settings(silent=True))  # else it asks for a login on the terminal
        limits = {"init_timeout": INIT_LIMIT_S, "finish_timeout": FINISH_LIMIT_S, "finish_timeout_raises": True}
        settings: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True}
        for name, value in limits.items():  # what the user says in the environment wins; older clients know fewer
            if f"WANDB_{name.upper()}" not in os.environ and name in wandb.Settings.model_fields:
                settings[name] = value
        by_agent = bool(os.environ.get("WANDB_SWEEP_ID"))  # an agent of W&B has said which run of which project this is
        return wandb.init(
            project=None if by_agent else self._project,
            name=self._name,
            id=None if by_agent else self._record["id"],
            dir=self._folder,
            config=self._config,
            mode=self._mode,
            resume="allow" if self._mode == "online" else None,
            reinit="create_new",  # a run of the user's own in this process is another one
            settings=wandb.Settings(**settings),
        )

    def _tidy(self, run: Any) -> None:
        """Put the offline folders of this run aside whose rows are handed over again, by this process.

        They are kept: what else the client or the user wrote there (system metrics, media) is nowhere else.
        """
        self._open_folder = Path(run.dir).parent.name
        if self._mode == "online":
            self._record["closed"] = {}  # online everything is sent, from the first row on
            _save(self._folder / RECORD, self._record)
        for folder in (self._folder / "wandb").glob(f"offline-run-*-{self._record['id']}"):
            if folder.name != self._open_folder and folder.name not in self._record["closed"]:
                aside = folder.parent / "unclosed"
                aside.mkdir(exist_ok=True)
                os.replace(folder, aside / folder.name)

    def _follow(self) -> None:
        for row in self._reader.rows():
            self._send(int(row["step"]), row)

    def _send(self, step: int, row: Mapping[str, float]) -> None:
        better = self._note_best(step, row)
        if step > self._last:
            self._run.log({name: value for name, value in row.items() if name != "step"}, step=step, commit=True)
            self._last = step
        if better:
            self._run.summary.update(self._best)

    def _note_best(self, step: int, row: Mapping[str, float]) -> bool:
        loss = row.get("val_loss", math.inf)
        if not loss < self._best.get("best_val_loss", math.inf):
            return False
        self._best = {"best_val_loss": loss, "best_step": step}
        return True


def _load(path: Path) -> dict[str, Any]:
    """The record of the W&B run of a run directory, or a new one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"id": str(record["id"]), "closed": dict(record["closed"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"id": os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4), "closed": {}}


def _save(path: Path, record: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(record) + "\n")
