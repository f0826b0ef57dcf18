"""The bytes of text that tokens stand for: those of a document are those of its text."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from roxxel_dist.corpus.build import build
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer, train_tokenizer

TEXTS = [
    "the quick brown fox",
    "jumps over the lazy dog ",
    "naïve café 東京 words 🙂",
    "def f(x):\n    return x",
    "<pad> 12",
]


def with_prefix():
    """As Llama's: a space before each text, bytes where a character is unknown."""
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    special = ["<unk>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    inner.train_from_iterator([text for text in TEXTS if text.isascii()] * 9, trainer)
    described = json.loads(inner.to_str())
    described["added_tokens"] = [one for one in described["added_tokens"] if one["content"] in ("<unk>", "</s>")]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)), "</s>")


def with_metaspace():
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["</s>"], show_progress=False)
    inner.train_from_iterator(TEXTS * 9, trainer)
    return Tokenizer(inner, "</s>")


def with_added_words():
    """Byte-level, with a word of its own in its vocabulary, as for chats."""
    inner = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", TEXTS * 3, 300)._inner.to_str())
    inner.add_tokens([AddedToken("東京", normalized=False), AddedToken("fox", normalized=False)])
    return Tokenizer(inner)


KINDS = {
    "byte": lambda: train_tokenizer("byte", []),
    "bpe": lambda: train_tokenizer("bpe", TEXTS * 3, 300),
    "char": lambda: train_tokenizer("char", TEXTS),
    "added": with_added_words,
    "prefix": with_prefix,
    "metaspace": with_metaspace,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def counted(tokenizer, text):
    counts, ids = tokenizer.text_bytes, tokenizer.encode(text)
    return int(counts.first[ids[:1]].sum() + counts.inside[ids[1:]].sum())


def test_the_bytes_of_a_document(tokenizer):
    assert [counted(tokenizer, text) for text in TEXTS] == [len(text.encode()) for text in TEXTS]


BYTE_LEVEL = [KINDS[kind]() for kind in ("byte", "bpe", "added")]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_any_text(text):
    for tokenizer in BYTE_LEVEL:
        assert counted(tokenizer, text) == len(text.encode())


def test_special_tokens_have_none(tokenizer):
    counts = tokenizer.text_bytes
    assert counts.end == tokenizer.eos_id
    assert counts.inside[counts.end] == counts.first[counts.end] == 0
    assert counts.inside.dtype == counts.first.dtype == np.int32
    assert len(counts.inside) == tokenizer.vocab_size


def test_a_part_of_a_character_has_its_bytes():
    tokenizer = KINDS["byte"]()
    assert tokenizer.text_bytes.inside[tokenizer.encode("é")].tolist() == [1, 1]


def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    with open(tmp_path / "m.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([text for text in TEXTS * 9 if "\n" not in text]),
            model_writer=file, vocab_size=400, hard_vocab_limit=False, byte_fallback=True, minloglevel=2,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
        )  # fmt: skip
    tokenizer = Tokenizer.load(tmp_path / "m.model")
    for text in TEXTS:
        assert counted(tokenizer, text) == len(text.encode())


def test_a_whole_data_set(tokenizer, tmp_path):
    """Over all of a data set: the first of each document, the others, and nothing for what ends it."""
    (tmp_path / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    tokenizer.save(tmp_path / "tokenizer.json")
    with build(tmp_path / "in", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", progress=False) as data:
        counts, tokens = data.tokenizer.text_bytes, data.read(np.zeros(1, np.int64), data.num_tokens)[0]
    behind = np.r_[counts.end, tokens[:-1]] == counts.end
    assert np.where(behind, counts.first[tokens], counts.inside[tokens]).sum() == sum(len(t.encode()) for t in TEXTS)
