"""What differs between a layout and the reference, and what such a difference usually means."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roxxel_dist.layouts.layout import Layout
from roxxel_dist.layouts.one_step import GRADIENT, SCALAR, STATE, Outcome
from roxxel_dist.layouts.reference import Reference, norm, to_float64

STREAM, UPDATE, INITIAL = "random stream ", "update of ", "initial value of "
KINDS = {INITIAL: "initial", GRADIENT: "gradient", UPDATE: "update", STATE: "state", SCALAR: "scalar", STREAM: "stream"}
"""The kinds of results, by how their names begin; that of any other is loss."""
NEAR = 0.01
"""How far a ratio may be from a number that it is taken for, as a share of it."""
ABOUT, APART = 0.1, 1.5
"""The same for a single number, and how far from 1 such a factor is at least."""
SAME_DIRECTION_DEG = 1.0
LITTLE_DEG = 30.0
MOST_LINES = 3
"""That are named of a stream."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One result that differs beyond rounding."""

    what: str
    """Such as "gradient of blocks.mlp.out.kernel", "loss", "state norm.mean", "random stream dropout.key"."""
    ratio: float | None = None
    """<layout, reference> / <reference, reference>: how many times the reference it is; None where that is 0."""
    angle_deg: float | None = None
    """Between the two, as vectors over all elements."""
    share: float = math.inf
    """The distance as a share of the reference's norm: how wrong it is; infinite where that is 0."""
    distance: float = math.inf
    """Euclidean, from the reference."""
    bound: float = 0.0
    """The most that rounding may do."""
    is_number: bool = True
    """Whether it is one number, such as the loss."""
    meaning: str
    """What such a difference usually means."""

    @property
    def kind(self) -> str:
        """ "initial", "loss", "scalar", "gradient", "update", "state" or "stream"."""
        return KINDS.get(self._start, "loss")

    @property
    def name(self) -> str:
        """The name of the parameter, the scalar, the array of the state or the stream."""
        return self.what.removeprefix(self._start)

    @property
    def _start(self) -> str:
        return next((start for start in KINDS if self.what.startswith(start)), "")

    def __str__(self) -> str:
        """The difference in one line."""
        numbers = []
        if self.ratio is not None:
            near_one = _two_numbers(self.ratio, 1.0)[0]  # with as many digits as show that it is not 1
            numbers.append(f"{near_one if 0.9 < self.ratio < 1.1 else format(self.ratio, '.5g')} x")
        if self.angle_deg is not None and not self.is_number:
            numbers.append(f"angle {self.angle_deg:.2g}°")
        return f"{self.what}: {', '.join(numbers)}{': ' if numbers else ''}{self.meaning}"


def differences(
    outcome: Outcome, reference: Reference, layout: Layout, order: Sequence[str], streams: frozenset[str]
) -> tuple[list[Difference], float]:
    """(all results that differ, the largest distance of one that agrees in bounds).

    They come as the step makes them: the loss and its scalars, the gradients in the `order` of the backward pass, the
    state.
    """
    names = [name for name in outcome.values if name in reference.exact and not name.startswith(GRADIENT)]
    before = [name for name in names if not name.startswith(STATE)]
    state = [name for name in names if name.startswith(STATE)]
    if not layout.calls_once:
        # Each part is a call of its own, so a stream has counted further, and so has any integer that counts calls.
        state = [name for name in state if name in reference.error and name.removeprefix(STATE) not in streams]
    return compare_results([*before, *(GRADIENT + name for name in order), *state], outcome, reference, layout)


def compare_results(
    names: Sequence[str], outcome: Outcome, reference: Reference, layout: Layout
) -> tuple[list[Difference], float]:
    """(those of the named results that differ, in order; the largest distance of one that agrees, in bounds)."""
    found, worst = list[Difference](), 0.0
    for name in names:
        here, exact = outcome.values[name], reference.exact[name]
        if np.shape(here) != np.shape(exact):
            continue  # the loss of each row, where rows are others
        copies = outcome.copies.get(name, [here])
        is_floating = name in reference.error
        distances = [norm(to_float64(copy) - exact if is_floating else np.asarray(copy) != exact) for copy in copies]
        farthest = int(np.argmax(distances))
        distance, bound = distances[farthest], reference.bound(name)
        if distance <= bound:
            worst = max(worst, distance / bound if 0 < bound < math.inf else 0.0)
            continue
        found.append(_difference(name, copies[farthest], reference, layout, distance, len(copies)))
    return found, worst


def _difference(
    name: str, here: np.ndarray, reference: Reference, layout: Layout, distance: float, copies: int
) -> Difference:
    exact, bound = reference.exact[name], reference.bound(name)
    ratio, angle = (None, None) if name not in reference.error else ratio_and_angle(to_float64(here), exact)
    if not np.isfinite(distance):
        meaning = "it is not finite: a division by a part's count of 0, or a mask that leaves a part nothing"
    elif copies > 1:
        meaning = "its copies on the devices differ: computed, or updated, from one device's part without a psum"
    elif name not in reference.error:
        meaning = "integers, compared exactly: they count, or are drawn, once for each part"
    else:
        size = norm(to_float64(here))
        meaning = meaning_of(ratio, angle, layout.sizes, is_zero=size <= bound, is_number=here.size == 1)
    if name.startswith(STATE) and copies == 1 and name in reference.error:
        once = "a statistic of the rows is one part's" if layout.calls_once else "each part changes the state anew"
        meaning = f"{once}: {meaning}"
    return Difference(
        what=name,
        ratio=ratio,
        angle_deg=angle,
        share=share_of(distance, norm(exact)),
        distance=distance,
        bound=bound,
        is_number=here.size == 1,
        meaning=meaning,
    )


