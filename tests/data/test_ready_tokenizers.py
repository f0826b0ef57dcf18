"""Ready-made tokenizers, read offline: their ids are those of their own libraries."""

import io
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from roxxel_dist.corpus.build import build
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

WORDS = ["the quick brown fox", "jumps over the lazy dog", "naïve café 東京 words", "def f(x):\n    return x", "12 345"]
TEXTS = [" ".join(WORDS[number % 5 :] + WORDS[: number % 3]) + "\n" for number in range(60)]


def train(kind):
    """A tokenizer of each model, each with quirks of its own."""
    special = ["[UNK]", "[END]"]
    if kind == "bpe":
        inner, trainer = tokenizers.Tokenizer(models.BPE()), trainers.BpeTrainer(vocab_size=300, special_tokens=special)
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "bpe-prepend":
        inner, trainer = tokenizers.Tokenizer(models.BPE()), trainers.BpeTrainer(vocab_size=300, special_tokens=special)
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "unigram":
        inner = tokenizers.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="[UNK]", show_progress=False
        )
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        inner.normalizer = normalizers.Lowercase()
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    trainer.show_progress = False
    inner.train_from_iterator(TEXTS, trainer)
    return inner


@pytest.fixture(scope="module", params=["bpe", "bpe-prepend", "unigram", "wordpiece"])
def folder(request, tmp_path_factory):
    """A folder as Hugging Face makes it."""
    path = tmp_path_factory.mktemp(request.param)
    inner = train(request.param)
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[END]"}}))
    return path


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.model"
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.split("\n") if line]),
        model_writer=written, vocab_size=300, model_type=request.param, byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(written.getvalue())
    return path


def write_texts(folder, monkeypatch):
    """Documents longer than what a tokenizer of our own would cut."""
    monkeypatch.setattr("roxxel_dist.corpus.documents.PIECE_CHARACTERS", 50)
    (folder / "in").mkdir()
    for number, text in enumerate(TEXTS[:20]):
        (folder / "in" / f"{number:03d}.txt").write_text(text * 5)
    return [text * 5 for text in TEXTS[:20]]


def test_ids_are_the_librarys_own(folder, tmp_path, monkeypatch):
    texts = write_texts(tmp_path, monkeypatch)
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ds = build(tmp_path / "in", tmp_path / "out", tokenizer=folder, progress=False)
    assert [document.tolist() for document in ds] == [own.encode(text, add_special_tokens=False).ids for text in texts]
    assert ds.shards[0].metadata.separator == own.token_to_id("[END]")
    assert ds.vocab_size == own.get_vocab_size()
    again = Roxxel(tmp_path / "out").tokenizer
    assert again.eos_id == own.token_to_id("[END]"), "the name of end-of-text is kept beside the shards"
    again.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos_id == again.eos_id


def test_sentencepiece_ids_are_the_librarys_own(model, tmp_path, monkeypatch):
    texts = write_texts(tmp_path, monkeypatch)
    monkeypatch.setattr("roxxel_dist.corpus.build.PARALLEL_BYTES", 0)
    own = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ds = build(tmp_path / "in", tmp_path / "out", tokenizer=model, progress=False, workers=2)
    assert [document.tolist() for document in ds] == [own.encode(text) for text in texts]
    assert ds.shards[0].metadata.separator == own.eos_id()
    again = Roxxel(tmp_path / "out").tokenizer
    assert again.kind == "sentencepiece"
    assert (again.eos_id, again.vocab_size, again.fingerprint) == (own.eos_id(), 300, ds.tokenizer_fingerprint)
    assert again.decode(ds[3].tolist()) == own.decode(ds[3].tolist())
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.model").write_bytes(model.read_bytes())
    assert Tokenizer.load(tmp_path / "hf").fingerprint == again.fingerprint
    assert Tokenizer.load(model, "<unk>").eos_id == own.unk_id()
    with pytest.raises(ValueError, match="no piece '<none>'"):
        _ = Tokenizer.load(model, "<none>").eos_id


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_has_the_librarys_ids(folder, model, text):
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.encode_special_tokens = True
    assert Tokenizer.load(folder).encode(text) == own.encode(text, add_special_tokens=False).ids
    assert Tokenizer.load(model).encode(text) == sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(
        text
    )


def test_where_end_of_text_is_named(folder, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    with pytest.raises(ValueError, match=r"no end-of-text token: none of <\|endoftext\|>.*--eos_token"):
        _ = Tokenizer.load(path).eos_id
    assert Tokenizer.load(path, "[UNK]").eos_id == inner.token_to_id("[UNK]")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "[END]"}')
    assert Tokenizer.load(tmp_path).eos_id == inner.token_to_id("[END]")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[NONE]"}')
    with pytest.raises(ValueError, match=r"none of \[NONE\] is in it"):
        _ = Tokenizer.load(tmp_path).eos_id
    for wrong in ("{", "[]", "5"):
        (tmp_path / "tokenizer_config.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: not a JSON object"):
            Tokenizer.load(tmp_path)


def test_without_end_of_text(tmp_path):
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    (tmp_path / "x.txt").write_text("b")
    with pytest.raises(ValueError, match="no end-of-text token"):
        build(tmp_path / "x.txt", tmp_path / "out", tokenizer=tmp_path / "t.json", progress=False)
    ds = build(tmp_path / "x.txt", tmp_path / "out", tokenizer=tmp_path / "t.json", eos=False, progress=False)
    assert ds.shards[0].tokens.tolist() == [1]
    with pytest.raises(ValueError, match="a trained tokenizer has its own"):
        build(tmp_path / "x.txt", tmp_path / "out", tokenizer="byte", eos_token="x")


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_damaged_models_are_named(model, tmp_path, cut):
    (tmp_path / "m.model").write_bytes(model.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"m\.model: not a SentencePiece model"):
        Tokenizer.load(tmp_path / "m.model")
    (tmp_path / "tokenizer.json").write_bytes(b'{"sentencepiece": "!"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: a damaged SentencePiece model"):
        Tokenizer.load(tmp_path)


@given(data=st.data())
def test_cut_or_random_models_raise_nothing_but_value_error(model, data, tmp_path_factory):
    content = model.read_bytes()
    random, cut = st.binary(max_size=80), st.integers(0, len(content)).map(lambda size: content[:size])
    path = tmp_path_factory.getbasetemp() / "fuzzed.model"
    path.write_bytes(data.draw(st.one_of(random, cut)))
    message = str(path)
    try:
        Tokenizer.load(path).encode("the quick brown fox")
    except ValueError as error:
        message = str(error)
    assert str(path) in message
