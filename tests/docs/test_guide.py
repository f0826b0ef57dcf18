"""docs/training.md: every block of it, one after the other, as a reader would do it."""

import re
import sysconfig
from pathlib import Path

import pytest
from commands import rows
from pages import left_out
from reader import ROOT, Reader, blocks

pytestmark = pytest.mark.docs
GUIDE = ROOT / "docs" / "training.md"


@pytest.fixture
def reader(tmp_path):
    """The folder of a reader who has a file of text and a folder of code."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = [
        path.read_text(encoding="utf-8")
        for name in ("json", "email", "http")
        for path in sorted((library / name).glob("*.py"))
    ]
    (tmp_path / "corpus.txt").write_text("\n".join(text))
    (tmp_path / "code").mkdir()
    for path in sorted((library / "logging").glob("*.py")) + sorted((library / "unittest").glob("*.py")):
        (tmp_path / "code" / f"{path.parent.name}_{path.name}").write_text(path.read_text(encoding="utf-8"))
    return tmp_path


@pytest.mark.timeout(900)  # two dozen commands
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_block_does_what_the_page_says(reader, processes):
    doing = Reader(reader, processes)
    for block in blocks(GUIDE):
        if not left_out(block.note):
            doing.follow(block)
    said, runs = "\n".join(doing.said), reader / "runs"
    last = {run.name: max(rows(run)) for run in runs.iterdir() if (run / "metrics.jsonl").exists()}
    assert (last["text"], last["blend"], last["stable"], last["decayed"], last["decayed_early"]) == (40, 60, 60, 60, 30)
    assert last["tuned"] == 10
    assert "resuming after step 30 of" in said
    assert re.search(r"Suggested LR: \d\.\d\de-\d\d\n", said)
    assert (reader / "lr_finder.png").exists()
    assert {path.name for path in (reader / "report").iterdir()} == {"loss.png", "goodput.png", "report.html"}
    blend, stable, decayed = (rows(runs / name) for name in ("blend", "stable", "decayed"))
    assert "val_loss/code" in blend[40]
    assert blend[20]["train_loss"] == pytest.approx(stable[20]["train_loss"], rel=0.05)
    assert stable[60]["lr"] == pytest.approx(3e-3)
    assert decayed[60]["lr"] < 1e-3
    assert rows(runs / "text")[40]["val_loss"] < rows(runs / "text")[1]["val_loss"] - 0.5
