"""A Gaussian process for few, noisy and costly values: what `bayes` believes of the points that it has not seen.

A Matern-5/2 kernel with a length scale a dimension. The scales have a log-normal prior whose centre grows with the root
of the number of dimensions, so that a space of many dimensions does not look like noise (Hvarfner, Hellsten, Nardi
2024); signal and noise are learned too. All three are found together, as the maximum of their posterior.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, get_lapack_funcs
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

ROOT5 = np.sqrt(5.0)
JITTER = 1e-6
"""Added to the diagonal: two equal points would make the matrix singular."""
SCALES = (np.log(0.05), np.log(100.0))
SIGNAL = (-3.0, 3.0)
NOISE = (np.log(1e-5), 0.0)
USUAL_SCALE = 0.3
"""Of one dimension. With longer ones a search believes too soon that it has seen everything, and stays where it is."""
USUAL_NOISE, NOISE_SPREAD = np.log(1e-2), 1.5
STEPS = 60
BLOCK = 128
"""Points that are looked at in one go: what is worked out for them stays in the cache."""
_CHOLESKY, _INVERT = get_lapack_funcs(("potrf", "potri"), dtype=np.float64)


def _distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """float64[n, m], in matrix products: a difference a pair and dimension would be far more memory to walk through."""
    squares = (points**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * points @ others.T
    return np.sqrt(np.maximum(squares, 1e-20))


def _matern(r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kernel at these distances, and its slope by r over -r."""
    decay = np.exp(-ROOT5 * r)
    slope = 5 / 3 * (1 + ROOT5 * r) * decay
    return slope + (5 / 3 * r * r - 2 / 3 * (1 + ROOT5 * r)) * decay, slope


