"""A job that goes on without a host takes it in again when it is back."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from commands import FAST
from hosts import CONTROLLER, Cluster

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.launcher.control.outcome import AttemptResult, HostLost, RankExit, exit_code
from roxxel_dist.launcher.control.restart import Cause, classify
from roxxel_dist.launcher.preflight.lost_hosts import LOOK_S

Until = Callable[[Callable[[], Any], str], None]
WORDS = "every rank saved and exited (42); the job continues with h2"


def ended(*codes: int, killed: bool = False, **more: Any) -> AttemptResult:
    ends = [
        RankExit(rank=rank, host="h", pid=1, code=code, killed_by_us=killed, step=3) for rank, code in enumerate(codes)
    ]
    return AttemptResult(exits=ends, grows=WORDS, **more)


@pytest.mark.parametrize(
    ("result", "cause", "code"),
    [
        (ended(42, 42), Cause.PREEMPTED, 42),
        (ended(-15, -15), Cause.PREEMPTED, 42),  # a program that saves nothing
        (ended(-9, -9, killed=True), Cause.PREEMPTED, 42),  # one that did not leave in its time
        (ended(1, -9), Cause.PREEMPTED, 1),
        (ended(0, 0), Cause.DONE, 0),  # the last step was done before
        (ended(42, lost=HostLost(host="h", code=137, text="")), Cause.INFRASTRUCTURE, 137),
        (ended(42, 42, requested=signal.SIGINT), Cause.REQUESTED, 42),
    ],
)
def test_how_an_attempt_ends_that_made_room_for_a_host(result: AttemptResult, cause: Cause, code: int) -> None:
    assert (classify(result), exit_code(result)) == (cause, code)


def started(hosts: Cluster, folder: Path, *words: object, **env: str) -> subprocess.Popen[bytes]:
    """`launch ssh` on all hosts of a cluster that goes on with one of them; what it says goes into screen.txt."""
    options = ["--hosts", ",".join(hosts.names), "--ssh-config", hosts.ssh_config]
    options += ["--min-hosts", 1, "--host-timeout", 1, *words]
    with (folder / "screen.txt").open("ab") as screen:
        return hosts.popen(
            [sys.executable, "-m", "roxxel_dist", "launch", "ssh", *options], cwd=folder,
            stdin=subprocess.DEVNULL, stdout=screen, stderr=subprocess.STDOUT, env=env,
        )  # fmt: skip


@pytest.mark.cluster
@pytest.mark.parametrize("at_checkpoint", [False, True])
def test_a_host_that_is_back_is_taken_in_again(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until, at_checkpoint: bool
) -> None:
    hosts = cluster(2)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "from roxxel_dist.cluster.progress import agent_pipe\n"
        "env, pipe = os.environ, agent_pipe()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "attempt, ranks = env['ROXXEL_ATTEMPT'], env['ROXXEL_NUM_PROCESSES']\n"
        "open(f'up.{attempt}.{ranks}.' + env['ROXXEL_PROCESS_ID'], 'w').close()\n"
        "while attempt != '2':\n"
        "    time.sleep(0.1)\n"
        "    if os.path.exists('save'):\n"
        "        pipe.tell({'saved': 1})\n"
    )
    options = ["--grow-at-checkpoint"] if at_checkpoint else []
    launch = started(hosts, tmp_path, *options, "--", "python", program)

    def up(attempt: int, ranks: int) -> bool:
        assert launch.poll() is None, (tmp_path / "screen.txt").read_text()
        return len(list(tmp_path.glob(f"up.{attempt}.{ranks}.*"))) == ranks

    until(lambda: up(0, 2), "both hosts")
    hosts.cut("h2")
    until(lambda: up(1, 1), "one host")
    hosts.restore("h2")
    if at_checkpoint:
        time.sleep(2 * LOOK_S)  # it is back, and no checkpoint is saved
        assert up(1, 1)
        (tmp_path / "save").touch()
    assert launch.wait(60) == 0, (tmp_path / "screen.txt").read_text()
    assert len(list(tmp_path.glob("up.2.2.*"))) == 2
    screen = (tmp_path / "screen.txt").read_text()
    assert "going on without h2: 1 of 2 devices" in screen
    assert "h2 can be used again: the ranks get 30 s to save and exit" in screen
    assert WORDS in screen
    assert "(it counts for nothing)" in screen


CONFIG: dict[str, Any] = {
    "dim": 32, "num_blocks": 2, "kv_heads": 1, "head_size": 8, "max_context": 64, "dropout_rate": 0.1, "lr": 3e-3,
    "phases": [{"steps": 120, "batch_size": 8, "seq_len": 33}, {"steps": 80, "batch_size": 4, "seq_len": 65}],
    "virtual_shards": 4, "log_every": 1, "checkpoint_every": 10, "wandb": "off",
    "eval_every": 1, "eval_iters": 2,
}  # fmt: skip


def rows(run: Path) -> list[dict[str, Any]]:
    """Those of metrics.jsonl, without what is of the time."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    names = ("step", "train_loss", "val_loss", "grad_norm", "digest")
    return [{name: json.loads(line)[name] for name in names} for line in lines]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_loses_a_host_gets_it_back_and_is_killed_twice_has_the_bits_of_one_that_was_left_alone(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    hosts = cluster(2)
    tokens = np.random.default_rng(0).integers(0, 500, 1 << 16, np.uint16)
    (tmp_path / "data").mkdir()
    Roxxel(tmp_path / "data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    for name in (*hosts.names, CONTROLLER):
        (tmp_path / "tmp" / name).mkdir(parents=True)
        if name != CONTROLLER:
            hosts.set_env(name, TMPDIR=str(tmp_path / "tmp" / name))
    train = ["train", "--config", "config.yaml", "--data_path", "data"]
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    options = ["--env", f"XLA_FLAGS={FAST}", "--max-restarts", 9]  # flags decide bits
    words = ["launch", "local", *options, "--devices-per-proc", 4, "--", *train, "--run_dir", whole]
    done = subprocess.run(
        [sys.executable, "-m", "roxxel_dist", *map(str, words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    options += ["--devices-per-proc", 1]
    launch = started(
        hosts, tmp_path, *options, "--", *train, "--run_dir", elastic, TMPDIR=str(tmp_path / "tmp" / CONTROLLER)
    )

    def passed(step: int) -> None:
        def is_there() -> bool:
            assert launch.poll() is None, (tmp_path / "screen.txt").read_text()
            return any(row["step"] >= step for row in rows(elastic))

        end = time.monotonic() + 300
        while not is_there():
            assert time.monotonic() < end, (tmp_path / "screen.txt").read_text()
            time.sleep(0.05)

    def rank_of(host: str) -> psutil.Process:
        workers = [psutil.Process(pid) for pid in hosts.processes(host)]
        return next(
            p for p in workers if "roxxel_dist.launcher.host.worker" in p.cmdline() and p.name() != "roxxel-spare"
        )

    passed(30)
    rank_of("h2").kill()
    passed(70)
    hosts.cut("h2")
    passed(140)
    rank = rank_of("h1")
    rank.suspend()  # the rest of the steps would take less time than two looks at the host
    hosts.restore("h2")
    until(lambda: "h2 can be used again" in (tmp_path / "screen.txt").read_text(), "the host")
    rank.resume()
    passed(170)
    rank_of("h1").kill()
    assert launch.wait(400) == 0, (tmp_path / "screen.txt").read_text()
    screen = (tmp_path / "screen.txt").read_text()
    assert "going on without h2: 1 of 2 devices" in screen
    assert WORDS in screen
    assert screen.count("signal SIGKILL") == 2
    assert [row["step"] for row in rows(elastic)] == list(range(1, 201))
    assert rows(elastic) == rows(whole)
    weights = [hashlib.sha256((run / "model_weights.msgpack").read_bytes()).hexdigest() for run in (elastic, whole)]
    assert weights[0] == weights[1]
