"""What a study of thousands of trials costs the controller of a sweep, and how soon its journal is replayed.

Trials report and end as fast as they are heard: nothing but the controller, its sampler, its early stopping (which
hardly stops one), its journal and the lines for a person takes time.

CPU seconds of this process: `python sweep_scale.py [--trials N]`.
"""

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from measure import Lines, Result, flags

TRIALS, QUICK_TRIALS = 5000, 500
REPORTS, WORKERS = 20, 8
SPACE = {
    "method": "random",
    "parameters": {f"p{i}": {"min": 0.0, "max": 1.0} for i in range(10)},
    "early_terminate": {"type": "hyperband", "min_iter": 3},
}


class Instant:
    """Stands for the executor of Ray tasks: each trial reports, and has its result, whenever it is asked."""

    is_lost = False

    def __init__(self) -> None:
        self.running: list[Any] = []
        self._bodies: dict[int, Iterator[dict[str, Any]]] = {}

    def submit(self, trial: int, attempt: int, losses: int, task: dict[str, Any]) -> None:
        from roxxel_dist.sweep.ray_executor import Attempt

        self.running.append(Attempt(trial=trial, attempt=attempt, losses=losses, stream=None))
        self._bodies[trial] = self._body(1 / (trial + 1))  # each is better than those before it: none is stopped

    def _body(self, value: float) -> Iterator[dict[str, Any]]:
        yield {"start": {"pid": 1}}
        for step in range(1, REPORTS + 1):
            yield {"report": {"step": step, "value": value + 1 / step}}
        yield {"result": {"value": value}}
        yield {"exited": {}}

    def wait(self, seconds: float) -> list[tuple[Any, dict[str, Any]]]:
        return [(attempt, next(self._bodies[attempt.trial])) for attempt in list(self.running)]

    def cancel(self, attempt: Any, reason: Any) -> None:
        attempt.cancel_reason = reason
        self._bodies[attempt.trial] = iter([{"exited": {}}])

    def await_exit(self, attempt: Any) -> None:
        attempt.cancel_reason = "ended"

    def expire(self) -> list[Any]:
        return []

    def waiting(self, seconds: float) -> None:
        return None


def search(folder: Path, trials: int) -> float:
    """CPU seconds of a start that ends when there are so many trials."""
    from roxxel_dist.process.interrupt import SignalPipe
    from roxxel_dist.sweep import make
    from roxxel_dist.sweep.driver.controller import Controller
    from roxxel_dist.sweep.driver.decisions import Decisions
    from roxxel_dist.sweep.driver.live_view import LiveView
    from roxxel_dist.sweep.driver.options import SweepOptions
    from roxxel_dist.sweep.space.sweep_file import sweep_of
    from roxxel_dist.sweep.study.journal import Journal

    sweep, executor = sweep_of(SPACE), Instant()
    began = time.process_time()
    with (
        Journal(folder, print) as journal,
        LiveView(trials, WORKERS, [parameter.name for parameter in sweep.space.free]) as view,
        SignalPipe(print) as signals,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        decisions = Decisions(sweep, journal.history, lambda: make(sweep, seed=1), count=trials)
        ending = Controller(
            sweep=sweep, decisions=decisions, task_of=lambda trial, params, attempt: {"params": params},
            options=SweepOptions(count=trials, workers=WORKERS), journal=journal, executor=executor,  # pyright: ignore[reportArgumentType]
            signals=signals, kept=None, on_change=view.show, log=view.log,
        ).run()  # fmt: skip
        assert ending.code == 0, ending.reason
        assert len(journal.history.trials) == trials
    return time.process_time() - began


def scale(trials: int) -> Iterable[Result]:
    """A whole study, half of it, and the start that finds it at its end."""
    with tempfile.TemporaryDirectory() as folder:
        half = search(Path(folder), trials // 2)
        rest = search(Path(folder), trials)
        again = search(Path(folder), trials)
    what = f"{trials:,} trials of {REPORTS} reports"
    yield Result(what=what, against="s CPU, first half", measured=half)
    yield Result(what=what, against="s CPU, all, in two starts", measured=half + rest, target=60, at_most=True)
    yield Result(what=what, against="s CPU to replay", measured=again, target=10, at_most=True)
    yield Result(what=what, against="second half / first, replayed too", measured=rest / half, target=2, at_most=True)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--trials", type=int)
    asked = parser.parse_args()
    report = Lines(asked.json)
    report.add("the controller", lambda: scale(asked.trials or (QUICK_TRIALS if asked.quick else TRIALS)))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
