"""`mixtures` and `phase_ends` of a sweep, with the config and its data: refused before the first trial, or resolved."""

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from roxxel_dist.curriculum.phases import numbers_in, phases_of
from roxxel_dist.data.files.discovery import names_objects
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.extras import DataExtras
from roxxel_dist.sweep.space.passes import PassBudget, training_ranges
from roxxel_dist.sweep.space.sweep_file import Sweep
from roxxel_dist.sweep.study.journal import Trial

SAME_SHARE = 2e-6
"""Shares that differ by less are the same: they have six decimals."""
SAME_MOVED = 2e-3
"""The same of shares that a budget of passes moved: where the solver ends differs with the version of scipy."""
DECIDED = ("phases", "passes", "datasets", "validation", "val_fraction")
"""Fields that must be the same in all trials of a search over the data."""


def with_data(sweep: Sweep, config: Any, data_path: str | Path | None, fields: set[str]) -> Sweep:
    """The sweep over the mixtures that its data allows; as it is without `mixtures` and `phase_ends`.

    `config` is the `Config` that trials begin from, `data_path` that of the primary data set if it is not in
    `datasets`, and `fields` those of the config that are parameters. Raises ValueError where these cannot be searched
    so, or the passes leave no mixture.
    """
    extras = sweep.data
    if not extras:
        return sweep
    for name in DECIDED:
        if name in fields:
            raise UserError(
                f"parameters.{name}: {extras.key} needs the same {name} in all trials: give it in the config"
            )
    phases = _phases(extras, config)
    _check_ends(extras, phases)
    if not extras.mixtures:
        return sweep
    _check_names(extras, config)
    _check_validation(sweep, config)
    _check_one_name(extras, config, data_path)
    budget = PassBudget(extras=extras, phases=phases, ranges=training_ranges(config, data_path))
    _check_rows(budget)
    return sweep.with_budget(budget)


def refuse_led(sweep: Sweep, *, program: bool, server: bool) -> None:
    """Raises UserError where another program trains, or W&B's server chooses: neither knows phases or a simplex."""
    if not sweep.data or not (program or server):
        return
    key = sweep.data.key
    if program:
        raise UserError(f"{key}: the sweep runs a program of your own, which has no phases: leave {key} out")
    raise UserError(
        f"{key}: W&B's server leads this sweep and draws each parameter alone, so its shares do not sum to 1. Use "
        f"--wandb offline, or parameters such as mixture.1.code, whose values are weights"
    )


def _phases(extras: DataExtras, config: Any) -> list[dict[str, Any]]:
    """The phases of the config, checked against the mixtures and ends."""
    phases = [numbers_in(phase) for phase in config.phases or ()]
    if not phases:
        raise UserError(
            "mixtures and phase_ends: the config has no phases: give one at least, such as "
            "phases: [{steps: 1000, batch_size: 16, seq_len: 257}]"
        )
    for number, phase in enumerate(phases, 1):
        if type(phase.get("steps")) is not int:
            raise UserError(
                f"phases: phase {number} has {'epochs' if 'epochs' in phase else 'no steps'}: with mixtures or "
                f"phase_ends each phase must have steps, so that all trials train as long"
            )
    for entry, spec in enumerate(extras.mixtures, 1):
        for number in spec.phases:
            if number > len(phases):
                raise UserError(f"mixtures.{entry}.phases: there is no phase {number}, the config has {len(phases)}")
            if (weights := phases[number - 1].get("weights")) is not None:
                given = ", ".join(f"{name} {weight}" for name, weight in dict(weights).items())
                raise UserError(
                    f"phases: phase {number} has weights ({given}), and mixtures.{entry} searches its shares: leave "
                    f"one of the two out"
                )
    return phases


