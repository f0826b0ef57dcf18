"""Sweeps that a W&B server leads, with the real client: `wandb sweep`, `wandb agent`, `wandb sync`, on the loopback."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import TINY, environment, gone
from sweep_desk import text_sets
from trials import program, split, task
from wandb_sweeps import SweepServer

from roxxel_dist.sweep import wandb_server as module
from roxxel_dist.sweep.trial.trial import run
from roxxel_dist.sweep.wandb_server import agent_trial

ROOT = Path(__file__).parent.parent.parent
SPACE = {"dim": {"values": [32, 64]}, "kv_heads": {"values": [1, 2]}, "lr": {"min": 1e-4, "max": 1e-2}}
SWEEP = {"method": "random", "metric": {"name": "val_loss", "goal": "minimize"}, "parameters": SPACE}
COMMAND = ["${env}", "python", "${program}", "${args}"]
CREATE = """
import json, sys
from roxxel_dist.sweep.wandb_server import create_or_join
print(create_or_join(json.loads(sys.argv[1]), project="tests"))
"""
PROGRAM = """
import sys, time
import wandb
run = wandb.init()
for step in range(3):
    run.log({"val_loss": run.config["lr"] + abs(step - 1)})
if run.config["then"] == "raise":
    raise RuntimeError("a bad day")
