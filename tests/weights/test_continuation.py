"""A prompt and what a model adds to it are one text, whatever the tokenizer does at the beginning of a text."""

import io
import json
import re

import numpy as np
import pytest
import tokenizers
from flax import nnx
from made_runs import SHAPE
from models import with_numbers
from own_model import Recurrent
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from roxxel_dist import Config, Experiment, Generator, Transformer
from roxxel_dist.cli import main
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from roxxel_dist.launcher.output import printable
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import Sampling, generate_rows, known_ids, stream
from roxxel_dist.model.split import split_module
from roxxel_dist.weights.files import NEWEST, write_weights
from roxxel_dist.weights.generator import pieces

sentencepiece = pytest.importorskip("sentencepiece")

TEXT = "the quick brown fox jumps over the lazy dog, don't. I'll say: 1 234 naïve café\n"
OTHER = "東京 🙂👩‍👩‍👧 ẞ\t  two  spaces\n\nend"
TEXTS = [TEXT * 20, "well, the dog jumps over a quick fox again\n" * 20]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
IDS = 450
"""Of the models here: more than their tokenizers have, and one number for all, whose programs are the same."""


def trained(model, trainer, normalizer=None, pre_tokenizer=None, decoder=None):
    inner = tokenizers.Tokenizer(model)
    if normalizer is not None:
        inner.normalizer = normalizer
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoder
    inner.train_from_iterator(TEXTS, trainer)
    return inner


LOG = "logs/rank-0.log"
SPECIAL = {"special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False}
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def llama_2():
    """As LLaMA 2 and Mistral have it: bytes for characters that are not in the vocabulary."""
    inner = trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=120, **SPECIAL),
        PREPENDED,
        pre_tokenizers.Split("▁", "merged_with_next"),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    described = json.loads(inner.to_str())
    vocabulary = described["model"]["vocab"]
    described["model"] |= {
        "byte_fallback": True,
        "vocab": vocabulary | {b: len(vocabulary) + i for i, b in enumerate(BYTES)},
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)))


def metaspace(scheme):
    return Tokenizer(
        trained(
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", **SPECIAL),
            None,
            pre_tokenizers.Metaspace(prepend_scheme=scheme),
            decoders.Metaspace(prepend_scheme=scheme),
        )
    )


def wordpiece():
    return Tokenizer(
        trained(
            models.WordPiece(unk_token="<unk>"),
            trainers.WordPieceTrainer(vocab_size=120, **SPECIAL),
            normalizers.BertNormalizer(lowercase=True),
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(),
        )
    )


def ends_of_words():
    """As GPT-1 has it: a token says that a word ends."""
    return Tokenizer(
        trained(
            models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
            trainers.BpeTrainer(vocab_size=120, end_of_word_suffix="</w>", **SPECIAL),
            None,
            pre_tokenizers.BertPreTokenizer(),
            decoders.BPEDecoder(),
        )
    )


def prefix_space():
    return Tokenizer(
        trained(
            models.BPE(),
            trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **SPECIAL),
            None,
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            decoders.ByteLevel(),
        )
    )


def pieces_of_sentences(kind, **options):
    def make():
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(TEXT for _ in range(50)), model_writer=written, vocab_size=310, model_type=kind,
            minloglevel=2, hard_vocab_limit=False, byte_fallback=True, **options,
        )  # fmt: skip
        return written.getvalue()

    return make


