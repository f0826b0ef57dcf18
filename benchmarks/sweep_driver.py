"""What a trial costs the driver of a sweep, against Ray Tune's own, and how soon a journal is read.

A trial does nothing and reports once. CPU seconds of the driver's process alone: `python sweep_driver.py [--trials N]`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import Lines, Result, flags

WORKERS = 4
TRIALS, QUICK_TRIALS = 60, 24
FIRST = 10
"""Trials that only warm up: Ray makes threads and caches."""
ROUNDS = 3
SPACE = {"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0}}}


def noop(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A trial that does nothing."""
    yield {"start": {"pid": os.getpid()}}
    yield {"report": {"step": 1, "value": task["params"]["x"]}}
    yield {"result": {"value": task["params"]["x"]}}


def ours(trials: int) -> float:
    """CPU seconds a trial, but for the suggestions."""
    import sweep_driver

    from roxxel_dist.sweep import make
    from roxxel_dist.sweep.driver.controller import run_sweep
    from roxxel_dist.sweep.driver.options import SweepOptions
    from roxxel_dist.sweep.space.sweep_file import sweep_of

    sweep = sweep_of(SPACE)
    engine: Any = make(sweep, seed=1)
    asked, asking = engine.ask, [0.0]
    marks: list[tuple[int, float]] = []

    def ask() -> Any:
        began = time.process_time()
        found = asked()
        asking[0] += time.process_time() - began
        return found

    def changed(history: Any, trial: int | None) -> None:
        if (ended := history.count("done")) in (FIRST, trials) and (not marks or marks[-1][0] != ended):
            marks.append((ended, time.process_time() - asking[0]))

    engine.ask = ask
    with tempfile.TemporaryDirectory() as folder:
        run_sweep(
            Path(folder), sweep, lambda: engine, sweep_driver.noop, lambda trial, params, attempt: {"params": params},
            SweepOptions(count=trials, workers=WORKERS), {"CPU": 1.0}, on_change=changed, log=print,
        )  # fmt: skip
    return (marks[-1][1] - marks[0][1]) / (trials - FIRST)


def tunes(trials: int) -> float:
    """CPU seconds a trial of Ray Tune, with its random search, which asks for little."""
    import ray
    from ray import tune

    class Marks(tune.Callback):
        ended = 0
        marks: list[float] = []  # noqa: RUF012 - one for each process

        def on_trial_complete(self, *told: Any, **more: Any) -> None:
            Marks.ended += 1
            if Marks.ended in (FIRST, trials):
                Marks.marks.append(time.process_time())

    def train(config: dict[str, Any]) -> None:
        tune.report({"val_loss": config["x"]})

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as results:
        ray.init(
            address="local", num_cpus=WORKERS, object_store_memory=80_000_000, include_dashboard=False,
            log_to_driver=False, configure_logging=False, _temp_dir=folder,
        )  # fmt: skip
        options = tune.TuneConfig(num_samples=trials, max_concurrent_trials=WORKERS, metric="val_loss", mode="min")
        run = tune.RunConfig(storage_path=results, callbacks=[Marks()], verbose=0)
        tune.Tuner(train, param_space={"x": tune.uniform(0, 1)}, tune_config=options, run_config=run).fit()
        ray.shutdown()
    return (Marks.marks[1] - Marks.marks[0]) / (trials - FIRST)


def replay() -> float:
    """CPU seconds to read a journal of 1,000 trials with ten reports each."""
    from roxxel_dist.sweep.study.journal import read_history

    with tempfile.TemporaryDirectory() as folder:
        lines: list[dict[str, Any]] = []
        for trial in range(1000):
            params = {f"p{i}": i / 7 + trial for i in range(22)}
            lines.append({"event": "ask", "trial": trial, "params": params, "point": list(params.values())})
            lines.append({"event": "start", "trial": trial, "attempt": 0, "node": "h1", "pid": 7})
            lines += [{"event": "report", "trial": trial, "step": step, "value": 1 / 3} for step in range(10)]
            told = {"params": params, "metric": "val_loss", "value": 0.3, "seconds": 1.0, "stopped": None, "more": {}}
            lines.append({"event": "result", "trial": trial, **told})
        text = "".join(json.dumps({"time": 1.0, **line}) + "\n" for line in lines)
        Path(folder, "journal.jsonl").write_text(text)
        began = time.process_time()
        assert len(read_history(Path(folder)).trials) == 1000
        return time.process_time() - began


def alone(what: str, trials: int) -> float:
    """A measurement in a process of its own."""
    here = Path(__file__).parent
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": f"{here.parent}:{here}"}
    env |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    done = subprocess.run(
        [sys.executable, __file__, what, str(trials)], env=env, capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
    return float(done.stdout.strip().splitlines()[-1])


def costs(trials: int, rounds: int) -> Iterable[Result]:
    """Both drivers in turns."""
    peer = all(find_spec(name) for name in ("pandas", "pyarrow"))
    times: dict[str, list[float]] = {"ours": [], "tune": []}
    for _ in range(rounds):
        times["ours"].append(alone("ours", trials))
        if peer:
            times["tune"].append(alone("tunes", trials))
    mine = statistics.median(times["ours"])
    ratio = mine / statistics.median(times["tune"]) if peer else None
    yield Result(what="driver, a no-op trial", against="ms CPU", measured=mine * 1000, target=10, at_most=True)
    yield Result(what="driver, a no-op trial", against="x Ray Tune", measured=ratio, target=0.7, at_most=True)


def reading() -> Iterable[Result]:
    """The journal of a long study."""
    yield Result(what="journal of 1,000 trials", against="s to read", measured=replay(), target=1, at_most=True)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--trials", type=int)
    asked = parser.parse_args()
    report = Lines(asked.json)
    trials, rounds = (QUICK_TRIALS, 1) if asked.quick else (TRIALS, ROUNDS)
    report.add("the drivers", lambda: costs(asked.trials or trials, rounds))
    report.add("the journal", reading)
    return report.end()


if __name__ == "__main__":
    if sys.argv[1:2] in (["ours"], ["tunes"]):
        print({"ours": ours, "tunes": tunes}[sys.argv[1]](int(sys.argv[2])))
    else:
        sys.exit(main())
