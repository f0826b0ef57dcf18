"""Whatever has happened to a file of a run, a command that reads the run says so in a line, or does without."""

import os
import shutil

import pytest

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main

TINY = {
    "model": "runs:build", "dim": 16, "max_context": 16, "batch_size": 2, "max_steps": 2, "n_devices": 1,
    "checkpoint_every": 1, "log_every": 1, "eval_every": 1, "eval_iters": 1, "tokenizer_type": "char", "sample": "off",
}  # fmt: skip
FILES = (
    ".lock", "best_model_weights.msgpack", "checkpoints", "checkpoints/2", "checkpoints/2/digests.json",
    "checkpoints/2/meta.json", "config.yaml", "data", "data/shard_00000.rox", "data/tokenizer.json", "logs",
    "logs/rank-0.log", "metrics.jsonl", "model_summary.json", "model_weights.msgpack", "plots", "timeline.jsonl",
    "tokenizer.json", "training_cursor.json", "training_log.csv",
)  # fmt: skip
LOOKS = {
    "top": ["top", "RUN", "--once"],
    "report": ["report", "RUN"],
    "compare": ["compare", "RUN", "other"],
    "audit": ["audit", "RUN", "--every", "0"],  # the checks before what takes time
    "verify": ["verify", "RUN"],
    "batch": ["batch", "RUN", "--step", "1"],
    "logs": ["logs", "RUN"],
}
WORKS = {
    "eval": ["eval", "RUN"],
    "resume": ["train", "--run_dir", "RUN", "--resume", "--max_steps", "3"],
    "new": ["train", "--run_dir", "RUN", "--data_path", "text.txt"],
    "fork": ["train", "--run_dir", "OUT", "--fork", "RUN@1", "--max_steps", "2"],
    "generate": ["generate", "RUN", "--prompt", "the", "--max_new_tokens", "1"],
    "plan": ["plan", "RUN"],
    "export": ["export", "RUN", "--format", "msgpack", "--out", "OUT"],
    "audit": ["audit", "RUN"],
}
"""Commands that take a second or more."""


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


DAMAGE = {
    "a folder": lambda path, data: path.mkdir(),
    "a dangling link": lambda path, data: path.symlink_to("nowhere"),
    "a link to itself": lambda path, data: path.symlink_to(path.name),
    "empty": lambda path, data: path.write_bytes(b""),
    "half of it": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "other bytes": lambda path, data: path.write_bytes(bytes(range(256))),
    "gone": lambda path, data: None,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("the cat sat on a mat and the dog ran over a hill\n" * 40)
    Experiment(Config(**TINY)).fit(folder / "text.txt", folder / "run")
    shutil.copytree(folder / "run", folder / "other")
    return folder


def complaint(place, at, name, damage, words, capfd):
    """What is wrong with what a command says of a run with a damaged file; empty if nothing."""
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(place, at)
    file = at / "run" / name
    data = file.read_bytes() if file.is_file() else b"some bytes"
    remove(file)
    DAMAGE[damage](file, data)
    capfd.readouterr()
    words = [word.replace("RUN", "run").replace("OUT", "out") for word in words]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(at)
            code = main(words)
    except SystemExit as end:
        code = end.code
    except Exception as error:
        return f"{words[0]}, {name} {damage}: {error!r}"
    said = capfd.readouterr().err
    fine = code in (0, 1, 2) and "Traceback" not in said and "[Errno" not in said
    return "" if fine else f"{words[0]}, {name} {damage}: {code}, {said[-300:]}"


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_commands_that_look(place, tmp_path, capfd, name):
    found = [
        complaint(place, tmp_path / "p", name, damage, words, capfd) for damage in DAMAGE for words in LOOKS.values()
    ]
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", WORKS)
def test_commands_that_work(place, tmp_path, capfd, command, damage):
    found = [complaint(place, tmp_path / "p", name, damage, WORKS[command], capfd) for name in FILES]
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        pytest.param(
            *("eval", "metrics.jsonl", "metrics.jsonl: cannot be read (Is a directory): move it away"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("resume", "metrics.jsonl", "metrics.jsonl: cannot be read (Is a directory): move it away"),
            marks=pytest.mark.long,
        ),
        ("report", "metrics.jsonl", "metrics.jsonl: cannot be read (Is a directory): move it away"),
        ("resume", "training_log.csv", "training_log.csv: cannot be read (Is a directory): move it away"),
        pytest.param(
            *(
                "resume",
                "logs/rank-0.log",
                "rank-0.log: cannot be written (Is a directory): move the existing file away",
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_folder_in_the_place_of_a_log(place, tmp_path, capfd, monkeypatch, command, name, message):
    shutil.copytree(place, tmp_path / "p")
    monkeypatch.chdir(tmp_path / "p")
    (tmp_path / "p/run" / name).unlink()
    (tmp_path / "p/run" / name).mkdir()
    words = [word.replace("RUN", "run") for word in {**LOOKS, **WORKS}[command]]
    assert main(words) == 2
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said
