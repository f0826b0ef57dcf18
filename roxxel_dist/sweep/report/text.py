"""A study as text and as JSON: what is best, what every trial gave, what failed and why."""

from pathlib import Path
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.output.console import printable
from roxxel_dist.place.directory import CONFIG
from roxxel_dist.settings.config import RECORD, Config, load_yaml
from roxxel_dist.sweep.space.values import as_text, to_json
from roxxel_dist.sweep.study.folder import LEFT_OUT, Study, flat, short
from roxxel_dist.sweep.study.journal import State, Trial
from roxxel_dist.utils.display import aligned

MOST = 20
"""Trials that the table shows; the page has all."""
STATES: dict[State, str] = {
    "done": "done", "stopped": "stopped early", "failed": "failed", "paused": "paused", "running": "running",
}  # fmt: skip


def counts(study: Study) -> str:
    """How many trials there are of each kind."""
    parts = [f"{count} {name}" for state, name in STATES.items() if (count := study.history.count(state))]
    return f"{len(study.history.trials)} trial(s): {', '.join(parts)}"


def varied(study: Study) -> list[str]:
    """The parameters that the trials do not all share, those of the space first."""
    rows = [flat(trial.params) for trial in study.history.trials.values()]
    names = dict.fromkeys([*study.sweep.space.names, *(name for row in rows for name in row)])
    return [name for name in names if len({as_text(row.get(name, LEFT_OUT)) for row in rows}) > 1]


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
    names = varied(study)
    rows = [["trial", study.sweep.metric, "", "minutes", *names]]
    rows += [_row(trial, names) for trial in study.done[:MOST]]
    lines = aligned(rows, left=None) if len(rows) > 1 else []
    if len(study.done) > MOST:
        lines.append(f"… and {len(study.done) - MOST} more: the page has all")
    failed = [trial for trial in study.history.trials.values() if trial.state == "failed"]
    lines += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:MOST]]
    if len(failed) > MOST:
        lines.append(f"… and {len(failed) - MOST} more failed")
    lines = [printable(line).replace("\n", "\\n") for line in lines]
    return "\n".join([summary(study), *(["", *lines] if lines else [])])


def _row(trial: Trial, names: list[str]) -> list[str]:
    params = flat(trial.params)
    state = "" if trial.state == "done" else STATES[trial.state]
    minutes = "" if trial.seconds is None else f"{trial.seconds / 60:.1f}"
    return [str(trial.number), f"{trial.value:.6g}", state, minutes, *(short(params.get(name, "-")) for name in names)]


def as_json(study: Study) -> dict[str, Any]:
    """Everything that a program may want to know of a study."""
    fields = ("state", "params", "value", "seconds", "attempts", "reports", "reason", "more")
    trials = [
        {"trial": trial.number, **{name: getattr(trial, name) for name in fields}, "params": to_json(trial.params)}
        for trial in study.history.trials.values()
    ]
    best = study.done[0].number if study.done else None
    return {"name": study.name, "metric": study.sweep.metric, "goal": study.sweep.goal, "best": best, "trials": trials}


def write_best_config(study: Study, file: str | Path) -> Trial:
    """Write the config of the best trial, as `train --config` reads it; returns the trial.

    Raises:
        ValueError: no trial has a value yet, or its program was not ours.
    """
    best, config = best_config(study, f"--best_config {file}")
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    config.save_yaml(file)
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
