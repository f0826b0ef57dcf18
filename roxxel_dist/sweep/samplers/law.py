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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.samplers.discrepancy import Discrepancy, discrepancy
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
USUAL = 10.0
"""The one with which the weights of the trials are found."""
FLAT = 1e4
"""The same of b, of which nothing is known."""
PROPOSING = 0.01
"""Members with less weight are left out of the proposal from the mean: each costs time."""
COUNTED = 1e-3
"""Members of the grid with less weight than this are left out."""
FEWEST = 3
"""Trials of which a law can be made."""
REWEIGHED = 2
"""Passes that find the weights of the trials, before those of the widths."""
LEAST = 1e-9
"""In logarithms of shares."""
LARGE = 700.0
"""The largest exponent."""
LIMITS = (-14.0, 14.0)
"""Of log E over the span of all losses: a trial that is far off in a pass would decide the next one alone."""
KNOWING = 64
"""Trials whose losses tell a law."""
STARTS = 6
"""At random, where the problem may not be convex."""


class _Curves(NamedTuple):
    """d curves of one validation set: c + exp(beta . (1, f(shares)))."""

    c: Array
    """float64[d]."""
    bend: Array
    """float64[d], e; infinite: shares as they are."""
    beta: Array
    """float64[d, K + 1]."""

    def losses(self, shares: Array) -> Array:
        """float64[d, m] of float64[m, K]."""
        found = np.empty((len(self.c), len(shares)))
        for bend in np.unique(self.bend):
            those = self.bend == bend
            found[those] = self.beta[those, :1] + self.beta[those, 1:] @ bent(shares, bend).T
        return self.c[:, None] + np.exp(np.minimum(found, LARGE))


class _Members(NamedTuple):
    """The members of the grid that count, m of them in the order of e, c and width, for one validation set."""

    curves: _Curves
    """At the means of their posteriors."""
    weight: Array
    """float64[m]."""
    moves: Array
    """float64[m, n + K + p + 1, K + 1]: the noise of trials and prior times it is what they move beta by, over the
    deviation of the noise."""
    rate: Array
    """float64[m], of the inverse gamma distribution of the noise's variance: at least as large as what is left out was
    off by."""
    fitted: Array
    """float64[m, n]: what each trial is said to be."""
    left_out: Array
    """float64[m, n]: what it would be without itself."""

    def losses(self, shares: Array) -> Array:
        """What they say together: float64[m] of float64[m, K]."""
        return self.weight @ self.curves.losses(shares)


