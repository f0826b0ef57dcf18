"""A Gaussian process for few, noisy and costly values: what `bayes` believes of the points that it has not seen.

A Matern-5/2 kernel with a length scale a dimension. The scales have a log-normal prior whose centre grows with the root of
the number of dimensions, so that a space of many dimensions does not look like noise (Hvarfner, Hellsten, Nardi 2024);
signal and noise are learned too. All three are found together, as the maximum of their posterior.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

ROOT5 = np.sqrt(5.0)
JITTER = 1e-6
"""Added to the diagonal: two equal points would make the matrix singular."""
SCALES = (np.log(0.05), np.log(100.0))
SIGNAL = (-3.0, 3.0)
NOISE = (np.log(1e-5), 0.0)
USUAL_NOISE, NOISE_SPREAD = np.log(1e-2), 1.5
STEPS = 60


def _distances(points: np.ndarray, others: np.ndarray, scales: np.ndarray) -> np.ndarray:
    squares = (((points[:, None] - others[None]) / scales) ** 2).sum(-1)
    return np.sqrt(np.maximum(squares, 1e-20))


def matern(points: np.ndarray, others: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """How alike points are: float64[n, m] in (0, 1] for float64[n, d] and float64[m, d]."""
    r = _distances(points, others, scales)
    return (1 + ROOT5 * r + 5 / 3 * r * r) * np.exp(-ROOT5 * r)


class _Posterior:
    """The negative logarithm of what the scales, signal and noise are worth, and its gradient.

    Its argument: d log scales, the log of the signal's variance, the log of the noise's variance.
    """

    def __init__(self, points: np.ndarray, values: np.ndarray) -> None:
        self._values = values
        self._squares = (points[:, None] - points[None]) ** 2
        self._dims = points.shape[1]
        self.usual = np.log(self._dims) / 2
        """The centre of the prior of a log scale."""

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        dims, values = self._dims, self._values
        scales, signal, noise = np.exp(theta[:dims]), np.exp(theta[dims]), np.exp(theta[dims + 1])
        parts = self._squares / scales**2
        r = np.sqrt(np.maximum(parts.sum(-1), 1e-20))
        decay = np.exp(-ROOT5 * r)
        kernel = signal * (1 + ROOT5 * r + 5 / 3 * r * r) * decay
        try:
            factor = np.linalg.cholesky(kernel + (noise + JITTER) * np.eye(len(values)))
        except np.linalg.LinAlgError:
            return 1e10, np.zeros(dims + 2)
        weights = cho_solve((factor, True), values)
        residue = cho_solve((factor, True), np.eye(len(values))) - np.outer(weights, weights)
        slopes = signal * (5 / 3) * (1 + ROOT5 * r) * decay  # of the kernel by each log scale, over its part
        gradient = np.empty(dims + 2)
        gradient[:dims] = 0.5 * np.einsum("ij,ijk->k", residue * slopes, parts)
        gradient[dims] = 0.5 * (residue * kernel).sum()
        gradient[dims + 1] = 0.5 * noise * np.trace(residue)
        worth = 0.5 * values @ weights + np.log(np.diag(factor)).sum()
        offsets = theta - self._centre()
        spread = np.r_[np.ones(dims + 1), NOISE_SPREAD]
        return worth + 0.5 * ((offsets / spread) ** 2).sum(), gradient + offsets / spread**2

    def _centre(self) -> np.ndarray:
        return np.r_[np.full(self._dims, self.usual), 0.0, USUAL_NOISE]


@dataclass(frozen=True, kw_only=True)
class GaussianProcess:
    """What is believed after some values; see `fit`."""

    points: np.ndarray
    theta: np.ndarray
    """Log scales, log signal, log noise: a start for the next fit."""
    mean: float
    spread: float
    """Of the values: inside, they are counted from their mean in units of it."""
    _factor: tuple[np.ndarray, bool]
    _weights: np.ndarray
    best: float
    """The least value that is believed of a point that was seen: one lucky measurement does not count for much."""

    def believe(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of what would be measured there without noise, in the units of inside.

        Args:
            points: float64[m, d].

        Returns:
            float64[m] each.
        """
        dims = self.points.shape[1]
        signal = np.exp(self.theta[dims])
        alike = signal * matern(points, self.points, np.exp(self.theta[:dims]))
        explained = solve_triangular(self._factor[0], alike.T, lower=True)
        return alike @ self._weights, np.sqrt(np.maximum(signal - (explained**2).sum(0), 1e-12))

    def log_improvement(self, points: np.ndarray) -> np.ndarray:
        """The logarithm of the expected improvement over `best`: float64[m] for float64[m, d]."""
        mean, deviation = self.believe(points)
        return np.log(deviation) + _log_h((self.best - mean) / deviation)


def _log_h(z: np.ndarray) -> np.ndarray:
    """log(pdf(z) + z cdf(z)) of a standard normal, exact far below 0 too (Ament et al. 2023)."""
    near = np.maximum(z, -1.0)
    density = np.exp(-near * near / 2) / np.sqrt(2 * np.pi)
    plain = np.log(np.maximum(density + near * np.exp(log_ndtr(near)), 1e-300))
    far = np.minimum(z, -1.0)
    rest = np.maximum(1 + far * np.sqrt(np.pi / 2) * erfcx(-far / np.sqrt(2)), 1e-300)
    return np.where(z > -1, plain, -far * far / 2 - 0.5 * np.log(2 * np.pi) + np.log(rest))


def fit(points: np.ndarray, values: np.ndarray, start: np.ndarray | None = None) -> GaussianProcess:
    """Learn from values.

    Args:
        points: float64[n, d], in the unit cube.
        values: float64[n], finite; less is better.
        start: `theta` of an earlier fit, from which the search begins too.
    """
    count, dims = points.shape
    mean, spread = float(values.mean()), float(values.std()) or 1.0
    inside = (values - mean) / spread
    posterior = _Posterior(points, inside)
    bounds = [SCALES] * dims + [SIGNAL, NOISE]
    usual = np.r_[np.full(dims, posterior.usual - 1.0), 0.0, USUAL_NOISE]
    starts = [usual] if start is None else [start, usual]
    found = [
        minimize(posterior, one, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": STEPS})
        for one in starts
    ]
    theta = min(found, key=lambda one: one.fun).x
    scales, signal, noise = np.exp(theta[:dims]), np.exp(theta[dims]), np.exp(theta[dims + 1])
    kernel = signal * matern(points, points, scales)
    factor = cho_factor(kernel + (noise + JITTER) * np.eye(count), lower=True)
    weights = cho_solve(factor, inside)
    return GaussianProcess(
        points=points,
        theta=theta,
        mean=mean,
        spread=spread,
        _factor=factor,
        _weights=weights,
        best=float((kernel @ weights).min()),
    )
