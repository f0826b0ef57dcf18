"""`launch member`: hosts that were started one by one train together, and end as what started them expects."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from commands import FAST, command, environment, losses, rows, run
from hosts import Cluster

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.launcher.backends.kubernetes import node as node_file
from roxxel_dist.launcher.backends.kubernetes.node import Node, NoFirstHostError, find_first, flags_from_environment
from roxxel_dist.launcher.job.spec import JobSpec

Until = Callable[[Callable[[], Any], str], None]
STEPS = 30
CONFIG = f"""
dim: 16
num_blocks: 1
kv_heads: 1
head_size: 8
max_context: 32
dropout_rate: 0.1
phases: [{{steps: {STEPS}, batch_size: 8, seq_len: 33}}]
log_every: 1
eval_every: 1000
checkpoint_every: 1000
"""
TRAIN = ["train", "--config", "tiny.yaml", "--data_path", "data", "--run_dir"]
QUICK = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}


@dataclass
class Members:
    """Members of one job, one a host of a cluster, which share a working directory and know each other's names."""

    hosts: Cluster
    folder: Path

    def start(self, index: int, *words: object, **variables: object) -> subprocess.Popen[bytes]:
        host = self.hosts.names[index]
        (self.hosts.home(host) / "tmp").mkdir(exist_ok=True)
        told = {"HOSTS": len(self.hosts.names), "INDEX": index, "FIRST_HOST": "h1", "RUN_NAME": "mine"} | variables
        env = {f"ROXXEL_{name}": str(value) for name, value in told.items()}
        env |= QUICK | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(self.hosts.home(host) / "tmp")}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return self.hosts.popen(command("launch", "member", *words), on=host, cwd=self.folder, env=env, **pipes)

    def start_all(self, *words: object, **variables: object) -> list[subprocess.Popen[bytes]]:
        """All of them, the first one last."""
        return [self.start(index, *words, **variables) for index in reversed(range(len(self.hosts.names)))][::-1]

    def rank(self, index: int) -> int:
        """The first rank of a host: the child of a keeper, which is a fork of the agent."""
        processes = [psutil.Process(pid) for pid in self.hosts.processes(self.hosts.names[index])]
        agent = next(one for one in processes if one.cmdline()[-1:] == ["roxxel_dist.launcher.agent.agent"])
        return min(child.pid for keeper in agent.children() for child in keeper.children())


@pytest.fixture
def members(cluster: Callable[[int], Cluster], tmp_path: Path) -> Callable[[int], Members]:
    return lambda count: Members(hosts=cluster(count), folder=tmp_path)


def ends(launches: list[subprocess.Popen[bytes]]) -> list[tuple[int, str, str]]:
    """Codes and words of all of them, when they have ended."""
    found = []
    for launch in launches:
        out, err = launch.communicate(timeout=120)
        found.append((launch.returncode, out.decode(), err.decode()))
    return found


def test_what_the_ranks_of_a_member_are_told(members: Callable[[int], Members]) -> None:
    two = members(2)
    show = "echo $ROXXEL_PROCESS_ID/$ROXXEL_NUM_PROCESSES $ROXXEL_COORDINATOR $ROXXEL_ATTEMPT $ROXXEL_RUN_ID $MINE"
    options = ["--procs-per-host", 2, "--env", "MINE=yes", "--port", 3456]
    first, second = ends(two.start_all(*options, "--", "bash", "-c", show, RESTARTS=3))
    assert (first[0], first[2], second[0], second[2]) == (0, "", 0, "")
    assert re.fullmatch(r"\d\d:\d\d:\d\d 0 \| 0/4 10.77.0.1:3456 3 mine yes\n", first[1])
    assert re.fullmatch(r"\d\d:\d\d:\d\d 2 \| 2/4 h1:3456 3 mine yes\n", second[1])  # each shows its own first rank
    logs = sorted((two.folder / "runs" / "run_mine" / "logs").glob("*.log"))
    assert [log.name for log in logs] == [f"rank-{rank}.log" for rank in range(4)]
    assert " h2 3 | 3/4 h1:3456 3 mine yes\n" in logs[3].read_text()
    assert "attempt 3, run mine" in logs[3].read_text()


