"""The controller of a sweep: asks the sampler, runs trials as Ray tasks, keeps the journal.

Every event is on the disk before it is acted on, so a controller that is killed at any moment can be started again: it
asks for no trial twice, repeats no ended trial, and first runs unfinished ones again, from their checkpoints. A trial
that had finished before that was written down reports its result again at once. The work per report does not grow with
the number of trials.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.backends.ray.cluster import ClusterError, connected
from roxxel_dist.process.exit_codes import EXIT_DRAINED, EXIT_PREFLIGHT, UserError
from roxxel_dist.process.interrupt import SignalPipe, in_batch_job, kills
from roxxel_dist.sweep.driver.bucket import StudyBucket
from roxxel_dist.sweep.driver.decisions import STEPS_SPENT, Decisions, Event
from roxxel_dist.sweep.driver.options import SweepOptions
from roxxel_dist.sweep.local_ray import local_ray
from roxxel_dist.sweep.ray_executor import LOST_S, Attempt, Item, RayExecutor, check_room
from roxxel_dist.sweep.samplers import Engine
from roxxel_dist.sweep.space.distributions import is_finite
from roxxel_dist.sweep.space.sweep_file import Params, Sweep
from roxxel_dist.sweep.study.journal import History, Journal
from roxxel_dist.utils.display import counted

POLL_S = 0.5
"""Seconds until a signal is acted on."""
WAITS_S = 30.0
"""Seconds that a trial waits for room before the user sees a message."""

HOURS_SPENT = "the hours of the search are over (--max_hours)"
LOST = (
    f"Ray was lost: the head of its cluster has not answered for {LOST_S:g} s, or it has ended on this machine. All "
    "results are kept: once Ray is there again the same command goes on, trials from their checkpoints"
)
GOES_ON = "All results are kept: the same command goes on"
FOLDER_LOST = (
    "the folder of the sweep's Ray, {}, was removed, so no more trials can begin: name a folder that nothing cleans up "
    f"(TMPDIR). {GOES_ON}"
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a sweep: exit code and reason."""

    code: int
    """The exit code: 0, 1 (it cannot go on as it is), 42 (asked to end: start it again to go on), 69 (Ray is lost)."""
    reason: str


