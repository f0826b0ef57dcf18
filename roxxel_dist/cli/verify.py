"""The command verify: whether what is on disk is what was written."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from roxxel_dist.cli.words.flags import Positional
from roxxel_dist.cli.words.parser import parse
from roxxel_dist.launcher.output.console import printable
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.process.exit_codes import EXIT_FAILED, UserError

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
    if ref.step is not None and (folder / str(ref.step)) not in [folder / str(step) for step in steps]:
        known = ", ".join(map(str, steps)) or "none"
        raise UserError(f"RUN is {ref}: {folder} has no checkpoint of step {ref.step}; those there are: {known}")
    verdicts: list[Any] = []
    if steps or folder != ref.run:
        steps = steps if ref.step is None else [ref.step]
        weights = ref.step is None and folder != ref.run and checks.is_export(ref.run)
        paths = [folder / str(step) for step in steps]
        with _progress(checks.size_of(paths)) as advance:
            for verdict in checks.verify_checkpoints(folder, steps, advance):
                verdicts += _show(verdict, args)
        for verdict in checks.set_aside(folder) if ref.step is None else ():
            verdicts += _show(verdict, args)
        for verdict in checks.verify_export(ref.run, lambda _: None) if weights else ():
            verdicts += _show(verdict, args)
        if not verdicts:
            raise UserError(f"PATH is {args.path}: {folder} has no checkpoint yet")
    elif checks.is_export(ref.run):
        with _progress(checks.size_of([ref.run])) as advance:
            for verdict in checks.verify_export(ref.run, advance):
                verdicts += _show(verdict, args)
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
    """Each checkpoint is fetched into a folder of its own, whatever a cache has, compared, and deleted here."""
    import shutil
    import tempfile

    from roxxel_dist.checkpoint import stored_blocks as checks
    from roxxel_dist.place.bucket_run import BucketRun
    from roxxel_dist.process.durable import cache_folder
    from roxxel_dist.settings.usage_errors import usage_errors

    verdicts: list[Any] = []
    cache_folder().mkdir(parents=True, exist_ok=True)
    with usage_errors(), tempfile.TemporaryDirectory(prefix="verify-", dir=cache_folder()) as scratch:
        run = BucketRun(ref.run, scratch, read_only=True)
        folder, kept = run.folder / "checkpoints", run.checkpoints
        steps = sorted(kept.saved(read_only=True))
        if not steps and not kept.damaged():
            return _verify_shards(args)
        if ref.step is not None and ref.step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise UserError(f"RUN is {ref}: {run} has no checkpoint of step {ref.step}; those there are: {known}")
        for step in steps if ref.step is None else [ref.step]:
            kept.fetch_all(step)  # the errors are found again, and reported
            for verdict in checks.verify_checkpoints(folder, [step], lambda _: None):
                verdicts += _show(verdict, args)
            shutil.rmtree(folder / str(step), ignore_errors=True)
        for name in kept.damaged() if ref.step is None else ():
            verdicts += _show(checks.Verdict(name=name, state="renamed"), args)
    return _report(verdicts, args)


def _show(verdict: Any, args: VerifyArgs) -> list[Any]:
    if not args.json:
        print(verdict, flush=True)
    return [verdict]


def _verify_shards(args: VerifyArgs) -> int:
    from roxxel_dist.cli.data import verify_shards
    from roxxel_dist.data.files.discovery import NoShardsError
    from roxxel_dist.settings.usage_errors import usage_errors

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


@contextmanager
def _progress(size: int) -> Iterator[Callable[[int], None]]:
    """On standard error; of little nothing is shown."""
    from roxxel_dist.utils.display import ProgressBars

    with ProgressBars(size >= LARGE).bar("verify", max(1, size)) as advance:
        yield advance
