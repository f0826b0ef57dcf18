"""What `train` would refuse of its data sets, blends and phases is refused by everything that shows a run before it."""

import numpy as np
import pytest

from roxxel_dist import Roxxel
from roxxel_dist.cli import main

TINY = "dim: 16\nnum_blocks: 1\nhead_size: 8\nkv_heads: 1\nmax_context: 16\nsample: 'off'\n"
PHASE = "{steps: 2, batch_size: 8, seq_len: 17"
SHOWN = {
    "train": ["train", "--run_dir", "new"],
    "plan": ["plan"],
    "launch": ["launch", "local", "--nprocs", "1", "--dry-run", "--", "train", "--run_dir", "new"],
    "sweep": ["sweep", "--dry_run", "--sweep_config", "grid.yaml", "--study", "st"],
}
CASES = {
    "a data set whose shards are all shorter than a row": (
        f"datasets: {{self: d, c: short}}\nphases: [{PHASE}, weights: {{self: 0.5, c: 0.5}}}}]\n",
        "does not hold one such row",
    ),
    "a data set without a row for a batch": (
        "datasets: {self: few}\nphases: [{steps: 1, batch_size: 64, seq_len: 17}]\n",
        "does not fit",
    ),
    "a data set that is not there": ("datasets: {self: d, c: nowhere}\n", "there are no shards"),
    "a validation that is not there": ("datasets: {self: d}\nvalidation: {v: nowhere}\n", "there are no shards"),
    "another tokenizer": (
        f"datasets: {{self: d, c: other}}\nphases: [{PHASE}, weights: {{self: 0.5, c: 0.5}}}}]\n",
        "was made with tokenizer",
    ),
    "a larger vocabulary": (
        f"datasets: {{self: d, c: large}}\nphases: [{PHASE}, weights: {{self: 0.5, c: 0.5}}}}]\n",
        "the data 'c' has 900 tokens",
    ),
    "a weight of no data set": (f"datasets: {{self: d}}\nphases: [{PHASE}, weights: {{x: 1}}}}]\n", "x"),
    "a share that is too small": (
        f"datasets: {{self: d, c: d}}\nphases: [{PHASE}, weights: {{self: 1, c: 0.000001}}}}]\n",
        "this share must be 0, or at least",
    ),
    "a row longer than the context": (
        "datasets: {self: d}\nphases: [{steps: 1, batch_size: 8, seq_len: 99}]\n",
        "use a larger max_context or a smaller seq_len",
    ),
    "epochs of less than a step": (
        "datasets: {self: d}\nphases: [{epochs: 0.0001, batch_size: 8, seq_len: 17}]\n",
        "less than one step",
    ),
    "no data at all": ("seed: 1\n", "no data: name a text file"),
    "data that is not there": ("datasets: {self: nowhere}\n", "no such file or folder"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.txt").write_text("the cat sat on a mat and the dog ran \n" * 200)
    (tmp_path / "o.txt").write_text("other letters: zżxw QUICK \n" * 200)
    (tmp_path / "grid.yaml").write_text(
        "method: grid\nmetric: {name: val_loss, goal: minimize}\nparameters: {lr: {values: [0.001]}}\n"
    )
    for name, text in (("d", "c.txt"), ("other", "o.txt")):
        assert main(["data", "build", text, "--out", name, "--tokenizer", "char"]) == 0
    Roxxel(tmp_path / "few").write([np.arange(40, dtype="u1") % 9], vocab_size=9)
    Roxxel(tmp_path / "large").write([np.arange(4000, dtype="u2") % 900], vocab_size=900)
    Roxxel(tmp_path / "short").write([np.arange(12, dtype="u1") % 9] * 40, vocab_size=9, max_shard_bytes=8)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_everywhere(case, here, capfd):
    config, message = CASES[case]
    (here / "run.yaml").write_text(TINY + config)
    for name, words in SHOWN.items():
        capfd.readouterr()
        assert main([*words, "--config", "run.yaml"]) == 2, name
        said = capfd.readouterr().err
        assert message in said, name
        assert "Traceback" not in said
        assert not (here / "new").exists()
        assert not (here / "st").exists()


def test_what_can_be_trained_is_shown(here):
    (here / "run.yaml").write_text(
        TINY + f"datasets: {{self: d, c: d}}\nphases: [{PHASE}, weights: {{self: 1, c: 1}}}}]"
    )
    for name in ("plan", "launch", "sweep"):
        assert main([*SHOWN[name], "--config", "run.yaml"]) == 0
    (here / "run.yaml").write_text(TINY)
    for name in ("launch", "sweep"):  # text: not read
        assert main([*SHOWN[name], "--config", "run.yaml", "--data_path", "c.txt"]) == 0


RUN = ["--config", "run.yaml", "--data_path", "d", "--max_steps", "1", "--run_dir", "r"]


@pytest.mark.long
def test_a_plan_of_a_run_refuses_what_its_resume_refuses(here, capfd):
    (here / "run.yaml").write_text(TINY + "batch_size: 8\n")
    assert main(["train", *RUN]) == 0
    assert main(["plan", "r"]) == 0
    for change, message in {"--dim 32": "dim is 32", "--seed 5": "seed is 5", "--tie_embeddings False": "tie"}.items():
        for words in (["plan", "r"], ["train", "--run_dir", "r", "--resume", "--max_steps", "2"]):
            capfd.readouterr()
            assert main([*words, *change.split()]) == 2, words
            assert message in capfd.readouterr().err
    assert main(["launch", "local", "--nprocs", "1", "--dry-run", "--", "train", "--run_dir", "r", "--resume"]) == 0
