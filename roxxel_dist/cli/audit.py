"""The commands that compare: verify, files with their digests; audit, steps done again; compare; check-layouts."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.arguments import ConfigArgs, parse_config, step_range
from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.launcher.output import printable
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.process.exit_codes import EXIT_FAILED, UserError
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.utils.component import MOST_WHOLE

LARGE = 1 << 30
"""Bytes above which the progress is shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyArgs:
    """Comparison of the checkpoints of a run, of an export or of shards with their digests; exits with 1 where
    something is damaged. It reads only."""

    path: Positional[str]
    """RUN for all its checkpoints, RUN@STEP for one, also in a bucket; a folder of checkpoints; what `export` has made,
    or a file of weights; shards: a folder, a file, or a pattern."""
    json: bool = False
    """Print one JSON object instead of lines."""


def verify(words: list[str]) -> int:
    """Compare checkpoints, exports or shards with their digests."""
    args = parse(VerifyArgs, words, "verify")
    from roxxel_dist.checkpoint import stored_blocks as checks
    from roxxel_dist.checkpoint.metadata import CheckpointRef, steps_of

    ref = CheckpointRef.parse(args.path)
    if bucket_url(ref.run) is not None:
        return _verify_in_bucket(ref, args)
    folder = ref.run / "checkpoints" if (ref.run / "checkpoints").is_dir() else ref.run
    steps = steps_of(folder)
    chosen = _chosen_steps(ref, steps, folder)
    verdicts: list[Any] = []
    if steps or folder != ref.run:
        weights = ref.step is None and folder != ref.run and checks.is_export(ref.run)
        with _progress(checks.size_of([folder / str(step) for step in chosen])) as advance:
            verdicts += _show(checks.verify_checkpoints(folder, chosen, advance), args)
        verdicts += _show(checks.set_aside(folder) if ref.step is None else (), args)
        verdicts += _show(checks.verify_export(ref.run, lambda _: None) if weights else (), args)
        if not verdicts:
            raise UserError(f"PATH is {args.path}: {folder} has no checkpoint yet")
    elif checks.is_export(ref.run):
        with _progress(checks.size_of([ref.run])) as advance:
            verdicts += _show(checks.verify_export(ref.run, advance), args)
    else:
        return _verify_shards(args)
    return _report(verdicts, args)


def _report(verdicts: list[Any], args: VerifyArgs) -> int:
    damaged = any(verdict.state == "damaged" for verdict in verdicts)
    if args.json:
        parts = [dataclasses.asdict(verdict) for verdict in verdicts]
        print(json.dumps({"path": args.path, "complete": not damaged, "parts": parts}, indent=2))
    return EXIT_FAILED if damaged else 0


def _verify_in_bucket(ref: Any, args: VerifyArgs) -> int:
    """Verify checkpoints in a bucket, each fetched into a folder of its own, whatever a cache has, and deleted here."""
    import shutil
    import tempfile

    from roxxel_dist.checkpoint import stored_blocks as checks
    from roxxel_dist.place.bucket_run import BucketRun
    from roxxel_dist.process.durable import cache_folder

    verdicts: list[Any] = []
    cache_folder().mkdir(parents=True, exist_ok=True)
    with usage_errors(), tempfile.TemporaryDirectory(prefix="verify-", dir=cache_folder()) as scratch:
        run = BucketRun(ref.run, scratch, read_only=True)
        folder, kept = run.folder / "checkpoints", run.checkpoints
        steps = sorted(kept.list_saved(read_only=True))
        if not steps and not kept.list_damaged():
            return _verify_shards(args)
        for step in _chosen_steps(ref, steps, run):
            kept.fetch_all(step)  # the errors are found again, and reported
            verdicts += _show(checks.verify_checkpoints(folder, [step], lambda _: None), args)
            shutil.rmtree(folder / str(step), ignore_errors=True)
        names = kept.list_damaged() if ref.step is None else ()
        verdicts += _show((checks.Verdict(name=name, state="renamed") for name in names), args)
    return _report(verdicts, args)


def _chosen_steps(ref: Any, steps: list[int], place: Any) -> list[int]:
    """The steps whose checkpoints are compared. Raises UserError where there is none of the step that is named."""
    if ref.step is not None and ref.step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise UserError(f"RUN is {ref}: {place} has no checkpoint of step {ref.step}; those there are: {known}")
    return steps if ref.step is None else [ref.step]


def _show(verdicts: Iterable[Any], args: VerifyArgs) -> Iterator[Any]:
    """The verdicts, each printed as it comes, but for --json."""
    for verdict in verdicts:
        if not args.json:
            print(verdict, flush=True)
        yield verdict


def _verify_shards(args: VerifyArgs) -> int:
    from roxxel_dist.cli.data import verify_shards
    from roxxel_dist.data.files.discovery import NoShardsError

    with usage_errors():
        try:
            complete, lines = verify_shards(args.path)
        except NoShardsError as error:
            raise UserError(
                f"PATH is {args.path}, which holds no checkpoints, weights or shards: name a run, an export or shards"
            ) from error
    report = {"path": args.path, "complete": complete, "lines": lines}
    print(json.dumps(report, indent=2) if args.json else printable("\n".join(lines)))
    return 0 if complete else EXIT_FAILED


