"""A sweep from its command line: the study, the sampler, the controller, and the last words."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.launcher.backends.ray.cluster import ClusterError
from roxxel_dist.launcher.output import clock
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.objects.lease import LeaseLostError
from roxxel_dist.place.directory import is_study
from roxxel_dist.process.exit_codes import EXIT_FAILED, EXIT_PREFLIGHT, UserError, pip_install
from roxxel_dist.run.curriculum import check_data
from roxxel_dist.settings.config import FIELD_TYPES, SECTIONS, Config, load_yaml, unknown
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.sweep.driver.bucket import StudyBucket, run_in_bucket
from roxxel_dist.sweep.driver.checks import check_sweep, search_notes
from roxxel_dist.sweep.driver.controller import Ending, run_sweep
from roxxel_dist.sweep.driver.data_search import changed_data, refuse_led, with_data
from roxxel_dist.sweep.driver.live_view import LiveView
from roxxel_dist.sweep.driver.options import SweepOptions
from roxxel_dist.sweep.driver.sweep_run import ANNEAL, NO_FIELDS, SweepRun
from roxxel_dist.sweep.report.text import table
from roxxel_dist.sweep.report.versus import versus_text
from roxxel_dist.sweep.samplers import SpaceExhausted
from roxxel_dist.sweep.schedulers import make_scheduler
from roxxel_dist.sweep.study.folder import (
    DATA_PATH,
    DIRECTORY,
    IDENTITY,
    REPORT,
    SERVER,
    Study,
    StudyDir,
    flat,
    read_study,
    short,
)
from roxxel_dist.sweep.trial.program import command_of
from roxxel_dist.sweep.trial.trial import run as run_trial
from roxxel_dist.sweep.wandb_server import ServerSampler, agent_trial, create_or_join

SHOWN_SAMPLES = 2
"""Samples of a dry run."""


def open_sweep(
    options: SweepOptions, definition: str | None, config: Any, server: str | None, bucket: StudyBucket | None = None
) -> SweepRun:
    """The sweep of a study that is there, or begins; the arguments are fields of SweepRun, and `definition` counts for
    `options.sweep_config`. Nothing is written. Raises ValueError where something cannot be."""
    if config.wandb != "off" and find_spec("wandb") is None:
        raise UserError(f"W&B is not installed: {pip_install('sweep')}, or use --wandb off")
    config, study = config.with_absolute_paths(), StudyDir(options.folder) if bucket is None else bucket.files
    server = study.wandb_sweep_id(server)
    sweep, data = study.open(definition, options.extras, config, options.data_path, strict=server is None)
    began = study.metadata(DIRECTORY)
    directory = began if began and os.path.isdir(began) else os.getcwd()
    run = SweepRun(
        options=options,
        definition=definition,
        config=config,
        study=study,
        sweep=sweep,
        data_path=data,
        server=server,
        directory=directory,
        program=command_of(sweep.program, sweep.command, directory),
        resources=options.trial_resources(sweep.rules.resources),
        bucket=bucket,
    )
    # Where there is no data, no such field or no such metric, every trial would fail.
    path, is_ours = run.config.primary_path(run.data_path), run.program is None
    if path is None and is_ours and run.server is None:
        raise UserError("no data: name a text file, a folder or shards with --data_path, or `self` in datasets")
    if path is not None and not is_tokens(path) and not os.path.exists(path):  # NAME may be NAME.rox
        raise UserError(f"--data_path {path}: no such file or folder: check the path")
    for name in sorted(run.swept) if is_ours else ():
        if name not in FIELD_TYPES and name not in SECTIONS and name not in NO_FIELDS:
            raise run.sweep.locator.error(["parameters", name], unknown(name))
    refuse_led(run.sweep, program=not is_ours, server=run.server is not None)
    run = replace(run, sweep=with_data(run.sweep, run.config, run.data_path, run.swept_fields))
    if options.transfer_to is not None:
        if not is_ours:
            raise UserError(
                f"--transfer_to {options.transfer_to}: the sweep runs a program of your own, which has no Config"
            )
        run = replace(run, wide=wide_config(options.transfer_to, run.config, run.swept))
    check_sweep(run)
    if run.server is None:
        run.sampler()
        make_scheduler(run.sweep)
    return run


def create_study(run: SweepRun, wandb_project: str | None) -> SweepRun:
    """Make the study where it begins, and the sweep on a W&B server that shall lead it. Raises ValueError."""
    if run.server is None and not is_study(run.study.path):
        try:
            run.sampler().ask()
        except SpaceExhausted as error:
            raise UserError(str(error)) from error
    if run.server == "":
        definition = {} if run.definition is None else load_yaml(run.definition)
        run = replace(run, server=create_or_join(definition, wandb_project))
    if run.definition is None or run.study.is_there:
        return run
    metadata = {DATA_PATH: run.data_path, DIRECTORY: run.directory, SERVER: run.server}
    metadata |= {} if run.bucket is None else {IDENTITY: token_hex(4)}
    run.study.create(run.definition, run.options.extras, run.config, metadata)
    if run.bucket is not None:
        run.bucket.create()
    return replace(run, is_new=True)


WritePage = Callable[[Study, Path, Callable[[str], None]], tuple[Path, str]]
"""Writes the page of a study into a folder, and says what takes long: (the page, what is missing in it)."""


def search(run: SweepRun, write_page: WritePage) -> int:
    """Search, and write the page; returns the exit code, as in `Ending`.

    Raises UserError where the study is held, or nothing can run.
    """
    with LiveView(run.count, run.options.workers, run.searched, run.sweep.versus) as view:
        for line in _notes(run):
            view.log(line)
        try:
            with usage_errors():
                ending = run_sweep(
                    run.bucket or run.study.path,
                    run.sweep,
                    run.sampler if run.server is None else ServerSampler,
                    run_in_bucket if run.bucket is not None else run_trial if run.server is None else agent_trial,
                    run.task_of,
                    replace(run.options, method=run.method),
                    run.resources.task,
                    on_change=view.show,
                    log=view.log,
                )
        except (ClusterError, UserError) as error:
            # Nothing is left of a first start in which nothing ran.
            began = any(trial.attempts for trial in run.history().trials.values())
            if run.is_new and run.server is None and not began:
                if run.bucket is not None:
                    run.bucket.rollback()
                run.study.rollback()
            if isinstance(error, UserError):
                raise
            view.log(str(error))
            return EXIT_PREFLIGHT
        except LeaseLostError as error:
            view.log(str(error))
            return EXIT_FAILED
    _last_words(run, ending, write_page)
    return ending.code


def _notes(run: SweepRun) -> list[str]:
    """Lines for a person before it begins."""
    lines = [f"study {run.study.place}: {run.description}, {run.extent}"]
    if run.bucket is None:
        place = run.study.place
        lines.append(f"watch it: roxxel-dist top {place}, or in a browser: roxxel-dist top {place} --web")
    cap, count = run.sweep.run_cap, run.options.count
    if cap is not None and (count or 0) > cap:
        lines.append(f"--count {count} is more than the run_cap of the sweep's file: it ends at {cap}")
    same_length = not {"phases", "max_steps", "eval_every"} & run.swept_fields
    lines += search_notes(run, [run.config] if same_length else ())
    return lines if run.server is not None else [*lines, *changed_data(run.sweep, run.history().trials.get(0))]


def _last_words(run: SweepRun, ending: Ending, write_page: WritePage) -> None:
    """Print why it ended and the best, and write the page."""
    study = read_study(run.study.path, run.study.url, is_searched=False)  # this driver has ended
    if run.sweep.versus is None:
        print(f"{table(study)}\n\n{ending.reason}", flush=True)
    else:  # which has its verdict as the last line
        shown = versus_text(study)
        print(shown if shown.endswith(ending.reason) or not ending.code else f"{shown}\n{ending.reason}", flush=True)
    try:
        page, missing = write_page(study, study.path / REPORT, lambda line: print(line, flush=True))
        page = page if run.bucket is None else run.bucket.send_page(page)
    except OSError as error:  # the sweep has ended all the same, and the journal has all
        page, missing = f"not written ({error.strerror or error}): roxxel-dist report {study.place} makes it", ""
    print("\n".join([f"page: {page}", *([missing] if missing else [])]))
    if run.sweep.versus is not None:
        return
    if study.done and ANNEAL in run.swept:
        print(f"the run of the best branch: {study.run_dir(study.done[0])}")
    elif study.done and run.program is None:
        print(f"the config of the best: roxxel-dist report {study.place} --best_config best.yaml")
        if run.wide is not None:
            path = write_transferred(study, run.wide, run.config, run.trial_config(study.done[0].params), run.swept)
            print(f"train the wider model: roxxel-dist train --config {path}")
            if run.bucket is not None:
                try:
                    print(f"that config is kept at {run.bucket.send(path)}")
                except OSError as error:  # as of the page above
                    print(f"that config is on this machine only ({error.strerror or error})")


def preview(run: SweepRun) -> str:
    """A search as text, with its first samples. Raises UserError where none can run, or a sample would be refused with
    its data."""
    samples: list[Mapping[str, Any]] = []
    sampler, options, gpus = run.sampler(), run.options, run.resources.gpus_per_host
    try:
        while len(samples) < min(SHOWN_SAMPLES, run.count or SHOWN_SAMPLES):
            samples.append(sampler.ask()[1])
    except SpaceExhausted as error:
        if not samples:
            raise UserError(str(error)) from error
    configs = [run.trial_config(sample) for sample in samples] if run.program is None and run.server is None else []
    for config in configs:
        check_data(config, run.data_path, trial=True)
    where = f"the Ray cluster at {options.ray_address}" if options.ray_address else "a private Ray on this machine"
    return "\n".join(
        [
            f"study {run.study.place}: {run.description}",
            f"trials: {run.extent}",
            *(f"  example: {', '.join(f'{k} {short(v)}' for k, v in flat(sample).items())}" for sample in samples),
            f"devices: {options.hosts_per_trial} host(s) and {options.procs_per_trial} process(es) a trial"
            f"{'' if gpus is None else f', {gpus} GPU(s) on each host'}, in {where}",
            _hours(run),
            *search_notes(run, configs),
        ]
    )


def _hours(run: SweepRun) -> str:
    history, seconds, why = run.history(), run.options.max_time_s, "at most: --max_trial_time"
    if history.mean_seconds is not None:
        seconds, why = history.mean_seconds, f"as the {history.timed} trial(s) that have ended took"
    if seconds is None:
        return "hours: not known before the first trial has ended (--max_trial_time would bound them)"
    each = f"{clock(seconds)} a trial, {why}"
    if run.count is None:
        return f"hours: {each}; no end: give --count"
    left = max(0, run.count - len(history.trials) + len(history.running))
    total = seconds * -(-left // run.options.workers)
    return f"hours: about {total / 3600:.2g} ({clock(total)}) for {left} trial(s), {each}"


TRANSFERRED = "transferred.yaml"
"""The config of the wider model, in the study's folder."""
NO_SHAPE = {"init_std", "dropout_rate", "alpha_balance", "z_loss", "lora_dropout"}
"""Fields of a model that no parameter's shape follows from."""


