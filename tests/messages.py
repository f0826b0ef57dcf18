"""Every message of the package, and every help text of a command: `python tests/messages.py` lists them to be read."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "roxxel_dist"
SPEAKS = {"info", "print", "log", "text", "line", "warn", "problem", "say", "error", "warning"}
"""Functions and methods whose strings a person reads."""
HELPED = ("Args", "Options", "Config")
"""Ends of the names of classes whose docstrings `--help` shows."""


class Message(NamedTuple):
    """A text, and where it stands."""

    path: Path
    line: int
    kind: str
    """raise, said, or help."""
    text: str

    @property
    def where(self) -> str:
        """FILE:LINE."""
        return f"{self.path.relative_to(PACKAGE.parent)}:{self.line}"


def messages() -> Iterator[Message]:
    """All of them, in the order of files and lines; what is put in is `X`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found = [Message(path, line, kind, text) for line, kind, text in _texts(tree) if " " in text.strip()]
        yield from sorted(set(found), key=lambda message: message.line)


def _texts(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                yield from _strings(argument, "raise")
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SPEAKS:
                for argument in node.args:
                    yield from _strings(argument, "said")
        elif isinstance(node, ast.ClassDef) and node.name.endswith(HELPED):
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                    for paragraph in str(part.value.value).split("\n\n"):
                        yield part.lineno, "help", " ".join(paragraph.split())


def _strings(node: ast.expr, kind: str) -> Iterator[tuple[int, str, str]]:
    """The text of an argument: a constant, an f-string, one of two, or a sum of them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, kind, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        yield node.lineno, kind, "".join(parts)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for side in (node.left, node.right):
            yield from _strings(side, kind)
    elif isinstance(node, ast.IfExp):
        yield from _strings(node.body, kind)
        yield from _strings(node.orelse, kind)


if __name__ == "__main__":
    for message in messages():
        print(f"{message.where}: {message.kind}: {message.text}")