@pytest.mark.cluster
def test_members_train_together_drain_and_resume(members: Callable[[int], Members], until: Until) -> None:
    two = members(2)
    (two.folder / "tiny.yaml").write_text(CONFIG)
    (two.folder / "data").mkdir()
    tokens = np.random.default_rng(0).integers(0, 500, 1 << 16, np.uint16)
    Roxxel(two.folder / "data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
    local = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 2, "--", *TRAIN, "whole"]
    whole = run(*local, cwd=two.folder, **QUICK)
    assert whole.returncode == 0, whole.stderr
    launches = two.start_all("--devices-per-proc", 2, "--", *TRAIN, "stopped")
    until(lambda: len(rows(two.folder / "stopped")) >= 2 or launches[0].poll() is not None, "the second step")
    launches[1].send_signal(signal.SIGTERM)  # as of a pod that is deleted: all ranks leave after the same step
    stopped = ends(launches)
    assert [code for code, _, _ in stopped] == [42, 42], stopped
    before = rows(two.folder / "stopped")
    assert 2 <= len(before) < STEPS
    again = ends(two.start_all("--devices-per-proc", 2, "--", *TRAIN, "stopped", RESTARTS=1))
    assert [code for code, _, _ in again] == [0, 0], again
    assert losses(two.folder / "stopped") == losses(two.folder / "whole")
    assert len(losses(two.folder / "whole")) == STEPS
    assert rows(two.folder / "stopped")[1] == before[1]  # it resumed, and did not begin again


@pytest.mark.cluster
def test_a_killed_rank_ends_its_member_with_its_code(members: Callable[[int], Members], until: Until) -> None:
    two = members(2)
    stay = ["--procs-per-host", 2, "--", "bash", "-c", "touch up.$ROXXEL_PROCESS_ID; sleep 1000; true"]
    launches = two.start_all(*stay)
    until(lambda: len(list(two.folder.glob("up.*"))) == 4, "the ranks")
    os.kill(two.rank(1), signal.SIGKILL)
    code, _, err = ends(launches[1:])[0]
    assert code == 137
    assert "failed first: signal SIGKILL (host h2" in err
    until(lambda: not two.hosts.processes("h2"), "everything on h2 to be gone")
    assert launches[0].poll() is None
    launches[0].send_signal(signal.SIGTERM)
    assert ends(launches[:1])[0][0] == 143  # a shell that has saved nothing
    until(lambda: not two.hosts.processes("h1"), "everything on h1 to be gone")


@pytest.mark.cluster
def test_a_rank_that_dies_under_the_others_ends_them_too(members: Callable[[int], Members], until: Until) -> None:
    """Rank 0 has the coordinator: the others end without anybody's help."""
    two = members(2)
    (two.folder / "program.py").write_text(
        "import os, time, jax\nopen('up.' + os.environ['ROXXEL_PROCESS_ID'], 'w')\ntime.sleep(1000)\n"
    )
    launches = two.start_all("--devices-per-proc", 1, "--", "python", "program.py")
    until(lambda: len(list(two.folder.glob("up.*"))) == 2, "the ranks")
    os.kill(two.rank(0), signal.SIGKILL)
    assert [code for code, _, _ in ends(launches)] == [137, 134]


STUCK = """
import os, time
from roxxel_dist.process.progress import Progress
rank = int(os.environ["ROXXEL_PROCESS_ID"])
progress = Progress.from_env(rank)
progress.enter(1)
if rank == 2:
    progress.finish(1)
    progress.enter(2)
time.sleep(1000)
"""


