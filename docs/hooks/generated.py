"""What the reference takes from the program when the site is built: `<!-- generated: NAME -->` becomes its text.

`cli` is the help of every command, `config` a table of every field.
"""

import contextlib
import dataclasses
import io
import os
import re
from typing import Any, Literal, get_args, get_origin

from roxxel_dist.cli import COMMANDS, main
from roxxel_dist.cli.arguments import field_docs
from roxxel_dist.config import COMPONENTS, FIELD_TYPES, Config

WHOLE = "train"
"""Of the commands that take every field, the one whose help is shown whole."""
TITLES = ("The model", "A model of one's own", "Data", "Data in a bucket", "The loop", "The run", "The optimizer")
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its generated parts; mkdocs calls this for each one."""
    return MARK.sub(lambda match: {"cli": commands, "config": fields}[match[1]](), markdown)


def commands() -> str:
    """A heading and the help of every command; of a group, those of its commands."""
    names = ["", *(f"{name} {sub}".strip() for name in COMMANDS for sub in members(name) or ("",))]
    return "\n\n".join(f"## {name or 'roxxel-dist'}\n\n{section(name)}" for name in names)


def members(name: str) -> list[str]:
    """The commands of a group, as its help lists them; none of a command."""
    text = told(name, "--help")
    return re.findall(r"^  (\S+)  ", text, re.MULTILINE) if f" {name} COMMAND" in text.splitlines()[0] else []


def section(name: str) -> str:
    """The help of one command, without the fields of the config where another command has them in full."""
    text, after = told(*name.split(), "--help"), ""
    own, fields, _ = text.partition("╭─ config field options")
    if fields and name != WHOLE:
        text = own.rstrip()
        after = "\n\nAnd every field of the [config](config.md) as a flag."
    return f"```text\n{text}\n```{after}"


def told(*words: str) -> str:
    """What the program prints, 100 columns wide."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # a terminal of UTF-8, as the boxes want it
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(words)
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if before is None else {"COLUMNS": before})
    out.seek(0)
    return out.read().strip()


def fields() -> str:
    """A table of fields for each component."""
    parts = []
    for title, part in zip(TITLES, COMPONENTS, strict=True):
        docs, defaults = field_docs(part), Config()
        rows = [
            f"| `{name}` | {kind(FIELD_TYPES[name])} | {shown(getattr(defaults, name))} | {escaped(docs[name])} |"
            for name in (field.name for field in dataclasses.fields(part))
        ]
        parts.append(f"## {title}\n\n| Field | Type | Default | |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def kind(held: Any) -> str:
    """A type as a reader of YAML has it; that nothing may be given is told by the default."""
    if get_origin(held) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(held))
    name = held.__name__ if isinstance(held, type) and not get_args(held) else str(held)
    return f"`{name.removesuffix(' | None').replace('typing.', '')}`"


def shown(value: Any) -> str:
    """A default as YAML would have it; nothing where there is none."""
    if value is None or value == "":
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{str(value).lower()}`"


def escaped(text: str) -> str:
    """For a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
