"""The Pythons of this machine.

`python3 tests/support/pythons.py newest` prints the newest that has a newer jax than 3.11, and `usual` the one for the
environment: the first `python3` of PATH, or a later one of the same version that is faster.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NEWER = ("3.14", "3.13", "3.12")
FASTER = 0.93
"""Of the time of the first `python3` of PATH: what another one may take to be worth a choice."""


def runs(python):
    """Whether this is an interpreter, and not the name of one that was never installed."""
    try:
        return subprocess.run([python, "-c", "import venv"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def found(version):
    """The interpreter of a version such as "3.13", on PATH or where pyenv keeps them; None: there is none."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    kept = sorted(versions.glob(f"{version}.*"), key=lambda path: [int(n) for n in path.name.split(".") if n.isdigit()])
    places = [shutil.which(f"python{version}"), *(str(path / "bin" / "python") for path in reversed(kept))]
    return next((python for python in places if python and runs(python)), None)


def constraints(version):
    """The file of pinned versions for a Python such as "3.13"."""
    return "constraints-newest.txt" if version in NEWER else "constraints.txt"


def described(python):
    """Its version, the seconds of a core that it takes to unparse this file, its path; None: it has no environments."""
    code = """
import ast, ensurepip, os, sys, time, timeit, venv
tree = ast.parse(open(sys.argv[1]).read())
taken = timeit.repeat(lambda: ast.unparse(tree), number=10, repeat=20, timer=time.process_time)
print(*sys.version_info[:2], min(taken), os.path.realpath(sys.executable))
"""
    try:
        done = subprocess.run([python, "-c", code, __file__], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor, seconds, path = done.stdout.strip().split(" ", 3)
    return (int(major), int(minor)), float(seconds), path


def usual():
    """The interpreter of the environment.

    A Python that was built without its optimizations, as pyenv builds it where nothing else is said, takes a third more
    time for all that is done in Python. Where PATH has the same version from another build, this one is taken.
    """
    folders = os.get_exec_path()
    paths = dict.fromkeys(filter(None, (shutil.which("python3", path=folder) for folder in folders)))
    there = [one for one in map(described, paths) if one and one[0] >= (3, 11)]
    if not there:
        return "python3"
    (version, seconds, first), *_ = there
    _, least, fastest = min((one for one in there if one[0] == version), key=lambda one: one[1])
    if least > FASTER * seconds:
        return first
    print(f"{fastest} takes {least / seconds:.2f} of the time of {first} (PYTHON=python3: the first)", file=sys.stderr)
    return fastest


def newest():
    """The newest interpreter that has a newer jax than 3.11."""
    python = next(filter(None, map(found, NEWER)), None)
    if python is None:
        sys.exit(f"no newer Python than 3.11 is here: none of {', '.join(NEWER)} on PATH or in pyenv's folder")
    return python


if __name__ == "__main__":
    print({"usual": usual, "newest": newest}[sys.argv[1]]())
