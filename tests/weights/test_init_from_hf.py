"""A run that begins with a model of Hugging Face."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import rows
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from made_runs import TEXT, make_run
from safetensors.numpy import load_file, save_file

from roxxel_dist import Config, Experiment, Generator, Roxxel, Transformer
from roxxel_dist.cli.arguments import parse_train
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.weights.base import find_checkpoint, take_hf_shape
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
    """Its experts on four devices."""
    divided = QUIET | {"init_from": str(folder / "hf"), "n_devices": 4, "expert_devices": 4, "max_context": 32}
    divided |= {"val_fraction": 0.0, "scan_layers": True}
    config = Config(**divided, fsdp=True)
    run = Experiment(config).fit(folder / "text.txt", tmp_path / "tuned")
    saved = Config.from_yaml(run / "config.yaml")
    shape = (saved.dim, saved.n_heads, saved.kv_heads, saved.n_experts, saved.context_window, saved.vocab_size)
    assert shape == (32, 4, 2, 4, 9, 257)
    assert saved.max_context == 32, "smaller than its own"
    ours, theirs = (Transformer.from_pretrained(one, best=False) for one in (run, folder / "hf"))
    assert ours.config == replace(theirs.config, max_context=32, scan_layers=True)
    for one, other in zip(*(jax.tree.leaves(nnx.state(each, nnx.Param)) for each in (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert (run / "tokenizer.json").read_bytes() == (folder / "hf" / "tokenizer.json").read_bytes()
    same = take_hf_shape(Config(**divided, fsdp=True))
    assert same.to_dict() == saved.to_dict(), "it can be resumed with the same words"


@pytest.mark.long
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
            lambda folder: change_config(folder, num_key_value_heads=3),
            r"config.json: kv_heads is 3: .*\(there, n_heads is num_attention_heads, kv_heads is num_key_value_heads\)",
        ),
        (
            lambda folder: change_config(folder, rms_norm_eps=2),
            r"config.json: norm_eps is 2: .*norm_eps is rms_norm_eps",
        ),
        (
            lambda folder: change_config(folder, num_hidden_layers=3),
            "model.layers.2.self_attn.q_proj.weight is not there",
        ),
        (
            lambda folder: change_config(folder, vocab_size=300),
            r"embed_tokens.weight is \(257, 32\), and must be \(300, 32\)",
        ),
        (lambda folder: change_config(folder, num_hidden_layers=1), "there is no place for model.layers.1"),
    ],
)
def test_a_damaged_folder(folder, tmp_path, spoil, message):
    for path in (folder / "hf").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        Transformer.from_pretrained(tmp_path)


def with_tensors(folder, change, **fields):
    """Change the tensors of a folder, and fields of its config.json."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: array for name, array in (tensors | change(tensors)).items() if array is not None}
    save_file(tensors, path, {"format": "pt"})
    change_config(folder, **fields)


EMBEDDING, HEAD, ATTENTION = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn."
TIED = {"tie_word_embeddings": True}


def ones(*names, shape=(4,), dtype=np.float32):
    return lambda tensors: {name: np.ones(shape, dtype) for name in names}


def in_half(tensors):
    return {EMBEDDING: tensors[EMBEDDING].astype(np.float16), HEAD: tensors[EMBEDDING].astype(np.float16)}


def last_number(tensors):
    other = tensors[EMBEDDING].copy()
    other[-1, -1] += 1
    return {HEAD: other}


