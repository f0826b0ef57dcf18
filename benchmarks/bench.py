"""Run benchmarks and write what they measure, and on what machine, into files: benchmarks/results/NAME.jsonl.

    python benchmarks/bench.py [--quick] [--results FOLDER] [PART or NAME …]

Without names all of them. A program that fails, or is not there, is written down as failed; the others are measured
all the same. `summary.py` puts the numbers of README.md together from these files.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measure import without_paths

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CACHE = ".cache/benchmarks"
PACKAGES = ("jax", "numpy", "ray", "torch", "grain", "roxxel", "optuna", "sweeps", "tokenizers")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of this folder.

    Attributes:
        name: of the program and its file of results.
        part: `make bench-PART` runs it.
        words: of its command line, beside --quick and --json.
        has_quick: whether it has a short form.
    """

    name: str
    part: str
    words: tuple[str, ...] = ()
    has_quick: bool = True


PROGRAMS = (
    Program(name="data_read", part="data", words=(CACHE,)),
    Program(name="remote_data", part="data", words=(CACHE,)),
    Program(name="train_bucket", part="data", words=(CACHE,)),
    Program(name="data_build", part="data"),
    Program(name="train_loop", part="train", words=(CACHE,)),
    Program(name="train_mup", part="mup"),
    Program(name="decode", part="model"),
    Program(name="ngram", part="ngram", words=(CACHE,), has_quick=False),
    Program(name="compiled", part="compiled"),
    Program(name="long_rows", part="long"),
    Program(name="launch", part="launch"),
    Program(name="sweep_driver", part="sweep"),
    Program(name="sweep_scale", part="sweep"),
    Program(name="sweep_engines", part="sweep"),
    Program(name="sweep_unseen", part="sweep"),
    Program(name="sweep_mixtures", part="sweep"),
    Program(name="sweep_mixint", part="sweep", words=("--instances", "5", "--all")),
    Program(name="sweep_schedulers", part="sweep"),
    Program(name="sweep_real", part="sweep", words=(f"{CACHE}/sweep",)),
    Program(name="versus_real", part="sweep", words=(f"{CACHE}/versus",)),
    Program(name="sweep_budget", part="sweep", words=(f"{CACHE}/budget",)),
)
PARTS = tuple(dict.fromkeys(program.part for program in PROGRAMS))


def main() -> int:
    """1 where a program did not measure all that it measures."""
    names = [*PARTS, *(program.name for program in PROGRAMS if program.name not in PARTS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="the short forms")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if stray := [name for name in asked.names if name not in names]:
        parser.error(f"{stray[0]!r} is none of {', '.join(names)}")
    asked.results.mkdir(parents=True, exist_ok=True)
    codes = [measure(program, asked.quick, asked.results) for program in chosen(asked.names, asked.quick)]
    return int(any(codes))


def chosen(names: Iterable[str], quick: bool) -> list[Program]:
    """The programs of these names, or parts; all where there is none, but for those that have no short form."""
    wanted = set(names)
    if not wanted:
        return [program for program in PROGRAMS if program.has_quick or not quick]
    return [program for program in PROGRAMS if {program.name, program.part} & wanted]


def measure(program: Program, quick: bool, folder: Path, programs: Path = HERE) -> int:
    """Run one program. Its file is written anew, so that a program that ends early leaves no older lines behind."""
    file, quick = folder / f"{program.name}.jsonl", quick and program.has_quick
    words = [sys.executable, str(programs / f"{program.name}.py"), *program.words, *(["--quick"] if quick else [])]
    print(f"== {program.name}", file=sys.stderr, flush=True)
    begun = time.monotonic()
    file.write_text(json.dumps({"begin": about() | {"table": program.name, "quick": quick}}) + "\n", encoding="utf-8")
    code, last = run([*words, "--json", str(file.resolve())])
    end: dict[str, Any] = {"seconds": round(time.monotonic() - begun, 1), "load": load()}
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    if code and not any(json.loads(line)["failed"] for line in lines):  # it fell before it could say why
        end["failed"] = without_paths(last) or f"its program ended with code {code}"
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps({"end": end}) + "\n")
    return code


def run(words: list[str]) -> tuple[int, str]:
    """The exit code of a program, and the last line that it said on stderr, which is passed on."""
    last = ""
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stderr or ():
            sys.stderr.write(line)
            last = line.strip() or last
    return process.returncode, last


def about() -> dict[str, Any]:
    """When, what and on what machine."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "cores": os.cpu_count(),
        "cpu": cpu(),
        "memory_gib": round(memory / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "load": load(),
    }


def load() -> float:
    """How many processes wanted a core during the last minute, this one's own included."""
    return round(os.getloadavg()[0], 2)


def cpu() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """Of the sources; with a plus where they differ from it."""
    git = ["git", "-C", str(HERE.parent)]
    try:
        short = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "roxxel_dist", "benchmarks/*.py"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short.stdout.strip() + ("+" if changed.returncode else "")


if __name__ == "__main__":
    sys.exit(main())
