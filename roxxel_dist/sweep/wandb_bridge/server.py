"""Sweeps that a W&B server leads: it chooses, and each trial here is one run of W&B's own agent.

Server, account and entity are those of the user's own settings (`wandb login`, WANDB_BASE_URL, WANDB_API_KEY, …).

A sweep that a W&B server leads, as the driver here sees it.
"""

import json
import netrc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from roxxel_dist.run_directory import METRICS
from roxxel_dist.sweep.execution.metrics import Report, RunReader
from roxxel_dist.sweep.execution.outcome import BEGIN, disk_full, failure, machines_fault
from roxxel_dist.sweep.execution.process import TrialProcess, environment
from roxxel_dist.sweep.execution.trial import Event, Score, Task, fail, flat, follow, wait_until_free
from roxxel_dist.sweep.space.sweep_file import Params
from roxxel_dist.sweep.train_sweep import CONFIG_ENV, DATA_ENV, RANKS_ENV, RUN_DIR_ENV
from roxxel_dist.sweep.wandb_bridge.program import ProgramReader, command_of
from roxxel_dist.train.checkpoint.metadata import read_cursor
from roxxel_dist.train.config import SHARE_COMPILATION

LOGIN = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class Led:
    """An engine that leaves the parameters to somebody else: every trial has none until it has ended."""

    def __init__(self) -> None:
        self._next = 0

    def ask(self) -> tuple[int, Params]:
        """The number of the next trial."""
        self._next += 1
        return self._next - 1, {}

    def tell(self, trial: int, value: float | None) -> None:
        """The server was told by the trial itself."""

    def point(self, trial: int) -> list[float]:
        """The server does not say."""
        return []

    def recall(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """Count a trial of an earlier start."""
        self._next = max(self._next, trial + 1)


def logged_in() -> bool:
    """Whether W&B's client would find a login, without asking anybody for it."""
    if any(os.environ.get(name) for name in LOGIN):
        return True
    import wandb

    host = urlparse(wandb.setup().settings.base_url).hostname or ""
    wandb.teardown()  # its service, which the environment names to all that this process starts
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(str(file)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def definition(sweep_id: str) -> Mapping[str, Any]:
    """What the server has of a sweep, as W&B's YAML would have it. Raises ValueError where there is none."""
    import wandb

    try:
        # As with the other calls of the client: many errors, and no base of them all.
        return dict(wandb.Api().sweep(sweep_id).config)
    except Exception as error:
        raise ValueError(f"--sweep_id {sweep_id}: {' '.join(str(error).split()) or repr(error)}") from error


PROJECT = "roxxel-dist"
COMMAND = ["${env}", "${interpreter}", "-m", "roxxel_dist.sweep.train_sweep", "${args}"]
OF_THE_AGENT = re.compile(r"^(\t|\d{4}-\d\d-\d\d [\d:,]+ - |wandb: (?!ERROR))")
"""Lines of the agent's own in its output, which the program's are among."""
CLEANING = "Cleaning up finished run"
"""What the agent says when its program has ended."""
ASKED = ("hosts", "procs_per_host", "gpus_per_host", "cpus_per_host", "ray_address", "insecure")


def create_or_join(sweep: Mapping[str, Any] | str, project: str | None = None, entity: str | None = None) -> str:
    """ENTITY/PROJECT/ID of a sweep on the W&B server: a new one, or one that is there.

    A sweep whose program is `train_sweep.py`, or that has none, gets a command that works in every folder.

    Args:
        sweep: what W&B's YAML has, or the id of a sweep: ID, PROJECT/ID or ENTITY/PROJECT/ID.
        project: of the sweep; that of the file or of the environment where not given.
        entity: whose project it is; the user's own where not given.

    Raises:
        ValueError: no login, no such server, or no such sweep.
    """
    import wandb

    told = {} if isinstance(sweep, str) else dict(sweep)
    if not isinstance(sweep, str) and command_of(told.get("program"), told.get("command")) is None:
        told |= {"program": "train_sweep.py", "command": COMMAND}
    *before, name = sweep.split("/") if isinstance(sweep, str) else [""]
    project = (before or [None])[-1] or project or told.get("project") or os.environ.get("WANDB_PROJECT") or PROJECT
    try:
        # A wrong key, a server that is not there: the client has many errors for it, and no base of them all.
        api = wandb.Api()
        entity = (before[0] if len(before) == 2 else entity) or told.get("entity") or os.environ.get("WANDB_ENTITY")
        entity = entity or api.default_entity
        if isinstance(sweep, str):
            api.sweep(f"{entity}/{project}/{name}")
        else:
            name = wandb.sweep(told, entity=entity, project=project)
    except Exception as error:
        what = f"the W&B sweep {sweep!r} cannot be joined" if isinstance(sweep, str) else "no W&B sweep can be created"
        raise ValueError(f"{what}: {' '.join(str(error).split()) or repr(error)}") from error
    return f"{entity}/{project}/{name}"


def agent_trial(task: Task) -> Iterator[Event]:
    """Run one trial of a sweep of a W&B server, with `wandb agent --count 1`, in a process group that dies with this.

    As `trial.run`, but the parameters are the server's: the result has them as "params". `{"over": {"reason"}}` comes
    where the server has no more trials.

    Args:
        task: as for `trial.run`; `task["sweep"]["wandb"]` is the sweep, as `create_or_join` returns it.
    """
    folder = Path(task["run_dir"]).absolute()
    if held := wait_until_free(folder):
        yield {"lost": {"reason": held}}
        return
    _put_aside(folder)  # the server gives a trial that was lost to nobody again
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "wandb", "agent", "--count", "1", "--forward-signals", task["sweep"]["wandb"]]
    title = f"trial {task['trial']}, attempt {task['attempt']}"
    child = TrialProcess(words, _environment(task, folder), Path(task["log"]), title, task.get("directory"))
    reader = _AgentReader(folder, task["metric"])
    score = Score(task, reader)
    try:
        code, stopped = yield from follow(task, child, score)
        yield _verdict(task, folder, reader, score, code, child.output(), stopped)
    finally:
        reader.close()


def _environment(task: Task, folder: Path) -> dict[str, str]:
    written = Path(task["log"]).with_suffix(".base.yaml")
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(json.dumps(flat(task["config"])), encoding="utf-8")  # JSON is YAML
    data = {DATA_ENV: str(Path(task["data_path"]).absolute())} if task.get("data_path") else {}
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "WANDB_DIR": str(folder),
        "WANDB_ERROR_REPORTING": "false",
        CONFIG_ENV: str(written.absolute()),
        RUN_DIR_ENV: str(folder),
        RANKS_ENV: json.dumps({name: task.get(name) for name in ASKED}),
        SHARE_COMPILATION: "1",
        **data,
    }
    return environment({**own, **(task.get("environment") or {})})


