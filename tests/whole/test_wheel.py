"""What a user installs: the wheel, in an environment that has nothing else, away from the sources."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pythons import NEWER, constraints, found

ROOT = Path(__file__).parents[2]
TINY = ("--dim", "16", "--num_blocks", "1", "--kv_heads", "1", "--head_size", "8", "--max_context", "16",
        "--batch_size", "8", "--tokenizer_type", "byte", "--max_steps", "2", "--eval_iters", "1")  # fmt: skip


def interpreters():
    """This Python, and the others that the package is for, as far as they are on this machine."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = {version: found(version) for version in NEWER if version != mine}
    return [pytest.param(mine, sys.executable, id=mine)] + [
        pytest.param(version, python, id=version) for version, python in others.items() if python
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(words, check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.long
def test_what_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    information = f"roxxel_dist-{wheel.name.split('-')[1]}.dist-info"
    package = ROOT / "roxxel_dist"
    static = package / "view" / "web" / "static"
    modules = {str(path.relative_to(ROOT)) for path in package.rglob("*.py*") if path.suffix != ".pyc"}
    licenses = {"licenses/LICENSE", f"licenses/{(static / 'uPlot.LICENSE').relative_to(ROOT)}"}
    expected = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", *licenses}
    data = {
        "roxxel_dist/py.typed",
        "roxxel_dist/demo.yaml",
        *(str(path.relative_to(ROOT)) for path in static.iterdir()),
    }
    assert set(names) == modules | data | {f"{information}/{name}" for name in expected}


@pytest.fixture(scope="module")
def environment_of(wheel, tmp_path_factory):
    """A function that installs the wheel, and nothing else, for a Python, once, and returns the folder of programs."""
    made = {}

    def environment_of(version, python):
        if version not in made:
            place = tmp_path_factory.mktemp("environment")
            subprocess.run([python, "-m", "venv", place], check=True)
            install = ["install", "--quiet", "--no-compile", "--constraint", ROOT / constraints(version), wheel]
            subprocess.run([place / "bin" / "pip", *install], check=True, stderr=subprocess.PIPE)
            made[version] = place / "bin"
        return made[version]

    return environment_of


def called(programs, folder, *words):
    """What `roxxel-dist WORDS` prints in the folder, which is all that it sees of this machine's user."""
    env = {"HOME": str(folder), "PATH": os.defpath, "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "2"}
    done = subprocess.run([programs / "roxxel-dist", *words], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "python"), interpreters())
def test_it_trains_where_nothing_else_is(environment_of, wheel, version, python, tmp_path):
    programs = environment_of(version, python)
    (tmp_path / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(500)))
    assert "usage: roxxel-dist COMMAND" in called(programs, tmp_path, "--help")
    first = called(programs, tmp_path, "--version").splitlines()[0]
    assert first == f"roxxel-dist {wheel.name.split('-')[1]}"
    assert "Step 2/2" in called(programs, tmp_path, "train", "--data_path", "text.txt", "--run_dir", "run", *TINY)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert '"step": 2' in rows[-1]
    called(programs, tmp_path, "demo", "--max_steps", "10")
    rows = (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    assert '"step": 10' in rows[-1]


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["train_loss"] for row in map(json.loads, lines)}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("newer_first", [False, True])
def test_a_run_goes_on_with_another_jax(environment_of, newer_first, tmp_path):
    """Begun with the jax of one Python and resumed with that of another: the same losses, but for rounding."""
    version = next(filter(found, NEWER), None)
    if found("3.11") is None or version is None:
        pytest.skip("takes Python 3.11 and a newer one")
    both = [("3.11", found("3.11")), (version, found(version))]
    begun, resumed = (environment_of(*one) for one in (reversed(both) if newer_first else both))
    (tmp_path / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    words = ["train", "--data_path", "text.txt", *TINY, "--lr", "3e-3", "--checkpoint_every", "10", "--log_every", "1"]
    called(begun, tmp_path, *words, "--run_dir", "whole", "--max_steps", "40")
    called(begun, tmp_path, *words, "--run_dir", "moved", "--max_steps", "20")
    said = called(resumed, tmp_path, *words, "--run_dir", "moved", "--resume", "--max_steps", "40")
    for package in ("jax", "jaxlib", "flax", "numpy"):
        assert re.search(rf"^changed since the run began: {package}: '[\d.]+' -> '[\d.]+'$", said, re.MULTILINE), said
    assert "changed since the run began: perhaps the last bits of losses, by jax, jaxlib; up to rounding" in said
    assert "resuming after step 20 of 40" in said
    whole, moved = losses(tmp_path / "whole"), losses(tmp_path / "moved")
    assert list(moved) == list(whole) == list(range(1, 41))
    assert [moved[step] for step in range(1, 21)] == [whole[step] for step in range(1, 21)]
    assert [moved[step] for step in range(21, 41)] == pytest.approx([whole[step] for step in range(21, 41)], rel=1e-5)
    assert whole[40] < whole[20] < whole[1]  # both have learned
