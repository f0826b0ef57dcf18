"""The command check-layouts: whether all layouts of a model compute the same step."""

import contextlib
import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING

from roxxel_dist.cli.words.arguments import ConfigArgs, parse_config
from roxxel_dist.launcher.output.console import printable
from roxxel_dist.process.exit_codes import EXIT_FAILED, UserError
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.utils.component import MOST_WHOLE

if TYPE_CHECKING:
    from roxxel_dist.layouts.check import LayoutResult
    from roxxel_dist.layouts.compare import Difference

MUCH = 0.9
"""How wrong a gradient is at least, as a share of the one that is most wrong, to be named first."""
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
    from roxxel_dist.layouts.check import as_json
    from roxxel_dist.layouts.check import check_layouts as check

    def show(result: "LayoutResult") -> None:
        if not args.json:
            print(printable("\n".join(_lines(result))), flush=True)

    # With --json nothing else is on standard output, also what the user's code prints.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        report = check(config, args.data_path, devices=args.devices, layouts=names, seq_len=args.seq_len, done=show)
    if args.json:
        print(json.dumps(as_json(report)))
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
        shown.append(f"  and {len(gradients) - 1} more gradients: {_few([each.name for each in gradients[1:]])}")
    return [head, *shown]


def _by_guilt(gradients: "list[Difference]") -> "list[Difference]":
    """Those that are wrong by much, in the order of the backward pass, as the others follow from the first of them; and
    then those that are wrong by little: a small part of the step that goes back through the mistake."""
    most = max((each.share for each in gradients if math.isfinite(each.share)), default=0.0)
    return sorted(gradients, key=lambda each: each.share < MUCH * most)


def _few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
