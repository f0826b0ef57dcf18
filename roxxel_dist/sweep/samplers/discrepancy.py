"""What the law of mixtures may leave of the losses: products of two shares, or a smooth function of the shares.

Real losses are beside every law. The error that this makes is not less with more trials, so intervals of the law alone
would hold the less the more trials there are. As Kennedy and O'Hagan (2001, "Bayesian calibration of computer models",
doi 10.1111/1467-9868.00294) a draw is that of the law and one of its discrepancy, less what of it is linear in the
shares and in what the law says. It is one of three kinds: products of two shares (Scheffe 1958, "Experiments with
Mixtures"), a Gaussian process over the shares, and one over their roots, which bends more where shares are small; the
processes by random features (Rahimi and Recht 2007, "Random features for large-scale kernel machines"). Kind and
deviation are drawn by the evidence: without a discrepancy in the trials most draws have none.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

Array = NDArray[np.float64]
WIDTHS = np.array([0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
"""Deviation of the prior, over what the noise leaves unknown of an average feature."""
LIKELY = np.array([1.0, 0.1, 0.1])
"""How likely the kinds are before the trials: where these cannot tell them apart, the smooth ones would only make all
intervals wider."""
LENGTHS = (0.5, 0.25)
"""Over which the process of the shares varies, and that of their roots."""
WAVES = 50
"""Of random directions, for each process: a sine and a cosine."""
TESTED = 10
"""Trials beyond the coefficients of a test of the law: it has one for each product of two shares, and more."""


class Discrepancy(NamedTuple):
    """d draws, for one validation set."""

    plain: Array
    """float64[K + 2, q]: by feature, what of it is linear in 1, the shares and what the law says."""
    coefficients: Array
    """float64[d, q]."""
    trend: Array
    """float64[d, K + 2], of 1, the shares and what the law says."""

    def losses(self, shares: Array, said: Array) -> Array:
        """float64[d, m], of shares float64[m, K] and what the law says of them, float64[m]."""
        rows = _rows(shares, said)
        return self.coefficients @ (np.hstack(_features(shares)) - rows @ self.plain).T + self.trend @ rows.T


def discrepancy(shares: Array, others: Array, said: Array, losses: Array, place: Array, normal: Array) -> Discrepancy:
    """Draws of what a law leaves of one validation set.

    Args:
        shares: float64[n, K].
        others: float64[n, p], what else differs between the trials.
        said: float64[n], by the law, for these.
        losses: float64[n].
        place: float64[d], even between 0 and 1.
        normal: float64[d, n].
    """
    kinds, rows = _features(shares), np.hstack([_rows(shares, said), others])
    features, errors, free = np.hstack(kinds), losses - said, max(len(shares) - rows.shape[1] - 1, 2)
    plain = np.asarray(np.linalg.lstsq(rows, features, rcond=1e-8)[0], np.float64)
    trend = np.asarray(np.linalg.lstsq(rows, errors, rcond=1e-8)[0], np.float64)
    rest, errors = features - rows @ plain, errors - rows @ trend
    found, logs = [], []
    for part in np.split(rest, np.cumsum([kind.shape[1] for kind in kinds])[:-1], axis=1):
        basis, sizes, back = np.linalg.svd(part, full_matrices=False)
        kept = sizes > 1e-6 * np.sqrt(part.size)
        basis, sizes, back = basis[:, kept], sizes[kept], back[kept]
        along = basis.T @ errors
        # Variances over that of the noise: float64[width, q].
        prior = (WIDTHS[:, None] * sizes) ** 2 * (sizes**2).sum() / max((sizes**4).sum(), 1e-300)
        kept_part = prior / (1 + prior)
        left = np.maximum((errors**2).sum() - kept_part @ along**2, 1e-300)
        logs.append(-np.log1p(prior).sum(axis=1) / 2 - free / 2 * np.log(left))
        found.append((basis, back / sizes[:, None], kept_part * along, np.sqrt(kept_part * left[:, None] / free)))
    weights = np.exp(logs - np.max(logs)) * LIKELY[:, None]
    turns = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], place)
    drawn = []
    for number, (basis, back, mean, spread) in enumerate(found):
        width = np.where(turns // len(WIDTHS) == number, turns % len(WIDTHS), 0)  # that of 0: nothing
        drawn.append((mean[width] + spread[width] * (normal @ basis)) @ back)
    own = slice(0, shares.shape[1] + 2)
    return Discrepancy(plain[own], np.hstack(drawn), (turns % len(WIDTHS) > 0)[:, None] * trend[own])


def _rows(shares: Array, said: Array) -> Array:
    """What is left to the law: float64[m, K + 2], of float64[m, K] and float64[m]."""
    return np.hstack([np.ones((len(shares), 1)), shares, said[:, None]])


def chance_of_fit(rows: Array, shares: Array, errors: Array) -> float | None:
    """How often the errors of a right law would hang on products of two shares as much as these do, or more.

    An F test of the quadratic terms of a mixture polynomial (Scheffe 1958, "Experiments with Mixtures"): data sets that
    act together, and a curve that bends otherwise than the law, leave such errors, and the noise of trainings does not.

    Args:
        rows: float64[n, p], what errors may hang on linearly: what differs between trials, and what the law predicts.
        shares: float64[n, K].
        errors: float64[n], of the losses by the law.

    Returns:
        A probability; None where too few trials are left for a test.
    """
    squares, ranks = [], []
    alone = np.hstack([np.ones((len(shares), 1)), shares, rows])
    for matrix in (alone, np.hstack([alone, _products(shares)])):
        coefficients, _, rank, _ = np.linalg.lstsq(matrix, errors, rcond=1e-10)
        squares.append(float(((errors - matrix @ coefficients) ** 2).sum()))
        ranks.append(int(rank))
    more, left = ranks[1] - ranks[0], len(shares) - ranks[1]
    if more < 1 or left < TESTED or squares[1] <= 0:
        return None
    return float(fdtrc(more, left, max((squares[0] - squares[1]) / more / (squares[1] / left), 0.0)))


def _products(shares: Array) -> Array:
    """Of two different shares each: float64[m, q]."""
    first, second = np.triu_indices(shares.shape[1], 1)
    return shares[:, first] * shares[:, second]


def _features(shares: Array) -> list[Array]:
    """By kind: float64[m, q]."""
    found = [_products(shares)]
    for values, length in zip((shares, np.sqrt(np.maximum(shares, 0.0))), LENGTHS, strict=True):
        angles = values @ np.random.default_rng(0).standard_normal((shares.shape[1], WAVES)) / length
        found.append(np.hstack([np.cos(angles), np.sin(angles)]))
    return found
