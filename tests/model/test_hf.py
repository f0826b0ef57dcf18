"""The same model in two sets of words. What transformers makes of it is tests/weights/test_hugging_face.py."""

import numpy as np
import pytest

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.families import model_fields
from roxxel_dist.model.huggingface import hf_config, put_together, take_out, tensors_of

SHAPE = {"dim": 32, "num_blocks": 2, "head_size": 8, "kv_heads": 2, "max_context": 64, "vocab_size": 50}
GEMMA = {
    "norm_position": "both", "norm_unit_offset": True, "scale_embeddings": True, "logit_softcap": 3.0,
    "activation": "gelu_tanh", "sliding_window": True,
}  # fmt: skip
VARIANTS = [
    {"weight_tying": False, "rope_scale_factor": 2.0, "activation": "gelu_tanh"},
    {"sliding_window": True, "context_window": 5, "expansion": 3},
    {"use_moe": True, "n_experts": 3, "top_k_mlp": 2, "sliding_window": True},
    {"hidden_dim": 90, "norm_eps": 1e-5, "rope_theta": 5e5, "rope_scale_factor": 8.0, "rope_trained_context": 16},
    {"qkv_bias": True, "rope_scale_factor": 2.0},
    {"qk_norm": "head", "sliding_window": True},
    {"qk_norm": "head", "use_moe": True, "top_k_mlp": 1},
    {"qk_norm": "projection", "norm_position": "after"},
    GEMMA | {"sliding_window_pattern": 2, "attn_softcap": 2.0, "query_pre_attn_scalar": 20.0},
    GEMMA | {"qk_norm": "head", "sliding_window_pattern": 2, "rope_local_theta": 50.0, "rope_scale_factor": 2.0},
    {"no_rope_layer_interval": 2},
    {"partial_rotary_factor": 0.75, "sliding_window": True},
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
            cut = inner + (0 if tensors.bias else 2 if tensors.axis == 1 else 1)
            axes = range(len(ours.shape)) if not tensors.transposed | tensors.bias else (*range(inner + 1), cut)
            assert read == np.prod([part.shape[i] if i in axes else ours.shape[i] for i in range(len(ours.shape))])


COMMON = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}
QWEN3_MOE = {
    "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip
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
        (
            {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
             "intermediate_size": 18944, "max_position_embeddings": 131072, "rope_theta": 1e6,
             "use_sliding_window": False, "max_window_layers": 32, "tie_word_embeddings": False},
            {"hidden_dim": 18944, "qkv_bias": True, "sliding_window": False, "kv_heads": 4},
        ),
        (
            {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
             "max_position_embeddings": 40960, "rope_theta": 1e6, "attention_bias": False, "sliding_window": None,
             "use_sliding_window": False},
            {"expansion": None, "hidden_dim": 12288, "qk_norm": "head", "qkv_bias": False, "rope_theta": 1e6},
        ),
        (
            {"model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 8192, "sliding_window": 4096,
             "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
             "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
            {"hidden_dim": None, "expansion": 6, "attn_softcap": 50.0, "logit_softcap": 30.0, "head_size": 256,
             "query_pre_attn_scalar": None, "weight_tying": True, "sliding_window_pattern": 2,
             "activation": "gelu_tanh", "norm_unit_offset": True, "norm_position": "both"},
        ),
        (
            {"model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
             "head_dim": 256, "intermediate_size": 6912, "max_position_embeddings": 32768, "sliding_window": 512,
             "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_scaling": None,
             "rope_local_base_freq": 10000.0, "final_logit_softcapping": None,
             "hidden_activation": "gelu_pytorch_tanh"},
            {"context_window": 512, "sliding_window_pattern": 6, "rope_local_theta": 1e4, "rope_theta": 1e6,
             "qk_norm": "head", "logit_softcap": None, "kv_heads": 1},
        ),
        (
            {"model_type": "phi3", "num_key_value_heads": 32, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
             "max_position_embeddings": 4096, "sliding_window": 2047, "rope_scaling": None},
            {"partial_rotary_factor": 1.0, "sliding_window": True, "context_window": 2047},
        ),
    ],
    ids=[
        "LLaMA 2 7B", "LLaMA 3.1 8B", "Mistral 7B v0.1", "Mixtral 8x7B", "Qwen2.5 7B", "Qwen3 8B", "Gemma 2 2B",
        "Gemma 3 1B", "Phi-3 mini",
    ],
)  # fmt: skip
def test_models_of_the_world(theirs, ours):
    """Their `config.json`, as they were published."""
    fields = model_fields({**COMMON, **theirs})
    assert {name: fields.get(name) for name in ours} == ours
    again = hf_config(ModelConfig(**fields))
    if theirs["model_type"] == "phi3":  # whose tensors are fused, and which otherwise is a Mistral
        assert again["model_type"] == "mistral"
        return
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
        ({"model_type": "gpt2"}, "model_type is 'gpt2': it must be one of llama, mistral, mixtral, qwen2, qwen3,"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3': it must be one of .*, gemma3_text"),
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
        (
            {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 8.0},
            "clip_qkv is 8.0: it must be None",
        ),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]: it must be \[\]"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size must be there, a whole number"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "layer_types is .*: no layer must be full_attention, and the others sliding_attention",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is True: it must be False"),
        ({"model_type": "olmo2", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: it must be 1"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 2}, "every second layer must be full_attention"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: it must be N"),
        (
            {"model_type": "smollm3", "no_rope_layers": [0, 1]},
            r"no_rope_layers is \[0, 1\]: every so many-th must be 0",
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope': it must be default"),
        ({"model_type": "phi3", "partial_rotary_factor": "x"}, "partial_rotary_factor is 'x': it must be a number"),
    ],
)
def test_what_the_transformer_cannot_be(changes, message):
    found = hf_config(ModelConfig(**SHAPE)) | changes
    with pytest.raises(ValueError, match=message):
        model_fields(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qkv_bias": True, "qk_norm": "head"}, "no Qwen3, .*: qkv_bias is True: in Qwen3 it is False"),
        (
            {"qk_norm": "head", "attn_softcap": 2.0, "use_moe": True},
            "Qwen3 MoE, .*: attn_softcap is 2.0: .* it is None",
        ),
        ({"norm_position": "after", "sliding_window": True}, "OLMo 2.*qk_norm is 'none'.*; sliding_window is True"),
        (GEMMA | {"sliding_window_pattern": 3}, "Gemma 2.*: sliding_window_pattern is 3: in Gemma 2 it is 2"),
        (GEMMA | {"qk_norm": "head", "rope_scale_factor": 2.0}, "Gemma 3 does not scale local layers: set sliding"),
        ({"no_rope_layer_interval": 2, "use_moe": True}, "SmolLM3, .*: use_moe is True: in SmolLM3 it is False"),
        ({"partial_rotary_factor": 0.5, "rope_scale_factor": 2.0}, "Phi-3, .*: rope_scale_factor is 2.0: in Phi-3"),
    ],
)
def test_what_no_family_has(fields, message):
    with pytest.raises(ValueError, match=message):
        hf_config(ModelConfig(**SHAPE, **fields))


def test_heads_of_any_size():
    """Gemma's and Qwen's are together wider than the model."""
    found = {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 32, **COMMON}
    fields = model_fields(found | {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16})
    assert ModelConfig(**fields).heads() == (4, 4, 16)
    assert hf_config(ModelConfig(**fields))["head_dim"] == 16
