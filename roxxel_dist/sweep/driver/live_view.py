"""The view of a sweep for a person: a live table on a terminal, else a line whenever something happens to a trial."""

import sys
import time
from collections.abc import Callable
from typing import Any

from roxxel_dist.launcher.output import clock, printable
from roxxel_dist.sweep.report.text import STATES, parameter_columns, short_names
from roxxel_dist.sweep.samplers.pairs import last_value, outcome
from roxxel_dist.sweep.space.extras import Versus
from roxxel_dist.sweep.study.folder import flat, short
from roxxel_dist.sweep.study.journal import History, Trial
from roxxel_dist.utils.display import aligned

ROWS = 12
"""Running trials that the table shows."""
LONGEST = 100


class LiveView:
    """A view of a history that the driver keeps up to date, while the context is open.

    `count` is trials in all (None: no end), `names` the searched parameters, which are shown, `now` seconds since 1970.
    """

    def __init__(
        self,
        count: int | None,
        workers: int,
        names: list[str],
        versus: Versus | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._count, self._workers, self._names, self._now = count, workers, names, now
        self._versus, self._pairs = versus, 0
        self._history: History | None = None
        self._shown: dict[int, tuple[str, int]] = {}
        self._live: Any = None
        self._begun = now()

    def __enter__(self) -> "LiveView":
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(emoji=False, highlight=False)
            self._live = Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def log(self, text: str) -> None:
        """Show a line, above the table where there is one."""
        line = f"roxxel-dist: {printable(text)}"
        if self._live is not None:
            self._live.console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def show(self, history: History, number: int | None = None) -> None:
        """Show what has changed: of the trial of this number, or of any."""
        first, self._history = self._history is None, history
        if first and self._versus is not None:  # what was said before is not said again
            before = outcome(history, self._versus)
            self._pairs = before.pairs + before.dropped
        for trial in history.trials.values() if number is None else [history.trials[number]]:
            state = (trial.state, trial.attempts)
            if self._shown.get(trial.number) != state:
                self._shown[trial.number] = state
                if not first:
                    self._announce(trial, history)

    def _announce(self, trial: Trial, history: History) -> None:
        self._announce_end(trial, history)
        if self._versus is not None and trial.state != "running":
            found = outcome(history, self._versus)
            if (pairs := found.pairs + found.dropped) > self._pairs:
                self.log(f"pair {pairs}: {found.ending or found.text()}")
            self._pairs = pairs

    def _announce_end(self, trial: Trial, history: History) -> None:
        if trial.state == "failed":
            self.log(f"trial {trial.number} failed: {trial.reason}")
        elif self._live is not None:
            return
        elif trial.state == "running":
            if trial.attempts:
                again = f" again (attempt {trial.attempts})" if trial.attempts > 1 else ""
                self.log(f"trial {trial.number} runs{again}: {self._params(trial)}")
        elif trial.value is not None or self._versus is None:
            best, left = history.best, self._left(history)
            value = trial.value if self._versus is None else last_value(trial)
            tail = "" if best is None or self._versus is not None else f"; best {best.value:.6g} of trial {best.number}"
            tail += "" if left is None else f"; {clock(left)} left"
            self.log(f"trial {trial.number} {STATES[trial.state]}: {history.metric} {short(value)}{tail}")

    def render(self) -> Any:
        """The table, as it is now."""
        from rich.console import Group
        from rich.text import Text

        history = self._history
        if history is None:
            return Text("starting …")
        lines = [Text(self.counts(history), style="bold")]
        if (best := history.best) is not None:
            text = f"best {history.metric} {best.value:.6g}: trial {best.number}, {self._params(best)}"
            if self._versus is not None:
                text = outcome(history, self._versus).text()
            lines.append(Text(text, style="green"))
        trials = list(history.running.values())[:ROWS]
        names, *values = parameter_columns(trials, self._names)
        rows = [["trial", "running", "step", history.metric or "", *map(printable, names)]]
        for trial, params in zip(trials, values, strict=True):
            step, value = trial.reports[-1] if trial.reports else ("", "")
            again = f" (attempt {trial.attempts})" if trial.attempts > 1 else ""
            took = clock(self._now() - trial.began) if trial.began else "waits"
            rows.append([str(trial.number), f"{took}{again}", str(step), short(value), *map(printable, params)])
        if (more := len(history.running) - ROWS) > 0:
            rows.append(["…", f"{more} more", "", "", *[""] * len(names)])
        if history.running:
            head, *table = aligned(rows, left=None)
            lines += [Text(head, style="bold"), *map(Text, table)]
        for line in lines[1:]:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def counts(self, history: History) -> str:
        """A line: how many trials run, are done, failed, were stopped; and the time left."""
        ended, left = len(history.trials) - len(history.running) - len(history.paused), self._left(history)
        paused = f", {len(history.paused)} paused" if history.paused else ""
        total = f" of {self._count}" if self._count else ""
        return (
            f"{ended}{total} trials: {history.count('running')} running, {history.count('done')} done, "
            f"{history.count('failed')} failed, {history.count('stopped')} stopped early{paused}; "
            f"{clock(self._now() - self._begun)} so far{'' if left is None else f', {clock(left)} left'}"
        )

    def _left(self, history: History) -> float | None:
        return history.seconds_left(self._count, self._workers, self._now())

    def _params(self, trial: Trial) -> str:
        params = flat(trial.params)
        names = short_names([name for name in self._names if name in params])
        text = printable(", ".join(f"{shown} {short(params[name])}" for name, shown in names.items()))
        return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