_Drawn = tuple[list[_Curves], list[Discrepancy], list[tuple[Array, Array]]]


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of t validation sets over K shares; `fit` makes it."""

    sets: tuple[_Members, ...]
    shares: Array
    """float64[n, K], of the trials that it was fitted to."""
    others: Array
    """float64[n, p]."""
    trials: Array
    """float64[n, t], their losses."""

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
        sets = tuple(_members(shares, others, column) for column in losses.T)
        return cls(sets=sets, shares=shares, others=others, trials=losses)

    def mean(self, shares: Array) -> Array:
        """What the law is at the mean of its coefficients: float64[m, t] of float64[m, K]."""
        shares = np.atleast_2d(np.asarray(shares, np.float64))
        return np.stack([one.losses(shares) for one in self.sets], axis=1)

    def draws(self, shares: Array, count: int = 400, seed: int = 0) -> Array:
        """Joint draws of the losses, with what they may be beside the law: float64[count, m, t] of float64[m, K].

        In a draw all mixtures have the same coefficients, so a difference of two has an interval of its own.
        """
        shares = np.atleast_2d(np.asarray(shares, np.float64))
        if (count, seed) not in self._drawn:  # a report draws for many mixtures
            self._drawn[count, seed] = self._draw(np.random.default_rng(seed), count)
        found = []
        for members, curves, beside, (left, more) in zip(self.sets, *self._drawn[count, seed], strict=True):
            values = _values(members, curves, beside, shares)
            found.append(values + more @ (left.T @ values))
        return np.stack(found, axis=2)

    @cached_property
    def _drawn(self) -> dict[tuple[int, int], _Drawn]:
        """What `draws` draws, by count and seed."""
        return {}

    def _draw(self, rng: np.random.Generator, count: int) -> _Drawn:
        """By validation set: draws of the law, draws of what it leaves, and what turns them, twice float64[count, r].

        One seed of a training moves all of its losses, so the sets err together. Draws of each set by itself, with what
        they differ in at the trials as D = U S V', are turned to Z V S V', which has their covariance by its symmetric
        root: with Z as alike as what the law leaves of the sets, no draws with these covariances are more alike.
        """
        curves, place, said = self.coefficients(rng, count), rng.random(count), self.fitted()
        some = self.shares[:: -(-len(self.shares) // KNOWING)]
        normal, alike = (rng.standard_normal((count, n, len(self.sets))) @ self.mixing for n in (len(said), len(some)))
        beside, turns = [], []
        for number, (members, each) in enumerate(zip(self.sets, curves, strict=True)):
            law, losses = said[:, number], self.trials[:, number]
            beside.append(discrepancy(self.shares, self.others, law, losses, place, normal[..., number]))
            values = _values(members, each, beside[-1], some)
            left, sizes, right = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
            kept = sizes > (1e-6 * sizes[0] if len(self.sets) > 1 else np.inf)  # of one set as they are
            turned = alike[..., number] @ right[kept].T / np.sqrt(count)
            turns.append((left[:, kept], turned - left[:, kept]))
        return curves, beside, turns

    def coefficients(self, rng: np.random.Generator, count: int) -> list[_Curves]:
        """Draws of the law, `count` of each validation set: the noise of a trial is as alike as what it leaves."""
        # c and e were found by the same trials, and `_shape` counts two of the prior: n - 2 degrees of freedom stay.
        place, gamma = rng.random(count), rng.gamma(_shape(len(self.trials) - 4), size=count)
        noise = rng.standard_normal((count, self.sets[0].moves.shape[1], len(self.sets))) @ self.mixing
        found = []
        for number, (curves, weight, moves, rate, _, _) in enumerate(self.sets):
            turns = np.searchsorted(np.cumsum(weight)[:-1], place)
            beta = curves.beta[turns]
            for turn in np.unique(turns):
                those = turns == turn
                rest = noise[those, :, number] @ moves[turn]
                beta[those] += np.sqrt(rate[turn] / gamma[those])[:, None] * rest
            found.append(_Curves(curves.c[turns], curves.bend[turns], beta))
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

    def fitted(self) -> Array:
        """float64[n, t]: what it says of the trials, with what else differs between them."""
        return np.stack([one.weight @ one.fitted for one in self.sets], axis=1)

    def leave_one_out(self) -> Array:
        """float64[n, t]: each loss less what the law of the other trials says of it.

        The members of the grid keep the weights that they have with all trials.
        """
        return self.trials - np.stack([one.weight @ one.left_out for one in self.sets], axis=1)


def _values(members: _Members, curves: _Curves, beside: Discrepancy, shares: Array) -> Array:
    """float64[d, m] of float64[m, K]: what draws of one validation set are, each by itself."""
    return curves.losses(shares) + beside.losses(shares, members.losses(shares))


def bent(shares: Array, bend: float) -> Array:
    """f of shares, between 0 and 1 as they are."""
    return shares if np.isinf(bend) else np.log1p(shares / bend) / np.log1p(1 / bend)


def _slope(shares: Array, bend: float) -> Array:
    """The derivative of `bent`."""
    return np.ones_like(shares) if np.isinf(bend) else 1 / ((bend + shares) * np.log1p(1 / bend))


def _members(shares: Array, others: Array, losses: Array) -> _Members:
    """The grid for one validation set: shares float64[n, K], what else differs float64[n, p], losses float64[n]."""
    span = float(np.ptp(losses)) or max(abs(float(losses[0])), 1.0) * 1e-6
    features = [np.hstack([bent(shares, bend), others]) for bend in BENDS]

    def grids(belows: Sequence[float], widths: Sequence[float]) -> tuple[list[_Grid], Array]:
        """By e, and the logarithms of the evidence, float64[e, c, w]."""
        made = [_grid(rows, losses, losses.min() - np.array(belows) * span, widths, span) for rows in features]
        return made, np.stack([one.evidence for one in made])

    turn = int(grids(BELOW, WIDTHS)[1].max(axis=(0, 2)).argmax())
    before, near, after = BELOW[: max(turn - 1, 0)], BELOW[max(turn - 1, 0) : turn + 2], BELOW[turn + 2 :]
    belows = np.array([*before, *np.geomspace(near[0], near[-1], FINE), *after])
    found, logs = grids(belows.tolist(), WIDTHS)
    # Each c counts for its part of the axis of log c, on which the prior is even.
    logs = logs + np.log(np.gradient(np.log(belows)))[:, None]
    weights = np.exp(logs - logs.max())
    weights[weights < COUNTED] = 0.0
    weights /= weights.sum()
    kept = [weight > 0 for weight in weights]
    beta, moves = [], []
    for one, those, rows in zip(found, kept, features, strict=True):
        each = np.concatenate([one.beta[those][:, None], one.moves(those)], axis=1)
        each[..., 0] -= each[..., 1:] @ rows.mean(axis=0)  # f as it is, and not less its mean
        beta.append(each[:, 0, : shares.shape[1] + 1])
        moves.append(each[:, 1:, : shares.shape[1] + 1])

    def of_kept(name: str) -> Array:
        return np.concatenate([getattr(one, name)[those] for one, those in zip(found, kept, strict=True)])

    c = np.broadcast_to(losses.min() - belows[:, None] * span, weights.shape)[weights > 0]
    bends = np.broadcast_to(np.array(BENDS)[:, None, None], weights.shape)[weights > 0]
    return _Members(
        _Curves(c, bends, np.concatenate(beta)),
        weights[weights > 0],
        np.concatenate(moves),
        of_kept("rate"),
        of_kept("fitted"),
        of_kept("left_out"),
    )


class _Grid(NamedTuple):
    """The members with one e, by c and width of the prior; q = K + p + 1 coefficients."""

    beta: Array
    """float64[c, w, q]: b, and t for f less its mean over the trials, and the same for what else differs."""
    root: Array
    """float64[c, w, q, q], upper: its inverse times its transpose is the covariance of beta over the noise's."""
    basis: Array
    """float64[c, w, n + q, q]: the noise of trials and prior times it is what `root` divides."""
    rate: Array
    """float64[c, w]."""
    fitted: Array
    """float64[c, w, n]."""
    left_out: Array
    """float64[c, w, n]."""
    evidence: Array
    """float64[c, w], its logarithm."""

    def moves(self, those: NDArray[np.bool_]) -> Array:
        """Of some members, bool[c, w]: what noise moves beta by, float64[m, n + q, q]."""
        moves = np.linalg.solve(self.root[those], np.swapaxes(self.basis[those], 1, 2))
        return np.asarray(np.swapaxes(moves, 1, 2), np.float64)


