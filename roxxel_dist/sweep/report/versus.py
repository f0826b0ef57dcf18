"""A comparison of two configurations as text and as JSON: the pairs, the interval as it shrinks, the verdict."""

import math
from typing import Any

from roxxel_dist.launcher.output.console import printable
from roxxel_dist.sweep.samplers.pairs import Comparison, Pair, looks, outcome, pairs_of
from roxxel_dist.sweep.space.versus import SIDES
from roxxel_dist.sweep.study.folder import Study, StudyDir, short
from roxxel_dist.utils.display import aligned


def versus_text(study: Study) -> str:
    """For people."""
    assert study.sweep.versus is not None
    before = StudyDir(study.path).settings()
    versus, sweep = study.sweep.versus, study.sweep
    changes = ", ".join(f"{name} {short(before.get(name))} -> {short(to)}" for name, to in versus.changes.items())
    names = " against ".join(f"{side}, {versus.names[side]}" for side in SIDES)
    lines = [f"{study.name}: {names}; {sweep.goal} {sweep.metric}", f"from A to B: {changes}"]
    rows = [["pair", "seed", "A", "B", "A less B", f"mean, {versus.level:.0%} interval"]]
    for number, (pair, found) in enumerate(rows_of(study), 1):
        interval = "-" if math.isinf(found.low) else f"{found.difference:+.4f} ({found.low:+.4f} to {found.high:+.4f})"
        difference = "-" if pair.difference is None else f"{pair.difference:+.4f}"
        rows.append([str(number), str(pair.seed), _value(pair.a), _value(pair.b), difference, interval])
    lines += ["", *aligned(rows, left=None)] if len(rows) > 1 else []
    failed = [trial for trial in study.history.trials.values() if trial.state == "failed"]
    lines += [f"trial {one.number}, {one.params['side']} of seed {one.params['seed']}: {one.reason}" for one in failed]
    found = outcome(study.history, versus)
    return "\n".join([*map(printable, lines), "", found.ending or found.text()])


def rows_of(study: Study) -> list[tuple[Pair, Comparison]]:
    """Each pair that counts, and what was known after it."""
    assert study.sweep.versus is not None
    pairs = pairs_of(study.history)
    return list(zip(pairs, looks(pairs, study.sweep.versus, study.sweep.sign), strict=False))


def versus_json(study: Study) -> dict[str, Any]:
    """For programs."""
    assert study.sweep.versus is not None
    versus = study.sweep.versus
    each = [
        {"seed": pair.seed, "a": pair.a, "b": pair.b, "difference": found.difference}
        | {name: value for name, value in found.as_json().items() if name in ("low", "high")}
        for pair, found in rows_of(study)
    ]
    more = {"metric": study.sweep.metric, "names": dict(versus.names), "changes": dict(versus.changes), "each": each}
    return outcome(study.history, versus).as_json() | more


def _value(value: float | None) -> str:
    return "failed" if value is None else "no number" if math.isnan(value) else f"{value:.4f}"