KINDS = {
    "byte": lambda: train_tokenizer("byte", []),
    "bpe": lambda: train_tokenizer("bpe", TEXTS, 300),
    "char": lambda: train_tokenizer("char", [TEXT, OTHER]),
    "llama 2": llama_2,
    "metaspace at the first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "wordpiece": wordpiece,
    "ends of words": ends_of_words,
    "prefix space": prefix_space,
    "sentencepiece bpe": pieces_of_sentences("bpe"),
    "sentencepiece unigram": pieces_of_sentences("unigram"),
    "sentencepiece without a prefix": pieces_of_sentences("bpe", add_dummy_prefix=False),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return made(KINDS[request.param], tmp_path_factory.mktemp("tokenizer"))


def made(make, folder):
    """A tokenizer; a SentencePiece model is read from a file."""
    tokenizer = make()
    if isinstance(tokenizer, bytes):
        (folder / "m.model").write_bytes(tokenizer)
        return Tokenizer.load(folder / "m.model")
    return tokenizer


def added(tokenizer, prompt, ids, new):
    """What is added to a prompt, which is checked to be the whole text without the prompt."""
    found = list(pieces(tokenizer, new, prompt, ids))
    text, whole, base = "".join(found), tokenizer.decode([*ids, *new]), tokenizer.decode(ids)
    if not whole.startswith(base):  # bytes behind those that end the prompt, and no character together
        assert text == tokenizer.decode(new)
    elif prompt.startswith(base) and whole.startswith(prompt):
        assert prompt + text == whole
    else:
        assert base + text == whole
    assert not any("\ufffd" in piece for piece in found) or "\ufffd" in whole
    return text


@pytest.mark.parametrize("text", [TEXT, OTHER], ids=["words", "other characters"])
def test_it_is_the_text_without_the_prompt(tokenizer, text):
    for cut in range(0, len(text), 3):
        prompt, rest = text[:cut], text[cut:]
        ids = tokenizer.encode(prompt) if prompt else [0]
        whole = tokenizer.encode(text)
        continues = whole[: len(ids)] == ids
        added(tokenizer, prompt, ids, whole[len(ids) :] if continues else tokenizer.encode(rest))


def test_a_word_keeps_its_space(tokenizer):
    ids, whole = tokenizer.encode("the quick"), tokenizer.encode("the quick brown fox")
    if whole[: len(ids)] != ids:  # its ids of a prompt end otherwise
        return
    assert added(tokenizer, "the quick", ids, whole[len(ids) :]) == " brown fox"


LOSSES = {
    "wordpiece": ("line ends", "capital letters", "signs", "emoji"),
    "ends of words": ("line ends", "several spaces"),
    "sentencepiece bpe": ("line ends", "tabs", "several spaces", "spaces at the end", "ligatures", "wide letters"),
    "sentencepiece unigram": ("line ends", "ligatures"),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_tokenizer_loses_of_texts_is_measured(tmp_path, name):
    line = made(KINDS[name], tmp_path).losses
    if name in ("byte", "bpe", "char", "llama 2"):
        assert line == ""
        return
    about, _, lost = line.partition(": ")
    assert about == "the tokenizer changes texts, which do not come back from its ids"
    assert set(LOSSES.get(name, ("ligatures",))) <= set(lost.split(", "))


def test_a_tokenizer_that_fails_for_unknown_words_loses_them():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}))
    words.add_special_tokens(["</s>"])
    assert "line ends" in Tokenizer(words).losses


def test_any_ids(tokenizer):
    rng = np.random.default_rng(0)
    for prompt in ("", "the", "the quick ", " fox", "don", "The QUICK", "dog,\n"):
        if tokenizer.kind == "char" and "Q" in prompt:
            continue
        ids = tokenizer.encode(prompt) or [tokenizer.ids[-1]]
        for _ in range(15):
            added(tokenizer, prompt, ids, rng.choice(tokenizer.ids, 20).tolist())


def test_pieces_come_early(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert len(list(pieces(tokenizer, ids))) > len(ids) / 2


def test_a_prompt_that_ends_with_a_space():
    for make in (wordpiece, ends_of_words):  # spaces are no part of their ids
        tokenizer = make()
        assert added(tokenizer, "the quick ", tokenizer.encode("the quick "), tokenizer.encode("fox")) == "fox"
    tokenizer = llama_2()
    ids = tokenizer.encode("the quick ")
    assert tokenizer.decode(ids) == "the quick "
    assert added(tokenizer, "the quick ", ids, tokenizer.encode("fox")) == " fox"  # as the ids are read


def make_run(folder, tokenizer, vocab_size=None):
    """A run directory of random weights and a tokenizer."""
    folder.mkdir()
    config = Config(**SHAPE | {"num_blocks": 1}, vocab_size=vocab_size or tokenizer.vocab_size)
    params = split_module(with_numbers(lambda: Transformer(config.part(ModelConfig), nnx.Rngs(0))))[1]
    write_weights(folder / NEWEST, 7, {name: np.asarray(leaf) for name, leaf in params.items()})
    config.save_yaml(folder / "config.yaml")
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("name", [pytest.param("bpe", marks=pytest.mark.long), "llama 2"])
def test_every_way_of_generating(tmp_path, capsys, name):
    run = make_run(tmp_path / "run", KINDS[name](), vocab_size=IDS)
    generator = Generator(run)
    tokenizer = generator.tokenizer
    prompts = ["the quick", "the quick ", "", "naïve 東京"]
    options = {"temperature": 1.0, "seed": 3}
    for prompt in prompts:  # one row each: that of a batch is what it is alone is in test_generator.py
        (text,) = generator.generate([prompt], 12, **options)
        ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
        (new,) = generate_rows(
            generator.model, [ids], 12, max_context=64, sampling=Sampling(temperature=1.0), seeds=[3],
            stop_ids=[tokenizer.eos_id], known_V=known_ids(tokenizer.ids, IDS),
        )  # fmt: skip
        assert text == added(tokenizer, prompt, ids, new)
        assert "".join(generator.stream(prompt, 12, **options)) == text
        words = ["generate", str(run), "--prompt", prompt, "--max_new_tokens", "12", "--temperature", "1"]
        assert main([*words, "--seed", "3"]) == 0
        assert capsys.readouterr().out == f"{prompt}{text}\n"


PHASES = [{"steps": 60, "batch_size": 8, "seq_len": 33}]


@pytest.mark.long
def test_the_sample_of_a_run(tmp_path):
    llama_2().save(tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    assert main(["data", "build", str(tmp_path / "text.txt"), "--out", str(tmp_path / "data"),
                 "--tokenizer", str(tmp_path / "tokenizer.json")]) == 0  # fmt: skip
    config = Config(
        dim=32,
        num_blocks=1,
        max_context=64,
        n_devices=1,
        lr=1e-2,
        phases=PHASES,
        sample="on",
        sample_prompt="the quick",
    )
    run = Experiment(config).fit(tmp_path / "data", tmp_path / "run")
    (sample,) = re.findall(
        "a sample of the text that the model generates:(.*?)[0-9:]{8} . loss curve", (run / LOG).read_text(), re.DOTALL
    )
    text = Generator(run, best=False).generate("the quick", 32, seed=config.seed)
    assert [re.sub("^[0-9:]{8} . ", "", line) for line in sample.strip().splitlines()] == printable(
        f"the quick{text}"
    ).splitlines()
    assert Generator(run).generate("the quick", 6, temperature=0).startswith(" brown fox")


NETWORKS = {
    "the built-in": lambda size: Transformer(ModelConfig(**SHAPE | {"num_blocks": 1}, vocab_size=size), nnx.Rngs(0)),
    "an own one": lambda size: Recurrent(size, 8, 1, 0.0, nnx.Rngs(0)),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 50.0, "top_k": 30}])
