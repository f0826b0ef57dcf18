"""Commands that only look at a run change no file of it, not even while a save is in progress."""

import shlex
import subprocess

import pytest
from commands import command, environment, start, wait_for

from roxxel_dist import Config, Experiment, read_run
from roxxel_dist.cli import main

TINY = {
    "dim": 16, "num_blocks": 1, "head_size": 8, "kv_heads": 1, "max_context": 16, "batch_size": 2, "max_steps": 2,
    "checkpoint_every": 1, "log_every": 1, "tokenizer_type": "char", "sample": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, and the temporary folder of a save that is in progress."""
    folder = tmp_path_factory.mktemp("readers")
    (folder / "text.txt").write_text("the cat sat on a mat and the dog ran over a hill\n" * 40)
    Experiment(Config(**TINY)).fit(folder / "text.txt", folder / "run")
    (folder / "run" / "checkpoints" / "3.orbax-checkpoint-tmp-1" / "state").mkdir(parents=True)
    return folder / "run"


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


READERS = {
    "eval": ["eval", "RUN"],
    "generate": ["generate", "RUN", "--prompt", "the", "--max_new_tokens", "2"],
    "report": ["report", "RUN", "--out", "OUT"],
    "top": ["top", "RUN", "--once"],
    "verify": ["verify", "RUN"],
    "audit": ["audit", "RUN"],
    "compare": ["compare", "RUN", "RUN"],
    "export": ["export", "RUN", "--format", "msgpack", "--out", "OUT"],
    "batch": ["batch", "RUN", "--step", "1"],
    "data info": ["data", "info", "RUN/data"],
    "plan": ["plan", "RUN"],
    "verify --deep": ["verify", "RUN", "--deep"],
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_changes_no_file_of_a_run(run, tmp_path, name):
    before = contents(run)
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in READERS[name]]
    assert main(words) == 0
    assert contents(run) == before


def test_read_run_changes_no_file_of_a_run(run):
    before = contents(run)
    assert read_run(run).metrics
    assert contents(run) == before


@pytest.mark.parametrize("name", ["eval", "generate", "report", "plan", "batch", "export"])
def test_a_reader_works_where_it_may_not_write(run, tmp_path, name):
    """The run is on a mount that is read-only, in a namespace of its own."""
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in READERS[name]]
    mount = f"mount --bind {run} {run} && mount -o remount,bind,ro {run} && ! touch {run}/x 2>/dev/null"
    line = f"{mount} && exec {shlex.join(command(*words))}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", line], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_save_beside_readers_is_complete(run, tmp_path):
    """A real training that saves at each step, while commands read its run."""
    folder = tmp_path / "live"
    words = ["--data_path", run / "data", "--run_dir", folder, "--checkpoint_every", 1, "--max_to_keep", 2]
    shape = ["--dim", 16, "--num_blocks", 1, "--head_size", 8, "--kv_heads", 1, "--max_context", 16, "--batch_size", 2]
    training = start("train", *words, *shape, "--max_steps", 40, "--sample", "off", cwd=tmp_path)
    try:
        wait_for(lambda: len(list(folder.glob("checkpoints/[0-9]*"))) > 0)
        while training.poll() is None:
            assert main(["report", str(folder)]) == 0
            assert main(["verify", str(folder)]) in (0, 1)  # 1: what it looks at is deleted meanwhile
            assert main(["top", str(folder), "--once"]) == 0
    finally:
        training.kill()
    assert training.wait(60) == 0, (tmp_path / "started.log").read_text()[-2000:]
    assert main(["verify", str(folder)]) == 0
    assert sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*")) == ["39", "40"]
