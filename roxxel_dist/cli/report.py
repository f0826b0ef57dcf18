"""The command that lays runs side by side, or the trials of a study."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.data.files.discovery import check_local
from roxxel_dist.launcher.output import info, printable
from roxxel_dist.place.directory import CONFIG, is_study
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.report import UNKNOWN, Run, differences, draw, no_pictures, read_runs
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.log.timeline import SPENT
from roxxel_dist.utils.display import aligned, counted, duration, plain

if TYPE_CHECKING:
    from roxxel_dist.objects.url import ObjectUrl
    from roxxel_dist.sweep.driver.bucket import StudyBucket


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Compare runs: a table, an HTML page with everything, and pictures of their losses and of how their time was
    spent. Runs may still be training.

    For a study (the folder of a `sweep`), the table, the page and the pictures show its trials. A page is one file and
    needs no server.
    """

    runs: Positional[tuple[str, ...]]
    """Run directories, or one study."""
    out: str | None = None
    """The folder for the page and the pictures. Default: `report`; for a study, `report` in its folder."""
    best_config: str | None = None
    """For a study: write the config of its best trial to this file, for `train --config`."""
    json: bool = False
    """Print JSON instead of the table."""


def report(words: list[str]) -> int:
    """Compare runs, or the trials of a study: losses, speed, goodput, configs, importance."""
    args = parse(ReportArgs, words, "report")
    with usage_errors():
        check_local("--out", args.out)
        check_local("--best_config", args.best_config)
        url = bucket_url(args.runs[0]) if len(args.runs) == 1 else None
        if url is not None and _in_bucket(args, url):
            return 0
        studies = [folder for folder in args.runs if is_study(folder)]
        if studies and len(args.runs) > 1:
            raise UserError(f"{studies[0]} is a study: give its name alone")
        if args.best_config is not None and not studies:
            raise UserError(
                f"--best_config {args.best_config}: {' '.join(args.runs)} is no study: name the folder of a sweep, "
                f"such as studies/NAME"
            )
        missing = _study(args) if studies else _runs(args)
    if missing:
        info(missing)
    return 0


def _runs(args: ReportArgs) -> str:
    """Report runs; returns a message about pictures that could not be drawn."""
    from roxxel_dist.sweep.report.versus import pair_of_runs
    from roxxel_dist.view.web.page import write_runs

    runs, folder = read_runs(args.runs), Path(args.out or "report")
    pictures, missing = [], ""
    try:
        pictures = [str(path) for path in draw(runs, folder)]
    except ImportError:
        missing = no_pictures()
    page, pair = write_runs(runs, folder), pair_of_runs(runs)
    if args.json:
        numbers = [{"name": run.name, "path": str(run.path), **run.numbers()} for run in runs]
        more = {"pair": pair and dataclasses.asdict(pair), "pictures": pictures, "page": str(page)}
        _print_json({"runs": numbers, "differences": differences(runs), **more})
    else:
        print(printable(report_table(runs)))
        if pair is not None:
            print(f"\n{printable(pair.text())}")
        print(f"\npage: {page}")
        if pictures:
            print("pictures: " + ", ".join(pictures))
    return missing


def _in_bucket(args: ReportArgs, url: "ObjectUrl") -> bool:
    """Tell of a study in a bucket; returns whether there is one."""
    from roxxel_dist.objects.store import TIMEOUT_S
    from roxxel_dist.sweep.driver.bucket import reader_bucket

    with reader_bucket(url, TIMEOUT_S) as bucket:
        if bucket.is_there and (missing := _study(args, bucket)):
            info(missing)
        return bucket.is_there


