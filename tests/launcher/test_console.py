"""The output of the launcher, which never waits for its reader."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from roxxel_dist.launcher import output as screen_file
from roxxel_dist.launcher.output import Console

PREEMPTION = "W1123 00:51:52.602120    4013 preemption_notifier.cc:90] SIGTERM caught at 2026-11-23T00:51:52.602118857"


def test_the_screen_shows_rank_0_or_all(capfd: pytest.CaptureFixture[str]) -> None:
    for everybody in (False, True):
        with Console(all_ranks=everybody) as screen:
            screen.lines(0, 0.0, ["[/x] a", "[Gloo] Rank 0 is connected", PREEMPTION, "b"])
            screen.lines(1, 0.0, ["c"])
            screen.status(0, {"step": 1, "total": 2, "start": 0})
            screen.info("the launcher")
        out, err = capfd.readouterr()
        shown = [line.split(" ", 1)[1] for line in out.splitlines()]
        assert shown == ["0 | [/x] a", "0 | b", *(["1 | c"] if everybody else [])]
        assert err == "roxxel-dist: the launcher\n"


def test_what_cannot_be_shown_ends_no_screen(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> None:
        raise KeyError("total")

    with Console(all_ranks=False) as screen:
        for _ in range(2):
            screen._queue.put(fails)
        screen.lines(0, 0.0, ["after it"])
    out, err = capfd.readouterr()
    assert out.endswith(" 0 | after it\n")
    assert err.splitlines() == [
        "roxxel-dist: a line could not be shown (KeyError('total')); the job goes on, see its logs"
    ]


def test_who_does_not_look_is_not_waited_for_and_is_told_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads, writes = os.pipe()
    monkeypatch.setattr(screen_file, "MAX_WAITING", 100_000)
    with open(writes, "w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        seen: list[bytes] = []
        reader = threading.Thread(target=lambda: seen.extend(iter(lambda: os.read(reads, 1 << 16), b"")))
        with Console(all_ranks=False) as screen:
            for _ in range(1000):
                screen.lines(0, time.time(), ["x" * 1000])
            reader.start()  # only now does somebody look
            screen.flush()
            screen.lines(0, time.time(), ["on again"])
    reader.join(60)
    os.close(reads)
    shown = b"".join(seen)
    assert shown.endswith(b"on again\n")
    told = (tmp_path / "err").read_text().splitlines()
    left_out = sum(int(line.split()[1]) for line in told)
    assert left_out > 500
    assert left_out + shown.count(b"x\n") == 1000
    assert "lines were too many for this terminal" in told[0]
