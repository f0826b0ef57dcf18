"""On PYTHONPATH of a job: each rank of `train` writes when it came to which place of its start, and what CPU it took.

A line is {"what", "time" (CLOCK_MONOTONIC), "cpu" (of the process)} in $RESTART_MARKS/PID; nothing else is changed.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time

# As `train` would run without it: programs are known without tracing where all modules are installed ones.
sys.modules[__name__].__file__ = None
PLACES = {
    "roxxel_dist.cluster.distributed": {"initialize": "joined"},
    "roxxel_dist.cli.train": {"parse_train": "words read"},
    "roxxel_dist.train.position": {"make_steps": "model's shapes", "restore_start": "restored"},
    "roxxel_dist.train.metrics": {"DeferredMetrics.flush": "first step done"},
    "roxxel_dist.train.loop": {"Loop.enter_phase": "program is there"},
}
IMPORTS = {"jax": "jax imported", "roxxel_dist.run.experiment": "all imported"}


def _mark(what: str) -> None:
    line = {"what": what, "time": time.monotonic(), "cpu": time.process_time()}
    with open(os.path.join(os.environ["RESTART_MARKS"], str(os.getpid())), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _wrap(module: object, name: str, what: str) -> None:
    *parts, last = name.split(".")
    owner = functools.reduce(getattr, parts, module)
    function = getattr(owner, last)

    @functools.wraps(function)
    def wrapped(*args: object, **more: object) -> object:
        result = function(*args, **more)
        if what in _left and result is not False:  # of `flush`: that there was nothing yet
            _left.remove(what)
            _mark(what)
        return result

    setattr(owner, last, wrapped)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name not in PLACES and name not in IMPORTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: object) -> None:
                execute(module)  # type: ignore[arg-type]
                if name in IMPORTS:
                    _mark(IMPORTS[name])
                for function, what in PLACES.get(name, {}).items():
                    _wrap(module, function, what)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_left = [what for places in PLACES.values() for what in places.values()]
if "RESTART_MARKS" in os.environ and "roxxel_dist.launcher.host.worker" in sys.orig_argv:
    _mark("Python is up")
    sys.meta_path.insert(0, _Finder())
