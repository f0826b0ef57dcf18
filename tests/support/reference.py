"""The reference pages, from the program and its docstrings: `make reference` writes them into docs/reference/.

They are committed, for readers of a clone; `test_project_files.py` compares. Of each there is a page in
`reference_pages/`, in which `<!-- generated: NAME -->` becomes text.
NAME is `cli` (the help of every command), `config` (a table of every field), `json` (a row for each schema of
`json_schemas.py`), or the dotted name of a function or class (its signature and docstring). With the path of an
`llms.txt` it writes a list of all pages there.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import json_schemas
import yaml
from command_lines import PATHS

from roxxel_dist.cli import main
from roxxel_dist.cli.arguments import ConfigArgs
from roxxel_dist.cli.flags import CONFIG_SECTIONS, Flag, flags_of
from roxxel_dist.settings.config import COMPONENTS, FIELD_TYPES

PAGES_FROM, FOLDER = Path(__file__).parent / "reference_pages", Path(__file__).parents[2] / "docs" / "reference"
PAGES = ("cli.md", "config.md", "api.md", "json.md")
PART = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
FLAG = re.compile(r"\n(?=  -|\n[A-Z][^\n]*:$)", re.MULTILINE)
EMPTY_SECTION = re.compile(r"\n\n[A-Z][^\n]*:(?=\n\n[A-Z]|\s*\Z)")
WIDTH = 88


def write(folder: Path = FOLDER) -> None:
    """Write the pages into a folder."""
    for name in PAGES:
        (folder / name).write_text(page(name))
    json_schemas.main(folder / "schemas")


def llms(docs: Path) -> str:
    """The pages in the order of the site, each with its first sentence, in the form of llmstxt.org."""
    site = yaml.safe_load((docs.parent / "mkdocs.yml").read_text())
    lines = ["# roxxel-dist", "", f"> {site['site_description']}", ""]
    lines += ["Commands print JSON with `--json`; exit codes are on a page of the reference.", "", "## Pages", ""]
    for title, path in entries(site["nav"]):
        text = (docs / path).read_text()
        first = next((part for part in text.split("\n\n") if re.match(r"\w|`[^`]", part)), "")  # paragraph
        lines.append(f"- [{title}]({path.removesuffix('.md')}.html): {first_sentence(plain_text(first))}")
    return "\n".join(lines) + "\n"


def entries(nav: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(title, path) of every page of the site."""
    for entry in nav:
        for title, below in entry.items():
            yield from [(title, below)] if isinstance(below, str) else entries(below)


def plain_text(markdown: str) -> str:
    """A paragraph on one line, without links."""
    return " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown).split())


def page(name: str) -> str:
    """The text of a page with its parts."""

    def made(match: re.Match[str]) -> str:
        part = match[1]
        return {"cli": commands, "config": fields, "json": outputs}.get(part, lambda: named(part))().strip()

    return PART.sub(made, (PAGES_FROM / name).read_text())


def commands() -> str:
    """A heading and the help of every command; of a group, those of its commands."""
    names, shown = ["", *(" ".join(path) for path in PATHS)], dict[str, str]()
    return "\n\n".join(f"## {name or 'roxxel-dist'}\n\n{help_of(name, shown)}" for name in names)


def help_of(name: str, shown: dict[str, str]) -> str:
    """The help of one command, with links for the fields of the config, and for flags that another command of its group
    has word for word.

    `shown` has the command of each flag so far.
    """
    text, after = said(*name.split(), "--help"), list[str]()
    own, fields, _ = text.partition(f"\n\n{next(iter(CONFIG_SECTIONS.values()))}:\n")
    if fields:
        text = own
        after.append("And the [config fields](config.md).")
    before, kept = {}, list[str]()
    for part in FLAG.split(text):
        flag = re.match(r"  (--[a-z-_]+)", part)
        known = shown.setdefault(f"{name.partition(' ')[0]} {' '.join(part.split())}", name)
        if part.startswith("  -h, --help "):
            continue
        if flag is None or known == name:
            kept.append(part)
        else:
            before.setdefault(known, []).append(f"`{flag[1]}`")
    text = EMPTY_SECTION.sub("", "\n".join(kept)).rstrip()
    after += [f"As in [{known}](#{known.replace(' ', '-')}): {', '.join(flags)}." for known, flags in before.items()]
    return "\n\n".join([f"```text\n{text}\n```", *after])