@dataclass(kw_only=True)
class Controller:
    """A sweep that runs: the journal is held, and Ray is there."""

    sweep: Sweep
    decisions: Decisions
    ray_folder: Path | None
    """The folder of a Ray of the sweep's own."""
    task_of: Callable[[int, Params, int], Item]
    options: SweepOptions
    journal: Journal
    executor: RayExecutor
    signals: SignalPipe
    on_change: Callable[[History, int | None], None]
    log: Callable[[str], None]
    _queue: deque[tuple[int, int, int]] = field(init=False, default_factory=deque)
    """(trial, attempt, losses) to be run before any new one."""
    _requests: list[tuple[int, float]] = field(init=False, default_factory=list)
    """Signals that asked for the end, and when."""
    _hours_spent: bool = field(init=False, default=False)
    _ending: Ending | None = field(init=False, default=None)
    """Why running trials were asked to end."""
    _last: Ending | None = field(init=False, default=None)
    """Why no more trials begin, while running ones go on to their ends."""

    def run(self) -> Ending:
        """Run until every trial has ended, or was asked to end; returns the reason."""
        self._restore()
        while True:
            if self._take_signal():
                return self._ended()
            if self.executor.is_lost:
                return Ending(code=EXIT_PREFLIGHT, reason=LOST)
            self._look_at_clock()
            if self.ray_folder is not None and self._last is None and not self.ray_folder.exists():
                # Ray would never start them.
                self._begin_no_more(Ending(code=EXIT_PREFLIGHT, reason=FOLDER_LOST.format(self.ray_folder)))
            self._submit()
            if not self.executor.running:
                return self._ended()
            for attempt, item in self.executor.wait(POLL_S):
                self._handle(attempt, item)
            self.journal.check()
            self._check()

    @property
    def _history(self) -> History:
        return self.journal.history

    def _write(self, event: str, trial: int | None = None, **values: Any) -> None:
        self.journal.append({"event": event, **({} if trial is None else {"trial": trial}), **values})
        self.on_change(self._history, trial)

    def _restore(self) -> None:
        """Decide what was not decided any more, and find what is to be run again."""
        sweep, options, driver = self.sweep, self.options, {"pid": os.getpid(), "host": socket.gethostname()}
        told: dict[str, Any] = {"metric": sweep.metric, "goal": sweep.goal, "method": options.method or sweep.method}
        self._write("study", **told, seed=options.sweep_seed, driver=driver)
        self._decided(self.decisions.decide_pending())
        for trial in sorted(self._history.running.values(), key=lambda trial: trial.number):
            if trial.stop is not None:  # the controller before this one was killed before it wrote the result
                self._write_stopped(trial.number, None)
            else:
                self._queue.append((trial.number, trial.attempts, 0))

    def _submit(self) -> None:
        """Keep as many trials running as there are workers."""
        may_begin = self._ending is None and self._last is None and not self._hours_spent
        while may_begin and len(self.executor.running) < self.options.workers:
            if self._queue:
                trial, attempt, losses = self._queue.popleft()
            elif (event := self.decisions.next()) is not None:
                self._write(**event)
                trial = event["trial"]
                attempt, losses = self._history.trials[trial].attempts, 0
            else:
                return
            task = self.task_of(trial, self._history.trials[trial].params, attempt)
            self.executor.submit(trial, attempt, losses, task)

    def _begin_no_more(self, ending: Ending) -> None:
        """Let trials that run go on to their ends; those that wait for Ray are left to the next start."""
        if self._last is None:
            self._last = ending
            self.log(ending.reason)
        for attempt in self.executor.running:
            if not attempt.has_begun and attempt.cancel_reason is None:
                self.executor.cancel(attempt, "drain")

    def _look_at_clock(self) -> None:
        """Pause all where the time of the search is over."""
        limit, now = self.options.max_hours, self.journal.awake
        if limit is not None and not self._hours_spent and self._history.hours(now) >= limit:
            self._hours_spent = True
            self._decided(self.decisions.pause_all("max_hours", HOURS_SPENT))

    def _handle(self, attempt: Attempt, item: Item) -> None:
        """Act on a message of a trial."""
        [(name, event)] = item.items()
        trial = attempt.trial
        if not attempt.has_begun and name != "exited":
            attempt.has_begun, attempt.since = True, time.monotonic()
        if name == "exited":
            self._gone(attempt)
        elif attempt.cancel_reason == "ended":
            return
        elif name == "note":
            self.log(f"trial {trial}: {event['text']}")
        elif name == "start":
            self._write("start", trial, attempt=attempt.attempt, node=event.get("node"), pid=event["pid"])
        elif name == "report":
            self._report(attempt, event["step"], event["value"], event.get("losses"))
        elif name == "result" and not is_finite(event["value"]):
            self._not_finite(attempt, event["value"], "")
        elif name == "result":
            params = event.get("params") or self._history.trials[trial].params
            stopped, more = event.get("stopped"), event.get("more") or {}
            self._write_result(trial, params, event["value"], attempt, stopped, more)
            self.executor.await_exit(attempt)
        elif attempt.cancel_reason is not None:
            return  # what its end looks like from inside is no failure
        elif name == "fail":
            self._write_failure(trial, event["kind"], event["reason"], event.get("log"))
            self.executor.await_exit(attempt)
        else:
            self._has_not_run(attempt, name, event)

    def _has_not_run(self, attempt: Attempt, name: str, event: Mapping[str, Any]) -> None:
        """Act on a trial that ended by no fault of its own."""
        if name == "lost":
            self._lost(attempt, event["reason"])
        elif name == "exhausted":
            self.decisions.exhausted = event["reason"]
            self.executor.await_exit(attempt)
        elif name == "unserved":
            self.executor.await_exit(attempt)
            self._begin_no_more(Ending(code=EXIT_PREFLIGHT, reason=f"{event['reason']}. {GOES_ON}"))
        elif name == "fatal":
            self._drain(Ending(code=1, reason=event["reason"]))

    def _report(self, attempt: Attempt, step: int, value: Any, losses: Mapping[str, float] | None) -> None:
        trial = self._history.trials[attempt.trial]
        if not is_finite(value):
            self._not_finite(attempt, value, f" at step {step}")
        elif trial.reported(step) != value:  # a trial that is run again reports its earlier ones again
            of_sets = {"losses": losses} if losses else {}
            self._write("report", trial.number, step=step, value=value, **of_sets)
            self._decided(self.decisions.decide_report(trial.number, step))

    def _decided(self, events: list[Event]) -> None:
        """Write which trials stop or pause, all in one piece, and ask their attempts to end.

        A driver that is killed between two of these lines would never write the second: the next one decides again only
        where the last line is a report.
        """
        if not events:
            return
        attempts = {attempt.trial: attempt for attempt in self.executor.running}
        for event in events:
            if event["event"] == "pause":
                attempt = attempts.get(event["trial"])
                event["seconds"] = None if attempt is None else round(time.monotonic() - attempt.since, 3)
        self.journal.append(*events)
        for event in events:
            number, attempt = event["trial"], attempts.get(event["trial"])
            self.on_change(self._history, number)
            waiting = [entry for entry in self._queue if entry[0] == number]
            for entry in waiting:  # it was lost, and is to be run again
                self._queue.remove(entry)
            if waiting and event["event"] == "stop":
                self._write_stopped(number, None)
            if attempt is not None and attempt.cancel_reason is None:
                self.executor.cancel(attempt, event["event"])

    def _write_result(
        self, trial: int, params: Params, value: float, attempt: Attempt | None, stopped: str | None, more: Any
    ) -> None:
        seconds = None if attempt is None else round(time.monotonic() - attempt.since, 3)
        values: dict[str, Any] = {"params": params, "metric": self.sweep.metric, "value": value, "seconds": seconds}
        self._write("result", trial, **values, stopped=stopped, more=more)
        self._decided(self.decisions.decide_end(trial))

    def _write_stopped(self, trial: int, attempt: Attempt | None) -> None:
        """Write the end of a trial that was stopped early: its best report is its value."""
        value, stop = self._history.best_report(trial), self._history.trials[trial].stop
        assert value is not None, f"trial {trial} was stopped before its first report"
        assert stop is not None
        self._write_result(trial, self._history.trials[trial].params, value, attempt, stop["rule"], {})

    def _write_failure(self, trial: int, kind: str, reason: str, log: str | None) -> None:
        params = self._history.trials[trial].params
        self._write("fail", trial, params=params, kind=kind, reason=reason, log=log)
        self._decided(self.decisions.decide_end(trial))

    def _not_finite(self, attempt: Attempt, value: Any, where: str) -> None:
        self._write_failure(attempt.trial, "nan", f"{self.sweep.metric} was {value}{where}", None)
        self.executor.cancel(attempt, "ended")

    def _lost(self, attempt: Attempt, reason: str) -> None:
        losses, limit = attempt.losses + 1, self.options.max_retries
        if losses > limit:
            self._write_failure(attempt.trial, "lost", f"lost {losses} times; at last: {reason}", None)
        else:
            self.log(f"trial {attempt.trial} was lost ({reason}): it runs again (retry {losses} of {limit})")
            self._queue.append((attempt.trial, attempt.attempt + 1, losses))
        self.executor.await_exit(attempt)

    def _gone(self, attempt: Attempt) -> None:
        """Note that the task of an attempt has ended."""
        self.executor.running.remove(attempt)
        if attempt.cancel_reason == "stop":
            self._write_stopped(attempt.trial, attempt)
        elif attempt.cancel_reason is None:
            self._write_failure(attempt.trial, "error", "its body ended without a result", None)

    def _take_signal(self) -> bool:
        """Follow Ctrl-C and SIGTERM: trials end and save. True: asked again; they die with this process."""
        numbers = self.signals.take()
        again = [kills(number, self._requests, time.monotonic(), batch_job=in_batch_job()) for number in numbers]
        self._requests += [(number, time.monotonic()) for number in numbers]
        if self._ending is not None or not numbers:
            return any(again)
        count = len(self.executor.running)
        self.log(f"asked to end: {counted(count, 'running trial')} will save and end; Ctrl-C again kills them")
        reason = f"asked to end; {counted(count, 'trial')} to continue at the next start"
        self._drain(Ending(code=EXIT_DRAINED, reason=reason))
        return False

    def _drain(self, ending: Ending) -> None:
        """Ask the running trials to end; the next start of the sweep runs them again."""
        self._ending = self._ending or ending
        for attempt in self.executor.running:
            if attempt.cancel_reason is None:
                self.executor.cancel(attempt, "drain")

    def _check(self) -> None:
        """See to what takes too long, and to whether it makes sense to go on."""
        for attempt in self.executor.expire():
            self.log(
                f"trial {attempt.trial} does not end, and its process cannot be killed: the sweep continues without it"
            )
            self._gone(attempt)
        if line := self.executor.waiting_message(WAITS_S):
            self.log(line)
        failures = self._history.failures_in_row
        if failures >= self.options.max_failures and self._ending is None:
            failed = (trial for trial in self._history.trials.values() if trial.reason)
            last = max(failed, key=lambda trial: trial.ended or 0).reason
            reason = f"{failures} trials in a row failed (--max_failures); the last: {last}"
            self._drain(Ending(code=1, reason=reason))

    def _ended(self) -> Ending:
        if (compared := self.decisions.comparison) is not None and compared.ending is not None:
            return Ending(code=1 if compared.is_vain else 0, reason=compared.ending)
        if (ending := self._ending or self._last) is not None:
            return ending
        trials, failed = len(self._history.trials), self._history.count("failed")
        if failed and self._history.best is None:
            return Ending(code=1, reason=f"none of {trials} trials gave a value: {failed} failed")
        paused = len(self._history.paused)
        reason = f"all {trials} trials have ended" if not paused else f"{trials - paused} trials have ended"
        if self._hours_spent or self.decisions.is_spent:
            reason = HOURS_SPENT if self._hours_spent else STEPS_SPENT
        tail = f"; {paused} are paused, and go on where they are given more" if paused else ""
        return Ending(code=0, reason=f"{self.decisions.exhausted or reason}{tail}")


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

    `make_engine` makes an engine that knows of no trial; `on_change` is called after every line of the journal, with
    the number of the trial that it is about; `resources` are what Ray keeps for each trial: CPU, GPU, memory in bytes,
    custom ones. `task_of` gives what `run` is called with, for a trial, its parameters, and its attempt (0, 1, …).
    `run` is the body of a trial: a generator function that Ray's workers can import. It yields {"start": {"pid"}},
    {"report": {"step", "value"}}, and last one of {"result": {"value", "params", "stopped", "more"}} (all but the value
    may be missing), {"fail": {"kind", "reason", "log"}}, {"lost": {"reason"}} (run it again), {"exhausted": {"reason"}}
    (there are no more trials), {"unserved": {"reason"}} (it was given no parameters, and later ones would be given
    none) and {"fatal": {"reason"}} (none can run as things are); {"note": {"text"}} is a line for people. It ends soon
    after a KeyboardInterrupt, or when it is closed.

    Raises ValueError where the study is held or of another metric, or no node can run a trial; ClusterError where the
    Ray cluster does not answer; OSError where the journal cannot be written (in a bucket StoreError); LeaseLostError
    where another driver has taken a study in a bucket.
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
        with local_ray(options.workers, resources["CPU"], log) as own:
            yield own
        return
    with ExitStack() as held:
        try:
            ray = held.enter_context(connected(options.ray_address, insecure=options.insecure))
        except (ValueError, ClusterError) as error:
            raise type(error)(str(error).replace("--address", "--ray_address", 1)) from error
        yield ray, None
