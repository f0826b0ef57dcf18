"""Which folders a run may begin in, and which files of others in them stay as they are."""

import copy
import os
import pickle
import shutil
from pathlib import Path

import pytest
from runs import make, saved, train

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main
from roxxel_dist.place.directory import RunDirectory, RunResult, why_no_run
from roxxel_dist.process.exit_codes import UserError

TINY = {
    "model": "runs:build", "dim": 16, "max_context": 16, "batch_size": 2, "max_steps": 1,
    "tokenizer_type": "char", "sample": "off", "n_devices": 1,
}  # fmt: skip
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


def contents(folder):
    return {path: (path.is_dir() or path.read_bytes()) for path in folder.rglob("*")}


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of the user\n")
    return folder


FOREIGN = {
    "shards": (["shard_00000.rox", "tokenizer.json", "build.json"], r"holds a data set \(shard_00000.rox\)"),
    "shards that were locked": ([".lock", "shard_00000.rox"], r"holds a data set \(shard_00000.rox\)"),
    "two splits": (
        ["train/shard_00000.rox", "val/shard_00000.rox"],
        r"holds a data set \(train/shard_00000.rox, val/shard",
    ),
    "tokens of nanoGPT": (["train.bin", "val.bin", "meta.pkl"], r"holds a data set \(train.bin, val.bin\)"),
    "tokenizer": (["tokenizer.json"], r"has tokenizer.json, which no run made and a run would replace"),
    "config": (["config.yaml"], r"has config.yaml, which no run made"),
    "config that was locked": ([".lock", "config.yaml"], r"has config.yaml, which no run made"),
    "rows": (["metrics.jsonl"], r"has metrics.jsonl, which no run made"),
    "several": (["training_log.csv", "model_summary.json"], r"has model_summary.json, training_log.csv, which"),
    "weights": (["model_weights.msgpack"], r"has model_weights.msgpack, which no run made"),
    "picture": (["plots/loss.png"], r"has plots/loss.png, which no run made"),
    "checkpoints": (["checkpoints/7/model.pt"], r"has checkpoints/7, which no run made"),
    "a save of another program": (
        ["checkpoints/7.orbax-checkpoint-tmp-1/model.pt"],
        r"has checkpoints/7.orbax-checkpoint-tmp-1, which no run made",
    ),
    "data": (["data/shard_00000.rox"], r"has data/shard_00000.rox, which no run made"),
    "tokenizer of data": (["data/tokenizer.json"], r"has data/tokenizer.json, which no run made"),
    "study": (["study.yaml", "journal.jsonl"], r"holds a study \(study.yaml\)"),
}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on a mat and the dog ran over a hill\n" * 40)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("name", FOREIGN)
def test_a_run_never_begins_over_files_that_no_run_made(tmp_path, text, corpus, capsys, name):
    files, message = FOREIGN[name]
    folder = fill(tmp_path / "project", *files)
    before = contents(folder)
    beginnings = {
        "fit": lambda: Experiment(Config(**TINY)).fit(text, folder),
        "resume": lambda: Experiment(Config(**TINY)).fit(text, folder, resume=True),
        "Trainer": lambda: make(corpus, folder),
        "claim": lambda: RunDirectory(folder).claim(resume=False),
    }
    for begin in beginnings.values():
        with pytest.raises(UserError, match=f"run_dir is .*project, which {message}.*: name another folder, such as"):
            begin()
        assert contents(folder) == before
    assert main(["train", "--data_path", str(text), "--run_dir", str(folder), *FLAGS]) == 2
    said = capsys.readouterr().err
    assert f"run_dir is {folder}" in said
    assert "resume" not in said
    assert contents(folder) == before
    assert "name another folder" in why_no_run(str(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "which has an empty config.yaml: copy the whole run again"),
        ("dim: 8\nrecord:\n  format: 1\n", "which has config.yaml, metrics.jsonl of a run and no step of it: copy"),
    ],
)
def test_half_a_copy_of_a_run_is_no_run(tmp_path, monkeypatch, capsys, config, message):
    folder = fill(tmp_path / "half", "metrics.jsonl")
    (folder / "config.yaml").write_text(config)
    fill(tmp_path / "runs/first", "config.yaml")
    monkeypatch.chdir(tmp_path)
    before = contents(folder)
    assert main(["train", "--run_dir", "half", "--resume"]) == 2
    said = capsys.readouterr().err
    assert f"run_dir is half, {message}" in said
    assert "name another folder, such as runs/run_2" in said
    for words in [
        "report half",
        "eval half",
        "generate half",
        "batch half --step 1",
        "top --once half",
        "plan --run half",
    ]:
        if not config and words.split()[0] != "plan":
            assert main(words.split()) == 2
            assert "half/config.yaml is empty: copy it again" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("config", "message"), [("", "is empty"), ("dim: 8\n", "does not end with the record of a run")]
)
def test_a_run_does_not_go_on_with_a_part_of_its_config(tmp_path, monkeypatch, capsys, config, message):
    folder = fill(tmp_path / "half", "metrics.jsonl")
    (folder / "training_cursor.json").write_text('{"step": 3, "finished": false}')
    (folder / "config.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    before = contents(folder)
    assert main(["train", "--run_dir", "half", "--resume"]) == 2
    assert f"half/config.yaml {message}: copy it again" in capsys.readouterr().err
    if config:
        assert main(["train", "--fork", "half@2", "--run_dir", "new"]) == 2
        assert f"half/config.yaml {message}: copy it again" in capsys.readouterr().err
    assert contents(folder) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", ["/", "home", "a link to it"])
def test_neither_the_root_nor_the_home_is_a_run(tmp_path, text, monkeypatch, place):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "link").symlink_to(home)
    run = {"/": "/", "home": home, "a link to it": tmp_path / "link"}[place]
    before = os.listdir(run)
    with pytest.raises(
        UserError, match=r"run_dir is .*, (the root|your home) folder: name a folder for this run alone"
    ):
        Experiment(Config(**TINY)).fit(text, run)
    assert os.listdir(run) == before


