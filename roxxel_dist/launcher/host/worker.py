"""What runs in a rank before the user's program: `python -u -P -m roxxel_dist.launcher.host.worker CMD…`.

`train …` and Python scripts run inside this process, with jax.distributed up and an end that cannot hang. Any other
program replaces this process and finds the contract in its environment.
An exception of jax's runtime has an exit code of its own (`is_runtime_failure`).
"""

import faulthandler
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from roxxel_dist.launcher.host.sources import recorder
from roxxel_dist.launcher.job.spec import program_of
from roxxel_dist.launcher.output import info
from roxxel_dist.process.exit_codes import (
    EXIT_FAILED,
    EXIT_FILES,
    EXIT_HANG,
    EXIT_LOST_RANK,
    EXIT_PORT,
    EXIT_RUNTIME,
    EXIT_TIMEOUT_ENV,
    EXIT_TIMEOUT_TEXT,
    OK_CODES,
    SPARE_ENV,
    STACK_SIGNAL,
    FileSystemError,
    LostRankError,
)
from roxxel_dist.process.interrupt import collect_seldom
from roxxel_dist.process.progress import Progress, agent_pipe, own_record, say_exit

SUBCOMMANDS = frozenset(
    """data batch train find-lr generate eval launch sweep report plan doctor save export verify versus audit compare
    merge top check-layouts""".split()  # noqa: SIM905
)
PYTHON = frozenset({"python", "python3", sys.executable})
JOINING = ("roxxel_dist.cluster.distributed",)
"""Modules that are imported before any program that runs in this process."""
LINGER_S = 1.0
"""How long a rank that has failed waits for its agent to end it."""
HIDES = re.compile(r"-[bBdEhiIOPqsuvx]*S[a-zA-Z]*")
"""Options of Python without site-packages (-S, alone or among others)."""
NOT_FOUND = 127
NOT_RUNNABLE = 126


def main(command: list[str]) -> None:
    """Run one command in this rank. Returns only for an orderly end (0, or SystemExit of 42)."""
    word, *rest = command
    if word in SUBCOMMANDS:
        _run(lambda: _subcommand(word, rest))
    elif _is_this_python(word):
        _python(rest)
    elif word.endswith(".py"):
        _python(command)
    else:
        if _is_called_python(word) and shutil.which(word):
            info(f"{word} is not the launcher's Python ({sys.executable}): jax.distributed is not set up for it")
        _replace(command)


def imports_of(command: Sequence[str]) -> Sequence[str]:
    """The modules that a command imports first; none if it does not run in this process."""
    word, *rest = command
    if imports := program_of(command).imports:
        return (*JOINING, *imports)
    words = rest if word not in SUBCOMMANDS and _is_this_python(word) else [word] if word.endswith(".py") else []
    return JOINING if words and _runs_here(words) else ()


def _runs_here(words: Sequence[str]) -> bool:
    """Whether the words of an interpreter are a script or a module, with no option that takes a new interpreter."""
    options = _options(list(words))
    target = words[len(options) :]
    return set(options) <= {"-u"} and bool(target) and target[0] not in ("-", "-c") and list(target) != ["-m"]


