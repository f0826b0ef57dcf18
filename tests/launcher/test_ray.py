"""`launch ray` on a real cluster of two nodes with a token: what ranks get, and that nothing is left of them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import losses, run
from howto import on_hosts
from machines import missing
from ranks import write_namesakes
from ray_nodes import RAY, STAY, RayNodes, begin, launch, ray_nodes, words

from roxxel_dist.cli import main
from roxxel_dist.launcher.backends.ray import cluster
from roxxel_dist.launcher.backends.ray.actor import environment
from roxxel_dist.launcher.backends.ray.backend import unique
from roxxel_dist.process.exit_codes import pip_install

pytestmark = pytest.mark.xdist_group("ray")  # one worker: the cluster is started once
Until = Callable[[Callable[[], Any], str], None]
Ask = Callable[..., tuple[int, str, str]]
SHOW = """
import json, os, socket, sys
facts = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "host": socket.gethostname()}
json.dump(facts, open("facts." + os.environ["ROXXEL_PROCESS_ID"], "w"))
print("here", os.environ["ROXXEL_PROCESS_ID"])
"""
CONNECTS = """
import os, sys
from roxxel_dist.launcher.backends.ray.cluster import connected
before = dict(os.environ)
with connected(sys.argv[1], insecure=False) as ray:
    assert ray.nodes()
    print("connected")
assert dict(os.environ) == before
"""
CONFIG = """
dim: 32
num_blocks: 1
kv_heads: 1
head_size: 8
max_context: 64
phases:
  - {steps: 4, batch_size: 4, seq_len: 33}
lr: 3.0e-3
log_every: 1
"""


@pytest.mark.cluster
def test_the_restart_that_the_page_shows(nodes: RayNodes, tmp_path: Path) -> None:
    on_hosts(nodes.hosts, tmp_path / "work", "h1", **nodes.environment).page("ray.md", "Restarts")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """`launch ray` in this process: (exit code, what it printed, what it said)."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: (main(["launch", "ray", *map(str, words)]), *capsys.readouterr())


@pytest.mark.cluster
def test_what_each_rank_sees(nodes: RayNodes, tmp_path: Path) -> None:
    folder = tmp_path / "with space; $(touch no)"
    folder.mkdir()
    given = ["a b", "", "q'uo\"te", "é ☃", "$HOME"]
    options = ["--procs-per-host", 2, "--env", "MY_TOKEN=sekrit"]
    result = launch(nodes, folder, *options, "--", "env", sys.executable, "-c", SHOW, *given, env={"NOT": "mine"})
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"\d\d:\d\d:\d\d 0 \| here 0\n", result.stdout)
    facts = [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(4)]
    assert [fact["argv"] for fact in facts] == [given] * 4
    assert sorted({fact["host"] for fact in facts}) == ["h1", "h2"]
    assert facts[0]["host"] == facts[1]["host"] != facts[2]["host"] == facts[3]["host"]
    assert {fact["cwd"] for fact in facts} == {str(folder)}
    for rank, fact in enumerate(facts):
        env = fact["env"]
        assert (env["ROXXEL_PROCESS_ID"], env["ROXXEL_NUM_PROCESSES"]) == (str(rank), "4")
        assert env["HOME"] == str(nodes.hosts.home(fact["host"]))
        assert env["MY_TOKEN"] == "sekrit"
        assert not [name for name in env if name.startswith("RAY_")]
        assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT", "NOT"} & set(env)
    assert facts[0]["env"]["ROXXEL_COORDINATOR"].split(":")[0] == nodes.hosts.address(facts[0]["host"])


