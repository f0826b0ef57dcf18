"""What a type checker, or an editor, knows of the package once it is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "roxxel_dist"


@pytest.mark.docs
def test_the_type_of_every_public_name_is_written_down(tmp_path):
    """In an environment where the package is a copy: what is installed from a checkout is not looked at."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    shutil.copytree(PACKAGE, packages / "roxxel_dist", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [Path(sys.executable).parent / "basedpyright", "--verifytypes", "roxxel_dist", "--ignoreexternal"],
        cwd=tmp_path, env=os.environ | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "Type completeness score: 100%" in done.stdout, done.stdout[-5000:] + done.stderr
