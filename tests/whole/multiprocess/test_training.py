"""The main job with real processes: the same data and losses on any topology, and after any death."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import gone, launched, losses, make_corpus, ranks_of, rows, run, start, wait_for
from servers import free_port

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.run.components import build_components
from roxxel_dist.settings.config import Config

pytestmark = pytest.mark.xdist_group("training")  # one worker: the undisturbed run is made once
LONG = pytest.mark.long
TOPOLOGIES = [(1, 4), (2, 2), (4, 1)]
STEPS = 42
SUPPORT = str(Path(__file__).parents[2] / "support")


def prepare(folder, **fields):
    """A corpus, and the config that all train with."""
    make_corpus(folder)
    config = folder / "tiny.yaml"
    # Enough steps that a request to stop comes before the last one, and two phases of one program.
    phases = [{"steps": steps, "batch_size": 8, "seq_len": 33} for steps in (12, 30)]
    rarely = {"checkpoint_every": 10, "eval_every": 14}
    small = yaml.safe_load(config.read_text()) | {"num_blocks": 1, "phases": phases, "sample": "off"} | rarely
    config.write_text(yaml.safe_dump(small | fields))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a corpus, and the undisturbed run on 4 devices of one process in `whole`."""
    folder = tmp_path_factory.mktemp("work")
    prepare(folder)
    result = run(*launched(1, 4, "whole"), cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def trained_alone(folder, *words):
    """Train as the one rank of a job, with 4 devices: its devices reduce as those of several ranks do."""
    job = {"COORDINATOR": f"127.0.0.1:{free_port()}", "NUM_PROCESSES": "1", "PROCESS_ID": "0", "LOCAL_DEVICES": "4"}
    result = run("train", *words, cwd=folder, **{f"ROXXEL_{name}": value for name, value in job.items()})
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Such a folder for a model that compiles soon, and no launcher for the undisturbed run."""
    folder = tmp_path_factory.mktemp("small")
    prepare(folder, model="bigram:build")
    (folder / "bigram.py").write_text(f"import sys\nsys.path.append({SUPPORT!r})\nfrom runs import build as build\n")
    trained_alone(folder, "--config", "tiny.yaml", "--data_path", "data", "--run_dir", "whole")
    return folder


@pytest.mark.timeout(900)  # three trainings, one after the other, on a machine that may be busy
def test_killed_stopped_and_forked_on_other_processes_it_is_the_same_run(small):
    """On 2 processes kill -9 of a rank, after which the launcher starts again, and Ctrl-C; then a fork on one."""
    work, torn, told = small, small / "torn", small / "started.log"
    launcher = start(*launched(2, 2, "torn", restarts=1), cwd=work)
    try:
        wait_for(lambda: max(rows(torn), default=0) >= 2, what="step 2")
        ranks = ranks_of(launcher)
        os.kill(ranks[1], signal.SIGKILL)
        wait_for(lambda: "restart 1 of 1" in told.read_text(), what="the restart")
        done = max(rows(torn))
        wait_for(lambda: max(rows(torn)) > done, what=f"step {done + 1}")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 42, told.read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert "rank 1 failed first: signal SIGKILL" in told.read_text()
    assert "resuming after step" in told.read_text()
    saved = max(int(path.name) for path in (torn / "checkpoints").iterdir())
    for rank in (0, 1):
        assert f"rank {rank} of 2: 2 of 4 cpu devices" in (torn / "logs" / f"rank-{rank}.log").read_text()
    trained_alone(work, "--fork", f"torn@{saved}", "--run_dir", "forked")
    assert min(losses(work / "forked")) == saved + 1
    assert losses(torn) | losses(work / "forked") == losses(work / "whole")
    assert len(losses(work / "whole")) == STEPS


@LONG
def test_every_topology_reads_the_same_tokens(work):
    script = os.path.join(os.path.dirname(__file__), "batch_hashes.py")
    seen = []
    for processes, devices in TOPOLOGIES:
        words = ["--nprocs", processes, "--devices-per-proc", devices, "--", "python", script, "data"]
        result = run("launch", "local", *words, cwd=work)
        assert result.returncode == 0, result.stdout + result.stderr
        seen.append([line.split("hash ")[1] for line in result.stdout.splitlines() if "hash " in line])
    assert len(seen[0]) == STEPS
    assert len(set(seen[0])) == STEPS
    assert seen[0] == seen[1] == seen[2]


@LONG
def test_every_topology_has_the_same_losses_to_the_bit(work):
    """With the same number of devices, whatever processes they belong to."""
    for processes, devices in ((2, 2), (4, 1)):
        run_dir = f"topology{processes}"
        result = run(*launched(processes, devices, run_dir), cwd=work)
        assert result.returncode == 0, result.stdout + result.stderr
        assert losses(work / run_dir) == losses(work / "whole")
    assert len(losses(work / "whole")) == STEPS


@LONG
def test_cut_parameters_train_alike_on_any_processes(tmp_path):
    """Made from a callable or a module, on 1 x 4 or 2 x 2 devices: the same losses and parameters to the bit."""
    script = os.path.join(os.path.dirname(__file__), "cut_training.py")
    seen = []
    for processes, devices in TOPOLOGIES[:2]:
        words = ["--nprocs", processes, "--devices-per-proc", devices, "--", "python", script]
        result = run("launch", "local", *words, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        lines = [line.split("trained ")[1] for line in result.stdout.splitlines() if "trained " in line]
        seen += [line.split(": ", 1) for line in lines]
    assert [how for how, _ in seen] == ["callable", "module"] * 2
    assert len({told for _, told in seen}) == 1, seen
    assert seen[0][1].startswith("['embedding.embedding']")


@LONG
def test_a_rank_that_stays_is_named(work):
    """Rank 0 has ended, and waits for rank 1 in jax's shutdown: the launcher's limit holds there too."""
    (work / "stays.py").write_text("import jax, time\nif jax.process_index() == 1:\n    time.sleep(1000)\n")
    words = ["--nprocs", 2, "--devices-per-proc", 1, "--exit-timeout", 2, "--", "python", "stays.py"]
    result = run("launch", "local", *words, cwd=work, timeout=60)
    assert result.returncode == 124, result.stderr
    assert "rank 0 had ended, but rank 1 still ran 2 s later and was killed" in result.stderr


@LONG
@pytest.mark.parametrize("whom", ["rank 0", "rank 1", "every rank", "launcher"])
def test_killed_and_started_again_it_is_the_same_run(work, whom):
    """kill -9 at a random step, twice; then on to the end. Every loss is that of the run that never stopped."""
    chosen = random.Random()
    run_dir = f"killed-{whom.replace(' ', '')}"
    for death in range(2):
        launcher = start(*launched(2, 2, run_dir, "--resume"), cwd=work)
        try:
            begun = max(rows(work / run_dir), default=0)
            target = min(STEPS - 2, begun + chosen.randint(1, 8))
            wait_for(lambda target=target: max(rows(work / run_dir), default=0) >= target, what=f"step {target}")
            ranks = ranks_of(launcher)
            doomed = {"launcher": [launcher.pid], "every rank": [*ranks.values()]}
            for pid in doomed.get(whom) or [ranks[int(whom[-1])]]:
                os.kill(pid, signal.SIGKILL)
            code = launcher.wait(60)
        finally:
            launcher.kill()
            launcher.wait()
        assert code == (-signal.SIGKILL if whom == "launcher" else 128 + signal.SIGKILL), f"death {death} at {target}"
        wait_for(lambda ranks=ranks: all(gone(pid) for pid in ranks.values()), limit_s=20, what="the end of all ranks")
    result = run(*launched(2, 2, run_dir, "--resume"), cwd=work)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step" in result.stdout
    assert losses(work / run_dir) == losses(work / "whole")


@LONG
def test_asked_to_stop_it_saves_and_goes_on_later(work):
    launcher = start(*launched(2, 2, "stopped"), cwd=work)
    try:
        wait_for(lambda: max(rows(work / "stopped"), default=0) >= 3, what="step 3")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 42
    finally:
        launcher.kill()
        launcher.wait()
    saved = max(int(path.name) for path in (work / "stopped" / "checkpoints").iterdir())
    result = run(*launched(2, 2, "stopped", "--resume"), cwd=work)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"resuming after step {saved} of {STEPS}" in result.stdout
    assert losses(work / "stopped") == losses(work / "whole")


@LONG
def test_other_processes_go_on_where_these_stopped(work):
    """A run begun on 2 x 2 ends on 4 x 1: the same devices, so the same bits."""
    first = run(*launched(2, 2, "moved", "--max_steps", 10), cwd=work)
    second = run(*launched(4, 1, "moved", "--resume", "--max_steps", STEPS), cwd=work)
    assert (first.returncode, second.returncode) == (0, 0), second.stdout + second.stderr
    expected = losses(work / "whole")
    got = losses(work / "moved")
    assert got.pop(10)[0] == expected.pop(10)[0]  # the last step of the first part was validated too
    assert got == expected


@LONG
def test_a_finished_run_says_so(work):
    before = (work / "whole" / "metrics.jsonl").read_bytes()
    result = run(*launched(2, 2, "whole", "--resume"), cwd=work)
    assert result.returncode == 0
    assert f"this run is finished: its last step, {STEPS}, is saved" in result.stdout
    assert (work / "whole" / "metrics.jsonl").read_bytes() == before


def test_what_a_run_leaves(small):
    whole = small / "whole"
    names = {path.name for path in whole.iterdir()}
    assert {"config.yaml", "tokenizer.json", "model_summary.json", "training_log.csv", "metrics.jsonl"} <= names
    assert (whole / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    steps = losses(whole)
    assert steps[1][1] is not None
    assert steps[STEPS][1] is not None
    assert steps[STEPS][1] < steps[1][1]
    assert {1, STEPS} <= {int(path.name) for path in (whole / "checkpoints").iterdir()}


@LONG
def test_it_generates(work):
    words = ["generate", "whole", "--prompt", "import ", "--max_new_tokens", 12]
    results = [run(*words, cwd=work), run(*words, cwd=work)]
    assert [r.returncode for r in results] == [0, 0]
    assert results[0].stdout.startswith("import ")
    assert results[0].stdout == results[1].stdout


@LONG
def test_damage_that_one_rank_reads_ends_the_job_by_name(tmp_path):
    """The other rank neither hangs nor writes a row or a checkpoint of that step."""
    make_corpus(tmp_path)
    config = Config.from_yaml(tmp_path / "tiny.yaml")
    config.val_fraction = 0.0
    with Roxxel(tmp_path / "data") as source, Roxxel(tmp_path / "small" / "a_*.rox") as data:
        data.write(source, block_size=128, separator=source.shards[0].metadata.separator, vocab_size=source.vocab_size)
        plan, seen = build_components(config, data).curriculum.plan(config.seed), set()
        for step in range(2, 12):
            seen |= {int(token) // 64 + more for token in plan.rows(step - 1).offset for more in (0, 1)}
            first, second = np.split(plan.rows(step).offset, 2)  # what the ranks read
            seen |= {int(token) // 64 + more for token in first for more in (0, 1)}
            if alone := [int(token) for token in second if int(token) // 64 not in seen]:
                break
        with data.shards[0].path.open("r+b") as file:
            file.seek(data.shards[0].offset + alone[0] * data.dtype.itemsize)
            file.write(np.array(1, data.dtype).tobytes())
    words = [word if word != "data" else "small" for word in launched(2, 1, "stops", "--val_fraction", 0.0)]
    result = run(*words, cwd=tmp_path)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert f"step {step + 1} cannot be done: data 'self'" in said, said
    assert sorted(rows(tmp_path / "stops")) == list(range(1, step + 1))
    kept = [int(path.name) for path in (tmp_path / "stops" / "checkpoints").iterdir() if path.name.isdigit()]
    assert all(number <= step for number in kept)
