"""The outcome of a trial's program: what caused its end, and the line with the reason."""

import re

from roxxel_dist.launcher.output import LIBRARY_LOG
from roxxel_dist.process.exit_codes import (
    EXIT_DRAINED,
    EXIT_FILES,
    EXIT_HANG,
    EXIT_LOST_RANK,
    EXIT_NOT_STARTED,
    EXIT_PORT,
    EXIT_PREFLIGHT,
    EXIT_RUNTIME,
)

NAN = re.compile(r"went wrong: its (loss|gradient) is|\bBadStep\b|\bFloatingPointError\b")
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|\bMemoryError\b|[Oo]ut of memory|std::bad_alloc")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
SHAPE = re.compile(r"^(TypeError|ValueError)\b.*(shape|dot_general|broadcast|dimension|incompatible)", re.IGNORECASE)
END_LINES = 40
TRACEBACK = "Traceback (most recent call last):"
OURS = "roxxel-dist: "
"""Begins what this package says."""
MACHINES_FAULT = {
    EXIT_DRAINED: "it was asked to stop by somebody else; its checkpoint is saved",
    EXIT_PREFLIGHT: "the checks before its start failed",
    EXIT_FILES: "its files could not be reached: a file system, or an object store, did not answer",
    EXIT_HANG: "it hung",
    EXIT_NOT_STARTED: "a host could not start one of its ranks",
    EXIT_PORT: "another process took the port of its rank 0",
    EXIT_LOST_RANK: "one of its ranks was lost",
    EXIT_RUNTIME: "the runtime of an accelerator, or of the network between ranks, failed",
    128 + 7: "one of its ranks was killed by SIGBUS",
    128 + 11: "one of its ranks was killed by SIGSEGV",
}
HELD = re.compile(r"renewed its lease \(|was taken away: .* has it now")
"""An attempt that was thought lost still trains in the bucket, or another one does now."""
KILLED = {128 + 9: "SIGKILL", 128 + 15: "SIGTERM"}


def classify_exit(code: int, output: str, *, ours: bool) -> tuple[str, str]:
    """(kind, reason) of a program that failed, by its exit code, 128 + N for signal N, and what it wrote. `ours`: it is
    a program of this package, whose exit codes mean what they say.

    The kind is "lost" where a machine did it, and the trial goes on elsewhere; "fatal" where no trial can go on (a full
    disk says nothing of its parameters); or else what the trial did wrong: nan, oom, shape or error.
    """
    if lost := _loss(code, output, ours=ours):
        return "lost", lost
    if full := disk_full(output):
        return "fatal", full
    # Said last but for what others say while the process ends: W&B's client, its threads.
    bad = next((line for line in reversed(output.splitlines()[-END_LINES:]) if NAN.search(line)), None)
    if bad is not None:
        return "nan", bad.rpartition(OURS)[2].strip()
    reason = last_words(output) or f"it ended with exit code {code} and wrote nothing"
    if OUT_OF_MEMORY.search(reason) or (code > 128 and OUT_OF_MEMORY.search(output)):
        return "oom", reason
    return "shape" if SHAPE.search(reason) else "error", reason


def _loss(code: int, output: str, *, ours: bool) -> str | None:
    """The external reason for which the trial's process ended; None if it failed by itself."""
    if code in KILLED:
        return f"its process was killed by {KILLED[code]}"
    reason = last_words(output)
    if ours and code in MACHINES_FAULT and not (code == EXIT_RUNTIME and OUT_OF_MEMORY.search(output)):
        return MACHINES_FAULT[code]
    return reason if ours and HELD.search(reason) else None


def disk_full(text: str) -> str | None:
    """The reason why no trial can go on, if this text reports a full disk; else None."""
    match = DISK_FULL.search(text)
    return f"a trial could not write ({match[0]}): make room, and start the sweep again" if match else None


def last_words(output: str) -> str:
    """The line of the last exception, or else the last line."""
    lines = [line.rstrip() for line in output.splitlines()]
    begins = [i for i, line in enumerate(lines) if line.endswith(TRACEBACK)]
    if begins:
        prefix = lines[begins[-1]].removesuffix(TRACEBACK)
        after = [line.removeprefix(prefix) for line in lines[begins[-1] + 1 :] if line.startswith(prefix)]
        if error := next(
            (line for line in after if line and not line[0].isspace() and not LIBRARY_LOG.match(line)), ""
        ):
            return error
    return next((line.removeprefix(OURS) for line in reversed(lines) if line.strip()), "")
