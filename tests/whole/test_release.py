"""What a tag publishes: built as `make dist` builds it, and run as users run it."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from reader import ROOT

PROGRAMS = Path(sys.executable).parent
pytestmark = pytest.mark.long


def run(*words, cwd, **env):
    """What a program prints that sees nothing of this machine's user but the settings of pip."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
    every = {"HOME": str(cwd), "PATH": f"{PROGRAMS}:{os.defpath}", "JAX_PLATFORMS": "cpu", **settings, **env}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=every, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """A clone of this repository, with a tag on its last commit."""
    folder = tmp_path_factory.mktemp("tagged") / "clone"
    run("git", "clone", "--quiet", ROOT, folder, cwd=folder.parent)
    run("git", "tag", "v7.8.9", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def built(tagged):
    """The wheel and the archive of that tag, as `make dist` makes them."""
    words = [sys.executable, "-m", "build", "--outdir", tagged / "dist", tagged]
    settings = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")} if sys.version_info < (3, 12) else {}
    run(*words, cwd=tagged, **settings)
    archive, wheel = sorted((tagged / "dist").iterdir(), key=lambda path: path.suffix)
    return archive, wheel


def test_the_version_is_that_of_the_tag(tagged, built):
    archive, wheel = built
    assert (archive.name, wheel.name) == ("roxxel_dist-7.8.9.tar.gz", "roxxel_dist-7.8.9-py3-none-any.whl")
    run(PROGRAMS / "twine", "check", "--strict", archive, wheel, cwd=tagged)


def contents(wheel):
    """The files of a wheel and their bytes; but for the list of checksums, which names itself."""
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith("RECORD")}


def test_the_archive_builds_the_same_wheel_without_git(built, tmp_path):
    archive, wheel = built
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert not (unpacked / ".git").exists()
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "again", unpacked, cwd=tmp_path)
    (again,) = (tmp_path / "again").iterdir()
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["uvx", "pipx"])
def test_it_runs_from_the_wheel_with_nothing_installed(built, tool, tmp_path):
    wheel = built[1]
    words = {
        "uvx": ["uvx", "--python", sys.executable, "--from", wheel, "roxxel-dist"],
        "pipx": ["pipx", "run", "--python", sys.executable, "--spec", wheel, "roxxel-dist"],
    }[tool]
    assert shutil.which(words[0], path=str(PROGRAMS))
    assert run(*words, "--version", cwd=tmp_path).startswith("roxxel-dist 7.8.9\n")
    run(*words, "demo", "--max_steps", "4", cwd=tmp_path)
    assert '"step": 4' in (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()[-1]
