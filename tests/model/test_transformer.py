import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import transformer

from roxxel_dist.data.packing import Packed
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import generate
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.settings.config import Config

SMALL = {"dim": 32, "num_blocks": 1, "vocab_size": 50, "max_context": 64}


@nnx.jit
def run(model, *batch):
    return model(*batch)


loss_of = nnx.jit(next_token_loss)


def build(**fields):
    return transformer(**{**SMALL, **fields})


def numbers(model, *batch):
    return np.asarray(run(model, *batch))


def test_a_config_of_everything_makes_the_model_of_its_fields():
    model = nnx.eval_shape(lambda: Transformer(Config(**SMALL, lr=0.1), nnx.Rngs(params=0)))
    assert model.config == ModelConfig(**SMALL)
    with pytest.raises(ValueError, match="vocab_size is not set"):
        Transformer(Config(dim=32), nnx.Rngs(params=0))


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 50, shape, np.int32)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_heads": 1, "head_size": 8, "weight_tying": False, "num_blocks": 2},
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ({}, {"kv_heads": 1, "head_size": 8}, {"weight_tying": False})
        ),
    ],
)
def test_no_position_sees_what_comes_later(fields):
    model, x = build(**fields), tokens(2, 20)
    changed = x.copy()
    changed[:, 12] = (x[:, 12] + 1) % 50
    before, after = numbers(model, x), numbers(model, changed)
    assert before.shape == (2, 20, 50)
    assert np.array_equal(before[:, :12], after[:, :12])
    assert not np.allclose(before[:, 12:], after[:, 12:])


def test_loss_of_an_untrained_model_is_that_of_guessing():
    begin = jax.jit(lambda x: next_token_loss(Transformer(ModelConfig(**SMALL), nnx.Rngs(0)), x))
    assert float(begin(tokens(8, 33))) == pytest.approx(np.log(50), abs=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_token(tied):
    model = build(weight_tying=tied, num_blocks=2)
    multiplies = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) - (0 if tied else 50 * 32)
    assert model.flops_per_token(20) == 6 * multiplies + 12 * 2 * 32 * 20, "two blocks of 32 channels, rows of 20"


LENGTHS = [7, 1, 20, 12]


def packed():
    """One row of four documents, and the same four as rows of their own, filled up behind their ends."""
    row = tokens(1, sum(LENGTHS))
    segments = np.repeat(np.arange(4, dtype=np.int32), LENGTHS)[None]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in LENGTHS])[None]
    apart, ends = np.zeros((4, max(LENGTHS)), np.int32), np.cumsum(LENGTHS)
    for number, (length, end) in enumerate(zip(LENGTHS, ends.tolist(), strict=True)):
        apart[number, :length] = row[0, end - length : end]
    return Packed(row, segments, positions), apart


def own_places(apart):
    """What stands in the documents alone, one behind the other, of an array [4, longest, ...]."""
    return np.concatenate([rows[:length] for rows, length in zip(apart, LENGTHS, strict=True)])


def test_a_packed_row_is_its_documents_apart():
    model, (batch, apart) = build(), packed()
    expected = own_places(numbers(model, apart))
    np.testing.assert_allclose(numbers(model, *batch)[0], expected, atol=1e-5)
    one_document = Packed(batch.tokens, np.zeros_like(batch.tokens), np.arange(sum(LENGTHS), dtype=np.int32)[None])
    assert not np.allclose(numbers(model, *one_document)[0, 7:], expected[7:], atol=1e-3)


def test_a_document_does_not_see_its_neighbours():
    model, (batch, _) = build(), packed()
    changed = batch._replace(tokens=batch.tokens.copy())
    changed.tokens[:, 8:28] = (batch.tokens[:, 8:28] + 1) % 50
    before, after = numbers(model, *batch), numbers(model, *changed)
    assert np.array_equal(before[:, :8], after[:, :8])
    assert np.array_equal(before[:, 28:], after[:, 28:])
    assert not np.allclose(before[:, 8:28], after[:, 8:28])


