"""What compilers of TPUs and GPUs make of each feature of the model: it fits, and no device repeats another's work.

A figure of a feature is a line in the output of `pytest -rA`.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import environment

CACHE = Path(__file__).parent.parent / ".cache"
TARGETS = {"v5e:2x2": "tpu", "v5p:2x2x1": "tpu", "h100:1x8": "cuda"}
CONFIG = {
    "dim": 256, "n_heads": 4, "num_blocks": 2, "max_context": 256, "vocab_size": 2048, "bf16_compute": True,
    "eval_iters": 1, "val_fraction": 0.1, "phases": [{"steps": 4, "batch_size": 16, "seq_len": 257}],
}  # fmt: skip
EXPERTS = {"use_moe": True, "n_experts": 4, "top_k_mlp": 2}
FEATURES = {
    "plain": {},
    "fsdp": {"fsdp": True},
    "tensor": {"tensor_devices": 2},
    "fsdp and tensor": {"fsdp": True, "tensor_devices": 2},
    "grouped heads": {"kv_heads": 2},
    "latent attention": {"mla": True},
    "window": {"window": 64},
    "experts": EXPERTS,
    "experts and tensor": {**EXPERTS, "tensor_devices": 2},
    "gelu": {"use_swiglu": False},
    "untied": {"weight_tying": False},
    "gated": {"no_sink": True},
    "dropout": {"dropout_rate": 0.1},
    "remat": {"gradient_checkpointing": True},
    "scan": {"scan_layers": True},
    "accumulation": {"grad_accum": 2, "fsdp": True},
    "packing": {"phases": [{"steps": 4, "batch_size": 16, "seq_len": 257, "packing": "documents"}]},
    "stored in bfloat16": {"bf16_compute": False, "use_bf16": True},
    "float32": {"bf16_compute": False},
    "chunked loss": {"loss_chunk": 64},
    "lion": {"optimizer": "lion", "fsdp": True},
    "muon": {"optimizer": "muon", "fsdp": True},
    "adafactor": {"optimizer": "adafactor", "fsdp": True},
}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_compiled(feature, target, tmp_path):
    python = CACHE / TARGETS[target] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no compiler: make {TARGETS[target]}")
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG | FEATURES[feature]))
    tokens = np.random.default_rng(0).integers(0, 2000, 200_000).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    command = [python, "-m", "roxxel_dist", "plan", "--config", "config.yaml", "--data_path", "tokens.npy", "--json"]
    done = subprocess.run(
        [*command, "--target", target], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [phase] = json.loads(done.stdout)["phases"]
    for what, step in (("training", phase["target"]), ("validation", phase["target"]["validation"])):
        print(
            f"{target} {feature}, {what}: {step['peak_bytes']:,} bytes, ratio {step['flops_ratio']:.3f}, "
            f"{step['compile_seconds']:.0f} s, sent {step['collectives']}, {phase['attention']}"
        )
        assert step["fits"]
        assert step["flops_ratio"] == pytest.approx(1, abs=0.1)
