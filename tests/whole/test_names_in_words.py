"""Names of the code that docstrings, comments and READMEs of the package mention exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from reader import ROOT

PACKAGE = ROOT / "roxxel_dist"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [*FILES, *sorted(PACKAGE.rglob("*.md"))]
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
OTHERS = ("py", "md", "yaml", "json", "jsonl", "log", "train")
"""Ends of the names of files; and a method of any module."""
QUOTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")


def words_of(path: Path) -> str:
    """A page; of code its docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    strings = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return "\n".join([*strings, *re.findall(r"#.*", text)])


def named(path: Path) -> Iterator[str]:
    """The dotted names of a page that begin with a room of the package: `model.split.split_module`."""
    for name in set(QUOTED.findall(words_of(path))):
        short = name.removeprefix("roxxel_dist.")
        parts = short.split(".")
        if len(parts) > 1 and parts[0] in ROOMS and parts[-1] not in OTHERS:
            yield short


def is_there(name: str) -> bool:
    """Whether the package has such a room or file, or a file that defines the last part."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = "/".join(parts[:count])
        found = [path for path in FILES if f"/{path.relative_to(PACKAGE).with_suffix('')}".endswith(f"/{place}")]
        if count == len(parts) and (found or (PACKAGE / place).is_dir()):
            return True
        defined = rf"(?m)^\s*(?:(?:async )?def|class) {parts[-1]}\b|^\s*{parts[-1]}\s*[:=]|self\.{parts[-1]}\b"
        if any(re.search(defined, path.read_text()) for path in found):
            return True
    return False


def test_names_in_words_exist() -> None:
    missing = [f"{path.relative_to(ROOT)}: {name}" for path in PAGES for name in named(path) if not is_there(name)]
    assert not missing, "\n".join(missing)