@contextlib.contextmanager
def _progress(size: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; of little nothing is shown."""
    from roxxel_dist.utils.display import ProgressBars

    with ProgressBars(size >= LARGE).bar("verify", max(1, size)) as advance:
        yield advance


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
        steps = step_range("--steps", args.steps)
        if args.every < 1:
            raise UserError(f"--every is {args.every}: it must be at least 1")
        if args.dump is not None and (steps is None or steps[0] != steps[1]):
            raise UserError(f"--dump is of one step, and --steps is {args.steps}: write S:S")
        from roxxel_dist.audit.record import RunRecord
        from roxxel_dist.audit.replay import dump, intervals_of, prepare, replay
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
    """A context in which what C++ prints on standard output (Gloo, of its connections) goes to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


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
        from roxxel_dist.audit import record as runs
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


if TYPE_CHECKING:
    from roxxel_dist.layouts.check import LayoutResult
    from roxxel_dist.layouts.compare import Difference

MUCH = 0.9
"""The least error of a gradient, as a share of the largest one, to be named first."""
SHOWN = 4
"""Differences of a layout that are printed, after the first ones of each kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckLayoutsArgs(ConfigArgs):
    """Compare one training step in each layout of the devices with the same step on one device: loss, gradients and
    state, from the same weights on the same rows, in float32. Nothing is trained. Exit code 1: a layout differs."""

    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`."""
    devices: int = 8
    """Number of devices, simulated on CPU. 0: the devices of this machine."""
    layouts: str | None = None
    """Comma-separated: rows, tokens, fsdp, tensor, experts, accum, packing, virtual. Default: all of them."""
    seq_len: int | None = None
    """Tokens of a row. Default: as many as in the longest phase, at most 65."""
    json: bool = False
    """Print one JSON object instead of lines."""


def check_layouts(words: list[str]) -> int:
    """Check that one step is the same in every layout of the devices."""
    with usage_errors():
        args, config = parse_config(CheckLayoutsArgs, words, "check-layouts")
        if args.seq_len is not None and not 2 <= args.seq_len <= MOST_WHOLE:
            raise UserError(f"--seq_len is {args.seq_len}: it must be at least 2, and at most {MOST_WHOLE:,}")
    names = None if args.layouts is None else [name.strip() for name in args.layouts.split(",")]
    from roxxel_dist.layouts.check import check_layouts as check
    from roxxel_dist.layouts.check import report_json

    def show(result: "LayoutResult") -> None:
        if not args.json:
            print(printable("\n".join(_lines(result))), flush=True)

    # With --json nothing else is on standard output, also what the user's code prints.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        report = check(config, args.data_path, devices=args.devices, layouts=names, seq_len=args.seq_len, done=show)
    if args.json:
        print(json.dumps(report_json(report)))
        return 0 if report.agree else EXIT_FAILED
    for note in report.notes:
        print(printable(note))
    compared = [result for result in report.results if result.status in ("agrees", "differs")]
    different = [result.layout for result in report.results if result.status in ("differs", "failed")]
    what = f"{report.parameters:,} parameters, {report.rows} rows of {report.seq_len} tokens"
    agree = "1 layout agrees" if len(compared) == 1 else f"{len(compared)} layouts agree"
    verdict = f"not as on one device: {', '.join(different)}" if different else agree
    print(f"{verdict} ({what}, {report.seconds:.0f} s)", flush=True)
    return 0 if report.agree else EXIT_FAILED


def _lines(result: "LayoutResult") -> list[str]:
    """A line for a layout, and one for each difference that is shown."""
    head = f"{result.layout:<8} {result.status.upper() if result.status == 'differs' else result.status}: {result.text}"
    shown, kinds = list[str](), set[str]()
    gradients = _by_guilt([each for each in result.differences if each.kind == "gradient"])
    for each in result.differences:
        if each.kind == "gradient" and each.kind not in kinds:
            shown.append(f"  {gradients[0]}")
        elif each.kind not in kinds or (each.kind not in ("gradient", "loss") and len(shown) < SHOWN):
            shown.append(f"  {each}")
        kinds.add(each.kind)
    if len(gradients) > 1:
        names = [each.name for each in gradients[1 : SHOWN + 1]] + ["…"] * (len(gradients) > SHOWN + 1)
        shown.append(f"  and {len(gradients) - 1} more gradients: {', '.join(names)}")
    return [head, *shown]


def _by_guilt(gradients: "list[Difference]") -> "list[Difference]":
    """The gradients that are wrong by much, in the order of the backward pass, as the others follow from the first of
    them; and then those that are wrong by little: a small part of the step that goes back through the mistake."""
    most = max((each.share for each in gradients if math.isfinite(each.share)), default=0.0)
    return sorted(gradients, key=lambda each: each.share < MUCH * most)