def _alike(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The kernel between two sets of points, float64[n, m], in place: without its slope it is half the work."""
    found = points @ (-2 * others.T)
    found += (points**2).sum(1)[:, None]
    found += (others**2).sum(1)
    np.maximum(found, 1e-20, out=found)
    found *= 5
    r = np.sqrt(found)
    found /= 3
    found += r
    found += 1
    np.negative(r, out=r)
    found *= np.exp(r, out=r)
    return found


class _Posterior:
    """The negative logarithm of what scales, signal and noise are worth, and its gradient.

    Its argument: d log scales, the log of the signal's variance, the log of the noise's variance.
    """

    def __init__(self, points: np.ndarray, values: np.ndarray) -> None:
        self._points, self._values = points, values
        self._dims = points.shape[1]
        self.centre = np.r_[np.full(self._dims, np.log(USUAL_SCALE) + np.log(self._dims) / 2), 0.0, USUAL_NOISE]
        self._spread = np.r_[np.ones(self._dims + 1), NOISE_SPREAD]

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        dims, values = self._dims, self._values
        signal, noise = np.exp(theta[dims]), np.exp(theta[dims + 1])
        scaled = self._points / np.exp(theta[:dims])
        alike, slope = _matern(_distances(scaled, scaled))
        whole = signal * alike
        whole.flat[:: len(values) + 1] += noise + JITTER
        factor, failed = _CHOLESKY(whole, lower=1)
        if failed:
            return 1e10, np.zeros(dims + 2)
        inverse, _ = _INVERT(factor, lower=1)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        weights = inverse @ values
        residue = inverse - np.outer(weights, weights)
        pull = residue * (signal * slope)
        gradient = np.empty(dims + 2)
        gradient[:dims] = pull.sum(1) @ scaled**2 - ((pull @ scaled) * scaled).sum(0)
        gradient[dims] = 0.5 * signal * (residue * alike).sum()
        gradient[dims + 1] = 0.5 * noise * np.trace(residue)
        score = 0.5 * values @ weights + np.log(np.diag(factor)).sum()
        offsets = (theta - self.centre) / self._spread
        return score + 0.5 * (offsets**2).sum(), gradient + offsets / self._spread


def learn(points: np.ndarray, values: np.ndarray, start: np.ndarray | None = None, steps: int = STEPS) -> np.ndarray:
    """The log scales, log signal and log noise that explain values best; see `fit`.

    Args:
        points: float64[n, d].
        values: float64[n].
        start: where to begin, learned from fewer points.
        steps: how many to take at most.
    """
    posterior = _Posterior(points, values)
    if start is None:
        start = posterior.centre - np.r_[np.ones(points.shape[1]), 0.0, 0.0]
    bounds = [SCALES] * points.shape[1] + [SIGNAL, NOISE]
    options = {"maxiter": steps, "ftol": 1e-4, "gtol": 1e-3}
    return minimize(posterior, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x


@dataclass(frozen=True, kw_only=True)
class GaussianProcess:
    """What is believed after some values; see `fit`."""

    theta: np.ndarray
    """Log scales, log signal, log noise."""
    best: float
    """The least value that is believed of a point that was seen: one lucky measurement does not count for much."""
    _scaled: np.ndarray
    _inverse: np.ndarray
    _weights: np.ndarray

    @property
    def _signal(self) -> float:
        return float(np.exp(self.theta[-2]))

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of what would be measured there without noise: float64[m] each.

        Args:
            points: float64[m, d].
        """
        scaled = points / np.exp(self.theta[:-2])
        mean, left = np.empty(len(points)), np.empty(len(points))
        for begin in range(0, len(points), BLOCK):
            block = slice(begin, begin + BLOCK)
            alike = self._signal * _alike(scaled[block], self._scaled)
            mean[block] = alike @ self._weights
            left[block] = self._signal - np.einsum("ij,ij->i", alike @ self._inverse, alike)
        return mean, np.sqrt(np.maximum(left, 1e-12))

    def log_expected_improvement(self, points: np.ndarray) -> np.ndarray:
        """The logarithm of the expected improvement over `best`: float64[m] for float64[m, d]."""
        mean, deviation = self.predict(points)
        return np.log(deviation) + _log_h((self.best - mean) / deviation)

    def log_probability_below(self, points: np.ndarray, limit: float) -> np.ndarray:
        """The logarithm of the chance that the value there is less than `limit`: float64[m] for float64[m, d]."""
        mean, deviation = self.predict(points)
        return log_ndtr((limit - mean) / deviation)

    def slope(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        """The logarithm of the expected improvement at one point, and its gradient: float64[d]."""
        scales = np.exp(self.theta[:-2])
        offsets = point / scales - self._scaled
        alike, steep = _matern(np.sqrt(np.maximum((offsets**2).sum(1), 1e-20)))
        alike, steep = self._signal * alike, -self._signal * steep[:, None] * offsets / scales
        solved = self._inverse @ alike
        deviation = np.sqrt(max(self._signal - alike @ solved, 1e-12))
        z = (self.best - alike @ self._weights) / deviation
        log_h = _log_h(np.array([z]))[0]
        wider = -(solved @ steep) / deviation
        closer = (-(self._weights @ steep) - z * wider) / deviation
        return float(np.log(deviation) + log_h), wider / deviation + np.exp(log_ndtr(z) - log_h) * closer


def _log_h(z: np.ndarray) -> np.ndarray:
    """log(pdf(z) + z cdf(z)) of a standard normal, exact far below 0 too (Ament et al. 2023)."""
    near = np.maximum(z, -1.0)
    density = np.exp(-near * near / 2) / np.sqrt(2 * np.pi)
    plain = np.log(np.maximum(density + near * np.exp(log_ndtr(near)), 1e-300))
    far = np.minimum(z, -1.0)
    rest = np.maximum(1 + far * np.sqrt(np.pi / 2) * erfcx(-far / np.sqrt(2)), 1e-300)
    return np.where(z > -1, plain, -far * far / 2 - 0.5 * np.log(2 * np.pi) + np.log(rest))


def fit(points: np.ndarray, values: np.ndarray, theta: np.ndarray) -> GaussianProcess:
    """What is believed after values, for given scales, signal and noise.

    Args:
        points: float64[n, d], each column in [0, 1].
        values: float64[n], finite, of mean 0 and deviation 1 or so; less is better.
        theta: from `learn`.
    """
    scaled = points / np.exp(theta[:-2])
    kernel = np.exp(theta[-2]) * _alike(scaled, scaled)
    whole = kernel + (np.exp(theta[-1]) + JITTER) * np.eye(len(values))
    inverse = cho_solve(cho_factor(whole, lower=True), np.eye(len(values)))
    weights = inverse @ values
    best = float((kernel @ weights).min())
    return GaussianProcess(theta=theta, best=best, _scaled=scaled, _inverse=inverse, _weights=weights)