def test_rotary_positions_are_those_given():
    """Only distances matter: a shift changes the rounding alone, stretching changes the logits."""
    model, (batch, _) = build(), packed()
    expected = numbers(model, *batch)
    shifted, stretched = (numbers(model, *batch[:2], places) for places in (batch.positions + 5, batch.positions * 3))
    rounding = np.abs(shifted - expected).max()
    assert rounding < 1e-5
    assert np.abs(stretched - expected).max() > 10 * rounding
    np.testing.assert_allclose(numbers(model, *batch[:2]), expected, atol=1e-5)


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.long), True])
def test_loss_and_gradients_of_a_packed_batch_are_those_of_its_documents(remat):
    """The mean over all targets but the first token of a document, which nothing of its own comes before."""
    batch, apart = packed()

    def loss_apart(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(apart[:, :-1]), apart[:, 1:])
        counted = np.arange(losses.shape[1]) < np.array(LENGTHS)[:, None] - 1
        return jnp.where(counted, losses, 0).sum() / (sum(LENGTHS) - 4)

    loss, grads = nnx.jit(nnx.value_and_grad(next_token_loss))(build(gradient_checkpointing=remat), batch)
    expected, expected_grads = nnx.jit(nnx.value_and_grad(loss_apart))(build())
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_loss_of_one_document_a_row_and_of_nothing_to_predict():
    model, x = build(), tokens(2, 12)
    zeros, places = np.zeros_like(x), np.broadcast_to(np.arange(12, dtype=np.int32), x.shape)
    assert float(loss_of(model, Packed(x, zeros, places))) == pytest.approx(float(loss_of(model, x)))
    assert float(loss_of(model, Packed(x, places, zeros))) == 0


def test_dropout_only_while_training():
    model, x = build(dropout_rate=0.5), tokens(2, 20)
    assert not np.array_equal(run(model, x), run(model, x))
    model.eval()
    assert np.array_equal(run(model, x), run(model, x))


def test_tying_saves_the_output_matrix():
    models = (build(weight_tying=tied) for tied in (True, False))
    sizes = [sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))) for model in models]
    assert sizes[1] - sizes[0] == 50 * 32


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"dim": 256}, (4, 4, 64)),
        ({"dim": 256, "kv_heads": 2}, (4, 2, 64)),
        ({"dim": 96, "n_heads": 3}, (3, 3, 32)),
        ({"dim": 128, "head_size": 32, "kv_heads": 2}, (4, 2, 32)),
        ({"dim": 384, "kv_heads": 3}, (6, 3, 64)),
    ],
)
def test_heads_are_derived(fields, heads):
    assert ModelConfig(**fields).heads() == heads


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 100, "n_heads": 3}, "n_heads x head_size must be dim, and 3 x 33 is not 100"),
        ({"dim": 96, "n_heads": 32}, "head_size is 3"),
        ({"dim": 128, "n_heads": 4, "kv_heads": 3}, "kv_heads is 3: it must divide n_heads, which is 4"),
        ({"dim": 64, "kv_heads": 5}, "no multiple of kv_heads"),
        ({"dim": 0}, "dim is 0: it must be at least 1"),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0: it must be above 0 and below 1"),
        ({"hidden_dim": 0}, "hidden_dim is 0: it must be at least 1"),
    ],
)
def test_heads_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


def test_more_tokens_than_the_context():
    with pytest.raises(ValueError, match=r"65 tokens is longer than max_context \(64\)"):
        build()(tokens(1, 65))


def test_greedy_text_is_what_the_logits_say():
    model = build()
    prompt = [3, 1, 4]
    expected = list(prompt)
    for _ in range(6):
        x = np.array([expected + [0] * (20 - len(expected))] * 4, np.int32)  # what comes later is not seen
        expected.append(int(np.argmax(numbers(model, x)[0, len(expected) - 1])))
    assert generate(model, prompt, 6, max_context=64, temperature=0) == expected[3:]


def test_draws_follow_the_seed_and_stop_at_the_end():
    model = build()
    one, same, other = (generate(model, [1], 40, max_context=64, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert one == same != other
    end = one[10]
    assert generate(model, [1], 40, max_context=64, temperature=1.0, seed=1, stop_ids=[end]) == one[: one.index(end)]


def test_generation_refuses_what_cannot_be():
    for words, count, message in (([], 5, "prompt is empty"), ([1], 0, "max_new_tokens is 0: it must be at least 1")):
        with pytest.raises(ValueError, match=message):
            generate(build(), words, count, max_context=64)
    with pytest.raises(ValueError, match="max_context is 1: a prompt and a new token are 2 tokens"):
        generate(build(), [1], 5, max_context=1)
    with pytest.raises(ValueError, match="temperature is -1"):
        generate(build(), [1], 5, max_context=64, temperature=-1)
