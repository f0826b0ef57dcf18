"""A study as text and as JSON: what is best, what every trial gave, what failed and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.output import printable
from roxxel_dist.place.directory import CONFIG
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import RECORD, SECTIONS, Config, load_yaml
from roxxel_dist.sweep.space.values import as_text, to_json
from roxxel_dist.sweep.study.folder import LEFT_OUT, Study, flat, short
from roxxel_dist.sweep.study.journal import Trial, TrialState
from roxxel_dist.utils.display import aligned

CELL = 16
"""Characters of a name or a value in a narrow table."""
MOST = 20
"""Trials that the table shows; the page has all."""
STATES: dict[TrialState, str] = {
    "done": "done", "stopped": "stopped early", "failed": "failed", "paused": "paused", "running": "running",
    "interrupted": "interrupted",
}  # fmt: skip


def counts(study: Study) -> str:
    """A line: how many trials there are of each kind."""
    parts = [f"{count} {STATES[state]}" for state, count in study.counts().items()]
    return f"{len(study.history.trials)} trial(s){': ' * bool(parts)}{', '.join(parts)}"


def varied_parameters(study: Study) -> list[str]:
    """The parameters that the trials do not all share, those of the space first."""
    rows = [flat(trial.params) for trial in study.history.trials.values()]
    names = dict.fromkeys([*study.sweep.space.names, *(name for row in rows for name in row)])
    return [name for name in names if len({as_text(row.get(name, LEFT_OUT)) for row in rows}) > 1]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names of nested parameters without the parts before a point that are not needed to tell them apart."""
    ends = {name: [".".join(name.split(".")[-count:]) for count in range(1, name.count(".") + 2)] for name in names}
    often = Counter(end for every in ends.values() for end in every)
    return {name: next((end for end in every if often[end] == 1), name) for name, every in ends.items()}


def parameter_columns(trials: Sequence[Trial], names: Sequence[str]) -> list[list[str]]:
    """Rows of a narrow table: short names of the parameters in which trials differ, and the values of each trial.

    Those parameters are first in which most running trials differ: the columns at the right may be cut off.
    """
    rows = [flat(trial.params) for trial in trials]
    living = [row for trial, row in zip(trials, rows, strict=True) if trial.state == "running"]

    def distinct(name: str, given: Sequence[Mapping[str, Any]]) -> int:
        return len({str(row.get(name, LEFT_OUT)) for row in given})

    shown = [name for name in names if distinct(name, rows) > 1] or list(names)
    shown.sort(key=lambda name: -distinct(name, living))
    heads = short_names(shown)
    cells = [[_cell(short(row.get(name, LEFT_OUT))) for name in shown] for row in rows]
    return [[_cell(heads[name]) for name in shown], *cells]


def _cell(text: str) -> str:
    return text if len(text) <= CELL else f"…{text[1 - CELL :]}"


def summary(study: Study) -> str:
    """The first lines of every report."""
    sweep = study.sweep
    lines = [f"{study.name}: {counts(study)}; {study.history.method or sweep.method}, {sweep.goal} {sweep.metric}"]
    if study.done:
        best = study.done[0]
        params = ", ".join(f"{name} {short(value)}" for name, value in flat(best.params).items())
        lines += [f"best {sweep.metric}: {best.value:.6g}, trial {best.number}: {params}"]
        if best.reports and (last := best.reports[-1][1]) != best.value:
            lines += [
                f"(a value is the best of all reports of a trial; the last one of trial {best.number} is {last:.6g})"
            ]
    return "\n".join(printable(line) for line in lines)


def table(study: Study) -> str:
    """The best trials, a line each, and a line for each that failed."""
    names = varied_parameters(study)
    rows = [["trial", study.sweep.metric, "", "minutes", *names]]
    rows += [_row(study, trial, names) for trial in study.done[:MOST]]
    lines = aligned(rows, left=None) if len(rows) > 1 else []
    if len(study.done) > MOST:
        lines.append(f"… and {len(study.done) - MOST} more: the page has all")
    failed = [trial for trial in study.history.trials.values() if trial.state == "failed"]
    lines += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:MOST]]
    if len(failed) > MOST:
        lines.append(f"… and {len(failed) - MOST} more failed")
    lines = [printable(line).replace("\n", "\\n") for line in lines]
    return "\n".join([summary(study), *(["", *lines] if lines else [])])


def _row(study: Study, trial: Trial, names: list[str]) -> list[str]:
    params = flat(trial.params)
    state = "" if trial.state == "done" else STATES[study.state_of(trial)]
    minutes = "" if trial.seconds is None else f"{trial.seconds / 60:.1f}"
    return [str(trial.number), f"{trial.value:.6g}", state, minutes, *(short(params.get(name, "-")) for name in names)]


def as_json(study: Study) -> dict[str, Any]:
    """Everything that a program may want to know of a study."""
    fields = ("params", "value", "seconds", "attempts", "reports", "reason", "more")
    trials = [
        {
            "trial": trial.number,
            "state": study.state_of(trial),
            **{name: getattr(trial, name) for name in fields},
            "params": to_json(trial.params),
        }
        for trial in study.history.trials.values()
    ]
    best = study.done[0].number if study.done else None
    return {"name": study.name, "metric": study.sweep.metric, "goal": study.sweep.goal, "best": best, "trials": trials}


def write_best_config(study: Study, file: str | Path) -> Trial:
    """Write the config of the best trial, as `train --config` reads it: fields without their default, what the sweep
    searched first. Returns the trial. Raises ValueError where no trial has a value yet, or its program was not ours."""
    import yaml

    best, config = best_config(study, f"--best_config {file}")
    values, defaults = config.to_dict(), type(config)().to_dict()
    paths = [parameter.path for parameter in study.sweep.space.parameters]
    searched = {rest[0] if rest and first in SECTIONS else first: None for first, *rest in paths}
    changed = [name for name, value in values.items() if value != defaults[name]]
    names = [name for name in {**searched, **dict.fromkeys(changed)} if name in values]
    head = (
        f"# trial {best.number} of {study.place}, {study.sweep.metric} {best.value:.6g}; other fields: their defaults"
    )
    body = yaml.safe_dump({name: values[name] for name in names}, sort_keys=False)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_file(Path(file), f"{printable(head)}\n{body}")
    return best


def best_config(study: Study, flag: str) -> tuple[Trial, Config]:
    """The best trial and its config; `flag` asks for it. Raises ValueError as `write_best_config`."""
    if not study.done:
        raise UserError(f"{flag}: no trial of {study.place} has given a {study.sweep.metric} yet")
    best = study.done[0]
    used = study.run_dir(best) / CONFIG
    if not used.is_file():
        raise UserError(
            f"{flag}: trial {best.number} has no {used}: it was a program of your own, or trained on "
            f"another machine; its parameters are {flat(best.params)}"
        )
    fields = {name: value for name, value in load_yaml(used).items() if name != RECORD}
    if fields.get("wandb") == "offline":  # how a sweep without an account follows its trials: no choice of the user's
        del fields["wandb"]
    return best, Config.from_dict(fields, str(used))
