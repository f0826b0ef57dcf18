"""The page as one file: its text, styles and scripts; for a report also the numbers, with pictures beside it."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from roxxel_dist.process.durable import write_file
from roxxel_dist.run.report import Run, no_pictures
from roxxel_dist.sweep.study.folder import Study
from roxxel_dist.utils.display import plain
from roxxel_dist.view.items import State, state_of
from roxxel_dist.view.run import RunReader
from roxxel_dist.view.web.sections import Sections, item_id, message, sections

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = (
    "uPlot.iife.min.js", "dom.js", "chart.js", "table.js", "parallel.js", "parts.js", "mixture.js", "versus.js",
    "views.js", "page.js",
)  # fmt: skip
"""Scripts in an order in which each uses those before it."""
LIVE = '{"live":true}'
PAGE = "report.html"
LARGE = 200
"""The number of trials from which pictures take seconds, so that a message is printed first."""
MARK = re.compile(r"\{\{(\w+)\}\}")
"""The pattern of placeholders in the template."""


@cache
def _static(name: str) -> str:
    return files("roxxel_dist.view.web").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _parts() -> tuple[str, str]:
    return "\n".join(map(_static, STYLES)), "\n".join(['"use strict";', *map(_static, SCRIPTS)])


def policy(connect: str) -> str:
    """The content security policy: only these styles and scripts, and requests only to `connect`."""
    style, script = (
        f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in _parts()
    )
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src {connect}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def page(title: str, data: str = LIVE) -> str:
    """The text of the page; `data` is JSON, `LIVE` for one that asks its server."""
    style, script = _parts()
    connect = "'self'" if data == LIVE else "'none'"
    values = {
        "title": escape(title),
        "policy": policy(connect),
        "style": style,
        "script": script,
        "data": data.replace("<", "\\u003c"),
    }
    return MARK.sub(lambda mark: values[mark[1]], _static("page.html"))


def write_runs(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page of some runs into a folder, which is created."""
    names = ", ".join(run.name for run in runs)
    return _write(folder, names, [(RunReader(run.path, run.name).read(), {}) for run in runs])


def write_study(study: Study, folder: Path, log: Callable[[str], None]) -> tuple[Path, str]:
    """Write the page of a study, and its pictures, into a folder: (the page, a message if no pictures could be drawn).
    `log` is called with a line if it takes long."""
    from roxxel_dist.sweep.report.mixture import mixtures_of
    from roxxel_dist.sweep.report.plots import draw, importances

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
    path = folder / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, page(title, f'{{"made":{time.time():.0f},{message(list(items), items)[1:]}'))
    return path
