"""The two halves of bits per byte: the nats of text alone, and the bytes of the text, whatever the tokenizer."""

import io
import json

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from models import transformer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from roxxel_dist import Roxxel
from roxxel_dist.cluster.mesh import fit_sharding, make_mesh
from roxxel_dist.corpus.append import append
from roxxel_dist.corpus.build import build
from roxxel_dist.data.packing import Packed
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from roxxel_dist.model.loss import END_NATS, losses_of_tokens, next_token_loss, token_losses
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.optimizer import NamedOptimizer, OptimizerConfig
from roxxel_dist.train.steps import StepOptions, make_steps
from roxxel_dist.train.validation.evaluator import TextOfSets, byte_counter, unknown_bits_notes

END = 5
SMALL = {"dim": 32, "num_blocks": 1, "vocab_size": 24, "max_context": 64, "head_size": 16}


def rows_of(shape, packed, place):
    tokens = np.random.default_rng(0).integers(0, 24, shape).astype(np.int32)
    tokens[:, 3::7] = END
    if not packed:
        return jax.device_put(tokens, place)
    segments = np.cumsum(np.roll(tokens == END, 1, axis=1), axis=1).astype(np.int32)
    starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=-1) != 0, np.arange(shape[1]), 0), 1)
    positions = (np.arange(shape[1]) - starts).astype(np.int32)
    return Packed(*jax.device_put((tokens, segments, positions), place))


@pytest.mark.parametrize(
    ("shape", "shards", "packed", "loss_fn"),
    [
        pytest.param(*where, packed, loss_fn, marks=[] if (packed, loss_fn) == quick else pytest.mark.long)
        for where, quick in (
            (((2, 17), 0), (True, token_losses)),
            (((2, 17), 2), None),
            (((1, 33), 2), (False, next_token_loss)),
        )
        for packed in (False, True)
        for loss_fn in (token_losses, next_token_loss)
    ],
)
def test_the_losses_of_end_of_text_are_summed_up(shape, shards, packed, loss_fn):
    """By one program, by virtual shards of rows, and by virtual shards of parts of a row."""
    mesh = make_mesh(1)
    optimizer, model = NamedOptimizer(OptimizerConfig()), transformer(**SMALL)
    steps = make_steps(model, loss_fn, optimizer, mesh, StepOptions(virtual_shards=shards))
    (state, hparams), evaluate = steps.init(), steps.evaluate(END)
    batch = rows_of(shape, packed, fit_sharding(steps.sharding, shape))
    compiler = AotCompiler(mesh)
    compiler.prepare("evaluate", evaluate, state.params, state.rest, hparams, batch)
    found = compiler.get("evaluate")(state.params, state.rest, hparams, batch)
    compiler.close()
    model.eval()
    tokens = np.asarray(getattr(batch, "tokens", batch))
    if packed:
        counted = np.asarray(batch.segments[:, 1:] == batch.segments[:, :-1])
        logits = np.asarray(nnx.jit(lambda model, rows: model(*rows))(model, batch), np.float64)[:, :-1]
        shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        losses = -np.log(np.take_along_axis(shares, tokens[:, 1:, None], 2)[..., 0])
    else:
        counted, losses = np.ones_like(tokens[:, 1:], bool), np.asarray(nnx.jit(losses_of_tokens)(model, batch))
    is_end = counted & (tokens[:, 1:] == END)
    assert is_end.sum() >= 4
    assert float(found[END_NATS]) == pytest.approx(losses[is_end].sum(), rel=1e-5)
    assert float(found["loss"]) == pytest.approx(losses[counted].mean(), rel=1e-5)


# -- the bytes

TEXTS = {
    "words": "the quick brown fox jumps over the lazy dog",
    "code": "def f(x):\n    return x  # naïve\n\n\n",
    "unknown": "the ☃ and 東京 and ﬁne",
    "spaces": "  two  spaces \t and a tab ",
}
BYTES = {"words": 43, "code": 35, "unknown": 28, "spaces": 26}
"""Counted by hand: a letter of ASCII has 1 byte, ï 2, ☃ and each of 東京ﬁ 3."""


def sentencepiece_model(**options):
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    texts = ["the quick brown fox jumps over the lazy dog", "def f return x and a fine tab", "two spaces"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=300, hard_vocab_limit=False, minloglevel=2,
        **options,
    )  # fmt: skip
    return Tokenizer.parse("m.model", written.getvalue())


def wordpiece():
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "</s>"], show_progress=False)
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog return f x"] * 9, trainer)
    return Tokenizer(inner, "</s>")


