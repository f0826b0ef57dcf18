"""Functions that tests have called in the process of a target's compiler."""

import os
import signal
import time
from pathlib import Path

from roxxel_dist.process.exit_codes import UserError


def environment(report, target):
    report("a program", False)
    report("a program", True)
    print("not a part of the result")
    return {name: os.environ.get(name) for name in target.environment()}


def refuse(report, target):
    raise UserError("dim is 3: it must be even")


def fail(report, target):
    raise ZeroDivisionError("a bug")


def leave(report, target):
    report("a program", False)
    os._exit(3)


def die(report, target):
    report("a program", False)
    os.kill(os.getpid(), signal.SIGKILL)


def take_long(report, target):
    """Two programs are compiled, one of them longer."""
    report("a program", False)
    report("another", False)
    report("another", True)
    time.sleep(1)


def wait_for_ever(report, target, path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(1000)
