"""Checks that refuse what cannot be searched, before the first trial, with its line in the file.

A search passes over a configuration that cannot run, so it would leave out a value that never can without a word.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import FIELD_TYPES, SECTIONS, Config, flat_fields, takes_fractions
from roxxel_dist.settings.effect import chosen, without_effect
from roxxel_dist.settings.values import type_name
from roxxel_dist.sweep.driver.sweep_run import SweepRun, field_of
from roxxel_dist.sweep.schedulers import FAR, PAUSING, bands
from roxxel_dist.sweep.space.distributions import Distribution
from roxxel_dist.sweep.space.space import Parameter
from roxxel_dist.sweep.space.sweep_file import (
    MEANS,
    PER_TOKEN,
    InfeasibleError,
    Sweep,
    check_per_token,
    hint_for,
    phrase_change,
)
from roxxel_dist.utils.voice import argument

LOGGED = (
    "val_loss", "val_bpb", "train_loss", "train_eval_loss", "train_bal", "val_bal", "ms_per_step", "tokens_per_s",
    "tokens", "phase", "lr", "grad_norm", "update_norm", "vram_gb", "ram_gb", "mfu", "hfu",
    "expert_load_min", "expert_load_mean", "expert_load_max", "expert_dropped",
)  # fmt: skip
"""Metrics that a training logs; besides, with `/`, losses by data set."""
CONFIGURATIONS = 500
"""Configurations of a search that are looked at for one in which a parameter does something."""


def check_sweep(run: SweepRun) -> None:
    """Check a sweep before its first trial. Raises ValueError for the first thing that cannot be searched."""
    sides, sweep = run.sides, run.sweep
    for side in sides:
        check_metric(side)
    check_comparable(run)
    check_pauses(run)
    if run.program is not None or run.server is not None:
        return
    for side in sides:
        check_of_trainings(sweep, side.config, side.config.primary_path(run.data_path))
    check_command(sweep)
    check_integers(sweep)
    if not run.study.is_there:
        check_values(run)
    check_effect(run)


def search_notes(run: SweepRun, configs: Sequence[Any] = ()) -> list[str]:
    """Lines for a person, before a start and in a dry run; `configs` are the Configs of some trials."""
    sweep = run.sweep
    lines = [f"{each.name}: {each.distribution.note}" for each in sweep.space.parameters if each.distribution.note]
    lines += metric_notes(run)
    if sweep.program is not None and sweep.command and "${program}" not in sweep.command:
        lines.append(f"program: {sweep.program} is not used, because no word of `command` is ${{program}}")
    return [*lines, *rung_notes(run, configs)]


def check_metric(run: SweepRun) -> None:
    """Raises UserError for a metric that no training logs. A loss or a model of the user's own may log anything."""
    metric, is_ours = run.sweep.metric, run.program is None and run.server is None
    if run.sweep.weights and not is_ours:
        raise UserError("metric.weights: only a search here over trainings of a config has them: log the mean yourself")
    is_known = metric in LOGGED or "/" in metric or run.sweep.weights
    if is_ours and not _has_own_loss(run) and not is_known:
        if metric in MEANS:
            raise _of_metric(
                run.sweep,
                f"{metric} is a mean over sets of `validation`: give their weights, as in metric: {{name: {metric}, "
                "weights: {code: 0.5, math: 0.5}}",
            )
        raise _of_metric(run.sweep, f"no training logs {metric!r}: {hint_for(metric, LOGGED)}")


def check_comparable(run: SweepRun) -> None:
    """Raises UserError for a metric that does not compare the trials of a study that begins."""
    sweep = run.sweep
    if run.program is not None or run.study.is_there or run.server:
        return
    kind = sweep.metric.partition("/")[0]
    if kind in ("val_loss", "val_bpb", *MEANS) and (
        names := sorted(run.varied_fields & {"validation", "val_fraction"})
    ):
        raise _of_metric(
            sweep,
            f"{sweep.metric} is measured on other text in each trial, because {phrase_change(names)} it: give the same "
            f"`validation` in all trials, in the config",
        )
    if (names := changing_tokens(run)) and not _has_own_loss(run):
        check_per_token(sweep, names)


