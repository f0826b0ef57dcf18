"""What a sweep would be, before it runs: trials, devices, two of its configurations, and hours where they are known."""

from collections.abc import Mapping
from typing import Any

from roxxel_dist.launcher.output.bar import clock
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.curriculum import check_data
from roxxel_dist.sweep.driver.run import search_notes
from roxxel_dist.sweep.driver.sweep_run import SweepRun
from roxxel_dist.sweep.samplers import SpaceExhausted
from roxxel_dist.sweep.study.folder import flat, short

SAMPLES = 2


def preview(run: SweepRun) -> str:
    """All of it, as text. The samples were checked as their trials would be, with their data. Raises UserError where
    none can run, or a sample would be refused."""
    samples: list[Mapping[str, Any]] = []
    sampler, options, gpus = run.sampler(), run.options, run.resources.gpus
    try:
        while len(samples) < min(SAMPLES, run.count or SAMPLES):
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
