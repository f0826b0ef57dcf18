"""Made learning curves: losses at each report of trials over spaces of several kinds, half of which tune nothing.

A kind is a space of parameters and a form of curve; an instance of it (`surface(kind, instance)`) draws where the best
parameters lie, how they interact, and how fast which of them learn. All kinds share one skeleton,

    loss(report) = floor(parameters) + (start - floor) x shape(report / pace(parameters)),

and differ in what `shape` and `pace` are: whether the order of the trials at their first reports is that at their ends.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

START = 3.0
"""The loss before any training above the lowest floor; the median floor is 0.5 above it."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of surface.

    Attributes:
        reports: reports of a whole trial.
        noise: standard deviation of a report, where the spread of the floors over the space is about 0.5.
        rates: continuous parameters on a log axis; the first one is the learning rate.
        uniform: continuous parameters between 0 and 1.
        choices: numbers of choices of the other parameters; an odd number is ordered, an even one is of text.
        shape: the part of the way that is left after `x` times the pace, from 1 down towards 0.
        slow: how many times slower the trials learn whose floor is lowest: where it is large, curves cross.
        late: the largest share of a trial without any progress: half of it grows with the last continuous parameter (a
            warm-up), half is longest for the trials with the lowest floors.
        diverges: share of the log axis of the learning rate, from its upper end, where losses may diverge.
    """

    reports: int
    noise: float
    rates: int
    uniform: int
    choices: tuple[int, ...]
    shape: Callable[[np.ndarray], np.ndarray]
    slow: float = 1.0
    late: float = 0.0
    diverges: float = 0.0

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The space in the format of a sweep file."""
        found: dict[str, dict[str, Any]] = {}
        for number in range(self.rates):
            found[f"rate{number}"] = {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}
        for number in range(self.uniform):
            found[f"x{number}"] = {"min": 0.0, "max": 1.0}
        for number, count in enumerate(self.choices):
            values = [f"choice{index}" for index in range(count)] if count % 2 == 0 else list(range(count))
            found[f"c{number}"] = {"values": values}
        return found


def _power(x: np.ndarray) -> np.ndarray:
    return (1 + 4 * x) ** -1.0


def _slow_power(x: np.ndarray) -> np.ndarray:
    return (1 + 12 * x) ** -0.6


