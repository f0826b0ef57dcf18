"""How the next token is drawn, against the same in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roxxel_dist.model.generate import Sampling, sample, sampling_inputs

LOGITS = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32))
DRAWS = 4000


@jax.jit
def draws(one):
    return jax.vmap(lambda place: sample(jnp.asarray(LOGITS)[None], place[None], one)[0])(jnp.arange(DRAWS))


def shares(**options):
    """How often each token is drawn, of many places of one row."""
    one = sampling_inputs(Sampling(**{"temperature": 1.0, **options}), [3], ())
    return np.bincount(draws(one), minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.05, 0.4, 0.15, 0.3, 0.1]),
        ({"temperature": 0}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 9}, [0.05, 0.4, 0.15, 0.3, 0.1]),
        ({"top_p": 0.7}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.71}, [0, 0.4 / 0.85, 0.15 / 0.85, 0.3 / 0.85, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        # Of the three that are left the first two have 0.82 together.
        ({"top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
        # At half the temperature probabilities are squared: .0025 .16 .0225 .09 .01, of .285.
        ({"temperature": 0.5, "top_p": 0.85}, [0, 0.16 / 0.25, 0, 0.09 / 0.25, 0]),
    ],
    ids=str,
)
def test_shares_of_tokens(options, expected):
    found = shares(**options)
    assert (found > 0).tolist() == (np.array(expected) > 0).tolist()
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_a_row_draws_by_its_seed_and_place_alone():
    one, other = (sampling_inputs(Sampling(temperature=1.0), seeds, ()) for seeds in ([7], [1, 7, 7]))
    rows = np.stack([LOGITS[::-1], LOGITS, LOGITS])
    draw_rows = jax.jit(sample)
    for place in range(20):
        alone = np.asarray(draw_rows(LOGITS[None], np.array([place]), one))[0]
        assert alone == np.asarray(draw_rows(rows, np.array([5, place, place]), other))[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1: it must be 0 \(greedy\) or more"),
        ({"top_k": -1}, "top_k is -1: it must be at least 1, or 0 for all tokens"),
        ({"top_p": 0}, "top_p is 0: it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1: it must be above 0 and at most 1"),
        ({"temperature": "1"}, "temperature is '1': it must be"),
        ({"top_k": 2.5}, "top_k is 2.5: it must be .* a whole number"),
        ({"top_p": None}, "top_p is None: it must be"),
    ],
)
def test_values_out_of_bounds(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("seed", [-1, 2**31, 2.5, "3"])
def test_a_seed_out_of_bounds(seed):
    with pytest.raises(ValueError, match=rf"seed is {seed!r}: it must be at least 0"):
        sampling_inputs(Sampling(), [seed], ())


def test_more_than_the_types_hold_is_the_most_that_they_do():
    one = sampling_inputs(Sampling(temperature=1e39, top_k=10**20), [np.int64(2**31 - 1)], ())
    assert np.isfinite(one.temperature)
    assert (one.top_k, one.seed_B.tolist()) == (2**31 - 1, [2**31 - 1])
    assert np.all(shares(temperature=1e39, top_k=10**20) > 0.17), "all tokens are as likely"
