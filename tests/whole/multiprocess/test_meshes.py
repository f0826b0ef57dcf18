"""A mesh of all three axes over several processes."""

import pytest
from commands import launched, losses, make_corpus, rows, run

MESH = ("--fsdp", "True", "--fsdp_devices", 2, "--tensor_devices", 2)


@pytest.mark.long
def test_two_processes_train_as_one(tmp_path):
    """2 x 2 x 2 devices, of one process and of two; and the numbers of eight copies but for rounding."""
    make_corpus(tmp_path)
    for processes, name, words in ((1, "one", MESH), (2, "two", MESH), (1, "copies", ())):
        result = run(*launched(processes, 8 // processes, name, *words), cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    found, expected = (rows(tmp_path / name) for name in ("one", "copies"))
    for step, row in expected.items():
        assert found[step]["train_loss"] == pytest.approx(row["train_loss"], rel=1e-3)
    assert len(expected) > 10
