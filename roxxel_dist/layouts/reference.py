"""What a step is on one device, and how far from it another layout may be.

Let x be any result (the gradient of a parameter, the loss, ...), x* its exact value, and |.| the norm over its
elements. One device and a layout compute the same sums in another order, so both are x* and an error of rounding. How
large it is depends on the sizes of the terms, not on that of the result: where terms cancel, as in the gradient of a
bias before a softmax, it is as large as the result. No constant is right for all, so it is measured:

- x* is a run in float64. What the model itself fixes to float32 is rounded there too, and cancels in the difference.
- Rounding moves each term t of a sum by up to u |t|, where u is the unit roundoff. To move each parameter by u, at
  random, moves each term by about as much, and so each sum by about what rounding does, whatever cancels in it, and
  whatever lies between the sum and the result. With the run as it is, that gives K + 1 samples of the error:

      e^2 = mean over k of |x_k - x*|^2,    x_0 as it is, x_1 ... x_K with parameters p (1 + u s), s = -1 or 1

- An array of one element may be near x* by luck in all samples. A sum of n terms has in any order an error of about
  u sqrt(n) |x| at least, if its terms do not cancel, so that is added, n being the tokens of the batch.

A layout agrees if |x - x*| <= SAFETY e + u sqrt(n) |x*|. The samples are few draws of a distribution with the layout's
own scale; SAFETY covers that they are few, and that a layout rounds more often. A mistake in a sum changes x by a part
of itself: by 1/n at the least, where one term of n is lost.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from roxxel_dist.layouts.layout import Layout
from roxxel_dist.layouts.one_step import GRADIENT, LOSS, Arrays, Outcome, StepProgram, Weights
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.step import LossFn

SAMPLES = 2
"""K: runs with parameters moved by rounding."""
SAFETY = 10.0
OTHER = 100.0
"""How many bounds the float64 run may be off before it is another function: code that looks at types."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A step on one device."""

    exact: Arrays
    """By name, as an `Outcome` has them; floating ones in float64."""
    error: Mapping[str, float]
    """e: of each floating one."""
    unit: float
    """u."""
    terms: int
    """n."""
    drawn: Mapping[str, int]
    note: str = ""
    """Where there is no float64 run: why."""

    def bound(self, name: str) -> float:
        """How far from `exact` a layout may be, as a Euclidean norm; 0 for integers."""
        if name not in self.error:
            return 0.0
        return SAFETY * self.error[name] + self.unit * self.terms**0.5 * norm(self.exact[name])


@dataclass(frozen=True, kw_only=True)
class ReferencePrograms:
    """What a reference is measured with."""

    program: StepProgram
    in_float64: StepProgram | None
    why: str
    """Why there is none of float64, where one was asked for."""
    unit: float

    @classmethod
    def compile_reference(
        cls,
        model: Any,
        loss_fn: LossFn,
        layout: Layout,
        weights: Weights,
        batch: Any,
        *,
        unit: float,
        in_float64: bool = True,
    ) -> "ReferencePrograms":
        """The programs for a step; what the model or the loss raises passes.

        Without `in_float64`, and where the model does not take it, x* is the run as it is, x_0.
        """
        program, exact, why = StepProgram.compile_program(model, loss_fn, layout, weights, batch), None, ""
        try:
            if in_float64:
                with jax.enable_x64(True):
                    exact = StepProgram.compile_program(model, loss_fn, layout, weights, batch, wide=True)
        except Exception as error:  # of whatever kind: the model's own code is traced with types it may not expect
            why = first_line(error)
        return cls(program=program, in_float64=exact, why=why, unit=unit)

    def run(self) -> Reference:
        """The reference; raises UserError where two runs differ: the loss is random by itself."""
        program, unit = self.program, self.unit
        first, again = program.run(), program.run()
        tokens = jax.tree.leaves(program.batch)[0]
        terms, largest = tokens.size, int(tokens.max())
        one, two = (float(outcome.values[LOSS]) for outcome in (first, again))
        if not np.isfinite(one):
            raise UserError(
                f"the loss is {one} on one device, with the weights of the seed: correct the model or the loss first. "
                f"Token ids go up to {largest}: the model's vocabulary must hold them"
            )
        if abs(one - two) > SAFETY * unit * terms**0.5 * abs(one):
            raise UserError(
                f"the loss is random by itself: two runs of the same step on one device differ ({one:.9g} and "
                f"{two:.9g}). Draw noise from keys of the model's nnx.Rngs, so that a step is a function of its state "
                f"and its batch"
            )
        samples = [first, *(program.run(perturb(program.weights.params, unit, seed)) for seed in range(SAMPLES))]
        near, why = reference_of_samples(first.values, samples, unit, terms, first.drawn), self.why
        if self.in_float64 is not None:
            try:
                with jax.enable_x64(True):
                    exact = self.in_float64.run().values
            except Exception as error:  # of whatever kind: of the compiler, or of code that is called back
                why = first_line(error)
            else:
                return _in_float64(near, first, exact, samples)
        return replace(near, note=f"no float64 run ({why}): bounds are of float32 runs alone") if why else near

    def run_with_noise(self, streams: Collection[str], terms: int) -> Reference:
        """The reference of a step in which these random streams draw; x* is the run as it is."""
        program, params = self.program, self.program.weights.params
        first = program.run(noise=streams)
        others = [program.run(perturb(params, self.unit, seed), noise=streams) for seed in range(SAMPLES)]
        return reference_of_samples(first.values, [first, *others], self.unit, terms, first.drawn)


