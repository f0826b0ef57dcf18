"""Audits of runs of every kind: sharded parameters, adapters, a user's own model, skipped steps, virtual shards."""

from functools import partial

import pytest
import yaml

from roxxel_dist.checkpoint.metadata import BLOCK_UPDATE, WHOLE_UPDATE, ResumeSpec
from roxxel_dist.cli import main

PHASE = [{"steps": 14, "batch_size": 8, "seq_len": 17}]
KINDS = {
    "fsdp": {"fsdp": True, "n_devices": 2, "dim": 128},
    "tensor": {"tensor_devices": 2, "n_devices": 4, "dim": 128},
    "adapters": {"use_lora": True},
    "own": {"model": "own_model:build", "loss": "own_model:loss"},
    "skip": {"on_bad_step": "skip", "spike_factor": 1.0001, "grad_accum": 2},
    "virtual shards": {"virtual_shards": 4, "n_devices": 2},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_this_kind_is_equal_to_the_bit_and_a_step_of_it_is_written(
    kind, trained, clean, tmp_path, capsys, monkeypatch
):
    fields = {"phases": PHASE, "n_devices": 0} | KINDS[kind]
    if fields.get("virtual_shards"):
        monkeypatch.setenv("PJRT_NPROC", "16")  # that of the run; this process has another one all the while
    if fields.get("use_lora"):
        fields |= {"init_from": str(clean)}
    run = trained(**fields)
    capsys.readouterr()
    assert main(["audit", str(run)]) == 0, "".join(capsys.readouterr())
    assert "equal to the bit over 14 steps" in capsys.readouterr().out
    assert main(["audit", str(run), "--steps", "8:8", "--dump", str(tmp_path)]) == 0
    assert "gradient norm" in (tmp_path / "step-8.txt").read_text()


@pytest.mark.long
def test_a_run_whose_record_says_no_way_of_update_goes_on_as_it_began(trained, monkeypatch, capsys):
    """As runs from before there were two: all parameters at once, at its beginning, its resume and its audit."""
    monkeypatch.setenv("PJRT_NPROC", "16")
    fields = {
        "virtual_shards": 2, "n_devices": 2, "fsdp": True, "dim": 128, "log_every": 1, "checkpoint_every": 2,
        "phases": [{"steps": 6, "batch_size": 4, "seq_len": 9}],
    }  # fmt: skip
    with monkeypatch.context() as before:
        before.setattr("roxxel_dist.run.experiment.ResumeSpec", partial(ResumeSpec, exact_update=WHOLE_UPDATE))
        run = trained(**fields, max_steps=3)
    trained(run, resume=True, **fields)
    assert "exact_update" not in (run / "config.yaml").read_text() + (run / "checkpoints/6/meta.json").read_text()
    assert main(["audit", str(run)]) == 0, "".join(capsys.readouterr())
    assert "equal to the bit over 6 steps" in capsys.readouterr().out
    config = yaml.safe_load((run / "config.yaml").read_text())
    for part in (config["record"], *config["record"]["resumes"]):
        part["bits"]["exact_update"] = BLOCK_UPDATE
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["audit", str(run)]) == 1
    assert "step 1 differs" in capsys.readouterr().out
