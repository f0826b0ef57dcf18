"""A sweep from its command line: the study, the sampler, the controller, and the last words."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from roxxel_dist.cluster.exit_codes import EXIT_FAILED, EXIT_PREFLIGHT, UserError
from roxxel_dist.cluster.extras import pip_install
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.launcher.backends.ray.cluster import ClusterError
from roxxel_dist.objects.lease import LeaseLostError
from roxxel_dist.place.directory import is_study
from roxxel_dist.settings.config import (
    FIELD_TYPES,
    RECORD,
    SECTIONS,
    Config,
    flat_fields,
    load_yaml,
    takes_fractions,
    unknown,
    usage_errors,
)
from roxxel_dist.settings.effect import chosen, without_effect
from roxxel_dist.settings.global_batch import predates
from roxxel_dist.sweep.driver.bucket import StudyBucket
from roxxel_dist.sweep.driver.controller import run_sweep
from roxxel_dist.sweep.driver.data_search import refuse_led, with_data
from roxxel_dist.sweep.driver.live_view import LiveView
from roxxel_dist.sweep.driver.logged_metric import check_of_trainings
from roxxel_dist.sweep.driver.options import SweepOptions, TrialResources
from roxxel_dist.sweep.executors.private_disk import run_in_bucket
from roxxel_dist.sweep.report.text import table
from roxxel_dist.sweep.samplers import Engine, SpaceExhausted, make
from roxxel_dist.sweep.samplers.base import config_key
from roxxel_dist.sweep.schedulers import PAUSING, make_scheduler
from roxxel_dist.sweep.space.passes import PassBudget
from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Parameter, Params, Sweep, nearest
from roxxel_dist.sweep.space.trial_phases import is_of_phases
from roxxel_dist.sweep.study.folder import (
    CORPUS,
    DATA_PATH,
    DIRECTORY,
    IDENTITY,
    LOGS,
    REPORT,
    SERVER,
    TRIALS,
    Study,
    StudyDir,
    read_study,
)
from roxxel_dist.sweep.study.journal import History, read_history
from roxxel_dist.sweep.study.transfer import wide_config, write_transferred
from roxxel_dist.sweep.trial.corpus import shards_of
from roxxel_dist.sweep.trial.program import command_of
from roxxel_dist.sweep.trial.task import TrialTask
from roxxel_dist.sweep.trial.trial import Event, config_of
from roxxel_dist.sweep.trial.trial import run as run_trial
from roxxel_dist.sweep.wandb_bridge.server import ServerSampler, agent_trial, create_or_join
from roxxel_dist.utils.display import counted

LOGGED = (
    "val_loss", "val_bpb", "train_loss", "train_eval_loss", "train_bal", "val_bal", "ms_per_step", "tokens_per_s",
    "tokens", "phase", "lr", "grad_norm", "update_norm", "vram_gb", "ram_gb", "mfu",
)  # fmt: skip
"""What a training logs; besides, with `/`, losses by data set."""
ANNEAL = "anneal"
"""The parameter of a sweep that is no field of a Config: RUN@STEP, from which each trial is a decay branch."""
CONFIGURATIONS = 500
"""So many configurations of a search are looked at for one in which a parameter does something."""
KNOWN_CONFIGS = 1000
"""So many Configs of trials are kept: one is asked for when it is proposed and when its task is made."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """A sweep that can be run: what is searched, from what, and how. `open_sweep` makes it."""

    options: SweepOptions
    definition: str | None
    """The file of the sweep, where one was given."""
    config: Any
    """The `Config` that trials begin from."""
    study: StudyDir
    sweep: Sweep
    data_path: str | None
    server: str | None
    """The sweep of a W&B server that leads: its id there, "" for one that is not made yet; None: the search is here."""
    directory: str
    """Where programs and models of the user's own are found: where the study began, wherever it is taken up."""
    program: list[str] | None
    """The words of a program of the user's own."""
    resources: TrialResources
    bucket: StudyBucket | None = None
    """The study's, of which `study` is the copy."""
    wide: Any = None
    """The `Config` of the wider model that gets the best parameters, read before the search begins."""
    is_new: bool = False
    """Whether this start has made the study."""

    @cached_property
    def base(self) -> dict[str, Any]:
        """`config` by field."""
        return self.config.to_dict()

    @property
    def method(self) -> str:
        """The method that chooses parameters."""
        return f"W&B sweep {self.server}" if self.server else self.options.method or self.sweep.method

    @property
    def count(self) -> int | None:
        """Trials in all; None where there is no end."""
        size, is_grid = self.sweep.space.size, (self.options.method or self.sweep.method) == "grid"
        grid = size + len(self.sweep.space.baselines) if size is not None and is_grid else None
        return min((n for n in (self.options.count, self.sweep.run_cap, grid) if n is not None), default=None)

    @property
    def searched(self) -> list[str]:
        """The names of the parameters that have more than one value, shares included."""
        return list(self.sweep.space.names)

    @cached_property
    def swept(self) -> set[str]:
        """The names of all parameters, of derived ones too; of nested ones the outermost."""
        names = {parameter.path[0] for parameter in self.sweep.space.parameters} | set(self.sweep.rules.derived)
        return {name for name in names if not is_of_phases(name)}

    @property
    def swept_fields(self) -> set[str]:
        """The fields of a Config that are parameters."""
        names = {_field(parameter) for parameter in self.sweep.space.parameters} | set(self.sweep.rules.derived)
        return {name for name in names if not is_of_phases(name)}

    @property
    def has_phases(self) -> bool:
        """Whether the trials, or some of them, have phases."""
        return bool(self.config.phases) or "phases" in self.swept_fields

    @property
    def description(self) -> str:
        """The method and the search space, in a line."""
        words = " ".join(word for word in self.program or () if not word.startswith("${"))
        program, sweep = f" of {words}" if words else "", self.sweep
        searched = counted(len(self.searched), "parameter")
        return f"{self.method} search over {searched}{program}, {sweep.goal} {sweep.metric}"

    @property
    def extent(self) -> str:
        """How many trials there are to be, in a line."""
        begun, size, workers = len(self.history().trials), self.sweep.space.size, self.options.workers
        line = "trials until Ctrl-C" if self.count is None else counted(self.count, "trial")
        line += f", {begun} of them begun before" if begun else ""
        line += "" if size is None else f"; the space has {size:,} points"
        return line + (f"; {workers} at once" if workers > 1 else "")

    def history(self) -> History:
        """Its trials so far."""
        return read_history(self.study.path) if is_study(self.study.path) else History()

    def trial_config(self, params: Mapping[str, Any]) -> Any:
        """The Config of a trial, made once for equal parameters. Raises ValueError for parameters that are none."""
        key = config_key(dict(params))
        if key not in self._configs:
            if len(self._configs) >= KNOWN_CONFIGS:
                self._configs.clear()
            fields = {name: value for name, value in params.items() if name != ANNEAL}
            self._configs[key] = config_of(self.base, fields, self.swept - {ANNEAL}, self.sweep.data.groups)
        return self._configs[key]

    @cached_property
    def _configs(self) -> dict[str, Any]:
        """Of `trial_config`, by parameters."""
        return {}

    def sampler(self) -> Engine:
        """A new sampler of the search here; it proposes no parameters of which no Config can be made."""
        accept = None if self.program else self._accept
        return make(self.sweep, self.options.sweep_seed, self.options.method, accept=accept)

    def _accept(self, params: Params) -> None:
        """Raises ValueError for parameters that no trial can be made of."""
        self.trial_config(params)
        if isinstance(self.sweep.rules.budget, PassBudget):
            self.sweep.rules.budget.check_plan(params)

    def task_of(self, trial: int, params: Params, attempt: int) -> dict[str, Any]:
        """The task of a worker: one attempt of a trial."""
        folder, options = self.study.path.absolute(), self.options
        log = f"{trial}.log"
        if self.bucket is not None:  # each host has a cache of its own, and keeps the log of the attempts that it runs
            folder, log = Path(f"{self.bucket.url.name}-{self.study.metadata(IDENTITY)}"), f"{trial}.{attempt}.log"
        corpus, data = None, self.data_path  # a program of the user's knows its data
        config, anneal = self.base, params.get(ANNEAL)
        if self.program is None and self.server is None:
            made = self.trial_config(params)
            config, params = made.to_dict(), {}  # the worker gets the config as it was checked
            shards = shards_of(made, data, folder / CORPUS)
            if shards is not None:
                corpus, data = {"text": data, "folder": str(folder / CORPUS)}, str(shards)
        return asdict(
            TrialTask(
                trial=trial,
                params=params,
                attempt=attempt,
                run_dir=str(folder / TRIALS / str(trial)),
                log=str(folder / LOGS / log),
                metric=self.sweep.metric,
                goal=self.sweep.goal,
                weights=self.sweep.logged,
                config=config,
                data_path=data,
                corpus=corpus,
                program=self.program,
                hosts=options.hosts_per_trial,
                procs_per_host=options.procs_per_host,
                gpus_per_host=self.resources.gpus,
                cpus_per_host=self.resources.cpus,
                max_time_s=options.max_time_s,
                ray_address=options.ray_address,
                insecure=options.insecure,
                directory=self.directory,
                swept=sorted(self.swept),
                wandb_sweep=self.server,
                bucket=None if self.bucket is None else str(self.bucket.url),
                anneal=anneal,
            )
        )


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
        if name not in FIELD_TYPES and name not in SECTIONS and name != ANNEAL:
            raise UserError(f"parameters: {unknown(name, list(FIELD_TYPES), 'field')}")
    refuse_led(run.sweep, program=not is_ours, server=run.server is not None)
    run = replace(run, sweep=with_data(run.sweep, run.config, run.data_path, run.swept_fields))
    if is_ours:
        _check_batches(run)
    if options.transfer_to is not None:
        if not is_ours:
            raise UserError(
                f"--transfer_to {options.transfer_to}: the sweep runs a program of your own, which has no Config"
            )
        run = replace(run, wide=wide_config(options.transfer_to, run.config, run.swept))
    # A loss or a model of the user's own may log anything.
    base, metric = flat_fields(run.base), run.sweep.metric
    own = {name for name in ("loss", "model") if base.get(name) is not None} | ({"loss", "model"} & run.swept)
    if run.sweep.weights and (not is_ours or run.server is not None):
        raise UserError("metric.weights: only a search here over trainings of a config has them: log the mean yourself")
    is_known = metric in LOGGED or "/" in metric or run.sweep.weights
    if is_ours and run.server is None and not own and not is_known:
        raise UserError(f"metric.name: no training logs {metric!r}: {nearest(metric, LOGGED)}")
    _check_pauses(run)
    if is_ours and run.server is None:
        check_of_trainings(run.sweep, base, run.config, path)
        _check_command(run.sweep)
        _check_integers(run.sweep)
        _check_effect(run)
    if run.server is None:
        run.sampler()
        make_scheduler(run.sweep)
    return run