@pytest.mark.cluster
def test_the_gpus_that_ray_gives_are_dealt_to_the_ranks(nodes: RayNodes, tmp_path: Path) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES > gpus.$ROXXEL_PROCESS_ID"
    options = ["--gpus-per-host", 4, "--procs-per-host", 2, "--", "bash", "-c", show]
    result = launch(nodes, tmp_path, *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert [(tmp_path / f"gpus.{rank}").read_text() for rank in range(4)] == ["0,1\n", "2,3\n"] * 2


@pytest.mark.cluster
def test_files_of_the_working_folder_are_no_modules_of_ray_and_the_launcher(nodes: RayNodes, tmp_path: Path) -> None:
    write_namesakes(tmp_path)
    (tmp_path / "main.py").write_text("print('it ran')\n")
    program = Path(sys.executable).with_name("roxxel-dist")
    command = [program, *words(nodes.address, 2, "--all-ranks", "--", "python", "-m", "main")[3:]]
    done = nodes.hosts.run(command, on="h1", cwd=tmp_path, env=nodes.environment, timeout=240)
    assert (done.returncode, done.stdout.count("it ran")) == (0, 2), done.stderr


def test_variables_of_a_node() -> None:
    own = {"A": "1", "RAY_AUTH_TOKEN": "x", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "2", "SSH_CONNECTION": "x"}
    assert environment(own, []) == {"A": "1", "CUDA_VISIBLE_DEVICES": "2"}
    assert environment(own, ["OMP_NUM_THREADS"]) == {"A": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "2"}


@pytest.mark.cluster
def test_ray_leaves_no_variables_behind(nodes: RayNodes) -> None:
    env = {name: value for name, value in nodes.environment.items() if name != "RAY_AUTH_MODE"}
    result = nodes.hosts.run([sys.executable, "-c", CONNECTS, nodes.address], on="h1", env=env)
    assert (result.returncode, result.stdout) == (0, "connected\n"), result.stderr


@pytest.mark.cluster
def test_training_has_the_losses_of_a_local_launch(nodes: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text(CONFIG)
    source = Path(json.__file__).parent
    built = run("data", "build", source, "--out", "data", "--vocab_size", 300, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    options = ["--max-restarts", 0, "--devices-per-proc"]
    train = ["--", "train", "--config", "short.yaml", "--data_path", "data", "--run_dir"]
    local = run("launch", "local", *options, 2, *train, "here", cwd=tmp_path)  # the same two devices
    assert local.returncode == 0, local.stderr
    env = {name: os.environ[name] for name in os.environ if name.startswith("JAX_")}
    passed = [word for name in (*env, "PJRT_NPROC") for word in ("--env", name)]
    result = launch(nodes, tmp_path, *passed, *options, 1, *train, "there", timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert losses(tmp_path / "there") == losses(tmp_path / "here")
    assert len(losses(tmp_path / "there")) == 4


@pytest.mark.cluster
@pytest.mark.parametrize(
    "victim",
    ["rank", "launcher", pytest.param("worker", marks=pytest.mark.long), pytest.param("agent", marks=pytest.mark.long)],
)
def test_kill_9_leaves_nothing_anywhere(victim: str, nodes: RayNodes, tmp_path: Path, until: Until) -> None:
    job = begin(nodes, tmp_path, "--max-restarts", 0, "--", "bash", "-c", STAY)
    parts = {"agent": "launcher.agent.agent", "rank": "bash -c touch", "worker": "RayNode"}
    os.kill(job.pid if victim == "launcher" else nodes.pid("h2", parts[victim]), signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == (-9 if victim == "launcher" else 137)
    until(lambda: not nodes.ours(), "everything to be gone")
    if victim == "rank":
        assert b"failed first: signal SIGKILL (host 10.77.0.2" in err
    elif victim == "worker":
        assert b"the agent on host 10.77.0.2 ended before its ranks" in err
        assert b"its Ray actor died" in err


@pytest.mark.cluster
def test_what_cannot_be_placed_is_told(nodes: RayNodes, tmp_path: Path) -> None:
    result = launch(nodes, tmp_path, "--place-timeout", 2, "--", "touch", "x", hosts=3)
    assert result.returncode == 69
    assert "Asked: 1 CPU on each of 3 different nodes" in result.stderr
    assert "Alive: 2: 10.77.0." in result.stderr
    assert "free now, together: 4 CPU" in result.stderr
    result = launch(nodes, tmp_path, "--gpus-per-host", 8, "--place-timeout", 1, "--", "touch", "x")
    assert result.returncode == 69
    assert "Asked: 1 CPU and 8 GPU on each of 2" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cluster
def test_ctrl_c_ends_the_wait_for_a_place(nodes: RayNodes, tmp_path: Path, until: Until) -> None:
    command = words(nodes.address, 3, "--place-timeout", 100, "--", "touch", "x")
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    job = nodes.hosts.popen(command, on="h1", cwd=tmp_path, env=nodes.environment, **pipes)
    until(lambda: job.poll() is not None or b"SigCgt" in _caught(job.pid), "Ray's threads")
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(4)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=30)
    assert (job.returncode, err) == (130, b"")


def _caught(pid: int) -> bytes:
    return Path(f"/proc/{pid}/status").read_bytes()


@pytest.mark.cluster
def test_a_process_without_the_token_is_told_what_it_lacks(nodes: RayNodes, tmp_path: Path) -> None:
    env = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    result = launch(nodes, tmp_path, "--", "touch", "x", env=env)
    assert result.returncode == 69
    assert "is the token here that of the cluster" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "said"), [(None, "not set, and there is no token"), ("disabled", "'disabled'")])
def test_a_cluster_is_used_with_a_token(mode: str | None, said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ValueError, match=f"^--address auto: RAY_AUTH_MODE is {said}; set it to token.*--insecure"):
        cluster.check_token("auto")
    (tmp_path / "none").write_text("secret")
    if mode is None:
        cluster.check_token("auto")


@pytest.mark.cluster
def test_an_open_cluster_is_used_where_that_is_wanted(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    with ray_nodes(1, token=False, head=("--include-dashboard", "false")) as open_nodes:
        open_nodes.wait_until_up("h1")
        for options in ([], ["--insecure"]):
            command = words("auto", 1, *options, "--", "touch", "x")
            result = open_nodes.hosts.run(command, on="h1", cwd=tmp_path, env=open_nodes.environment, timeout=200)
            assert (result.returncode, (tmp_path / "x").exists()) == ((0, True) if options else (2, False))
        assert result.stderr == ""


@pytest.mark.long
def test_as_a_job_of_ray(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "told.py").write_text("import os; print('told by', os.path.abspath(__file__))")
    with ray_nodes(2) as nodes:
        entry = words("auto", 2, "--place-timeout", 120, "--all-ranks", "--", "python", "told.py")
        submit = [*RAY, "job", "submit", "--address", "http://127.0.0.1:8265", "--working-dir", tmp_path / "mine", "--"]
        env = {name: value for name, value in nodes.environment.items() if name != "RAY_ADDRESS"}
        result = nodes.hosts.run([*submit, *entry], on="h1", env=env, timeout=200)
        for _ in range(60):  # until the server of jobs is up
            if "Failed to connect" not in result.stderr + result.stdout:
                break
            result = nodes.hosts.run([*submit, *entry], on="h1", env=env, timeout=200)
        assert result.returncode == 0, result.stdout + result.stderr
        told = re.findall(r" [01] \| told by (.*)", result.stdout)
        assert len(told) == 2
        assert {Path(path).relative_to(nodes.folder).parts[0] for path in told} == {"h1", "h2"}
        assert not nodes.ours()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--address", "ray://head:10001"], "ray job submit"),
        (["--address", "head"], "write `auto`, or HOST:PORT"),
        (["--detach"], "ray job submit --no-wait"),
        (["--hosts", "0"], "--hosts 0: must be at least 1"),
        (["--min-hosts", "3"], "--min-hosts 3: there are 2 hosts"),
        (["--procs-per-host", "0"], "--procs-per-host 0: must be at least 1"),
        (["--cpus-per-host", "0"], "--cpus-per-host 0"),
        (["--place-timeout", "0"], "--place-timeout 0: must be seconds"),
        (["--gpus-per-host", "3", "--procs-per-host", "2"], "--gpus-per-host 3 is not a multiple"),
    ],
)
def test_slips_are_told_before_anything_is_asked(options: list[str], said: str, ask: Ask, tmp_path: Path) -> None:
    code, out, err = ask("--address", "127.0.0.1:1", "--hosts", 2, *options, "--", "true")
    assert (code, out) == (2, "")
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_address_leaves_nothing(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    train = ["train", "--data_path", "data", "--run_dir", "runs/x"]
    code, _, err = ask("--address", "127.0.0.1:1", "--hosts", 1, "--", *train)
    assert code == 69
    assert re.fullmatch(r"roxxel-dist: .* no head of a Ray cluster answers there \(.*refused\).*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ASK_S", 0.5)
    said = pytest.raises(cluster.ClusterError, match=r"answers there \(it says nothing\)")
    with socket.create_server(("127.0.0.1", 0)) as mute, said:
        cluster.check_head(f"127.0.0.1:{mute.getsockname()[1]}")


def test_dry_run_asks_nobody(ask: Ask) -> None:
    options = ["--address", "127.0.0.1:1", "--hosts", 2, "--gpus-per-host", 4, "--procs-per-host", 2]
    code, out, err = ask(*options, "--dry-run", "--json", "--", "train", "--data_path", "x")
    assert code == 0, err
    told = json.loads(out)
    assert [rank["host"] for rank in told["ranks"]] == ["bundle-0", "bundle-0", "bundle-1", "bundle-1"]
    assert [rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in told["ranks"]] == ["0,1", "2,3"] * 2


def test_without_ray_it_says_what_to_install(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = ask("--address", "auto", "--hosts", 1, "--", "true")
    assert (code, err) == (2, f"roxxel-dist: Ray is not installed: {pip_install('ray')}\n")


def test_what_is_told_where_there_is_no_room() -> None:
    alive = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 2.0, "GPU": 4.0}}
    gone = alive | {"Alive": False, "NodeManagerAddress": "10.0.0.2"}
    said = cluster.no_room(3, {"CPU": 1, "GPU": 8}, 2.0, [alive, gone], {"CPU": 1.5})
    assert said.startswith(
        "Ray found no room within 2 s (--place-timeout). Asked: 1 CPU and 8 GPU on each of 3 different nodes (--hosts, "
        "--cpus-per-host, --gpus-per-host). Alive: 1: 10.0.0.1 (2 CPU and 4 GPU); free now, together: 1.5 CPU and 0 GPU"
    )
    assert "10.0.0.1 (2 CPU) and 2 more; free" in cluster.no_room(11, {"CPU": 1}, 2.0, [alive] * 10, {})


def test_what_is_told_where_a_cluster_cannot_be_joined() -> None:
    said = cluster.no_answer(RuntimeError("Failed to connect. See the logs\nand more"))
    assert said.startswith("this process could not join the Ray cluster (Failed to connect): is it up")
    assert "is the token here that of the cluster" in said
    assert cluster.no_answer(TimeoutError()).startswith("this process could not join the Ray cluster (TimeoutError)")


def test_variables_of_ray_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    before = dict(os.environ)
    with cluster.ray_variables({"RAY_AUTH_MODE": "token"}):
        assert os.environ["RAY_AUTH_MODE"] == "token"
        os.environ.update(RAY_OF_ITS_OWN="1", PYTHONBREAKPOINT="ray.util.rpdb.set_trace")
    assert dict(os.environ) == before


def test_nodes_on_one_machine_have_names_of_their_own() -> None:
    assert unique(["10.0.0.1", "10.0.0.2"]) == ["10.0.0.1", "10.0.0.2"]
    assert unique(["10.0.0.1", "10.0.0.1", ""]) == ["10.0.0.1#0", "10.0.0.1#1", "bundle#2"]
