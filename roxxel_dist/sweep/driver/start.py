"""A sweep from its journal to its end: what the controller needs, held while it runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.backends.ray.cluster import ClusterError, connected
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.interrupt import SignalPipe
from roxxel_dist.sweep.driver.bucket import StudyBucket
from roxxel_dist.sweep.driver.controller import Controller, Ending
from roxxel_dist.sweep.driver.decisions import Decisions
from roxxel_dist.sweep.driver.options import SweepOptions
from roxxel_dist.sweep.executors.local_ray import local_ray
from roxxel_dist.sweep.executors.ray_executor import Item, RayExecutor, check_room
from roxxel_dist.sweep.samplers import Engine
from roxxel_dist.sweep.space.sweep_file import Params, Sweep
from roxxel_dist.sweep.study.journal import History, Journal


def run_sweep(
    study: Path | StudyBucket,
    sweep: Sweep,
    make_engine: Callable[[], Engine],
    run: Callable[[Item], Iterator[Item]],
    task_of: Callable[[int, Params, int], Item],
    options: SweepOptions,
    resources: Mapping[str, float],
    *,
    on_change: Callable[[History, int | None], None],
    log: Callable[[str], None],
) -> Ending:
    """Run a sweep, or go on with it.

    Args:
        study: its folder, or its bucket, which this process holds.
        sweep: what is searched.
        make_engine: makes an engine of the sweep that knows of no trial.
        run: the body of a trial: a generator function that Ray's workers can import. It yields {"start": {"pid"}},
            {"report": {"step", "value"}}, and last one of {"result": {"value", "params", "stopped", "more"}} (all but
            the value may be missing), {"fail": {"kind", "reason", "log"}}, {"lost": {"reason"}} (run it again),
            {"exhausted": {"reason"}} (there are no more trials), {"unserved": {"reason"}} (it was given no parameters,
            and later ones would be given none) and {"fatal": {"reason"}} (none can run as things are); {"note":
            {"text"}} is a line for people.
            It ends soon after a KeyboardInterrupt, or when it is closed.
        task_of: what `run` is called with, for a trial, its parameters, and its attempt (0, 1, …).
        options: how.
        resources: what Ray keeps for each trial: CPU, GPU, memory in bytes, custom ones.
        on_change: called after every line of the journal, with the number of the trial that it is about.
        log: shows a line to a person.

    Raises:
        ValueError: the study is held or of another metric, or no node can run a trial.
        ClusterError: the Ray cluster does not answer.
        OSError: the journal cannot be written; of one in a bucket, StoreError.
        LeaseLostError: another driver has taken a study in a bucket.
    """
    place = study if isinstance(study, Path) else study.url
    with Journal(study, log) if isinstance(study, Path) else study.journal(log) as journal:
        before, now = (journal.history.goal, journal.history.metric), (sweep.goal, sweep.metric)
        if journal.history.metric is not None and before != now:
            raise UserError(
                f"--study {place}: its goal was to {' '.join(map(str, before))}, and now it is to {' '.join(now)}: "
                f"the values cannot be compared; name another folder"
            )
        decisions = Decisions(
            sweep, journal.history, make_engine, count=options.count, max_steps=options.max_steps_total
        )
        with _ray(options, resources, log) as (ray, folder), SignalPipe(log) as signals:
            check_room(ray.nodes(), resources)
            with RayExecutor(ray, run, resources) as executor:
                return Controller(
                    sweep=sweep,
                    decisions=decisions,
                    task_of=task_of,
                    options=options,
                    journal=journal,
                    ray_folder=folder,
                    executor=executor,
                    signals=signals,
                    on_change=on_change,
                    log=log,
                ).run()


@contextmanager
def _ray(
    options: SweepOptions, resources: Mapping[str, float], log: Callable[[str], None]
) -> Iterator[tuple[Any, Path | None]]:
    """Ray, of the sweep's own with its folder, or the cluster's."""
    if options.ray_address is None:
        with local_ray(options.workers, resources["CPU"], log) as (ray, folder):
            yield ray, folder
        return
    with ExitStack() as held:
        try:
            ray = held.enter_context(connected(options.ray_address, insecure=options.insecure))
        except (ValueError, ClusterError) as error:
            raise type(error)(str(error).replace("--address", "--ray_address", 1)) from error
        yield ray, None