def _check_ends(extras: DataExtras, phases: list[dict[str, Any]]) -> None:
    """Raises UserError for the end of a phase that cannot be moved so."""
    for number in extras.ends:
        if len(phases) == 1:
            raise UserError(f"phase_ends.{number}: the config has one phase, which ends with the training: give two")
        if number >= len(phases):
            what = "is the last one, and ends with the training" if number == len(phases) else "does not exist"
            raise UserError(f"phase_ends.{number}: phase {number} of {len(phases)} {what}")
    total, stop, before, earliest = sum(phase["steps"] for phase in phases), 0, 0, 0
    for number, phase in enumerate(phases, 1):
        stop += phase["steps"]
        low = high = stop
        if number in extras.ends:
            kind = extras.ends[number].distribution
            low, high = round(kind.quantile(0.0) * total), round(kind.quantile(1.0) * total)
        earliest = max(low, earliest + 1)
        if earliest > high:
            begin = f"phase {number - 1} at step {before} or after" if number > 1 else "has no step then"
            raise UserError(
                f"phase_ends: phase {number} ends at step {high} of {total} or before, and {begin}: ends must increase "
                f"from phase to phase"
            )
        before = earliest


def _check_names(extras: DataExtras, config: Any) -> None:
    known = ["self", *(name for name in config.datasets or {} if name != "self")]
    for entry, spec in enumerate(extras.mixtures, 1):
        for name in spec.bounds:
            if name not in known:
                raise UserError(
                    f"mixtures.{entry}.datasets: there is no data set {name!r}: the config has {', '.join(known)}; "
                    f"name it in `datasets`"
                )


def _check_one_name(extras: DataExtras, config: Any, data_path: str | Path | None) -> None:
    """Raises UserError where two names are one text: it would be read in two orders, and its passes counted apart."""
    paths = {**(config.datasets or {}), "self": config.primary_path(data_path)}
    names: dict[str, str] = {}
    for name in {name: None for spec in extras.mixtures for name in spec.bounds}:
        path = paths[name]
        place = str(path) if path is None or names_objects(path) else str(Path(path).resolve())
        if (first := names.setdefault(place, name)) != name:
            raise UserError(
                f"mixtures: {first!r} and {name!r} are both {place}: name each data set once, as passes are counted by "
                f"name"
            )


def _check_rows(budget: PassBudget) -> None:
    """Raises UserError for a data set without a row for a phase, and for a floor that comes to no row of its phases."""
    for entry, spec in enumerate(budget.extras.mixtures, 1):
        items = max(budget.least_items(number) for number in spec.phases)
        for name, (low, high) in spec.bounds.items():
            key = f"mixtures.{entry}.datasets.{name}"
            for seq_len in [phase.seq_len or 0 for n in spec.phases for phase in phases_of(budget.phases[n - 1])]:
                if high > 0 and not budget.rows_of(name, seq_len):
                    raise UserError(
                        f"{key}: it has {budget.tokens[name]:,} tokens to train on, and no row of seq_len {seq_len}: "
                        f"leave it out, use a smaller seq_len, or join its files with `roxxel-dist data build`"
                    )
            if 0 < low * items < 1:
                raise UserError(
                    f"{key}.min: {low:g} of the {items:,} rows of a phase (steps, where it has blend: step) is less "
                    f"than one, so that it might not be read: use at least {ceil(1e6 / items) / 1e6:g}, or 0"
                )


def _check_validation(sweep: Sweep, config: Any) -> None:
    """Raises UserError where the metric is measured on text of one data set alone."""
    metric = sweep.metric
    if not config.validation and metric.startswith(("val_", "mean_")):
        others = ", ".join(name for spec in sweep.data.mixtures[:1] for name in spec.bounds if name != "self")
        raise UserError(
            f"metric.name: {metric} would be measured on the held-out part of self alone, which has no text of "
            f"{others}: name validation text of each in `validation`"
        )


def changed_data(sweep: Sweep, first: Trial | None) -> list[str]:
    """A line where the first trial of a study has natural shares that are not those of now."""
    space, budget = sweep.space, sweep.rules.budget
    if not space.mixtures or first is None:
        return []
    shares = space.baselines[0]
    natural = shares if budget is None else budget.feasible_shares(space.mixtures, shares, first.params)
    is_moved = any(np.any(share != own) for share, own in zip(shares, natural, strict=True))
    changed = [
        f"{name} {first.params[name]:.4g}, now {share:.4g}"
        for name, share in space.params_of(natural).items()
        if abs(first.params[name] - share) > (SAME_MOVED if is_moved else SAME_SHARE)
    ]
    if not changed:
        return []
    return [
        f"the data has changed since trial 0, whose natural shares were {'; '.join(changed)}: earlier and later trials "
        f"read other text, so compare them with care, or begin another study"
    ]
