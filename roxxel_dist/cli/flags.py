"""The arguments of a command: the fields of a dataclass, with their types, docstrings and sections of `--help`. A field
marked `Positional` is given by place, one marked `Short` has a short form too; the others are flags. Where the
dataclass has a Config as `fields`, each field of the Config is a flag as well."""

import dataclasses
import inspect
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from roxxel_dist.utils.component import field_docs

T = TypeVar("T")
POSITIONAL = "given by place"
Positional = Annotated[T, POSITIONAL]
"""The type of an argument that is given by place."""
POSITIONALS, OPTIONS = "Arguments", "Options"
CONFIG_SECTIONS = {
    "phases": "Curriculum, devices, tracking",
    "max_steps": "Run",
    "log_every": "Log, validation, checkpoints",
    "optimizer": "Optimizer",
    "tokenizer_type": "Data",
    "cache_dir": "Data in a bucket",
    "dim": "Model",
    "n_heads": "Attention",
    "pos_encoding": "Positions",
    "expansion": "Feed-forward layer",
    "use_moe": "Mixture of experts",
    "use_lora": "Low-rank adapters (LoRA)",
    "model": "A model of your own",
}
"""The sections of a config's fields, in the order of the help, each by its first field in the order of the classes."""
CLASS_SECTIONS = {"JobOptions": "Processes, restarts, limits", "HostOptions": "Hosts that fail"}
"""The sections of the flags that several commands share, by the class that declares them."""
SWEEP_SECTIONS = {"ray_address": "Ray cluster and resources", "max_trial_time": "Limits"}
"""The sections of the flags of `sweep`, each by its first flag."""


@dataclasses.dataclass(frozen=True)
class Short:
    """A mark: the short form of an option, such as `-f`."""

    flag: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One argument of a command."""

    name: str
    """The field."""
    hint: Any
    """The type, without marks."""
    default: Any
    """`dataclasses.MISSING` where it must be given."""
    owner: type
    """The class whose source has its docstring."""
    section: str
    """The heading that it stands below."""
    short: str = ""
    """The short form."""

    @property
    def doc(self) -> str:
        """The docstring of the field, in one line."""
        return field_docs(self.owner).get(self.name, "")

    @property
    def is_positional(self) -> bool:
        """Whether it is given by place."""
        return self.section == POSITIONALS

    @property
    def is_of_config(self) -> bool:
        """Whether it is a field of a config."""
        return self.section in CONFIG_SECTIONS.values()

    @property
    def is_switch(self) -> bool:
        """Whether its name alone says all."""
        return self.hint is bool and self.default is False and not self.is_of_config

    @property
    def allows_none(self) -> bool:
        """Whether None is a value."""
        return type(None) in get_args(self.hint)

    @property
    def kinds(self) -> list[Any]:
        """The types that its value may have, without None."""
        is_union = get_origin(self.hint) in (Union, UnionType)
        return [part for part in get_args(self.hint) if part is not type(None)] if is_union else [self.hint]

    @property
    def is_yaml(self) -> bool:
        """Whether its value is one word of YAML: a mapping, or a list of some."""
        first = self.kinds[0]
        return get_origin(first) is dict or any(get_origin(part) is dict for part in get_args(first))

    @property
    def is_list(self) -> bool:
        """Whether its value is several words."""
        return any(get_origin(kind) in (tuple, list) for kind in self.kinds) and not self.is_yaml

    @property
    def count(self) -> int | None:
        """The number of words of a tuple; None for any number, or where it is none."""
        inner = get_args(self.hint) if get_origin(self.hint) is tuple else (...,)
        return None if ... in inner else len(inner)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes; empty where it takes others."""
        words = [str(word) for kind in self.kinds if get_origin(kind) is Literal for word in get_args(kind)]
        return (*(["True", "False"] if bool in self.kinds and not self.is_switch else []), *words)

    @property
    def metavar(self) -> str:
        """The placeholder for its value."""
        if self.is_positional:
            return self.name.upper().removesuffix("S") if self.is_list else self.name.upper()
        inner = next(part for part in get_args(self.kinds[0]) if part is not ...) if self.is_list else None
        named: dict[Any, str] = {int: "INT", float: "NUMBER", str: "TEXT"}
        kinds = [inner] if inner else self.kinds
        return "YAML" if self.is_yaml else "|".join(self.choices or [named.get(kind, "VALUE") for kind in kinds])

    @property
    def help(self) -> str:
        """The docstring of the field, with its short form, and its default where that says something."""
        text = f"{self.doc} Short: {self.short}." if self.short else self.doc
        if self.default is dataclasses.MISSING:
            return text if self.is_positional else f"{text} (required)"
        silent = self.default is None or self.default in ("", ()) or self.is_switch
        return text if silent else f"{text} (default: {self.default})"


def flags_of(kind: Any, default: Any = None) -> list[Flag]:
    """The arguments of a command in the order of its help, those of a config's fields among them. `default` has the
    values to show as defaults. Of a class with `own_first` the flags that it declares itself lead."""
    flags = [*_fields_of(kind, default)]
    sections = [POSITIONALS, OPTIONS, *SWEEP_SECTIONS.values(), *CLASS_SECTIONS.values(), *CONFIG_SECTIONS.values()]
    leading = [*inspect.get_annotations(kind)] if getattr(kind, "own_first", False) else []
    places = [*leading, *(flag.name for flag in flags if flag.name not in leading)]
    return sorted(flags, key=lambda flag: (sections.index(flag.section), places.index(flag.name)))


def _fields_of(kind: Any, default: Any) -> Iterator[Flag]:
    types, section, before = get_type_hints(kind, include_extras=True), OPTIONS, ""
    for field in dataclasses.fields(kind):
        name, value = field.name, field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if name == "fields":
            from roxxel_dist.settings.config import FIELD_TYPES

            values, heading = getattr(default, name, value), ""
            for each, hint in FIELD_TYPES.items():
                heading = CONFIG_SECTIONS.get(each, heading)
                yield Flag(name=each, hint=hint, default=getattr(values, each), owner=type(values), section=heading)
            continue
        hint, *marks = get_args(types[name]) if get_origin(types[name]) is Annotated else (types[name],)
        declared = next(base.__name__ for base in kind.__mro__ if name in inspect.get_annotations(base))
        section, before = SWEEP_SECTIONS.get(name, section if declared == before else OPTIONS), declared
        yield Flag(
            name=name,
            hint=hint,
            default=getattr(default, name, value),
            owner=kind,
            section=POSITIONALS if POSITIONAL in marks else CLASS_SECTIONS.get(declared, section),
            short=next((mark.flag for mark in marks if isinstance(mark, Short)), ""),
        )
