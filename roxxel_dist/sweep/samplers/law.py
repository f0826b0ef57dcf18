"""The log-linear law of data mixtures: the loss of a validation set over the shares, and the best shares by it.

Data mixing laws (Ye et al. 2024, arXiv 2403.16952): trained on shares r, the loss of validation set i is

    L_i(r) = c_i + exp(b_i + t_i . f(r)),    f(r) = r

That holds near natural shares. Over the whole simplex the first hundredth of a data set teaches most, so f may bend:
f(r) = log(1 + r / e) / log(1 + 1 / e), which is r itself for a large e, and makes the law a power law for a small one.

With c_i and e given, log(L_i - c_i) is linear, and everything is in closed form: the posterior of (b, t, noise) under a
normal-inverse-gamma prior, the evidence, and what each trial would be predicted to be without itself. So c, e and the
width of the prior are a small grid, and the law is the mean over it, weighed by the evidence: nothing is iterated to
an end, and the same trials give the same law on every machine. c far below all losses makes the law linear in f.

The noise is of L, and not of its logarithm. So the exponential is made linear at the fit E = exp(b + t . f), where
L - c is E (1 + b + t . f - log E): the rows are weighed by E^2, and the target is log E + (L - c - E) / E. A few passes
of Gauss and Newton lead from E = L - c to the fit. With the observed L - c as the weight, a loss that is high by chance
would count for more than one that is low, and more trials would not help.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.special import fdtrc

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.mixture import MixtureSpace

Array = NDArray[np.float64]
BELOW = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""How far c is below the lowest loss, in spans of all losses."""
FINE = 12
"""As many c are looked at between the neighbours of the best of these."""
WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Standard deviation of t under the prior, over that of the noise of log(L - c) where L - c is one span."""
BENDS = (0.01, 0.03, 0.1, 0.3, np.inf)
"""e, from a power law to the log-linear law as it was published."""
FLAT = 1e4
"""The same of b, of which nothing is known."""
PROPOSING = 0.01
"""Members with less weight are left out of the proposal from the mean: each costs time."""
COUNTED = 1e-3
"""Members of the grid with less weight than this are left out."""
FEWEST = 3
"""Trials of which a law can be made."""
TESTED = 10
"""Trials beyond the coefficients of a test of the law: it has one for each product of two shares, and more."""
REWEIGHED = 2
"""Passes that find the weights of the trials, before those of the widths."""
LEAST = 1e-9
"""In logarithms of shares."""
LARGE = 700.0
"""The largest exponent."""
LIMITS = (-14.0, 14.0)
"""Of log E over the span of all losses: a trial that is far off in a pass would decide the next one alone."""
STARTS = 6
"""At random, where the problem may not be convex."""


class Prediction(NamedTuple):
    """What a law says of mixtures."""

    mean: Array
    """float64[m, t]."""
    low: Array
    """float64[m, t], the lower end of the interval."""
    high: Array


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One c, one e and one width, and the posterior under them, for one validation set."""

    c: float
    bend: float
    """e; infinite: shares as they are."""
    weight: float
    centre: Array
    """float64[K + p], the mean of f, and of what else differs, over the trials."""
    beta: Array
    """float64[K + p + 1]: b, and t for f less its mean, and the same for what else differs."""
    root: Array
    """float64[K + p + 1, K + p + 1], upper: its inverse times its transpose is the covariance of beta over the
    noise's."""
    basis: Array
    """float64[n + K + p + 1, K + p + 1]: the noise of trials and prior times it is what `root` divides."""
    rate: float
    """Of the inverse gamma distribution of the noise's variance: at least as large as what is left out was off by."""
    left_out: Array
    """float64[n]: what each trial would be without itself."""

    def rows(self, shares: Array) -> Array:
        """float64[m, K + p + 1] of float64[m, K]."""
        alike = np.zeros((len(shares), len(self.centre) - shares.shape[1]))
        return np.hstack([np.ones((len(shares), 1)), np.hstack([bent(shares, self.bend), alike]) - self.centre])

    def losses(self, shares: Array, betas: Array | None = None) -> Array:
        """float64[m] of float64[m, K]; with `betas`, float64[d, K + p + 1], float64[d, m]."""
        linear = self.rows(shares) @ self.beta if betas is None else betas @ self.rows(shares).T
        return self.c + np.exp(np.minimum(linear, LARGE))