def _check_command(sweep: Sweep) -> None:
    """Raises UserError for flags in the `command` of a sweep whose trials are trainings: nothing reads them."""
    for word in sweep.command or ():
        if word.startswith("--"):
            raise UserError(
                f"command: {word} does nothing here, because each trial is a training of the config: make it a "
                "parameter with one value"
            )


def _field(parameter: Parameter) -> str:
    """The field of a Config that a parameter is; of one in a section the name within it."""
    first, *rest = parameter.path
    return rest[0] if rest and first in SECTIONS else first


def _check_integers(sweep: Sweep) -> None:
    """Raises UserError where integer bounds of a field that takes any number would search whole numbers alone, which
    W&B means by them: of {min: 0, max: 1} it is 0 or 1."""
    for parameter in sweep.space.free:
        kind, name = parameter.distribution, _field(parameter)
        if kind.is_implied and kind.name == "int_uniform" and takes_fractions(name):
            low, high = kind.quantile(0.0), kind.quantile(1.0)
            raise UserError(
                f"parameters.{parameter.name}: between the integers {low} and {high} whole numbers alone are searched, "
                f"and {name} takes any number: write min: {low}.0 and max: {high}.0, or distribution: int_uniform"
            )


def _check_effect(run: SweepRun) -> None:
    """Raises UserError for a parameter, or a chosen field of the base, that does nothing in every configuration.

    A switch may be a parameter too, and `when` leaves parameters out, so configurations decide: all of a small space,
    or some at random. There each value of a list is as likely as any other, whatever its probability in the search.
    """
    names, reasons = run.swept_fields | chosen(run.config), dict[str, str]()
    base = {**Config().to_dict(), **flat_fields(run.base)}
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