if run.config["then"] == "wait":
    print("waits", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def server():
    with SweepServer() as server:
        yield server
    assert server.unknown == []


@pytest.fixture
def env(server, tmp_path):
    """The environment of a user who has an account at the server."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    own = {"HOME": str(tmp_path), "PATH": path, "WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_SILENT": "false"}
    return {name: value for name, value in environment().items() if "WANDB" not in name} | server.environment | own


def wandb(*words, cwd, env):
    """Run the real `wandb` to its end; what it said."""
    command = [sys.executable, "-m", "wandb", *map(str, words)]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def created(sweep, tmp_path, env):
    """ENTITY/PROJECT/ID of a new sweep, or of one that is joined."""
    words = [sys.executable, "-c", CREATE, json.dumps(sweep)]
    result = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()[-1]


def own_sweep(tmp_path, env, then, **more):
    """A sweep of a program of the user's own."""
    (tmp_path / "own.py").write_text(PROGRAM)
    space = {"lr": {"min": 0.1, "max": 0.2}, "then": {"value": then}}
    sweep = {**SWEEP, "parameters": space, "program": str(tmp_path / "own.py"), **more}
    return created(sweep, tmp_path, env)


def agent_task(tmp_path, env, path, **more):
    return task(tmp_path / "study", environment=env, wandb_sweep=path, params={}, **more)


def home(folder):
    """A folder like the root of the repository, small."""
    (folder / "configs").mkdir()
    (folder / "configs" / "default_config.yaml").write_text(
        yaml.safe_dump(
            {**yaml.safe_load(TINY), "phases": [{"steps": 12, "batch_size": 8, "seq_len": 33}], "vocab_size": 300}
        )
    )
    (folder / "data").mkdir()
    text = "\n".join(path.read_text() for path in sorted((ROOT / "roxxel_dist" / "data").glob("*.py")))
    (folder / "data" / "corpus.txt").write_text(text)
    shutil.copytree(ROOT / "sweeps", folder / "sweeps")
    (folder / "sweeps" / "small.yaml").write_text(
        yaml.safe_dump({**SWEEP, "program": "sweeps/train_sweep.py", "command": COMMAND, "run_cap": 1})
    )


def test_the_repositorys_sweep_is_accepted_from_its_root(server, env):
    said = wandb("sweep", "sweeps/sweep.yaml", cwd=ROOT, env=env)
    assert re.search(r"wandb agent \S+/sweep0", said)
    made = server.sweeps["sweep0"].config
    assert (ROOT / made["program"]).exists()
    assert made["command"] == COMMAND


@pytest.mark.long
def test_wandb_sweep_and_wandb_agent_work_from_the_shell(tmp_path, server, env):
    """Unchanged, and the server gets val_loss at every evaluation."""
    home(tmp_path)
    sweep = yaml.safe_load((tmp_path / "sweeps" / "small.yaml").read_text())
    # Parameters that are no fields: the agent hands them over in words and in its file.
    sweep["parameters"] |= {"data_path": {"value": "data"}, "config": {"value": "configs/default_config.yaml"}}
    (tmp_path / "sweeps" / "small.yaml").write_text(yaml.safe_dump(sweep))
    said = wandb("sweep", "sweeps/small.yaml", cwd=tmp_path, env=env)
    (path,) = re.findall(r"wandb agent (\S+)", re.sub(r"\x1b\[[0-9;]*m", "", said))
    wandb("agent", "--count", 1, path, cwd=tmp_path, env=env)
    (run_id,) = server.sweeps["sweep0"].runs
    sent, params = server.runs[run_id], server.params[run_id]
    assert sent.exit_code == 0
    assert [row["_step"] for row in sent.history if "val_loss" in row] == [1, 6, 12]
    assert sent.summary["val_loss"] == sent.history[-1]["val_loss"]
    assert {name: sent.config[name] for name in SPACE} == pytest.approx({name: params[name] for name in SPACE})
    (folder,) = tmp_path.glob("runs/sweep_*/*")
    assert folder.name == run_id
    assert json.loads((folder / "wandb.json").read_text())["id"] == run_id
    # A run that is handed out again is the same one, whatever the client has put among its parameters.
    server.resume = run_id
    wandb("agent", "--count", 1, path, cwd=tmp_path, env=env)
    assert server.resume is None
    assert (server.runs[run_id].exit_code, [path.name for path in tmp_path.glob("runs/sweep_*/*")]) == (0, [run_id])
    # The heads of the base config gave way.
    assert yaml.safe_load((folder / "trial.yaml").read_text())["head_size"] is None


@pytest.mark.long
def test_shares_and_ends_of_phases_reach_a_trial_of_wandb_agent(tmp_path, server, env):
    """Their names have points: as words, in the agent's file, and in what the run logs as its config."""
    home(tmp_path)
    file = tmp_path / "configs" / "default_config.yaml"
    phase = {"steps": 6, "batch_size": 8, "seq_len": 33, "blend": "row"}
    base = {**yaml.safe_load(file.read_text()), "phases": [phase, phase], "datasets": text_sets(tmp_path)}
    file.write_text(yaml.safe_dump(base))
    shares = {"mixture.1.self": {"min": 0.1, "max": 0.4}, "mixture.1.code": {"values": [0.6]}}
    ends = {"phase_end.1": {"values": [0.75]}, "mixture.2.code": {"value": 1.0}}
    sweep = {**SWEEP, "parameters": {**shares, **ends}, "program": "sweeps/train_sweep.py", "command": COMMAND}
    (tmp_path / "sweeps" / "shares.yaml").write_text(yaml.safe_dump(sweep))
    said = wandb("sweep", "sweeps/shares.yaml", cwd=tmp_path, env=env)
    (path,) = re.findall(r"wandb agent (\S+)", re.sub(r"\x1b\[[0-9;]*m", "", said))
    wandb("agent", "--count", 1, path, cwd=tmp_path, env=env)
    (run_id,) = server.sweeps["sweep0"].runs
    sent, params = server.runs[run_id], server.params[run_id]
    assert sent.exit_code == 0
    first, second = sent.config["phases"]
    assert first["weights"] == pytest.approx({"self": params["mixture.1.self"], "code": 0.6})
    assert (first["steps"], second["steps"], second["weights"], sent.config["passes"]) == (9, 3, {"code": 1.0}, "apart")
    assert {name: sent.config[name] for name in params} == pytest.approx(params)


@pytest.mark.long
def test_a_trial_of_the_servers(tmp_path, server, env):
    path = own_sweep(tmp_path, env, "end", run_cap=1)
    assert path == "local/tests/sweep0"
    assert created(path, tmp_path, env) == path
    _, reports, last = split(agent_trial(agent_task(tmp_path, env, path)))
    (run_id,) = server.sweeps["sweep0"].runs
    lr = server.params[run_id]["lr"]
    assert reports == [(0, lr + 1), (1, lr), (2, lr + 1)]
    assert last["result"]["params"] == {"lr": lr, "then": "end"}
    assert last["result"]["value"] == lr
    assert [row["val_loss"] for row in server.runs[run_id].history] == [value for _, value in reports]
    # There is no second one, and what the first has left is kept.
    _, reports, last = split(agent_trial(agent_task(tmp_path, env, path, attempt=1)))
    assert (reports, list(last)) == ([], ["exhausted"])
    assert (tmp_path / "study" / "trials" / "0-lost-0" / "wandb").exists()


@pytest.mark.long
def test_a_trial_of_the_servers_that_raises(tmp_path, server, env):
    _, reports, last = split(agent_trial(agent_task(tmp_path, env, own_sweep(tmp_path, env, "raise"))))
    assert len(reports) == 3
    assert (last["fail"]["kind"], last["fail"]["reason"]) == ("error", "RuntimeError: a bad day")


@pytest.mark.long
def test_the_server_stops_a_poor_trial(tmp_path, server, env):
    """As its own hyperband does: the agent gets the order, and the reports until then count."""
    events = agent_trial(agent_task(tmp_path, env, own_sweep(tmp_path, env, "wait")))
    found = [next(events)]
    while not any("report" in event for event in found):
        found.append(next(events))
    server.stop |= set(server.sweeps["sweep0"].runs)
    _, reports, last = split(found + list(events))
    assert last["result"]["stopped"] == "hyperband"
    assert last["result"]["value"] == min(value for _, value in reports)


@pytest.mark.long
def test_a_cancelled_trial_of_the_servers_leaves_nothing(tmp_path, server, env):
    events = agent_trial(agent_task(tmp_path, env, own_sweep(tmp_path, env, "wait")))
    pid = next(events)["start"]["pid"]
    assert "report" in next(events)
    events.close()
    assert gone(pid)
    assert not [name for name in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path / "own.py") in _read(name)]