def share_of(distance: float, size: float) -> float:
    """A distance as a share of a norm; infinite where that is 0."""
    return distance / size if size else math.inf


def ratio_and_angle(here: np.ndarray, exact: np.ndarray) -> tuple[float | None, float | None]:
    """The factor of `exact` that is nearest to `here`, and the angle between them in degrees; None for one of 0."""
    flat, true = here.reshape(-1), exact.reshape(-1)
    square, both = float(true @ true), float(flat @ true)
    lengths = math.sqrt(square) * float(np.linalg.norm(flat))
    if not square or not np.isfinite(both):
        return None, None
    if not lengths:
        return 0.0, None
    return both / square, math.degrees(math.acos(max(-1.0, min(1.0, both / lengths))))


def meaning_of(
    ratio: float | None, angle: float | None, sizes: Mapping[str, int], *, is_zero: bool, is_number: bool = False
) -> str:
    """What a difference of such a ratio and angle usually means; `sizes` are the parts that a step is divided into.

    Of one number, which has no direction, the ratio may be a little off: it may be a mean of something else too.
    """
    if is_zero:
        return "nothing arrives: a stop_gradient, or a part that is never sent (a missing collective)"
    if ratio is None or angle is None:
        return "the reference is 0: something arrives here that belongs elsewhere"
    if angle > 180 - SAME_DIRECTION_DEG and abs(ratio + 1) < NEAR:
        return "the sign is turned"
    if angle < SAME_DIRECTION_DEG:
        return _of_length(ratio, sizes, is_number=is_number)
    if angle < LITTLE_DEG:
        return (
            "a part is missing or has another weight: tokens at a border, a mean of means of unequal counts, or a "
            "statistic of one part"
        )
    return (
        "another function: a part sees other positions, labels or neighbours, parts are put together in another order, "
        "or their sum is missing"
    )


def _of_length(ratio: float, sizes: Mapping[str, int], *, is_number: bool) -> str:
    """What it means that the direction is the same, or that it is one number."""
    factors = [
        each for what, parts in sorted(sizes.items(), key=lambda item: item[1]) for each in _factors(what, parts)
    ]
    if is_number:
        far = [(factor, text) for factor, text in factors if not 1 / APART < factor < APART]
        other = "parts of unequal counts are averaged as if they were equal, or a part has other inputs or is missing"
        return next((text for factor, text in far if abs(ratio / factor - 1) < ABOUT), other)
    nearly = (
        "nearly the same: a small term has another weight, parts of unequal counts are averaged as if they were equal, "
        "or a value has a narrower type, such as bfloat16, in this layout alone"
    )
    unequal = (
        "the same direction with another length: parts of unequal counts of tokens are averaged as if they were equal, "
        "or it is divided by a part's own count or norm"
    )
    return next((text for factor, text in [(1.0, nearly), *factors] if abs(ratio / factor - 1) < NEAR), unequal)


def _factors(what: str, parts: int) -> list[tuple[float, str]]:
    return [
        (float(parts), f"the number of {what}: added up twice, or a sum where the mean belongs"),
        (
            1 / parts,
            f"1 / the number of {what}: divided twice, a mean where the sum belongs, or a psum that is missing",
        ),
        (
            float(parts * parts),
            f"the square of the number of {what}: added up in the forward pass and the backward pass",
        ),
        (math.sqrt(parts), f"the square root of the number of {what}: a norm of one part, or a scale by its root"),
        (
            1 / math.sqrt(parts),
            f"1 / the square root of the number of {what}: a norm that counts each copy, or a deviation of one part",
        ),
    ]


def differences_in_count(outcome: Outcome, reference: Reference, layout: Layout) -> list[Difference]:
    """Streams of which a layout draws other numbers of different elements."""
    found = list[Difference]()
    if layout.batch != layout.truth:
        return found  # rows of other lengths
    for name, here in outcome.drawn.items():
        there = reference.drawn.get(name, 0)
        if here == there or (here > there and not layout.calls_once):
            continue
        shared = "the same noise is used on several parts: fold the index of the part's rows into the key"
        apart = "copies that should have the same noise draw their own: give all devices that share rows one key"
        found.append(
            _of_stream(
                name,
                f"{shared if here < there else apart} ({here:,} different elements, {there:,} on one device)",
                ratio=here / there if there else None,
                distance=float(abs(here - there)),
            )
        )
    return found


def difference_in_noise(name: str, lines: Sequence[str], first: Difference, here: float, there: float) -> Difference:
    """A random stream whose draws depend on the layout, from these lines, such as "net.py:12". `first` is the first
    result that differs with this noise, and does not without; the losses with it are `here`, and `there` on one device.
    """
    place = f" ({', '.join(lines[:MOST_LINES])}{', …' if len(lines) > MOST_LINES else ''})" if lines else ""
    apart = f"the loss with them is {', on one device '.join(_two_numbers(here, there))}"
    return _of_stream(
        name,
        f"its draws{place} depend on the layout: {apart if here != there else f'{first.what} differs'}. Draw the whole "
        f"array with one key, or fold in the index of the row, and not that of the device or the number of devices",
        ratio=None,
        distance=first.distance,
    )


def _of_stream(name: str, meaning: str, *, ratio: float | None, distance: float) -> Difference:
    return Difference(
        what=STREAM + name,
        ratio=ratio,
        share=abs(ratio - 1) if ratio is not None else math.inf,
        distance=distance,
        meaning=meaning,
    )


def _two_numbers(one: float, other: float) -> tuple[str, str]:
    """Both with as many digits as show that they differ."""
    digits = next((digits for digits in range(6, 17) if f"{one:.{digits}g}" != f"{other:.{digits}g}"), 17)
    return f"{one:.{digits}g}", f"{other:.{digits}g}"
