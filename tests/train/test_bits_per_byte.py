"""Bits per byte of a validation: the nats of the text over its bytes, whatever the tokenizer."""

import math

import numpy as np
import optax
import pytest
import tokenizers
from flax import nnx
from runs import module, rows, train
from tokenizers import models, pre_tokenizers, trainers

from roxxel_dist import Phase, Roxxel
from roxxel_dist.corpus.build import build
from roxxel_dist.curriculum.even_rows import EvenRows
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from roxxel_dist.model.loss import END_NATS, next_token_loss, token_losses
from roxxel_dist.train.validation.evaluator import BYTES, TRAIN, summarize

TEXTS = [f"{number} bottles of bière on the wall, 東京 🙂 " * (1 + number % 4) for number in range(24)]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The same documents by two tokenizers, by kind; and their ids alone."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "in" / f"{number:02d}.txt").write_text(text)
    made = {}
    for kind in ("byte", "bpe"):
        train_tokenizer(kind, TEXTS, 320 if kind == "bpe" else None).save(folder / f"{kind}.json")
        made[kind] = build(folder / "in", folder / kind, tokenizer=folder / f"{kind}.json", progress=False)
    lossy = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.train_from_iterator(TEXTS[:9], trainers.WordLevelTrainer(special_tokens=["[UNK]", "</s>"]))
    Tokenizer(lossy, "</s>").save(folder / "words.json")
    made["words"] = build(
        folder / "in", folder / "words", tokenizer=folder / "words.json", eos_token="</s>", progress=False
    )
    with Roxxel(folder / "ids_*.rox") as bare:
        bare.write((np.asarray(one) for one in made["byte"]), vocab_size=257, separator=256)
    return made | {"ids": Roxxel(folder / "ids_*.rox")}


def validated(data, path, phase, loss_fn=token_losses, **options):
    """The row of the first validation of a run."""
    vocabulary = data.vocab_size
    options = {"val_fraction": 0.3, "eval_iters": 3, "model": module(vocab_size=vocabulary)} | options
    options["optimizer"] = optax.sgd(0.0)
    train(data, path, [phase], loss_fn=loss_fn, **options)
    return rows(path)[0]


def nats_after(data):
    """[V, V]: the loss of each token after each, of the model before its first step."""
    vocabulary = data.vocab_size
    logits = nnx.jit(lambda model, tokens: model(tokens))(module(vocab_size=vocabulary), np.arange(vocabulary)[None])[0]
    shares = np.exp(np.asarray(logits, np.float64))
    return -np.log(shares / shares.sum(-1, keepdims=True))


def predicted(data, phase, iters):
    """(nats, bytes, ends) of the text that a validation predicts, by the definition."""
    tokenizer, losses = data.tokenizer, nats_after(data)
    found = EvenRows(data.ranges, phase.shape, iters)
    nats = size = ends = 0
    for step in range(found.total_steps):
        batch = found.rows(step)
        ids, counted = data.read(batch.offset, batch.seq_len), None
        if phase.packing == "documents":
            segments, _ = data.segments(batch.offset, batch.seq_len)
            counted = segments[:, 1:] == segments[:, :-1]
        counted = (ids[:, 1:] >= 0) if counted is None else counted
        of_text = counted & (ids[:, 1:] != tokenizer.eos_id)
        nats += losses[ids[:, :-1], ids[:, 1:]][of_text].sum()
        ends += (counted & ~of_text).sum()
        ids = ids[:, 1:][of_text]
        names = {number: name for name, number in tokenizer._inner.get_vocab().items()}
        size += sum(len(names[number]) for number in ids.tolist())
    return nats, size, ends


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        pytest.param("byte", "contiguous", marks=pytest.mark.long),
        ("bpe", "documents"),
        pytest.param("byte", "documents", marks=pytest.mark.long),
        pytest.param("bpe", "contiguous", marks=pytest.mark.long),
    ],
)
def test_the_bits_of_a_validation_over_its_bytes(sets, tmp_path, kind, packing):
    data, phase = sets[kind], Phase(2, 4, 33, packing=packing)
    row = validated(data, tmp_path, phase, loss_fn=next_token_loss)
    nats, size, ends = predicted(data.split(0.3)[1], phase, 3)
    assert row["val_bpb"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert ends or packing == "contiguous"


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("byte", "bpe")), "words"])
def test_the_bytes_of_a_whole_set_are_those_of_its_documents(sets, tmp_path, kind):
    """Named sets of one row each, which is all of them: the number is that of the text, but for its first token."""
    data = sets[kind]
    phase = Phase(1, 1, data.num_tokens)
    row = validated(data, tmp_path, phase, val_fraction=0.0, validation={"all": data, "again": data})
    first = data.tokenizer.text_bytes.first[data.read(np.zeros(1, np.int64), 1)[0, 0]]
    size = sum(len(text.encode()) for text in TEXTS) - first * data.text_scale()
    assert (data.text_scale() > 1.01) == (kind == "words")
    ids = data.read(np.zeros(1, np.int64), data.num_tokens)[0]
    nats = nats_after(data)[ids[:-1], ids[1:]][ids[1:] != data.tokenizer.eos_id].sum()
    assert row["val_bpb/all"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert row["val_bpb/all"] == row["val_bpb/again"] == pytest.approx(row["val_bpb"], rel=1e-9)


@pytest.mark.long
def test_where_the_text_is_not_known(sets, tmp_path):
    """Without a tokenizer, or with a loss that may be anything, there is no such number."""
    phase = Phase(1, 4, 33)
    assert not any("bpb" in name for name in validated(sets["ids"], tmp_path / "ids", phase))

    def own(model, batch):
        return 2 * next_token_loss(model, batch)

    row = validated(sets["byte"], tmp_path / "own", phase, loss_fn=own)
    assert "val_loss" in row
    assert not any("bpb" in name for name in row)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ({"v": [(1.0, 8, 16)], "w": [(2.0, 8, 8)]}, {"val_bpb": 1.0, "val_bpb/v": 0.5, "val_bpb/w": 2.0}),
        ({"v": [(1.0, 8, 16), (math.nan, 0, 0)]}, {"val_bpb": 0.5, "val_bpb/v": 0.5}),
        ({"": [(3.0, 2, 6)]}, {"val_bpb": 1.0}),
        ({"v": [(1.0, 8, 4, 2.0), (1.0, 8, 4, 6.0)]}, {"val_bpb": 1.0, "val_bpb/v": 1.0}),
        ({"v": [(1.0, 8, 16)], "w": [(2.0, 8, None)]}, {"val_bpb/v": 0.5}),  # one without a tokenizer
        ({"v": [(1.0, 8, 16), (1.0, 8, -1)]}, {}),  # ids that its tokenizer does not know
        ({"v": [(1.0, 2, 0)]}, {"val_bpb": math.nan, "val_bpb/v": math.nan}),  # ends of documents alone
        ({TRAIN: [(1.0, 8, 16)]}, {}),
    ],
)
def test_of_several_sets(batches, expected):
    """(bits, weight, bytes, and the nats of ends) of each batch."""
    losses = {
        name: [
            {"loss": bits * math.log(2), "loss_weight": weight, END_NATS: sum(ends) * math.log(2)}
            | ({} if size is None else {BYTES: size})
            for bits, weight, size, *ends in of_set
        ]
        for name, of_set in batches.items()
    }
    found = {name: value for name, value in summarize(losses).items() if "bpb" in name}
    assert found == pytest.approx(expected, nan_ok=True)
