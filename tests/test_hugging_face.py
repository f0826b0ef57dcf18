"""Models to transformers and back, as transformers itself sees them: it runs in an interpreter of its own."""

import json
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from made_runs import TEXT, make_run

from roxxel_dist import Transformer
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.weights.export import export_run

ROOT = Path(__file__).parent.parent
INTERPRETER = Path(os.environ.get("ROXXEL_HF_PYTHON") or ROOT / ".cache" / "hf" / "bin" / "python")
OURS = {
    "tied": {},
    "untied": {"weight_tying": False, "tokenizer_type": "char"},
    "scaled": {"rope_scale_factor": 4.0, "activation": "gelu_tanh", "tokenizer_type": "bpe"},
    "mistral": {"sliding_window": True, "context_window": 5},
    "mixtral": {"use_moe": True, "n_experts": 4, "top_k_mlp": 3, "weight_tying": False},
    "mixtral_window": {"use_moe": True, "sliding_window": True, "context_window": 7},
    "llama_2": {"hidden_dim": 90, "norm_eps": 0.1, "rope_theta": 300.0},
    "llama_3": {"rope_theta": 50.0, "rope_scale_factor": 8.0, "rope_trained_context": 16},
}
PLAIN = {
    "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "initializer_range": 0.2, "head_dim": 8,
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
}

pytestmark = [
    pytest.mark.xdist_group("hugging face"),
    pytest.mark.skipif(not INTERPRETER.exists(), reason=f"no {INTERPRETER}: `make hf` makes it; or ROXXEL_HF_PYTHON"),
]


def ask(what, asked):
    words = [INTERPRETER, "-W", "ignore", ROOT / "tests" / "hf_reference.py", what]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    asked = {str(folder): one for folder, one in asked.items()}
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
    return np.asarray(nnx.jit(lambda m, x: m(x))(model, jnp.arange(40)[None] * 7 % size))


def wanted(request):
    """The variants that this call of pytest is for."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    asked = [item for item in here if request.fixturename in item.fixturenames]
    return {item.callspec.params["name"] for item in asked}


@pytest.fixture(scope="module")
def exported(request, tmp_path_factory):
    """(folder, what transformers made of it) of the variants; it reads them all at once."""
    work, names = tmp_path_factory.mktemp("exported"), wanted(request)
    for name in names:
        fields = OURS[name]
        limit = "20KB" if name == "mixtral" else "5GB"
        export_run(make_run(work / f"{name}_run", **fields), "hf", work / name, max_shard_size=limit)
    return work, ask("read", {work / name: [TEXT] for name in names})


@pytest.mark.parametrize("name", in_ci(OURS, "llama_2"))
def test_transformers_gives_our_logits_and_ids(exported, name):
    work, ids = exported
    model = Transformer.from_pretrained(work / f"{name}_run")
    found, expected = np.load(work / name / "logits.npy"), logits(model)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert ids[str(work / name)] == [Tokenizer.load(work / f"{name}_run" / "tokenizer.json").encode(TEXT)]
    assert len(list((work / name).glob("*.safetensors"))) == 1 or name == "mixtral"
    again = Transformer.from_pretrained(work / name)
    assert np.array_equal(logits(again), expected), "there and back, nothing is lost"


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    work = tmp_path_factory.mktemp("theirs")
    ask("make", {work / name: {**PLAIN, **THEIRS[name]} for name in wanted(request)})
    return work


@pytest.mark.parametrize("name", in_ci(THEIRS, "llama_3"))
def test_a_model_of_transformers_gives_its_logits_here(theirs, name):
    model = Transformer.from_pretrained(theirs / name)
    expected = np.load(theirs / name / "logits.npy")
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    if name == "mixtral":
        assert (theirs / name / "model.safetensors.index.json").exists()
