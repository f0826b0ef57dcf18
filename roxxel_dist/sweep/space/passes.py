"""The most passes over each data set, checked before a trial starts: in closed form from its phases.

In a plan with passes apart (`curriculum/apart.py`) a phase reads each data set as often as its quota of the blend says,
so the passes of all phases over a set follow from steps, batch sizes and shares: no plan is made to refuse a mixture.
The plan itself is asked last (`check_plan`), since it gives up the rest of a chunk where rows change their length.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from roxxel_dist.curriculum.mixture import cumulative_weights, quota
from roxxel_dist.curriculum.phases import Phase, phases_of
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.units import APART, Ranges, rows_in_a_pass
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.curriculum import open_data_sets
from roxxel_dist.sweep.space.constraints import InfeasibleError
from roxxel_dist.sweep.space.extras import END, SHARE, DataExtras, MixtureSpec
from roxxel_dist.sweep.space.mixture import MixtureSpace, round_shares, split_shares
from roxxel_dist.sweep.space.trial_phases import phases_of_trial

ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class PassBudget:
    """The passes that the trials of a sweep may make over each data set.

    `extras` is what is searched of the data; `phases` are those of the config, as in YAML, each with `steps`; `ranges`
    are the training part of each data set: (start, length) of each range, in tokens.
    """

    extras: DataExtras
    phases: Sequence[Mapping[str, Any]]
    ranges: Mapping[str, Ranges]
    _rows: dict[tuple[str, int], int] = field(default_factory=dict)

    @cached_property
    def limits(self) -> dict[str, float]:
        """The most passes over each data set that has such a limit."""
        limits: dict[str, float] = {}
        for spec in self.extras.mixtures:
            for name in spec.bounds if spec.max_passes is not None else ():
                limits[name] = min(limits.get(name, math.inf), spec.max_passes or math.inf)
        return limits

    @cached_property
    def tokens(self) -> dict[str, int]:
        """The tokens to train on, of each data set."""
        return {name: sum(length for _, length in ranges) for name, ranges in self.ranges.items()}

    @cached_property
    def _longest(self) -> int:
        return max(phase.seq_len or 0 for group in self.phases for phase in phases_of(group))

    def rows_of(self, name: str, seq_len: int) -> int:
        """Rows of so many tokens in a pass over a data set."""
        if (name, seq_len) not in self._rows:
            self._rows[name, seq_len] = rows_in_a_pass(self.ranges[name], seq_len, self._longest)
        return self._rows[name, seq_len]

    def trial_phases(self, params: Mapping[str, Any]) -> list[Phase]:
        """The phases of a trial, ramps as several."""
        given = phases_of_trial(self.phases, params, self.extras.groups)
        return [phase for group in given for phase in _ramp(group)]

    def passes(self, params: Mapping[str, Any]) -> dict[str, float]:
        """Passes over each data set in a trial: the rows that its plan reads over those of a pass, exactly."""
        passes = dict.fromkeys(self.ranges, 0.0)
        for phase in self.trial_phases(params):
            shape = phase.shape
            names, weights = zip(*shape.weights, strict=True)
            counts = quota(cumulative_weights(weights), shape.steps * shape.items_per_step)
            for name, items in zip(names, counts, strict=True):
                passes[name] += items * shape.rows_per_item / max(1, self.rows_of(name, shape.seq_len))
        return passes

    def check(self, params: Mapping[str, Any]) -> None:
        """Raises InfeasibleError for a trial that would read a data set too often, with the numbers."""
        if not self.extras.ends:
            self._check_roughly(params)
        for name, passes in self.passes(params).items():
            if passes > (limit := self.limits.get(name, math.inf)) + ROUNDING:
                raise InfeasibleError(self._too_many(name, passes, limit))

    def _check_roughly(self, params: Mapping[str, Any]) -> None:
        """The same but for rounding, in a tenth of the time: most points of a narrow space end here."""
        each, fixed, rounding = self._full_loads
        used = fixed - rounding
        for spec, load in zip(self.extras.mixtures, each, strict=True):
            shares = [params.get(f"{SHARE}{spec.phases[0]}.{name}", 0.0) for name in self.tokens]
            used = used + load * shares
        for name, passes, limit in zip(self.tokens, used.tolist(), self._limits.tolist(), strict=True):
            if passes > limit + ROUNDING:
                raise InfeasibleError(self._too_many(name, passes, limit))

    def _too_many(self, name: str, passes: float, limit: float) -> str:
        made = f"{passes:.4g} passes over {name!r} ({self.tokens[name]:,} tokens)"
        return f"max_passes is {limit:g}, and {made} would be made"

    @cached_property
    def _full_loads(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._loads([phase["steps"] for phase in self.phases])

    @cached_property
    def _limits(self) -> np.ndarray:
        return np.array([self.limits.get(name, math.inf) for name in self.tokens])

    def check_plan(self, params: Mapping[str, Any]) -> None:
        """Raises InfeasibleError by the plan itself, which may begin a pass sooner where rows change their length."""
        if not self.limits:
            return
        self.check(params)
        plan = Plan([phase.shape for phase in self.trial_phases(params)], self.ranges, 0, order=APART)
        last = plan.segment(plan.total_steps - 1)
        for name, cursor in last.after(last.steps).items():
            begun = cursor.pass_index + (cursor.used > 0 or cursor.windows > 0)
            if begun > math.ceil(self.limits.get(name, math.inf)) if name in self.limits else False:
                raise InfeasibleError(
                    f"max_passes is {self.limits[name]:g}, and pass {begun} over {name!r} would begin"
                )

    def least_items(self, number: int) -> int:
        """Rows, or with `blend: step` steps, that a phase deals at least, by the ends searched; of a ramp its longest
        part, as each has shares of its own."""
        given = {**self.phases[number - 1], "steps": self._least_steps()[number - 1]}
        return max(phase.shape.steps * phase.shape.items_per_step for phase in phases_of(given))

    # -- what the limits leave of each simplex

    def _least_steps(self) -> list[int]:
        """The fewest steps that each phase of the config may have, by the ends that are searched."""
        total, stop = sum(phase["steps"] for phase in self.phases), 0
        spans = [(0, 0)]
        for number, phase in enumerate(self.phases, 1):
            stop += phase["steps"]
            kind = self.extras.ends[number].distribution if number in self.extras.ends else None
            spans.append(
                (stop, stop) if kind is None else (round(kind.quantile(0.0) * total), round(kind.quantile(1.0) * total))
            )
        least = [max(1, low - before) for (_, before), (low, _) in pairwise(spans)]
        return [_enough(phase, steps) for phase, steps in zip(self.phases, least, strict=True)]

    def _loads(self, steps: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The passes that so many steps of each phase come to, over the data sets of all mixtures: those of a share of
        1, float64[mixtures, sets]; those of phases with weights of their own, and those that rounding may add,
        float64[sets]."""
        names = list(self.tokens)
        each = np.zeros((len(self.extras.mixtures), len(names)))
        fixed, rounding = np.zeros((2, len(names)))
        of_phase = {phase: row for row, spec in enumerate(self.extras.mixtures) for phase in spec.phases}
        for number, (given, count) in enumerate(zip(self.phases, steps, strict=True), 1):
            for phase in _ramp({**given, "steps": count}):
                shape = phase.shape
                rows = np.array([max(1, self.rows_of(name, shape.seq_len)) for name in names])
                load = shape.steps * shape.batch_size / rows
                shares = np.array([dict(shape.weights).get(name, 0.0) for name in names])
                if number in of_phase:
                    each[of_phase[number]] += load
                    rounding += shape.rows_per_item / rows
                else:
                    fixed += load * shares / shares.sum()
                    rounding += (shares > 0) * shape.rows_per_item / rows
        return each, fixed, rounding

    def spaces(self) -> tuple[MixtureSpace, ...]:
        """The space of each mixture, with caps lowered to what the limits leave. Raises ValueError where they leave
        nothing; it says how many passes would be needed."""
        names = list(self.tokens)
        each, fixed, rounding = self._loads(self._least_steps())
        floors = [[spec.bounds.get(name, (0.0, 0.0))[0] for name in names] for spec in self.extras.mixtures]
        least = (each * floors).sum(0)
        needed = self._needed(each, fixed + rounding)
        spaces = []
        for row, spec in enumerate(self.extras.mixtures):
            caps = {}
            for at, name in enumerate(names):
                if name in spec.bounds and name in self.limits and each[row, at] > 0:
                    others = least[at] - each[row, at] * spec.bounds[name][0]
                    left = self.limits[name] - fixed[at] - rounding[at] - others
                    caps[name] = max(0.0, left / each[row, at])
            lows = {name: low for name, (low, _) in spec.bounds.items()}
            highs = {name: min(cap, caps.get(name, 1.0)) for name, (_, cap) in spec.bounds.items()}
            short = [name for name in highs if highs[name] < lows[name]]
            if needed is not None or short or sum(highs.values()) < 1:
                self._refuse(spec, lows, highs, dict(zip(names, fixed.tolist(), strict=True)), needed)
            spaces.append(spec.space(caps, self.tokens))
        return tuple(spaces)

    def _needed(self, each: np.ndarray, fixed: np.ndarray) -> float | None:
        """The least `max_passes` for all data sets with which there is any mixture; None where the limits do."""
        names, count = list(self.tokens), len(self.extras.mixtures)
        if not self.limits:
            return None
        from scipy.optimize import linprog

        size = count * len(names)
        bounds = [spec.bounds.get(name, (0.0, 0.0)) for spec in self.extras.mixtures for name in names]
        sums = np.concatenate([np.kron(np.eye(count), np.ones(len(names))), np.zeros((count, 1))], 1)
        limited = [at for at, name in enumerate(names) if name in self.limits]
        loads = np.zeros((len(limited), size + 1))
        for line, at in enumerate(limited):
            for row in range(count):
                loads[line, row * len(names) + at] = each[row, at]

        def solved(cost: np.ndarray, scale: np.ndarray) -> Any:
            loads[:, -1] = scale
            right = -fixed[limited] if scale.any() else limits - fixed[limited]
            return linprog(cost, loads, right, sums, np.ones(count), [*bounds, (0, None)])

        limits = np.array([self.limits[names[at]] for at in limited])
        if solved(np.zeros(size + 1), np.zeros(len(limited))).success:
            return None
        cost = np.zeros(size + 1)
        cost[-1] = 1.0
        found = solved(cost, -np.ones(len(limited)))
        return float(found.x[-1]) if found.success else math.inf

    def _refuse(
        self,
        spec: MixtureSpec,
        lows: Mapping[str, float],
        highs: Mapping[str, float],
        fixed: Mapping[str, float],
        needed: float | None,
    ) -> NoReturn:
        own = [phase for number in spec.phases for phase in phases_of(self.phases[number - 1])]
        reads = sum((phase.steps or 0) * (phase.batch_size or 0) * (phase.seq_len or 0) for phase in own)
        others = {name: f", {passes:.3g} passes in other phases" for name, passes in fixed.items() if passes > 0}
        left = ", ".join(
            f"{name} ({self.tokens[name]:,} tokens{others.get(name, '')}) {lows[name]:.4g} to {highs[name]:.4g}"
            for name in highs
        )
        cure = "fewer steps, or more data"
        if needed is not None and math.isfinite(needed):
            cure = f"max_passes above {math.ceil(needed * 100 + 1e-6) / 100:g}, {cure}"
        raise UserError(
            f"max_passes leaves no mixture of phases {list(spec.phases)}, which read {reads:,} tokens: the shares may "
            f"be {left}, and must sum to 1{' in all mixtures together' if len(self.extras.mixtures) > 1 else ''}: use "
            f"{cure}"
        )

    # -- the baselines

    def feasible_shares(
        self, spaces: Sequence[MixtureSpace], shares: Sequence[np.ndarray], params: Mapping[str, Any]
    ) -> tuple[np.ndarray, ...]:
        """Shares moved by as little as the limits ask for, at the ends of phases among the parameters `params` of a
        trial.

        `shares` are float64[k] of each mixture, allowed by its own space; so are the results: those with the least sum
        of KL(r || shares) that keep all limits together.
        """
        pairs = zip(spaces, shares, strict=True)
        given = {key: share for space, row in pairs for key, share in zip(space.keys, row.tolist(), strict=True)}
        try:
            self.check({**params, **given})
        except InfeasibleError:
            pass
        else:
            return tuple(shares)
        from scipy.optimize import minimize

        ends = {name: value for name, value in params.items() if name.startswith(END)}
        steps = [phase["steps"] for phase in phases_of_trial(self.phases, ends)]
        each, fixed, rounding = self._loads(steps)
        names = list(self.tokens)
        wanted = np.concatenate(shares)
        at = [[names.index(name) for name in space.names] for space in spaces]
        limits = self._limits
        limited = np.flatnonzero(np.isfinite(limits))

        def left(flat: np.ndarray) -> np.ndarray:
            used = fixed + rounding
            for row, (columns, part) in enumerate(zip(at, split_shares(spaces, flat), strict=True)):
                used[columns] = used[columns] + each[row, columns] * part
            return (limits - used)[limited]

        def kl(flat: np.ndarray) -> tuple[float, np.ndarray]:
            safe = np.maximum(flat, 1e-12)
            ratio = np.log(safe / np.maximum(wanted, 1e-12))
            return float((safe * ratio).sum()), ratio + 1

        sums = {"type": "eq", "fun": lambda flat: np.array([part.sum() - 1 for part in split_shares(spaces, flat)])}
        bounds = [pair for space in spaces for pair in zip(space.floors, space.caps, strict=True)]
        found = minimize(
            kl, wanted, jac=True, method="SLSQP", bounds=bounds, constraints=[sums, {"type": "ineq", "fun": left}]
        )
        pairs = zip(split_shares(spaces, found.x), spaces, strict=True)
        return tuple(round_shares(part, space.floors, space.caps) for part, space in pairs)


