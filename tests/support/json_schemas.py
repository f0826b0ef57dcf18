"""The output of `--json` of each command, as JSON Schema (draft 2020-12), from the dataclasses that are printed.

`python tests/support/json_schemas.py FOLDER` writes a file a command, `COMMAND.schema.json`. An object lists all of its
properties, so that a new one cannot come unnoticed: `tests/cli/test_json_schemas.py` compares with real outputs.
"""

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from roxxel_dist.audit.record import Comparison
from roxxel_dist.checkpoint.stored_blocks import Verdict
from roxxel_dist.launcher.control.notify import JobEvent
from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.launcher.preflight.run import PreflightReport
from roxxel_dist.layouts.check import LayoutReport
from roxxel_dist.run.estimate.failures import FailureEstimate
from roxxel_dist.run.estimate.figures import RunEstimate
from roxxel_dist.run.estimate.target_layouts import LayoutComparison
from roxxel_dist.sweep.report.versus import PairOfRuns
from roxxel_dist.sweep.samplers.pairs import Comparison as Pairs
from roxxel_dist.sweep.study.journal import State, Trial
from roxxel_dist.utils.component import field_docs
from roxxel_dist.view.items import JobState, StudyState
from roxxel_dist.view.run import RunState

Schema = dict[str, Any]
NAMES: dict[Any, Any] = {
    bool: "boolean",
    int: "integer",
    float: ["number", "null"],  # null: it is not finite
    str: "string",
    Path: "string",
    type(None): "null",
}


