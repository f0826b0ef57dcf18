"""What compilers of TPUs and GPUs make of each feature of the model: it fits, and no device repeats another's work.

A figure of a feature is a line in the output of `pytest -rA`.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import environment, run

ROOT = Path(__file__).parents[2]
COMPILERS = {"v5e:2x2": "tpu", "v5p:2x2x1": "tpu", "h100:1x8": "cuda"}
ONCE = {
    "v4:2x2x1": "tpu", "v5e:1x1": "tpu", "v5p:2x2x2": "tpu", "v6e:2x2": "tpu", "tpu7x:2x2x1": "tpu",
    "a100:1x8": "cuda", "h200:1x8": "cuda", "b200:1x8": "cuda",
}  # fmt: skip
"""Targets that one plain step is compiled for."""
CONFIG = {
    "dim": 256, "n_heads": 4, "num_blocks": 2, "max_context": 256, "vocab_size": 2048, "bf16_compute": True,
    "eval_iters": 1, "val_fraction": 0.1, "phases": [{"steps": 4, "batch_size": 16, "seq_len": 257}],
}  # fmt: skip
EXPERTS = {"use_moe": True, "n_experts": 4, "top_k_mlp": 2}
LORA = {"use_lora": True, "lora_targets": "all", "init_from": "base"}
PACKED = [{"steps": 4, "batch_size": 16, "seq_len": 257, "packing": "documents"}]
BOTH = {"fsdp": True, "tensor_devices": 2}
TWO_PHASES = [{"steps": 4, "batch_size": 16, "seq_len": 129}, {"steps": 4, "batch_size": 8, "seq_len": 257}]
GEMMA = {
    "norm_position": "both", "norm_unit_offset": True, "scale_embeddings": True, "logit_softcap": 30.0,
    "sliding_window": True, "context_window": 64, "sliding_window_pattern": 2,
}  # fmt: skip
FEATURES = {
    "plain": {},
    "fsdp": {"fsdp": True},
    "fsdp over a part": {"fsdp": True, "fsdp_devices": 2},
    "tensor": {"tensor_devices": 2},
    "fsdp and tensor": BOTH,
    "grouped heads": {"kv_heads": 2},
    "latent attention": {"mla": True},
    "latent attention, absorbed": {"mla": True, "inference": True},
    "latent attention, cut": {"mla": True, **BOTH},
    "window": {"sliding_window": True, "context_window": 64},
    "absolute positions": {"pos_encoding": "absolute"},
    "learned positions": {"pos_encoding": "learned"},
    "no positions": {"pos_encoding": "none"},
    "scaled rotary positions": {"rope_scale_factor": 4.0, "rope_trained_context": 64},
    "experts": EXPERTS,
    "experts and fsdp": {**EXPERTS, "fsdp": True},
    "experts and tensor": {**EXPERTS, "tensor_devices": 2},
    "experts over devices": {**EXPERTS, "expert_devices": 4},
    "experts, scanned": {**EXPERTS, "scan_layers": True},
    "adapters": LORA,
    "adapters, cut": {**LORA, **BOTH},
    "adapters of experts": {**LORA, **EXPERTS},
    "gelu": {"use_swiglu": False, "activation": "gelu"},
    "untied": {"weight_tying": False},
    "untied, cut": {"weight_tying": False, **BOTH},
    "gated": {"no_sink": True},
    "layernorm": {"norm_type": "layernorm"},
    "mup": {"parametrization": "mup", "base_dim": 128},
    "dropout": {"dropout_rate": 0.1},
    "remat": {"gradient_checkpointing": True},
    "scan": {"scan_layers": True},
    "scan and remat, cut": {"scan_layers": True, "gradient_checkpointing": True, **BOTH},
    "accumulation": {"grad_accum": 2, "fsdp": True},
    "packing": {"phases": PACKED},
    "packing, cut": {"phases": PACKED, **BOTH},
    "two phases": {"phases": TWO_PHASES},
    "stored in bfloat16": {"bf16_compute": False, "use_bf16": True},
    "float32": {"bf16_compute": False},
    "chunked loss": {"loss_chunk": 64},
    "loss at once": {"loss_chunk": 0, "fsdp": True},
    "attention by xla": {"attention": "xla"},
    "bad steps skipped": {"on_bad_step": "skip", "fsdp": True},
    **{name: {"optimizer": name, "fsdp": True} for name in ("nadamw", "lion", "sgd", "muon", "adafactor")},
    "muon, cut": {"optimizer": "muon", **BOTH},
    "muon and tensor": {"optimizer": "muon", "tensor_devices": 2},
    "Qwen3": {"qk_norm": "head", "qkv_bias": True, **BOTH},
    "OLMo 2": {"qk_norm": "projection", "norm_position": "after", "z_loss": 1e-4, **BOTH},
    "Gemma 2": GEMMA | {"attn_softcap": 50.0, "query_pre_attn_scalar": 64.0},
    "Gemma 3, scanned": GEMMA | {"num_blocks": 4, "qk_norm": "head", "rope_local_theta": 100.0, "scan_layers": True},
    "SmolLM3, Phi-3, packed": {"no_rope_layer_interval": 2, "partial_rotary_factor": 0.5, "phases": PACKED, **BOTH},
}
REPEATED = {"muon and tensor": 1.3, "experts over devices": 1.15}
"""What is known to be more, and how much at most: chips that hold the same part of a matrix compute its update; blocks
of rows that go to experts have room for more than an even load."""


@pytest.fixture
def work(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 2000, 200_000).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    return tmp_path


def python_for(compiler):
    found = ROOT / ".cache" / compiler / "bin" / "python"
    if not found.exists():
        pytest.skip(f"no compiler: make {compiler}")
    return found


def train_base(work, config):
    """The run that adapters stand on: a step of the same model, on the CPU."""
    base = {name: value for name, value in config.items() if name not in (*LORA, *BOTH)}
    phases = [{"steps": 1, "batch_size": 1, "seq_len": 33}]
    (work / "base.yaml").write_text(json.dumps(base | {"phases": phases, "val_fraction": 0}))
    run("train", "--config", "base.yaml", "--data_path", "tokens.npy", "--run_dir", "base", cwd=work)


def planned(work, target, compiler, config):
    """The phases of a plan."""
    if "init_from" in config:
        train_base(work, config)
    (work / "config.yaml").write_text(json.dumps(config))
    command = [python_for(compiler), "-m", "roxxel_dist", "plan", "--config", "config.yaml", "--json"]
    done = subprocess.run(
        [*command, "--data_path", "tokens.npy", "--target", target],
        cwd=work, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["phases"]


def called(work, target, compiler, function, *args):
    """What a function of `compiled_programs` returns, by its fields, in the process of a compiler."""
    program = (
        "import sys, json, dataclasses, compiled_programs\n"
        "from roxxel_dist.devices.targets import parse_target\n"
        "from roxxel_dist.run.estimate.target_process import call_for_target\n"
        "name, function, args = json.loads(sys.argv[1])\n"
        "found = call_for_target(parse_target(name), getattr(compiled_programs, function), *args)\n"
        "print(json.dumps(found, default=dataclasses.asdict))"
    )
    words = [python_for(compiler), "-c", program, json.dumps([target, function, args])]
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(words, cwd=work, env=environment(PYTHONPATH=path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shown(what, step):
    """A line for `pytest -rA`, and the memory, which must be enough."""
    whole = max(step["gathered"].items(), key=lambda item: item[1], default=("nothing", 0))
    print(
        f"{what}: {step['peak_bytes']:,} bytes, ratio {step['flops_ratio'] or 0:.3f}, {step['compile_seconds']:.0f} s, "
        f"sent { ({kind: round(count) for kind, count in step['collectives'].items()}) }, gathered {whole[0]}"
    )
    assert step["fits"]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_compiled(feature, target, work):
    for phase in planned(work, target, COMPILERS[target], CONFIG | FEATURES[feature]):
        for what, step in (("training", phase["target"]), ("validation", phase["target"]["validation"])):
            shown(f"{target} {feature}, {phase['attention']}, {what}", step)
            assert 0.95 < step["flops_ratio"] < REPEATED.get(feature, 1.05)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", COMPILERS)
def test_experts_cost_what_the_chosen_ones_need(target, work):
    """8 experts of which 2, against 2 of 2, where each token needs all; forward, and with the gradient."""
    eight, two = (
        planned(work, target, COMPILERS[target], CONFIG | {"use_moe": True, "n_experts": count, "top_k_mlp": 2})[0]
        for count in (8, 2)
    )
    for more, less in (
        (eight, two),
        ({"target": eight["target"]["validation"]}, {"target": two["target"]["validation"]}),
    ):
        assert more["target"]["flops_per_device"] <= 1.3 * less["target"]["flops_per_device"]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.parametrize("fields", [{"fsdp": True}, {}], ids=str)
def test_micro_batches_send_little_more_than_a_whole_batch(fields, target, work):
    """The sums of micro-batches are sent in float32, and the gradient of a whole batch partly in bfloat16."""
    phases = [{"steps": 4, "batch_size": 64, "seq_len": 257}]
    once, four = (
        planned(work, target, COMPILERS[target], CONFIG | fields | {"phases": phases, "grad_accum": count})[0]["target"]
        for count in (1, 4)
    )
    ratio = sum(four["collectives"].values()) / sum(once["collectives"].values())
    print(f"{target} {fields}: {ratio:.2f} times what a whole batch sends")
    assert ratio <= 1.3


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ONCE)
def test_a_kind_of_device_is_compiled_for(target, work):
    fsdp = {"fsdp": True} if target != "v5e:1x1" else {}
    (phase,) = planned(work, target, ONCE[target], CONFIG | fsdp)
    shown(f"{target}, {phase['attention']}", phase["target"])
    assert phase["target"]["flops_ratio"] == pytest.approx(1, abs=0.05)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.parametrize("fields", [{}, {"kv_heads": 2}, {"mla": True}, EXPERTS], ids=str)
def test_generation_with_a_cache_is_compiled(fields, target, work):
    shape = {name: CONFIG[name] for name in ("dim", "n_heads", "num_blocks", "max_context", "vocab_size")}
    for what, step in called(work, target, COMPILERS[target], "generation", shape | fields).items():
        shown(f"{target} {what}", step)
        # A TPU multiplies and adds the scores of one query a head without a matrix product, and only those are counted.
        assert (0.8 if what == "adding tokens" else 0.95) < step["flops_ratio"] < 1.05


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", COMPILERS)
def test_virtual_shards_are_compiled_and_nothing_but_moves_goes_across(target, work):
    """A collective that adds would add in an order of its own, or make 0.0 of -0.0."""
    phases = [{"steps": 4, "batch_size": 16, "seq_len": 257}, {"steps": 4, "batch_size": 1, "seq_len": 257}]
    fields = CONFIG | {"virtual_shards": 8, "fsdp": True, "phases": phases}
    for number, phase in enumerate(planned(work, target, COMPILERS[target], fields)):
        for step in (phase["target"], phase["target"]["validation"]):
            shown(f"{target} virtual shards, phase {number + 1}", step)
            added = {kind for kind in step["collectives"] if "reduce" in kind}
            # A TPU's compiler makes a sum of the gather of a few squares, which are at least 0.
            assert sum(step["collectives"][kind] for kind in added) < 4096, step["collectives"]
            assert step["collectives"]["all-gather"] > 1 << 20
        assert phase["target"]["flops_ratio"] == pytest.approx(1, abs=0.05 if number == 0 else 0.3)