UNRELATED = [
    ".git/HEAD",
    "notes.md",
    "train.py",
    "logs/mine.log",
    "checkpoints/model.pt",
    "data/notes.csv",
    ".draft.tmp",
    ".config.yaml.tmp",
    "plots/mine.png",
]


def test_a_run_beside_other_files_leaves_them_as_they_are(tmp_path, text):
    folder = fill(tmp_path / "project", *UNRELATED)
    left = fill(folder, ".metrics.jsonl.0123abcd.tmp", ".config.yaml.89abcdef.tmp")  # of writers that were killed
    before = {name: (folder / name).read_text() for name in UNRELATED}
    Experiment(Config(**TINY)).fit(text, folder)
    assert {name: (folder / name).read_text() for name in UNRELATED} == before
    assert not list(left.glob(".*.????????.tmp"))
    Experiment(Config(max_steps=2)).fit(None, folder, resume=True)
    assert saved(folder)[-1] == 2
    assert {name: (folder / name).read_text() for name in UNRELATED} == before
    with pytest.raises(UserError, match="holds a run already: continue it with resume=True"):
        Experiment(Config(**TINY)).fit(text, folder)


KILLED = {
    "after its lock": [".lock"],
    "while it made its data": [".lock", "data/shard_00000.rox.part", "checkpoints/"],
    "before its config": [".lock", "checkpoints/", "timeline.jsonl", "metrics.jsonl", "logs/rank-0.log"],
    "under a launcher, before its lock": ["logs/rank-0.log", "logs/launcher.log"],
}


@pytest.mark.parametrize("when", KILLED)
def test_a_run_that_was_killed_at_its_start_begins_again(tmp_path, when):
    for name in KILLED[when]:
        path = tmp_path / "run" / name
        path.mkdir(parents=True) if name.endswith("/") else fill(tmp_path / "run", name)
    RunDirectory(tmp_path / "run").claim(resume=True)


def test_files_of_others_in_a_run_do_not_end_it(corpus, run):
    """A real run, in which the user has kept shards, notes and a tokenizer."""
    fill(run, "more.rox", "embeddings.npy", "tokenizer.json", "notes.md")
    (run / ".lock").unlink()  # a copy that has no hidden files
    train(corpus, run, max_to_keep=None)
    assert (run / "more.rox").exists()


def test_a_run_of_a_trainer_is_no_place_for_a_new_run(text, run):
    with pytest.raises(UserError, match="holds a run already"):
        Experiment(Config(**TINY)).fit(text, run)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_of_a_result_keeps_how_the_training_ended(copied):
    result = copied(RunResult.of_step(Path("runs/first"), 7, stopped=True))
    assert (type(result), result, result.step, result.stopped) == (RunResult, Path("runs/first"), 7, True)


def test_a_fork_never_begins_over_files_that_no_run_made(tmp_path, text):
    Experiment(Config(**TINY)).fit(text, tmp_path / "first")
    folder = fill(tmp_path / "project", "tokenizer.json")
    with pytest.raises(UserError, match=r"has tokenizer.json, which no run made"):
        Experiment(Config()).fit(None, folder, fork=f"{tmp_path / 'first'}@1")
    shutil.rmtree(folder)
    Experiment(Config(max_steps=2)).fit(None, folder, fork=f"{tmp_path / 'first'}@1")
    assert saved(folder)[-1] == 2
