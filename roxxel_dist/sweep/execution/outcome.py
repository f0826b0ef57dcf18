"""How a trial's program ended: whose fault it was, and the line that says why."""

import re
from collections.abc import Collection

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_HANG, EXIT_PREFLIGHT

NAN = re.compile(r"went wrong: its loss is|\bBadStep\b|\bFloatingPointError\b")
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|\bMemoryError\b|[Oo]ut of memory|std::bad_alloc")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
SHAPE = re.compile(r"^(TypeError|ValueError)\b.*(shape|dot_general|broadcast|dimension|incompatible)", re.IGNORECASE)
END_LINES = 40
BEGIN = "Traceback (most recent call last):"
MACHINES_FAULT = {
    EXIT_DRAINED: "it was asked to stop by somebody else; its checkpoint is saved",
    EXIT_PREFLIGHT: "the checks before its start failed",
    EXIT_HANG: "it hung",
    75: "its launcher started it again as often as it may",
}
KILLED = {128 + 9: "SIGKILL", 128 + 15: "SIGTERM"}


def machines_fault(code: int, *, ours: bool) -> str | None:
    """Why a trial was lost that would have gone on elsewhere; None where it failed by itself, or did not fail.

    Args:
        code: its exit code, 128 + N for signal N.
        ours: the program is one of this package, whose exit codes mean what they say.
    """
    if code in KILLED:
        return f"its process was killed by {KILLED[code]}"
    return MACHINES_FAULT.get(code) if ours else None


def disk_full(said: str) -> str | None:
    """Why no trial can go on where this one wrote that; None where it did not. It says nothing of its parameters."""
    found = DISK_FULL.search(said)
    return f"a trial could not write ({found[0]}): make room, and start the sweep again" if found else None


def failure(code: int, said: str) -> tuple[str, str]:
    """(kind, reason) of a program that ended with such a code, having written this."""
    # Said last but for what others say while the process ends: W&B's client, its threads.
    bad = next((line for line in reversed(said.splitlines()[-END_LINES:]) if NAN.search(line)), None)
    if bad is not None:
        return "nan", bad.rpartition("roxxel-dist: ")[2].strip()
    reason = last_words(said) or f"it ended with exit code {code} and wrote nothing"
    if OUT_OF_MEMORY.search(reason) or (code > 128 and OUT_OF_MEMORY.search(said)):
        return "oom", reason
    return "shape" if SHAPE.search(reason) else "error", reason


def last_words(said: str) -> str:
    """The line of the last exception, or else the last line."""
    lines = [line.rstrip() for line in said.splitlines()]
    begins = [i for i, line in enumerate(lines) if line.endswith(BEGIN)]
    if begins:
        prefix = lines[begins[-1]].removesuffix(BEGIN)
        after = [line.removeprefix(prefix) for line in lines[begins[-1] + 1 :] if line.startswith(prefix)]
        told = [line for line in after if line and not line[0].isspace()]
        if told:
            return told[0]
    told = [line for line in lines if line.strip()]
    return told[-1].removeprefix("roxxel-dist: ") if told else ""


def unreported(metric: str, names: Collection[str]) -> str:
    """The reason of a trial that ended well and never logged the metric."""
    told = f"it logged {', '.join(sorted(names))}" if names else "it logged nothing"
    return f"the trial ended and never reported {metric!r}: {told}; name one of those under `metric`, or log {metric!r}"