def _put_aside(folder: Path) -> None:
    """Keep what an earlier attempt has left, under another name."""
    if folder.exists():
        number = 0
        while (other := folder.with_name(f"{folder.name}-lost-{number}")).exists():
            number += 1
        folder.rename(other)


class _AgentReader:
    """The reports of what an agent runs: from the metrics of a training of ours, or else from the W&B run."""

    def __init__(self, folder: Path, metric: str) -> None:
        self._folder = folder
        self._ours, self.theirs = RunReader(folder, metric), ProgramReader(folder, metric)

    @property
    def is_ours(self) -> bool:
        return (self._folder / METRICS).exists()

    @property
    def has_begun(self) -> bool:
        """Whether its program came so far as to log."""
        return self.is_ours or any(self._folder.glob("wandb/*run-*/*.wandb"))

    @property
    def names(self) -> set[str]:
        return (self._ours if self.is_ours else self.theirs).names

    def read(self, *, last: bool = False) -> list[Report]:
        return (self._ours if self.is_ours else self.theirs).read(last=last)

    def more(self) -> dict[str, Any]:
        return (self._ours if self.is_ours else self.theirs).more()

    def close(self) -> None:
        self._ours.close()


def _given(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The run that the agent was given, and its parameters: as it wrote them down for its program."""
    import yaml

    found = sorted(folder.glob("wandb/sweep-*/config-*.yaml"))
    if not found:
        return None
    told = yaml.safe_load(found[-1].read_text(encoding="utf-8"))
    params = {name: one["value"] for name, one in told.items() if isinstance(one, Mapping)}
    return found[-1].stem.removeprefix("config-"), params


def _verdict(
    task: Task, folder: Path, reader: _AgentReader, score: Score, code: int, said: str, stopped: str | None
) -> Event:
    given = _given(folder)
    program, _, _ = said.partition(CLEANING)  # the client may raise errors of its own when it ends
    words = "\n".join(line for line in program.splitlines() if not OF_THE_AGENT.match(line))
    if given is None:
        if code == 0:
            return {"over": {"reason": f"the W&B server has no more trials for {task['sweep']['wandb']}"}}
        lost = machines_fault(code, ours=False)
        return {"lost": {"reason": lost}} if lost else fail(task, "error", failure(code, words)[1])
    run, params = given
    ended = bool(read_cursor(folder).get("finished")) if reader.is_ours else reader.theirs.exit_code() == 0
    if stopped is None and not ended and score.best is not None and f"Stop: {run}" in said:
        stopped = "hyperband"
    if ended or stopped or score.is_nan:
        event = score.result(stopped)
        if "result" in event:
            event["result"]["params"] = params
        return event
    told_why = BEGIN in words or "roxxel-dist: " in words or reader.theirs.exit_code() is not None
    told_why = told_why or (bool(words.strip()) and not reader.has_begun)  # python: can't open file …
    if not told_why:
        return {"lost": {"reason": machines_fault(code, ours=False) or "its program ended without a word"}}
    if full := disk_full(words):
        return {"broken": {"reason": full}}
    return fail(task, *failure(code, words))
