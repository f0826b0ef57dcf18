"""The expected worth of a trial: improvement times success, by the models of values and of failures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, log_ndtr

from roxxel_dist.sweep.samplers.gp import GaussianProcess, condition, fit_hyperparameters, sample_hyperparameters

FIT_TO = 80
"""Trials that the scales are fitted to: the cost grows with their cube."""
MEMBERS, MEMBERS_TIMES = 4, 300
"""Draws of the scales that are averaged over, and their number times that of trials: many values leave little open."""
FAILURE_NOISE = 0.1
"""The centre of the prior of a failure's noise: some trials fail for no reason."""
ACCIDENTS = 4.0
"""The log odds that trials fail at a constant rate, before anything is seen: the process can say that too."""
OUTLIER = 3.0
"""A value further behind the median than so many times the best one is ahead of it counts as that far: a diverged loss
says no more than that, and would make all others look alike."""
DIVERGED = 20.0
"""Further behind than so many times, a loss has diverged: no mixture of data alone makes such a difference."""
FURTHEST = 100.0
"""The same where logarithms are taken."""
AHEAD = 3.0
"""A value further ahead of the next one than so many times what lies between that one or the upper quartile and the
median counts as that far: one number that a bug has made would hide all differences between the others."""
APART = 0.01
"""How far apart parallel trials are, at least along one axis, as a share of its range."""
ROWS_AT_ONCE = 128
SOFTENING = 0.1
"""Added to how far a value is behind the best one before its logarithm is taken: a share of how far the median is."""
FEWEST = 4
"""Values that tell whether their logarithms are easier to predict."""


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """How likely a trial is to fail: a process over the parameters, or a constant rate, by how well each predicts."""

    process: GaussianProcess
    limit: float
    """The mean of the process where a trial is as likely to fail as not."""
    rate: float
    weight: float
    """Of the process: near 0 where the parameters say nothing about which trials fail."""
    blame: np.ndarray
    """How likely it is of each failed trial that the process explains it, not the constant rate: float64[k]."""

    def log_success(self, features: np.ndarray) -> np.ndarray:
        """The log probability of a trial that does not fail: float64[m] for float64[m, width]."""
        modelled = np.exp(self.process.log_probability_below(features, self.limit))
        return np.log(self.weight * modelled + (1 - self.weight) * (1 - self.rate) + 1e-30)


def fit_failures(features: np.ndarray, failed: np.ndarray, running: np.ndarray) -> FailureModel | None:
    """The model of failures, or None where none or all have failed.

    The weight of the process is its share of the likelihood that both models have of each trial given all others, less
    what a constant rate is likelier by before anything is seen.

    Args:
        features: float64[n, width] of the trials that ended.
        failed: bool[n], which of them failed.
        running: float64[m, width] of those that run.
    """
    rate, count = failed.mean(), len(failed)
    if not 0 < rate < 1:
        return None
    # A regression of 1 (failed) and 0 (did not), which has a closed form; its mean crosses `limit` at one half. A
    # classification (Rasmussen and Williams 2006, chapter 3) would need an approximation in each fit.
    spread = failed.std()
    values, limit = (failed - rate) / spread, (0.5 - rate) / spread
    subset = training_subset(-values, FIT_TO)
    theta = fit_hyperparameters(features[subset], values[subset], FAILURE_NOISE)
    process = condition(features, values, theta)
    mean, deviation = process.leave_one_out()
    log_fails = log_ndtr((mean - limit) / deviation)
    log_modelled = np.where(failed, log_fails, log_ndtr((limit - mean) / deviation)).sum()
    others = (count * rate - failed + 0.5) / count  # the rate of all other trials, never 0 or 1
    log_constant = np.log(np.where(failed, others, 1 - others)).sum()
    # Both are products of what each trial's outcome was worth to a model that had seen all others (Geisser and Eddy
    # 1979), so a process with many hyperparameters gains nothing by fitting accidents.
    log_odds = log_modelled - log_constant - ACCIDENTS
    return FailureModel(
        process=process.condition_on(running, process.predict(running)[0]),
        limit=limit,
        rate=rate,
        weight=float(expit(log_odds)),
        blame=expit(log_odds + log_fails[failed] - np.log(rate)),
    )


