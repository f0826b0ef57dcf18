"""Which of two configurations is better: a verdict from pairs of trainings that may be looked at after each pair.

A fixed test that is repeated until it is significant is wrong far more often than its level says. What is here holds
its level however often it is looked at, and whenever that ends.

Of differences d_1 … d_n that are normal with a mean m and an unknown deviation, the likelihood of their scale-invariant
part, mixed over a standardized mean from N(0, 1 / C), is over that of a mean of 0

    M_n = sqrt(C / (n + C)) (1 - S² / ((n + C) V))^(-n / 2),    S = sum of d, V = sum of d²,

a martingale from 1 on where the mean is 0. By Ville's inequality it is ever above 1 / alpha with probability alpha at
most, and the means that d less them do not reject are a confidence sequence:

    Lai, T. L.: On confidence sequences. Annals of Statistics 4 (1976), 265-280, doi 10.1214/aos/1176343406.
    Wang, H. and Ramdas, A.: Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance.
    arXiv 2310.03722 (the test martingale in a reduced filtration).

Heavy tails on both sides make it careful, as any t-test. Skewed differences do not keep its level: of few pairs those
of the long tail are missing, and the others lie close together. So t = m / deviation must be as far from 0 after the
transformation that removes its skewness too, with g the skewness of the differences:

    t + g t² / 3 + g² t³ / 27 + g / (6 n)

    Hall, P.: On the removal of skewness by transformation. Journal of the Royal Statistical Society B 54 (1992),
    221-228.

Two configurations that are the same have symmetric differences, however skewed the losses of each are. What the level
is where differences have a mean of 0 and are skewed, tests/sweep/test_pairs.py measures.

A training without a number is a loss of its side: such losses are a second martingale, that of a fair coin with the
mixture Beta(1/2, 1/2) (Robbins, H.: Statistical methods related to the law of the iterated logarithm. Annals of
Mathematical Statistics 41 (1970), 1397-1409), and the product of both is judged.
"""

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from roxxel_dist.sweep.space.extras import SEED, SIDE, SIDES, Versus
from roxxel_dist.sweep.study.journal import History, Trial
from roxxel_dist.utils.display import counted

