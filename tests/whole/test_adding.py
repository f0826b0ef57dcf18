"""What CONTRIBUTING.md says of adding a backend, a tracker, an engine: one file, and one line in a table."""

import importlib
import sys

import pytest
from commands import rows

from roxxel_dist import cli
from roxxel_dist.launcher import backends
from roxxel_dist.sweep import samplers as engine
from roxxel_dist.train.log import choose
from roxxel_dist.train.log.base import LogQueue

BACKEND = '''
from dataclasses import dataclass
from typing import ClassVar

from roxxel_dist.launcher.control.new_job import BackendOptions
from roxxel_dist.launcher.backends.local import LocalBackend


class Added(LocalBackend):
    """Where it runs."""


@dataclass(frozen=True, kw_only=True)
class Options(BackendOptions):
    """Start a program in an added way: `launch added [options] -- CMD…`."""

    example: ClassVar[str] = "--pairs 2"
    pairs: int = 1
    """Pairs of processes."""

    def backend(self):
        return Added(), 2 * self.pairs
'''
TRACKER = """
class Added:
    def __init__(self, file):
        self.file = file

    def row(self, row):
        print(row["step"], row["loss"], file=self.file)

    def close(self):
        self.file.close()


def tracker(run, restored_step):
    return Added((run / "added.txt").open("a")) if restored_step == 0 else None
"""
ENGINE = """
def halves(sweep):
    def points(record, trial):
        yield [0.5 ** (trial + 1)] * len(sweep.space.free)
    return points
"""


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Writes a file that can be imported as `added_file` in this test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "added_file", raising=False)
    yield (tmp_path / "added_file.py").write_text
    sys.modules.pop("added_file", None)


def test_a_backend(added, monkeypatch, capsys):
    added(BACKEND)
    monkeypatch.setitem(backends.BACKENDS, "added", "added_file")
    assert cli.main(["launch", "--help"]) == 0
    assert "  added   Start a program in an added way\n" in capsys.readouterr().out
    assert cli.main(["launch", "added", "--pairs", "2", "--max-restarts", "1", "--dry-run", "--", "true"]) == 0
    assert ": 4 ranks on 1 host" in capsys.readouterr().out
    assert cli.main(["launch", "added", "--pairs", "2"]) == 2
    assert "as in `launch added --pairs 2 -- train" in capsys.readouterr().err


def test_a_tracker(added, monkeypatch, tmp_path):
    added(TRACKER)
    monkeypatch.setattr(choose, "TRACKERS", (*choose.TRACKERS, importlib.import_module("added_file").tracker))
    (tmp_path / "logs").mkdir()
    for restored in (0, 1):  # the second has nothing for it
        with LogQueue(choose.trackers_for(tmp_path, 4, restored)) as log:
            log.row({"step": restored + 1, "loss": 0.5})
    assert (tmp_path / "added.txt").read_text() == "1 0.5\n"
    assert [row["loss"] for row in rows(tmp_path).values()] == [0.5, 0.5]


def test_an_engine(added, monkeypatch):
    added(ENGINE)
    monkeypatch.setitem(engine.SAMPLERS, "added", "added_file:halves")
    made = engine.make({"parameters": {"x": {"min": 0.0, "max": 1.0}}}, method="added")
    assert [made.ask() for _ in range(2)] == [(0, {"x": 0.5}), (1, {"x": 0.25})]