def test_a_rank_that_is_stuck_is_named_by_its_number_in_the_job(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    place = ["--hosts", 2, "--index", 1, "--first", "127.0.0.1", "--run-id", "mine", "--procs-per-host", 2]
    words = [*place, "--step-timeout", 1, "--", "env", sys.executable, "stuck.py"]
    result = run("launch", "member", *words, cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert result.returncode == 124
    assert re.search(r"rank 3 on host \S+ is stuck: in step 1", result.stderr), result.stderr


def test_ranks_must_be_among_those_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the ranks 3 to 4 are not among those of a job of 4"):
        JobSpec(command=("x",), nprocs=2, first_rank=3, world=4, run_id="x", log_dir=tmp_path)


@pytest.mark.cluster
def test_a_member_waits_for_the_name_of_the_first(members: Callable[[int], Members], until: Until) -> None:
    two = members(2)
    file = two.hosts.folder / "h2" / "hosts"
    known = file.read_text()
    file.write_text(known.replace("10.77.0.1 h1\n", ""))
    launch = two.start(1, "--", "true")
    assert launch.stderr is not None
    assert b"--first h1: no such name" in launch.stderr.readline()
    file.write_text(known)  # in place: it is mounted there
    assert ends([launch])[0][0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.cluster
def test_it_can_be_stopped_while_it_waits(number: int, members: Callable[[int], Members]) -> None:
    launch = members(2).start(1, "--first", "nobody", "--", "touch", "x")
    assert launch.stderr is not None
    assert b"waiting up to 600 s" in launch.stderr.readline()
    launch.send_signal(number)
    assert ends([launch])[0][0] == 128 + number


@pytest.mark.cluster
def test_a_first_host_that_never_comes(members: Callable[[int], Members]) -> None:
    two = members(2)
    code, _, err = ends([two.start(1, "--first", "nobody", "--host-timeout", 1, "--", "touch", "x")])[0]
    assert (code, "--first nobody: no such name" in err) == (69, True)
    two.hosts.resolve("h1", own="127.0.1.1")
    code, _, err = ends([two.start(0, "--host-timeout", 0, "--", "touch", "x")])[0]
    assert (code, "--first h1 resolves to 127.0.1.1, which other hosts cannot reach" in err) == (69, True)
    two.hosts.resolve("h2", own="127.0.1.1")  # found by others, but not by itself: what Gloo would stumble over
    code, _, err = ends([two.start(1, "--devices-per-proc", 1, "--", "touch", "x")])[0]
    assert (code, "its own name 'h2' resolves to 127.0.1.1" in err) == (69, True)
    assert not (two.folder / "x").exists()


def test_host_0_is_where_its_name_leads() -> None:
    said: list[str] = []
    first = Node(hosts=2, index=0, first="127.0.0.1", procs=1)
    assert find_first(first, 0, said.append, lambda seconds: False) == "127.0.0.1"
    elsewhere = Node(hosts=2, index=0, first="192.0.2.1", procs=1)
    with pytest.raises(NoFirstHostError, match=r"is 192\.0\.2\.1, which is no address of this machine.*waited 0 s"):
        find_first(elsewhere, 0, said.append, lambda seconds: False)
    assert find_first(elsewhere, 9, said.append, lambda seconds: True) is None
    other = Node(hosts=2, index=1, first="192.0.2.1", procs=1)
    assert find_first(other, 0, said.append, lambda seconds: False) == "192.0.2.1"
    assert said == []


def test_a_member_tells_once_that_it_waits_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_file, "TELL_S", 0.0)
    said: list[str] = []
    turns = iter([False, False, True])
    other = Node(hosts=2, index=1, first="nobody.invalid", procs=1)
    assert find_first(other, 600, said.append, lambda seconds: next(turns)) is None
    (line,) = said
    assert line.startswith("--first nobody.invalid: no such name; ")
    assert line.endswith("; waiting up to 600 s (--host-timeout)")
    assert list(turns) == []


def test_flags_win_over_variables() -> None:
    environ = {"JOB_COMPLETION_INDEX": "3", "ROXXEL_HOSTS": "4", "ROXXEL_FIRST_HOST": "a", "ROXXEL_PORT": ""}
    assert flags_from_environment({"hosts": 8, "port": None}, environ) == {
        "hosts": 8,
        "index": 3,
        "first": "a",
        "port": None,
    }
    assert flags_from_environment({}, environ | {"ROXXEL_INDEX": "2"})["index"] == 2
    with pytest.raises(ValueError, match="ROXXEL_HOSTS is 'two': must be a number, as of --hosts"):
        flags_from_environment({}, {"ROXXEL_HOSTS": "two"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "2", "--index", "2", "--first", "a", "--run-id", "x"], "--index 2: must be within 0 and 1"),
        (["--hosts", "2", "--first", "a", "--run-id", "x"], "--index is not given, nor ROXXEL_INDEX or JOB_COMPL"),
        (["--hosts", "2", "--index", "1", "--run-id", "x"], "--first is not given, nor ROXXEL_FIRST_HOST: 2 hosts"),
        (["--hosts", "2", "--index", "1", "--first", "a"], "--run-id is not given, nor ROXXEL_RUN_NAME"),
        (["--hosts", "0"], "--hosts 0: must be at least 1"),
        (["--procs-per-host", "0"], "--procs-per-host 0: must be at least 1"),
        (["--first", "a b"], "--first 'a b' cannot be a host"),
        (["--attempt", "-1"], "--attempt -1: must be 0"),
        (["--detach"], "--detach: a container ends with its first process"),
        (["--gpus-per-host", "3", "--procs-per-host", "2"], "--gpus-per-host 3 is not a multiple"),
    ],
)
def test_slips_are_named(words: list[str], said: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    result = cli("launch", "member", *words, "--", "true", cwd=tmp_path)
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_dry_run_asks_nobody(cli: Callable[..., Any], tmp_path: Path) -> None:
    words = ["--hosts", 3, "--index", 2, "--first", "not-there", "--run-id", "x", "--procs-per-host", 2, "--dry-run"]
    result = cli("launch", "member", *words, "--gpus-per-host", 4, "--", "true", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "ROXXEL_COORDINATOR=not-there:29500" in result.stdout
    assert "ROXXEL_NUM_PROCESSES=6" in result.stdout
    assert re.search(r"^5 on .*CUDA_VISIBLE_DEVICES=2,3 .*ROXXEL_PROCESS_ID=5", result.stdout, re.M)


ENTRYPOINT = Path(__file__).parents[2] / "docker" / "entrypoint"


def test_the_entrypoint_of_the_image_is_a_shell_script_that_execs(tmp_path: Path) -> None:
    assert subprocess.run(["sh", "-n", ENTRYPOINT]).returncode == 0
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "roxxel-dist").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m roxxel_dist "$@"\n')
    (folder / "roxxel-dist").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"

    def enter(*words: str, **variables: str) -> subprocess.Popen[str]:
        env = environment(PATH=path, PYTHONPATH=str(ENTRYPOINT.parents[1]), **variables)
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([ENTRYPOINT, *words], cwd=tmp_path, env=env, **pipes)

    plain = enter("--version")
    assert plain.communicate(timeout=60)[0].startswith("roxxel-dist ")
    program = ["bash", "-c", "trap 'echo saved; exit 42' TERM; echo up; while true; do sleep 0.1; done"]
    member = enter("--port", "29731", "--", *program, ROXXEL_HOSTS="1", ROXXEL_RUN_NAME="one")
    assert member.stdout is not None
    assert "| up" in member.stdout.readline()
    member.terminate()  # it is the launcher by now: signals reach it
    out, err = member.communicate(timeout=60)
    assert (member.returncode, "| saved" in out) == (42, True), err


def test_compose_starts_members_of_one_job(cli: Callable[..., Any], tmp_path: Path) -> None:
    text = (
        (ENTRYPOINT.parent / "compose.yaml")
        .read_text()
        .replace("/configs/demo.yaml", str(ENTRYPOINT.parents[1] / "roxxel_dist" / "demo.yaml"))
    )
    services = yaml.safe_load(text)["services"]
    assert list(services) == ["host0", "host1"]
    for number, (name, service) in enumerate(services.items()):
        assert service["hostname"] == name
        variables = {key: str(value) for key, value in service["environment"].items()}
        result = cli("launch", "member", "--dry-run", *service["command"], cwd=tmp_path, environ=variables)
        assert result.returncode == 0, result.stderr
        assert "ROXXEL_COORDINATOR=host0:29500 ROXXEL_EXIT_TIMEOUT=65 ROXXEL_LOCAL_DEVICES=2" in result.stdout
        assert f"ROXXEL_NUM_PROCESSES=2 ROXXEL_PROCESS_ID={number} " in result.stdout


HANGS = """
import glob, os, time
from roxxel_dist.process.progress import Progress
rank = int(os.environ["ROXXEL_PROCESS_ID"])
open(f"up.{{rank}}", "w").close()
while len(glob.glob("up.*")) < 4:
    time.sleep(0.01)
progress = Progress.from_env(rank)
for step in range(1, 100):
    progress.enter(step)
    if step == (5 if rank == {culprit} else 6):  # the others wait for it, as in a collective
        time.sleep(1000)
    time.sleep(0.05)
    progress.finish(step)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_all_members_name_the_rank_that_hangs(
    culprit: int, shared: bool, members: Callable[[int], Members], tmp_path: Path
) -> None:
    two = members(2)
    if not shared:
        (tmp_path / "runs").mkdir()
        for name in two.hosts.names:
            two.hosts.tmpfs(name, tmp_path / "runs", "10m")
    program = [
        "env",
        sys.executable,
        "-c",
        HANGS.format(culprit=culprit),
    ]  # they begin together, as after jax.distributed
    first, second = ends(two.start_all("--procs-per-host", 2, "--step-timeout", 2, "--", *program))
    own, other = (first, second) if culprit < 2 else (second, first)
    host = "h1" if culprit < 2 else "h2"
    assert (own[0], other[0]) == (124, 124)
    assert f"rank {culprit} on host {host} is stuck: in step 5" in own[2]
    if shared:
        assert f"rank {culprit} on host {host} is stuck: in step 5" in other[2]
        assert "launchers of their own" not in own[2] + other[2]
    else:
        assert "is stuck: in step 6" in other[2]
        assert "ranks of other hosts have launchers of their own" in other[2]
