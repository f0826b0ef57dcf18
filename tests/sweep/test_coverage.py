"""How often intervals of 90 % hold the truth: those of the law of mixtures, and the verdict of a confirmation."""

import math
from itertools import product

import numpy as np
import pytest

from roxxel_dist.sweep.report.confirmation import Confirmed, paired
from roxxel_dist.sweep.report.mixture import HELD, UNLIKELY
from roxxel_dist.sweep.report.surface import Estimate, effects, gain, interactions, surface
from roxxel_dist.sweep.samplers.discrepancy import chance_of_fit
from roxxel_dist.sweep.samplers.law import Law

SHARES = 3
SEEDS = 3
"""Of a confirmation."""
OF_LAW = ("gain", "loss", "effect", "interaction", "surface")
"""What the law says; of these neither fewer nor more than the level are to hold the truth."""
SETS = ((1, 0.0), (3, 0.0), (3, 0.9), (5, 0.0), (5, 0.9))
QUICK = [("law", 30, 0.1, 1, 0.0, 20), ("law", 30, 0.1, 3, 0.9, 8)]
"""Truth, trials, noise in spans of the losses, validation sets, how alike their noise is, and how often it is tried.
With weights of the observed losses, and sets that are drawn apart, these hold 65, 58, 48 and 47 %."""
BESIDE = {"power": 0.8, "crossing": 0.8, "heavy": 0.85, "seeds": 0.85}
"""Truths beside the law, or noise beside the usual, and what intervals hold at least on average."""
EVERY = [("law", *case, *of_sets, 200) for case in product((30, 100, 300), (0.02, 0.1)) for of_sets in SETS]


def made(truth, rng, sets):
    """The losses of the sets over shares: "power" and "crossing" are beside every law, the others in the grid."""
    if truth == "crossing":  # each validation set has a best mixture of its own, inside
        pairs, levels = rng.dirichlet(np.ones(SHARES), sets), rng.uniform(0.5, 2, sets)
        return lambda shares: 2 + levels * ((shares[:, None] - pairs) ** 2).sum(axis=2)
    if truth != "power":
        tilts, levels = -rng.uniform(0.2, 1.5, (sets, SHARES)), rng.uniform(-0.5, 0.5, sets)
        return lambda shares: 2.5 + np.exp(levels + shares @ tilts.T)
    tilts, powers, sizes = rng.uniform(0.05, 1, (sets, SHARES)), rng.uniform(0.3, 1, sets), rng.uniform(0.3, 0.8, sets)
    return lambda shares: 2 + sizes * (0.05 + shares @ tilts.T) ** -powers