def said(*words: str) -> str:
    """What the program prints, 100 columns wide."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(words)
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if before is None else {"COLUMNS": before})
    return out.getvalue().strip()


def fields() -> str:
    """A table of fields for each section."""
    flags = [flag for flag in flags_of(ConfigArgs) if flag.name != "config"]
    parts = []
    for section in CONFIG_SECTIONS.values():
        rows = [row(flag) for flag in flags if flag.section == section]
        parts.append(f"## {section}\n\n| Field | Value | Default | |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def row(flag: Flag) -> str:
    default = "" if flag.default in (None, "") else f"`{str(flag.default).lower()}`"
    value = (
        ", ".join(f"`{word.lower()}`" for word in flag.choices)
        or f"{flag.metavar.replace('|', ' or ')}{' ...' * flag.is_list}"
    )
    return f"| `{flag.name}` | {value} | {default} | {escaped(flag.doc).replace('|', '&#124;')} |"


def escaped(text: str) -> str:
    """For markdown: `<` is no HTML where it does not stand in code."""
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in re.split(r"(`[^`]*`)", text))


def named(name: str) -> str:
    """Heading, signature, docstring and members of a public function or class."""
    thing = pkgutil.resolve_name(name)
    title = name.removeprefix("roxxel_dist.")
    if isinstance(thing, type):
        return of_class(name, thing)
    owner, _, last = name.rpartition(".")
    is_method = owner.rpartition(".")[2][:1].isupper()
    title = f"{owner.rpartition('.')[2]}.{last}" if is_method else last
    return entry(name, title, "####" if is_method else "###", of(title, source_of(thing)), docs(inspect.getdoc(thing)))


def entry(name: str, title: str, heading: str, signature: str, text: str) -> str:
    block = f"```text\n{signature}\n```\n\n" if signature else ""
    return f"{heading} {title} {{#{name}}}\n\n{block}{text}".rstrip()


def of_class(name: str, kind: type) -> str:
    """A class with its fields, methods and properties, in the order of the source.

    A property is one line; so is a method without arguments to describe, and one of a class that has no public name,
    which other functions return.
    """
    title, tree = kind.__name__, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    known = {  # a class of numpy or flax may be among its bases: its own fields alone
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    own = [node for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    own = [node for node in own if not node.target.id.startswith("_")]
    settings = [node for node in own if node.target.id in FIELD_TYPES and is_setting(kind)]
    own = [node for node in own if node not in settings]
    signature = ""
    if dataclasses.is_dataclass(kind):
        names = {field.name for field in dataclasses.fields(kind)}
        if is_public(name):
            signature = call(title, [ast.unparse(node) for node in own if node.target.id in names])
    else:
        made = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        ways = [node for node in made if any(ast.unparse(one) == "overload" for one in node.decorator_list)] or made
        signature = "\n".join(of(title, node).removesuffix(" -> None") for node in ways)
    lines = list[str]()
    for node in own:
        text = f": {escaped(known[node.target.id])}" if node.target.id in known else ""
        if text or not signature:
            lines.append(f"- `{node.target.id if signature else ast.unparse(node)}`{text}")
    if settings:
        lines = [f"[Config fields](config.md): {', '.join(f'`{node.target.id}`' for node in settings)}.", "", *lines]
    parts = list[str]()
    methods = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}  # of overloads the last
    for method, node in methods.items():
        if method.startswith("_"):
            continue
        is_property = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
        text = ast.get_docstring(node)
        if is_property:
            hint = f": {ast.unparse(node.returns)}" if node.returns else ""
            lines.append(f"- `{method}{hint}`: {first_sentence(text)}")
        elif not is_public(name) or not re.search(r"^Args:$", text or "", re.MULTILINE):
            lines.append(f"- `{method}({', '.join(words_of(node, with_types=False))})`: {first_sentence(text)}")
        else:
            dotted = f"{title}.{method}"
            parts.append(entry(f"{name}.{method}", dotted, "####", of(dotted, node), docs(text)))
    text = "\n\n".join(filter(None, [docs(ast.get_docstring(tree)), "\n".join(lines).strip()]))
    return "\n\n".join([entry(name, title, "###", signature, text), *parts])


def is_public(name: str) -> bool:
    """Whether a dotted name is one of those that users import."""
    package, _, last = name.rpartition(".")
    return last in getattr(importlib.import_module(package), "__all__", ())


def is_setting(kind: type) -> bool:
    """Whether the fields of a class are those of a config."""
    return kind in COMPONENTS


def outputs() -> str:
    """A row for each command that prints JSON."""
    rows = ["| Command | Schema | Value |", "|---|---|---|"]
    for command, schema in json_schemas.schemas().items():
        file = json_schemas.file_of(command)
        kinds = schema.get("anyOf", [schema])
        values = " or ".join(kind["description"].rstrip(".") for kind in kinds)
        rows.append(f"| `{command} --json` | [{file}](schemas/{file}) | {escaped(values)} |")
    for command, schema in json_schemas.messages().items():
        file = json_schemas.file_of(command)
        rows.append(f"| `{command}` | [{file}](schemas/{file}) | {escaped(schema['description'].rstrip('.'))} |")
    return "\n".join(rows)


def first_sentence(text: str | None) -> str:
    return escaped(re.split(r"(?<=\.)\s", " ".join((text or "").split("\n\n")[0].split()), maxsplit=1)[0])


def source_of(function: object) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]  # type: ignore[arg-type]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def of(title: str, tree: ast.FunctionDef) -> str:
    """The signature as the source has it, without `self`."""
    return call(title, words_of(tree)) + (f" -> {ast.unparse(tree.returns)}" if tree.returns else "")


def words_of(tree: ast.FunctionDef, *, with_types: bool = True) -> list[str]:
    """The arguments of a function, without `self`."""
    args, given = tree.args, [*tree.args.posonlyargs, *tree.args.args]
    defaults = [None] * (len(given) - len(args.defaults)) + args.defaults
    words = [argument(arg, default, with_types=with_types) for arg, default in zip(given, defaults, strict=True)]
    if given and given[0].arg in ("self", "cls"):
        words = words[1:]
    if args.posonlyargs:
        words.insert(len(args.posonlyargs) - (given[0].arg in ("self", "cls")), "/")
    if args.vararg:
        words.append(f"*{argument(args.vararg, None, with_types=with_types)}")
    elif args.kwonlyargs:
        words.append("*")
    words += [
        argument(arg, default, with_types=with_types)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    words += [f"**{argument(args.kwarg, None, with_types=with_types)}"] if args.kwarg else []
    return words


def argument(arg: ast.arg, default: ast.expr | None, *, with_types: bool = True) -> str:
    hint = f": {ast.unparse(arg.annotation)}" if arg.annotation and with_types else ""
    equals = " = " if hint else "="
    return arg.arg + hint + (equals + ast.unparse(default) if default else "")


def call(title: str, words: list[str]) -> str:
    line = f"{title}({', '.join(words)})"
    return line if len(line) <= WIDTH else "\n".join([f"{title}(", *(f"    {word}," for word in words), ")"])


def docs(text: str | None) -> str:
    """A docstring as markdown: its sections are lists."""
    blocks = []
    for block in (text or "").split("\n\n"):
        head, _, rest = block.partition("\n")
        match = SECTION.match(head)
        if not match:
            blocks.append(escaped(block) if not block.startswith("    ") else block)
            continue
        items: list[str] = []
        for line in textwrap.dedent(rest).splitlines():
            if line.startswith(" "):
                items[-1] += f" {line.strip()}"
            else:
                items.append(line)
        if match[1] in ("Returns", "Yields"):
            blocks.append(f"{match[1]}: {escaped(' '.join(items))}")
            continue
        parted = [item.partition(": ") for item in items]
        lines = [f"- `{key}`: {escaped(text)}" if text else f"- {escaped(key)}" for key, _, text in parted]
        blocks.append("\n".join([f"{match[1]}:", "", *lines]))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    write()
    for path in sys.argv[1:]:
        Path(path).write_text(llms(FOLDER.parent))
