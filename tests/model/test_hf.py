"""The same model in two sets of words. What transformers makes of it is tests/test_hugging_face.py."""

import numpy as np
import pytest

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.families import hf_config, model_fields
from roxxel_dist.model.huggingface import put_together, take_out, tensors_of

SHAPE = {"dim": 32, "num_blocks": 2, "head_size": 8, "kv_heads": 2, "max_context": 64, "vocab_size": 50}
VARIANTS = [
    {"weight_tying": False, "rope_scale_factor": 2.0, "activation": "gelu_tanh"},
    {"sliding_window": True, "context_window": 5, "expansion": 3},
    {"use_moe": True, "n_experts": 3, "top_k_mlp": 2, "sliding_window": True},
    {"hidden_dim": 90, "norm_eps": 1e-5, "rope_theta": 5e5, "rope_scale_factor": 8.0, "rope_trained_context": 16},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_a_config_there_and_back(fields):
    config = ModelConfig(**SHAPE, **fields)
    found = hf_config(config, eos_id=7)
    assert found["eos_token_id"] == 7
    assert ModelConfig(**{**model_fields(found), "alpha_balance": config.alpha_balance, "n_heads": None, "head_size": 8,
                          "n_experts": config.n_experts, "top_k_mlp": config.top_k_mlp,
                          "context_window": config.context_window}) == config  # fmt: skip


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_arrays_there_and_back_in_any_parts(fields):
    """Only what is asked for is read."""
    rng = np.random.default_rng(0)
    for tensors in tensors_of(ModelConfig(**SHAPE, **fields)).values():
        ours = rng.normal(size=tensors.shape)
        theirs = dict(take_out(ours, tensors))
        assert sum(one.size for one in theirs.values()) == ours.size
        for _ in range(4):
            ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in ours.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            read = 0

            def reading(name, part, theirs=theirs):
                nonlocal read
                read += theirs[name][part].size
                return theirs[name][part]

            part = put_together(tensors, index, reading)
            assert np.array_equal(part, ours[index])
            # Of rows of weights, those of some layers, experts, inputs and key heads, or hidden units, alone.
            inner = len(tensors.stack)
            cut = inner + (2 if tensors.axis == 1 else 1)
            axes = range(len(ours.shape)) if not tensors.transposed else (*range(inner + 1), cut)
            assert read == np.prod([part.shape[i] if i in axes else ours.shape[i] for i in range(len(ours.shape))])


COMMON = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}
LLAMA_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"model_type": "llama", "intermediate_size": 11008, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
            {"hidden_dim": 11008, "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scale_factor": 1.0},
        ),
        (
            {"model_type": "llama", "intermediate_size": 14336, "max_position_embeddings": 131072, "rope_theta": 5e5,
             "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_scaling": {"rope_type": "llama3", **LLAMA_3_1}},
            {"hidden_dim": 14336, "rope_theta": 5e5, "rope_scale_factor": 8.0, "rope_trained_context": 8192,
             "kv_heads": 8},
        ),
        (
            {"model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
             "rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 8},
            {"hidden_dim": 14336, "sliding_window": True, "context_window": 4096, "rope_theta": 1e4},
        ),
        (
            {"model_type": "mixtral", "intermediate_size": 14336, "max_position_embeddings": 32768, "rope_theta": 1e6,
             "rms_norm_eps": 1e-5, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
            {"hidden_dim": 14336, "rope_theta": 1e6, "norm_eps": 1e-5, "n_experts": 8, "sliding_window": False},
        ),
    ],
    ids=["LLaMA 2 7B", "LLaMA 3.1 8B", "Mistral 7B v0.1", "Mixtral 8x7B"],
)  # fmt: skip
def test_models_of_the_world(theirs, ours):
    """Their `config.json`, as they were published."""
    fields = model_fields({**COMMON, **theirs})
    assert {name: fields[name] for name in ours} == ours
    again = hf_config(ModelConfig(**fields))
    assert {name: again.get(name) for name in theirs} == theirs


def test_projections_of_a_block():
    """Of each key head its queries, the key and the value; of pairs the gate is first."""
    found = tensors_of(ModelConfig(**SHAPE))
    qkv, first = found["blocks.attention.qkv.kernel"], found["blocks.feedforward.gate_up.kernel"]
    assert qkv.shape == (2, 32, 2, 4, 8)
    assert dict(zip(qkv.named(1), qkv.pieces, strict=True)) == {
        "model.layers.1.self_attn.q_proj.weight": (32, 2, 2, 8),
        "model.layers.1.self_attn.k_proj.weight": (32, 2, 1, 8),
        "model.layers.1.self_attn.v_proj.weight": (32, 2, 1, 8),
    }
    assert first.named(0) == ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2': it must be one of llama, mistral, mixtral"),
        ({"hidden_size": None}, "hidden_size must be there, a whole number each"),
        ({"attention_bias": True, "mlp_bias": True}, "attention_bias is True: .*; mlp_bias is True: it must be False"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic': it must be default, linear or"),
        (
            {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 2}},
            "low_freq_factor is 2: it must be 1; high",
        ),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be there, a whole number each, above 0"),
        ({"num_attention_heads": 0, "hidden_size": True}, "hidden_size, num_attention_heads must be there"),
        ({"num_key_value_heads": "2", "rms_norm_eps": "x"}, "heads is '2': it must be a whole .*; rms_norm_eps is 'x'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': it must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None: it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings is None: it must"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x': it must be a number above 0"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
    ],
)
def test_what_the_transformer_cannot_be(changes, message):
    found = hf_config(ModelConfig(**SHAPE)) | changes
    with pytest.raises(ValueError, match=message):
        model_fields(found)


def test_heads_of_any_size():
    """Gemma's and Qwen's are together wider than the model."""
    found = {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 32, **COMMON}
    fields = model_fields(found | {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16})
    assert ModelConfig(**fields).heads() == (4, 4, 16)
    assert hf_config(ModelConfig(**fields))["head_dim"] == 16