@dataclass
class Truth:
    """What a batch gives on one device, measured when it is asked for."""

    programs: ReferencePrograms
    order: list[str]
    """Parameters as the backward pass finishes them."""
    lines: dict[str, list[str]]
    """Random stream -> the lines of the user's code that draw from it."""
    reference: Reference | None = None
    with_noise: dict[tuple[str, ...], Reference] = field(default_factory=dict)
    """By the streams that draw."""

    def measure(self) -> Reference:
        """The reference without noise; measured once."""
        self.reference = self.reference or self.programs.run()
        return self.reference

    def measure_with_noise(self, streams: tuple[str, ...]) -> Reference:
        """The reference with the noise of these streams; measured once."""
        if streams not in self.with_noise:
            self.with_noise[streams] = self.programs.run_with_noise(streams, self.measure().terms)
        return self.with_noise[streams]


def first_line(error: Exception) -> str:
    """The first line of an error, with its kind where that is no mistake of the user's."""
    first = next(iter(str(error).strip().splitlines()), "")
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


def _in_float64(near: Reference, first: Outcome, exact: Arrays, samples: list[Outcome]) -> Reference:
    """The reference with x* of a float64 run, unless that computes another function."""
    far = [name for name in near.error if norm(to_float64(exact[name]) - near.exact[name]) > OTHER * near.bound(name)]
    if any(name == LOSS or name.startswith(GRADIENT) for name in far):
        note = f"in float64 the model computes something else ({far[0]}): bounds are of float32 runs alone"
        return replace(near, note=note)
    values = {name: exact[name] if name in near.error else value for name, value in first.values.items()}
    return reference_of_samples(values, samples, near.unit, near.terms, near.drawn)


def reference_of_samples(
    exact: Arrays, samples: list[Outcome], unit: float, terms: int, drawn: Mapping[str, int]
) -> Reference:
    """The reference of x*, with an error measured by samples of it."""
    floating = [
        name
        for name, value in exact.items()
        if np.issubdtype(np.asarray(value).dtype, np.floating) or _is_narrow(value)
    ]
    centre = {name: to_float64(value) if name in floating else value for name, value in exact.items()}
    error = {
        name: float(np.sqrt(np.mean([norm(to_float64(sample.values[name]) - centre[name]) ** 2 for sample in samples])))
        for name in floating
    }
    return Reference(exact=centre, error=error, unit=unit, terms=terms, drawn=drawn)


def perturb(params: Mapping[str, np.ndarray], unit: float, seed: int) -> Arrays:
    """Parameters, each moved up or down by `unit` of itself at random."""
    rng = np.random.default_rng(seed)
    # An ulp at least: a smaller change of a float32 would be lost.
    share = max(unit, 2.0**-23)
    return {
        name: (value * (1 + share * rng.choice(np.array([-1.0, 1.0]), value.shape))).astype(value.dtype)
        for name, value in params.items()
    }


def to_float64(value: Any) -> Any:
    """A floating array in float64; another one as it is."""
    value = np.asarray(value)
    return value.astype(np.float64) if np.issubdtype(value.dtype, np.floating) or _is_narrow(value) else value


def _is_narrow(value: Any) -> bool:
    """Whether it is of bfloat16 and the like, which numpy does not know as floating."""
    return np.asarray(value).dtype.name.startswith(("bfloat", "float8"))


def norm(value: Any) -> float:
    """Euclidean, over all elements; NaN counts as infinite, but for integers: how many are not 0."""
    if np.issubdtype(value.dtype, np.floating):
        size = float(np.sqrt(np.sum(np.square(value))))
        return size if np.isfinite(size) else float("inf")
    return float(np.count_nonzero(value))
