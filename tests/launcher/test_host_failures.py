"""Failures of one host, and of one connection, on real hosts."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import FAST
from hosts import Cluster

from roxxel_dist.data.dataset import Roxxel

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
PORT = 7777

# Ranks do steps together; those of `BAD` crash, or hang, in each attempt in another step.
STEPS = """
import os, signal, sys, time
from roxxel_dist.process.progress import Progress
env = os.environ
attempt, rank, host = int(env["ROXXEL_ATTEMPT"]), int(env["ROXXEL_PROCESS_ID"]), os.uname().nodename
progress = Progress.from_env(rank)
open(f"up.{attempt}.{rank}.{host}", "w").close()
for step in range(1, 8):
    progress.enter(10 * attempt + step)
    time.sleep(0.3)
    if host in env["BAD"].split() and step == 4:
        if env["HOW"] == "hangs":
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, env["HOW"]))
"""


def launch(
    hosts: Cluster, folder: Path, *words: object, way: str = "ssh"
) -> tuple[subprocess.Popen[bytes], Callable[[], str]]:
    with (folder / "screen.txt").open("ab") as screen:
        started = hosts.popen(
            [sys.executable, "-m", "roxxel_dist", *hosts.launch(way), *words],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=screen, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return started, (folder / "screen.txt").read_text


@pytest.mark.parametrize("way", ["ssh", "exec"])
@pytest.mark.parametrize("how", ["SIGABRT", "SIGSEGV", "hangs"])
def test_a_spare_takes_the_place_of_a_host_whose_ranks_fail_twice(
    cluster: Callable[[int], Cluster], tmp_path: Path, how: str, way: str
) -> None:
    hosts = cluster(3)
    (tmp_path / "steps.py").write_text(STEPS)
    options: list[object] = ["--spare-hosts", 1, "--step-timeout", 5, "--warm-spares", "off"]
    options += ["--env", "BAD=h2", "--env", f"HOW={how}"]
    started, screen = launch(hosts, tmp_path, *options, "--", "python", "steps.py", way=way)
    assert started.wait(200) == 0, screen()
    assert "without host h2, whose ranks failed in 2 attempts" in screen()
    assert "going on without h2, with h3 instead" in screen()
    ran = sorted(path.name.removeprefix("up.") for path in tmp_path.glob("up.*"))
    assert ran == ["0.0.h1", "0.1.h2", "1.0.h1", "1.1.h2", "2.0.h1", "2.1.h3"]


CONFIG: dict[str, Any] = {
    "dim": 32, "num_blocks": 2, "kv_heads": 1, "head_size": 8, "max_context": 64, "dropout_rate": 0.1, "lr": 3e-3,
    "phases": [{"steps": 120, "batch_size": 4, "seq_len": 33}],
    "log_every": 1, "checkpoint_every": 20, "wandb": "off", "eval_every": 60, "eval_iters": 2,
}  # fmt: skip


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{name: json.loads(line)[name] for name in ("step", "train_loss", "grad_norm", "digest")} for line in lines]


@pytest.mark.parametrize("way", ["ssh", "exec"])
def test_a_reset_connection_between_two_ranks_is_no_error_of_the_program(
    cluster: Callable[[int], Cluster], tmp_path: Path, way: str
) -> None:
    hosts = cluster(2)
    tokens = np.random.default_rng(0).integers(0, 500, 1 << 14, np.uint16)
    (tmp_path / "data").mkdir()
    Roxxel(tmp_path / "data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    options = ["--devices-per-proc", 1, "--env", f"XLA_FLAGS={FAST}", "--port", PORT]
    train = ["--", "train", "--config", "config.yaml", "--data_path", "data", "--run_dir"]
    whole, screen = launch(hosts, tmp_path, *options, *train, "whole", way=way)
    assert whole.wait(300) == 0, screen()

    started, screen = launch(hosts, tmp_path, *options, *train, "reset", way=way)
    end = time.monotonic() + 200
    while not any(row["step"] >= 30 for row in rows(tmp_path / "reset")):
        assert started.poll() is None, screen()
        assert time.monotonic() < end, screen()
        time.sleep(0.05)
    between = f"dst {hosts.address('h2')} and not sport = :{PORT} and not dport = :{PORT}"
    hosts.run(["ss", "-K", "-t", "state", "established", between], on="h1")
    assert started.wait(300) == 0, screen()
    assert "exit code 77 (an exception of jax's runtime)" in screen()
    assert "restart 1 of 5, immediately" in screen()
    assert rows(tmp_path / "reset") == rows(tmp_path / "whole")
    weights = [(tmp_path / run / "model_weights.msgpack").read_bytes() for run in ("reset", "whole")]
    assert hashlib.sha256(weights[0]).hexdigest() == hashlib.sha256(weights[1]).hexdigest()