def changing_tokens(run: SweepRun) -> list[str]:
    """The parameters that change what a token is, where the metric is per token."""
    if run.sweep.metric.partition("/")[0] not in PER_TOKEN:
        return []
    varied, path = run.varied_fields, run.config.primary_path(run.data_path)
    if path is not None and is_tokens(path):
        return []  # the tokens are there already
    names = varied & {"tokenizer_type"}
    if "tokenizer_type" in run.swept_fields or run.config.tokenizer_type == "bpe":
        names |= varied & {"vocab_size"}
    if run.data_path is None:  # a tokenizer is made of the text of "self"
        names |= varied & {"datasets"}
    return sorted(names)


def _has_own_loss(run: SweepRun) -> bool:
    """Whether the loss, or the model, is the user's own: then a training may have no bits per byte."""
    return run.config.loss is not None or bool({"loss", "model"} & run.swept) or run.config.model is not None


def _of_metric(sweep: Sweep, why: str) -> ValueError:
    if sweep.versus is not None:
        return UserError(f"{argument('metric', sweep.metric)}: {why}")
    return sweep.locator.error(["metric", "name"], why)


def metric_notes(run: SweepRun) -> list[str]:
    """Lines for a person about the metric, where it is not refused."""
    sweep, lines = run.sweep, list[str]()
    if run.program is None and (names := changing_tokens(run)):
        lines.append(
            f"{sweep.metric} is per token, and {phrase_change(names)} what a token is: trials with other tokens cannot "
            f"be compared by it: val_bpb, bits per byte, compares them"
        )
    falls = sweep.metric.partition("/")[0] in (*PER_TOKEN, *MEANS, "val_bpb", "train_bal", "val_bal")
    if run.program is None and falls and sweep.goal == "maximize":
        lines.append(f"the goal is to maximize {sweep.metric}, so the worst model wins: write goal: minimize")
    return lines


def rung_notes(run: SweepRun, configs: Sequence[Config]) -> list[str]:
    """A line where `early_terminate` ends no trial before its last validation, by the configs of some of them."""
    rule = run.sweep.early_terminate
    if rule is None or run.program is not None:
        return []
    counts = [count for config in configs if (count := _validations(config)) is not None]
    first = next(iter(bands(rule)), FAR)
    if not counts or len(counts) < len(configs) or first < (longest := max(counts)):
        return []
    return [
        f"early_terminate ends no trial early: it judges from validation {first:,}{' or later' * (first == FAR)} on, "
        f"and a trial has {longest:,}: use a smaller one, or a smaller eval_every"
    ]


