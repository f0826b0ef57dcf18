"""The driver of a sweep: asks the engine, runs trials as Ray tasks, and keeps the journal.

Everything is on the disk before it is acted on, so a driver that is killed at any moment can be started again: what was
asked is not asked again, what ended is not run again, and what ran is run again first, from its checkpoint. Only what a
trial said and the driver did not yet write down is gone. Therefore the body of a trial that had finished must find that
when it is run again, and tell its result at once.

What a driver does about what trials say, and when it asks for new ones.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_PREFLIGHT
from roxxel_dist.launcher.backends.ray.cluster import ClusterError, connected
from roxxel_dist.launcher.control.signals import SignalPipe
from roxxel_dist.sweep.execution.local_ray import local_ray
from roxxel_dist.sweep.execution.ray_executor import LOST_S, Attempt, Item, RayExecutor, check_room
from roxxel_dist.sweep.journal import VERSION, History, Journal, this_driver
from roxxel_dist.sweep.options import Ending, Options
from roxxel_dist.sweep.samplers import Engine, SpaceExhausted
from roxxel_dist.sweep.schedulers.hyperband import bands, poor
from roxxel_dist.sweep.space.sweep_file import Params, Sweep

LOOK_S = 0.5
"""How soon a signal is heard."""
SAY_S = 30.0
"""How long a trial waits for room before a person is told."""

LOST = (
    f"Ray was lost: the head of its cluster has not answered for {LOST_S:g} s, or it has ended on this machine. All "
    "results are kept: once Ray is there again the same command goes on, trials from their checkpoints"
)


class Driver:
    """What `run_sweep` does, with its arguments, once the journal is held and Ray is there."""

    def __init__(
        self,
        journal: Journal,
        sweep: Sweep,
        engine: Engine,
        task_of: Callable[[int, Params, int], Item],
        options: Options,
        pool: RayExecutor,
        signals: SignalPipe,
        on_change: Callable[[History], None],
        say: Callable[[str], None],
    ) -> None:
        self._journal, self._sweep, self._engine, self._task_of = journal, sweep, engine, task_of
        self._options, self._pool, self._signals = options, pool, signals
        self._on_change, self._say = on_change, say
        self._history = journal.history
        self._again: deque[tuple[int, int, int]] = deque()
        """(trial, attempt, losses) to be run before any new one."""
        self._judged = False
        """That running trials were compared since the start: the driver before may have been killed before it did."""
        self._enough: str | None = None
        """Why no more trials are asked for."""
        self._ending: Ending | None = None
        """Why running trials were told to end."""

    def run(self) -> Ending:
        """Until every trial has ended, or all were told to."""
        self._begin()
        while True:
            if self._heed() and self._ending is not None:
                return self._ending
            if self._pool.is_lost:
                return Ending(code=EXIT_PREFLIGHT, reason=LOST)
            self._fill()
            if not self._pool.running:
                return self._ended()
            for one, item in self._pool.wait(LOOK_S):
                self._hear(one, item)
            self._look()

    def _note(self, event: str, trial: int | None, **told: Any) -> None:
        self._journal.append({"event": event, **({} if trial is None else {"trial": trial}), **told})
        self._on_change(self._history)

    def _begin(self) -> None:
        """Tell the engine what was, and find what is to be run again."""
        trials = sorted(self._history.trials.values(), key=lambda one: one.number)
        for trial in trials:
            self._engine.restore(trial.number, trial.params, trial.point)
        sweep, options = self._sweep, self._options
        self._note(
            "study", None, version=VERSION, metric=sweep.metric, goal=sweep.goal, method=options.method or sweep.method,
            seed=options.seed, driver=this_driver(),
        )  # fmt: skip
        for trial in trials:
            if trial.state != "running":
                self._engine.tell(trial.number, trial.value)
            elif trial.stop is not None:  # the driver before this one was killed before it wrote the result
                self._stopped(trial.number, None)
            else:
                self._again.append((trial.number, trial.attempts, 0))

    def _fill(self) -> None:
        """Keep as many trials running as there are workers."""
        limits = [limit for limit in (self._options.count, self._sweep.run_cap) if limit is not None]
        while self._ending is None and len(self._pool.running) < self._options.workers:
            if self._again:
                number, attempt, losses = self._again.popleft()
            elif self._enough is None and len(self._history.trials) < min(limits, default=math.inf):
                try:
                    number, params = self._engine.ask()
                except SpaceExhausted as error:
                    self._enough = str(error)
                    return
                attempt, losses = 0, 0
                self._note("ask", number, params=params, point=list(self._engine.point(number)))
            else:
                return
            task = self._task_of(number, self._history.trials[number].params, attempt)
            self._pool.submit(number, attempt, losses, task)

    def _hear(self, one: Attempt, item: Item) -> None:
        [(name, told)] = item.items()
        if not one.heard and name != "exited":
            one.heard, one.since = True, time.monotonic()
        if name == "exited":
            self._gone(one)
        elif one.cancel_reason == "ended":
            return
        elif name == "start":
            self._note("start", one.trial, attempt=one.attempt, node=told.get("node"), pid=told["pid"])
        elif name == "report":
            self._report(one, told["step"], told["value"])
        elif name == "result":
            self._result(one, told)
        elif one.cancel_reason is not None:
            return  # what its end looks like from inside is no failure
        elif name == "fail":
            self._fail(one, told["kind"], told["reason"], told.get("log"))
        elif name == "lost":
            self._lost(one, told["reason"])
        elif name == "exhausted":
            self._enough = told["reason"]
            self._pool.await_exit(one)
        elif name == "fatal":
            self._drain(Ending(code=1, reason=told["reason"]))

    def _report(self, one: Attempt, step: int, value: Any) -> None:
        trial = self._history.trials[one.trial]
        if not _is_number(value):
            self._nan(one, value, f" at step {step}")
        elif trial.reported(step) != value:  # a trial that is run again tells its earlier ones again
            before = len(trial.reports)
            self._note("report", one.trial, step=step, value=value)
            self._stop_poor(before, len(trial.reports))

    def _stop_poor(self, before: int, now: int) -> None:
        """Stop trials that are poor, where a trial has come from so many reports to so many.

        Nobody becomes poor but where a trial reaches a band: between two bands limits stay, and best values improve.
        """
        rule = self._sweep.early_terminate
        if rule is None or (self._judged and before < now and now not in bands(rule, now)):
            return
        self._judged = True
        reports = {trial.number: trial.reports for trial in self._history.trials.values()}
        running = {one.trial: one for one in self._pool.running if one.cancel_reason is None}
        for number, reason in poor(rule, self._sweep.sign, reports, list(running)).items():
            step, value = reports[number][-1]
            self._note("stop", number, step=step, value=value, rule="hyperband", reason=reason)
            self._pool.cancel(running[number], "stop")

    def _result(self, one: Attempt, told: Mapping[str, Any]) -> None:
        value = told["value"]
        if not _is_number(value):
            self._nan(one, value, "")
            return
        params = told.get("params") or self._history.trials[one.trial].params
        self._write_result(one.trial, params, value, one, told.get("stopped"), told.get("more") or {})
        self._pool.await_exit(one)

    def _write_result(
        self, trial: int, params: Params, value: float, one: Attempt | None, stopped: str | None, more: Any
    ) -> None:
        seconds = None if one is None else round(time.monotonic() - one.since, 3)
        self._note(
            "result", trial, params=params, metric=self._sweep.metric, value=value, seconds=seconds, stopped=stopped,
            more=more,
        )  # fmt: skip
        self._engine.tell(trial, value)

    def _stopped(self, trial: int, one: Attempt | None) -> None:
        """A trial that was stopped early has ended: its best report is its value."""
        value = self._history.best_report(trial)
        assert value is not None, f"trial {trial} was stopped before its first report"
        self._write_result(trial, self._history.trials[trial].params, value, one, "hyperband", {})

    def _nan(self, one: Attempt, value: Any, where: str) -> None:
        self._write_fail(one.trial, "nan", f"{self._sweep.metric} was {value}{where}", None)
        self._pool.cancel(one, "ended")

    def _fail(self, one: Attempt, kind: str, reason: str, log: str | None) -> None:
        self._write_fail(one.trial, kind, reason, log)
        self._pool.await_exit(one)

    def _write_fail(self, trial: int, kind: str, reason: str, log: str | None) -> None:
        params = self._history.trials[trial].params
        self._note("fail", trial, params=params, kind=kind, reason=reason, log=log)
        self._engine.tell(trial, None)

    def _lost(self, one: Attempt, reason: str) -> None:
        losses = one.losses + 1
        if losses > self._options.max_retries:
            self._fail(one, "lost", f"lost {losses} times; at last: {reason}", None)
            return
        self._say(f"trial {one.trial} was lost ({reason}): it is run again, {losses} of {self._options.max_retries}")
        self._again.append((one.trial, one.attempt + 1, losses))
        self._pool.await_exit(one)

    def _gone(self, one: Attempt) -> None:
        """Its task has ended."""
        self._pool.running.remove(one)
        if one.cancel_reason == "stop":
            self._stopped(one.trial, one)
        elif one.cancel_reason is None:
            self._write_fail(one.trial, "error", "its body ended without a result", None)

    def _heed(self) -> bool:
        """Follow Ctrl-C and SIGTERM: trials end and save. True: asked again; they die with this process."""
        if not self._signals.take():
            return False
        if self._ending is not None:
            return True
        count = len(self._pool.running)
        self._say(f"asked to end: {count} running trials save and end (again: kill them)")
        self._drain(Ending(code=EXIT_DRAINED, reason=f"asked to end; {count} trials go on at the next start"))
        return False

    def _drain(self, ending: Ending) -> None:
        """End: running trials are told to; the next start runs them again."""
        self._ending = self._ending or ending
        for one in self._pool.running:
            if one.cancel_reason is None:
                self._pool.cancel(one, "drain")

    def _look(self) -> None:
        """See to what takes too long, and to whether it makes sense to go on."""
        for one in self._pool.expire():
            self._say(f"trial {one.trial} does not end, and its process could not be killed: not waited for any more")
            self._gone(one)
        if waits := self._pool.waiting(SAY_S):
            self._say(waits)
        failures = self._history.failures_in_row
        if failures >= self._options.max_failures and self._ending is None:
            last = max((one for one in self._history.trials.values() if one.reason), key=lambda one: one.ended or 0)
            self._drain(
                Ending(code=1, reason=f"{failures} trials in a row failed (--max_failures); the last: {last.reason}")
            )

    def _ended(self) -> Ending:
        if self._ending is not None:
            return self._ending
        failed = self._history.count("failed")
        if failed and self._history.best is None:
            return Ending(code=1, reason=f"none of {len(self._history.trials)} trials gave a value: {failed} failed")
        return Ending(code=0, reason=self._enough or f"all {len(self._history.trials)} trials have ended")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


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
            {"exhausted": {"reason"}} (no more trials are to be had) and {"fatal": {"reason"}} (none can run as things
            are).
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
            with RayExecutor(ray, run, wanted) as pool:
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