def _study(args: ReportArgs, bucket: "StudyBucket | None" = None) -> str:
    """Report a study; returns a message about pictures that could not be drawn."""
    from roxxel_dist.sweep.report.mixture import mixtures_of
    from roxxel_dist.sweep.report.text import as_json, table, write_best_config
    from roxxel_dist.sweep.report.versus import versus_json, versus_text
    from roxxel_dist.sweep.study.folder import REPORT, read_study
    from roxxel_dist.view.web.page import write_study

    if bucket is None:
        study = read_study(args.runs[0])
    else:
        study = read_study(bucket.path, bucket.url, is_searched=bucket.is_searched)
    if bucket is not None and args.best_config is not None and study.done:
        bucket.fetch_file(study.run_dir(study.done[0]).relative_to(study.path).joinpath(CONFIG).as_posix())
    if bucket is not None:
        bucket.fetch_confirmation()
    best = None if args.best_config is None else write_best_config(study, args.best_config)
    mixtures = mixtures_of(study)
    if not args.json:
        shown = table(study) if study.sweep.versus is None else versus_text(study)
        print(shown, flush=True)  # also where no picture can be written: the study of somebody else
        if mixtures is not None:
            print(printable("\n".join(mixtures.text())), flush=True)
    page, missing = write_study(study, Path(args.out) if args.out else study.path / REPORT, info)
    page = page if bucket is None or args.out else bucket.send_page(page)
    if args.json:
        found = {} if mixtures is None else {"mixture": mixtures.as_json()}
        found |= {} if study.sweep.versus is None else {"versus": versus_json(study)}
        _print_json(as_json(study) | found | {"page": str(page)})
        return missing
    print(f"\npage: {page}")
    if best is not None:
        print(f"config of trial {best.number}: {args.best_config}")
        print(f"train it: roxxel-dist train --config {args.best_config}")
    return missing


def _print_json(whole: dict[str, Any]) -> None:
    print(json.dumps(plain(whole), indent=2))


LONGEST = 40
"""Most characters of a value; longer ones are cut off."""
NUMBERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "steps": ("steps", lambda run: f"{run['steps']:,}"),
    "tokens": ("tokens", lambda run: f"{run['tokens']:,}"),
    **{name: (name, lambda run, name=name: _loss(run[name])) for name in ("train_loss", "val_loss", "val_bpb")},
    "best_val_loss": ("best val_loss", lambda run: f"{run['best_val_loss']:.4f} (step {run['best_step']:,})"),
    "tokens_per_s": ("tokens/s, median", lambda run: f"{run['tokens_per_s']:,.0f}"),
    "parameters": ("parameters", lambda run: f"{run['parameters']:,}"),
    "goodput": ("goodput", lambda run: f"{run['goodput']:.1%}"),
}
"""The title of the line of each key of `Run.numbers`, and its format."""


def report_table(runs: Sequence[Run]) -> str:
    """The results of the runs, the time they spent, and the differences of their configs."""
    numbers = [run.numbers() for run in runs]
    lines = [["", *(run.name for run in runs)]]
    for key, (title, form) in NUMBERS.items():
        lines.append([title, *(UNKNOWN if run[key] is None else form(run) for run in numbers)])
    for name in dict.fromkeys(name for run in numbers for name in run["scalars"]):
        lines.append([name, *(f"{run['scalars'][name]:.4f}" if name in run["scalars"] else UNKNOWN for run in numbers)])
    for kind in SPENT:
        lines.append([f"  {kind}", *(_share(kind, run.spent) for run in runs)])
    gaps = [
        f"{run.name}: {name}: {counted(len(rows), 'value')} not finite, first at step {rows[0].get('step', 0):,}"
        for run in runs
        for name, rows in run.gaps.items()
    ]
    if others := differences(runs):
        config = ["config:", *aligned([[name, *map(_short, values)] for name, values in others.items()], left=None)]
    else:
        config = ["config: no field differs"] if sum(bool(run.fields) for run in runs) > 1 else []
    if len(runs) > 1 and (bare := [run.name for run in runs if not run.fields]):
        config += [f"no config, as a program's Trainer made the model: {', '.join(bare)}"]
    return "\n".join([*aligned(lines, left=None), *(["", *gaps] if gaps else []), *(["", *config] if config else [])])


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _share(kind: str, spent: Mapping[str, float]) -> str:
    if not spent:
        return UNKNOWN
    return f"{spent[kind] / (sum(spent.values()) or 1.0):6.1%}  {duration(spent[kind])}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
