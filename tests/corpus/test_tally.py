"""What a tokenizer changes of a text is counted at the build, from the real documents."""

import io
import json

import pytest
import tokenizers
from tables import one_test
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from roxxel_dist.corpus import encode
from roxxel_dist.corpus.append import append
from roxxel_dist.corpus.build import build
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer, train_tokenizer

TEXTS = {"a.txt": "def f(x):\n    return x\n", "b.txt": "the fox ☃☃", "c.txt": "the fox"}


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "in").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "in" / name).write_text(text)
    return tmp_path / "in"


def sentencepiece_model(path):
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the fox def f(x): return x"] * 30), model_writer=written, vocab_size=60,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(written.getvalue())
    return path


def changed(err):
    return [line for line in err.splitlines() if line.startswith(("text that", "letters of"))]


EXPECTED = (
    "text that the tokenizer changes: 2 of 3 documents; 11 of 44 bytes do not come back (3 x ' ', 2 x '\\n', 2 x '☃'), "
    "5 others come, 1 unknown ids. Another tokenizer, such as bpe, keeps all of it"
)
"""By hand: of the code two newlines and three of its six spaces; ☃☃, of 6 bytes, comes back as ` ⁇ `, of 5."""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_normalizer_that_loses_text(texts, tmp_path, capsys, monkeypatch, workers):
    monkeypatch.setattr("roxxel_dist.corpus.build.PARALLEL_BYTES", 0)
    model = sentencepiece_model(tmp_path / "m.model")
    build(texts, tmp_path / "out", tokenizer=model, workers=workers).close()
    assert changed(capsys.readouterr().err) == [EXPECTED]
    append([texts / "b.txt"], tmp_path / "out").close()
    (line,) = changed(capsys.readouterr().err)
    assert "1 of 1 documents; 6 of 14 bytes do not come back (2 x '☃'), 5 others come, 1 unknown ids" in line


def test_what_keeps_the_text_is_not_decoded(texts, tmp_path, capsys, monkeypatch):
    """Own kinds and byte-level BPE are proved to be lossless by their parts."""
    monkeypatch.setattr(Tokenizer, "decode_batch", None)
    for kind in ("byte", "bpe", "char"):
        build(texts, tmp_path / kind, tokenizer=kind, vocab_size=300 if kind == "bpe" else None).close()
    assert changed(capsys.readouterr().err) == []


def byte_level(*, special):
    inner = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", TEXTS.values(), 280)._inner.to_str())
    inner.add_tokens([AddedToken("</end>", special=special, normalized=False)])
    return Tokenizer(inner, "</end>")


def by_words():
    """End-of-text is a word of the vocabulary, and nothing keeps it from a text."""
    names = ["[UNK]", "</s>", "the", "fox", "end"]
    inner = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Metaspace()
    return Tokenizer(inner, "</s>")


@pytest.mark.parametrize("special", [False, True])
def test_letters_of_an_added_end_of_text_are_text(tmp_path, capsys, special):
    (tmp_path / "a.txt").write_text("the </end> of it")
    byte_level(special=special).save(tmp_path / "tokenizer.json")
    with build(tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json") as data:
        tokenizer = data.tokenizer
        assert tokenizer.eos_token == "</end>"
        assert tokenizer.is_lossless
        assert tokenizer.eos_id not in data[0]
        assert tokenizer.decode(data[0].tolist()) == "the </end> of it"
        assert data.shards[0].tokens[-1] == tokenizer.eos_id
    assert changed(capsys.readouterr().err) == []


def test_letters_that_become_end_of_text_are_counted(tmp_path, capsys):
    for number, text in enumerate(("the </s> fox", "the fox", "</s>")):
        (tmp_path / f"{number}.txt").write_text(text)
    by_words().save(tmp_path / "tokenizer.json")
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    build(files, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json").close()
    (line,) = [one for one in changed(capsys.readouterr().err) if one.startswith("letters")]
    assert line.startswith("letters of 2 of 3 documents are the tokenizer's end-of-text: such a document is read as")


def changed_bpe(change):
    inner = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", TEXTS.values(), 280)._inner.to_str())
    change(inner)
    return Tokenizer(inner)


def without_a_byte():
    described = json.loads(train_tokenizer("byte", [])._inner.to_str())
    del described["model"]["vocab"]["a"]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)))


