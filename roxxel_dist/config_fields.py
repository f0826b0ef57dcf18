"""The fields of all components as one dataclass.

Type checkers read `config_fields.pyi` instead, since none of them follows `make_dataclass`. `python
tests/config_stub.py` writes it, and a test compares it with what is here.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
from typing import Any, get_type_hints

from roxxel_dist.data.config import DataConfig
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.user_code import OwnConfig
from roxxel_dist.train.config import LoopConfig, OptimizerConfig

PARTS = (ModelConfig, OwnConfig, DataConfig, LoopConfig, OptimizerConfig)


@functools.cache
def field_types() -> dict[str, Any]:
    """Every field's type."""
    return {name: kind for part in PARTS for name, kind in get_type_hints(part).items()}


def field_docs(component: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of those it extends, as one line."""
    docs: dict[str, str] = {}
    for base in reversed(component.__bases__):
        docs |= field_docs(base) if dataclasses.is_dataclass(base) else {}
    body = ast.parse(inspect.getsource(component)).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


AllFields = dataclasses.make_dataclass(
    "AllFields",
    [
        (f.name, field_types()[f.name], dataclasses.field(default=f.default))
        for part in PARTS
        for f in dataclasses.fields(part)
    ],
    kw_only=True,
    namespace={"__doc__": "Every setting of a run.", "__module__": __name__},
)
