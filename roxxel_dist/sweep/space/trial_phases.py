"""The phases of a trial: those of the config, with the shares and the ends that are among its parameters."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import floor
from typing import Any

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.constraints import InfeasibleError
from roxxel_dist.sweep.space.distributions import is_number
from roxxel_dist.sweep.space.extras import END, SHARE


def is_of_phases(name: str) -> bool:
    """Whether a parameter of a trial is a share or the end of a phase, such as mixture.1.code or phase_end.1, or holds
    some, as mixture does where W&B's YAML nests them."""
    return f"{name}.".startswith((SHARE, END))


def flatten_phase_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters whose shares and ends, where W&B's YAML nests them, have names with points: mixture.1.code."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        nested = isinstance(value, Mapping) and is_of_phases(name)
        found |= (
            flatten_phase_params({f"{name}.{key}": inner for key, inner in value.items()}) if nested else {name: value}
        )
    return found


def phases_of_trial(
    phases: Sequence[Mapping[str, Any]] | None,
    params: Mapping[str, Any],
    groups: Mapping[int, Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """The phases of the config, as in YAML, with `weights` and `steps` from the shares and ends among the parameters of
    a trial.

    `groups` has the phases with the shares of mixture.P.NAME, by P; that one alone where not given. Raises ValueError
    where there is no such phase, it has no `steps`, or a phase gets no step.
    """
    from roxxel_dist.curriculum.phases import numbers_in  # numpy: not for --help

    found = [numbers_in(phase) for phase in phases or ()]
    shares: dict[int, dict[str, float]] = {}
    ends: dict[int, float] = {}
    for name, value in params.items():
        if name.startswith(SHARE):
            phase, _, data = name.removeprefix(SHARE).partition(".")
            shares.setdefault(_number(name, phase, found), {})[data] = value
        elif name.startswith(END):
            ends[_number(name, name.removeprefix(END), found)] = value
    for first, weights in shares.items():
        for phase in (groups or {}).get(first, (first,)):
            found[phase - 1]["weights"] = weights
    for phase, steps in zip(found, steps_between(found, ends) if ends else (), strict=bool(ends)):
        phase["steps"] = steps
    return found


def steps_between(phases: Sequence[Mapping[str, Any]], ends: Mapping[int, float]) -> list[int]:
    """The steps of each phase, where some end at another share of all steps than in the config. Raises ValueError where
    a phase has no `steps`, or an end is no share, or that of the last phase; InfeasibleError where a phase gets no
    step."""
    for number, end in ends.items():
        if not (is_number(end) and 0 < end < 1):
            raise UserError(f"phase_end.{number}: {end!r} must be a share of all steps, between 0 and 1")
        if number == len(phases):
            raise UserError(f"phase_end.{number}: phase {number} is the last one, which ends with the training")
    stops = [0]
    for number, phase in enumerate(phases, 1):
        if type(phase.get("steps")) is not int:
            raise UserError(f"phase_end: phase {number} has no steps: give each phase steps, not epochs")
        stops.append(stops[-1] + phase["steps"])
    total = stops[-1]
    stops = [floor(ends[number] * total + 0.5) if number in ends else stop for number, stop in enumerate(stops)]
    steps = [stop - start for start, stop in pairwise(stops)]
    if min(steps) < 1:
        phase = steps.index(min(steps)) + 1
        raise InfeasibleError(
            f"phase {phase} would end at step {stops[phase]} of {total}, and begin at {stops[phase - 1]}"
        )
    return steps


def _number(name: str, phase: str, phases: Sequence[Any]) -> int:
    if not phase.isdecimal() or not 1 <= int(phase) <= len(phases):
        there = f"has {len(phases)} phase(s)" if phases else "has no phases"
        raise UserError(f"{name}: there is no phase {phase!r}, the config {there}: they are counted from 1")
    return int(phase)
