"""The goodput of a real training whose ranks are killed, beside a simulation with the times that it measured."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from statistics import mean

import pytest
from commands import environment
from corpora import write_corpus

from roxxel_dist.launcher.fleet.simulation import ASK_S, COPY_SHARE, Happening, Simulation, Work
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.train.log.timeline import read_timeline

KILLS, END_S = (40.0, 70.0, 100.0), 130.0
"""Seconds after the launch, of which a start takes up to thirty on a busy machine."""
EVERY = 200
POINTS = 0.03
CONFIG = f"""
dim: 32
num_blocks: 2
kv_heads: 1
head_size: 8
max_context: 64
phases: [{{steps: 1000000, batch_size: 12, seq_len: 33}}]
grad_accum: 1
lr: 3.0e-3
log_every: 10
eval_every: 1000000
eval_iters: 2
checkpoint_every: {EVERY}
max_to_keep: 3
"""


def trained(folder: Path) -> tuple[Path, list[float], float]:
    """A run of two ranks, of which the last is killed at `KILLS`: its folder, and when it was hit and stopped, in
    seconds since 1970; the first is the begin."""
    write_corpus(folder)
    (folder / "config.yaml").write_text(CONFIG)
    words = ["launch", "local", "--nprocs", "2", "--devices-per-proc", "1", "--max-restarts", "9", "--", "train"]
    words += ["--config", "config.yaml", "--data_path", "corpus_*.rox", "--run_dir", "run"]
    moments = [time.time()]
    with (folder / "screen.txt").open("w") as screen:
        job = subprocess.Popen(
            [sys.executable, "-m", "roxxel_dist", *words],
            cwd=folder,
            env=environment(JAX_PLATFORMS="cpu", XDG_STATE_HOME=str(folder / "state")),
            stdout=screen,
            stderr=subprocess.STDOUT,
        )
    try:
        for kill in KILLS:
            time.sleep(max(0.0, moments[0] + kill - time.time()))
            ranks = json.loads((folder / "run" / "logs" / "launcher.json").read_text())["ranks"]
            os.kill(ranks[-1]["pid"], signal.SIGKILL)
            moments.append(time.time())
        time.sleep(max(0.0, moments[0] + END_S - time.time()))
        end = time.time()
    finally:
        job.send_signal(signal.SIGTERM)
        assert job.wait(120) == 42, (folder / "screen.txt").read_text()
    return folder / "run", moments, end


@pytest.mark.long
def test_the_goodput_of_a_run_is_that_of_a_simulation_of_it(tmp_path: Path) -> None:
    """Steps, saves and starts take what they took on average; what is lost follows from the rules alone."""
    run, (begun, *hits), end = trained(tmp_path)
    rows = [row for row in read_timeline(run) if row["begin"] < end]
    of_steps = [row for row in rows if row.get("steps")]
    step_s = sum(row["seconds"] for row in of_steps) / sum(row["steps"][1] - row["steps"][0] + 1 for row in of_steps)
    firsts = [next((row["begin"] for row in each if row.get("steps")), end) for _, each in groupby(rows, _attempt)]
    starts = [min(first for first in firsts if first > moment) - moment for moment in (begun, *hits)]
    measured = max(row["steps"][1] for row in of_steps) * step_s / (end - begun)
    saves = [row["seconds"] for row in rows if row["activity"] == "save"]
    work = Work(
        step_s=step_s / (1 + COPY_SHARE),  # they were copied meanwhile
        save_s=mean(saves) if saves else 0.0,
        start_s=mean(starts) - ASK_S,
        checkpoint_every=EVERY,
        copy_every=10,
    )
    job = JobSpec(command=("true",), nprocs=2, max_restarts=9, run_id="r", log_dir=tmp_path)
    story = [Happening(at=hit - begun, kind="crash", hosts=("h1",)) for hit in hits]
    outcome = Simulation(job, ["h0", "h1"], work, story).run(end - begun)
    print(f"goodput {measured:.1%} measured, {outcome.goodput:.1%} simulated; starts {starts}; lost {outcome.lost}")
    assert outcome.goodput + outcome.lost["copies"] == pytest.approx(measured, abs=POINTS)


def _attempt(row: dict[str, int]) -> int:
    return row["attempt"]