def fit_values(
    known: np.ndarray,
    values: np.ndarray,
    theta: np.ndarray,
    failed: np.ndarray,
    blame: np.ndarray,
    running: np.ndarray,
    rng: np.random.Generator,
) -> list[GaussianProcess]:
    """Plausible models of the values: a process for each of several likely scales, fewer of them if much is known.

    A trial that runs gives each process a value that it takes for possible there (Snoek, Larochelle, Adams 2012). One
    that failed is as bad as the worst for as many of the processes as its parameters are to blame; to others it says
    nothing, so that what failed by accident is tried again nearby.

    Args:
        known: float64[n, width] of the trials that gave a value.
        values: float64[n] of mean 0 and deviation 1, from `choose_scale`.
        theta: the hyperparameters that explain them best, from there too.
        failed: float64[k, width] of those that failed.
        blame: float64[k], from the `FailureModel`.
        running: float64[m, width] of those that run.
        rng: of the scales and the values that are drawn.
    """
    thetas = [theta]
    if (count := min(MEMBERS, MEMBERS_TIMES // len(values))) > 1:
        subset = training_subset(values, FIT_TO)
        thetas = sample_hyperparameters(known[subset], values[subset], theta, count, rng)
    processes = []
    for drawn_theta in thetas:
        process = condition(known, values, drawn_theta)
        best = process.best
        bad = rng.random(len(failed)) < blame
        if bad.any():
            process = process.condition_on(failed[bad], np.full(bad.sum(), values.max()))
        if len(running):
            # A joint draw of all that run: over the members, the mean is over results that are not known yet.
            drawn = process.draw(running, rng)
            process, best = process.condition_on(running, drawn), min(best, float(drawn.min()))
        processes.append(replace(process, best=best))
    return processes


@dataclass(frozen=True, kw_only=True)
class Acquisition:
    """The expected worth of a trial, averaged over plausible models of the values."""

    values: Sequence[GaussianProcess]
    failure: FailureModel | None = None
    """None: no trial has failed yet, or all have."""
    running: np.ndarray
    """float64[k, width] of the trials that run."""

    def log_score(self, features: np.ndarray) -> np.ndarray:
        """The log of the expected improvement times the probability of a trial that does not fail, less where a trial
        runs: float64[m]."""
        score = _log_mean([process.log_expected_improvement(features) for process in self.values])
        score = score if self.failure is None else score + self.failure.log_success(features)
        return score + self._log_apart(features)

    def _log_apart(self, features: np.ndarray) -> np.ndarray:
        """What keeps parallel trials apart, float64[m]: 0 far from each that runs, and without end at one.

        The values that are drawn for them do not: a low draw makes its neighbourhood look like the best place of all.
        """
        apart = np.zeros(len(features))
        for start in range(0, len(features), ROWS_AT_ONCE) if len(self.running) else ():
            rows = features[start : start + ROWS_AT_ONCE]
            nearest = np.abs(rows[:, None] - self.running).max(2).min(1)
            apart[start : start + ROWS_AT_ONCE] = np.log(-np.expm1(-((nearest / APART) ** 2)) + 1e-30)
        return apart

    def slope(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        """The log of the expected improvement at one point, and its gradient: float64[width]."""
        scores, slopes = zip(*[process.slope(point) for process in self.values], strict=True)
        score = _log_mean(np.array(scores)[:, None])[0]
        return float(score), np.exp(np.array(scores) - score) @ np.array(slopes) / len(scores)


def _log_mean(scores: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """The log of the mean of numbers given by their logs, float64[k, m]: float64[m]."""
    return np.logaddexp.reduce(np.array(scores), axis=0) - np.log(len(scores))


def choose_scale(features: np.ndarray, values: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values as they are, or the logarithms of how far they are behind the best: what a process predicts better.

    It predicts each value given all others. Values that `standardize` cuts off do not count.

    Args:
        features: float64[n, width], n >= 1.
        values: float64[n].

    Returns:
        Values of mean 0 and deviation 1, float64[n], and the hyperparameters that explain them best.
    """
    known, plain = _centred(values), standardize(values)
    subset = training_subset(known, FIT_TO)
    here = features[subset]
    theta = fit_hyperparameters(here, plain[subset])
    least, median = known.min(), np.median(known)
    if len(known) < FEWEST or median == least:
        return plain, theta
    # Logarithms spread the values near the best one, where a search looks; SOFTENING keeps the best one's finite.
    most = median + OUTLIER * (median - least)
    behind = np.log(known - least + SOFTENING * (median - least))
    logs = (behind - behind.mean()) / behind.std()
    log_theta = fit_hyperparameters(here, logs[subset])
    uncut = known[subset] < most
    density = _log_density(here, plain[subset], theta)[uncut] - np.log(np.minimum(known, most).std())
    log_density = _log_density(here, logs[subset], log_theta)[uncut] - np.log(behind.std())
    # Both densities are of the values themselves: for g = log(y - least + c), p(y) = p(g) dg/dy = p(g) exp(-g).
    better = (log_density - behind[subset][uncut]).sum() > density.sum()
    return (logs, log_theta) if better else (plain, theta)


def _log_density(features: np.ndarray, values: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Of each value given all others, but for a constant: float64[n]."""
    process = condition(features, values, theta)
    mean, deviation = process.leave_one_out()
    return -0.5 * ((values - mean) / deviation) ** 2 - np.log(deviation)


def standardize(values: Sequence[float] | np.ndarray, cut: float = OUTLIER) -> np.ndarray:
    """Values of mean 0 and deviation 1, the worst of them cut off; see `OUTLIER`: float64[n]."""
    known = np.array(values, dtype=float)
    if not len(known):
        return known
    known = _centred(known)
    known = np.minimum(known, cut * _spread(known))
    deviation = known.std()
    return (known - known.mean()) / (deviation if deviation > 0 else 1.0)


def _spread(known: np.ndarray) -> float:
    """How far the best of values with median 0 is ahead of it; where most are the best, how far others are behind."""
    ahead = -known.min()
    return float(ahead if ahead > 0 or not (known > 0).any() else np.median(known[known > 0]))


def _centred(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Values less their median, over a power of two, the furthest of them cut off: float64[n]."""
    halves = np.array(values, dtype=float) / 2  # the difference of two huge ones would be endless
    known = halves - np.median(halves)
    ranked = np.sort(known)
    for count in range(max(1, len(known) // 10), 0, -1):
        if len(known) < FEWEST:
            break
        usual = float(max(-ranked[count], ranked[3 * len(known) // 4]))
        limit = float(ranked[count]) - AHEAD * usual
        if usual > 0 and ranked[count - 1] < limit:
            known = np.maximum(known, limit)
            break
    known = np.minimum(known, FURTHEST * _spread(known))
    return np.ldexp(known, -np.frexp(np.abs(known).max())[1])


def is_diverged(values: np.ndarray) -> np.ndarray:
    """Which values are so far behind the others that they say nothing but that: bool[n] for float64[n], n >= 1."""
    known = _centred(values)
    return known > DIVERGED * _spread(known)


def training_subset(values: np.ndarray, count: int) -> np.ndarray:
    """The indices of at most `count` trials to fit the scales to: the best ones, and others evenly over time."""
    if len(values) <= count:
        return np.arange(len(values))
    order = np.argsort(values, kind="stable")
    best, rest = order[: count // 2], np.sort(order[count // 2 :])
    even = rest[np.linspace(0, len(rest) - 1, count - len(best)).astype(int)]
    return np.sort(np.r_[best, even])
