"""What type checkers read of `roxxel_dist/config_fields.py`: `python tests/config_stub.py` writes it anew."""

from pathlib import Path

import roxxel_dist.config_fields
from roxxel_dist.config_fields import field_types

STUB = Path(roxxel_dist.config_fields.__file__).with_suffix(".pyi")
HEAD = """# Written by `python tests/config_stub.py`.
from dataclasses import dataclass
from typing import Any, Literal

PARTS: tuple[type[Any], ...]

def field_types() -> dict[str, Any]: ...
def field_docs(component: type) -> dict[str, str]: ...

@dataclass(kw_only=True)
class AllFields:
"""


def stub() -> str:
    """The text of the stub."""
    return HEAD + "".join(f"    {name}: {_text(kind)} = ...\n" for name, kind in field_types().items())


def _text(kind: object) -> str:
    return kind.__name__ if type(kind) is type else str(kind).replace("typing.", "").replace("'", '"')


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
