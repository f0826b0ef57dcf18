"""The log-linear law of data mixtures: the loss of a validation set over the shares, and the shares that it says are best.

Data mixing laws (Ye et al. 2024, arXiv 2403.16952): trained on shares r, the loss of validation set i is

    L_i(r) = c_i + exp(b_i + t_i . r)

With c_i given, log(L_i - c_i) is linear in r, and everything is in closed form: the posterior of (b, t, noise) under a
normal-inverse-gamma prior, the evidence, and what each trial would be predicted to be without itself. So c and the
width of the prior are a small grid, and the law is the mean over it, weighed by the evidence: nothing is iterated, and
the same trials give the same law on every machine. c far below all losses makes the law linear.

The noise is of L, so log(L - c) is weighed by (L - c)^2. That weight and the Jacobian of the logarithm cancel in the
evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.special import gammaln, logsumexp

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.sweep.space.mixture import MixtureSpace

Array = NDArray[np.float64]
BELOW = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""How far c is below the lowest loss, in spans of all losses."""
FINE = 12
"""As many c are looked at between the neighbours of the best of these."""
WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Standard deviation of t under the prior, over that of the noise of log(L - c) where L - c is one span."""
FLAT = 1e4
"""The same of b, of which nothing is known."""
COUNTED = 1e-3
"""Members of the grid with less weight than this are left out."""
FEWEST = 3
"""Trials of which a law can be made."""
LEAST = 1e-9
"""In logarithms of shares."""


class Prediction(NamedTuple):
    """What a law says of mixtures."""

    mean: Array
    """float64[m, t]."""
    low: Array
    """float64[m, t], the lower end of the interval."""
    high: Array


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One c and one width, and the posterior under them, for one validation set."""

    c: float
    weight: float
    beta: Array
    """float64[K + 1]: b, and t for shares less their mean."""
    root: Array
    """float64[K + 1, K + 1], upper: its inverse times its transpose is the covariance of beta over the noise's."""
    shape: float
    """Of the inverse gamma distribution of the noise's variance, as `rate`."""
    rate: float
    left_out: Array
    """float64[n]: what each trial would be without itself."""

    def losses(self, rows: Array, betas: Array | None = None) -> Array:
        """float64[m] of float64[m, K + 1]; with `betas`, float64[d, K + 1], float64[d, m]."""
        linear = rows @ self.beta if betas is None else betas @ rows.T
        return self.c + np.exp(np.minimum(linear, 700.0))


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of t validation sets over K shares; `fit` makes it."""

    centre: Array
    """float64[K], the mean shares of the trials."""
    members: tuple[tuple[_Member, ...], ...]
    """By validation set, those that count."""
    losses: Array
    """float64[n, t], what it was fitted to."""

    @classmethod
    def fit(cls, shares: Array, losses: Array) -> Self:
        """The law of some trials.

        Args:
            shares: float64[n, K], all shares of all mixtures of a trial side by side.
            losses: float64[n, t], of t validation sets, or of any metric of which less is better.

        Raises:
            ValueError: there are fewer than three trials, or a number is not finite.
        """
        shares, losses = np.asarray(shares, np.float64), np.asarray(losses, np.float64)
        if len(shares) < FEWEST or len(shares) != len(losses):
            raise UserError(f"a law needs {FEWEST} trials or more: there are {len(shares)}")
        if not (np.isfinite(shares).all() and np.isfinite(losses).all()):
            raise UserError("a law needs shares and losses that are finite: leave failed trials out")
        centre = shares.mean(axis=0)
        rows = np.hstack([np.ones((len(shares), 1)), shares - centre])
        members = tuple(_members(rows, column) for column in losses.T)
        return cls(centre=centre, members=members, losses=losses)

    def predict(self, shares: Array, level: float = 0.9, count: int = 400) -> Prediction:
        """What mixtures would give: float64[m, K] to mean and interval, without the noise of a single training."""
        tail = (1 - level) / 2
        low, high = np.quantile(self.draws(shares, count), (tail, 1 - tail), axis=0)
        return Prediction(self.mean(shares), low, high)

    def mean(self, shares: Array) -> Array:
        """The posterior mean, but for the width of its exponents: float64[m, t] of float64[m, K]. Convex in shares."""
        rows = self._rows(shares)
        return np.stack([sum(one.weight * one.losses(rows) for one in members) for members in self.members], axis=1)

    def draws(self, shares: Array, count: int = 400, seed: int = 0) -> Array:
        """Joint draws of the losses: float64[count, m, t] of float64[m, K].

        In a draw all mixtures have the same coefficients, so a difference of two has an interval of its own.
        """
        rows, rng = self._rows(shares), np.random.default_rng(seed)
        found = np.empty((count, len(rows), len(self.members)))
        for number, members in enumerate(self.members):
            turns = rng.choice(len(members), count, p=[one.weight for one in members])
            normal = rng.standard_normal((count, rows.shape[1]))
            gamma = rng.gamma(members[0].shape, size=count)
            for turn, one in enumerate(members):
                those = turns == turn
                if those.any():
                    spread = np.sqrt(one.rate / gamma[those])[:, None]
                    betas = one.beta + spread * solve_triangular(one.root, normal[those].T).T
                    found[those, :, number] = one.losses(rows, betas)
        return found

    def leave_one_out(self) -> Array:
        """float64[n, t]: each loss less what the law of the other trials says of it.

        c and the width keep the weights that they have with all trials.
        """
        said = [sum(one.weight * one.left_out for one in members) for members in self.members]
        return self.losses - np.stack(said, axis=1)

    def _rows(self, shares: Array) -> Array:
        shares = np.atleast_2d(np.asarray(shares, np.float64))
        return np.hstack([np.ones((len(shares), 1)), shares - self.centre])


def _members(rows: Array, losses: Array) -> tuple[_Member, ...]:
    """The grid for one validation set: rows float64[n, K + 1], losses float64[n]."""
    span = float(np.ptp(losses)) or max(abs(float(losses[0])), 1.0) * 1e-6
    lowest = float(losses.min())

    def made_of(belows: Sequence[float], widths: Sequence[float]) -> list[tuple[float, _Member]]:
        return [_member(rows, losses, lowest - below * span, width, span) for below in belows for width in widths]

    coarse = [evidence for evidence, _ in made_of(BELOW, WIDTHS)]
    turn, width = divmod(int(np.argmax(coarse)), len(WIDTHS))
    low, high = BELOW[max(turn - 1, 0)], BELOW[min(turn + 1, len(BELOW) - 1)]
    made = made_of(np.geomspace(low, high, FINE).tolist(), WIDTHS[max(width - 1, 0) : width + 2])
    logs = np.array([evidence for evidence, _ in made])
    weights = np.exp(logs - logsumexp(logs))
    kept = weights >= COUNTED * weights.max()
    weights = np.where(kept, weights, 0.0) / weights[kept].sum()
    return tuple(
        _Member(**{**one.__dict__, "weight": float(weight)})
        for (_, one), weight in zip(made, weights, strict=True)
        if weight
    )


def _member(rows: Array, losses: Array, c: float, width: float, span: float) -> tuple[float, _Member]:
    """(the logarithm of the evidence, the posterior) of one c and one width."""
    count, size = rows.shape
    scale = (losses - c) / span
    target = np.log(losses - c)
    prior = np.array([FLAT, *[width] * (size - 1)])
    # Rows of the prior below those of the trials: least squares gives the posterior, and its error the rate.
    design = np.vstack([rows * scale[:, None], np.diag(1 / prior)])
    wanted = np.concatenate([target * scale, np.zeros(size)])
    q, root = np.linalg.qr(design)
    beta = solve_triangular(root, q.T @ wanted)
    rest = wanted - design @ beta
    shape, rate = 1.0 + count / 2, 1e-12 + float(rest @ rest) / 2
    evidence = float(-np.log(np.abs(np.diag(root))).sum() - np.log(prior).sum() - shape * np.log(rate) + gammaln(shape))
    leverage = np.minimum((q[:count] ** 2).sum(axis=1), 1 - 1e-6)
    left_out = target - rest[:count] / (1 - leverage) / scale
    member = _Member(
        c=c, weight=1.0, beta=beta, root=root, shape=shape, rate=rate, left_out=c + np.exp(np.minimum(left_out, 700.0))
    )  # fmt: skip
    return evidence, member


def propose(
    law: Law,
    weights: Array,
    spaces: Sequence[MixtureSpace],
    kl: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Array:
    """The shares, float64[K], with the least of a law's weighted losses: a convex problem, solved exactly.

    Args:
        law: over the shares of `spaces`, side by side.
        weights: float64[t], 0 or more, of the losses.
        spaces: the mixtures; their floors and caps hold.
        kl: how much a nat of KL(shares || natural shares), summed over the spaces, counts beside the losses.
        rng: for a draw of the law instead of its mean (Thompson sampling), which tries what is not known yet.

    Returns:
        Shares before rounding; `MixtureSpace` rounds them.
    """
    ends = np.cumsum([len(space.names) for space in spaces])
    parts = [slice(end - len(space.names), end) for space, end in zip(spaces, ends.tolist(), strict=True)]
    natural = np.concatenate([space.natural for space in spaces])
    terms = _terms(law, np.asarray(weights, np.float64), rng)
    constants, slopes = np.array([b for b, _ in terms]), np.stack([t for _, t in terms])
    scale = float(np.exp(constants + slopes @ (natural - law.centre)).sum()) or 1.0

    def value(shares: Array) -> tuple[float, Array]:
        each = np.exp(np.minimum(constants + slopes @ (shares - law.centre), 700.0))
        ratio = np.log(np.maximum(shares, LEAST) / np.maximum(natural, LEAST))
        gradient = each @ slopes + kl * (ratio + 1)
        return float(each.sum() + kl * (shares * ratio).sum()) / scale, gradient / scale

    sums = [np.bincount(range(part.start, part.stop), minlength=len(natural)).astype(float) for part in parts]
    bounds = [(low, high) for space in spaces for low, high in zip(space.floors, space.caps, strict=True)]
    found = minimize(
        value, natural, jac=True, method="SLSQP", bounds=bounds, options={"maxiter": 300, "ftol": 1e-12},
        constraints=[{"type": "eq", "fun": lambda r, row=row: row @ r - 1, "jac": lambda r, row=row: row} for row in sums],
    )  # fmt: skip
    best = np.clip(found.x, [low for low, _ in bounds], [high for _, high in bounds])
    return best if value(best)[0] <= value(natural)[0] else natural


def _terms(law: Law, weights: Array, rng: np.random.Generator | None) -> list[tuple[float, Array]]:
    """The weighted losses as a sum of exponentials exp(b + t . (r - centre)), their constants left out."""
    terms: list[tuple[float, Array]] = []
    for weight, members in zip(weights.tolist(), law.members, strict=True):
        if weight <= 0:
            continue
        if rng is None:
            terms += [(one.beta[0] + np.log(weight * one.weight), one.beta[1:]) for one in members]
            continue
        one = members[rng.choice(len(members), p=[each.weight for each in members])]
        spread = np.sqrt(one.rate / rng.gamma(one.shape))
        beta = one.beta + spread * solve_triangular(one.root, rng.standard_normal(len(one.beta)))
        terms.append((beta[0] + np.log(weight), beta[1:]))
    return terms
