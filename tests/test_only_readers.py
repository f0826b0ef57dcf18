"""Commands that only look at a run change no file of it, not even while a save is in progress."""

import pytest

from roxxel_dist import Config, Experiment
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
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_changes_no_file_of_a_run(run, tmp_path, name):
    before = contents(run)
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in READERS[name]]
    assert main(words) == 0
    assert contents(run) == before
