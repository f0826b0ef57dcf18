"""`data append`: more text behind a corpus, at once or not at all, and a run that goes on with it."""

import json
import os

import numpy as np
import pytest
from kept_steps import kept, no_curve  # noqa: F401  (of the tests here)

from roxxel_dist import Config, Experiment, Roxxel
from roxxel_dist.cli import main
from roxxel_dist.corpus.append import append
from roxxel_dist.corpus.build import build

SMALL = {
    "model": "runs:build", "dim": 16, "max_context": 16, "eval_iters": 1, "n_devices": 1,
    "warmup_steps": 0, "checkpoint_every": 2, "log_every": 1, "eval_every": 4, "sample": "off",
}  # fmt: skip


def text(start, count=400):
    return "".join(f"{i} plus {i} is {2 * i}. " for i in range(start, start + count))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "old.txt").write_text(text(0))
    build(tmp_path / "old.txt", tmp_path / "data", tokenizer="byte", progress=False).close()
    return tmp_path / "data"


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_text_is_appended_behind_what_is_there(corpus, tmp_path):
    before = files(corpus)
    (tmp_path / "new.jsonl").write_text("".join(json.dumps({"body": text(1000 + i, 5)}) + "\n" for i in range(3)))
    with append([tmp_path / "new.jsonl"], corpus, text_key="body", progress=False) as whole:
        decoded = [whole.tokenizer.decode(document.tolist()) for document in whole.read_documents()]
        assert decoded == [text(0), *(text(1000 + i, 5) for i in range(3))]
        assert whole.dtype == np.uint16
        whole.verify()
    after = files(corpus)
    assert sorted(after.keys() - before.keys()) == ["shard_00001.rox"]
    assert {name for name in before if before[name] != after[name]} == {"build.json"}


def test_the_same_again_does_nothing(corpus, tmp_path, capsys):
    (tmp_path / "new.txt").write_text(text(1000))
    words = ["data", "append", str(tmp_path / "new.txt"), "--out", str(corpus)]
    assert main(words) == 0
    assert "appended 9,601 tokens of 1 documents in 1 shard(s)" in capsys.readouterr().err
    before = files(corpus)
    assert main(words) == 0
    assert "already has these inputs: nothing to do" in capsys.readouterr().err
    assert files(corpus) == before


def test_documents_that_are_there_already_are_counted(corpus, tmp_path, capsys):
    """By their tokens, whatever file they come in: those of the build, and of an earlier append."""
    lines = [text(0), text(7, 3), text(8, 3), "x" * len(text(7, 3)), text(7, 3)]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in lines))
    append(tmp_path / "new.jsonl", corpus).close()
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "1 of these documents were there already: the data set has them twice now"
    (tmp_path / "other.txt").write_text(text(8, 3))
    append([tmp_path / "other.txt", tmp_path / "old.txt"], corpus).close()
    assert capsys.readouterr().err.splitlines()[-1].startswith("2 of these documents were there already")
    (tmp_path / "fresh.txt").write_text("fresh")
    append(tmp_path / "fresh.txt", corpus).close()
    assert "already" not in capsys.readouterr().err
    np.save(tmp_path / "a.npy", np.frombuffer(b"fresh", np.uint8).astype(np.int64))
    append(tmp_path / "a.npy", corpus).close()
    assert "1 of these documents were there already" in capsys.readouterr().err


def test_tokens_of_the_same_tokenizer_are_appended(corpus, tmp_path):
    with Roxxel(corpus) as data:
        tokenizer = tmp_path / "data" / "tokenizer.json"
        build(tmp_path / "old.txt", tmp_path / "other", tokenizer=tokenizer, progress=False).close()
        count = data.num_tokens
    with append(tmp_path / "other", corpus, progress=False) as whole:
        assert whole.num_tokens == 2 * count
    (tmp_path / "foreign.txt").write_text("0 1 2 3")
    build(tmp_path / "foreign.txt", tmp_path / "foreign", tokenizer="char", progress=False).close()
    with pytest.raises(ValueError, match="the data set appended to has"):
        append(tmp_path / "foreign", corpus, progress=False)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("nowhere", "has no shards: make a data set there with `roxxel-dist data build` first"),
        ("split", "was built with a val_fraction: name the part to append to, .*train or .*val"),
        ("s3://bucket/data", "is in an object store: append to the local folder"),
    ],
)
def test_what_cannot_be_appended_to(out, message, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many").mkdir()
    for i in range(20):
        (tmp_path / "many" / f"{i}.txt").write_text(text(i, 5))
    build("many", "split", tokenizer="byte", val_fraction=0.5, progress=False).close()
    with pytest.raises(ValueError, match=message):
        append("old.txt", out, progress=False)


def test_a_failed_append_leaves_nothing(corpus, tmp_path):
    before = files(corpus)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "fine"}) + "\n{\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl"):
        append(tmp_path / "bad.jsonl", corpus, progress=False)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="nothing to"):
        append([tmp_path / "empty.txt"], corpus, progress=False)
    assert files(corpus) == before
    assert sorted(os.listdir(corpus)) == sorted(before)


def test_a_run_goes_on_with_the_new_text(corpus, tmp_path):
    phases = [{"steps": 8, "batch_size": 4, "seq_len": 17}]
    run = tmp_path / "run"
    Experiment(Config(phases=phases, max_steps=4, **SMALL)).fit(corpus, run)
    (tmp_path / "new.txt").write_text(text(1000))
    append(tmp_path / "new.txt", corpus, progress=False).close()
    config = Config(phases=phases, max_steps=8, **SMALL)
    with pytest.raises(ValueError, match="amend"):
        Experiment(config).fit(run_dir=run, resume=True)
    Experiment(config).fit(run_dir=run, resume=True, amend=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    cursor = json.loads((run / "training_cursor.json").read_text())
    assert cursor["finished"]
