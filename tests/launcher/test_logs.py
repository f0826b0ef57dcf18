"""From bytes to lines, to records, to files."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pretended import LINEAR, cpu_of, exponent
from tables import one_test

from roxxel_dist.launcher import output as logs
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import MAX_LINE_BYTES, LineSplitter, Logs


def test_a_line_that_grows_costs_as_much_as_its_letters() -> None:
    """As of a rank that prints dot after dot, a flush each."""

    def feed(count: int) -> None:
        lines = LineSplitter()
        for _ in range(count):
            lines.feed(b"." * 64)

    assert exponent(lambda count: cpu_of(partial(feed, count)), 1 << 10, 1 << 13) <= LINEAR


def cut(data: bytes, sizes: list[int]) -> list[str]:
    lines = LineSplitter()
    out: list[str] = []
    for size in sizes:
        out += lines.feed(data[:size])
        data = data[size:]
    return [*out, *lines.feed(data), *lines.close()] if data else [*out, *lines.close()]


@one_test(
    ("data", "expected"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"dos\r\nunix\n", ["dos", "unix"]),
        (b" 10%\r 20%\r 30%\n", [" 30%"]),
        (b" 10%\r 20%\r", [" 20%"]),
        (b"\rone\r\r\ntwo", ["one", "two"]),
        (b"\r\n", [""]),
        (b"caf\xe9 \xff\n", ["caf\\xe9 \\xff"]),
        ("é\u2028x\n".encode(), ["é\u2028x"]),
        (b"nul\0\x0bvt\n", ["nul\0\x0bvt"]),
        (b"", []),
    ],
)
def test_lines(data: bytes, expected: list[str]) -> None:
    assert cut(data, []) == expected
    assert cut(data, [1] * len(data)) == expected, "however the bytes arrive"


def test_random_pieces_make_the_same_lines() -> None:
    rng = random.Random(0)
    data = b"".join(bytes(rng.choice(b"ab\r\n\xc3\xa9") for _ in range(rng.randrange(9))) + b"\n" for _ in range(200))
    whole = cut(data, [])
    assert len(whole) == data.count(b"\n")
    for _ in range(20):
        assert cut(data, [rng.randrange(1, 40) for _ in range(60)]) == whole


def test_a_long_line_stays_whole_and_an_endless_one_is_bounded() -> None:
    lines = LineSplitter()
    pieces = [lines.feed(b"x" * 65536) for _ in range(32)]
    assert not any(pieces)
    assert [len(line) for line in lines.feed(b"\n")] == [2 << 20]
    endless = [line for _ in range(300) for line in lines.feed(b"y" * 65536)]
    assert len(endless) == 2
    assert all(MAX_LINE_BYTES < len(line) <= MAX_LINE_BYTES + 65536 for line in endless)


def test_an_endless_progress_bar_needs_no_memory() -> None:
    lines = LineSplitter()
    for number in range(100_000):
        assert lines.feed(b"\rstep %d" % number) == []
    assert len(lines._rest) < 20
    assert lines.close() == ["step 99999"]


said: list[str] = []


def job(folder: Path) -> JobSpec:
    return JobSpec(command=("train", "a b", "c\nd", "\udcff"), nprocs=1, run_id="r", log_dir=folder)


def test_files_come_with_the_first_line_and_are_appended(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "logs"
    for text in ("first", "second"):
        kept = Logs(job(folder), said.append)
        kept.close()
        assert (folder.parent.exists()) == (text == "second")
        kept.write(3, "host", 1_700_000_000.0625, [text, "more"])
        kept.close()
    lines = (folder / "rank-3.log").read_text().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("# ")
    assert lines[0].endswith("attempt 0, run r: train 'a b' 'c\\nd' '\\udcff'")
    assert lines[1].endswith(".062 host 3 | first")
    assert lines[4].endswith(".062 host 3 | second")


def test_the_tail_is_bounded(tmp_path: Path) -> None:
    kept = Logs(job(tmp_path), said.append)
    kept.write(0, "h", 0.0, [*map(str, range(1000)), "z" * 100_000])
    kept.close()
    assert kept.tail(0)[0] == "801"
    assert len(kept.tail(0)) == 200  # a traceback through jax and a user's own layers is longer than a screen
    assert len(kept.tail(0)[-1]) == logs.TAIL_COLUMNS
    assert kept.tail(1) == []


def test_a_folder_that_cannot_be_written_is_said_once_and_written_when_it_can_be(tmp_path: Path) -> None:
    said.clear()
    (tmp_path / "file").write_text("in the way")
    kept = Logs(job(tmp_path / "file" / "logs"), said.append)
    kept.write(0, "h", 0.0, ["x"])
    kept.write(0, "h", 0.0, ["y"])
    (told,) = said
    assert "cannot write" in told
    assert kept.tail(0) == ["x", "y"]
    (tmp_path / "file").unlink()
    kept.write(0, "h", 0.0, ["z"])
    kept.close()
    assert kept.path(0).read_text().endswith("| z\n")


@pytest.mark.parametrize("act", [Path.unlink, lambda path: path.rename(f"{path}.1")], ids=["deleted", "rotated"])
def test_a_file_that_is_taken_away_under_a_job_is_made_again(act: Callable[[Path], object], tmp_path: Path) -> None:
    said: list[str] = []
    files = Logs(JobSpec(command=("true",), nprocs=1, run_id="r", log_dir=tmp_path), said.append)
    files.write(0, "h", 0.0, ["before"])
    act(files.path(0))
    files.write(0, "h", 0.0, ["after"])
    files.close()
    header, line = files.path(0).read_text().splitlines()
    assert (header[0], line.partition(" | ")[2], said) == ("#", "after", [])