@pytest.mark.long
def test_a_server_that_gives_nothing_or_goes_away_is_named(tmp_path, server, env, monkeypatch):
    """A sweep that is paused there is waited for; a server that is gone is asked again, and then given up."""
    monkeypatch.setattr(module, "GIVES_NOTHING_S", 0.5)
    monkeypatch.setattr(module, "PAUSES_S", (0.1,))
    path = own_sweep(tmp_path, env, "end")
    (sweep,) = server.sweeps.values()
    sweep.state = "PAUSED"
    events = []
    for event in agent_trial(agent_task(tmp_path, env, path)):
        events.append(event)
        sweep.state = "RUNNING" if "note" in event else sweep.state
    assert f"the W&B server gives no trial: {path} is paused there, or busy" in str(events[1])
    assert "result" in events[-1]
    server.close()
    *events, last = agent_trial(agent_task(tmp_path, env, path, trial=1))
    assert last["unserved"]["reason"].endswith("asked 2 times")
    assert [next(iter(event)) for event in events].count("start") == 1
    assert "it is asked again in 0.1 s" in str(events)


def test_a_sweep_that_is_not_there_is_named(tmp_path, server, env):
    words = [sys.executable, "-c", CREATE, '"local/tests/nosuch"']
    result = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "UserError: the W&B sweep 'local/tests/nosuch' cannot be joined: " in result.stderr


@pytest.mark.cluster
def test_wandb_sync_sends_a_trial_that_was_offline(tmp_path, server, env):
    config = {"wandb_project": "studies"}
    asked = task(
        tmp_path / "study", program=program(PROGRAM), params={"lr": 0.5, "then": "end"}, environment=env, config=config
    )
    _, reports, last = split(run(asked))
    assert (last["result"]["value"], len(reports)) == (0.5, 3)
    assert not server.runs
    (folder,) = (tmp_path / "study" / "trials" / "0" / "wandb").glob("offline-run-*")
    wandb("sync", folder, cwd=tmp_path, env=env)
    (sent,) = server.runs.values()
    assert [row["val_loss"] for row in sent.history] == [value for _, value in reports]
    assert {name: sent.config[name] for name in ("lr", "then")} == {"lr": 0.5, "then": "end"}


def _read(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""
