"""The text of the commands `report`, of runs, and `eval`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roxxel_dist.checkpoint.metadata import CheckpointRef
from roxxel_dist.run.report import UNKNOWN, Run, differences, scalar_names
from roxxel_dist.train.log.timeline import SPENT
from roxxel_dist.utils.display import aligned, counted, duration

if TYPE_CHECKING:
    from roxxel_dist.run.evaluate import Evaluation

LONGEST = 40
"""Most characters of a value; longer ones are cut off."""
NUMBERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "steps": ("steps", lambda run: f"{run['steps']:,}"),
    "tokens": ("tokens", lambda run: f"{run['tokens']:,}"),
    **{name: (name, lambda run, name=name: _loss(run[name])) for name in ("train_loss", "val_loss", "val_bpb")},
    "best_val_loss": ("best val_loss", lambda run: f"{run['best_val_loss']:.4f} (step {run['best_step']:,})"),
    "tokens_per_s": ("tokens/s, median", lambda run: f"{run['tokens_per_s']:,.0f}"),
    "parameters": ("parameters", lambda run: f"{run['parameters']:,}"),
    "goodput": ("goodput", lambda run: f"{run['goodput']:.1%}"),
}
"""For each key of `Run.numbers`: the title of its line, and its format."""


def report_table(runs: Sequence[Run]) -> str:
    """The results of the runs, the time they spent, and the differences of their configs."""
    numbers = [run.numbers() for run in runs]
    lines = [["", *(run.name for run in runs)]]
    for key, (title, form) in NUMBERS.items():
        lines.append([title, *(UNKNOWN if run[key] is None else form(run) for run in numbers)])
    for name in dict.fromkeys(name for run in numbers for name in run["scalars"]):
        lines.append([name, *(f"{run['scalars'][name]:.4f}" if name in run["scalars"] else UNKNOWN for run in numbers)])
    for kind in SPENT:
        lines.append([f"  {kind}", *(_share(kind, run.spent) for run in runs)])
    gaps = [
        f"{run.name}: {name}: {counted(len(rows), 'value')} not finite, first at step {rows[0].get('step', 0):,}"
        for run in runs
        for name, rows in run.gaps.items()
    ]
    if others := differences(runs):
        config = ["config:", *aligned([[name, *map(_short, values)] for name, values in others.items()], left=None)]
    else:
        config = ["config: no field differs"] if sum(bool(run.fields) for run in runs) > 1 else []
    if len(runs) > 1 and (bare := [run.name for run in runs if not run.fields]):
        config += [f"no config, as a program's Trainer made the model: {', '.join(bare)}"]
    return "\n".join([*aligned(lines, left=None), *(["", *gaps] if gaps else []), *(["", *config] if config else [])])


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _share(kind: str, spent: Mapping[str, float]) -> str:
    if not spent:
        return UNKNOWN
    return f"{spent[kind] / (sum(spent.values()) or 1.0):6.1%}  {duration(spent[kind])}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def evaluation_table(evaluation: "Evaluation") -> str:
    """An evaluation as text: a line for each data set, the logged val_loss, and a line for each task."""
    rows = [["data", "loss", "perplexity", "bits per byte", "batches", "tokens"]]
    for row in evaluation.data:
        loss, batches, tokens = f"{row['loss']:.6f}", f"{row['batches']:,}", f"{row['tokens']:,}"
        bits = UNKNOWN if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.6f}"
        rows.append([row["name"], loss, _perplexity(row), bits, batches, tokens])
    logged, difference = evaluation.logged_val_loss, evaluation.difference
    if logged is None:
        log = f"the log has no val_loss of step {evaluation.step}"
    elif difference == 0:
        log = "val_loss is the same as in the log, to the last bit"
    else:
        log = f"val_loss is {evaluation.losses['val_loss']!r}, and {logged!r} in the log: {difference:+.3g}"
    data = [*aligned(rows), log] if evaluation.data else []
    if scalars := scalar_names(evaluation.losses):
        data += aligned([["scalar", "value"], *([name, f"{evaluation.losses[name]:.6f}"] for name in scalars)])
    tasks = [["task", "score", "value"]]
    tasks += [[name, key, f"{value:.4f}"] for name, scores in evaluation.tasks.items() for key, value in scores.items()]
    lines = [*data, *(aligned(tasks) if evaluation.tasks else []), *evaluation.notes]
    return "\n".join([f"{CheckpointRef(evaluation.run, None)}, step {evaluation.step}", *lines])


def _perplexity(row: Mapping[str, Any]) -> str:
    return UNKNOWN if row["perplexity"] is None else f"{row['perplexity']:,.2f}"


def evaluations_table(evaluations: Sequence["Evaluation"]) -> str:
    """Evaluations of one run as text: a line for each checkpoint, with how far its val_loss is from the log."""
    first = evaluations[0]
    metrics = sorted((row["metric"] for row in first.data), key=lambda name: name != "val_loss")  # that one first
    scores = [(task, key) for task, of_task in first.tasks.items() for key in of_task]
    metrics += scalar_names(first.losses)
    head = ["step", *metrics, *(f"{task} {key}" for task, key in scores)]
    rows = [[*head[:2], "perplexity", *head[2:], "minus the log"] if metrics else head]
    for one in evaluations:
        cells = [f"{one.step:,}", *(f"{one.losses[name]:.6f}" for name in metrics)]
        cells += [f"{one.tasks[task][key]:.4f}" for task, key in scores]
        if metrics:
            # One validation set with a name has a row of its own, and no row of all of them.
            cells.insert(2, _perplexity(next((row for row in one.data if row["metric"] == "val_loss"), one.data[0])))
            cells.append(UNKNOWN if one.difference is None else f"{one.difference:+.3g}" if one.difference else "0")
        rows.append(cells)
    return "\n".join([str(CheckpointRef(first.run, None)), *aligned(rows), *first.notes])
