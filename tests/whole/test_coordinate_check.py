"""The example that checks mup: a few steps change as much at every width."""

import sys

import pytest
import yaml
from corpora import write_corpus
from reader import ROOT

from roxxel_dist.settings.config import Config

sys.path.insert(0, str(ROOT / "examples"))
import coordinate_check

SMALL = {"num_blocks": 1, "head_size": 16, "max_context": 32, "batch_size": 8, "lr": 3e-3}


def ratios(tmp_path, **fields):
    """By parametrization and place: the change at the largest width over that at the smallest."""
    write_corpus(tmp_path)
    path = next(tmp_path.glob("*.rox")).parent
    check = coordinate_check.check_coordinates(Config(**SMALL | fields), path)
    return {
        kind: {place: values[-1] / values[0] for place, values in places.items()}
        for kind, places in check.changes.items()
    }


@pytest.mark.docs
def test_the_program(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(coordinate_check, "FACTORS", (1, 8))
    write_corpus(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**SMALL, "dim": 16}))
    data = str(next(tmp_path.glob("*.rox")).parent)
    monkeypatch.setattr(sys, "argv", ["coordinate_check.py", "small.yaml", data, "--picture", "it.png"])
    coordinate_check.main()
    text = capsys.readouterr().out
    first = [line.split()[0] for line in text.splitlines() if line]
    places = ["embedding", "block", "logits"]
    assert first[1:9] == ["standard", *places, "mup", *places], text
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fields", [{}, {"optimizer": "muon"}, {"optimizer": "lion", "lr": 1e-3}, {"use_moe": True}], ids=str
)
def test_changes_by_width(tmp_path, fields):
    found = ratios(tmp_path, dim=32, **fields)
    assert max(found["mup"].values()) < 1.6
    if not fields:
        assert found["standard"]["logits"] > 2