PRECISION = 0.2
"""C. The interval of 3 pairs is finite from 0.36 down; at 3 to 20 pairs none is narrower everywhere (measured)."""
MOST = 10_000
"""Pairs that are looked at for how many would be needed."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two trainings with one seed."""

    seed: int
    a: float | None
    """The last report of side A: NaN where its loss was no number, None where it ended for another reason."""
    b: float | None
    why: str | None = None
    """The reason, where one ended without a number."""

    @property
    def difference(self) -> float | None:
        """A less B; None where one has no number."""
        if self.a is None or self.b is None or not math.isfinite(difference := self.a - self.b):
            return None
        return difference

    @property
    def lost(self) -> str | None:
        """The side that lost because its loss was no number, where the other one has one."""
        is_nan = [value is not None and math.isnan(value) for value in (self.a, self.b)]
        if None in (self.a, self.b) or sum(is_nan) != 1:
            return None
        return SIDES[is_nan.index(True)]

    @property
    def counts(self) -> bool:
        """Whether it says something of the two sides."""
        return self.difference is not None or self.lost is not None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What pairs say of two configurations: numbers are the metric of A less that of B."""

    difference: float | None
    """The mean; None without a pair that has one."""
    low: float
    high: float
    level: float
    """The probability with which the interval holds the mean at all looks together."""
    pairs: int
    verdict: Literal["A", "B", "same", "undecided"]
    smallest: float | None = None
    """A difference that matters; None where none was named."""
    needed: int | None
    """An estimate of the pairs that a verdict needs, were the differences to go on as they are; None: more than
    10,000, or not to be said."""
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    """By side, the pairs in which it alone gave no number."""
    dropped: int = 0
    """Pairs in which a training ended for another reason, or neither gave a number: they say nothing."""
    why: str | None = None
    """The reason of the last of those."""

    @property
    def is_vain(self) -> bool:
        """Whether most pairs say nothing."""
        return self.dropped > self.pairs

    @property
    def ending(self) -> str | None:
        """The reason why no more pairs are needed; None while they are."""
        if self.is_vain:
            return f"{counted(self.dropped, 'pair')} of {self.dropped + self.pairs} cannot be compared: {self.why}"
        return None if self.verdict == "undecided" else self.text()

    def text(self) -> str:
        """The verdict in a line."""
        held = f"{self.level:.0%}".replace("%", " %")
        seen = f"{held}, {counted(self.pairs, 'pair')}"
        mean, ends = self.difference or 0.0, sorted((abs(self.low), abs(self.high)))
        interval = f"{self.low:+.3g} to {self.high:+.3g}; {held}" if math.isfinite(self.low) else "no interval yet"
        difference = "" if self.difference is None else f"; A less B is {mean:+.3g} ({interval})"
        losses = [f"; {side} gave no number in {counted(n, 'pair')} and lost it" for side, n in self.lost.items() if n]
        if self.verdict == "same":
            line = f"no difference above {self.smallest:g} ({seen}){difference}"
        elif self.verdict == "undecided":
            needed = "" if self.needed is None else f": about {self.needed:,} would be needed"
            line = f"undecided after {counted(self.pairs, 'pair')}{needed}{difference}"
        elif self.low > 0 or self.high < 0:
            line = f"{self.verdict} is better by {abs(mean):.3g} ({ends[0]:.3g} to {ends[1]:.3g}; {seen})"
        else:
            line = f"{self.verdict} is better ({seen}){difference}"
        return line + "".join(losses)

    def as_json(self) -> dict[str, Any]:
        """The fields for JSON, with None for an end of the interval that is infinite."""
        ends = {name: end if math.isfinite(end := getattr(self, name)) else None for name in ("low", "high")}
        return asdict(self) | ends


def interval(differences: Sequence[float], level: float) -> tuple[float, float, float]:
    """(mean, low, high) of the confidence sequence for the mean of differences, at the pairs so far."""
    if not differences:
        return 0.0, -math.inf, math.inf
    mean, deviation, skewness = _moments(differences)
    half, count = half_width(len(differences), level), len(differences)
    if not deviation or math.isinf(half):
        return mean, *((mean - half, mean + half) if math.isinf(half) else (mean, mean))
    ends = [half, -half, *(_skewed(end - skewness / (6 * count), skewness) for end in (half, -half))]
    return mean, mean - deviation * max(ends), mean - deviation * min(ends)


def _moments(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean, deviation (the root of the mean square from the mean) and skewness."""
    mean, scale = fmean(differences), _scale(differences)
    rest = [(one - mean) / scale for one in differences]
    deviation = math.sqrt(fmean([one * one for one in rest]))
    return mean, scale * deviation, fmean([(one / deviation) ** 3 for one in rest]) if deviation else 0.0


def _skewed(value: float, skewness: float) -> float:
    """t of t + g t² / 3 + g² t³ / 27, with g the skewness."""
    return 3 / skewness * (math.cbrt(1 + skewness * value) - 1) if abs(skewness) > 1e-6 else value


def _scale(differences: Sequence[float]) -> float:
    """The largest: squares of what is divided by it neither overflow nor vanish."""
    return max(map(abs, differences)) or 1.0


def half_width(count: int, level: float) -> float:
    """Half of the interval of so many pairs, in their deviation (the root of the mean square)."""
    kept = -math.expm1((2 * math.log1p(-level) - math.log1p(count / PRECISION)) / count)
    most = kept * (count + PRECISION)
    return math.sqrt(most / (count - most)) if most < count else math.inf


def evidence(differences: Sequence[float]) -> float:
    """log M_n, against a mean of 0."""
    if not any(differences):
        return 0.0
    (mean, deviation, skewness), count = _moments(differences), len(differences)
    kept = 1.0  # t² / (1 + t²)
    if deviation:
        t = abs(mean) / deviation
        g = math.copysign(skewness, skewness * mean)
        t = min(t, max(0.0, t + g * t * t / 3 + g * g * t**3 / 27 + g / (6 * count)))
        kept = t * t / (1 + t * t)
    left = 1 - kept * count / (count + PRECISION)
    return 0.5 * math.log(PRECISION / (count + PRECISION)) - 0.5 * count * math.log(left)


