"""Text from trained models: batches, streams, and what is compiled for them."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import yaml
from flax import nnx
from made_runs import TEXT, make_run
from tokenizers import processors

from roxxel_dist import Generator, Transformer
from roxxel_dist.checkpoint.metadata import BaseModelRef
from roxxel_dist.cli import main
from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer
from roxxel_dist.model import generate as generation
from roxxel_dist.settings.config import RECORD
from roxxel_dist.weights import export
from roxxel_dist.weights.base import INITIALIZED_FROM
from roxxel_dist.weights.export import export_run
from roxxel_dist.weights.files import BEST, NEWEST, read_weights, write_weights
from roxxel_dist.weights.generator import cut_at_stop, pieces

PROMPTS = ["def f(x):", "x", "return x + 1  # and much more than that"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("generator") / "run", num_blocks=1)


@pytest.fixture(scope="module")
def generator(made):
    return Generator(made)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 5}])
def test_a_row_of_a_batch_is_what_it_is_alone(generator, options):
    rows = generator.generate(PROMPTS, 20, **options)
    assert rows == [generator.generate(prompt, 20, **options) for prompt in PROMPTS]
    assert len(set(rows)) == 3
    streamed = list(generator.stream(PROMPTS[0], 20, **options))
    assert "".join(streamed) == rows[0]
    assert len(streamed) > 3


def test_seeds(generator):
    one, same, other = generator.generate(["x"] * 3, 12, temperature=1.0, seed=[1, 1, 2])
    assert one == same != other
    assert generator.generate("x", 12, temperature=1.0, seed=2) == other
    with pytest.raises(ValueError, match="seed has 2 numbers for 3 prompts"):
        generator.generate(["x"] * 3, seed=[1, 2])
    assert generator.generate([]) == []
    options = {"max_context": 16, "sampling": generation.Sampling(), "seeds": []}
    assert generation.generate_rows(generator.model, [], 8, **options) == []


def test_numbers_of_numpy(generator):
    options = {"temperature": 1.0, "top_k": 3}
    same = {"temperature": np.float32(1), "top_k": np.int64(3), "seed": np.int64(5)}
    assert generator.generate("x", np.int32(9), **same) == generator.generate("x", 9, seed=5, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 5}, "prompt is 5: it must be a text, or a list of texts"),
        ({"prompt": None}, "prompt is None: it must be a text"),
        ({"prompt": ["x", 1]}, "prompt is 1: it must be a text"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5: it must be at least 1, a whole number"),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5': it must be"),
        ({"seed": 1.5}, "seed is 1.5: it must be at least 0"),
        ({"stop": ""}, "stop has '': it must be a text that is not empty"),
        ({"stop": ["x", 3]}, "stop has 3: it must be a text"),
        ({"truncate_prompt_tokens": 64}, r"truncate_prompt_tokens is 64: .* at most 63, which is max_context - 1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0: it must be above 0"),
    ],
    ids=str,
)
def test_what_is_of_no_use(generator, fields, message):
    with pytest.raises(ValueError, match=message):
        generator.generate(**{"prompt": "x", **fields})
    with pytest.raises(ValueError, match="prompt is" if "prompt" in fields else message):
        list(generator.stream(**{"prompt": "x", **fields}))


def test_nothing_is_compiled_for_other_prompts_lengths_and_options(generator):
    generator.generate("x", 5)
    sizes = generation._prefill._cache_size(), generation._decode._cache_size()
    generator.generate("other", 30, temperature=0)
    generator.generate("def f(x):", 9, temperature=0.3, top_k=3, top_p=0.5, seed=4, stop_at_eos=False)
    generator.generate(LONG[:62], 1, temperature=0)
    list(generator.stream("y", 20, top_k=1))
    assert (generation._prefill._cache_size(), generation._decode._cache_size()) == sizes


def test_ids_that_the_model_does_not_have(generator):
    options = {"max_context": 16, "sampling": generation.Sampling(), "seeds": [0]}
    with pytest.raises(ValueError, match=r"the prompt has the id 5000: the ids of the model are 0 to \d+"):
        generation.generate_rows(generator.model, [[1, 5000]], 3, **options)


def test_it_stops_at_the_end_of_a_text(generator):
    whole = generation.generate(generator.model, [0], 30, max_context=64, temperature=1.0, seed=3)
    end = whole[4]
    cut = generation.generate(generator.model, [0], 30, max_context=64, temperature=1.0, seed=3, stop_ids=[end])
    assert cut == whole[: whole.index(end)]
    options = {"max_context": 64, "sampling": generation.Sampling(temperature=1.0), "stop_ids": [end]}
    assert list(generation.stream(generator.model, [0], 30, seed=3, **options)) == cut
    # Three rows: what is compiled for the tests above.
    rows = generation.generate_rows(generator.model, [[0], [1], [2]], 30, seeds=[3, 3, 3], **options)
    assert rows[0] == cut


LONG = "".join(chr(ord("a") + i % 23) for i in range(70))
"""70 tokens of bytes, and the model of these tests reads 64."""


@pytest.mark.parametrize(
    ("prompts", "asked", "lengths", "lines"),
    [
        ([LONG[:50]], 200, [14], ["the text ended at max_context, 64 tokens with the prompt, before max_new_tokens"]),
        ([LONG[:63]], 1, [1], []),
        ([LONG[:63]], 2, [1], ["the text ended at max_context"]),
        ([LONG[:64]], 5, [1], ["the prompt has 64 tokens: 1 at the beginning are not read, only the last 63", "ended"]),
        ([LONG, "x", LONG[:60]], 20, [1, 20, 4], ["1 of 3 prompts have too many tokens: 7 at ", "2 of 3 texts ended"]),
        (["x"], 63, [63], []),
        (["x"], 64, [63], ["the text ended at max_context"]),
    ],
    ids=["default", "room", "no room", "too long", "several", "whole", "one more"],
)
def test_a_prompt_is_read_whole_and_the_text_ends_at_max_context(
    generator, monkeypatch, prompts, asked, lengths, lines
):
    options = {"temperature": 0, "stop_at_eos": False}
    monkeypatch.setattr(generator, "_say", (said := []).append)
    rows = generator.generate(prompts, asked, **options)
    assert [len(line) > 0 for line in said] == [True] * len(lines)
    assert all(part in line for part, line in zip(lines, said, strict=True)), said
    for prompt, row, length in zip(prompts, rows, lengths, strict=True):
        ids = list(prompt.encode())[-63:]
        new = by_hand(generator, ids, length)
        assert row == "".join(pieces(generator.tokenizer, new, prompt, list(prompt.encode())))
        said.clear()
        assert "".join(generator.stream(prompt, asked, **options)) == row
        assert len(said) == (len(prompt) > 63) + (length < asked)


def full_rows(generator):
    options = {"max_new_tokens": 60, "temperature": 0, "stop_at_eos": False}
    rows = generator.generate([LONG[:63], "x", LONG[:40]], **options)
    assert rows == [generator.generate(prompt, **options) for prompt in (LONG[:63], "x", LONG[:40])]


def test_a_row_that_is_full_does_not_change_others(generator, monkeypatch):
    monkeypatch.setattr(generator, "_say", lambda line: None)
    full_rows(generator)


@pytest.mark.long
def test_a_row_of_experts_that_is_full_does_not_change_others(tmp_path):
    fields = {"pos_encoding": "learned", "use_moe": True, "n_experts": 4, "top_k_mlp": 2}
    full_rows(Generator(make_run(tmp_path / "run", num_blocks=1, **fields), say=lambda line: None))


def by_hand(generator, ids, count):
    """Greedy tokens without a cache."""
    ids = list(ids)
    for _ in range(count):
        window = np.zeros((1, 64), np.int32)
        window[0, : len(ids)] = ids
        ids.append(int(FORWARD(generator.model, window)[0, len(ids) - 1].argmax()))
    return ids[-count:]


FORWARD = nnx.jit(lambda model, tokens: model(tokens))


def test_two_prompts_with_the_same_end_and_the_default_length_have_different_texts(generator):
    with pytest.warns(UserWarning, match="3 of 3 texts ended at max_context"):  # three: what is compiled above
        one, other, _ = generator.generate(["def f(x): x ", "zzz ", "x"], temperature=0, stop_at_eos=False)
    assert one[:20] != other[:20]
    with pytest.warns(
        UserWarning, match="the prompt has 70 tokens: 30 at the beginning are not read, only the last 40"
    ):
        cut = generator.generate(LONG, 8, temperature=0, truncate_prompt_tokens=40)
    assert cut == generator.generate(LONG[-40:], 8, temperature=0)


@pytest.mark.parametrize(
    ("parts", "stops", "expected"),
    [
        (["abc", "def"], [], "abcdef"),
        (["abc", "def"], ["cd"], "ab"),
        (["abc", "def"], ["de", "cd"], "ab"),
        (["a", "a", "a", "b"], ["aab"], "a"),
        (["x\n", "\n", "y"], ["\n\n"], "x"),
        (["x\n"], ["\n\n"], "x\n"),
        (["stop"], ["stop"], ""),
        ([], ["stop"], ""),
        (["ab", "ac"], ["abad"], "abac"),
        (["cb", "cab"], ["cbca", "b"], ""),
        (["cb", "cc"], ["cbca", "b"], "c"),
        (["cb"], ["cbca", "b"], "c"),
        (["b", "cabb", "abcb"], ["ba", "bbab"], "bca"),
    ],
)
def test_a_text_ends_before_the_first_stop_text(parts, stops, expected):
    for pieces_of_it in (parts, ["".join(parts)], list("".join(parts))):  # the same in whatever pieces
        found = list(cut_at_stop(iter(pieces_of_it), stops))
        assert "".join(found) == expected
        assert "" not in found


def test_stop_texts_and_stop_ids(generator, monkeypatch):
    whole = generator.generate("x", 30, temperature=1.0, seed=3, stop_at_eos=False)
    end = whole[6:8]
    cut = whole[: whole.index(end)]
    options = {"temperature": 1.0, "seed": 3, "stop_at_eos": False}
    assert generator.generate(["x", "y", "z"], 30, stop=[end, "never"], **options)[0] == cut
    assert "".join(generator.stream("x", 30, stop=end, **options)) == cut
    ids = generation.generate(generator.model, [ord("x")], 30, max_context=64, temperature=1.0, seed=3)
    monkeypatch.setattr(generator, "stop_ids", [ids[9], ids[6], 256])
    shorter = generator.generate("x", 30, temperature=1.0, seed=3)
    assert shorter == "".join(generator.stream("x", 30, temperature=1.0, seed=3))
    first = min(ids.index(ids[9]), ids.index(ids[6]))
    assert shorter == "".join(pieces(generator.tokenizer, ids[:first], "x", [ord("x")]))


def test_the_model_stays_as_it_was(generator):
    assert generator.model.deterministic
    generator.model.train()
    generator.generate("x", 2)
    assert not generator.model.deterministic
    generator.model.eval()


@pytest.mark.parametrize("kind", ["byte", "bpe", "char"])
def test_a_stream_ends_no_piece_within_a_character(kind):
    tokenizer = train_tokenizer(kind, [TEXT * 20], 300)
    found = list(pieces(tokenizer, tokenizer.encode(TEXT)))
    assert "".join(found) == TEXT
    assert not any("\ufffd" in piece for piece in found)
    assert len(found) > len(TEXT) / 3


def test_bytes_that_are_no_text_come_as_in_one_piece():
    tokenizer = train_tokenizer("byte", [])
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, tokenizer.vocab_size, 30).tolist()
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_the_best_weights_and_the_newest(made, tmp_path):
    params, _ = read_weights(made / NEWEST)
    for name in ("config.yaml", "tokenizer.json"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    write_weights(tmp_path / NEWEST, 9, params)
    write_weights(tmp_path / BEST, 4, {name: array * 2 for name, array in params.items()})
    steps = [Generator(tmp_path).step, Generator(tmp_path, best=False).step, Generator(f"{tmp_path}@9").step]
    assert steps == [4, 9, 9]
    best, newest = (Transformer.from_pretrained(tmp_path, best=best) for best in (True, False))
    assert np.array_equal(best.norm.scale[...], 2 * newest.norm.scale[...])
    assert best.deterministic
    with pytest.raises(ValueError, match="no checkpoint, and no weights of step 5; those there are: 4, 9"):
        Generator(tmp_path, step=5)


def test_the_best_weights_in_place_of_the_newest_are_told_of(made, tmp_path, capsys):
    (tmp_path / "config.yaml").write_bytes((made / "config.yaml").read_bytes())
    write_weights(tmp_path / BEST, 4, read_weights(made / NEWEST)[0])
    Transformer.from_pretrained(tmp_path)
    assert capsys.readouterr().err == ""
    Transformer.from_pretrained(tmp_path, best=False)
    assert capsys.readouterr().err == f"roxxel-dist: {tmp_path} has no {NEWEST}: taking {BEST}, of step 4\n"


@pytest.mark.parametrize("kind", ["msgpack", "safetensors"])
def test_an_export_is_read_as_a_run(made, tmp_path, kind):
    told = export_run(made, kind, tmp_path / "out", dtype="bfloat16", max_shard_size="20KB")
    assert told.startswith("step 7 of ")
    model, same = Transformer.from_pretrained(tmp_path / "out"), Transformer.from_pretrained(made)
    assert model.norm.scale[...].dtype == jnp.bfloat16
    tokens = np.arange(64, dtype=np.int32)[None]
    np.testing.assert_allclose(np.float32(FORWARD(model, tokens)), FORWARD(same, tokens), atol=0.3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing is left beside it"
    assert bool(list((tmp_path / "out").glob("*.index.json"))) == (kind == "safetensors")
    assert Generator(tmp_path / "out").step == Generator(f"{tmp_path / 'out'}@7").step == 7
    with pytest.raises(ValueError, match=r"out has no .*weights of step 99(: they are of step 7|; those there are: 7)"):
        Generator(tmp_path / "out", step=99)


def test_an_export_that_is_damaged(made, tmp_path):
    out = tmp_path / "out"
    export_run(made, "msgpack", out)
    whole = (out / NEWEST).read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-1]):
        (out / NEWEST).write_bytes(content)
        with pytest.raises(ValueError, match=r"holds no weights, or not all of them .*: put the right file back"):
            Generator(out)
    for spoil in (lambda path: path.write_bytes(b""), Path.unlink):
        spoil(out / NEWEST)
        with pytest.raises(ValueError, match=r"no weights beside its config.yaml. .* or export the run again"):
            Generator(out)
    (out / "checkpoints").mkdir()  # that is a run
    with pytest.raises(ValueError, match="train it until its first one is saved"):
        Generator(out)


def test_a_prompt_for_a_model_of_others_begins_as_its_tokenizer_has_it(made, tmp_path):
    export_run(made, "hf", tmp_path / "hf")
    assert Generator(tmp_path / "hf")._ids("x") == [ord("x")], "none of ours adds anything"
    assert train_tokenizer("char", ["xyz"]).text_start == []
    path = tmp_path / "hf" / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.post_processor = processors.Sequence([
        processors.ByteLevel(),
        processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]),
    ])  # fmt: skip
    inner.save(str(path))
    for path_and_step in ({"path": tmp_path / "hf", "step": 7}, {"path": f"{tmp_path / 'hf'}@7"}):
        with pytest.raises(ValueError, match="hf is a model of Hugging Face, which has no step 7: leave the step out"):
            Generator(**path_and_step)
    theirs = Generator(tmp_path / "hf")
    assert theirs.tokenizer.encode("x") == [ord("x")], "text to train on is as it was"
    assert [theirs._ids(prompt) for prompt in ("x", "")] == [[256, ord("x")], [256]]
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", NEWEST):
        (tmp_path / "run" / name).write_bytes((made / name).read_bytes())
    (tmp_path / "run" / "tokenizer.json").write_bytes(path.read_bytes())
    assert Generator(tmp_path / "run")._ids("x") == [ord("x")], "a run was not trained with it"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mla": True, "rope_dim": 8, "no_sink": True, "norm_type": "layernorm", "use_swiglu": False},
            "mla is True: .*; no_sink is True: .*; norm_type is 'layernorm': .*; use_swiglu is False",
        ),
        ({"pos_encoding": "learned"}, "pos_encoding is 'learned': they have rotary positions alone"),
        ({"use_moe": True, "top_k_mlp": 1}, "top_k_mlp is 1: Mixtral divides"),
        ({"sliding_window": True, "rope_scale_factor": 2.0}, "rope_scale_factor is 2.0 with sliding_window"),
    ],
)
def test_what_hugging_face_cannot_say(made, tmp_path, fields, message):
    made = shutil.copytree(made, tmp_path / "run")
    config = yaml.safe_load((made / "config.yaml").read_text())
    (made / "config.yaml").write_text(yaml.safe_dump(config | fields))
    with pytest.raises(ValueError, match=message):
        export_run(made, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_too_much_for_msgpack(made, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LIMIT", 50_000)  # in truth 2 GB
    with pytest.raises(ValueError, match=r"a msgpack file holds less than .* GB: use --format safetensors"):
        export_run(made, "msgpack", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_folder_to_write_into(made, tmp_path):
    with pytest.raises(ValueError, match="holds the run"):
        export_run(made, "hf", made, overwrite=True)
    for name in ("checkpoints", "export"):  # of a run, and somewhere above one
        (tmp_path / "other" / name / "1").mkdir(parents=True)
        with pytest.raises(ValueError, match="has 1 in it, which no export made: name another folder"):
            export_run(made, "hf", tmp_path / "other" / name, overwrite=True)
    with pytest.raises(ValueError, match="holds the run"):
        export_run(f"{made}@7", "hf", made, overwrite=True)
    assert (made / NEWEST).exists()
    with pytest.raises(ValueError, match="max_shard_size is '5 bananas'"):
        export_run(made, "hf", tmp_path / "out", max_shard_size="5 bananas")


FOLDERS_OF_OTHERS = {
    "plain files": ["thesis.txt"],
    "a hidden file": [".notes"],
    "an export with a file of the user": ["digests.json", "model.safetensors", "README.md"],
    "a table of another program": ["digests.json"],
    "a run of a Trainer": ["metrics.jsonl"],
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FOLDERS_OF_OTHERS)
def test_an_export_never_replaces_what_no_export_made(made, tmp_path, name, overwrite):
    out, files = tmp_path / "out", FOLDERS_OF_OTHERS[name]
    if len(files) == 3:
        export_run(made, "safetensors", out)
        assert set(files[:2]) <= {path.name for path in out.iterdir()}
    for file in files[-1:]:
        out.mkdir(exist_ok=True)
        (out / file).write_text("of the user")
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=f"has {files[-1]} in it, which no export made: name another folder"):
        export_run(made, "hf", out, overwrite=overwrite)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_is_replaced_when_that_is_asked_for(made, tmp_path):
    (tmp_path / ".out.replaced").mkdir()  # of the user, by chance
    (tmp_path / "out").mkdir()
    export_run(made, "safetensors", tmp_path / "out")
    with pytest.raises(ValueError, match="has an export already: name another folder, or replace it with --overwrite"):
        export_run(made, "msgpack", tmp_path / "out")
    export_run(made, "msgpack", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.replaced", "out"]


def test_what_adapters_stand_on_is_not_replaced(made, tmp_path):
    base = tmp_path / "base"
    export_run(made, "hf", base)
    tuned = make_run(tmp_path / "tuned", num_blocks=1, use_lora=True, lora_rank=2, init_from=str(base))
    with (tuned / "config.yaml").open("a") as file:
        yaml.safe_dump({RECORD: {"format": 1, INITIALIZED_FROM: BaseModelRef(base, 0, str(base)).to_dict()}}, file)
    with pytest.raises(ValueError, match="holds the run, or the base of its adapters"):
        export_run(tuned, "msgpack", base, overwrite=True)
    assert (base / "model.safetensors").exists()
    export_run(tuned, "msgpack", tmp_path / "other", merge_lora=True)
    assert export_run(made, "hf", tmp_path / "other", overwrite=True).startswith("step 7 of ")
    assert not (tmp_path / "other" / NEWEST).exists(), "an export is replaced as a whole"


def test_the_commands(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(made), "--format", "hf", "--out", "out"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["eos_token_id"]) == ("llama", 32, 256)
    words = ["--prompt", "12 π ", "--max_new_tokens", "4", "--top_k", "2"]
    capsys.readouterr()
    assert main(["generate", "out", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("12 π ")
    assert main(["generate", str(made), *words, "--num_samples", "3"]) == 0
    samples = capsys.readouterr().out
    assert samples.startswith("--- sample 1, seed 0\n" + text), "the same from the run itself"
    assert main(["generate", str(made), *words, "--seed", "2"]) == 0
    assert samples.endswith("--- sample 3, seed 2\n" + capsys.readouterr().out)
    for wrong, message in (
        (["--top_p", "2"], "top_p is 2.0: it must be above 0 and at most 1"),
        (["--max_new_tokens", "0"], "max_new_tokens is 0: it must be at least 1"),
        (["--best", "--step", "7"], "--best and --step name two checkpoints"),
    ):
        assert main(["generate", str(made), *wrong]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert message in said.err


def test_a_prompt_that_the_tokenizer_does_not_know(tmp_path, capsys):
    made = make_run(tmp_path / "run", num_blocks=1, tokenizer_type="char")
    assert main(["generate", str(made), "--prompt", "π", "--max_new_tokens", "5"]) == 2
    said = capsys.readouterr()
    assert (said.out, "π" in said.err) == ("", True)