def test_ids_without_text_are_never_drawn(network, sampling):
    model, known = with_numbers(lambda: NETWORKS[network](IDS)), [*range(5, 20), 22, IDS - 1, IDS + 6]
    options = {"max_context": 64, "sampling": Sampling(**sampling), "known_V": known_ids(known, IDS)}
    (row,) = generate_rows(model, [[1, 2]], 60, seeds=[0], **options)
    assert set(row) <= set(known)
    assert list(stream(model, [1, 2], 60, seed=0, **options)) == row
    assert known_ids(range(IDS), IDS) is None


GAPS = {
    "char": lambda: train_tokenizer("char", [TEXT]),
    "sentencepiece": pieces_of_sentences("bpe"),
    "one with a gap in its ids": lambda: with_gap(llama_2()),
}


def with_gap(tokenizer):
    """The same with ids that have no text between others."""
    described = json.loads(tokenizer.to_json())
    described["model"]["vocab"] = {
        name: number if number < 50 else number + 20 for name, number in described["model"]["vocab"].items()
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["char", "sentencepiece", "one with a gap in its ids"])
def test_a_vocabulary_larger_than_the_tokenizers(tmp_path, name):
    tokenizer = made(GAPS[name], tmp_path)
    run = make_run(tmp_path / "run", tokenizer, vocab_size=2 * tokenizer.vocab_size)
    generator = Generator(run, say=lambda line: None)
    options = {"max_new_tokens": 60, "temperature": 50.0, "stop_at_eos": False}
    ids = tokenizer.encode("the")
    (new,) = generate_rows(
        generator.model, [ids], 60, max_context=64, sampling=Sampling(temperature=50.0), seeds=[0],
        known_V=known_ids(tokenizer.ids, 2 * tokenizer.vocab_size),
    )  # fmt: skip
    assert set(new) <= set(tokenizer.ids)
    text = generator.generate("the", **options)
    assert text == added(tokenizer, "the", ids, new)
    assert "".join(generator.stream("the", **options)) == text


def named(*names):
    """Ids of the LLaMA 2 form by name; a letter that it has no token for is its bytes."""
    tokenizer = llama_2()
    vocabulary = tokenizer._inner.get_vocab()
    spelled = [[name] if name in vocabulary else [f"<0x{byte:02X}>" for byte in name.encode()] for name in names]
    return tokenizer, [vocabulary[name] for parts in spelled for name in parts]


SPELLED = {
    "two spaces at the first": (("\u2581", "\u2581quick", "\u2581brown"), " quick brown"),
    "spaces and a stop": (("\u2581", "\u2581", "\u2581", "."), "  ."),
    "a character, half of one, letters": (("a", "\u2581", "世", "<0xE4>", "a", "b"), "a 世\ufffdab"),
    "a special token within a character": (("a", "<0xE4>", "</s>", "<0xB8>", "<0x96>", "b"), "a世b"),
    "bytes to the end": (("a", "<0xE4>", "<0xB8>"), "a\ufffd\ufffd"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLED)
def test_texts_that_streams_have_got_wrong(case):
    names, text = SPELLED[case]
    tokenizer, ids = named(*names)
    found = list(pieces(tokenizer, ids))
    assert "".join(found) == tokenizer.decode(ids)
    if case != "a character, half of one, letters":  # there a run of bytes that is no character is none at all
        assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found) or "\ufffd" in tokenizer.decode(ids)
