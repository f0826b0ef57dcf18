"""The decisions of a search, as events of its journal: trials that begin, stop, pause and continue.

Each is a function of the sweep, the engine's seed and the history: a search that resumes decides as if it had never
ended. The controller writes them down before it acts on them; `replay` follows them on recorded curves.
"""

import math
from collections.abc import Callable
from typing import Any

from roxxel_dist.sweep.samplers import Engine, SpaceExhausted
from roxxel_dist.sweep.samplers.pairs import Comparison, outcome
from roxxel_dist.sweep.schedulers import PAUSING, Scheduler, make_scheduler
from roxxel_dist.sweep.space.sweep_file import Sweep
from roxxel_dist.sweep.study.journal import History

Event = dict[str, Any]
STEPS_SPENT = "the budget of steps is spent (--max_steps_total)"


class Decisions:
    """The decisions of one search. The caller keeps the history up to date, and applies each event before the next one.

    Args: `count`, trials in all, and `max_steps`, steps of all of them together; None: no end. Attributes: `exhausted`,
    why no more trials are asked for, None while they are; `comparison`, of a study that compares two configurations,
    what it says of them.
    """

    def __init__(
        self,
        sweep: Sweep,
        history: History,
        make_engine: Callable[[], Engine],
        *,
        count: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        self._history, self._make_engine, self._metric = history, make_engine, sweep.metric
        self._limit = min((n for n in (count, sweep.run_cap) if n is not None), default=math.inf)
        self._max_steps = math.inf if max_steps is None else max_steps
        self._versus = sweep.versus
        self.comparison: Comparison | None = None
        self._scheduler: Scheduler | None = make_scheduler(sweep)
        self._pauses = self._scheduler is not None and self._scheduler.name in PAUSING
        self._engine = self._told(make_engine(), {})
        self.exhausted: str | None = None
        if self._scheduler is not None:
            for trial in sorted(history.trials.values(), key=lambda trial: trial.number):
                if trial.reports:
                    self._scheduler.note(history, trial.number, trial.step)

    @property
    def is_spent(self) -> bool:
        """Whether the budget of steps is spent."""
        return self._history.steps >= self._max_steps

    def _told(self, engine: Engine, estimates: dict[int, float]) -> Engine:
        """An engine that knows all trials, and what those give that have not ended yet."""
        for number, trial in sorted(self._history.trials.items()):
            engine.restore(number, trial.params, trial.point)
            if trial.state not in ("running", "paused"):
                engine.tell(number, trial.value, trial.curve(self._metric))
            elif number in estimates:
                engine.tell(number, estimates[number], trial.curve(self._metric))
        return engine

    def decide_end(self, number: int) -> list[Event]:
        """The other trials that pause now that a trial has ended, where a comparison has its verdict."""
        if not self._pauses:
            trial = self._history.trials[number]
            self._engine.tell(number, trial.value, trial.curve(self._metric))
        return self._over()

    def _over(self) -> list[Event]:
        """The pauses of all running trials, where a comparison is over."""
        if self._versus is None:
            return []
        self.comparison = outcome(self._history, self._versus)
        if (reason := self.comparison.ending) is None:
            return []
        self.exhausted = reason
        return self.pause_all("versus", reason)

    def decide_pending(self) -> list[Event]:
        """The decisions about the last line that an earlier driver did not write down."""
        if over := self._over():
            return over
        last = self._history.last
        return [] if last is None or last[0] != "report" else self._judge(last[1])

    def decide_report(self, number: int, step: int) -> list[Event]:
        """The trials that stop or pause, now that a trial has reported for a step."""
        if self._scheduler is not None:
            self._scheduler.note(self._history, number, step)
        return self._judge(number)

    def _judge(self, number: int) -> list[Event]:
        if self.is_spent:
            return self.pause_all("max_steps_total", STEPS_SPENT)
        if self._scheduler is None:
            return []
        verdicts = self._scheduler.judge(self._history, number)
        return [
            self._event(verdict.kind, trial, self._scheduler.name, verdict.reason)
            for trial, verdict in verdicts.items()
        ]

    def pause_all(self, rule: str, reason: str) -> list[Event]:
        """The pauses of all running trials."""
        running = [trial.number for trial in self._history.running.values() if trial.stop is None]
        return [self._event("pause", number, rule, reason) for number in running]

    def _event(self, kind: str, number: int, rule: str, reason: str) -> Event:
        trial = self._history.trials[number]
        value = trial.reports[-1][1] if trial.reports else None
        return {"event": kind, "trial": number, "step": trial.step, "value": value, "rule": rule, "reason": reason}

    def next(self) -> Event | None:
        """The event of the trial that gets a free worker: a new one, or one that continues; None: no trial."""
        if self.is_spent or (self.comparison is not None and self.comparison.ending is not None):
            return None
        can_ask = self.exhausted is None and len(self._history.trials) < self._limit
        if (going_on := self._choose(can_ask=can_ask)) is not None:
            return going_on
        if not can_ask:
            return None
        try:
            return self._ask()
        except SpaceExhausted as error:
            self.exhausted = str(error)
            return self._choose(can_ask=False)

    def _choose(self, *, can_ask: bool) -> Event | None:
        if not self._history.paused:
            return None
        if self._scheduler is None:
            chosen, name = (min(self._history.paused), "it was paused"), "order"
        else:
            chosen, name = self._scheduler.choose(self._history, can_ask=can_ask), self._scheduler.name
        if chosen is None:
            return None
        return {"event": "thaw", "trial": chosen[0], "rule": name, "reason": chosen[1]}

    def _ask(self) -> Event:
        engine = self._engine
        if self._pauses and self._scheduler is not None:
            # Estimates of unfinished trials change with every report, and an engine cannot forget: make a new one.
            engine = self._told(self._make_engine(), dict(self._scheduler.estimate(self._history)))
        number, params = engine.ask()
        return {"event": "ask", "trial": number, "params": params, "point": list(engine.point(number))}
