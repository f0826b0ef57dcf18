"""`data build` of text with a BPE tokenizer against bare `encode_batch` of the `tokenizers` library on the same cores.

    python benchmarks/data_build.py [--megabytes N] [--rounds N] [--quick] [--json FILE]

Both sides have the same texts (the standard library's sources), the same tokenizer and all cores, each in a process of
its own, in turns. Building also finds, reads and checks the files and writes the shards. The ratio is of the medians of
the wall times; that of the CPU times is what a busy machine tells better. Target: 0.9.
"""

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from measure import Lines, Result, flags

TARGET = 0.9
BARE = """
import os, sys
from pathlib import Path
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
texts = [path.read_text() for path in sorted(Path(sys.argv[2]).iterdir())]
before = os.times()
for start in range(0, len(texts), 64):
    tokenizer.encode_batch(texts[start:start + 64])
after = os.times()
print(after.elapsed - before.elapsed, sum(after[:4]) - sum(before[:4]))
"""
BUILD = """
import os, sys
from roxxel_dist.corpus.build import build
before = os.times()
build(sys.argv[2], sys.argv[3], tokenizer=sys.argv[1], progress=False)
after = os.times()
print(after.elapsed - before.elapsed, sum(after[:4]) - sum(before[:4]))
"""


def make_texts(folder: Path, size: int) -> None:
    """Copy sources until there are `size` bytes."""
    source, total = Path(sysconfig.get_paths()["stdlib"]), 0
    found = [path for path in sorted(source.rglob("*.py")) if "site-packages" not in path.parts]
    for number, path in enumerate(found * (1 + size // (1 << 20))):
        data = path.read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        if total >= size:
            return
        (folder / f"{number:06d}.txt").write_bytes(data)
        total += len(data)


def measure(code: str, *words: object) -> tuple[float, float]:
    """(wall, CPU) seconds of a program, its children's CPU included."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True, env=os.environ
    )
    wall, cpu = map(float, result.stdout.split())
    return wall, cpu


def main() -> int:
    """Print the table."""
    parser = flags(__doc__)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    report = Lines(asked.json)
    megabytes = asked.megabytes or (8 if asked.quick else 24)
    report.add("building text", lambda: building(megabytes, asked.rounds))
    return report.end()


def building(megabytes: int, rounds: int) -> Iterable[Result]:
    """Both sides in turns."""
    from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder, texts = Path(name), Path(name) / "texts"
        texts.mkdir()
        make_texts(texts, megabytes << 20)
        sample = (path.read_text() for path in sorted(texts.iterdir())[:300])
        train_tokenizer("bpe", sample, 8192).save(folder / "tokenizer.json")
        bare, built = [], []
        for _ in range(rounds):
            bare.append(measure(BARE, folder / "tokenizer.json", texts))
            built.append(measure(BUILD, folder / "tokenizer.json", texts, folder / "out"))
            shutil.rmtree(folder / "out")
    (bare_wall, bare_cpu), (wall, cpu) = (
        [statistics.median(column) for column in zip(*side, strict=True)] for side in (bare, built)
    )
    what, note = f"data build of {megabytes} MiB of text", f"{wall:.1f} s, bare {bare_wall:.1f} s"
    yield Result(
        what=what, against="x bare encode_batch, wall time", measured=bare_wall / wall, target=TARGET, note=note
    )
    yield Result(what=what, against="x bare encode_batch, CPU time", measured=bare_cpu / cpu)


if __name__ == "__main__":
    sys.exit(main())