def of_type(kind: Any) -> Schema:
    """The schema of a type that a dataclass of the package has for a field."""
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(kind):
        schema = of_fields(kind)
    elif origin in (typing.Union, types.UnionType):
        schema = {"anyOf": [of_type(one) for one in arguments]}
    elif origin is Literal:
        schema = {"enum": list(arguments)}
    elif origin in (dict, Mapping):
        schema = {"type": "object", "additionalProperties": of_type(arguments[1]) if arguments else {}}
    elif origin is tuple and arguments[-1] is not Ellipsis:
        items = [of_type(one) for one in arguments]
        schema = {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    elif origin in (list, tuple, Sequence):
        schema = {"type": "array", "items": of_type(arguments[0])}
    else:
        schema = {} if kind is Any else {"type": NAMES[kind]}
    return schema


def of_fields(kind: Any, /, *, only: Sequence[str] = (), **more: Schema) -> Schema:
    """The object that a dataclass becomes; `only` some of its fields, and `more` that are put beside them."""
    docs, types_of = field_docs(kind), typing.get_type_hints(kind)
    properties = {
        field.name: of_type(types_of[field.name]) | ({"description": docs[field.name]} if field.name in docs else {})
        for field in dataclasses.fields(kind)
        if not only or field.name in only
    }
    return of_object({**properties, **more}, " ".join((kind.__doc__ or "").split("\n\n")[0].split()))


def of_object(properties: Mapping[str, Schema], description: str = "") -> Schema:
    """An object with all of these properties, and no others."""
    about = {"description": description} if description else {}
    return about | {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def noted(kind: Any, description: str) -> Schema:
    """The schema of a type, with what its value means."""
    return of_type(kind) | {"description": description}


def _list_of(schema: Schema, description: str) -> Schema:
    return {"type": "array", "items": schema, "description": description}


def _study(**more: Schema) -> Schema:
    trial = of_fields(Trial, only=("params", "value", "seconds", "attempts", "reports", "reason", "more"))
    state = noted(Literal[*get_args(State), "interrupted"], "Interrupted: it has no end, and no driver searches.")
    trial["properties"] = {"trial": noted(int, "Its number, from 0."), "state": state} | trial["properties"]
    trial["required"] = list(trial["properties"])
    return of_object(
        {
            "name": noted(str, "Of the sweep."),
            "metric": noted(str, "The number that trials are compared by."),
            "goal": noted(Literal["minimize", "maximize"], "Whether a smaller or a larger metric is better."),
            "best": noted(int | None, "The trial with the best value; null before the first."),
            "trials": _list_of(trial, "All trials, in the order of their numbers."),
            **more,
        },
        "A study.",
    )


def _evaluation() -> Schema:
    data = of_object(
        {
            "name": noted(str, "The data set; empty for the held-out part."),
            "metric": noted(str, "The name of the loss in the log."),
            "loss": noted(float, "Mean loss of a predicted token, in nats."),
            "perplexity": noted(float | None, "exp(loss); null with a loss of your own."),
            "bits_per_byte": noted(float | None, "Bits per byte of text; null where the text is not known."),
            "batches": noted(int, "Batches that were read."),
            "tokens": noted(int, "Tokens that were read."),
        }
    )
    whole = of_object(
        description="The losses of a checkpoint.",
        properties={
            "run": noted(str, "The run directory."),
            "step": noted(int, "The step of the checkpoint."),
            "val_loss": noted(float, "Mean loss over the validation data."),
            "data": _list_of(data, "A row for each data set, and for the training data."),
            "tasks": noted(
                Mapping[str, Mapping[str, float]], 'Of each evaluation task: "acc" and "acc_norm", or "bits_per_byte".'
            ),
            "logged_val_loss": noted(float | None, "What the run logged at this step; null without a validation then."),
            "difference": noted(float | None, "val_loss minus the logged one."),
            "notes": _list_of(of_type(str), "What was not read, and what was cut."),
        },
    )
    # Other losses of the log, such as "train_eval_loss", "val_bal" and "val_loss/NAME".
    whole |= {"additionalProperties": of_type(float)}
    return {"anyOf": [whole, _list_of(whole, "a list of them, by their steps, for RUN@A:B and RUN@A,B,C.")]}


def _plan() -> Schema:
    plan = of_fields(RunEstimate)
    plan["properties"]["arrays"] = {
        "anyOf": [plan["properties"]["arrays"], {"type": "null"}],
        "description": "With --arrays: every array of parameters; otherwise null.",
    }
    failures = of_fields(FailureEstimate)
    return {"anyOf": [plan, failures | {"description": "what failures cost, with --mtbf."}]}


def _launch() -> Schema:
    rank = of_object(
        {
            "rank": noted(int, "From 0."),
            "host": noted(str, "Where it would run."),
            "env": noted(Mapping[str, str], "The variables that it would get; secrets are masked."),
            "argv": noted(list[str], "The program and its arguments; secrets are masked."),
        }
    )
    return of_object(
        {
            "run_id": noted(str, "The name of the job."),
            "log_dir": noted(str, "The folder of the logs."),
            "working_directory": noted(str, "Of all ranks."),
            "coordinator": noted(str, "HOST:PORT at which rank 0 would listen."),
            "max_restarts": noted(int, "How often the job may be restarted."),
            "step_timeout": noted(float | None, "Seconds; null: adaptive."),
            "grace": noted(float, "Seconds that ranks get to save."),
            "exit_timeout": noted(float, "Seconds in which ranks end after the first has."),
            "set_by_the_agent": noted(list[str], "Variables that a rank gets besides."),
            "agents": noted(Mapping[str, list[str]], "The command of the agent, by host."),
            "ranks": _list_of(rank, "In their order."),
        },
        "What would run.",
    )


def _verify() -> Schema:
    path, complete = noted(str, "As it was given."), noted(bool, "Whether nothing is damaged.")
    lines = noted(list[str], "A line for each shard.")
    return {
        "anyOf": [
            of_object({"path": path, "complete": complete, "parts": _list_of(of_fields(Verdict), "")}, "A run."),
            of_object({"path": path, "complete": complete, "lines": lines}, "Shards."),
        ]
    }


def _report() -> Schema:
    number = {
        "steps": noted(int | None, "The last logged step."),
        "tokens": noted(int | None, "Tokens read until then."),
        "train_loss": noted(float, "The last one."),
        "val_loss": noted(float, "The last one."),
        "val_bpb": noted(float, "The last one."),
        "scalars": noted(Mapping[str, float], "The last value of each other number of the validation, by its name."),
        "best_val_loss": noted(float, "The smallest one."),
        "best_step": noted(int | None, "Its step."),
        "tokens_per_s": noted(float, "The median of the logged rows."),
        "parameters": noted(int | None, "Of the model."),
        "goodput": noted(float, "Share of the time that was training."),
        "spent": noted(Mapping[str, float], "Seconds by kind."),
    }
    run = of_object({"name": noted(str, "Unique here."), "path": noted(str, "The run directory."), **number})
    page = noted(str, "The page that was written.")
    return {
        "anyOf": [
            of_object(
                {
                    "runs": _list_of(run, "In the order of the command."),
                    "differences": noted(Mapping[str, list[Any]], "Config fields that differ: a value for each run."),
                    "pair": {"anyOf": [of_fields(PairOfRuns), {"type": "null"}]},
                    "pictures": noted(list[str], "Files that were written."),
                    "page": page,
                },
                "Runs.",
            ),
            _study(page=page),
            _study(page=page, versus=_versus()),
        ]
    }


def _versus() -> Schema:
    number = noted(float | None, "Null where there is none.")
    pair = of_object({"seed": of_type(int), **dict.fromkeys(("a", "b", "difference", "mean", "low", "high"), number)})
    return of_fields(
        Pairs,
        text=noted(str, "The verdict in a line."),
        metric=noted(str, "What is compared: the last value that each training logged."),
        names=noted(Mapping[str, str], "What A and B are."),
        changes=noted(Mapping[str, Any], "The fields of B that A has not."),
        each=_list_of(pair, "The pairs, with the mean and its interval after each."),
    )


def _top() -> Schema:
    study = of_fields(StudyState, only=("state", "workers", "began", "left_s", "steps_left"))["properties"]
    run = of_fields(
        RunState,
        only=[field.name for field in dataclasses.fields(RunState) if field.name != "buckets"],
        kind={"const": "run"},
        curves=noted(
            dict[str, list[tuple[int, float]]],
            "(step, value) of each metric; of a long run those of each range of steps: first, last, least and largest.",
        ),
        left_s=noted(float, "Seconds to the end, at the rate of the newest row."),
        goodput=noted(float, "Share of the time that was training."),
        phase=noted(int | None, "The current phase, from 1."),
    )
    job = of_fields(JobState, kind={"const": "job"})
    return _list_of(
        {"anyOf": [run, job, _study(kind={"const": "study"}, path=noted(str, "The folder."), **study)]},
        "An entry for each run, job and study that is shown.",
    )


def _audit() -> Schema:
    return of_object(
        {
            "run": noted(str, "As it was given."),
            "equal": noted(bool, "Whether all that was computed again is equal to the bit."),
            "problem": noted(str | None, "The first difference; null or empty if there is none."),
            "steps": noted(int, "Steps that were computed again."),
            "rows": noted(int, "Logged rows that were compared."),
            "checkpoints": noted(int, "Checkpoints that were compared."),
            "digests": noted(bool, "Whether running digests were compared too."),
        },
        "An audit.",
    )


def schemas() -> dict[str, Schema]:
    """By the words of the command."""
    job = of_fields(
        JobRecord,
        run_dir=noted(str, "The run directory."),
        state=noted(str, "starting, running, ended, lost; unknown: its launcher is on another machine."),
    )
    return {
        "audit": _audit(),
        "check-layouts": of_fields(LayoutReport, agree=noted(bool, "Whether no layout differs, and none failed.")),
        "compare": of_fields(Comparison),
        "doctor": of_fields(PreflightReport, fit=noted(bool, "Whether a job can start.")),
        "eval": _evaluation(),
        "launch local --dry-run": _launch(),
        "plan": _plan(),
        "plan --layouts": of_fields(LayoutComparison),
        "ps": _list_of(job, "The jobs."),
        "report": _report(),
        "top": _top(),
        "verify": _verify(),
        "versus": _versus(),
    }


def messages() -> dict[str, Schema]:
    """JSON that is no output: what another program receives, by the words of the command."""
    return {"launch ssh --notify": of_fields(JobEvent)}


def file_of(command: str) -> str:
    """The name of its file."""
    named = {"plan --layouts": "plan-layouts", "launch ssh --notify": "notify"}
    return f"{named.get(command, command.split(maxsplit=1)[0])}.schema.json"


def main(folder: Path) -> None:
    """Write them."""
    folder.mkdir(parents=True, exist_ok=True)
    titles = {command: f"roxxel-dist {command} --json" for command in schemas()}
    titles |= {command: f"roxxel-dist {command} COMMAND: standard input of COMMAND" for command in messages()}
    for command, schema in (schemas() | messages()).items():
        whole = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": titles[command],
            **schema,
        }
        (folder / file_of(command)).write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
