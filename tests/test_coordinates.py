"""`plan --coordinates`: with mup a few steps change as much at every width."""

import json

import pytest
from corpora import write_corpus

from roxxel_dist import coordinates
from roxxel_dist.cli import main

WORDS = ["--num_blocks", "1", "--head_size", "16", "--max_context", "32", "--batch_size", "8", "--lr", "3e-3"]


def check(tmp_path, capsys, monkeypatch, *words):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    path = next(tmp_path.glob("*.rox")).parent
    assert main(["plan", "--data_path", str(path), "--coordinates", "--json", *words]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert (tmp_path / "coordinates.png").read_bytes().startswith(b"\x89PNG")
    return {kind: {place: values[-1] / values[0] for place, values in changes[kind].items()} for kind in changes}


def test_changes_by_width(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(coordinates, "FACTORS", (1, 8))
    ratios = check(tmp_path, capsys, monkeypatch, "--dim", "16", *WORDS)
    assert list(ratios["mup"]) == ["embedding", "block 1", "logits"]
    assert ratios["standard"]["logits"] > 2
    assert ratios["standard"]["block 1"] > 2
    assert max(ratios["mup"].values()) < 1.5


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words", [["--optimizer", "muon"], ["--optimizer", "lion", "--lr", "1e-3"], ["--use_moe=True"]]
)
def test_other_optimizers_and_layers(tmp_path, capsys, monkeypatch, words):
    ratios = check(tmp_path, capsys, monkeypatch, "--dim", "32", *WORDS, *words)
    assert max(ratios["mup"].values()) < 1.6
