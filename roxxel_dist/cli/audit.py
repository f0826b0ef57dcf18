"""The commands that say whether runs are equal: audit, by doing steps again, and compare, by their digests."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator

from roxxel_dist.cli.words.flags import Positional
from roxxel_dist.cli.words.parser import parse
from roxxel_dist.launcher.output.console import printable
from roxxel_dist.process.exit_codes import EXIT_FAILED, UserError
from roxxel_dist.settings.usage_errors import usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditArgs:
    """Repeat steps of a run from its checkpoints, and compare them bit by bit: losses, running digests and checkpoints.
    Exit code 1: something differs. Exit code 2: this machine cannot repeat the steps. The run does not change."""

    run: Positional[str]
    """A run directory, local or in a bucket."""
    steps: str | None = None
    """A:B, the first and the last step, counted from 1. Default: all logged steps."""
    devices: int | None = None
    """Number of devices, simulated on CPU. Default: as many as the run had."""
    every: int = 1
    """Audit only every N-th interval between kept checkpoints."""
    dump: str | None = None
    """With --steps S:S: write the inputs and outputs of that step to this folder: tokens, loss and gradient norms by
    parameter, computed on one device."""
    json: bool = False
    """Print one JSON object instead of lines."""


def audit(words: list[str]) -> int:
    """Repeat steps of a run, and compare them bit by bit."""
    args = parse(AuditArgs, words, "audit")
    with usage_errors():
        steps = _steps(args.steps)
        if args.every < 1:
            raise UserError(f"--every is {args.every}: it must be at least 1")
        if args.dump is not None and (steps is None or steps[0] != steps[1]):
            raise UserError(f"--dump is of one step, and --steps is {args.steps}: write S:S")
        from roxxel_dist.audit.dump import dump
        from roxxel_dist.audit.record import RunRecord
        from roxxel_dist.audit.replay import intervals_of, prepare, replay
        from roxxel_dist.utils.display import ProgressBars

        run = RunRecord.read(args.run)
        intervals = intervals_of(run, steps, args.every)
        with _native_lines_on_stderr():
            prepare(run, intervals[0], args.devices)
        if args.dump is not None:
            with _native_lines_on_stderr():
                text = dump(run, intervals[0], args.dump)
            print(text, flush=True)
            return 0
        total = sum(interval.last - interval.start for interval in intervals)
        digests = all(interval.digests(run) for interval in intervals)
        note = "" if digests else "; no chain of digests covers them, so losses and checkpoints alone are compared"
        show = ProgressBars(not args.json)
        show.line(f"{total:,} steps of {args.run} are done again{note}")
        findings = []
        with show.bar("audit", max(1, total)) as advance, _native_lines_on_stderr():
            for interval in intervals:
                findings.append(replay(run, interval, advance))
                if findings[-1].problem:
                    break
    steps_done, rows, checkpoints = (
        sum(getattr(finding, name) for finding in findings) for name in ("steps", "rows", "checkpoints")
    )
    problem = findings[-1].problem
    verdict = problem or f"equal to the bit over {steps_done:,} steps ({rows:,} rows, {checkpoints} checkpoints)"
    if args.json:
        counts = {"steps": steps_done, "rows": rows, "checkpoints": checkpoints, "digests": digests}
        print(json.dumps({"run": args.run, "equal": not problem, "problem": problem, **counts}))
    else:
        print(verdict, flush=True)
    return EXIT_FAILED if problem else 0


@contextlib.contextmanager
def _native_lines_on_stderr() -> Iterator[None]:
    """Within it what C++ prints on standard output (Gloo, of its connections) goes to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _steps(text: str | None) -> tuple[int, int] | None:
    """Raises ValueError for a text that is no A:B."""
    if text is None:
        return None
    first, mark, last = text.partition(":")
    if not (mark and first.isdecimal() and last.isdecimal()):
        raise UserError(f"--steps is {text!r}: write the first step and the last, as in 101:200")
    return int(first), int(last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Compare two runs by their running digests: the last step at which they are equal bit by bit, and the differences
    of their configs. Exit code 1: a row differs. Exit code 2: the runs have no step in common. The runs may still be
    training."""

    runs: Positional[tuple[str, str]]
    """Two run directories, local or in a bucket."""
    json: bool = False
    """Print one JSON object instead of lines."""


def compare(words: list[str]) -> int:
    """Find the last step up to which two runs are equal, by their digests."""
    args = parse(CompareArgs, words, "compare")
    with usage_errors():
        from roxxel_dist.audit import compare as runs
        from roxxel_dist.audit.record import RunRecord

        comparison = runs.compare(*(RunRecord.read(run) for run in args.runs))
    if args.json:
        print(json.dumps(dataclasses.asdict(comparison)))
    else:
        print(
            f"equal to the bit up to step {comparison.equal_to:,}" if comparison.equal_to else "no logged step is equal"
        )
        if comparison.differs_at is not None:
            print(
                "\n  ".join([f"step {comparison.differs_at:,} is the first logged one that differs:", *comparison.row])
            )
        if comparison.config:
            print(printable("\n  ".join(["what differs in config and surroundings:", *comparison.config])))
    return 0 if comparison.differs_at is None else EXIT_FAILED
