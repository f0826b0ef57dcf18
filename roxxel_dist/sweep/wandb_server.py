"""Sweeps that a W&B server leads: it chooses, and each trial here is one run of W&B's own agent.

Server, account and entity are those of the user's own settings (`wandb login`, WANDB_BASE_URL, WANDB_API_KEY, …).
"""

import json
import math
import netrc
import os
import re
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from roxxel_dist.checkpoint.metadata import read_cursor
from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import flat_fields
from roxxel_dist.settings.training import SHARE_COMPILATION
from roxxel_dist.sweep.samplers.base import Curve
from roxxel_dist.sweep.space.sweep_file import Params
from roxxel_dist.sweep.train_sweep import CONFIG_ENV, DATA_ENV, RANKS_ENV, RUN_DIR_ENV
from roxxel_dist.sweep.trial.outcome import OURS, TRACEBACK, classify_exit, last_words
from roxxel_dist.sweep.trial.process import TrialTask, client_environment, environment
from roxxel_dist.sweep.trial.program import command_of
from roxxel_dist.sweep.trial.tail import WandbTail
from roxxel_dist.sweep.trial.trial import Event, Objective, failure_event, follow, wait_until_free

LOGIN = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
PROJECT = "roxxel-dist"
PAUSES_S = (5.0, 15.0, 45.0)
"""Between the tries to get a trial of a server that cannot be reached."""
GIVES_NOTHING_S = 20.0
"""Seconds without a trial after which a line says that the server gives none; a client needs some to begin."""
COMMAND = ["${env}", "${interpreter}", "-m", "roxxel_dist.sweep.train_sweep", "${args}"]


class ServerSampler:
    """The sampler of a sweep whose parameters come from a W&B server: every trial has none until it has ended."""

    def __init__(self) -> None:
        self._next = 0

    def ask(self) -> tuple[int, Params]:
        """The number of the next trial."""
        self._next += 1
        return self._next - 1, {}

    def tell(self, trial: int, value: float | None, curve: Curve = ()) -> None:
        """Nothing to do: the trial itself has reported to the server."""

    def point(self, trial: int) -> list[float]:
        """The server does not say."""
        return []

    def restore(self, trial: int, params: Params, point: Sequence[float]) -> None:
        """Count a trial of an earlier start."""
        self._next = max(self._next, trial + 1)


def has_login() -> bool:
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
    """The definition of a sweep on the server, as W&B's YAML would have it. Raises ValueError where there is none."""
    import wandb

    try:
        # As with the other calls of the client: many errors, and no base of them all.
        return dict(wandb.Api().sweep(sweep_id).config)
    except Exception as error:
        raise UserError(f"--sweep_id {sweep_id}: {_in_a_line(error)}") from error


def create_or_join(sweep: Mapping[str, Any] | str, project: str | None = None) -> str:
    """ENTITY/PROJECT/ID of a sweep on the W&B server: a new one, of what W&B's YAML has, or one that is there, by its
    id: ID, PROJECT/ID or ENTITY/PROJECT/ID.

    `project` is the sweep's where its id has none; by default that of the file or of the environment. Raises ValueError
    for no login, no such server, or no such sweep.
    """
    import wandb

    joined = sweep if isinstance(sweep, str) else None
    config = {} if isinstance(sweep, str) else dict(sweep)
    if joined is None and command_of(config.get("program"), config.get("command")) is None:
        config |= {"program": "train_sweep.py", "command": COMMAND}  # which work in every folder
    entity, id_project, name = ["", "", *(joined or "").split("/")][-3:]
    project = id_project or project or config.get("project") or os.environ.get("WANDB_PROJECT") or PROJECT
    try:
        # A wrong key, a server that is not there: the client has many errors for it, and no base of them all.
        api = wandb.Api()
        entity = entity or config.get("entity") or os.environ.get("WANDB_ENTITY") or api.default_entity
        if joined is not None:
            api.sweep(f"{entity}/{project}/{name}")
        else:
            name = wandb.sweep(config, entity=entity, project=project)
    except Exception as error:
        what = "no W&B sweep can be created" if joined is None else f"the W&B sweep {sweep!r} cannot be joined"
        raise UserError(f"{what}: {_in_a_line(error)}") from error
    return f"{entity}/{project}/{name}"


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)