def _check_pauses(run: SweepRun) -> None:
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
    with LiveView(run.count, run.options.workers, run.searched) as view:
        for line in _notes(run):
            view.log(line)
        try:
            with usage_errors():
                ending = run_sweep(
                    run.bucket or run.study.path,
                    run.sweep,
                    run.sampler if run.server is None else ServerSampler,
                    _body(run),
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
    _last_words(run, ending.reason, write_page)
    return ending.code


def _body(run: SweepRun) -> Callable[[Mapping[str, Any]], Iterator[Event]]:
    """What runs a trial."""
    if run.bucket is not None:
        return run_in_bucket
    return run_trial if run.server is None else agent_trial


def _check_batches(run: SweepRun) -> None:
    """Raises UserError where new trials cannot be compared with those of an earlier version, which took the
    `batch_size` of a trial without phases for a micro-batch."""
    searched = run.swept_fields & {"batch_size", "grad_accum"}
    if not searched or run.has_phases or not predates(run.study.settings().get(RECORD)):
        return
    base = run.config.grad_accum
    if any(flat_fields(trial.params).get("grad_accum", base) > 1 for trial in run.history().trials.values()):
        raise UserError(
            f"{run.study.place} searches {' and '.join(sorted(searched))}, and an earlier version began it, whose "
            f"trials had batch_size x grad_accum rows in a step. Now batch_size is the global batch, and new trials "
            f"could not be compared with the others: name another --study"
        )


def exponent_notes(sweep: Sweep) -> list[str]:
    """A line for each `log_uniform` whose min and max look like values: W&B takes exponents there."""
    lines: list[str] = []
    for parameter in sweep.space.free:
        low, high = (parameter.distribution.quantile(u) for u in (0.0, 1.0))
        if parameter.distribution.name == "log_uniform" and 1 < low <= high < math.e:
            bounds = f"{math.log(low):.4g} to {math.log(high):.4g}"
            lines.append(
                f"{parameter.name}: log_uniform takes exponents, so its values are {low:.4g} to {high:.4g}; for values "
                f"of {bounds}, use log_uniform_values"
            )
    return lines


def _notes(run: SweepRun) -> list[str]:
    """What a person should know before it begins."""
    lines = [f"study {run.study.place}: {run.description}, {run.extent}"]
    cap, count = run.sweep.run_cap, run.options.count
    if cap is not None and (count or 0) > cap:
        lines.append(f"--count {count} is more than the run_cap of the sweep's file: it ends at {cap}")
    lines += exponent_notes(run.sweep)
    if run.is_new and run.program is None and "grad_accum" in run.swept_fields and not run.has_phases:
        lines.append(
            "batch_size is the rows of the global batch, and grad_accum its micro-batches: an earlier version trained "
            "on batch_size x grad_accum rows in a step"
        )
    names = {"tokenizer_type", "vocab_size"} & set(run.searched)
    if names and run.program is None and run.sweep.metric == "val_loss":
        lines.append(
            f"val_loss is per token, and {' and '.join(sorted(names))} changes what a token is: trials with other "
            "tokenizers cannot be compared by it: val_bpb, bits per byte, compares them"
        )
    return lines


def _last_words(run: SweepRun, reason: str, write_page: WritePage) -> None:
    """Print why it ended and the best, and write the page."""
    study = read_study(run.study.path, run.study.url)
    print(f"{table(study)}\n\n{reason}", flush=True)
    try:
        page, missing = write_page(study, study.path / REPORT, lambda line: print(line, flush=True))
        page = page if run.bucket is None else run.bucket.send_page(page)
    except OSError as error:  # the sweep has ended all the same, and the journal has all
        page, missing = f"not written ({error.strerror or error}): roxxel-dist report {study.place} makes it", ""
    print("\n".join([f"page: {page}", *([missing] if missing else [])]))
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
