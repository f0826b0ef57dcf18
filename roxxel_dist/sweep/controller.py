"""The driver of a sweep: asks the engine, runs trials as Ray tasks, and keeps the journal.

Everything is on the disk before it is acted on, so a driver that is killed at any moment can be started again: what was
asked is not asked again, what ended is not run again, and what ran is run again first, from its checkpoint. Only what a
trial said and the driver did not yet write down is gone. Therefore the body of a trial that had finished must find that
when it is run again, and tell its result at once.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.backends.ray.cluster import ClusterError, connected
from roxxel_dist.launcher.control.signals import SignalPipe
from roxxel_dist.sweep.driver import Driver
from roxxel_dist.sweep.early import bands
from roxxel_dist.sweep.engine import Engine
from roxxel_dist.sweep.history import History
from roxxel_dist.sweep.journal import Journal
from roxxel_dist.sweep.local_ray import local_ray
from roxxel_dist.sweep.options import Ending, Options
from roxxel_dist.sweep.pool import Pool, check_room
from roxxel_dist.sweep.ray_task import Item
from roxxel_dist.sweep.space import Params, Sweep

__all__ = ["Ending", "Options", "run_sweep"]


def run_sweep(
    study: Path,
    sweep: Sweep,
    engine: Engine,
    run: Callable[[Item], Iterator[Item]],
    task_of: Callable[[int, Params, int], Item],
    options: Options,
    *,
    on_change: Callable[[History], None],
    say: Callable[[str], None],
) -> Ending:
    """Run a sweep, or go on with it.

    Args:
        study: its folder.
        sweep: what is searched.
        engine: a new one, of the sweep; it is told what the journal has.
        run: the body of a trial: a generator function that Ray's workers can import. It yields {"start": {"pid"}},
            {"report": {"step", "value"}}, and last one of {"result": {"value", "params", "stopped", "more"}} (all but
            the value may be missing), {"fail": {"kind", "reason", "log"}}, {"lost": {"reason"}} (run it again),
            {"over": {"reason"}} (no more trials are to be had) and {"broken": {"reason"}} (none can run as things are).
            It ends soon after a KeyboardInterrupt, or when it is closed.
        task_of: what `run` is called with, for a trial, its parameters, and its attempt (0, 1, …).
        options: how.
        on_change: called after every line of the journal.
        say: shows a line to a person.

    Raises:
        ValueError: the study is held or of another metric, or no node can run a trial.
        ClusterError: the Ray cluster does not answer.
        OSError: the journal cannot be written.
    """
    wanted = {"CPU": 1.0, **sweep.rules.resources, **options.resources}
    if sweep.early_terminate is not None:
        bands(sweep.early_terminate, 0)
    with Journal(study, say) as journal:
        _check_same(study, sweep, journal.history)
        with _ray(options, wanted) as ray, SignalPipe(say) as signals:
            check_room(ray.nodes(), wanted)
            with Pool(ray, run, wanted) as pool:
                return Driver(journal, sweep, engine, task_of, options, pool, signals, on_change, say).run()


def _check_same(study: Path, sweep: Sweep, history: History) -> None:
    before, now = (history.goal, history.metric), (sweep.goal, sweep.metric)
    if history.metric is not None and before != now:
        raise ValueError(
            f"--study {study}: was to {' '.join(map(str, before))}, and now it is to {' '.join(now)}: values cannot be "
            "compared; name another folder"
        )


@contextmanager
def _ray(options: Options, wanted: Mapping[str, float]) -> Iterator[Any]:
    """Ray, of its own or the cluster's."""
    if options.ray_address is None:
        cores = os.cpu_count() or 1
        if wanted["CPU"] > cores:
            raise ValueError(f"a trial needs {wanted['CPU']:g} CPU (`resources`), and this machine has {cores}")
        with local_ray(options.workers, wanted["CPU"]) as ray:
            yield ray
        return
    flag = "--address"
    with ExitStack() as stack:
        try:
            ray = stack.enter_context(connected(options.ray_address, insecure=options.insecure))
        except (ValueError, ClusterError) as error:
            if not str(error).startswith(flag):
                raise
            raise type(error)(f"--ray_address{str(error).removeprefix(flag)}") from error
        yield ray
