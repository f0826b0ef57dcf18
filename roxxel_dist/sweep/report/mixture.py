"""What a study with mixtures found: its best shares beside natural and uniform ones, what the law says, and passes."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roxxel_dist.curriculum.phases import numbers_in
from roxxel_dist.place.directory import CONFIG, METRICS
from roxxel_dist.settings.config import RECORD, Config, load_yaml
from roxxel_dist.sweep.report.confirmation import Confirmation, confirmation
from roxxel_dist.sweep.report.surface import (
    INTERVAL,
    LEVEL,
    MORE,
    Draws,
    Estimate,
    Point,
    effects,
    gain,
    interactions,
    surface,
    told,
)
from roxxel_dist.sweep.space.mixture import MixtureSpace
from roxxel_dist.sweep.space.passes import PassBudget, training_ranges
from roxxel_dist.sweep.study.confirm import Expected, baselines, expected_of, shares_of
from roxxel_dist.sweep.study.folder import DATA_PATH, Study, StudyDir
from roxxel_dist.sweep.study.journal import Trial
from roxxel_dist.sweep.study.set_losses import SetLosses, set_losses
from roxxel_dist.train.log.csv_jsonl import read_rows
from roxxel_dist.utils.display import aligned

UNLIKELY = 0.05
"""Errors of the law that are by chance in fewer studies contradict it."""
HELD = {"law": (0.87, 0.97), "pairs": (0.93, 0.99), "beside": (0.58, 0.97)}
"""How many of a law's intervals held the truth in simulated studies (`tests/sweep/test_coverage.py`), the least and the
most of many kinds: where the losses follow the law, of these what two data sets do together, and where they do not and
the trials do not contradict it."""
PAIRS = 6
"""Pairs of data sets that the text shows; the page has all."""
LAW = "law"
"""Among the mixtures of an entry: the one that the law says is best."""
SET_LOSS = "val_loss/"
"""What the names of the validation losses of data sets begin with."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One mixture of the sweep."""

    space: MixtureSpace
    shares: dict[str, list[float]]
    """By mixture: the best trial's, "natural", "uniform", and LAW."""
    surface: list[Point] = field(default_factory=list)
    effects: list[Estimate] = field(default_factory=list)
    """By data set: the metric where `MORE` of the mixture gives way to it."""
    crossed: dict[str, list[Estimate]] = field(default_factory=dict)
    """The same of the loss of each validation set, by its name."""
    interactions: list[tuple[tuple[int, int], Estimate]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Mixtures:
    """The part of a report that is about mixtures."""

    metric: str
    entries: list[Entry]
    goal: str
    trials: int
    """Those that the law was fitted to; 0: too few."""
    chance: float | None = None
    """How often the errors of a right law would hang on shares as these do; None: not known."""
    whole: int
    """Trials that trained to their end."""
    seeds: int
    """How many seeds they have: the surface is that of these, and so are its intervals."""
    needed: int
    """As many of them a law needs."""
    others: tuple[str, ...]
    """Searched parameters beside the shares: the law is of their values in the best trial."""
    gains: dict[str, Estimate]
    """By baseline, and LAW: what the law says of the metric of the best less its own."""
    passes: dict[str, float]
    """Of the best trial, by data set; empty where its data is not here."""
    confirmation: Confirmation | None

    @property
    def misses(self) -> bool:
        """Whether the trials contradict the law: then its intervals hold less often than `LEVEL`."""
        return self.chance is not None and self.chance < UNLIKELY

    @property
    def interval(self) -> str:
        """What the law's intervals are called."""
        return "interval too narrow" if self.misses else INTERVAL

    def as_json(self) -> dict[str, Any]:
        """Everything that the report has of mixtures, for JSON."""
        return {
            "level": None if self.misses else LEVEL,
            "held": {name: list(ends) for name, ends in HELD.items()},
            "trials_of_law": self.trials,
            "chance_of_law": self.chance,
            "law_is_contradicted": self.misses,
            "trials_whole": self.whole,
            "seeds": self.seeds,
            "trials_needed": self.needed,
            "other_parameters": list(self.others),
            "mixtures": [_entry(one) for one in self.entries],
            "gains": {name: one._asdict() for name, one in self.gains.items()},
            "passes": self.passes,
            "confirm": None if self.confirmation is None else self.confirmation.as_json(),
        }

    def text(self) -> list[str]:
        """Lines of the report for people."""
        lines = [line for one in self.entries for line in self._of_entry(one)]
        if not self.trials:
            lines.append(
                f"too few trials for the law of the losses, which gives surface and effects: {self.whole} trained to "
                f"their end, and it needs {self.needed}"
            )
        if self.misses:
            lines.append(
                f"the trials contradict the law: its errors hang on the shares (in {self.chance:.1g} of studies by "
                f"chance), so its intervals hold the truth in fewer than {LEVEL:.0%}: trust what "
                f"`sweep --confirm N` trains"
            )
        elif self.trials:
            lines.append(held())
        if self.trials and self.others:
            lines.append(f"the law is of the best trial's values of the other parameters: {', '.join(self.others)}")
        for name, one in self.gains.items():
            doubt = "" if one.is_clear else ": too near to tell them apart"
            lines.append(f"best less {name if name != LAW else 'what the law proposes'}, by the law: {one}{doubt}")
        if self.gains:
            lines.append("the law is of trainings as long as a trial: for longer ones use `sweep --confirm N`")
        return [*lines, *(["", *self.confirmation.text()] if self.confirmation else [])]

    def _of_entry(self, entry: Entry) -> list[str]:
        space, has_law = entry.space, bool(entry.effects)
        phases = ", ".join(map(str, space.phases))
        lines = ["", f"mixture of phase{'s' if len(space.phases) > 1 else ''} {phases}"]
        head = ["data set", *entry.shares, *(["passes"] if self.passes else [])]
        rows = [[*head, *([f"{MORE:.0%} more of it, by the law, {self.interval}"] if has_law else [])]]
        for number, name in enumerate(space.names):
            row = [name, *(f"{shares[number]:.3f}" for shares in entry.shares.values())]
            row += [f"{self.passes.get(name, 0.0):.2f}"] if self.passes else []
            rows.append([*row, *([str(entry.effects[number])] if has_law else [])])
        lines += aligned(rows)
        if entry.surface:
            others = ", the other mixtures as in the best trial" if len(self.entries) > 1 else ""
            seeds = "the one seed" if self.seeds == 1 else f"the {self.seeds} seeds"
            what = (
                f"{self.metric} over the shares, by the law{others}, with {seeds} of the trials: others move all of it"
            )
            lines += ["", what, *told(space.names, entry.surface, self.goal, self.interval)]
        if entry.crossed:
            what = f"{MORE:.0%} more of a data set (down) changes the validation loss of each (across)"
            rows = [["", *entry.crossed]]
            rows += [
                [name, *(f"{values[number].value:+.4f}" for values in entry.crossed.values())]
                for number, name in enumerate(space.names)
            ]
            lines += ["", what, *aligned(rows)]
        if entry.interactions:
            side = "below" if self.goal == "minimize" else "above"
            lines += ["", f"{MORE:.0%} more of two data sets, beyond the sum of both ({side} 0: they help each other)"]
            rows = [
                [f"{space.names[i]} and {space.names[j]}", str(value)] for (i, j), value in entry.interactions[:PAIRS]
            ]
            lines += aligned(rows)
        return lines


def held() -> str:
    """How often intervals of the law held the truth, for people."""
    law, pairs, beside = (f"{low:.0%} to {high:.0%}" for low, high in HELD.values())
    return (
        f"in simulated studies {law} of such intervals held where the losses follow the law ({pairs} of those of two "
        f"data sets together), and {beside} where they do not and the trials do not show it"
    )


def _entry(one: Entry) -> dict[str, Any]:
    names = one.space.names
    return {
        "phases": list(one.space.phases), "names": list(names), "shares": one.shares,
        "surface": [{"shares": list(point.shares), **point.metric._asdict()} for point in one.surface],
        "effects": [value._asdict() for value in one.effects],
        "crossed": {name: [value._asdict() for value in values] for name, values in one.crossed.items()},
        "interactions": [{"names": [names[i], names[j]], **value._asdict()} for (i, j), value in one.interactions],
    }  # fmt: skip


def mixtures_of(study: Study) -> Mixtures | None:
    """What a study found of its mixtures; None where it searches none."""
    spaces = searched_mixtures(study)
    if not spaces or not study.done:
        return None
    best, parts = study.done[0], _parts(spaces)
    rows = {"best": _row(best, spaces), **{name: _row(trial, spaces) for name, trial in baselines(study).items()}}
    law = LawOfStudy.fit(study)
    rows |= {} if law is None else {LAW: law.best(spaces)}
    entries, base, gains = [], rows["best"], {} if law is None else _gains(law.metric, rows)
    for space, part in zip(spaces, parts, strict=True):
        shares = {name: row[part].tolist() for name, row in rows.items()}
        if law is None:
            entries.append(Entry(space=space, shares=shares))
            continue
        draws = law.metric
        entries.append(
            Entry(
                space=space,
                shares=shares,
                surface=surface(draws, base, part, space.floors, space.caps),
                effects=effects(draws, base, part),
                crossed={name: effects(one, base, part) for name, one in law.sets().items()},
                interactions=interactions(draws, base, part),
            )
        )
    material = _Material.of_study(study)
    return Mixtures(
        metric=study.sweep.metric,
        entries=entries,
        goal=study.sweep.goal,
        trials=0 if law is None else law.trials,
        chance=None if law is None else law.chance,
        whole=len(material.found.trials),
        seeds=len({trial.params.get("seed") for trial in study.done if trial.number in material.found.trials}) or 1,
        needed=material.needed,
        others=material.names,
        gains=gains,
        passes=passes(study, best),
        confirmation=confirmation(study),
    )


def searched_mixtures(study: Study) -> tuple[MixtureSpace, ...]:
    """The mixtures that `max_passes` allows; where the data is not here, all that the files of the study allow."""
    if not study.sweep.space.mixtures:
        return ()
    files = StudyDir(study.path)
    with suppress(OSError, ValueError):  # the data of a study that somebody else made may be anywhere
        config = Config.from_dict({name: value for name, value in files.settings().items() if name != RECORD})
        ranges, phases = training_ranges(config, files.metadata(DATA_PATH)), map(numbers_in, config.phases or ())
        return PassBudget(extras=study.sweep.data, phases=list(phases), ranges=ranges).spaces()
    return study.sweep.space.mixtures


def expected_confirmation(study: Study, best: Config, factor: int) -> Expected:
    """What a confirmation of a study is to train, and what the law expects. Raises ValueError as `expected_of`."""
    spaces = searched_mixtures(study)
    law = LawOfStudy.fit(study) if spaces else None
    gains: dict[str, Estimate] = {}
    if law is not None:
        rows = {"best": _row(study.done[0], spaces)}
        rows |= {name: _row(trial, spaces) for name, trial in baselines(study).items()}
        gains = _gains(law.metric, rows)
    return expected_of(study, best, factor, gains, {space.phases[0]: space.phases for space in spaces})


def _parts(spaces: Sequence[MixtureSpace]) -> list[slice]:
    """The shares of each entry among those of all, side by side."""
    ends = np.cumsum([len(space.names) for space in spaces]).tolist()
    return [slice(end - len(space.names), end) for space, end in zip(spaces, ends, strict=True)]


def _row(trial: Trial, spaces: Sequence[MixtureSpace]) -> NDArray[np.float64]:
    """The shares of a trial, those of all entries side by side: float64[K]."""
    shares = shares_of(trial)
    return np.array([shares[space.phases[0], name] for space in spaces for name in space.names], np.float64)


def _gains(draws: Draws, rows: dict[str, NDArray[np.float64]]) -> dict[str, Estimate]:
    """By baseline that differs from the best: what the law says of the best less the baseline."""
    best = rows["best"]
    return {
        name: gain(draws, best, row) for name, row in rows.items() if name != "best" and not np.array_equal(best, row)
    }


@dataclass(frozen=True, kw_only=True)
class LawOfStudy:
    """The law of the trials that trained to their end: of the metric, and of the loss of each validation set."""

    law: Any
    """A `Law`, of `names`."""
    names: tuple[str, ...]
    """Validation sets; where the metric is no mean of their losses, the metric itself is the first."""
    weights: NDArray[np.float64]
    """float64[t], of `names` in the metric."""
    sign: float
    """-1 where more of the metric is better."""
    trials: int
    chance: float | None
    """See `chance_of_fit`; of the metric."""

    @classmethod
    def fit(cls, study: Study) -> "LawOfStudy | None":
        """The law of a study; None where there are too few trials."""
        from roxxel_dist.sweep.samplers.discrepancy import chance_of_fit
        from roxxel_dist.sweep.samplers.law import Law

        spaces, sign, material = study.sweep.space.mixtures, study.sweep.sign, _Material.of_study(study)
        found = material.found
        if len(found.trials) < material.needed:
            return None
        order = [found.keys.index(key) for space in spaces for key in space.keys]
        names, losses, weights = found.names, found.losses, found.weights
        if len(names) == 1 and (logged := _logged(study, found.trials.tolist())) is not None:
            names = (*names, *logged[0])
            losses, weights = np.hstack([losses, logged[1]]), np.array([1.0, *[0.0] * len(logged[0])])
        shares = found.shares[:, order]
        law = Law.fit(shares, losses * np.where(weights > 0, sign, 1.0), material.others)
        predicted = law.fitted() @ weights
        rows = np.hstack([material.others, predicted[:, None]])
        chance = chance_of_fit(rows, shares, law.trials @ weights - predicted)
        return cls(law=law, names=names, weights=weights, sign=sign, trials=len(found.trials), chance=chance)

    @property
    def metric(self) -> Draws:
        """The metric by the mean law and by joint draws."""
        return lambda rows: self.sign * (self._losses(rows) @ self.weights)

    def _losses(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[1 + d, m, t] of float64[m, K]."""
        return np.concatenate([self.law.mean(rows)[None], self.law.draws(rows)])

    def best(self, spaces: Sequence[MixtureSpace]) -> NDArray[np.float64]:
        """The shares that the law says are best: float64[K]."""
        from roxxel_dist.sweep.samplers.law import propose

        return propose(self.law, self.weights, spaces)

    def sets(self) -> dict[str, Draws]:
        """The loss of each validation set, by its name; empty where they are not known."""
        first = 0 if len(self.names) == 1 or self.weights[1:].any() else 1
        if len(self.names) == 1:
            return {}
        numbers = range(first, len(self.names))
        return {self.names[i]: lambda rows, i=i: self._losses(rows)[..., i] for i in numbers}


FEWEST = 8
"""Trials below which a law would be made of chance."""


@dataclass(frozen=True, kw_only=True)
class _Material:
    """What the law of a study is fitted to."""

    found: SetLosses
    """Of the n trials that trained to their end."""
    names: tuple[str, ...]
    """Searched parameters beside the shares that differ between these trials."""
    others: NDArray[np.float64]
    """float64[n, p], the features of these parameters and their squares, less those of the best trial: a quadratic in
    log lr, for example."""

    @property
    def needed(self) -> int:
        """Trials that a law needs: twice its free coefficients, and `FEWEST` at least."""
        sums = len({key.split(".")[1] for key in self.found.keys})  # each mixture sums to 1
        return max(FEWEST, 2 * (self.found.shares.shape[1] - sums + self.others.shape[1]))

    @classmethod
    def of_study(cls, study: Study) -> "_Material":
        """The material of a study, of which a trial has a value."""
        from roxxel_dist.sweep.samplers.acquisition import is_diverged
        from roxxel_dist.sweep.samplers.bayes import SpaceTransform

        found, space = set_losses(study.history, study.sweep).at_the_end(), study.sweep.space
        if len(found.trials):  # a loss that diverged says nothing of the law
            found = found.where(~np.any([is_diverged(study.sweep.sign * each) for each in found.losses.T], axis=0))
        transform = SpaceTransform(study.sweep)
        trials = [*(study.history.trials[number] for number in found.trials.tolist()), study.done[0]]
        features = transform.encode(transform.rows([tuple(trial.point) for trial in trials]))
        names, columns = [], [np.zeros((len(trials), 0))]
        for parameter, where in zip(space.free, transform.columns, strict=False):
            column = features[:, where]
            kinds = len(np.unique(column[:-1], axis=0))
            if kinds > 1:
                names.append(parameter.name)
                columns += [column, column**2] if kinds > 2 and column.shape[1] == 1 else [column]
        others = np.hstack(columns)
        return cls(found=found, names=tuple(names), others=others[:-1] - others[-1])


def _logged(study: Study, trials: Sequence[int]) -> tuple[list[str], NDArray[np.float64]] | None:
    """The names of the validation sets, and float64[n, t], their last losses by trial, from the logs of the trials;
    None where a log is not here, or its data is one set."""
    rows: list[dict[str, float]] = []
    for number in trials:
        file = study.run_dir(study.history.trials[number]) / METRICS
        last = (
            next((row for row in reversed(read_rows(file)) if study.sweep.metric in row), {}) if file.is_file() else {}
        )
        rows.append({name.removeprefix(SET_LOSS): value for name, value in last.items() if name.startswith(SET_LOSS)})
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return (names, np.array([[row[name] for name in names] for row in rows], np.float64)) if names else None


def passes(study: Study, trial: Trial) -> dict[str, float]:
    """How often a trial reads each data set, by the plan of its config; empty where its data is not here."""
    from roxxel_dist.data.dataset import Roxxel
    from roxxel_dist.data.remote.config import RemoteConfig
    from roxxel_dist.run.curriculum import build_curriculum

    file = study.run_dir(trial) / CONFIG
    with suppress(OSError, ValueError):  # the data of a study that somebody else made may be anywhere
        config = Config.from_dict({name: value for name, value in load_yaml(file).items() if name != RECORD}, str(file))
        path = config.primary_path(StudyDir(study.path).metadata(DATA_PATH))
        if path is None:
            return {}
        with Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig)) as data:
            curriculum, _ = build_curriculum(config, data)
            plan, begin = curriculum.plan(config.seed), 0
            tokens = dict.fromkeys(curriculum.datasets, 0)
            for shape in curriculum.shapes:
                for name, count in plan.rows_read(begin, begin + shape.steps).items():
                    tokens[name] += count * shape.seq_len
                begin += shape.steps
            return {name: tokens[name] / one.num_tokens for name, one in curriculum.datasets.items()}
    return {}