def _ramp(phase: Mapping[str, Any]) -> list[Phase]:
    """The phases of `phases_of`. Raises InfeasibleError where a size of a ramp gets no step."""
    try:
        return phases_of(phase)
    except UserError as error:
        raise InfeasibleError(str(error)) from error


def _enough(phase: Mapping[str, Any], steps: int) -> int:
    """The number of steps, or as many as a ramp needs for a step of each size."""
    for count in range(steps, phase["steps"]):
        with suppress(InfeasibleError):
            _ramp({**phase, "steps": count})
            return count
    return max(steps, phase["steps"])


def training_ranges(config: Any, data_path: str | Path | None) -> dict[str, Ranges]:
    """The training part of each data set of a `Config`. Raises ValueError where it is text, or cannot be opened."""
    path = config.primary_path(data_path)
    if path is None or not is_tokens(path):
        raise UserError(
            f"mixtures: {path} is text, whose tokens are not counted yet: make shards of it first "
            f"(`roxxel-dist data build {path} --out DIR`)"
        )
    with ExitStack() as held:
        data = held.enter_context(Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig)))
        sets = {name: held.enter_context(each) for name, each in open_data_sets(config, "datasets", data).items()}
        train, _ = data.split(0 if config.validation else config.val_fraction)
        return {"self": list(train.ranges), **{name: list(each.ranges) for name, each in sets.items()}}
