"""Variants of the model, every pair of their options: trained, saved, loaded in another process."""

import itertools
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from commands import environment, rows
from flax import nnx

from roxxel_dist import Config, Experiment, Transformer
from roxxel_dist.run.evaluate import evaluate

STEPS = 30
SMALL = {
    "dim": 32, "num_blocks": 2, "head_size": 8, "max_context": 32, "batch_size": 8, "lr": 1e-2, "max_steps": STEPS,
    "log_every": 1, "eval_every": STEPS, "eval_iters": 2, "checkpoint_every": STEPS, "tokenizer_type": "byte",
    "n_devices": 1,
}  # fmt: skip
MLA = {"mla": True, "down_dim_q": 16, "down_dim_kv": 12, "rope_dim": 8}
MOE = {"use_moe": True, "n_experts": 4, "top_k_mlp": 2}
LORA = {"use_lora": True, "lora_rank": 4, "lora_targets": "all"}
FACTORS = {
    "attention": {"mha": {}, "gqa": {"kv_heads": 2}, "mla": MLA},
    "position": {name: {"pos_encoding": name} for name in ("rotary", "absolute", "learned", "none")},
    "window": {"whole": {}, "window": {"sliding_window": True, "context_window": 8}},
    "sink": {"sink": {}, "gate": {"no_sink": True}},
    "mlp": {"dense": {}, "moe": MOE},
    "tying": {"tied": {}, "untied": {"weight_tying": False}},
    "norm": {"rmsnorm": {}, "layernorm": {"norm_type": "layernorm"}},
    "lora": {"weights": {}, "lora": LORA},
    "blocks": {"apart": {}, "scan": {"scan_layers": True, "gradient_checkpointing": True}},
}


def pairs(variant):
    return set(itertools.combinations(zip(FACTORS, variant, strict=True), 2))


def covering():
    """Few variants that have every pair between them: each time the one with the most pairs that are still missing."""
    every = {variant: pairs(variant) for variant in itertools.product(*FACTORS.values())}
    missing, chosen = set().union(*every.values()), []
    while missing:
        chosen.append(max(every, key=lambda variant: len(every[variant] & missing)))
        missing -= every[chosen[-1]]
    return chosen


CHOSEN = covering()


def test_few_variants_have_every_pair():
    assert set().union(*map(pairs, CHOSEN)) == set().union(*map(pairs, itertools.product(*FACTORS.values())))
    assert len(CHOSEN) <= 20


@pytest.mark.long
@pytest.mark.parametrize("variant", CHOSEN, ids="-".join)
def test_it_trains_and_is_the_same_when_loaded(variant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(4000)))
    (tmp_path / "more.txt").write_text("".join(f"<{2 * i}> less <{i}> is <{i}>!\n" for i in range(4000)))
    fields = {}
    for factor, chosen in zip(FACTORS.values(), variant, strict=True):
        fields |= factor[chosen]
    plain = {name: value for name, value in fields.items() if name not in LORA}
    Experiment(Config(**SMALL, **plain)).fit("text.txt", "run")
    if fields.get("use_lora"):
        Experiment(Config(**SMALL, **fields, init_from="run")).fit("more.txt", "tuned")
    run = "tuned" if fields.get("use_lora") else "run"
    losses = rows(tmp_path / run)
    assert losses[STEPS]["train_loss"] < losses[1]["train_loss"] - 0.5
    model = Transformer.from_pretrained(run)
    tokens = jnp.arange(64).reshape(2, 32)
    logits = np.asarray(nnx.jit(lambda model, x: model(x))(model, tokens))
    assert len(np.unique(logits)) > 1000
    words = [sys.executable, __file__, run]
    found = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout.splitlines()[-1])
    assert told["logits"] == logits.tobytes().hex(), "to the last bit"
    assert told["difference"] == 0, "the checkpoint gives the loss that the training has logged, to the last bit"
    check_decoding(model, tokens, logits)


def loaded(run):
    """What the files of a run give: logits, and the losses of its newest checkpoint beside the one that it logged."""
    model = Transformer.from_pretrained(run)
    logits = np.asarray(nnx.jit(lambda model, x: model(x))(model, jnp.arange(64).reshape(2, 32)))
    found = evaluate(run)
    return {"logits": logits.tobytes().hex(), "difference": found.difference}


def check_decoding(model, tokens, logits):
    """A token at a time with a cache gives what all of them together give, beyond the window too."""
    cache, step = model.empty_cache(2), nnx.jit(lambda model, x, cache: model(x, cache=cache))
    for i in range(tokens.shape[1]):
        one, cache = step(model, tokens[:, i : i + 1], cache)
        assert np.abs(one[:, 0] - logits[:, i]).max() < 1e-5 * max(1, np.abs(logits).max()), f"position {i}"


if __name__ == "__main__":
    print(json.dumps(loaded(sys.argv[1])))
