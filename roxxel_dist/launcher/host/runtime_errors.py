"""Whether an exception is one of jax's or XLA's runtime: a failure of the cluster, not of the program.

A reset connection, an uncorrectable ECC error, NCCL, a network card that flaps: they reach a program as a
`jax.errors.JaxRuntimeError`, whose message names a status of absl (https://abseil.io/docs/cpp/guides/status-codes).
Standard library alone: jax is not imported to look at an error.
"""

import re

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
CALLBACK = re.compile(r"callback", re.IGNORECASE)
"""An exception of the user's own function that XLA has called (pure_callback, io_callback) comes as INTERNAL too."""
TPU_IN_USE = re.compile(r"TPU is already in use|libtpu\.so is already in use|libtpu_lockfile", re.IGNORECASE)
"""Another process has the TPU, or has left its lock. jax says so in a RuntimeError."""
PYTHON = "Traceback (most recent call last)"


def is_runtime_failure(error: BaseException, *, first_step: bool) -> bool:
    """Whether an exception, or the cause that it names (`raise … from`), is a failure of the runtime.

    Args:
        error: what ended the program.
        first_step: whether the rank has finished no step yet.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if _is_of_runtime(type(cause)):
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
    if PYTHON in text and CALLBACK.search(text.partition(PYTHON)[0]):
        return False
    found = STATUS.search(text)
    status = found[1] if found else ""
    if status == TOO_LARGE:
        return not first_step
    return status not in OF_THE_PROGRAM
