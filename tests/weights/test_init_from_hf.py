"""A run that begins with a model of Hugging Face."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import rows
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from made_runs import TEXT, make_run

from roxxel_dist import Config, Experiment, Roxxel, Transformer
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.weights.base import find_checkpoint, with_shape_of
from roxxel_dist.weights.export import export_run
from roxxel_dist.weights.hf_folder import HfFolder

QUIET = {
    "n_devices": 1,
    "batch_size": 8,
    "eval_iters": 1,
    "max_steps": 1,
    "lr": 1e-9,
    "optimizer": "sgd",
    "sample_prompt": "def",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("init")
    made = make_run(work / "run", use_moe=True, n_experts=4, sliding_window=True, context_window=9)
    export_run(made, "hf", work / "hf")
    (work / "text.txt").write_text(TEXT * 100)
    return work


def test_it_has_its_shape_weights_and_tokenizer(folder, tmp_path):
    config = Config(init_from=str(folder / "hf"), fsdp=True, max_context=32, **QUIET)
    run = Experiment(config).fit(folder / "text.txt", tmp_path / "tuned")
    saved = Config.from_yaml(run / "config.yaml")
    shape = (saved.dim, saved.n_heads, saved.kv_heads, saved.n_experts, saved.context_window, saved.vocab_size)
    assert shape == (32, 4, 2, 4, 9, 257)
    assert saved.max_context == 32, "smaller than its own"
    tokens = jnp.arange(30)[None]
    ours, theirs = (Transformer.from_pretrained(one, best=False) for one in (run, folder / "hf"))
    logits = nnx.jit(lambda model, tokens: model(tokens))
    np.testing.assert_allclose(logits(ours, tokens), logits(theirs, tokens), atol=1e-4)
    assert (run / "tokenizer.json").read_bytes() == (folder / "hf" / "tokenizer.json").read_bytes()
    same = with_shape_of(Config(init_from=str(folder / "hf"), fsdp=True, max_context=32, **QUIET))
    assert same.to_dict() == saved.to_dict(), "it can be resumed with the same words"


def test_without_a_tokenizer_it_trains_on_shards(folder, tmp_path):
    """And says so where it is to read text."""
    shutil.copytree(folder / "hf", tmp_path / "hf", ignore=shutil.ignore_patterns("tokenizer*"))
    rng = np.random.default_rng(0)
    data = Roxxel(tmp_path / "data_*.rox")
    data.write((rng.integers(1, 257, 400).astype(np.uint16) for _ in range(10)), vocab_size=257)
    config = Config(init_from=str(tmp_path / "hf"), **QUIET | {"sample_prompt": ""})
    run = Experiment(config).fit(tmp_path / "data_*.rox", tmp_path / "tuned")
    assert list(rows(run)) == [1]
    assert not (run / "tokenizer.json").exists()
    assert Transformer.from_pretrained(run, best=False).config.dim == 32
    with pytest.raises(ValueError, match=r"hf has no tokenizer.json"):
        Experiment(config).fit(folder / "text.txt", tmp_path / "text")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 64}, "dim is 64, and the model in .*hf has 32: leave it out"),
        ({"max_context": 128}, "max_context is 128, and the model in .*hf has 64"),
        ({"pos_encoding": "none"}, "pos_encoding is 'none', and the model in .* has 'rotary'"),
    ],
)
def test_a_field_that_says_otherwise(folder, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        Experiment(Config(init_from=str(folder / "hf"), **QUIET, **fields)).fit(folder / "text.txt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: put model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"), "is no file of safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (
            lambda folder: change(folder, num_key_value_heads=3),
            r"config.json: kv_heads is 3: .*\(there, n_heads is num_attention_heads, kv_heads is num_key_value_heads\)",
        ),
        (lambda folder: change(folder, rms_norm_eps=2), r"config.json: norm_eps is 2: .*norm_eps is rms_norm_eps"),
        (lambda folder: change(folder, num_hidden_layers=3), "model.layers.2.self_attn.q_proj.weight is not there"),
        (lambda folder: change(folder, vocab_size=300), r"embed_tokens.weight is \(257, 32\), and must be \(300, 32\)"),
        (lambda folder: change(folder, num_hidden_layers=1), "there is no place for model.layers.1"),
    ],
)
def test_a_damaged_folder(folder, tmp_path, spoil, message):
    for path in (folder / "hf").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        Transformer.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["msgpack", "safetensors"])
def test_an_export_of_another_kind(folder, tmp_path, kind):
    export_run(folder / "run", kind, tmp_path / "out")
    with pytest.raises(ValueError, match=r"out has no checkpoint; it has weights alone, .* export RUN --format hf"):
        find_checkpoint(str(tmp_path / "out"))


def change(folder, **fields):
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | fields))


def test_parameters_of_another_model_are_told(folder):
    with HfFolder(folder / "hf") as found, pytest.raises(ValueError, match=r"of another model .* leave out the model"):
        found.check_params({"embedding.embedding": jnp.zeros((257, 48))})


def test_the_arrays_of_all_blocks_as_one(folder):
    """As they lie over the devices: each reads what it holds."""
    mesh = jax.make_mesh((2,), ("blocks",), axis_types=(AxisType.Auto,))
    places = NamedSharding(mesh, PartitionSpec("blocks")), NamedSharding(mesh, PartitionSpec())
    with HfFolder(folder / "hf") as found:
        params, like = found.params(), {}
        for name, array in params.items():
            place = places[0 if name.startswith("blocks.") else 1]
            like[name] = jax.ShapeDtypeStruct(array.shape, jnp.float32, sharding=place)
        restored = found.restore_params(like)
    for name, array in params.items():
        assert np.array_equal(restored[name], array), name
    assert restored["blocks.feedforward.down"].shape == (2, 4, 88, 32)


def test_a_folder_that_is_gone_changes_nothing(tmp_path):
    config = Config(init_from=str(tmp_path / "gone"), dim=48)
    assert with_shape_of(config) is config
