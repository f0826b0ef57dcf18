"""Tokenizers: texts come back, end-of-text is never in a text, and the same corpus gives the same tokenizer."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from roxxel_dist.corpus.documents import pieces
from roxxel_dist.data.tokenizer.tokenizer import EOS, Tokenizer, train_tokenizer

TEXTS = [
    "The quick brown fox\n\tjumps over 1234 lazy dogs.\r\n\r\n" * 20,
    "naïve café — Größe, 東京, 🙂👩‍👩‍👧 e\u0301 \u2028\u00a0\x00\x1c\x85",
    f"a text about {EOS} and <|endof text|>",
    "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n" * 10,
]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def made():
    return {kind: train_tokenizer(kind, TEXTS, 400 if kind == "bpe" else None) for kind in ("char", "byte", "bpe")}


@pytest.fixture(scope="module", params=["char", "byte", "bpe"])
def one(request, made):
    return made[request.param]


def test_known_texts_come_back(one):
    for text in [*TEXTS, "", " ", "\n", "  a  ", " a"]:
        assert one.decode(one.encode(text)) == text
    assert one.encode_batch(TEXTS) == [one.encode(text) for text in TEXTS]
    assert one.encode("") == []


@given(text=UNICODE)
def test_every_text_comes_back_from_bytes_and_bpe(made, text):
    assert made["bpe"].decode(made["bpe"].encode(text)) == text
    ids = made["byte"].encode(text)
    assert bytes(ids) == text.encode()
    assert made["byte"].decode(ids) == text


def test_ids_and_sizes(made):
    assert made["byte"].vocab_size == 257
    assert made["byte"].eos_id == 256
    characters = sorted(set("".join(TEXTS)))
    assert made["char"].vocab_size == len(characters) + 1
    assert made["char"].encode("".join(characters)) == list(range(len(characters)))
    assert made["char"].eos_id == len(characters)
    assert made["bpe"].vocab_size <= 400
    assert made["bpe"].eos_id == made["bpe"].vocab_size - 1
    assert len(made["bpe"].encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert {kind: tokenizer.kind for kind, tokenizer in made.items()} == {"char": "char", "byte": "byte", "bpe": "bpe"}


def test_end_of_text_in_a_text_is_text(one, tmp_path):
    one.save(tmp_path / "tokenizer.json")
    for tokenizer in (one, Tokenizer.load(tmp_path / "tokenizer.json")):
        for text in (EOS, f"a{EOS}b", f"{EOS}{EOS}\n{EOS}"):
            ids = tokenizer.encode(text)
            assert tokenizer.eos_id not in ids
            assert tokenizer.encode_batch([text, text]) == [ids, ids]
            assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos_id]) == "a"


def test_a_saved_tokenizer_is_the_same(one, tmp_path):
    path = tmp_path / "tokenizer.json"
    one.save(path)
    again = Tokenizer.load(path)
    assert (again.kind, again.vocab_size, again.eos_id) == (one.kind, one.vocab_size, one.eos_id)
    assert again.fingerprint == one.fingerprint
    assert again.encode_batch(TEXTS) == one.encode_batch(TEXTS)
    assert os.listdir(tmp_path) == ["tokenizer.json"]
    assert tokenizers.Tokenizer.from_file(str(path)).get_vocab_size() == one.vocab_size


TRAIN = """
import sys
from pathlib import Path
from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer
texts = Path(sys.argv[1]).read_text().split(chr(0))
print(train_tokenizer("bpe", texts, 700).fingerprint)
"""


def test_training_does_not_depend_on_threads(tmp_path):
    texts = [path.read_text() for path in sorted(Path(tokenizers.__file__).parent.rglob("*.py"))]
    corpus = tmp_path / "corpus"
    corpus.write_text("\0".join(texts))
    found = {train_tokenizer("bpe", "\0".join(texts).split("\0"), 700).fingerprint for _ in range(2)}
    for variables in ({"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "7"}, {"TOKENIZERS_PARALLELISM": "false"}):
        environment = os.environ | variables | {"PYTHONHASHSEED": str(len(found) + 1)}
        command = [sys.executable, "-c", TRAIN, str(corpus)]
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert len(found) == 1
    assert train_tokenizer("bpe", texts[1:], 700).fingerprint not in found


def test_unknown_characters_are_named(made):
    with pytest.raises(ValueError, match=r"2 characters are not in the vocabulary.*'ÿ', 'ы'.*'byte' or 'bpe'"):
        made["char"].encode("aÿыÿ")
    with pytest.raises(ValueError, match="not in the vocabulary"):
        made["char"].encode_batch(["a", "ы"])


def test_half_a_surrogate_pair_is_no_text(one):
    with pytest.raises(ValueError, match=r"not valid Unicode|not in the vocabulary"):
        one.encode("\ud800")


@pytest.mark.parametrize(("kind", "vocab_size"), [("bpe", 256), ("byte", 256), ("bpe", 1), ("char", 5)])
def test_too_small_a_vocabulary_is_refused(kind, vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size}"):
        train_tokenizer(kind, TEXTS, vocab_size)


def test_the_smallest_vocabulary_is_bytes():
    tokenizer = train_tokenizer("bpe", TEXTS, 257)
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode(TEXTS[1])) == len(TEXTS[1].encode())


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="tokenizer='word': one of char, byte, bpe"):
        train_tokenizer("word", TEXTS)


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError):
        Tokenizer.load(path)
    for data in (b"", b"{}", b"\xff\xfe", b'{"model": 5}'):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
            Tokenizer.load(path)


def test_a_ready_made_tokenizer_without_an_end_says_so(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    inner.enable_truncation(1)
    inner.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert tokenizer.kind == "wordlevel"
    assert tokenizer.vocab_size == 8
    with pytest.raises(ValueError, match="has no end-of-text token"):
        _ = tokenizer.eos_id


@given(
    parts=st.lists(
        st.sampled_from(["word", " ", "\n", "\n\n", "é", "\t", "'s", "12", "\r\n", "🙂", "<|", "\x85", "\u3000"])
    )
)
def test_pieces_of_a_text_have_its_ids(made, parts):
    text = "".join(parts * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roxxel_dist.corpus.documents.PIECE_CHARACTERS", 3)
        cut = list(pieces(text))
    assert "".join(cut) == text
    for kind in ("bpe", "byte"):
        assert list(chain.from_iterable(made[kind].encode_batch(cut))) == made[kind].encode(text)


def test_long_texts_are_cut():
    text = "some line\n" * 100_000
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert len(cut) == 4
