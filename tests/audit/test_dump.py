"""`audit --dump`: what goes into one step, and what comes out."""

import json

import numpy as np
import pytest

from roxxel_dist.cli import main

pytestmark = pytest.mark.xdist_group("audit")  # one run for all of them


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 8])
def test_a_step_is_written_as_arrays_and_as_a_table(step, clean, tmp_path, capsys):
    """Its loss and gradient are those of what is trained, and not of the average that the run keeps."""
    assert main(["audit", str(clean), "--steps", f"{step}:{step}", "--dump", str(tmp_path)]) == 0
    text = (tmp_path / f"step-{step}.txt").read_text()
    assert text in capsys.readouterr().out
    row = next(
        row for row in map(json.loads, (clean / "metrics.jsonl").read_text().splitlines()) if row["step"] == step
    )
    arrays = np.load(tmp_path / f"step-{step}.npz")
    assert arrays["tokens"].shape == (4, 17)
    assert len(arrays["offset"]) == len(arrays["dataset"]) == 4
    assert float(arrays["loss"]) == pytest.approx(row["train_loss"], rel=1e-5)
    norms = {name: float(arrays[name]) for name in arrays.files if name.startswith("grad_norm/")}
    assert np.sqrt(sum(norm**2 for norm in norms.values())) == pytest.approx(row["grad_norm"], rel=1e-4)
    assert all(name.removeprefix("grad_norm/") in text for name in norms)
