"""A run with a mixture of experts: what is minimised, and what the log, the console and `eval` say of it."""

import json

import pytest
from runs import rows, told

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main


@pytest.mark.long
def test_a_run_with_experts(tmp_path, capsys):
    """Rows over two devices, in micro-batches, in bfloat16: the losses fall, and eval repeats them to the bit."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    config = Config(
        dim=16, num_blocks=1, max_context=16, batch_size=32, grad_accum=2, max_steps=30, eval_iters=2, log_every=5,
        eval_every=15, checkpoint_every=15, tokenizer_type="char", lr=1e-2, warmup_steps=2, bf16_compute=True,
        n_devices=2, use_moe=True, n_experts=4, top_k_mlp=2, alpha_balance=0.05, expert_capacity_factor=1.0,
    )  # fmt: skip
    run = Experiment(config).fit(text, tmp_path / "run")
    found = rows(run)
    assert found[-1]["train_loss"] < found[0]["train_loss"] - 0.5
    assert found[-1]["val_loss"] < found[0]["val_loss"] - 0.5
    balanced = 0.05
    for row in found:
        assert balanced * 0.9 < row["train_bal"] < 2 * balanced
        assert "balance_loss" not in row
        assert 0 <= row["expert_load_min"] < 1 < row["expert_load_mean"] == row["expert_load_max"] <= 2, "of one block"
    assert [balanced * 0.9 < row["val_bal"] < 2 * balanced for row in found if "val_loss" in row] == [True] * 3
    last = found[-1]
    assert f"(Bal: {last['train_bal']:.4f}) | Val: {last['val_loss']:.4f} (Bal: {last['val_bal']:.4f})" in told(run)
    assert all(0 < row["expert_dropped"] < 0.5 and "val_expert_dropped" not in row for row in found)
    assert f"| Busiest expert: {last['expert_load_max']:.1f}x | Dropped: {last['expert_dropped']:.1%}" in told(run)
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["difference"] == 0
    assert (again["val_loss"], again["val_bal"]) == (last["val_loss"], last["val_bal"])