def evidence_of_losses(ours: int, theirs: int) -> float:
    """The logarithm of the martingale of losses, against that both sides are as likely to give no number."""
    count = ours + theirs
    gammas = math.lgamma(ours + 0.5) + math.lgamma(theirs + 0.5) - math.lgamma(count + 1) - math.log(math.pi)
    return gammas + count * math.log(2)


def compare(pairs: Sequence[Pair], versus: Versus, sign: float) -> Comparison:
    """What pairs say, all of them looked at.

    Args:
        pairs: in order of their seeds.
        versus: level, and the difference that matters.
        sign: 1 where less of the metric is better, -1 where more is.
    """
    differences = [one.difference for one in pairs if one.difference is not None]
    lost = {side: sum(one.lost == side for one in pairs) for side in SIDES}
    mean, low, high = interval(differences, versus.level)
    verdict: Literal["A", "B", "same", "undecided"] = "undecided"
    # Below 0: A is better. Both kinds of evidence must say the same.
    leans = {math.copysign(1, sign * mean)} if mean else set[float]()
    leans |= {math.copysign(1, lost["A"] - lost["B"])} if lost["A"] != lost["B"] else set()
    enough = evidence_of_losses(lost["A"], lost["B"]) + evidence(differences) >= -math.log1p(-versus.level)
    if enough and len(leans) == 1:
        verdict = "A" if leans.pop() < 0 else "B"
    elif versus.smallest is not None and differences and not sum(lost.values()) and max(-low, high) <= versus.smallest:
        verdict = "same"
    return Comparison(
        difference=mean if differences else None,
        low=low,
        high=high,
        level=versus.level,
        smallest=versus.smallest,
        pairs=sum(one.counts for one in pairs),
        verdict=verdict,
        needed=_needed(differences, mean, versus) if verdict == "undecided" and not sum(lost.values()) else None,
        lost=lost,
        dropped=sum(not one.counts for one in pairs),
        why=next((one.why for one in reversed(pairs) if not one.counts), None),
    )


def _needed(differences: Sequence[float], mean: float, versus: Versus) -> int | None:
    """How many pairs give a verdict where mean and deviation stay as they are; None where so many do not."""
    count = len(differences)
    if count < 2:
        return None
    spread = _moments(differences)[1] * math.sqrt(count / (count - 1))
    margin = max(abs(mean), 0.0 if versus.smallest is None else versus.smallest - abs(mean))
    found = bisect(range(MOST + 1), False, count + 1, key=lambda n: half_width(n, versus.level) * spread < margin)
    return found if found <= MOST else None


def pairs_of(history: History) -> list[Pair]:
    """The pairs of a study from the first on, up to the first one that has not ended: in the order of the seeds, not in
    that of their ends, which may depend on the values."""
    found = list[Pair]()
    for seed, sides in _by_seed(history).items():
        if len(sides) < len(SIDES) or any(one.state in ("running", "paused") for one in sides.values()):
            break
        why = next((f"{side}: {one.reason}" for side, one in sides.items() if one.reason), None)
        found.append(Pair(seed=seed, a=last_value(sides["A"]), b=last_value(sides["B"]), why=why))
    return found


def _by_seed(history: History) -> dict[int, dict[str, Trial]]:
    found = dict[int, dict[str, Trial]]()
    for _, trial in sorted(history.trials.items()):
        found.setdefault(trial.params[SEED], {})[trial.params[SIDE]] = trial
    return found


def last_value(trial: Trial) -> float | None:
    """The last report: a best one would be lower the more often it is measured."""
    if trial.state == "failed":
        return math.nan if trial.kind == "nan" else None
    return trial.reports[-1][1] if trial.reports else trial.value


def comparisons(pairs: Sequence[Pair], versus: Versus, sign: float) -> Iterator[Comparison]:
    """What is known after each pair, up to the end: later pairs, which ran at the same time, do not count."""
    for count in range(1, len(pairs) + 1):
        found = compare(pairs[:count], versus, sign)
        yield found
        if found.ending is not None:
            return


def outcome(history: History, versus: Versus) -> Comparison:
    """What a study says so far."""
    *_, last = [compare([], versus, history.sign), *comparisons(pairs_of(history), versus, history.sign)]
    return last
