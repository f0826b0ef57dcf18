"""`--name`, `--notes` and `--tags`: where people look for a run, and nothing else."""

import json
import re
from pathlib import Path

import pytest
import runs
import warm
from commands import environment

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main

TINY = {
    "model": "runs:build", "dim": 16, "max_context": 16, "n_devices": 1, "eval_iters": 1, "tokenizer_type": "byte",
    "phases": [{"steps": 4, "batch_size": 8, "seq_len": 17}], "log_every": 1, "checkpoint_every": 2, "sample": "off",
}  # fmt: skip
PATIENT = """
import json, sys
from roxxel_dist.cli import main
from roxxel_dist.train.log.base import LogQueue
sys.path.append(sys.argv[2])
LogQueue.close.__defaults__ = (240.0,)
sys.exit(main(json.loads(sys.argv[1])))
"""
"""A command that waits for W&B's client as long as a busy machine needs to start it."""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A run with a name, which was resumed with another one."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    about = {"name": "the baseline", "notes": "before the change", "tags": ["small", "cpu"]}
    Experiment(Config(**TINY, **about, max_steps=2)).fit(folder / "text.txt", folder / "runs" / "one")
    # Else the client gives its service 30 s, and W&B is off after that, with a line and without a run.
    limits = {"WANDB_INIT_TIMEOUT": "120", "WANDB_FINISH_TIMEOUT": "120", "WANDB__SERVICE_WAIT": "120"}
    words = ("--run_dir", "runs/one", "--resume", "--name", "renamed", "--max_steps", "4", "--wandb", "offline")
    # A process of its own: W&B's client leaves the address of its service in the environment.
    given = [json.dumps(["train", *words]), str(Path(runs.__file__).parent)]
    done = warm.run(given, folder, environment(**limits), source=PATIENT)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "W&B is off" not in said, said
    assert "still busy" not in said, said
    Experiment(Config(**TINY)).fit(folder / "text.txt", folder / "runs" / "two")
    return folder


def test_top_and_report_show_them(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    assert main(["top", "--once", "runs/one"]) == 0
    assert re.search(r"runs/one  finished  renamed #small #cpu", capsys.readouterr().out)
    assert main(["top", "--json", "runs/one"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["title"], found["tags"]) == ("renamed", ["small", "cpu"])
    assert main(["report", "runs/one", "runs/two", "--json"]) == 0
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert differences["name"] == ["renamed", None]
    assert differences["notes"] == ["before the change", None]


def test_wandb_gets_them(work):
    (log,) = (work / "runs" / "one" / "wandb").glob("offline-run-*/*.wandb")
    assert all(words in log.read_bytes() for words in (b"renamed", b"before the change", b"small"))


def test_they_change_no_number(work, monkeypatch):
    monkeypatch.chdir(work)
    assert main(["compare", "runs/one", "runs/two"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", " "], "name is ' ': it must be a text"),
        (["--tags", "small", ""], "tags is ['small', '']: it must be a list of words of 1 to 64 characters"),
        (["--tags", "x" * 65], "of 1 to 64 characters"),
        (["--config", "number.yaml"], "tags is [1]"),
        (["--config", "word.yaml"], "tags is 'small'"),
    ],
)
def test_what_is_none(work, words, message, monkeypatch, capsys):
    monkeypatch.chdir(work)
    (work / "number.yaml").write_text("tags: [1]\n")
    (work / "word.yaml").write_text("tags: small\n")
    assert main(["train", "--data_path", "text.txt", *words]) == 2
    assert message in capsys.readouterr().err
