"""The log-linear law of mixtures, on sources whose law is known: what it predicts, how sure it is, what it proposes."""

from functools import cache

import numpy as np
import pytest

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.samplers.discrepancy import chance_of_fit
from roxxel_dist.sweep.samplers.law import Law, propose
from roxxel_dist.sweep.space.mixture import mixture_space

NAMES = ("code", "math", "web", "books")
LEVELS = np.array([2.0, 1.5, 3.0])
TILTS = np.array([[-2.0, 0.5, 0.8, 0.3], [0.4, -1.5, 0.2, 0.6], [0.3, 0.3, -1.0, 0.1]])
WEIGHTS = np.array([0.5, 0.2, 0.3])


def known(shares):
    """The losses of three validation sets: float64[n, 3] of float64[n, 4]."""
    return LEVELS + np.exp(0.2 + shares @ TILTS.T)


def trials(count, noise=0.01, seed=0):
    """Shares at random, and their losses with noise."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(len(NAMES)), count)
    return shares, known(shares) + rng.normal(0, noise, (count, len(LEVELS)))


@cache
def nearly_known():
    """A law of many trials with little noise."""
    return Law.fit(*trials(60, noise=1e-4))


def best_of_many(spaces, kl=0.0):
    """The least of the weighted losses over many allowed mixtures of one space."""
    (space,), rng = spaces, np.random.default_rng(5)
    rows = space.from_cube(rng.random((5_000, space.axes)))
    return float((known(rows) @ WEIGHTS + kl * divergence(rows, space.natural)).min())


def divergence(rows, natural):
    return (rows * np.log(np.maximum(rows, 1e-12) / natural)).sum(axis=-1)


def test_it_finds_the_law_that_made_the_trials():
    asked = np.random.default_rng(9).dirichlet(np.ones(4), 300)
    law = Law.fit(*trials(30))
    spread = known(asked).std(axis=0)
    errors = np.sqrt(((law.mean(asked) - known(asked)) ** 2).mean(axis=0))
    assert (errors < 0.02 * spread + 0.008).all()
    exact = Law.fit(*trials(40, noise=0.0))
    assert np.abs(exact.mean(asked) - known(asked)).max() < 0.02


def test_its_intervals_hold_what_they_say():
    """Over many sets of trials, 90 % intervals hold the truth in 80 to 99 % of mixtures."""
    asked, held = np.random.default_rng(9).dirichlet(np.ones(4), 50), []
    for seed in range(5):
        draws = Law.fit(*trials(24, noise=0.02, seed=seed)).draws(asked)
        low, high = np.quantile(draws, (0.05, 0.95), axis=0)
        held.append(((low <= known(asked)) & (known(asked) <= high)).mean())
    assert 0.8 < np.mean(held) < 0.99


def test_differences_are_known_better_than_values():
    law = Law.fit(*trials(12, noise=0.05))
    pair = np.array([[0.3, 0.3, 0.2, 0.2], [0.32, 0.28, 0.2, 0.2]])
    draws = law.draws(pair, 2000) @ WEIGHTS
    assert (draws[:, 0] - draws[:, 1]).std() < 0.3 * draws[:, 0].std()


@pytest.mark.long
def test_what_is_left_out_is_predicted_as_without_it():
    """The closed form beside fits to all trials but one."""
    shares, losses = trials(16, noise=0.03)
    fast, slow = Law.fit(shares, losses).leave_one_out(), np.empty_like(losses)
    for number in range(len(shares)):
        rest = np.arange(len(shares)) != number
        slow[number] = losses[number] - Law.fit(shares[rest], losses[rest]).mean(shares[number])[0]
    assert np.corrcoef(fast.ravel(), slow.ravel())[0, 1] > 0.9
    assert np.sqrt((fast**2).mean()) == pytest.approx(np.sqrt((slow**2).mean()), rel=0.25)


@pytest.mark.parametrize("kl", [0.0, 0.05, 0.5])
@pytest.mark.parametrize(
    ("floors", "caps"), [(None, None), ([0.1, 0.1, 0.1, 0.1], None), ([0, 0, 0, 0.2], [0.3, 0.5, 0.4, 0.6])]
)
def test_the_proposal_is_the_best_of_all(floors, caps, kl):
    space = mixture_space((1,), NAMES, floors, caps, [4, 3, 2, 1])
    shares = propose(nearly_known(), WEIGHTS, [space], kl)
    assert space.allows(shares)
    value = float(known(shares[None])[0] @ WEIGHTS + kl * divergence(shares, space.natural))
    assert value <= best_of_many([space], kl) + 2e-4


def test_sources_of_which_a_little_teaches_most():
    """A power law over the whole simplex: shares as they are would not do, and the proposal is still the best."""

    def power(shares):
        return 2 + 0.3 * (0.05 + shares @ (np.eye(4) + 0.1)[:, :3]) ** -0.5

    rng, space = np.random.default_rng(3), mixture_space((1,), NAMES)
    shares, asked = rng.dirichlet(np.full(4, 0.5), 40), rng.dirichlet(np.full(4, 0.5), 4000)
    law = Law.fit(shares, power(shares) + rng.normal(0, 0.003, (40, 3)))
    errors = np.sqrt(((law.mean(asked) - power(asked)) ** 2).mean(axis=0))
    assert (errors < 0.12 * power(asked).std(axis=0)).all()
    found = propose(law, WEIGHTS, [space])
    assert space.allows(found)
    best, worst = (pick(power(asked) @ WEIGHTS) for pick in (np.min, np.median))
    assert power(found[None])[0] @ WEIGHTS < best + 0.03 * (worst - best)


def test_much_weight_of_natural_shares_keeps_them():
    space = mixture_space((1,), NAMES, tokens=[4, 3, 2, 1])
    far, near = (propose(Law.fit(*trials(30)), WEIGHTS, [space], kl) for kl in (0.01, 1000.0))
    assert np.allclose(near, space.natural, atol=1e-3)
    assert divergence(far, space.natural) > divergence(near, space.natural)


def test_two_phases_are_chosen_together():
    """Each of two phases has shares that sum to 1; the law has both side by side."""
    spaces = [mixture_space((phase,), NAMES) for phase in (1, 2)]
    rng = np.random.default_rng(2)
    shares = rng.dirichlet(np.ones(4), (60, 2)).reshape(60, 8)
    losses = known(0.6 * shares[:, :4] + 0.4 * shares[:, 4:])
    found = propose(Law.fit(shares, losses), WEIGHTS, spaces)
    assert all(space.allows(part) for space, part in zip(spaces, np.split(found, 2), strict=True))
    mixed = 0.6 * found[:4] + 0.4 * found[4:]
    assert float(known(mixed[None])[0] @ WEIGHTS) <= best_of_many(spaces[:1]) + 0.01


def test_the_same_trials_give_the_same_law_and_draws_differ_by_seed():
    shares, losses = trials(20)
    space = mixture_space((1,), NAMES)
    first, again = Law.fit(shares, losses), Law.fit(shares, losses)
    assert np.array_equal(first.draws(shares, 10), again.draws(shares, 10))
    assert not np.array_equal(first.draws(shares, 10), first.draws(shares, 10, seed=1))
    tried = [propose(first, WEIGHTS, [space], rng=np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert np.array_equal(tried[0], tried[1])
    assert not np.array_equal(tried[0], tried[2])


@pytest.mark.parametrize(
    "change",
    [np.zeros_like, lambda losses: 1e9 * losses - 1e15],
    ids=["all equal", "huge and below 0"],
)
def test_losses_of_any_kind(change):
    shares, losses = trials(12)
    law = Law.fit(shares, change(losses))
    assert np.isfinite(law.mean(shares)).all()
    assert np.isfinite(law.draws(shares, 50)).all()
    assert mixture_space((1,), NAMES).allows(propose(law, WEIGHTS, [mixture_space((1,), NAMES)]))


@pytest.mark.parametrize(
    ("shares", "losses", "why"),
    [
        (np.eye(4)[:2], np.zeros((2, 1)), "3 trials or more"),
        (np.eye(4), np.zeros((3, 1)), "3 trials or more"),
        (np.eye(4), np.full((4, 1), np.nan), "finite"),
    ],
)
def test_what_no_law_can_be_made_of(shares, losses, why):
    with pytest.raises(UserError, match=why):
        Law.fit(shares, losses)


def _curved(shares):
    """Sources of which two act together, as in no such law."""
    return 2.5 + 0.6 * np.exp(shares[:, 1] - shares[:, 2]) + 0.4 * np.exp(-5 * shares[:, 0] * shares[:, 1])


@pytest.mark.parametrize(
    ("truth", "count", "others", "least", "most"),
    [
        (lambda shares: known(shares)[:, 0], 40, 0.0, 0, 4),
        (_curved, 60, 1.0, 14, 20),
        (_curved, 60, 0.0, 16, 20),
        (_curved, 11, 0.0, 0, 0),
    ],
    ids=["a law", "two act together, and a parameter", "two act together", "too few to see it"],
)
def test_trials_contradict_a_law_that_is_not_theirs(truth, count, others, least, most):
    """In so many of 20 studies, where the errors of a right law would be such in 1 of them."""
    found = 0
    for seed in range(20):
        rng = np.random.default_rng([seed, count])
        shares, other = rng.dirichlet(np.ones(len(NAMES)), count), rng.uniform(-1, 1, (count, 1))
        losses = 2 + (truth(shares) - 2) * np.exp(others * other[:, 0])
        losses = losses + rng.normal(0, 0.02 * np.ptp(losses), count)
        said = Law.fit(shares, losses[:, None], other).fitted()
        chance = chance_of_fit(np.hstack([other, said]), shares, losses - said[:, 0])
        assert (chance is None) == (count < 20)
        found += chance is not None and chance < 0.05
    assert least <= found <= most
