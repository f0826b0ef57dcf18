"""The Pythons of this machine. `python3 tests/support/pythons.py` prints the newest that has a newer jax than 3.11."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NEWER = ("3.14", "3.13", "3.12")


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


if __name__ == "__main__":
    newest = next(filter(None, map(found, NEWER)), None)
    if newest is None:
        sys.exit(f"no newer Python than 3.11 is here: none of {', '.join(NEWER)} on PATH or in pyenv's folder")
    print(newest)
