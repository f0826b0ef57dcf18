"""Audits of runs of every kind: sharded parameters, adapters, a user's own model, skipped steps, virtual shards."""

import pytest

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
    kind, trained, tmp_path, capsys, monkeypatch
):
    fields = {"phases": PHASE, "n_devices": 0} | KINDS[kind]
    if fields.get("virtual_shards"):
        monkeypatch.setenv("PJRT_NPROC", "16")  # that of the run; this process has another one all the while
    if fields.get("use_lora"):
        fields |= {"init_from": str(trained())}
    run = trained(**fields)
    capsys.readouterr()
    assert main(["audit", str(run)]) == 0, "".join(capsys.readouterr())
    assert "equal to the bit over 14 steps" in capsys.readouterr().out
    assert main(["audit", str(run), "--steps", "8:8", "--dump", str(tmp_path)]) == 0
    assert "gradient norm" in (tmp_path / "step-8.txt").read_text()
