"""The last lines of one run in a log that several runs have written."""

import random
from collections import deque
from pathlib import Path

import pytest

from roxxel_dist.launcher.control import jobs as tail


def header(run: str) -> str:
    return f"# 2026-11-25 10:00:00 attempt 0, run {run}: python file.py\n"


LINES = ["10:00:00 h 0 | x\n", "\n", "# no header\n", "# 2026-11-25 10:00:00 nor this\n", "é" * 70 + "\n"]


@pytest.mark.parametrize("seed", range(40))
def test_they_are_those_that_reading_it_all_would_find(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, log = random.Random(seed), tmp_path / "rank-0.log"
    monkeypatch.setattr(tail, "BLOCK", chance.choice([1, 7, 64, 1 << 18]))
    parts = [chance.choice([*LINES, *LINES, header("a"), header("b")]) for _ in range(chance.choice([0, 1, 30]))]
    rest = chance.choice(["", "half a li"])
    log.write_bytes("".join([*parts, rest]).encode())
    for run in ("a", "b"):
        whole = tail.run_lines(log, run)
        kept = list(iter(lambda whole=whole: next(whole), None))
        for count in (0, 1, 3, 100):
            lines = tail.run_lines(log, run, last=count)
            assert list(iter(lambda lines=lines: next(lines), None)) == list(deque(kept, maxlen=count))
    lines = tail.run_lines(log, "a", last=1)
    deque(iter(lambda: next(lines), None))
    with log.open("a") as file:
        file.write(f"ne\n{header('a')}new\n")
    new = list(iter(lambda: next(lines), None))
    assert [line.decode() for line in new[-2:]] == [header("a"), "new\n"]
    assert len(new) in (2, 3), "the line that was not complete is one, if it is of this run"
