"""A Gaussian process for few, noisy and costly values: what `bayes` expects of the points that it has not seen.

The covariance of the values at x and x' is

    signal k(r) + trend f(x)'f(x') + noise [x is x'],    r^2 = sum over d of (x_d - x'_d)^2 / scale_d^2,

with the Matern-5/2 kernel k and the features f of `_trend`. The scales have a log-normal prior whose centre grows with
the root of the number of dimensions, so that a space of many dimensions does not look like noise (Hvarfner, Hellsten,
Nardi 2024, arXiv 2402.02229). All hyperparameters are found together, as the maximum of their posterior.

RW: C. E. Rasmussen and C. K. I. Williams, Gaussian Processes for Machine Learning, MIT Press 2006.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, get_lapack_funcs
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr

ROOT5 = np.sqrt(5.0)
ROOT12, PARABOLA = np.sqrt(12.0), np.sqrt(1.25)
"""They give a line and a parabola over [0, 1] the variance 1."""
JITTER = 1e-6
"""Added to the diagonal: two equal points would make the matrix singular."""
DRAW_JITTER = 1e-4
"""Added to the variances of values that are drawn: points that are alike are no reason to fail."""
SCALES = (np.log(0.05), np.log(100.0))
SIGNAL = (-3.0, 3.0)
NOISE = (np.log(1e-5), 0.0)
USUAL_SCALE = 0.3
"""Of one dimension. With longer ones a search believes too soon that it has seen everything, and stays where it is."""
USUAL_NOISE, NOISE_SPREAD = 1e-2, 1.5
STEPS = 60
TREND = (-12.0, 3.0)
USUAL_TREND, TREND_SPREAD = 0.3, 1.5
PATH, STRIDE = 6, 0.2
"""Steps of a path between two draws, and their length in deviations: nine of ten draws are taken."""
PROBE = 0.05
"""How far apart two slopes are that give a curvature."""
_CHOLESKY, _INVERT = get_lapack_funcs(("potrf", "potri"), dtype=np.float64)


def _kernel(points: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matern-5/2 between points that were divided by the scales, and its slope by the distance r over -r: [n, m]."""
    squares = (points**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * points @ others.T
    return _matern(np.sqrt(np.maximum(squares, 1e-20)))


def _matern(r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # RW equation 4.17: k(r) = (1 + sqrt(5) r + 5/3 r^2) exp(-sqrt(5) r). Gradients by x need k'(r) only in -k'(r) / r
    # = 5/3 (1 + sqrt(5) r) exp(-sqrt(5) r), which is finite at r = 0.
    decay = np.exp(-ROOT5 * r)
    slope = 5 / 3 * (1 + ROOT5 * r) * decay
    return slope + (5 / 3 * r * r - 2 / 3 * (1 + ROOT5 * r)) * decay, slope


def _trend(points: np.ndarray) -> np.ndarray:
    """A line and a parabola along each dimension, float64[n, 2 d]: of variance 1 together, over uniform points."""
    line = ROOT12 * (points - 0.5)
    return np.concatenate([line, (line * line - 1) * PARABOLA], 1) / np.sqrt(2 * points.shape[1])


def _trend_slope(point: np.ndarray) -> np.ndarray:
    """The slope of each of these features along its own dimension: float64[2 d]."""
    line = ROOT12 * (point - 0.5)
    return ROOT12 * np.concatenate([np.ones(len(point)), 2 * PARABOLA * line]) / np.sqrt(2 * len(point))


class _Posterior:
    """The negative logarithm of the posterior of scales, signal, noise and trend, and its gradient.

    Its argument, float64[d + 3]: d log scales and the logs of the variances of signal, noise and trend.
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, noise: float = USUAL_NOISE) -> None:
        self._points, self._values = points, values
        self._dims = points.shape[1]
        trend = _trend(points)
        self._trend = trend @ trend.T
        scales = np.full(self._dims, np.log(USUAL_SCALE) + np.log(self._dims) / 2)
        self.centre = np.r_[scales, 0.0, np.log(noise), np.log(USUAL_TREND)]
        self.spread = np.r_[np.ones(self._dims + 1), NOISE_SPREAD, TREND_SPREAD]

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        dims, values = self._dims, self._values
        signal, noise, steep = np.exp(theta[dims:])
        scaled = self._points / np.exp(theta[:dims])
        kernel, slope = _kernel(scaled, scaled)
        covariance = signal * kernel + steep * self._trend
        covariance.flat[:: len(values) + 1] += noise + JITTER
        factor, failed = _CHOLESKY(covariance, lower=1)
        if failed:
            return 1e10, np.zeros(dims + 3)
        inverse, _ = _INVERT(factor, lower=1)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        # RW equations 5.8 and 5.9, with the sign turned: the loss is y'K^-1 y / 2 + log|K| / 2, and its derivative by a
        # hyperparameter t is tr((K^-1 - a a') dK/dt) / 2 with a = K^-1 y; `residue` is K^-1 - a a'.
        weights = inverse @ values
        residue = inverse - np.outer(weights, weights)
        # dK_ij / d log scale_d = signal (-k'(r) / r) (s_id - s_jd)^2 for s = x / scale. Half of the sum over i and j of
        # pull_ij (s_id - s_jd)^2 is multiplied out, so that no array of n x n x d is made.
        pull = residue * (signal * slope)
        gradient = np.empty(dims + 3)
        gradient[:dims] = pull.sum(1) @ scaled**2 - ((pull @ scaled) * scaled).sum(0)
        gradient[dims] = 0.5 * signal * (residue * kernel).sum()
        gradient[dims + 1] = 0.5 * noise * np.trace(residue)
        gradient[dims + 2] = 0.5 * steep * (residue * self._trend).sum()
        loss = 0.5 * values @ weights + np.log(np.diag(factor)).sum()  # log|K| / 2 = the sum of log L_ii, for K = LL'
        offsets = (theta - self.centre) / self.spread
        return loss + 0.5 * (offsets**2).sum(), gradient + offsets / self.spread


def _bounds(dims: int) -> list[tuple[float, float]]:
    return [SCALES] * dims + [SIGNAL, NOISE, TREND]


def fit_hyperparameters(points: np.ndarray, values: np.ndarray, noise: float = USUAL_NOISE) -> np.ndarray:
    """The log scales, log signal, log noise and log trend that explain values best: float64[d + 3]; see `condition`.

    Args:
        points: float64[n, d].
        values: float64[n].
        noise: the centre of the prior of the noise's variance.
    """
    posterior = _Posterior(points, values, noise)
    start = posterior.centre - np.r_[np.ones(points.shape[1]), 0.0, 0.0, 0.0]
    options = {"maxiter": STEPS, "ftol": 1e-4, "gtol": 1e-3}
    return minimize(posterior, start, jac=True, method="L-BFGS-B", bounds=_bounds(points.shape[1]), options=options).x


def prior_covariance(theta: np.ndarray, points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The prior covariance of the values without noise at points and others: float64[n, m]."""
    scales, signal, trend = np.exp(theta[:-3]), np.exp(theta[-3]), np.exp(theta[-1])
    return signal * _kernel(points / scales, others / scales)[0] + trend * (_trend(points) @ _trend(others).T)


def sample_hyperparameters(
    points: np.ndarray, values: np.ndarray, theta: np.ndarray, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws from the posterior of what `fit_hyperparameters` finds the maximum of, `theta`, where they begin.

    Few values leave much open, which one maximum hides (Snoek, Larochelle, Adams 2012). The draws are the ends of
    Hamiltonian paths (Neal 2011), whose steps are short along what the values say much about, and which the bounds
    reflect.

    Returns:
        `count` arrays, float64[d + 3] each.
    """
    posterior = _Posterior(points, values)
    low, high = np.array(_bounds(points.shape[1])).T
    loss, slope = posterior(theta)
    shifts = np.where(theta + PROBE < high, PROBE, -PROBE)
    curvature = [
        (posterior(theta + shift * at)[1] - slope) @ at / shift
        for shift, at in zip(shifts, np.eye(len(theta)), strict=True)
    ]
    # The stride along each axis is a share of the deviation that the posterior has there, by its curvature at theta; no
    # wider than that of the prior. So one step size suits all axes (Neal 2011, section 4.1: a diagonal mass matrix).
    strides = STRIDE / np.sqrt(np.maximum(curvature, 1 / posterior.spread**2))
    draws = []
    for _ in range(count):
        momentum = rng.normal(size=len(theta))
        energy, place, pull, there = loss + 0.5 * momentum @ momentum, theta, slope, loss
        for _ in range(PATH):  # leapfrog: half a step of the momentum, a whole one of the place, half a step again
            momentum = momentum - 0.5 * strides * pull
            place = place + strides * momentum
            # A bound reflects the path: place and momentum are mirrored, so that volume and energy stay as they are.
            momentum = np.where((place < low) | (place > high), -momentum, momentum)
            place = np.clip(
                np.where(place < low, 2 * low - place, np.where(place > high, 2 * high - place, place)), low, high
            )
            there, pull = posterior(place)
            momentum = momentum - 0.5 * strides * pull
        # Metropolis: the error of the steps is the difference of the energies. A draw that is refused counts again.
        if np.log(rng.random()) < energy - there - 0.5 * momentum @ momentum:
            theta, loss, slope = place, there, pull
        draws.append(theta)
    return draws


@dataclass(frozen=True, kw_only=True)
class GaussianProcess:
    """A process given some values; see `condition`."""

    theta: np.ndarray
    """Log scales, log signal, log noise, log trend: float64[d + 3]."""
    best: float
    """The least mean at a point that was seen: one lucky measurement does not count for much."""
    _points: np.ndarray
    _values: np.ndarray
    _trend: np.ndarray
    _inverse: np.ndarray
    _weights: np.ndarray

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of what would be measured there without noise: float64[m] each.

        Args:
            points: float64[m, d].
        """
        # RW equations 2.25 and 2.26: mean k'K^-1 y, variance k(x, x) - k'K^-1 k
        kernel = prior_covariance(self.theta, points, self._points)
        prior = np.exp(self.theta[-3]) + np.exp(self.theta[-1]) * (_trend(points) ** 2).sum(1)
        variance = prior - np.einsum("ij,ij->i", kernel @ self._inverse, kernel)
        return kernel @ self._weights, np.sqrt(np.maximum(variance, 1e-12))

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each value, had all others been seen and it not: float64[n] each.

        Rasmussen and Williams 2006, equation 5.12.
        """
        variance = 1 / np.diag(self._inverse)
        return self._values - self._weights * variance, np.sqrt(variance)

    def condition_on(self, points: np.ndarray, values: np.ndarray) -> "GaussianProcess":
        """The process that is given more values, with the same scales: float64[m] at float64[m, d]."""
        return condition(np.r_[self._points, points], np.r_[self._values, values], self.theta)

    def draw(self, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Values that it takes for possible at some points together: float64[m] at float64[m, d]."""
        between = prior_covariance(self.theta, points, self._points)
        covariance = prior_covariance(self.theta, points, points) - between @ self._inverse @ between.T
        covariance.flat[:: len(points) + 1] += DRAW_JITTER
        return between @ self._weights + np.linalg.cholesky(covariance) @ rng.normal(size=len(points))

    def log_expected_improvement(self, points: np.ndarray) -> np.ndarray:
        """The logarithm of the expected improvement over `best`: float64[m] for float64[m, d]."""
        mean, deviation = self.predict(points)
        return np.log(deviation) + _log_h((self.best - mean) / deviation)

    def log_probability_below(self, points: np.ndarray, limit: float) -> np.ndarray:
        """The logarithm of the probability that the value there is less than `limit`: float64[m] for float64[m, d]."""
        mean, deviation = self.predict(points)
        return log_ndtr((limit - mean) / deviation)

    def slope(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        """The logarithm of the expected improvement at one point, and its gradient: float64[d]."""
        scales, (signal, _, trend) = np.exp(self.theta[:-3]), np.exp(self.theta[-3:])
        offsets = (point - self._points) / scales
        kernel, steep = _matern(np.sqrt(np.maximum((offsets**2).sum(1), 1e-20)))
        kernel, steep = signal * kernel, -signal * steep[:, None] * offsets / scales
        features, rise = _trend(point[None])[0], _trend_slope(point)
        along = self._trend * rise
        kernel += trend * self._trend @ features
        steep += trend * (along[:, : len(point)] + along[:, len(point) :])
        broader = trend * (features * rise).reshape(2, -1).sum(0)
        solved = self._inverse @ kernel
        # log EI = log s + log h(z) with z = (best - m) / s and h' = cdf; its gradient: ds / s + cdf(z) / h(z) dz, where
        # dz = (-dm - z ds) / s. `wider` is ds: half of the variance's gradient, over s; `closer` is dz.
        deviation = np.sqrt(max(signal + trend * features @ features - kernel @ solved, 1e-12))
        z = (self.best - kernel @ self._weights) / deviation
        log_h = _log_h(np.array([z]))[0]
        wider = (broader - solved @ steep) / deviation
        closer = (-(self._weights @ steep) - z * wider) / deviation
        return float(np.log(deviation) + log_h), wider / deviation + np.exp(log_ndtr(z) - log_h) * closer


def _log_h(z: np.ndarray) -> np.ndarray:
    """log(pdf(z) + z cdf(z)) of a standard normal, exact far below 0 too (Ament et al. 2023, arXiv 2310.20708)."""
    # Far below 0 both terms are tiny and nearly cancel. There h(z) = pdf(z) (1 + z cdf(z) / pdf(z)), where the ratio is
    # sqrt(pi / 2) erfcx(-z / sqrt(2)), which neither underflows nor cancels.
    near = np.maximum(z, -1.0)
    density = np.exp(-near * near / 2) / np.sqrt(2 * np.pi)
    plain = np.log(np.maximum(density + near * np.exp(log_ndtr(near)), 1e-300))
    far = np.minimum(z, -1.0)
    rest = np.maximum(1 + far * np.sqrt(np.pi / 2) * erfcx(-far / np.sqrt(2)), 1e-300)
    return np.where(z > -1, plain, -far * far / 2 - 0.5 * np.log(2 * np.pi) + np.log(rest))


def condition(points: np.ndarray, values: np.ndarray, theta: np.ndarray) -> GaussianProcess:
    """The process given values, for known scales, signal and noise.

    Args:
        points: float64[n, d], each column in [0, 1].
        values: float64[n], finite, of mean 0 and deviation 1 or so; less is better.
        theta: from `fit_hyperparameters`.
    """
    # The inverse itself, and not its factor alone: thousands of candidates need k'K^-1 k, and RW 5.12 its diagonal.
    kernel = prior_covariance(theta, points, points)
    covariance = kernel + (np.exp(theta[-2]) + JITTER) * np.eye(len(values))
    inverse = cho_solve(cho_factor(covariance, lower=True), np.eye(len(values)))
    weights = inverse @ values
    best = float((kernel @ weights).min())
    return GaussianProcess(
        theta=theta,
        best=best,
        _points=points,
        _values=values,
        _trend=_trend(points),
        _inverse=inverse,
        _weights=weights,
    )
