"""Whether `make test` notices mistakes: `python tests/support/mutants.py [NUMBER...]`.

mutants.json has small mistakes in the launcher, the trainer, the model, the sweeps and the data: lines as they are and
as they would be wrong, and the tests that are to fail then. 59 were drawn at random; the others are of ten files that
decide most. Each is put into a copy of the tree, and these tests are run there. Exit code 1 if a mutant survives, if
its lines are not found any more, or if a test fails without any mistake, which would count as a mutant killed.
"""

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
sys.path[:0] = TESTS

MARKERS = "not docs and not cluster and not long"
LIMIT_S = 300


def run_here(folder: Path, tests: list[str], log: Path) -> int:
    """The same in this process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this was started in the background
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in list(sys.modules):
        if name.split(".")[0] in ("roxxel_dist", "conftest", "commands", "leftovers"):
            del sys.modules[name]
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in TESTS)]
    imported = "ignore::pytest.PytestAssertRewriteWarning"
    return pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", "-W", imported, "-m", MARKERS])


def run(folder: Path, tests: list[str], log: Path, limit_s: float = LIMIT_S) -> int:
    """The exit code of pytest in a copy of the tree, in a fork of this process; 1 too where it does not end."""
    child = os.fork()
    if child == 0:
        code = pytest.ExitCode.INTERNAL_ERROR
        try:
            code = run_here(folder, tests, log)
        finally:
            os._exit(code)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def write(path: Path, text: str) -> None:
    """Write a module, and drop its bytecode: that of another text with this size and second would be taken for it."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def judge(mutant: dict, folder: Path) -> str:
    """`killed`, `survived`, or what is wrong with it."""
    path = folder / mutant["file"]
    text = path.read_text() if path.exists() else ""
    if text.count(mutant["old"]) != 1:
        return f"its lines are there {text.count(mutant['old'])} times"
    if gone := [name for name in mutant["tests"] if not (folder / name.split("::")[0]).exists()]:
        return f"no {', '.join(gone)}"
    write(path, text.replace(mutant["old"], mutant["new"]))
    log = folder / "mutant.log"
    try:
        code = run(folder, mutant["tests"], log)
    finally:
        write(path, text)
    if code == pytest.ExitCode.USAGE_ERROR and "ImportError while loading conftest" in log.read_text():
        return "killed"
    return {0: "survived", 1: "killed", 2: "killed"}.get(code, f"exit code {code} of pytest")


def main(numbers: list[int]) -> int:
    """Judge these mutants, or all."""
    mutants = json.loads((ROOT / "tests" / "support" / "mutants.json").read_text())
    chosen = numbers or range(1, len(mutants) + 1)
    killed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
        tests = sorted(
            {
                test
                for number in chosen
                for test in mutants[number - 1]["tests"]
                if (ROOT / test.split("::")[0]).exists()
            }
        )
        if run(folder, tests, folder / "mutant.log", 3 * LIMIT_S):
            print((folder / "mutant.log").read_text(), "a test fails without any mistake", sep="\n")
            return 1
        for number in chosen:
            mutant, start = mutants[number - 1], time.monotonic()
            verdict = judge(mutant, folder)
            killed += verdict == "killed"
            seconds = f"{time.monotonic() - start:.0f} s"
            print(f"{number:3d} {verdict:9s} {seconds:>6s}  {mutant['file']}: {mutant['new'].strip()}", flush=True)
    print(f"{killed} of {len(chosen)} killed")
    return int(killed < len(chosen))


if __name__ == "__main__":  # a forkserver of a test imports this file too, and would be as large
    for name in ("conftest", "flax.nnx", "optax", "orbax.checkpoint"):  # what takes long to import, once for all forks
        importlib.import_module(name)
    sys.exit(main(list(map(int, sys.argv[1:]))))