Coefficients = list[list[tuple[_Member, NDArray[np.intp], Array]]]
"""Joint draws: by validation set the members that are drawn, the numbers of their draws, and their betas."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of t validation sets over K shares; `fit` makes it."""

    members: tuple[tuple[_Member, ...], ...]
    """By validation set, those that count, in the order of e, c and width."""
    trials: Array
    """float64[n, t], the losses that it was fitted to."""

    @classmethod
    def fit(cls, shares: Array, losses: Array, others: Array | None = None) -> Self:
        """The law of some trials.

        Args:
            shares: float64[n, K], all shares of all mixtures of a trial side by side.
            losses: float64[n, t], of t validation sets, or of any metric of which less is better.
            others: float64[n, p], what else differs between the trials, each about 1 wide and linear in the exponent;
                the law is that of the shares where all of it is 0. None: nothing.

        Raises:
            ValueError: there are fewer than three trials, or a number is not finite.
        """
        shares, losses = np.asarray(shares, np.float64), np.asarray(losses, np.float64)
        others = np.zeros((len(shares), 0)) if others is None else np.asarray(others, np.float64)
        if len(shares) < FEWEST or len(shares) != len(losses):
            raise UserError(f"a law needs {FEWEST} trials or more: there are {len(shares)}")
        if not (np.isfinite(shares).all() and np.isfinite(losses).all()):
            raise UserError("a law needs shares and losses that are finite: leave failed trials out")
        return cls(members=tuple(_members(shares, others, column) for column in losses.T), trials=losses)

    def predict(self, shares: Array, level: float = 0.9, count: int = 400) -> Prediction:
        """What mixtures would give: float64[m, K] to mean and interval, without the noise of a single training."""
        tail = (1 - level) / 2
        low, high = np.quantile(self.draws(shares, count), (tail, 1 - tail), axis=0)
        return Prediction(self.mean(shares), low, high)

    def mean(self, shares: Array) -> Array:
        """What the law is at the mean of its coefficients: float64[m, t] of float64[m, K]."""
        shares = np.atleast_2d(np.asarray(shares, np.float64))
        return np.stack([sum(one.weight * one.losses(shares) for one in members) for members in self.members], axis=1)

    def draws(self, shares: Array, count: int = 400, seed: int = 0) -> Array:
        """Joint draws of the losses: float64[count, m, t] of float64[m, K].

        In a draw all mixtures have the same coefficients, so a difference of two has an interval of its own.
        """
        shares = np.atleast_2d(np.asarray(shares, np.float64))
        found = np.empty((count, len(shares), len(self.members)))
        if (count, seed) not in self._drawn:  # a report draws for many mixtures, and most of the time is here
            self._drawn[count, seed] = self.coefficients(np.random.default_rng(seed), count)
        for number, drawn in enumerate(self._drawn[count, seed]):
            for member, those, betas in drawn:
                found[those, :, number] = member.losses(shares, betas)
        return found

    @cached_property
    def _drawn(self) -> dict[tuple[int, int], Coefficients]:
        """What `coefficients` gives, by count and seed."""
        return {}

    def coefficients(self, rng: np.random.Generator, count: int) -> Coefficients:
        """Joint draws.

        One seed of a training moves all of its losses: the noise of a trial is as alike as what the law leaves of the
        sets, and coefficients are drawn by it.
        And where the law of one set bends too much, so do others: a draw has the same place in the order of members.
        """
        # c and e were found by the same trials, and `_shape` counts two of the prior: n - 2 degrees of freedom stay.
        place, gamma = rng.random(count), rng.gamma(_shape(len(self.trials) - 4), size=count)
        trials, size = len(self.trials), len(self.members[0][0].beta)
        noise = rng.standard_normal((count, trials + size, len(self.members))) @ self.mixing
        found = []
        for number, members in enumerate(self.members):
            turns = np.searchsorted(np.cumsum([one.weight for one in members])[:-1], place)
            drawn = []
            for turn in np.unique(turns).tolist():
                one, those = members[turn], np.flatnonzero(turns == turn)
                spread = np.sqrt(one.rate / gamma[those])[:, None]
                normal = noise[those, :, number] @ one.basis
                drawn.append((one, those, one.beta + spread * solve_triangular(one.root, normal.T).T))
            found.append(drawn)
        return found

    @cached_property
    def mixing(self) -> Array:
        """float64[t, t]: independent normal numbers times it are correlated as the sets are in what the law leaves."""
        rest = self.leave_one_out()
        size = np.sqrt((rest**2).sum(axis=0))
        rest = rest / np.where(size > 0, size, 1.0)
        correlation = rest.T @ rest
        np.fill_diagonal(correlation, 1.0)
        values, vectors = np.linalg.eigh(correlation)
        return (np.sqrt(np.maximum(values, 0.0)) * vectors).T

    def leave_one_out(self) -> Array:
        """float64[n, t]: each loss less what the law of the other trials says of it.

        The members of the grid keep the weights that they have with all trials.
        """
        said = [sum(one.weight * one.left_out for one in members) for members in self.members]
        return self.trials - np.stack(said, axis=1)


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
    number, count = shares.shape
    products = np.stack([shares[:, i] * shares[:, j] for i in range(count) for j in range(i)] or [np.zeros(number)], 1)
    squares, ranks = [], []
    for columns in ([np.ones((number, 1)), shares, rows], [np.ones((number, 1)), shares, rows, products]):
        matrix = np.hstack(columns)
        coefficients, _, rank, _ = np.linalg.lstsq(matrix, errors, rcond=1e-10)
        squares.append(float(((errors - matrix @ coefficients) ** 2).sum()))
        ranks.append(int(rank))
    more, left = ranks[1] - ranks[0], number - ranks[1]
    if more < 1 or left < TESTED or squares[1] <= 0:
        return None
    return float(fdtrc(more, left, max((squares[0] - squares[1]) / more / (squares[1] / left), 0.0)))


