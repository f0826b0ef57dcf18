"""Bodies of trials, which Ray's workers import, and what a driver in a process of its own runs.

`python trial_bodies.py STUDY JSON`: a sweep of them; JSON has `sweep`, `options`, `task` and the name of the `body`; of
a study in a bucket also its `url`, and STUDY is where its trials leave what they leave.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


def _start() -> dict[str, Any]:
    return {"start": {"pid": os.getpid()}}


def _once(task: dict[str, Any], name: str) -> bool:
    """Whether it is the first time, of all processes, that this is asked of the trial."""
    try:
        Path(task["folder"], f"{name}.{task['trial']}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def square(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A trial that gives (x - 0.3) ** 2 after two reports."""
    yield _start()
    value = (task["params"]["x"] - 0.3) ** 2
    for step in (1, 2):
        time.sleep(task.get("sleep", 0.0))
        yield {"report": {"step": step, "value": value + 1 / step}}
    yield {"result": {"value": value, "more": {"node": os.uname().nodename, "nan": math.nan}}}


def threads(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A trial that gives OMP_NUM_THREADS, or 0."""
    yield _start()
    yield {"result": {"value": float(os.environ.get("OMP_NUM_THREADS", "0"))}}


def killed(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker of trial 1 is killed at its first try, after a report; trial 2 says once that it was lost."""
    yield _start()
    yield {"report": {"step": 1, "value": 2.0}}
    if task["trial"] == 1 and _once(task, "killed"):
        time.sleep(0.3)  # until the messages are sent
        os.kill(os.getpid(), signal.SIGKILL)
    if task["trial"] == 2 and _once(task, "lost"):
        yield {"lost": {"reason": "its node rebooted"}}
        return
    yield {"result": {"value": float(task["attempt"])}}


def always_killed(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Nothing is left of it."""
    yield _start()
    time.sleep(0.3)  # until the messages are sent
    os.kill(os.getpid(), signal.SIGKILL)


def mixed(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """By trial: NaN, an error, a failure of its own, no end, an infinite result, and good ones."""
    yield _start()
    kind = ["nan", "error", "fail", "nothing", "inf"][task["trial"]] if task["trial"] < 5 else "good"
    if kind == "error":
        raise ValueError("dim 17 is not a multiple of 4 heads")
    if kind == "fail":
        yield {"fail": {"kind": "oom", "reason": "RESOURCE_EXHAUSTED", "log": "logs/2.log"}}
    elif kind == "nan":
        yield {"report": {"step": 1, "value": 1.5}}
        yield {"report": {"step": 2, "value": math.nan}}
        time.sleep(600)
    elif kind in ("inf", "good"):
        yield {"result": {"value": math.inf if kind == "inf" else float(task["trial"])}}


def curve(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Trials that are as poor as their number, and stay; it notes how it was ended.

    Each reports after the one before it was heard: of three that are judged together, the second is good enough.
    """
    yield _start()
    folder, before = Path(task["folder"]), f'"trial": {task["trial"] - 1}, "step": 2'
    while task["trial"] > 0 and before not in (folder / "journal.jsonl").read_text():
        time.sleep(0.02)
    try:
        for step in range(1, 5):
            yield {"report": {"step": step, "value": float(task["trial"])}}
        if task["trial"] > 0:
            time.sleep(600)  # not polled: it is to be ended in a system call
    except (KeyboardInterrupt, GeneratorExit):  # the second, where it comes while what was yielded is sent
        (folder / f"ended.{task['trial']}").touch()
        raise
    yield {"result": {"value": float(task["trial"])}}


def stays(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Stays until it is asked to end; the next try ends at once."""
    yield _start()
    folder = Path(task["folder"])
    if task["attempt"] == 0:
        yield {"report": {"step": 1, "value": 3.0}}
        (folder / f"up.{task['trial']}").write_text(str(os.getpid()))
        try:
            time.sleep(600)
        finally:
            (folder / f"saved.{task['trial']}").touch()
    yield {"report": {"step": 1, "value": 3.0}}
    yield {"result": {"value": 1.0 + task["trial"]}}


def leaves(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ends once it may."""
    yield _start()
    folder = Path(task["folder"])
    (folder / f"up.{task['trial']}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    time.sleep(1.0)
    yield {"result": {"value": float(task["trial"])}}


def deaf(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Does not end when it is asked to."""
    yield _start()
    yield {"report": {"step": 1, "value": 3.0}}
    Path(task["folder"], f"up.{task['trial']}").write_text(str(os.getpid()))
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            continue


def served(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Somebody else chooses, and has three trials."""
    yield _start()
    if task["trial"] >= 3:
        yield {"exhausted": {"reason": "the server has no more"}}
    else:
        yield {"result": {"value": 1.0, "params": {"x": task["trial"] / 10}}}


def unserved(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Somebody else chooses, and is away after two trials, until the file "back" is there."""
    yield _start()
    if task["trial"] >= 2 and not Path(task["folder"], "back").exists():
        yield {"note": {"text": "the server is away"}}
        yield {"unserved": {"reason": "the server gave no trial"}}
    else:
        yield {"result": {"value": 1.0, "params": {"x": task["trial"] / 10}}}


def devices(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Which GPUs it sees, and when it had them."""
    yield _start()
    began = time.time()
    time.sleep(1.0)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    yield {"result": {"value": 0.0, "more": {"seen": seen, "began": began, "ended": time.time()}}}


def kept(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As a training: a result is kept in its folder, and told at once by a later try. Its work is counted."""
    done = Path(task["folder"], f"result.{task['trial']}")
    yield _start()
    if not done.exists():
        time.sleep(0.05)
        with Path(task["folder"], "work").open("a") as work:
            work.write(f"{task['trial']} {json.dumps(task['params'])}\n")
        yield {"report": {"step": 1, "value": task["params"]["x"]}}
        time.sleep(0.05)
        done.write_text(str(task["params"]["x"]))
    yield {"result": {"value": float(done.read_text())}}


def sliced_value(x: float, step: int) -> float:
    """What `sliced` reports: those that begin well do not end best."""
    return (x - 0.3) ** 2 + (1.5 - x) / step


def sliced(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A trial of `task["reports"]` reports that resumes from its checkpoint, and repeats its earlier reports.

    It goes on when the driver has written its last report down, and had time to pause it.
    """
    yield _start()
    folder, number = Path(task["folder"]), task["trial"]
    checkpoint = folder / "trials" / str(number) / "checkpoints" / "step"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    trained = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for step in range(1, task.get("reports", 6) + 1):
        if step > trained:
            with (folder / "work").open("a") as work:
                work.write(f"{number} {step}\n")
            whole = checkpoint.with_suffix(f".{os.getpid()}")
            whole.write_text(str(step))
            whole.replace(checkpoint)  # a trial that is killed here leaves no empty checkpoint
        yield {"report": {"step": step, "value": sliced_value(task["params"]["x"], step)}}
        while f'"trial": {number}, "step": {step}, ' not in (folder / "journal.jsonl").read_text():
            time.sleep(0.01)
        if step >= trained:
            time.sleep(0.1)
    yield {"result": {"value": sliced_value(task["params"]["x"], step)}}


def paired(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A training of side A or B: its loss has a part of the seed, and B's is 0.5 less. Side `nan` gives no number."""
    side, seed = task["params"]["side"], task["params"]["seed"]
    yield _start()
    value = math.sin(99.0 * seed) - 0.5 * (side == "B") + 0.1 * math.sin(9.0 * seed + 5.0 * (side == "B"))
    for step, more in ((1, 5.0), (2, -1.0), (3, 0.0)):  # its best report is not its last
        time.sleep(task.get("sleep", 0.0) * (1 + (task["trial"] * 7) % 3))
        yield {"report": {"step": step, "value": value + more}}
    if side == task.get("oom"):
        yield {"fail": {"kind": "oom", "reason": "RESOURCE_EXHAUSTED", "log": None}}
        return
    yield {"result": {"value": math.nan if side == task.get("nan") else value - 1.0}}


def main() -> int:
    import names_of_ray
    import process_ray
    import trial_bodies  # not __main__, which workers cannot import

    from roxxel_dist.sweep.driver import controller
    from roxxel_dist.sweep.driver.controller import run_sweep
    from roxxel_dist.sweep.driver.options import SweepOptions
    from roxxel_dist.sweep.samplers import make
    from roxxel_dist.sweep.space.sweep_file import sweep_of

    study, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    sweep = sweep_of(told["sweep"], told.get("extras"))
    for name, seconds in told.get("times", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(import_module(f"roxxel_dist.{module}"), constant, seconds)
    if told["options"]["ray_address"] == process_ray.ADDRESS:
        names_of_ray.install()
        controller.connected = process_ray.connected

    def task_of(trial: int, params: dict[str, Any], attempt: int) -> dict[str, Any]:
        return {"trial": trial, "params": params, "attempt": attempt, "folder": str(study), **told.get("task", {})}

    with ExitStack() as held:
        ending = run_sweep(
            held.enter_context(opened(told["url"], told["timeout_s"])) if "url" in told else study,
            sweep, lambda: make(sweep, seed=1), getattr(trial_bodies, told["body"]), task_of,
            SweepOptions(**told["options"]), {"CPU": 1.0, **told.get("resources", {})},
            on_change=lambda history, number: None, log=lambda line: print(line, flush=True),
        )  # fmt: skip
        print(ending.reason, flush=True)
        return ending.code


@contextmanager
def opened(url: str, timeout_s: float) -> Iterator[Any]:
    """A study in a bucket, held as `roxxel-dist sweep` holds it; its leases have fewer seconds."""
    from roxxel_dist.objects import lease
    from roxxel_dist.objects.url import ObjectUrl
    from roxxel_dist.place.directory import DEFINITION
    from roxxel_dist.sweep.driver.bucket import driver_bucket

    lease.RENEW_S, lease.STALE_S, lease.POLL_S, lease.SETTLE_S = 0.5, 5.0, 0.1, 0.1
    with driver_bucket(ObjectUrl.parse(url), print, None, timeout_s) as bucket:
        if not bucket.is_there:
            (bucket.path / DEFINITION).write_text("{}")
            bucket.create()
        yield bucket


if __name__ == "__main__":
    sys.exit(main())