def held(truth, count, noise, sets, alike, times, first=0, unseen=False):
    """Of `times` studies of trials with noise: the share of intervals that hold the truth, and of verdicts that do.

    With `unseen` those studies count alone whose trials do not contradict the law: where the report names a level.
    Truth "heavy" has noise of Student's t with 3 degrees of freedom, "seeds" three seeds that all trials share.
    """
    found, widths = {name: [] for name in (*OF_LAW, "measured", "verdict")}, []
    for number in range(first, first + times):
        rng = np.random.default_rng([number, count, sets, int(alike * 10)])
        losses = made(truth, rng, sets)

        def true(shares, losses=losses):
            return losses(shares).mean(axis=1)

        def noisy(shares, sizes, rng=rng, losses=losses):
            common, own = rng.standard_normal((len(shares), 1)), rng.standard_normal((len(shares), sets))
            noise = math.sqrt(alike) * common + math.sqrt(1 - alike) * own
            if truth == "heavy":
                noise = noise / np.sqrt(rng.chisquare(3, (len(shares), 1)))  # Student's t over its deviation
            if truth == "seeds":
                noise = noise[np.arange(len(shares)) % SEEDS]
            return losses(shares) + sizes * noise

        shares = rng.dirichlet(np.ones(SHARES), count)
        sizes = noise * np.ptp(losses(shares), axis=0)
        law = Law.fit(shares, noisy(shares, sizes))
        said = law.fitted().mean(axis=1)
        chance = chance_of_fit(said[:, None], shares, law.trials.mean(axis=1) - said)
        if unseen and chance is not None and chance < UNLIKELY:
            continue

        def draws(rows, law=law):
            return np.concatenate([law.mean(rows)[None], law.draws(rows)]).mean(axis=2)

        pair = rng.dirichlet(np.full(SHARES, 3.0), 2)
        predicted, value = gain(draws, *pair), float(np.subtract(*true(pair)))
        found["gain"].append(holds(predicted, value))
        widths.append((predicted.high - predicted.low) / np.ptp(true(shares)))
        found["loss"].append(holds(Estimate.of_draws(draws(pair)[:, 0]), float(true(pair)[0])))
        for i, effect in enumerate(effects(draws, pair[0], slice(0, SHARES))):
            moved = np.stack([0.9 * pair[0] + 0.1 * np.eye(SHARES)[i], pair[0]])
            found["effect"].append(holds(effect, float(np.subtract(*true(moved)))))
        for (i, j), both in interactions(draws, pair[0], slice(0, SHARES)):
            unit = np.eye(SHARES)
            ends = np.stack([0.8 * pair[0] + 0.1 * (unit[i] + unit[j]), 0.9 * pair[0] + 0.1 * unit[i]])
            ends = np.concatenate([ends, [0.9 * pair[0] + 0.1 * unit[j], pair[0]]])
            found["interaction"].append(holds(both, float(true(ends) @ [1, -1, -1, 1])))
        for point in surface(draws, pair[0], slice(0, SHARES), np.zeros(SHARES), np.ones(SHARES)):
            found["surface"].append(holds(point.metric, float(true(np.array([point.shares]))[0])))
        measured = [dict(enumerate(noisy(np.tile(one, (SEEDS, 1)), sizes).mean(axis=1))) for one in pair]
        confirmed = Confirmed(against="other", predicted=predicted, measured=paired(*measured), seeds=SEEDS)
        assert confirmed.measured is not None
        found["measured"].append(holds(confirmed.measured, value))
        found["verdict"].append(confirmed.is_inside)
    return {name: float(np.mean(values)) for name, values in found.items()}, float(np.median(widths))


def holds(estimate, value):
    return estimate.low <= value <= estimate.high


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in EVERY)], ids=str)
def test_intervals_of_the_law_hold_their_level(case):
    """As often as the report says, within three standard errors, and those of the law not in nearly all."""
    found, width = held(*case)
    print(case, found, width)
    for name, value in found.items():
        low = HELD["pairs" if name == "interaction" else "law"][0]
        assert value > low - 3 * math.sqrt(low * (1 - low) / case[-1]), found
    assert case[-1] < 100 or all(found[name] < 0.99 for name in OF_LAW if name != "interaction"), found


@pytest.mark.parametrize(
    ("truth", "least", "count", "times"),
    [("power", 0.7, 300, 5), *(pytest.param(*one, count, 200, marks=pytest.mark.long)
                                for one in BESIDE.items() for count in (30, 100, 300))],
)  # fmt: skip
def test_intervals_hold_beside_every_law(truth, least, count, times):
    """Those of the law alone hold a power law in 53 % of studies of 300 trials, as its error stays and they narrow."""
    found, width = held(truth, count, 0.02, 1, 0.0, times)
    print(truth, count, found, width)
    differences = ("gain", "effect", "interaction")
    assert np.mean([found[name] for name in (differences if truth == "seeds" else OF_LAW)]) > least, found


@pytest.mark.long
@pytest.mark.parametrize("case", [("power", 300, 0.02, 3, 0.0), ("crossing", 100, 0.1, 1, 0.0)], ids=str)
def test_what_the_report_says_of_losses_beside_the_law_that_no_trial_shows(case):
    found, _ = held(*case, 200, first=5_000_000, unseen=True)
    print(case, found)
    low, high = HELD["beside"]
    assert all(low - 0.1 < found[name] < high for name in OF_LAW), found
    assert min(found[name] for name in OF_LAW) < 0.85, "the report says too little of these intervals"
