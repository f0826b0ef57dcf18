"""Models to transformers and back, as transformers itself sees them: it runs in an interpreter of its own."""

import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from made_runs import TEXT, make_run
from states import init_state

from roxxel_dist import Transformer
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.model.generate import generate
from roxxel_dist.train.step.optimizer import InitialState, NamedOptimizer, OptimizerConfig
from roxxel_dist.weights.export import export_run

ROOT = Path(__file__).parents[2]
INTERPRETER = Path(os.environ.get("ROXXEL_HF_PYTHON") or ROOT / ".cache" / "hf" / "bin" / "python")
GEMMA = {
    "norm_position": "both", "norm_unit_offset": True, "scale_embeddings": True, "logit_softcap": 3.0,
    "activation": "gelu_tanh", "sliding_window": True, "context_window": 5,
}  # fmt: skip
OURS = {
    "tied": {},
    "untied": {"weight_tying": False, "tokenizer_type": "char"},
    "scaled": {"rope_scale_factor": 4.0, "activation": "gelu_tanh", "tokenizer_type": "bpe"},
    "mistral": {"sliding_window": True, "context_window": 5},
    "mixtral": {"use_moe": True, "n_experts": 4, "top_k_mlp": 3, "weight_tying": False},
    "mixtral_window": {"use_moe": True, "sliding_window": True, "context_window": 7},
    "llama_2": {"hidden_dim": 90, "norm_eps": 0.1, "rope_theta": 300.0},
    "llama_3": {"rope_theta": 50.0, "rope_scale_factor": 8.0, "rope_trained_context": 16},
    "qwen2": {"qkv_bias": True, "rope_scale_factor": 4.0, "sliding_window": True, "context_window": 6},
    "qwen3": {"qk_norm": "head", "n_heads": 4, "head_size": 12, "weight_tying": False},
    "qwen3_moe": {"qk_norm": "head", "use_moe": True, "n_experts": 3, "top_k_mlp": 1, "hidden_dim": 20},
    "qwen3_moe_plain": {
        "qk_norm": "head", "use_moe": True, "n_experts": 3, "norm_topk_prob": False, "rope_scale_factor": 2.0
    },
    "olmoe": {"qk_norm": "projection", "use_moe": True, "norm_topk_prob": False, "weight_tying": False},
    "olmo2": {"qk_norm": "projection", "norm_position": "after", "kv_heads": 1, "norm_eps": 1e-3},
    "gemma2": GEMMA | {"sliding_window_pattern": 2, "attn_softcap": 2.0, "query_pre_attn_scalar": 20.0},
    "gemma3": GEMMA | {
        "num_blocks": 2, "qk_norm": "head", "sliding_window_pattern": 2, "rope_local_theta": 50.0, "rope_theta": 900.0,
        "rope_scale_factor": 2.0,
    },
    "smollm3": {"num_blocks": 3, "no_rope_layer_interval": 2, "rope_theta": 500.0},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": True, "context_window": 6},
}  # fmt: skip
PLAIN = {
    "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "initializer_range": 0.2, "head_dim": 8, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
THEIR_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
THEIRS = {
    "llama": {"model_type": "llama"},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "scaled": {"model_type": "llama", "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "llama_2": {"model_type": "llama", "rms_norm_eps": 0.1, "rope_theta": 300.0, "intermediate_size": 90},
    "llama_3": {
        "model_type": "llama",
        "rope_theta": 50.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mixtral_defaults": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "max_shard_size": "20KB", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 12, "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "norm_topk_prob": True,
    },
    "qwen3_moe_first": {  # of one expert the weight is its probability
        "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24,
    },
    "olmoe": {
        "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False,
        "num_key_value_heads": 4,
    },
    "olmoe_divides": {
        "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 1},
    "gemma2": {"model_type": "gemma2", "num_hidden_layers": 3, "attn_logit_softcapping": 2.0, **THEIR_GEMMA},
    "gemma3": {
        "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 3, "rope_local_base_freq": 50.0,
        "rope_theta": 900.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, **THEIR_GEMMA,
    },
    "gemma3_local": {"model_type": "gemma3_text", "rope_local_base_freq": 50.0, **THEIR_GEMMA},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.75, "hidden_size": 40, "num_attention_heads": 5,
             "num_key_value_heads": 1},
    "phi3_window": {"model_type": "phi3", "sliding_window": 6},
}  # fmt: skip
CLOSE = 3e-5

pytestmark = [
    pytest.mark.xdist_group("hugging face"),
    pytest.mark.skipif(not INTERPRETER.exists(), reason=f"no {INTERPRETER}: `make hf` makes it; or ROXXEL_HF_PYTHON"),
]


def ask(read, make):
    words = [INTERPRETER, "-W", "ignore", ROOT / "tests" / "support" / "hf_reference.py"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    asked = {
        what: {str(folder): one for folder, one in folders.items()}
        for what, folders in {"read": read, "make": make}.items()
    }
    result = subprocess.run(
        words, input=json.dumps(asked), env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def in_ci(names, *chosen):
    """The names, of which those not chosen are slow."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.long) for name in names]


def logits(model):
    size = model.config.vocab_size
    return np.asarray(forward(model, np.arange(40, dtype=np.int32)[None] * 7 % size))


def divided(model):
    """The model with its experts on as many devices as divide them."""
    experts = next(count for count in range(8, 0, -1) if model.config.n_experts % count == 0)
    init = InitialState(NamedOptimizer(OptimizerConfig(lr=1e-3)), average=False)
    split, state, hparams = init_state(model, init, make_mesh(experts, expert=experts))
    return split.merge(state.params, state.rest, hparams, training=False)


def check_divided(model, expected, added):
    """Logits, and tokens that are added, are those of one device."""
    if model.config.use_moe:
        spread = divided(model)
        matrices = spread.blocks.feedforward.down[...]
        assert matrices.addressable_shards[0].data.size * len(matrices.sharding.device_set) == matrices.size
        with jax.set_mesh(matrices.sharding.mesh):
            np.testing.assert_allclose(logits(spread), expected, atol=CLOSE, rtol=0)
        assert greedy(spread) == added


@nnx.jit
def forward(model, tokens):
    return model(tokens)


def greedy(model):
    prompt = [i * 7 % model.config.vocab_size for i in range(9)]
    return generate(model, prompt, 12, max_context=model.config.max_context, temperature=0)


def wanted(request, fixture):
    """The variants of a fixture that this call of pytest is for."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    return {item.callspec.params["name"] for item in here if fixture in item.fixturenames}


@pytest.fixture(scope="module")
def answered(request, tmp_path_factory):
    """(folder of exported runs, folder of models of transformers, ids); transformers begins once for all variants."""
    work, theirs = tmp_path_factory.mktemp("exported"), tmp_path_factory.mktemp("theirs")
    names = wanted(request, "exported")
    for name in names:
        fields = OURS[name]
        limit = "20KB" if name == "mixtral" else "5GB"
        export_run(make_run(work / f"{name}_run", **fields), "hf", work / name, max_shard_size=limit)
    made = {theirs / name: {**PLAIN, **THEIRS[name]} for name in wanted(request, "theirs")}
    return work, theirs, ask({work / name: [TEXT] for name in names}, made)


@pytest.fixture(scope="module")
def exported(answered):
    work, _, ids = answered
    return work, ids


@pytest.fixture(scope="module")
def theirs(answered):
    return answered[1]


@pytest.mark.parametrize("name", in_ci(OURS, "gemma3"))
def test_transformers_gives_our_logits_and_ids(exported, name):
    work, ids = exported
    model = Transformer.from_pretrained(work / f"{name}_run")
    found, expected = np.load(work / name / "logits.npy"), logits(model)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=CLOSE, rtol=0)
    added = np.load(work / name / "greedy.npy").tolist()
    assert greedy(model) == added
    check_divided(model, found, added)
    assert ids[str(work / name)] == [Tokenizer.load(work / f"{name}_run" / "tokenizer.json").encode(TEXT)]
    assert len(list((work / name).glob("*.safetensors"))) == 1 or name == "mixtral"
    again = Transformer.from_pretrained(work / name)
    assert np.array_equal(logits(again), expected), "there and back, nothing is lost"


@pytest.mark.parametrize("name", in_ci(THEIRS))
def test_a_model_of_transformers_gives_its_logits_here(theirs, name):
    model = Transformer.from_pretrained(theirs / name)
    expected = np.load(theirs / name / "logits.npy")
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(model), expected, atol=CLOSE, rtol=0)
    added = np.load(theirs / name / "greedy.npy").tolist()
    assert greedy(model) == added
    check_divided(model, expected, added)
    if name == "mixtral":
        assert (theirs / name / "model.safetensors.index.json").exists()
