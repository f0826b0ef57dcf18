"""The page as one file: its text, styles and scripts, and for a report also the numbers."""

import base64
import hashlib
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from roxxel_dist.process.durable import write_file

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = (
    "uPlot.iife.min.js", "dom.js", "chart.js", "table.js", "parallel.js", "parts.js", "mixture.js", "versus.js",
    "views.js", "page.js",
)  # fmt: skip
"""In this order: each uses those before it."""
LIVE = '{"live":true}'
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


def write_page(path: Path, title: str, data: str) -> None:
    """Write the page with its numbers in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, page(title, data))