def _validations(config: Config) -> int | None:
    """The number of validations of a training, at most; None where its length depends on its data."""
    lengths = [phase["steps"] for phase in config.phases or () if phase.get("steps") is not None]
    whole = sum(lengths) if lengths and len(lengths) == len(config.phases or ()) else None
    steps = min((length for length in (whole, config.max_steps) if length is not None), default=None)
    return None if steps is None or config.eval_every < 1 else -(-steps // config.eval_every)


def check_command(sweep: Sweep) -> None:
    """Raises UserError for flags in the `command` of a sweep whose trials are trainings: nothing reads them."""
    for word in sweep.command or ():
        if word.startswith("--"):
            raise UserError(
                f"command: {word} does nothing here, because each trial is a training of the config: make it a "
                "parameter with one value"
            )


def check_integers(sweep: Sweep) -> None:
    """Raises UserError where integer bounds of a field that takes any number would search whole numbers alone, which
    W&B means by them: of {min: 0, max: 1} it is 0 or 1."""
    for parameter in sweep.space.free:
        kind, name = parameter.distribution, field_of(parameter)
        if kind.is_implied and kind.name == "int_uniform" and takes_fractions(name):
            low, high = kind.quantile(0.0), kind.quantile(1.0)
            raise UserError(
                f"parameters.{parameter.name}: between the integers {low} and {high} whole numbers alone are searched, "
                f"and {name} takes any number: write min: {low}.0 and max: {high}.0, or distribution: int_uniform"
            )


def check_effect(run: SweepRun) -> None:
    """Raises UserError for a parameter, or a chosen field of the base, that does nothing in every configuration.

    A switch may be a parameter too, and `when` leaves parameters out, so configurations decide: all of a small space,
    or some at random. There each value of a list is as likely as any other, whatever its probability in the search.
    """
    names, reasons = run.swept_fields | chosen(run.config), dict[str, str]()
    base = {**Config().to_dict(), **flat_fields(run.base)}
    if run.config.init_from is not None:
        from roxxel_dist.weights.base import take_hf_shape  # jax: not for a sweep without a base

        based, plain = take_hf_shape(run.config).to_dict(), run.config.to_dict()
        base |= {name: value for name, value in based.items() if value != plain[name]}
    is_read = {"tokenizer_type"} if is_tokens(run.config.primary_path(run.data_path) or ()) else set()
    for point in run.sweep.space.sample(CONFIGURATIONS):
        try:
            params = flat_fields(run.sweep.rules.resolve(run.sweep.space.point(point)), "parameters")
        except InfeasibleError:
            continue
        idle = without_effect({**base, **params})
        idle |= dict.fromkeys(is_read, "the data is tokens already, and no text: leave it out")
        # A parameter that `when` leaves out here does nothing here either; the reason is that of another configuration.
        reasons |= {name: why for name, why in idle.items() if name in names}
        names = {name for name in names if name in idle or (name in run.swept_fields and name not in params)}
        if not names:
            return
    for name in sorted(names & reasons.keys()):
        place = "parameters." if name in run.swept_fields else ""
        raise UserError(f"{place}{name} does nothing here, because {reasons[name]}")


def check_pauses(run: SweepRun) -> None:
    """Raises ValueError where trials shall be paused, and cannot."""
    options, rule = run.options, (run.sweep.early_terminate or {}).get("type")
    is_led, is_own = run.server is not None, run.program is not None
    if rule in PAUSING and (is_led or is_own):
        why = (
            "W&B's server leads this sweep, chooses its trials, and cannot pause one: leave the server out (--wandb "
            "offline), or use hyperband"
            if is_led
            else "it pauses trials, and a program of your own does not go on from a checkpoint: use hyperband"
        )
        raise UserError(f"early_terminate.type: {rule}: {why}")
    for name in ("max_steps_total", "max_hours"):
        if is_led and getattr(options, name) is not None:
            raise UserError(f"--{name}: W&B's server leads this sweep, and its trials cannot be paused: leave it out")


MOST_VALUES = 500
"""Values of one list that are looked at."""
TRIED = 100
"""Configurations that are tried with a value which does not go with the config alone."""
INSIDE = (0.02, 0.5, 0.98)
"""Places in a range at which values are looked at: its ends need not be drawn."""


def check_values(run: SweepRun) -> None:
    """Raises UserError for a listed value, or a range, with which no trial can run, whatever the other parameters are.

    A value that some values of another parameter exclude is left to the search.
    """
    for parameter in run.sweep.space.parameters:
        name = field_of(parameter)
        if name not in FIELD_TYPES or parameter.path not in {(name,), *((section, name) for section in SECTIONS)}:
            continue
        for place, value in _values(parameter.distribution):
            why = _wrong_type(name, value, parameter.distribution) or _refused(run, parameter, value)
            if why is not None:
                raise run.sweep.locator.error([*parameter.place, *place], why)


def _values(kind: Distribution) -> Iterator[tuple[list[str | int], Any]]:
    """(the keys that lead to it, the value) of each listed value, or of some places of a range."""
    if kind.choices is None:
        yield from (([], kind.quantile(u)) for u in INSIDE)
    elif isinstance(kind.choices, range):
        yield ["min"], kind.choices[0]
        yield ["max"], kind.choices[-1]
    else:
        order = kind.grid_order or range(len(kind.choices))
        for number, index in list(enumerate(order))[:MOST_VALUES]:
            place: list[str | int] = ["value"] if kind.name == "constant" else ["values", number]
            yield place, kind.choices[index]


def _wrong_type(name: str, value: Any, kind: Distribution) -> str | None:
    """The reason why a field does not take a value of this type; None where it does."""
    try:
        Config.from_dict({name: value})
    except UserError as error:
        if isinstance(value, float) and kind.choices is None and not takes_fractions(name):
            what = type_name(FIELD_TYPES[name])
            cure = "write min and max without a point" if kind.is_implied else "use int_uniform, or a q_ one with q: 1"
            return f"{kind.name} draws fractions, such as {value:.4g}, and {name} must be {what}: {cure}"
        return str(error)
    return None


def _refused(run: SweepRun, parameter: Parameter, value: Any) -> str | None:
    """The reason why no trial can run with a value; None where some can, or other parameters are concerned."""
    name = field_of(parameter)
    try:
        Config.from_dict({name: value}).validate()
    except UserError:
        pass
    else:
        return None
    why = None
    for params in _with_value(run, parameter, value):
        try:
            run.trial_config(params)
        except UserError as error:
            why = str(error)
        else:
            return None
    others = run.swept_fields - {name}
    return None if why is None or others & set(re.findall(r"\w+", why)) else why


def _with_value(run: SweepRun, parameter: Parameter, value: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of some trials that have a value."""
    sweep = run.sweep
    for point in sweep.space.sample(TRIED):
        params = sweep.space.point(point)
        inner = params
        for key in parameter.path[:-1]:
            inner = inner[key]
        inner[parameter.path[-1]] = value
        try:
            resolved = sweep.rules.resolve(params)
        except InfeasibleError:
            continue
        if parameter.path[0] in resolved:
            yield resolved


def check_of_trainings(sweep: Sweep, config: Config, path: str | Path | None) -> None:
    """Raises UserError where the trainings have no such validation set, or no text whose bytes could be counted.

    `config` is that of the trials, without their parameters; `path` that of the primary data set.
    """
    swept = {parameter.path[-1] for parameter in sweep.space.parameters}
    for logged in sweep.logged or (sweep.metric,):
        kind, _, name = logged.partition("/")
        if not kind.startswith("val_"):
            continue
        sets = config.validation or {}
        if name and name not in sets and "validation" not in swept:
            there = f"`validation` names {', '.join(sets)}" if sets else "there is no `validation`"
            raise UserError(
                f"metric: {logged} is the validation of the data set {name!r}, and {there}: give it validation text, "
                f"as in validation: {{{name}: PATH}}"
            )
        if kind == "val_bpb":
            _check_text(logged, config, path, swept)


def _check_text(logged: str, config: Config, path: str | Path | None, swept: set[str]) -> None:
    if config.loss is not None or "loss" in swept:
        raise UserError(f"metric: {logged} is counted with the built-in loss alone: leave out loss, or use val_loss")
    if path is None or not is_tokens(path):
        return  # text gets a tokenizer
    with Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig)) as data:
        if data.tokenizer is None:
            raise UserError(
                f"metric: {logged} needs the bytes of the text, and {path} has no tokenizer: put its tokenizer.json "
                f"beside the shards, or use val_loss"
            )
        name, sets = logged.partition("/")[2], config.validation or {}
        places = {set_name: place for set_name, place in sets.items() if name in ("", set_name)} if sets else {"": path}
        for place in places.values() if "validation" not in swept else ():
            if not is_tokens(place):
                continue
            with Roxxel(place, dtype=config.data_dtype, remote=config.part(RemoteConfig)) as of_set:
                if of_set.text_scale(data.tokenizer) is None:
                    raise UserError(
                        f"metric: {logged} needs the bytes of the text, and the shards in {place} do not have them: "
                        f"their tokenizer may change a text. Build them of the text with `roxxel-dist data build`, or "
                        f"use val_loss"
                    )
