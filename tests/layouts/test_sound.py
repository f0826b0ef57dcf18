"""Sound configurations: all layouts of each of them agree."""

import pytest
from reader import ROOT

from roxxel_dist.cluster import parameter_sharding

OWN = {"model": "layouts.planted.sound:build", "loss": "layouts.planted.sound:loss"}
BY_HAND = OWN | {"loss": "layouts.planted.sound:summed_by_hand"}
PACKED = {"phases": [{"steps": 1, "batch_size": 16, "seq_len": 33, "packing": "documents"}]}
MLA = {"mla": True, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 8}
WHOLE = "each parameter is whole"
CONFIGS = [
    {},
    {"n_heads": 4, "kv_heads": 2},
    {"n_heads": 4, "kv_heads": 1},
    {"head_size": 24},
    {"pos_encoding": "learned"},
    {"pos_encoding": "absolute"},
    {"pos_encoding": "none"},
    {"rope_theta": 500.0},
    {"partial_rotary_factor": 0.5},
    {"no_rope_layer_interval": 2},
    {"sliding_window": True, "context_window": 8},
    {"sliding_window": True, "context_window": 8, "sliding_window_pattern": 2},
    {"qkv_bias": True},
    {"qk_norm": "head"},
    {"qk_norm": "projection"},
    {"attn_softcap": 5.0},
    {"logit_softcap": 10.0},
    {"no_sink": True},
    MLA,
    MLA | {"dropout_rate": 0.1},
    {"use_swiglu": False},
    {"use_swiglu": False, "activation": "relu"},
    {"hidden_dim": 48},
    {"use_moe": True},
    {"use_moe": True, "n_experts": 8, "top_k_mlp": 1},
    {"use_moe": True, "dropout_rate": 0.1},
    {"use_moe": True, "expert_capacity_factor": 1.0},
    {"dropout_rate": 0.1},
    {"dropout_rate": 0.5},
    {"weight_tying": False},
    {"norm_type": "layernorm"},
    {"norm_position": "after"},
    {"norm_position": "both"},
    {"norm_unit_offset": True},
    {"scale_embeddings": True},
    {"init_std": 0.2},
    {"parametrization": "mup", "base_dim": 16},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "dropout_rate": 0.1},
    {"scan_layers": True},
    {"z_loss": 1e-3},
    {"loss_chunk": 16},
    {"num_blocks": 1},
    {"num_blocks": 6},
    {"dim": 64, "n_heads": 4},
    {"seed": 5},
    {"use_bf16": True},
    PACKED,
    PACKED | {"dropout_rate": 0.1, "n_heads": 4, "kv_heads": 2},
    PACKED | {"use_moe": True},
    OWN,
    BY_HAND,
    BY_HAND | PACKED,
    OWN | {"seed": 3},
    OWN | {"model": "layouts.planted.mixture:build"},
    {"model": "own_model:build_attending"},
    {"model": "own_model:build_attending", "model_args": {"depth": 1}},
    {"model": "own_model:build", "loss": "own_model:loss"},
]


def named(fields):
    short = {name: str(value).rpartition(":")[2] for name, value in fields.items() if name != "phases"}
    words = [f"{name}={value}" for name, value in short.items()] + ["packed"] * ("phases" in fields)
    return "-".join(words) or "plain"


@pytest.mark.long
@pytest.mark.parametrize("fields", CONFIGS, ids=named)
def test_a_sound_configuration_agrees(checked, monkeypatch, fields):
    monkeypatch.setattr(parameter_sharding, "FSDP_MIN_SIZE", 64)  # small parameters are divided too
    report = checked(**fields)
    bad = [result for result in report.results if result.status in ("differs", "failed")]
    assert report.agree, bad
    compared = {result.layout: result.text for result in report.results if result.status == "agrees"}
    assert WHOLE not in compared["fsdp"]
    assert "model" in fields or WHOLE not in compared["tensor"]
    assert "use_moe" not in fields or WHOLE not in compared["experts"]


@pytest.mark.long
def test_attention_that_sees_all_documents_of_a_row_differs_packed_alone(checked):
    """It takes segments, and does not look at them: all else agrees, and it has no experts."""
    report = checked(model="own_model:build_attending", model_args={"plain": True, "depth": 1})
    assert [result.layout for result in report.results if result.status != "agrees"] == ["experts", "packing"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("folder", "fields"),
    [
        ("own_model", {"model": "own:build", "loss": "own:loss", "model_args": {"width": 32, "depth": 1}}),
        ("own_optimizer", {"optimizer": "soap:build", "num_blocks": 1}),
    ],
)
def test_the_examples_agree(checked, monkeypatch, folder, fields):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
    report = checked("rows", "fsdp", "accum", **fields)
    assert report.agree, report.results