def bent(shares: Array, bend: float) -> Array:
    """f of shares, between 0 and 1 as they are."""
    return shares if np.isinf(bend) else np.log1p(shares / bend) / np.log1p(1 / bend)


def _slope(shares: Array, bend: float) -> Array:
    """The derivative of `bent`."""
    return np.ones_like(shares) if np.isinf(bend) else 1 / ((bend + shares) * np.log1p(1 / bend))


def _members(shares: Array, others: Array, losses: Array) -> tuple[_Member, ...]:
    """The grid for one validation set: shares float64[n, K], what else differs float64[n, p], losses float64[n]."""
    span = float(np.ptp(losses)) or max(abs(float(losses[0])), 1.0) * 1e-6

    def made_of(belows: Sequence[float], widths: Sequence[float], bends: Sequence[float]) -> list[_Scored]:
        features = [(bend, np.hstack([bent(shares, bend), others])) for bend in bends]
        return [one for bend, rows in features for one in _scored(rows, losses, bend, belows, widths, span)]

    coarse = made_of(BELOW, WIDTHS, BENDS)
    turn = BELOW.index(max(coarse, key=lambda one: one.evidence).below)
    near = BELOW[max(turn - 1, 0) : turn + 2]
    belows = np.geomspace(near[0], near[-1], FINE).tolist()
    rest = [one for one in coarse if one.below not in near]
    made = sorted(rest + made_of(belows, WIDTHS, BENDS), key=lambda one: (one.member.bend, one.below, one.width))
    # Each c counts for its part of the axis of log c, on which the prior is even.
    axis = sorted({one.below for one in made})
    parts = dict(zip(axis, np.log(np.gradient(np.log(axis))).tolist(), strict=True))
    logs = np.array([one.evidence + parts[one.below] for one in made])
    weights = np.exp(logs - logs.max())
    weights[weights < COUNTED] = 0.0
    weights /= weights.sum()
    return tuple(replace(one.member, weight=float(weight)) for one, weight in zip(made, weights, strict=True) if weight)