def _is_called_python(word: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", os.path.basename(word)) is not None


def _is_this_python(word: str) -> bool:
    """Whether a word means this interpreter: its plain names, its own path, or that of its virtual environment."""
    if word in PYTHON or not _is_called_python(word):
        return word in PYTHON
    path = shutil.which(word)
    if path is None:
        return False
    folder = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    if os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        return os.path.realpath(folder) == os.path.realpath(sys.prefix)
    return os.path.realpath(path) == os.path.realpath(sys.executable)


def _python(words: list[str]) -> None:
    """`[options] file.py …` or `[options] -m module …`, as the interpreter itself would read them."""
    options = _options(words)
    target = words[len(options) :]
    others = [word for word in options if word != "-u"]
    if not target or target[0] in ("-", "-c") or (target[0] == "-m" and len(target) == 1):
        _replace([sys.executable, *words])
    elif hiding := [word for word in others if HIDES.fullmatch(word)]:
        info(f"python {hiding[0]} hides the installed packages: jax.distributed is not set up for it")
        _replace([sys.executable, *words])
    elif others:  # only a new interpreter can follow them; it comes back here without
        _replace([sys.executable, "-u", "-P", *others, "-m", "roxxel_dist.launcher.host.worker", "python", *target])
    elif target[0] == "-m":
        _run(lambda: _module(target[1], target[2:]))
    else:
        _run(lambda: _script(target[0], target[1:]))


def _options(words: list[str]) -> list[str]:
    """The interpreter's own options at the beginning, with their values."""
    count = 0
    while count < len(words) and words[count].startswith("-") and words[count] not in ("-", "-c", "-m"):
        count += 2 if words[count] in ("-X", "-W", "--check-hash-based-pycs") else 1
    return words[:count]


def _subcommand(word: str, rest: list[str]) -> None:
    collect_seldom()
    program = program_of([word, *rest])
    if program.config:
        recorder().add("--config", os.path.realpath(program.config))
    if program.reports_steps:
        _initialize(then="start")  # to the first word of the trainer
    sys.argv = ["roxxel-dist", word, *rest]
    runpy.run_module("roxxel_dist", run_name="__main__", alter_sys=True)


def _script(path: str, rest: list[str]) -> None:
    if not os.path.exists(path):
        info(f"script not found: {path!r} (looked in {os.getcwd()}); check the path after `--`")
        sys.exit(2)
    recorder().add("__main__", os.path.realpath(path))  # before the ranks of all hosts go on together
    _initialize()
    sys.argv = [path, *rest]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    runpy.run_path(path, run_name="__main__")


def _module(name: str, rest: list[str]) -> None:
    from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

    package, folder = name.partition(".")[0], os.getcwd()
    finders = BuiltinImporter.find_spec(package), FrozenImporter.find_spec(package)
    if not any(finders) and PathFinder.find_spec(package, [folder, *sys.path]) is None:
        info(f"module not found: {name!r} (from {os.getcwd()}); check the name after `python -m`")
        sys.exit(2)
    _initialize()
    sys.path.insert(0, folder)  # only now: a `select.py` there is not what the modules of this package import
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _initialize(then: str = "") -> None:
    """Join the other ranks and report it, then activity `then`. Its default has no limit: steps may go unreported."""
    progress = Progress.from_env(int(os.environ.get("ROXXEL_PROCESS_ID") or 0))
    progress.say("start")
    from roxxel_dist.cluster.distributed import PortTakenError, initialize

    progress.say("join")
    try:
        initialize()
    except PortTakenError as error:
        info(str(error))
        sys.exit(EXIT_PORT)
    progress.say(then)


def _replace(command: list[str]) -> NoReturn:
    """Become another program."""
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored is inherited
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        from roxxel_dist.launcher.host.command import why_not_started  # late: seldom needed

        info(why := why_not_started(command[0], error))
        _leave(NOT_FOUND if why.startswith("program not found") else NOT_RUNNABLE)


def _run(program: Callable[[], None]) -> None:
    """Run Python code so that its failure ends this process now.

    jax.distributed waits at exit for the other ranks, for minutes where they do not come. So only an end that all ranks
    share (0, or 42: drained) goes that way; a failure skips it.
    """
    agent_pipe()  # before the program starts others
    recorder().install()
    recorder().send()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    try:
        program()
    except SystemExit as end:
        code = _exit_code(end)
        if code not in OK_CODES:
            _fail(code)
        _limit_the_wait()
        sys.exit(code)
    except KeyboardInterrupt:
        _leave(130)
    except FileSystemError as error:
        info(str(error))
        _fail(EXIT_FILES)
    except LostRankError as error:
        info(str(error))
        _fail(EXIT_LOST_RANK)
    except BaseException as error:
        error.__traceback__ = _from_program(error.__traceback__)  # the default hook prints this one
        sys.excepthook(type(error), error, error.__traceback__)
        first_step = not own_record().done
        if in_use := first_step and is_tpu_in_use(error):
            info(_who_has_the_tpu())
        _fail(EXIT_RUNTIME if in_use or is_runtime_failure(error, first_step=first_step) else EXIT_FAILED)
    _limit_the_wait()


def _who_has_the_tpu() -> str:
    from roxxel_dist.launcher.host.probe import LOCK, tpu_lock  # late: only such a failure needs it

    text = f"another process has the TPU of {socket.gethostname()}"
    if (why := tpu_lock(LOCK)) is not None:
        return f"{text}: {LOCK}, libtpu's lock, {why}"
    return f"{text}, or had it until now: `sudo lsof /dev/accel* /dev/vfio/*` names it; {LOCK} is free"


def _limit_the_wait() -> None:
    """From now on this rank only waits for the others, in jax's shutdown; when the limit is over, it leaves.

    The launcher, which knows of it, ends the job earlier, and asks for stacks; this is for a rank without one.
    """
    say_exit()
    if limit := float(os.environ.get(EXIT_TIMEOUT_ENV) or 0):
        timer = threading.Timer(limit, _give_up)
        timer.daemon = True
        timer.start()


def _give_up() -> NoReturn:
    info(EXIT_TIMEOUT_TEXT)
    _leave(EXIT_HANG)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy, which say nothing about the program."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename in own:
        start = start.tb_next
    return start or trace


def _fail(code: int) -> NoReturn:
    """Tell the agent of a failure, and leave it to the agent to end this process.

    Once this process is gone, the others fail too, with the connections to it, and on a busy machine they may be seen
    first.
    """
    _flush()
    if agent_pipe().send({"failed": code}):
        time.sleep(LINGER_S)
    _leave(code)


def _leave(code: int) -> NoReturn:
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or replaced by an object of the program
            stream.flush()


NAMES = ("JaxRuntimeError", "XlaRuntimeError")
OF_THE_PROGRAM = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION")
"""Statuses that the same program meets again on any hardware."""
TOO_LARGE = "RESOURCE_EXHAUSTED"
"""Out of memory: in the first step of a rank the program is too large; later something else has taken the memory."""
STATUS = re.compile(
    r"\b(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED"
    r"|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS"
    r"|UNAUTHENTICATED)\b"
)
STATUS_FIRST = re.compile(rf"{STATUS.pattern}: ")
CALLBACK = re.compile(r"callback", re.IGNORECASE)
"""An exception of the user's own function that XLA has called (pure_callback, io_callback) comes as INTERNAL too."""
TPU_IN_USE = re.compile(r"TPU is already in use|libtpu\.so is already in use|libtpu_lockfile", re.IGNORECASE)
"""Another process has the TPU, or has left its lock. jax says so in a RuntimeError."""
TRACEBACK = "Traceback (most recent call last)"


def is_runtime_failure(error: BaseException, *, first_step: bool) -> bool:
    """Whether an exception, or the cause that it names (`raise … from`), is a failure of jax's or XLA's runtime.

    That is one of the cluster, not of the program: a reset connection, an uncorrectable ECC error, NCCL, a network card
    that flaps. It reaches a program as a `jax.errors.JaxRuntimeError`, whose message names a status of absl
    (https://abseil.io/docs/cpp/guides/status-codes), or, from a call that XLA does at once, as a `ValueError` whose
    message begins with one. jax is not imported to look at an error.

    Args:
        error: what ended the program.
        first_step: whether the rank has finished no step yet.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if _is_of_runtime(type(cause)) or (type(cause) is ValueError and STATUS_FIRST.match(str(cause))):
            return _is_infrastructure(str(cause), first_step)
        if isinstance(cause, BaseExceptionGroup):
            return any(is_runtime_failure(part, first_step=first_step) for part in cause.exceptions)
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def is_tpu_in_use(error: BaseException) -> bool:
    """Whether an exception of a rank's start says that another process has the TPU: it may end a moment later."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            break
        if isinstance(cause, RuntimeError) and TPU_IN_USE.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def _is_of_runtime(kind: type[BaseException]) -> bool:
    """By name, in packages of jax; `checkify` has a class of that name for the user's own checks, a ValueError."""
    return any(
        base.__name__ in NAMES and base.__module__.partition(".")[0] in ("jax", "jaxlib") for base in kind.__mro__
    ) and not issubclass(kind, ValueError)


def _is_infrastructure(text: str, first_step: bool) -> bool:
    if TRACEBACK in text and CALLBACK.search(text.partition(TRACEBACK)[0]):
        return False
    found = STATUS.search(text)
    status = found[1] if found else ""
    if status == TOO_LARGE:
        return not first_step
    return status not in OF_THE_PROGRAM


if __name__ == "__main__":
    if SPARE_ENV in os.environ:
        from roxxel_dist.launcher.host.sources import become_rank

        become_rank(imports_of(sys.argv[1:]))
    main(sys.argv[1:])