def _exponential(x: np.ndarray) -> np.ndarray:
    return np.exp(-4 * x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """A plateau, then a fall."""
    return 1 / (1 + np.exp(10 * (x - 0.5))) / (1 / (1 + math.exp(-5)))


def _two_phases(x: np.ndarray) -> np.ndarray:
    """A fall, a long slope, and another fall at the end, as where the learning rate decays."""
    return 0.55 * np.exp(-10 * x) + 0.25 * np.maximum(1 - x, 0.0) + 0.2 / (1 + np.exp(20 * (x - 0.8)))


TUNED: dict[str, Kind] = {
    "power": Kind(reports=15, noise=0.006, rates=1, uniform=5, choices=(), shape=_power),
    "mixed": Kind(reports=12, noise=0.0, rates=1, uniform=2, choices=(3, 2, 4), shape=_exponential, slow=1.5),
    "crossing": Kind(reports=18, noise=0.01, rates=2, uniform=2, choices=(), shape=_power, slow=4.0),
    "late": Kind(reports=12, noise=0.003, rates=1, uniform=2, choices=(2, 5), shape=_exponential, late=0.5),
    "diverging": Kind(reports=15, noise=0.03, rates=2, uniform=3, choices=(), shape=_slow_power, diverges=0.35),
}
"""What constants and forms are chosen on."""
APART: dict[str, Kind] = {
    "slow power": Kind(reports=15, noise=0.006, rates=2, uniform=4, choices=(), shape=_slow_power, slow=1.5),
    "mixed, of choices": Kind(reports=12, noise=0.01, rates=1, uniform=1, choices=(2, 4, 3, 5), shape=_power),
    "crossing, exponential": Kind(
        reports=18, noise=0.003, rates=1, uniform=4, choices=(), shape=_exponential, slow=5.0
    ),
    "late bloomers": Kind(
        reports=15, noise=0.0, rates=1, uniform=2, choices=(3, 2), shape=_sigmoid, slow=1.5, late=0.3
    ),
    "decayed, noisy": Kind(reports=12, noise=0.05, rates=1, uniform=3, choices=(2,), shape=_two_phases, slow=1.5),
    "diverging, mixed": Kind(
        reports=15, noise=0.02, rates=1, uniform=2, choices=(4, 2), shape=_power, slow=2.0, diverges=0.5
    ),
}
"""What tunes nothing: the figures in the documentation are of these."""
KINDS = TUNED | APART


class CurveSurface:
    """One instance: a table of curves as `roxxel_dist.sweep.replay` takes it.

    Args:
        kind: the kind.
        seed: seeds of everything that the instance draws, and of its noise.

    Attributes:
        best: about the lowest loss of any report of any trial without noise.
        spread: the median loss at the end of trials at random above `best`.
    """

    def __init__(self, kind: Kind, seed: list[int]) -> None:
        self.kind, self._seed = kind, seed
        rng = np.random.default_rng(seed)
        self._numbers = kind.rates + kind.uniform
        shape = (self._numbers, self._numbers)
        # A bowl of a random rotation, whose axes differ in how much they matter.
        turn = np.linalg.qr(rng.normal(size=shape))[0]
        mix = 0.6 * np.eye(self._numbers) + 0.4 * turn
        self._bowl = mix.T @ np.diag(np.exp(rng.normal(0.0, 0.8, self._numbers))) @ mix
        self._centre = rng.uniform(0.2, 0.8, self._numbers)
        self._waves = rng.normal(0.0, 2.0, shape), rng.uniform(0, 2 * math.pi, self._numbers)
        self._offsets = [rng.exponential(0.12, count) for count in kind.choices]
        for offsets, count in zip(self._offsets, kind.choices, strict=True):
            if count % 2:
                offsets.sort()  # an ordered choice has its best at one end
        self._shifts = [rng.normal(0.0, 0.08, (count, self._numbers)) for count in kind.choices]
        self._paces = rng.normal(0.0, 0.5, self._numbers)
        sample = rng.random((4000, self._numbers))
        picked = [rng.integers(count, size=len(sample)) for count in kind.choices]
        self._range = 1.0
        floors = np.array([self._floor(u, [int(each[row]) for each in picked]) for row, u in enumerate(sample)])
        self._range = float(np.quantile(floors, 0.5) - floors.min()) / 0.5
        self._lowest = float(floors.min()) / self._range
        ends = []
        for row, u in enumerate(sample):
            curve = self._clean(u, [int(each[row]) for each in picked])
            ends.append(np.nanmin(curve) if len(curve) else np.nan)
        order = np.argsort(ends)
        self.spread = float(np.nanmedian(ends))
        self.best = float(np.nanmin(ends))
        for row in order[:20]:  # a random descent from the best ones
            at, chosen, value, reach = sample[row], [int(each[row]) for each in picked], ends[row], 0.1
            for _ in range(150):
                near = np.clip(at + reach * rng.normal(size=self._numbers), 0.0, 1.0)
                curve = self._clean(near, chosen)
                if np.nanmin(curve) < value:
                    at, value = near, float(np.nanmin(curve))
                else:
                    reach = max(0.97 * reach, 0.003)
            self.best = min(self.best, value)
        self.spread -= self.best

    def _floor(self, u: np.ndarray, chosen: list[int]) -> float:
        centre = self._centre + sum(
            (shift[index] for shift, index in zip(self._shifts, chosen, strict=True)), np.zeros(self._numbers)
        )
        offset = u - centre
        value = offset @ self._bowl @ offset
        value += 0.03 * (1 - np.cos(self._waves[0] @ offset * 3)).mean()
        value += sum(offsets[index] for offsets, index in zip(self._offsets, chosen, strict=True))
        return float(value) / self._range

    def _clean(self, u: np.ndarray, chosen: list[int]) -> np.ndarray:
        """The curve without noise, float64[reports]: it ends with NaN where the loss is no number any more."""
        kind, floor = self.kind, self._floor(u, chosen)
        goodness = math.exp(-2 * max(floor - self._lowest, 0.0))  # 1 at the best floor, towards 0 far from it
        # A low learning rate learns slowly, and so does a good floor where curves cross; others matter a little.
        pace = math.exp(0.8 * (0.5 - u[0]) + float(self._paces @ (u - 0.5))) * kind.slow**goodness
        x = np.arange(1, kind.reports + 1) / kind.reports
        wait = kind.late * (0.5 * goodness + 0.5 * u[-1])
        x = np.maximum(x - wait, 0.0)
        start = self._lowest + START
        curve = floor + max(start - floor, 0.2) * kind.shape(x / pace)
        heat = u[0] - (1 - kind.diverges) + 0.15 * float(self._waves[0][0] @ (u - 0.5)) / 2
        if kind.diverges and heat > 0:
            at = max(1, int(kind.reports * math.exp(-6 * heat)))
            curve[at:] = np.maximum(curve[at:], start + 2 * heat * np.arange(1, kind.reports - at + 1))
            if heat > 0.25:
                curve[min(at + 1, kind.reports - 1) :] = np.nan
        return curve

    def _place(self, params: Mapping[str, Any]) -> tuple[np.ndarray, list[int]]:
        rates = [(math.log10(params[f"rate{number}"]) + 5) / 4 for number in range(self.kind.rates)]
        uniform = [params[f"x{number}"] for number in range(self.kind.uniform)]
        chosen = [self.kind.parameters[f"c{n}"]["values"].index(params[f"c{n}"]) for n in range(len(self.kind.choices))]
        return np.array(rates + uniform), chosen

    def clean(self, params: Mapping[str, Any]) -> np.ndarray:
        """The losses without noise, float64[reports]."""
        return self._clean(*self._place(params))

    def __call__(self, params: Mapping[str, Any]) -> np.ndarray:
        """The losses as a trial reports them, float64[reports]: the same for the same parameters."""
        u, chosen = self._place(params)
        curve = self._clean(u, chosen)
        drawn = np.random.default_rng([*self._seed, *(int(1e9 * value) for value in u), *chosen])
        return curve + self.kind.noise * drawn.normal(size=len(curve))


def surface(name: str, instance: int) -> CurveSurface:
    """An instance of a kind, by the kind's name."""
    return CurveSurface(KINDS[name], [list(KINDS).index(name), instance])