def wide_config(path: str | Path, narrow: Config, searched: set[str]) -> Config:
    """The config in a file, whose `num_blocks` may differ, with parametrization mup at the width of `narrow`, from
    which trials begin.

    `searched` are the parameters that the sweep searches. Raises ValueError where its result cannot carry over.
    """
    if shapes := sorted(searched & ({field.name for field in fields(ModelConfig)} - NO_SHAPE)):
        raise UserError(
            f"--transfer_to {path}: the sweep searches {', '.join(shapes)}, and what carries over to another width is "
            f"searched at a single shape: leave {'them' if shapes[1:] else 'it'} out of the sweep's parameters"
        )
    wide = replace(Config.from_yaml(path), parametrization="mup", base_dim=narrow.base_dim or narrow.dim)
    wide.validate()
    if wide.model != narrow.model:
        raise UserError(
            f"--transfer_to {path}: its model is {wide.model or 'the built-in one'}, and the sweep's is "
            f"{narrow.model or 'the built-in one'}: the two must be the same"
        )
    if wide.model is None and narrow.parametrization == "standard":
        base, trained = wide.part(ModelConfig).at_base_width().heads(), narrow.part(ModelConfig).heads()
        if base != trained:
            raise UserError(
                f"--transfer_to {path}: at dim {narrow.dim} its (n_heads, kv_heads, head_size) would be {base}, and in "
                f"the sweep they are {trained}: give both the same head_size, or both the same n_heads"
            )
    return wide


def write_transferred(study: Study, wide: Config, base: Config, best: Config, searched: set[str]) -> Path:
    """Write `wide` (of `wide_config`) with what `best`, the best trial's config, has other than `base`, from which
    trials began, or `searched`; returns the file, in the study's folder."""
    before, values = base.to_dict(), best.to_dict()
    carried = {name: value for name, value in values.items() if name in searched or value != before[name]}
    path = study.path / TRANSFERRED
    replace(wide, **carried).save_yaml(path)
    return path
