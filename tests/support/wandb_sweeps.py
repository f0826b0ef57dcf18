"""The W&B server of the tests, with sweeps: what the real `wandb sweep` and `wandb agent` need of one.

It chooses at random, each trial a function of its number; a sweep ends with its `run_cap`.
"""

import base64
import json
import random
from dataclasses import dataclass, field
from typing import Any

import yaml
from wandb_server import ENTITY, WandbServer

from roxxel_dist.sweep.space.sweep_file import Space, sweep_of


@dataclass
class ServedSweep:
    """What the server knows of a sweep."""

    name: str
    text: str
    project: str
    state: str = "RUNNING"
    runs: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """As W&B makes them."""
        return base64.b64encode(f"Sweep:v1:{self.name}".encode()).decode()

    @property
    def config(self) -> dict[str, Any]:
        """Its YAML."""
        return yaml.safe_load(self.text)


class SweepServer(WandbServer):
    """Serves sweeps too.

    Attributes:
        sweeps: by their names, which clients call ids.
        agents: the sweep of each.
        params: of each run that an agent was given.
        stop: runs whose agents get the order to stop them.
        resume: a run that is handed out again, as W&B does with one that was preempted.
    """

    def __init__(self) -> None:
        self.sweeps: dict[str, ServedSweep] = {}
        self.agents: dict[str, str] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.stop: set[str] = set()
        self.resume: str | None = None
        super().__init__()

    def answer(self, operation: str, query: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The data of a GraphQL operation; None for one that this server does not know."""
        found = {
            "UpsertSweep": self._upsert_sweep,
            "SweepWithRuns": self._sweep,
            "GetSweep": self._sweep,
            "CreateAgent": self._agent,
            "Heartbeat": self._heartbeat,
        }.get(operation)
        if operation in ("GetDefaultEntity", "GetViewer"):
            operation = "Viewer"
        return found(variables) if found else super().answer(operation, query, variables)

    def _upsert_sweep(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = f"sweep{len(self.sweeps)}"
        made = ServedSweep(name, variables["config"], variables.get("projectName") or "uncategorized")
        self.sweeps[name] = made
        project = {"id": "P", "name": made.project, "entity": {"id": "E", "name": ENTITY}}
        told = {"id": made.id, "name": name, "project": project}
        return {"upsertSweep": {"sweep": told, "configValidationWarnings": []}}

    def _sweep(self, variables: dict[str, Any]) -> dict[str, Any]:
        found = self.sweeps.get(variables.get("sweep") or variables["name"])
        if found is None:
            return {"project": {"id": "P", "name": variables.get("project"), "sweep": None}}
        told = {
            "id": found.id, "name": found.name, "displayName": found.name, "method": found.config["method"],
            "state": found.state, "description": None, "config": found.text, "createdAt": "2026-01-01T00:00:00",
            "heartbeatAt": None, "updatedAt": None, "earlyStopJobRunning": False, "bestLoss": None, "controller": None,
            "scheduler": None, "priorRuns": {"edges": []}, "runCount": len(found.runs), "runCountExpected": None,
            "runs": {"edges": [{"node": self._node(name)} for name in found.runs]},
        }  # fmt: skip
        return {"project": {"id": "P", "name": found.project, "sweep": told}}

    def _node(self, name: str) -> dict[str, Any]:
        run = self.run(name)
        state = {None: "running", 0: "finished"}.get(run.exit_code, "failed")
        return {
            "name": name, "state": state, "config": json.dumps(run.config), "exitcode": run.exit_code,
            "heartbeatAt": None, "shouldStop": name in self.stop, "failed": state == "failed", "stopped": False,
            "running": state == "running", "summaryMetrics": json.dumps(run.summary), "sampledHistory": [run.history],
        }  # fmt: skip

    def _agent(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = f"agent{len(self.agents)}"
        self.agents[name] = variables["sweep"]
        return {"createAgent": {"agent": {"id": name}}}

    def _heartbeat(self, variables: dict[str, Any]) -> dict[str, Any]:
        sweep = self.sweeps[self.agents[variables["id"]]]
        running = json.loads(variables["runState"] or "{}")
        commands: list[dict[str, Any]] = [{"type": "stop", "run_id": name} for name in running if name in self.stop]
        if not running and sweep.state != "PAUSED":
            commands = [self._next(sweep)]
        return {"agentHeartbeat": {"agent": {"id": variables["id"]}, "commands": json.dumps(commands)}}

    def _next(self, sweep: ServedSweep) -> dict[str, Any]:
        config = sweep.config
        if self.resume is not None:
            name, self.resume = self.resume, None
            given = {**self.params[name], "_wandb": {"cli_version": "0.31.0", "m": [], "t": {"1": [1, 5]}}}
            args = {key: {"value": value} for key, value in given.items()}
            return {"type": "resume", "run_id": name, "args": args, "program": config.get("program")}
        if len(sweep.runs) >= config.get("run_cap", 1000):
            sweep.state = "FINISHED"
            return {"type": "exit"}
        name = f"{sweep.name}run{len(sweep.runs)}"
        sweep.runs.append(name)
        space: Space = sweep_of(config).space
        chosen = random.Random(name)
        self.params[name] = space.point([chosen.random() for _ in space.free])
        args = {key: {"value": value} for key, value in self.params[name].items()}
        return {"type": "run", "run_id": name, "args": args, "program": config.get("program")}
