"""`roxxel-dist demo`: a model in an empty folder, with no file and no flag."""

import sysconfig
from pathlib import Path

import pytest
from commands import rows, run


@pytest.mark.docs
def test_it_trains_in_an_empty_folder(tmp_path):
    text = Path(sysconfig.get_paths()["stdlib"]) / "email"
    first = run("demo", "--text", text, "--max_steps", "2", cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "$ roxxel-dist data build " in first.stderr
    assert "$ JAX_PLATFORMS=cpu roxxel-dist launch local --nprocs 2 --devices-per-proc 2 -- train " in first.stderr
    assert "rank 0 of 2: 2 of 4 cpu devices" in first.stdout
    assert " --resume --max_steps 2" in first.stderr  # started again, it goes on
    assert list(rows(tmp_path / "runs" / "demo")) == [1, 2]