STORED = {
    "an equal head": (lambda tensors: {HEAD: tensors[EMBEDDING]}, TIED, ""),
    "an equal head of another type": (lambda tensors: in_half(tensors) | {
        HEAD: tensors[EMBEDDING].astype(np.float16).astype(np.float32)}, TIED, ""),
    "another head": (lambda tensors: {HEAD: 2 * tensors[EMBEDDING]}, TIED, "lm_head.weight differs from "
        "model.embed_tokens.weight, .* set tie_word_embeddings to false there to use both, or remove lm_head.weight"),
    "a head with one other number": (last_number, TIED, "lm_head.weight differs"),
    "a head for more tokens": (ones(HEAD, shape=(300, 32)), TIED, "lm_head.weight differs"),
    "the head alone": (lambda tensors: {HEAD: tensors[EMBEDDING], EMBEDDING: None}, TIED, ""),
    "the head alone, not tied": (lambda tensors: {HEAD: tensors[EMBEDDING], EMBEDDING: None},
        {"tie_word_embeddings": False}, "model.embed_tokens.weight is not there, and must be"),
    "another head, not tied": (lambda tensors: {HEAD: 2 * tensors[EMBEDDING]}, {"tie_word_embeddings": False}, ""),
    "tables of positions": (ones(*(f"model.{layer}rotary_emb.{name}" for layer in ("", "layers.0.self_attn.")
        for name in ("inv_freq", "cos_cached", "sin_cached"))), {}, ""),
    "masks": (ones(ATTENTION + "masked_bias"), {}, ""),
    "a bias": (ones(ATTENTION + "q_proj.bias"), {}, f"no place for {ATTENTION}q_proj.bias in the Transformer"),
    "seven": (ones(*(f"vision.{i}" for i in range(7))), {}, "vision.3, vision.4 and 2 more in the Transformer"),
    "adapters": (ones(ATTENTION + "q_proj.lora_A.weight"), {}, f"no place for {ATTENTION}q_proj.lora_A.weight"),
    "whole numbers": (ones("model.norm.weight", shape=(32,), dtype=np.int8), {},
        "model.norm.weight is I8: it must be one of BF16, F16, F32, F64, so use the weights before"),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_each_tensor_of_a_folder_is_used_or_named(folder, tmp_path, name):
    change, fields, message = STORED[name]
    shutil.copytree(folder / "hf", tmp_path / "hf")
    with_tensors(tmp_path / "hf", change, **fields)
    if not message:
        model = Transformer.from_pretrained(tmp_path / "hf")
        assert model.config.weight_tying == fields.get("tie_word_embeddings", model.config.weight_tying)
        return
    with pytest.raises(UserError, match=message):
        Transformer.from_pretrained(tmp_path / "hf")


def test_files_that_do_not_fit_together(folder, tmp_path):
    hf = tmp_path / "hf"
    export_run(folder / "run", "hf", hf, max_shard_size="60KB")
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    Transformer.from_pretrained(hf)
    name, place = next(iter(index["weight_map"].items()))
    other = next(file for file in index["weight_map"].values() if file != place)
    tensors = load_file(hf / other)

    def refused(places, message):
        (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(UserError, match=message):
            Transformer.from_pretrained(hf)

    # What the index names in one file may be in another too, with other numbers.
    right = Transformer.from_pretrained(hf).embedding.embedding[...]
    stale = load_file(hf / place)
    save_file(tensors | {one: 2 * array for one, array in stale.items()}, hf / other, {"format": "pt"})
    assert np.array_equal(Transformer.from_pretrained(hf).embedding.embedding[...], right)
    unnamed = {one: file for one, file in index["weight_map"].items() if one != name}
    refused(unnamed, f"{name} is in .* and in another file: remove one of them")
    save_file(tensors, hf / other, {"format": "pt"})
    refused(
        index["weight_map"] | {"model.extra": other}, f"{other} has no model.extra, by model.safetensors.index.json"
    )
    refused(index["weight_map"] | {name: other}, f"{other} has no {name}, by model.safetensors.index.json it has")
    shutil.copy(folder / "hf" / "model.safetensors", hf)
    refused(index["weight_map"], "has model.safetensors, and model.safetensors.index.json names other files: remove")
    shutil.copytree(folder / "hf", tmp_path / "adapted")
    (tmp_path / "adapted" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"has adapter_config.json: its adapters are for other weights, and are not read"
    ):
        Transformer.from_pretrained(tmp_path / "adapted")


def test_parameters_that_the_config_has_no_place_for(tmp_path):
    made = make_run(tmp_path / "run", num_blocks=1, qkv_bias=True)
    text = (made / "config.yaml").read_text()
    (made / "config.yaml").write_text(text.replace("qkv_bias: true", "qkv_bias: false"))
    with pytest.raises(
        UserError, match=r"of another model than its config \(it has blocks.attention.qkv.bias, which is"
    ):
        Transformer.from_pretrained(made)


@pytest.mark.parametrize(
    ("name", "file", "ids", "expected"),
    [
        ("a list", "generation_config.json", [7, 9], [7, 9, 256]),
        ("one", "generation_config.json", 7, [7, 256]),
        ("the first of all", "generation_config.json", 0, [0, 256]),
        ("in the config alone", "config.json", [7, 8], [7, 8, 256]),
        ("none", "generation_config.json", None, [7, 256]),
        (
            "a text",
            "generation_config.json",
            "<eos>",
            r"generation_config.json: eos_token_id has '<eos>': it must be an",
        ),
        ("beyond the vocabulary", "config.json", [7, 257], r"/config.json: eos_token_id has 257: .* below vocab_size"),
        ("true", "config.json", True, "eos_token_id has True"),
        ("no object", "generation_config.json", ..., "generation_config.json holds a list: it must be an object"),
    ],
)
def test_the_ids_that_end_a_text(folder, tmp_path, name, file, ids, expected):
    hf = tmp_path / "hf"
    shutil.copytree(folder / "hf", hf)
    change_config(hf, eos_token_id=7)
    (hf / "generation_config.json").unlink()
    if file == "config.json":
        change_config(hf, eos_token_id=ids)
    else:
        (hf / file).write_text(json.dumps([1] if ids is ... else {"eos_token_id": ids}))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            Generator(hf)
        return
    assert Generator(hf).stop_ids == expected
    assert Generator(folder / "run").stop_ids == [256], "a run was trained with its tokenizer's alone"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--alpha_balance", "0.3"], ""),
        (["--context_window", "9"], ""),
        (["--down_dim_q", "8"], "--down_dim_q does nothing here, because mla is False"),
    ],
)
def test_what_the_base_has_is_known_before_a_field_does_nothing(folder, tmp_path, words, message):
    (tmp_path / "base.yaml").write_text(f"init_from: {folder / 'hf'}\n")
    for source in (["--init_from", str(folder / "hf")], ["--config", str(tmp_path / "base.yaml")]):
        if message:
            with pytest.raises(UserError, match=message):
                parse_train([*source, *words])
        else:
            parse_train([*source, *words])
    with pytest.raises(UserError, match=f"{words[0]} does nothing here"):
        parse_train(words)


@pytest.mark.parametrize("kind", ["msgpack", "safetensors"])
def test_an_export_of_another_kind(folder, tmp_path, kind):
    export_run(folder / "run", kind, tmp_path / "out")
    with pytest.raises(ValueError, match=r"out has no checkpoint; it has weights alone, .* export RUN --format hf"):
        find_checkpoint(str(tmp_path / "out"))


def change_config(folder, **fields):
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
    assert take_hf_shape(config) is config