CASES = {
    "own bpe": (lambda: train_tokenizer("bpe", ["a b"], 260), True),
    "byte": (lambda: train_tokenizer("byte", []), True),
    "char": (lambda: train_tokenizer("char", ["ab"]), True),
    "words": (by_words, False),
    "added word": (lambda: changed_bpe(lambda inner: inner.add_tokens([AddedToken("fox", normalized=False)])), True),
    "added word that strips": (
        lambda: changed_bpe(lambda inner: inner.add_tokens([AddedToken("fox", lstrip=True, normalized=False)])),
        False,
    ),
    "a space before": (
        lambda: changed_bpe(lambda inner: setattr(inner, "pre_tokenizer", pre_tokenizers.ByteLevel(True))),
        False,
    ),
    "split as llama 3": (
        lambda: changed_bpe(
            lambda inner: setattr(
                inner,
                "pre_tokenizer",
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(tokenizers.Regex(r"\s+|\S+"), "isolated"),
                        pre_tokenizers.ByteLevel(False, use_regex=False),
                    ]
                ),
            )
        ),
        True,
    ),
    "spaces removed": (
        lambda: changed_bpe(
            lambda inner: setattr(
                inner,
                "pre_tokenizer",
                pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False, use_regex=False)]
                ),
            )
        ),
        False,
    ),
    "normalizer": (
        lambda: changed_bpe(lambda inner: setattr(inner, "normalizer", tokenizers.normalizers.Lowercase())),
        False,
    ),
    "a byte is missing": (without_a_byte, False),
}


@one_test("name", CASES)
def test_which_tokenizers_keep_every_text(name):
    made, is_lossless = CASES[name]
    tokenizer = made()
    assert tokenizer.is_lossless == is_lossless
    if is_lossless:
        for text in ("ab a", "ab" if name == "char" else " fox\n\n  ☃ fox <|endoftext|>"):
            if name == "char" and " " in text:
                continue
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_document_is_counted_whole(tmp_path, monkeypatch):
    """A long one goes to the workers in pieces: its bytes are those of all."""
    monkeypatch.setattr("roxxel_dist.corpus.documents.PIECE_CHARACTERS", 10)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 30)
    seen = []
    monkeypatch.setattr(encode.Tally, "add", lambda self, size, one: seen.append(size))
    text = "word\nnaïve\n" * 20
    (tmp_path / "a.txt").write_text(text)
    build(tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", progress=False).close()
    assert seen == [len(text.encode())]


def test_a_long_document_of_a_tokenizer_that_may_change_it_is_not_cut(tmp_path, capsys, monkeypatch):
    """Byte-level as ours, but without a byte: what is lost in its first piece counts too."""
    monkeypatch.setattr("roxxel_dist.corpus.documents.PIECE_CHARACTERS", 10)
    without_a_byte().save(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("a word\nmore\n" + "word\nword\n" * 20)
    with build(tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json") as data:
        assert data.shards[0].metadata.text_bytes == 212
    (line,) = changed(capsys.readouterr().err)
    assert "1 of 1 documents; 1 of 212 bytes do not come back (1 x 'a')" in line


# -- numbers that go into native code

LARGE = [
    *(("vocab_size", number) for number in (10**9, 4 * 10**9, 10**20)),
    *(("workers", number) for number in (10**5, 10**9, 4 * 10**9, 10**20)),
    ("max_shard_bytes", 10**20),
]


@pytest.mark.parametrize(("name", "number"), LARGE)
def test_too_large_a_number_is_one_line_and_leaves_nothing(texts, tmp_path, name, number):
    with pytest.raises(ValueError, match=rf"^{name}={number}: .* (at most|from 1 to) [\d,]+"):
        build(texts, tmp_path / "out", progress=False, **{name: number})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "number"), [("block_size", 1 << 40), ("block_size", 1 << 70), ("max_shard_bytes", 0)])
def test_numbers_of_a_write(tmp_path, name, number):
    from roxxel_dist import Roxxel

    with pytest.raises(ValueError, match=rf"^{name}={number}: .* from 1 to"):
        Roxxel(tmp_path / "a_*.rox").write([[1]], **{name: number})
    assert not list(tmp_path.glob("*.rox"))
