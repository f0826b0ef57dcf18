"""A Config and a corpus as the parts of a run."""

import jax
import numpy as np
import pytest
from flax import nnx

from roxxel_dist import Config
from roxxel_dist.run.components import build_components, open_corpus
from roxxel_dist.train.validation.evaluator import HELD_OUT

SMALL = {"dim": 16, "num_blocks": 1, "max_context": 16, "batch_size": 16, "grad_accum": 2, "epochs": 0.1}


def test_a_recipe_leaves_the_config_and_has_every_part(corpus):
    config = Config(**SMALL, eval_iters=3)
    made = build_components(config, corpus)
    assert (config.vocab_size, made.config.vocab_size) == (None, 500)
    assert made.curriculum.shapes[0].batch_size == 16
    assert made.grad_accum == 2
    train, held_out = made.curriculum.primary_streamer.num_tokens, made.validation[HELD_OUT].num_tokens
    assert train + held_out == made.data.num_tokens == corpus.num_tokens
    assert 0.05 * corpus.num_tokens < held_out < 0.15 * corpus.num_tokens
    assert (made.options.eval_iters, made.options.val_fraction) == (3, 0.0)
    assert made.optimizer.config.lr == config.lr
    assert made.mesh().size == 8


def test_a_recipe_builds_the_same_model_each_time_and_its_loss_reads_a_batch(corpus):
    made = build_components(Config(**SMALL), corpus)
    one, two = nnx.jit(made.build)(), nnx.jit(made.build)()
    for a, b in zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(two)), strict=True):
        np.testing.assert_array_equal(a, b)
    batch = corpus.read(np.arange(4) * 17, 17)
    assert abs(float(nnx.jit(made.loss)(one, batch)["loss"]) - np.log(500)) < 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 400}, "vocab_size is 400, but the data has 500 tokens"),
        ({"phases": [{"steps": 3, "batch_size": 2, "seq_len": 18}]}, "phase 1: seq_len is 18"),
    ],
)
def test_what_does_not_fit_the_data_is_named(corpus, fields, message):
    with pytest.raises(ValueError, match=message):
        build_components(Config(**{**SMALL, **fields}), corpus)


def test_text_becomes_shards_in_the_folder_that_is_named(tmp_path):
    (tmp_path / "text.txt").write_text("one and two are three. " * 200)
    with open_corpus(Config(tokenizer_type="char"), tmp_path / "text.txt", tmp_path / "made") as data:
        assert data.tokenizer is not None
        assert data.num_tokens > 4000
    assert list((tmp_path / "made").glob("*.rox"))
    with pytest.raises(ValueError, match="no data: name a text file"):
        open_corpus(Config(), None, tmp_path / "made")
