"""What a user installs: the wheel, in an environment that has nothing else, away from the sources."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHERS = ("3.12", "3.13")
TINY = ("--dim", "16", "--num_blocks", "1", "--kv_heads", "1", "--head_size", "8", "--max_context", "16",
        "--batch_size", "8", "--tokenizer_type", "byte", "--max_steps", "2", "--eval_iters", "1")  # fmt: skip


def runs(python):
    """Whether this is an interpreter, and not the name of one that was never installed."""
    try:
        return subprocess.run([python, "-c", "import venv"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def interpreters():
    """This Python, and the others that the package is for, as far as they are on this machine."""
    found = [pytest.param(sys.executable, id=f"{sys.version_info.major}.{sys.version_info.minor}")]
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for version in OTHERS:
        installed = [str(path / "bin" / "python") for path in sorted(versions.glob(f"{version}.*"))]
        for python in [shutil.which(f"python{version}"), *installed]:
            if python and not sys.version.startswith(version) and runs(python):
                found.append(pytest.param(python, id=version))
                break
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(words, check=True)
    (made,) = folder.glob("*.whl")
    return made


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


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", interpreters())
def test_it_trains_where_nothing_else_is(wheel, python, tmp_path):
    place, work = tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    subprocess.run([python, "-m", "venv", place], check=True)
    install = ["install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run([place / "bin" / "pip", *install], check=True, stderr=subprocess.PIPE)
    (work / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(500)))
    env = {"HOME": str(work), "PATH": os.defpath, "JAX_PLATFORMS": "cpu"}

    def run(*words):
        done = subprocess.run(
            [place / "bin" / "roxxel-dist", *words], cwd=work, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "usage: roxxel-dist COMMAND" in run("--help")
    assert run("--version").splitlines()[0] == f"roxxel-dist {wheel.name.split('-')[1]}"
    assert "Step 2/2" in run("train", "--data_path", "text.txt", "--run_dir", "run", *TINY)
    rows = (work / "run" / "metrics.jsonl").read_text().splitlines()
    assert '"step": 2' in rows[-1]
    run("demo", "--max_steps", "10")
    rows = (work / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    assert '"step": 10' in rows[-1]