def agent_trial(trial: Mapping[str, Any]) -> Iterator[Event]:
    """Run one trial of a sweep of a W&B server with `wandb agent --count 1`, as a process tree that dies with this.

    As `trial.run`, but the parameters are the server's: the result has them as "params", and reports come as W&B's
    client writes them to its file, every second. `{"exhausted": {"reason"}}` comes where the server has no more trials,
    `{"unserved": {"reason"}}` where it could not be asked for one, in several tries, and `{"note": {"text"}}` where it
    does not give one. Its `wandb_sweep` is the sweep, as `create_or_join` returns it.
    """
    task = TrialTask(**trial)
    folder = Path(task.run_dir).absolute()
    if reason := wait_until_free(folder):
        yield {"lost": {"reason": reason}}
        return
    _put_aside(folder)  # the server never hands out a lost trial again
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "wandb", "agent", "--count", "1", "--forward-signals", str(task.wandb_sweep)]
    tail = WandbTail(folder, task.metric, task.directory or os.getcwd(), lambda: run_of(folder))
    objective = Objective(task, tail)
    pauses, tries = iter(PAUSES_S), 0
    while True:
        code, output, stopped = yield from _ask_server(task, words, objective, folder, has_started=tries > 0)
        agent = AgentEnd(folder, output)
        state = agent.state(objective, tail)
        if state != "no run" or code == 0:
            break
        tries += 1
        reason = f"the W&B server gave no trial of {task.wandb_sweep} ({last_words(output)})"
        if (pause_s := next(pauses, None)) is None:
            yield {"unserved": {"reason": f"{reason}, asked {tries} times"}}
            return
        yield {"note": {"text": f"{reason}: it is asked again in {pause_s:g} s"}}
        time.sleep(pause_s)
    if state == "no run":
        yield {"exhausted": {"reason": f"the W&B server has no more trials for {task.wandb_sweep}"}}
    elif state in ("finished", "stopped") or stopped or objective.is_over:
        event = objective.result(stopped or ("hyperband" if state == "stopped" else None))
        if "result" in event:
            event["result"]["params"] = agent.params
        yield event
    else:
        code = (tail.exit_code() or 1) if state == "failed" else code
        kind, reason = classify_exit(code, agent.program_output, ours=False)
        if state == "silent" and kind != "lost":
            kind, reason = "lost", "its program ended without a word"
        yield failure_event(task, kind, reason)


def _ask_server(
    task: TrialTask, words: list[str], objective: Objective, folder: Path, *, has_started: bool
) -> Generator[Event, None, tuple[int, str, str | None]]:
    """Run the agent as `follow` does, with a line where the server gives no trial for long; the start is yielded the
    first time alone."""
    limit = time.monotonic() + GIVES_NOTHING_S

    def look() -> Event | None:
        nonlocal limit
        if time.monotonic() < limit:
            return None
        limit = math.inf
        if run_of(folder) is not None:
            return None
        return {"note": {"text": f"the W&B server gives no trial: {task.wandb_sweep} is paused there, or busy"}}

    events = follow(task, words, _environment(task, folder), objective, look)
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return end.value
        if not (has_started and "start" in event):
            yield event


def _environment(task: TrialTask, folder: Path) -> dict[str, str]:
    base = Path(task.log).with_suffix(".base.yaml")
    base.parent.mkdir(parents=True, exist_ok=True)
    base.write_text(json.dumps(flat_fields(task.config)), encoding="utf-8")  # JSON is YAML
    return environment(
        {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            **client_environment(folder),
            CONFIG_ENV: str(base.absolute()),
            RUN_DIR_ENV: str(folder),
            RANKS_ENV: json.dumps(task.ranks),
            SHARE_COMPILATION: "1",
            **({DATA_ENV: absolute(task.data_path)} if task.data_path else {}),
            **task.environment,
        }
    )


def _put_aside(folder: Path) -> None:
    """Keep what an earlier attempt has left, under another name."""
    if folder.exists():
        number = 0
        while (other := folder.with_name(f"{folder.name}-lost-{number}")).exists():
            number += 1
        folder.rename(other)


def run_of(folder: Path) -> str | None:
    """The id of the run that the agent was given for a trial; None before it was given one."""
    files = _run_configs(folder)
    return files[-1].stem.removeprefix("config-") if files else None


def _run_configs(folder: Path) -> list[Path]:
    """The files of parameters that the agent writes, one a run."""
    return sorted(folder.glob("wandb/sweep-*/config-*.yaml"))


State = Literal["no run", "stopped", "finished", "failed", "silent"]


class AgentEnd:
    """The end of W&B's agent, and of the program of the run that it was given.

    The agent's exit code says nothing about its program. These do: of the agent, before it starts the program,
    `wandb/sweep-*/config-RUN.yaml`, the run and its parameters, and on its output "Stop: RUN" when the server stops a
    run, "Cleaning up finished run" when one has ended; of the client in the program the exit code, in its file of the
    run; and of a training whether it has finished, in its cursor. One that was asked to stop saves, and ends the client
    with 0.
    """

    STOP, CLEANING = "Stop: {}", "Cleaning up finished run"
    LINES = re.compile(r"^(\t|\d{4}-\d\d-\d\d [\d:,]+ - |wandb: (?!ERROR))")
    """Lines of the agent and the client in the output, among those of the program."""

    def __init__(self, folder: Path, output: str) -> None:
        import yaml

        self._folder, self._output = folder, output
        self._run: str | None = run_of(folder)
        self.params: Params = {}
        if files := _run_configs(folder):
            config = yaml.safe_load(files[-1].read_text(encoding="utf-8"))
            self.params = {name: value["value"] for name, value in config.items() if isinstance(value, Mapping)}
        program, _, _ = output.partition(self.CLEANING)  # the client may raise errors of its own when it ends
        self.program_output: str = "\n".join(line for line in program.splitlines() if not self.LINES.match(line))

    def state(self, objective: Objective, tail: WandbTail) -> State:
        """The state of the run: failed where the program said why, and silent where it was ended by something else."""
        exit_code, finished = tail.exit_code(), read_cursor(self._folder).get("finished")
        if self._run is None:
            return "no run"
        if exit_code == 0 if finished is None else finished:
            return "finished"
        if objective.best is not None and self.STOP.format(self._run) in self._output:
            return "stopped"
        # It raised, or ended its W&B run; or never began one, and said something: python: can't open file …
        said = TRACEBACK in self.program_output or OURS in self.program_output or exit_code is not None
        return "failed" if said or (self.program_output.strip() and not tail.has_begun) else "silent"
