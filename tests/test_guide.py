"""docs/training.md: every block of it, one after the other, as a reader would do it."""

import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from commands import command, environment, rows

from roxxel_dist.config import Config

GUIDE = Path(__file__).parent.parent / "docs" / "training.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ON_ALL_PROCESSES = ("train", "find-lr", "eval")


def blocks():
    """(language, text) of every block of the page."""
    found = BLOCK.findall(GUIDE.read_text())
    assert len(found) == GUIDE.read_text().count("\n```") // 2
    return found


def commands_of(text):
    """The words of every command of a block, without the program's name."""
    for line in text.replace("\\\n", "").splitlines():
        program, *words = shlex.split(line)
        assert program == "roxxel-dist", line
        yield words


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


class Reader:
    """Does what the blocks say, on so many processes."""

    def __init__(self, folder, processes):
        self.folder, self.processes = folder, processes
        self.files = {}
        self.said = []

    def follow(self, language, text):
        first = text.splitlines()[0]
        name = first[2:].split(",")[0] if first.startswith("# ") else ""
        if language == "yaml":
            self.files[name] = self.files.get(name, {}) | yaml.safe_load(text)
            Config.from_dict(self.files[name]).validate()
            (self.folder / name).write_text(yaml.safe_dump(self.files[name]))
        elif language == "bash":
            for words in commands_of(text):
                self.run(command(*words) if words[0] not in ON_ALL_PROCESSES else command(*self.launched(words)))
        elif name.endswith(".py"):
            (self.folder / name).write_text(text)
        else:
            (self.folder / "block.py").write_text(text)
            alone = self.processes == 1 or "Trainer(" not in text
            self.run([sys.executable, "block.py"] if alone else command(*self.launched(["python", "block.py"])))

    def launched(self, words):
        launch = ["launch", "local", "--nprocs", self.processes, "--devices-per-proc", 1, "--max-restarts", 0, "--"]
        return words if self.processes == 1 else [*launch, *words]

    def run(self, words):
        result = subprocess.run(words, cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, f"{words}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        self.said.append(result.stdout)


@pytest.mark.timeout(900)  # two dozen commands
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_block_does_what_the_page_says(reader, processes):
    doing = Reader(reader, processes)
    for language, text in blocks():
        doing.follow(language, text)
    said, runs = "\n".join(doing.said), reader / "runs"
    last = {run.name: max(rows(run)) for run in runs.iterdir() if (run / "metrics.jsonl").exists()}
    assert (last["text"], last["blend"], last["stable"], last["decayed"], last["decayed_early"]) == (40, 60, 60, 60, 30)
    assert (last["tuned"], last["python"]) == (10, 10)
    assert "resuming after step 30 of" in said
    assert said.count("the same as in the log, to the last bit") == 1
    assert '"same_as_logged": true' in said
    assert re.search(r"Suggested LR: \d\.\d\de-\d\d\n", said)
    assert (reader / "lr_finder.png").exists()
    assert {path.name for path in (reader / "report").iterdir()} == {"loss.png", "goodput.png"}
    blend, stable, decayed = (rows(runs / name) for name in ("blend", "stable", "decayed"))
    assert "val_loss/code" in blend[40]
    assert blend[20]["train_loss"] == pytest.approx(stable[20]["train_loss"], rel=0.05)
    assert stable[60]["lr"] == pytest.approx(3e-3)
    assert decayed[60]["lr"] < 1e-3
    assert rows(runs / "text")[40]["val_loss"] < rows(runs / "text")[1]["val_loss"] - 0.5
    assert "Saved to: runs/python\n" in said.replace(str(reader) + "/", "")