def _shape(count: int) -> float:
    """Of the inverse gamma distribution of the noise's variance, after so many trials."""
    return 1.0 + count / 2


def _grid(features: Array, losses: Array, c: Array, widths: Sequence[float], span: float) -> _Grid:
    """Of features float64[n, K + p], losses float64[n] and c float64[c]."""
    rows = np.hstack([np.ones((len(features), 1)), features - features.mean(axis=0)])
    (count, size), above = rows.shape, losses - c[:, None]

    def solve(fitted: Array, widths: Sequence[float]) -> _Grid:
        """Least squares at `fitted`, E as float64[c, n].

        Rows of the prior lie below those of the trials: so it gives the posterior, and its error the rate.
        """
        scale, target = fitted / span, np.log(fitted) + (above - fitted) / fitted
        prior = np.array([[FLAT, *[width] * (size - 1)] for width in widths])
        shape = len(c), len(widths)
        design, wanted = np.zeros((*shape, count + size, size)), np.zeros((*shape, count + size))
        design[:, :, :count] = (rows * scale[..., None])[:, None]
        design[:, :, count:] = np.eye(size) / prior[:, None]
        wanted[:, :, :count] = (target * scale)[:, None]
        basis, root = np.linalg.qr(design)
        beta = np.asarray(np.linalg.solve(root, np.swapaxes(basis, -1, -2) @ wanted[..., None]), np.float64)
        rest = wanted - (design @ beta)[..., 0]
        rate = 1e-12 + (rest**2).sum(axis=-1) / 2
        spread = np.log(np.abs(np.diagonal(root, axis1=-2, axis2=-1))).sum(axis=-1) + np.log(prior).sum(axis=-1)
        leverage = np.minimum((basis[:, :, :count] ** 2).sum(axis=-1), 1 - 1e-6)
        left_out = target[:, None] - rest[:, :, :count] / (1 - leverage) / scale[:, None]
        left_out = c[:, None, None] + np.exp(np.minimum(left_out, LARGE))
        # The variance of what is left out is noise / (1 - leverage), and rate / (count / 2) is the noise.
        off = (rest[:, :, :count] ** 2 / (1 - leverage)).mean(axis=-1) * count / 2
        evidence = np.asarray(-spread - _shape(count) * np.log(rate), np.float64)
        said = c[:, None, None] + np.exp(np.minimum(beta[..., 0] @ rows.T, LARGE))
        return _Grid(beta[..., 0], root, basis, np.maximum(rate, off), said, left_out, evidence)

    fitted = above
    for _ in range(REWEIGHED):
        beta = solve(fitted, [USUAL]).beta[:, 0]
        fitted = span * np.exp(np.clip(beta @ rows.T - np.log(span), *LIMITS))
    return solve(fitted, widths)


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
    parts = _parts(law, np.asarray(weights, np.float64), rng)
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


def _parts(law: Law, weights: Array, rng: np.random.Generator | None) -> list[_Part]:
    """The weighted losses, their constants left out, of the mean of a law or of a draw."""
    drawn = None if rng is None else law.coefficients(rng, 1)
    found: list[tuple[Array, Array]] = []
    for number, (weight, one) in enumerate(zip(weights.tolist(), law.sets, strict=True)):
        curves, counts = (one.curves, one.weight) if drawn is None else (drawn[number], np.ones(1))
        those = (counts >= PROPOSING) & (weight > 0)
        beta = curves.beta[those]
        beta[:, 0] += np.log(weight * counts[those])
        found.append((curves.bend[those], beta))
    bends, betas = (np.concatenate(one) for one in zip(*found, strict=True))
    each = {float(bend): betas[bends == bend] for bend in np.unique(bends)}
    return [_Part(bend, beta[:, 0], beta[:, 1:]) for bend, beta in each.items()]
