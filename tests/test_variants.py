"""Variants of the model, through the command line: trained, saved, and loaded in other processes."""

import itertools
import json
import subprocess
import sys

import pytest
from commands import environment, rows, run

LOGITS = """
import sys, jax.numpy as jnp, numpy as np
from roxxel_dist.load import load_run
model, *_ = load_run(sys.argv[1])
print(np.asarray(model(jnp.arange(2 * 20).reshape(2, 20))).tobytes().hex())
"""
SHAPE = "--dim 32 --num_blocks 2 --head_size 8 --max_context 32 --batch_size 8 --lr 1e-2 --max_steps 30 --log_every 1"
OFTEN = "--eval_every 30 --eval_iters 2 --checkpoint_every 30 --tokenizer_type byte"
MLA = "--mla True --down_dim_q 16 --down_dim_kv 12 --rope_dim 8"
WINDOW = "--sliding_window True --context_window 8"
ALL = [
    " ".join(words)
    for words in itertools.product(
        ["--kv_heads 2", MLA],
        [f"--pos_encoding {name}" for name in ("rotary", "absolute", "learned", "none")],
        ["", WINDOW],
        ["", "--no_sink True"],
    )
]


@pytest.mark.parametrize(
    "words",
    [
        f"{MLA} {WINDOW} --no_sink True --gradient_checkpointing True",
        *(pytest.param(words, marks=pytest.mark.slow) for words in ALL),
        pytest.param("--pos_encoding learned --norm_type layernorm --dropout_rate 0.1", marks=pytest.mark.slow),
        pytest.param("--use_moe True --top_k_mlp 1 --use_swiglu False --activation relu2", marks=pytest.mark.slow),
        pytest.param(f"{MLA} --use_moe True --gradient_checkpointing True", marks=pytest.mark.slow),
    ],
)
def test_it_trains_and_is_the_same_when_loaded(words, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(4000)))
    command = ["train", "--data_path", text, "--run_dir", "run", *SHAPE.split(), *OFTEN.split(), *words.split()]
    trained = run(*command, cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    found = rows(tmp_path / "run")
    assert found[30]["train_loss"] < found[1]["train_loss"] - 0.5
    again = run("eval", "run", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["val_loss"] == found[30]["val_loss"], "to the last bit"
    logits = [
        subprocess.run(
            [sys.executable, "-c", LOGITS, "run"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
            check=True, timeout=240,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert logits[0] == logits[1]
    assert len(set(logits[0])) > 10
    said = run("generate", "run", "--prompt", "12 and ", "--max_new_tokens", 9, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("12 and ")