class _Scored(NamedTuple):
    """A member, its place on the grid, and the logarithm of its evidence."""

    evidence: float
    below: float
    width: float
    member: _Member


def _shape(count: int) -> float:
    """Of the inverse gamma distribution of the noise's variance, after so many trials."""
    return 1.0 + count / 2


def _scored(
    features: Array, losses: Array, bend: float, belows: Sequence[float], widths: Sequence[float], span: float
) -> Iterator[_Scored]:
    """The members with one e, of features float64[n, K + p]."""
    centre = features.mean(axis=0)
    rows = np.hstack([np.ones((len(features), 1)), features - centre])
    count, size = rows.shape
    c = losses.min() - np.array(belows)[:, None] * span  # float64[c, 1]
    above = losses - c

    def solve(fitted: Array, widths: Sequence[float]) -> tuple[Array, ...]:
        """Least squares at `fitted`, E as float64[c, n], for each c and width: float64[c, w, ...].

        Rows of the prior lie below those of the trials: so it gives the posterior, and its error the rate.
        """
        scale, target = fitted / span, np.log(fitted) + (above - fitted) / fitted
        prior = np.array([[FLAT, *[width] * (size - 1)] for width in widths])
        shape = len(belows), len(widths)
        design, wanted = np.zeros((*shape, count + size, size)), np.zeros((*shape, count + size))
        design[:, :, :count] = (rows * scale[..., None])[:, None]
        design[:, :, count:] = np.eye(size) / prior[:, None]
        wanted[:, :, :count] = (target * scale)[:, None]
        q, root = np.linalg.qr(design)
        beta = np.asarray(np.linalg.solve(root, np.swapaxes(q, -1, -2) @ wanted[..., None]), np.float64)
        rest = wanted - (design @ beta)[..., 0]
        rate = 1e-12 + (rest**2).sum(axis=-1) / 2
        spread = np.log(np.abs(np.diagonal(root, axis1=-2, axis2=-1))).sum(axis=-1) + np.log(prior).sum(axis=-1)
        leverage = np.minimum((q[:, :, :count] ** 2).sum(axis=-1), 1 - 1e-6)
        left_out = target[:, None] - rest[:, :, :count] / (1 - leverage) / scale[:, None]
        left_out = c[:, None] + np.exp(np.minimum(left_out, LARGE))
        # The variance of what is left out is noise / (1 - leverage), and rate / (count / 2) is the noise.
        off = (rest[:, :, :count] ** 2 / (1 - leverage)).mean(axis=-1) * count / 2
        evidence = np.asarray(-spread - _shape(count) * np.log(rate), np.float64)
        return beta[..., 0], root, q, np.maximum(rate, off), left_out, evidence

    fitted = above
    for _ in range(REWEIGHED):
        beta = solve(fitted, [WIDTHS[len(WIDTHS) // 2]])[0][:, 0]
        fitted = span * np.exp(np.clip(beta @ rows.T - np.log(span), *LIMITS))
    betas, roots, bases, rates, left_out, evidence = solve(fitted, widths)
    for i, below in enumerate(belows):
        for j, width in enumerate(widths):
            yield _Scored(
                float(evidence[i, j]),
                below,
                width,
                _Member(
                    c=float(c[i, 0]), bend=bend, weight=1.0, centre=centre, beta=betas[i, j], root=roots[i, j],
                    basis=bases[i, j], rate=float(rates[i, j]), left_out=left_out[i, j],
                ),
            )  # fmt: skip


def propose(
    law: Law,
    weights: Array,
    spaces: Sequence[MixtureSpace],
    kl: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Array:
    """The shares, float64[K], with the least of a law's weighted losses.

    Where f does not bend the problem is convex, and its solution the only one. Where it does, data sets that harm make
    it less than convex: then the best of several starts counts.

    Args:
        law: over the shares of `spaces`, side by side.
        weights: float64[t], 0 or more, of the losses.
        spaces: the mixtures; their floors and caps hold.
        kl: how much a nat of KL(shares || natural shares), summed over the spaces, counts beside the losses.
        rng: for a draw of the law instead of its mean (Thompson sampling), which tries what is not known yet.

    Returns:
        Shares before rounding; `MixtureSpace` rounds them.
    """
    natural = np.concatenate([space.natural for space in spaces])
    low, high = (np.concatenate([getattr(space, name) for space in spaces]) for name in ("floors", "caps"))
    parts = _parts(law, len(natural), np.asarray(weights, np.float64), rng)
    scale = sum(float(part.exponentials(natural).sum()) for part in parts) or 1.0

    def value(shares: Array) -> tuple[float, Array]:
        ratio = np.log(np.maximum(shares, LEAST) / np.maximum(natural, LEAST))
        total, gradient = kl * float((shares * ratio).sum()), kl * (ratio + 1)
        for part in parts:
            each = part.exponentials(shares)
            total, gradient = total + float(each.sum()), gradient + (each @ part.slopes) * _slope(shares, part.bend)
        return total / scale, gradient / scale

    ends = np.cumsum([len(space.names) for space in spaces]).tolist()
    sums = [np.array([end - len(space.names) <= i < end for i in range(ends[-1])], float)
            for space, end in zip(spaces, ends, strict=True)]  # fmt: skip
    equal = [{"type": "eq", "fun": lambda r, row=row: row @ r - 1, "jac": lambda r, row=row: row} for row in sums]
    starts = [natural]
    if any(not np.isinf(part.bend) and (part.slopes > 0).any() for part in parts):
        at_random = np.random.default_rng(0)
        starts += [np.concatenate([space.uniform for space in spaces])]
        starts += [np.concatenate([space.sample(at_random) for space in spaces]) for _ in range(STARTS)]
    best = natural
    for start in starts:
        found = minimize(
            value, start, jac=True, method="SLSQP", bounds=list(zip(low, high, strict=True)), constraints=equal,
            options={"maxiter": 300, "ftol": 1e-12},
        )  # fmt: skip
        shares = np.clip(found.x, low, high)
        kept = all(abs(row @ shares - 1) < 1e-6 for row in sums)
        best = shares if kept and value(shares)[0] < value(best)[0] else best
    return best


class _Part(NamedTuple):
    """A part of the weighted losses: the sum of n exponentials with one e."""

    bend: float
    constants: Array
    """float64[n]."""
    slopes: Array
    """float64[n, K]."""

    def exponentials(self, shares: Array) -> Array:
        """float64[n] of float64[K]."""
        return np.exp(np.minimum(self.constants + self.slopes @ bent(shares, self.bend), LARGE))


def _parts(law: Law, size: int, weights: Array, rng: np.random.Generator | None) -> list[_Part]:
    """The weighted losses, their constants left out, over K = `size` shares, of the mean of a law or of a draw."""
    found: dict[float, list[tuple[float, Array]]] = {}
    drawn = None if rng is None else law.coefficients(rng, 1)
    for number, (weight, members) in enumerate(zip(weights.tolist(), law.members, strict=True)):
        if weight <= 0:
            continue
        if drawn is None:
            counted = [(one, one.beta, weight * one.weight) for one in members if one.weight >= PROPOSING]
        else:
            counted = [(one, betas[0], weight) for one, _, betas in drawn[number]]
        for one, beta, counts in counted:
            constant = float(beta[0] + np.log(counts) - beta[1:] @ one.centre)
            found.setdefault(one.bend, []).append((constant, beta[1 : 1 + size]))
    return [
        _Part(bend, np.array([constant for constant, _ in those]), np.stack([slopes for _, slopes in those]))
        for bend, those in found.items()
    ]
