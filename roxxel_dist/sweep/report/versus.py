"""A comparison of two configurations as text and as JSON: the pairs, the interval as it shrinks, the verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev, variance
from typing import Any

from roxxel_dist.launcher.output import printable
from roxxel_dist.place.directory import is_study
from roxxel_dist.run.report import Run
from roxxel_dist.sweep.samplers.pairs import Comparison, Pair, comparisons, outcome, pairs_of
from roxxel_dist.sweep.space.extras import SEED, SIDES
from roxxel_dist.sweep.space.values import as_text
from roxxel_dist.sweep.study.folder import Study, StudyDir, read_study, short
from roxxel_dist.utils.display import aligned, counted


def versus_text(study: Study) -> str:
    """A comparison as text: the pairs, the interval after each, and the verdict."""
    assert study.sweep.versus is not None
    before = StudyDir(study.path).settings()
    versus, sweep = study.sweep.versus, study.sweep
    changes = ", ".join(f"{name} {short(before.get(name))} -> {short(to)}" for name, to in versus.changes.items())
    names = " against ".join(f"{side}, {versus.names[side]}" for side in SIDES)
    lines = [f"{study.name}: {names}; {sweep.goal} {sweep.metric}", f"from A to B: {changes}"]
    rows = [["pair", "seed", "A", "B", "A less B", f"mean, {versus.level:.0%} interval"]]
    for number, (pair, found) in enumerate(rows_of(study), 1):
        interval = "-" if math.isinf(found.low) else f"{found.difference:+.3g} ({found.low:+.3g} to {found.high:+.3g})"
        difference = "-" if pair.difference is None else f"{pair.difference:+.3g}"
        rows.append([str(number), str(pair.seed), _value(pair.a), _value(pair.b), difference, interval])
    lines += ["", *aligned(rows, left=None)] if len(rows) > 1 else []
    found = outcome(study.history, versus)
    verdict = found.ending or found.text()
    for one in study.history.trials.values():
        if one.state == "failed" and str(one.reason) not in verdict:
            lines.append(f"trial {one.number}, {one.params['side']} of seed {one.params['seed']}: {one.reason}")
    return "\n".join([*map(printable, lines), "", verdict])


def rows_of(study: Study) -> list[tuple[Pair, Comparison]]:
    """The pairs that count, and what was known after each."""
    assert study.sweep.versus is not None
    pairs = pairs_of(study.history)
    return list(zip(pairs, comparisons(pairs, study.sweep.versus, study.sweep.sign), strict=False))


def versus_json(study: Study) -> dict[str, Any]:
    """A comparison for JSON: the verdict, and each pair."""
    assert study.sweep.versus is not None
    versus = study.sweep.versus
    each = [
        {"seed": pair.seed, "a": pair.a, "b": pair.b, "difference": pair.difference, "mean": found.difference}
        | {name: value for name, value in found.as_json().items() if name in ("low", "high")}
        for pair, found in rows_of(study)
    ]
    more = {"metric": study.sweep.metric, "names": dict(versus.names), "changes": dict(versus.changes), "each": each}
    found = outcome(study.history, versus)
    return found.as_json() | {"text": found.ending or found.text()} | more


def _value(value: float | None) -> str:
    return "failed" if value is None else "no number" if math.isnan(value) else f"{value:.4f}"


@dataclass(frozen=True)
class PairOfRuns:
    """The comparison of two single runs: no verdict."""

    difference: float
    """val_loss of the first less that of the second."""
    noise: float | None
    """The deviation of such a difference where the seed alone differs; None where no study knows it."""
    known_by: str | None
    """The study that knows it, and from how many trainings."""

    def text(self) -> str:
        """The difference, and what is known of its noise, in a line."""
        line = f"one pair: val_loss of the first less the second is {self.difference:+.4f}. One pair gives no verdict: "
        if self.noise is None:
            return f"{line}how far the seed alone moves it is not known here; `roxxel-dist versus` measures it"
        return f"{line}the seed alone moves such a difference by {self.noise:.2g} (deviation; {self.known_by})"


def pair_of_runs(runs: Sequence[Run]) -> PairOfRuns | None:
    """The difference of two runs; None for any other number of runs, and where one has no val_loss."""
    losses = [run.newest("val_loss") for run in runs]
    if len(runs) != 2 or any(loss is None or not math.isfinite(loss) for loss in losses):
        return None
    difference = float(losses[0] or 0.0) - float(losses[1] or 0.0)
    for run in runs:
        folder = run.path.absolute().parent.parent
        if is_study(folder) and (known := _noise(read_study(folder))) is not None:
            return PairOfRuns(difference, known[0], f"{known[1]} of {folder.name}")
    return PairOfRuns(difference, None, None)


def _noise(study: Study) -> tuple[float, str] | None:
    """(the deviation of a difference of two trainings that the seed moves, from how many) where a study knows it."""
    if study.sweep.metric != "val_loss":
        return None
    if study.sweep.versus is not None:
        found = [one.difference for one, _ in rows_of(study) if one.difference is not None]
        return (stdev(found), counted(len(found), "pair")) if len(found) > 1 else None
    groups = dict[str, list[float]]()
    for trial in study.done:
        params = {name: value for name, value in trial.params.items() if name != SEED}
        if SEED in trial.params and trial.state == "done" and trial.reports:
            groups.setdefault(as_text(params), []).append(trial.reports[-1][1])
    several = [values for values in groups.values() if len(values) > 1]
    free = sum(len(values) - 1 for values in several)
    if not free:
        return None
    squares = math.fsum(variance(values) * (len(values) - 1) for values in several)
    # Of trainings with seeds of their own: that of a difference is twice the variance of one.
    return math.sqrt(2 * squares / free), f"{counted(free + len(several), 'trial')} with other seeds"