def without_a_space():
    """Bytes where a character is unknown, and no mark of a space alone: each space is the three bytes of the mark."""
    vocabulary = {name: number for number, name in enumerate(["<unk>", "</s>", *(f"<0x{n:02X}>" for n in range(256))])}
    for name in ("t", "h", "e", "f", "o", "x", "th", "the"):
        vocabulary[name] = len(vocabulary)
    model = models.BPE(vocabulary, [("t", "h"), ("th", "e")], byte_fallback=True, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(inner, "</s>")


TOKENIZERS = {
    "byte": lambda: train_tokenizer("byte", []),
    "bpe": lambda: train_tokenizer("bpe", TEXTS.values(), 300),
    "char": lambda: train_tokenizer("char", TEXTS.values()),
    "sentencepiece": sentencepiece_model,
    "sentencepiece, bytes": lambda: sentencepiece_model(byte_fallback=True),
    "sentencepiece, identity": lambda: sentencepiece_model(
        normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True
    ),
    "wordpiece": wordpiece,
    "no space mark": without_a_space,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZERS[request.param]().save(path)
    return path


def counted(data):
    """What the counter of a validation counts of all tokens in one row, behind an end-of-text and before others: rows
    of one length, for which a tokenizer's counter is compiled once."""
    text = TextOfSets.of_sets({"v": data}, data, known=True)
    tokens = np.concatenate([[text.end], *(shard.tokens for shard in data.shards)]).astype(np.int32)
    row = np.pad(tokens, (0, 512 - len(tokens)), constant_values=text.end)[None]
    return float(text.counters()["v"](row)), text.end


EACH = [name if name == "unknown" else pytest.param(name, marks=pytest.mark.long) for name in TEXTS]
"""Of all of them together is the next test."""


@pytest.mark.parametrize("name", EACH)
def test_the_bytes_of_a_text_are_its_own(tokenizer, tmp_path, name):
    (tmp_path / "a.txt").write_text(TEXTS[name])
    with build(tmp_path / "a.txt", tmp_path / "out", tokenizer=tokenizer, progress=False) as data:
        assert counted(data) == (pytest.approx(BYTES[name], rel=1e-6), data.tokenizer.eos_id)
        assert len(TEXTS[name].encode()) == BYTES[name]


def test_the_bytes_of_a_set_are_those_of_its_texts(tokenizer, tmp_path):
    """In several shards, and behind what was appended."""
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text)
    paths = [tmp_path / f"{name}.txt" for name in TEXTS]
    data = build(paths[:3], tmp_path / "out", tokenizer=tokenizer, max_shard_bytes=20, progress=False)
    assert len(data.shards) > 1
    assert counted(data)[0] == pytest.approx(43 + 35 + 28, rel=1e-6)
    with append(paths[3], tmp_path / "out", progress=False) as data:
        assert counted(data)[0] == pytest.approx(sum(BYTES.values()), rel=1e-6)
        data.verify()


def test_tokens_from_elsewhere(tokenizer, tmp_path):
    """Only a tokenizer that changes no text says how many bytes the text of tokens had: else there is no number, and a
    reason."""
    made = Tokenizer.load(tokenizer)
    made.save(tmp_path / "tokenizer.json")
    np.save(tmp_path / "a.npy", np.array(made.encode(TEXTS["words"]), np.int32))
    with Roxxel(tmp_path) as data:
        text, why = (
            TextOfSets.of_sets({"v": data}, data, known=True),
            list(unknown_bits_notes({"v": data}, data, token_losses)),
        )
        assert list(text.tokenizers) == (["v"] if made.is_lossless else [])
        assert [line.split(":")[0] for line in why] == ([] if made.is_lossless else ["val_bpb/v is not known"])
        assert not list(unknown_bits_notes({"v": data}, data, lambda model, batch: 0))


def test_no_bytes_where_the_losses_are_not_known(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with build(tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", progress=False) as data:
        none = TextOfSets.of_sets({"v": data}, data, known=False)
    assert (none.end, none.counters()) == (None, {})


def test_an_id_of_no_token_makes_the_bytes_unknown():
    counter = byte_counter(train_tokenizer("byte", []).text_bytes, 2.0)
    assert float(counter(np.array([[1, 2, 3]]))) == 4.0
    assert float(counter(np.array([[1, 2, 300]]))) == -1


def test_shards_without_text_are_as_before(tmp_path):
    """The metadata has the bytes of text only where the tokenizer may change it."""
    (tmp_path / "a.txt").write_text("the fox")
    for name, has_bytes in (("byte", False), ("wordpiece", True)):
        TOKENIZERS[name]().save(tmp_path / f"{name}.json")
        with build(tmp_path / "a.txt", tmp_path / name, tokenizer=tmp_path / f"{name}.json", progress=False) as data:
            metadata = data.shards[0].metadata
        assert (metadata.text_bytes == 7) == has_bytes
        shard = (tmp_path / name / "shard_00000.rox").read_bytes()
        assert (b'"text_bytes":7' in shard) == has_bytes
        assert json.loads(json.dumps(metadata.to_dict())) == metadata.to_dict()
