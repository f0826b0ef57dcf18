"""The confirmation of a mixture: the best of a study and its two baselines, trained for longer with other seeds.

It is a study of its own, in the folder `confirm` of the study, and what is expected of it is written before it begins.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config, load_yaml
from roxxel_dist.sweep.space.extras import SHARE
from roxxel_dist.sweep.study.folder import Study, flat, read_study
from roxxel_dist.sweep.study.journal import Trial

FOLDER, EXPECTED = "confirm", "confirm.yaml"
"""The names, in the folder of the study, of the confirmation and of what it is to confirm."""
SEEDS = 3
BEST, NATURAL, UNIFORM = "best", "natural", "uniform"

Gains = Mapping[str, tuple[float, float, float]]
"""The metric of the best less that of each baseline: value, and the ends of the interval."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The trainings of a confirmation, and what the study says of them."""

    factor: int
    """The number of times that the steps of a trial are trained."""
    trial: int
    """The best one."""
    seeds: list[int]
    phases: dict[str, list[dict[str, Any]]]
    """The phases by mixture: BEST, NATURAL and UNIFORM, those with the same shares once."""
    gains: dict[str, list[float]]
    """Gains by baseline; empty where no law could be fitted."""

    @classmethod
    def read(cls, study: Path) -> "Expected | None":
        """The expectation of the study in a folder; None where there is none."""
        file = study / EXPECTED
        return cls(**load_yaml(file)) if file.is_file() else None

    def write(self, study: Path) -> None:
        """Write it, whole or not at all."""
        import yaml

        write_file(study / EXPECTED, yaml.safe_dump(asdict(self), sort_keys=False))

    @property
    def values(self) -> dict[str, Any]:
        """The parameters of the sweep that trains it."""
        return {"phases": {"values": list(self.phases.values())}, "seed": {"values": self.seeds}}

    def measured(self, study: Path) -> dict[str, dict[int, float]]:
        """The values of the trials that have one, by mixture and seed; `study` is the folder of the confirmation."""
        found: dict[str, dict[int, float]] = {name: {} for name in self.phases}
        for trial in read_study(study).done:
            for name, phases in self.phases.items():
                if trial.state == "done" and trial.params["phases"] == phases:
                    found[name][trial.params["seed"]] = float(trial.value or 0.0)
        return found


def shares_of(trial: Trial) -> dict[tuple[int, str], float]:
    """The shares of a trial by (first phase of the entry, data set); empty where its sweep has no mixtures."""
    found = {}
    for name, value in flat(trial.params).items():
        if name.startswith(SHARE):
            phase, _, data_set = name.removeprefix(SHARE).partition(".")
            found[int(phase), data_set] = float(value)
    return found


def baselines(study: Study) -> dict[str, Trial]:
    """The trials with natural and with uniform shares; where these are the same, the first alone."""
    trials, spaces = study.history.trials, study.sweep.space.mixtures
    found = {NATURAL: trials[0]} if 0 in trials else {}
    if not found or 1 not in trials:
        return found
    shares = shares_of(trials[0])
    even = {(one.phases[0], name): share for one in spaces for name, share in zip(one.names, one.uniform, strict=True)}
    return found if shares == even else {**found, UNIFORM: trials[1]}


def expected_of(
    study: Study, best: Config, factor: int, gains: Gains, groups: Mapping[int, tuple[int, ...]]
) -> Expected:
    """The trainings that confirm the best trial of a study with mixtures, whose first two trials are the baselines.

    `best` is its config, `factor` how many times the steps, `gains` what the law says, and `groups` has, by first phase
    of an entry, all phases with its shares. Raises ValueError where the study has no mixtures, the best trial is a
    baseline, so that there is nothing to compare, or the length of its phases is not known.
    """
    if factor < 1:
        raise UserError(f"--confirm {factor}: must be 1 or more times the steps of a trial")
    winner = study.done[0]
    if not study.sweep.space.mixtures:
        raise UserError(f"--confirm {factor}: {study.place} searches no mixtures: it is for a study that does")
    phases = lengthen_phases(best, factor)
    made = {BEST: phases}
    for name, trial in baselines(study).items():
        others = replace_shares(phases, shares_of(trial), groups)
        if all(others != known for known in made.values()):
            made[name] = others
    if len(made) < 2:
        raise UserError(f"--confirm {factor}: the best trial, {winner.number}, is a baseline itself: search on first")
    seeds = [best.seed + 1 + number for number in range(SEEDS)]
    kept = {name: list(gain) for name, gain in gains.items() if name in made}
    return Expected(factor=factor, trial=winner.number, seeds=seeds, phases=made, gains=kept)


def lengthen_phases(config: Config, factor: int) -> list[dict[str, Any]]:
    """The phases of a config, each `factor` times as long, with their weights above 0 first: that is what differs."""
    made = []
    for phase in config.to_dict()["phases"] or []:
        lasting = {name: phase[name] * factor for name in ("steps", "epochs") if phase.get(name) is not None}
        weights = {"weights": _above_0(phase["weights"])} if phase.get("weights") else {}
        made.append(weights | {name: value for name, value in phase.items() if name != "weights"} | lasting)
    return made


def replace_shares(
    phases: list[dict[str, Any]], shares: Mapping[tuple[int, str], float], groups: Mapping[int, tuple[int, ...]]
) -> list[dict[str, Any]]:
    """Phases with other shares, those of 0 left out."""
    made = [dict(phase) for phase in phases]
    for first, members in groups.items():
        weights = _above_0({name: share for (phase, name), share in shares.items() if phase == first})
        for number in members:
            made[number - 1]["weights"] = dict(weights)
    return made


def _above_0(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if weight > 0}


def lengthen_config(config: Config, factor: int) -> Config:
    """A config whose warm-up, decay and last step, where it gives them in steps, are `factor` times as long. Its phases
    are those of the sweep that uses it."""
    given = {
        name: getattr(config, name) * factor
        for name in ("warmup_steps", "decay_steps", "max_steps")
        if getattr(config, name) is not None
    }
    return replace(config, **given)
