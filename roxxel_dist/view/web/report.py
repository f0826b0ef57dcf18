"""The page as one self-contained file, of runs or of a study, with pictures beside it for papers."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from roxxel_dist.run.report import Run, no_pictures
from roxxel_dist.sweep.report.importance import importances
from roxxel_dist.sweep.report.mixture import mixtures_of
from roxxel_dist.sweep.study.folder import Study
from roxxel_dist.utils.display import plain
from roxxel_dist.view.items import State
from roxxel_dist.view.run import RunReader
from roxxel_dist.view.study import state_of
from roxxel_dist.view.web.page import write_page
from roxxel_dist.view.web.sections import Sections, item_id, message, sections

PAGE = "report.html"
LARGE = 200
"""From this number of trials, pictures take seconds, so a message is printed first."""


def write_runs(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page of some runs into a folder, which is created."""
    names = ", ".join(run.name for run in runs)
    return _write(folder, names, [(RunReader(run.path, run.name).read(), {}) for run in runs])


def write_study(study: Study, folder: Path, log: Callable[[str], None]) -> tuple[Path, str]:
    """Write the page of a study, and its pictures, into a folder: (the page, a message if no pictures could be drawn).

    `log` is called with a line if it takes long.
    """
    from roxxel_dist.sweep.report.plots import draw

    if len(study.done) >= LARGE:
        log(f"writing the page of {len(study.done):,} trials …")
    if study.sweep.versus is not None:
        return _write(folder, study.name, [(state_of(study), {})]), ""
    shares, missing = dict[str, float](), ""
    with suppress(ImportError):  # scipy may be missing where a study is only read
        shares = importances(study)
    try:
        draw(study, folder)
    except ImportError:
        missing = no_pictures()
    more = {"importance": json.dumps(shares)} if shares else {}
    if (mixtures := mixtures_of(study)) is not None:
        more["mixture"] = json.dumps(plain(mixtures.as_json()))
    return _write(folder, study.name, [(state_of(study), more)]), missing


def _write(folder: Path, title: str, states: Sequence[tuple[State, Sections]]) -> Path:
    items = {item_id("item", str(number)): sections(state) | more for number, (state, more) in enumerate(states)}
    page = folder / PAGE
    write_page(page, title, f'{{"made":{time.time():.0f},{message(list(items), items)[1:]}')
    return page
