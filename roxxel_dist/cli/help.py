"""The text of `--help`: one line of usage, what the command does, and its flags in sections."""

import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from roxxel_dist.cli.argument_types import POSITIONAL, option_types, parts
from roxxel_dist.utils.component import field_docs

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
MIN_WIDTH, MAX_WIDTH, COLUMN = 60, 100, 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One argument of a command."""

    name: str
    """The field."""
    hint: Any
    """Its type, without marks."""
    default: Any
    """`dataclasses.MISSING` where it must be given."""
    doc: str
    """Its docstring, in one line."""
    section: str
    """The heading that it stands below."""
    is_switch: bool
    """Whether it takes no value."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes; empty where it takes others."""
        literals = [part for part in parts(self.hint) if get_origin(part) is Literal]
        words = [str(word) for part in literals for word in get_args(part)]
        takes_bool = not self.is_switch and bool in parts(self.hint)
        return (*(["True", "False"] if takes_bool else []), *words)

    @property
    def metavar(self) -> str:
        """The placeholder for its value; empty for a switch."""
        if self.is_switch:
            return ""
        if self.choices:
            return "|".join(self.choices)
        if any(get_origin(part) is dict or get_args(part)[:1] == (dict[str, Any],) for part in parts(self.hint)):
            return "YAML"
        return "|".join(_value_name(part) for part in parts(self.hint))

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def help(self) -> str:
        """Its docstring, with its default where that says something."""
        silent = self.default is None or self.default in ("", ()) or (self.is_switch and self.default is False)
        if self.is_required:
            return self.doc if self.section == POSITIONALS else f"{self.doc} (required)"
        return self.doc if silent else f"{self.doc} (default: {self.default})"


def help_text(kind: type, command: str, *, default: Any = None, underscores: bool = True) -> str:
    """The help of a command whose arguments are a dataclass; `default` has values to show as defaults."""
    width = max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size().columns))
    flags = flags_of(kind, default)
    positional = [_positional(flag) for flag in flags if flag.section == POSITIONALS]
    required = [_spelled(flag, underscores) for flag in flags if flag.is_required and flag.section != POSITIONALS]
    lines = [" ".join([f"usage: roxxel-dist {command}", *positional, *required, "[OPTIONS]"])]
    for paragraph in (inspect.getdoc(kind) or "").split("\n\n"):
        lines += ["", *_wrapped(paragraph, width)]
    for section in _order(flags):
        lines += ["", f"{section}:"]
        for flag in flags:
            if flag.section == section:
                shown = _positional(flag) if section == POSITIONALS else _spelled(flag, underscores)
                lines += _entry(shown, flag.help, width)
        if section == OPTIONS:
            lines += _entry("-h, --help", "Print this text.", width)
    return "\n".join(lines)


def flags_of(kind: type, default: Any = None) -> list[Flag]:
    """Every argument of a command, those of a config's fields among them."""
    return [*_fields_of(kind, default), *_config_fields(kind, default)]


def _fields_of(kind: Any, default: Any) -> Iterator[Flag]:
    types, docs, run_on = option_types(kind), field_docs(kind), OPTIONS
    for field in dataclasses.fields(kind):
        name = field.name
        if name == "fields":
            continue
        owner = next(base.__name__ for base in kind.__mro__ if name in inspect.get_annotations(base))
        run_on = SWEEP_SECTIONS.get(name, run_on)
        hint, *marks = get_args(types[name]) if get_origin(types[name]) is Annotated else (types[name],)
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        yield Flag(
            name=name,
            hint=hint,
            default=getattr(default, name, value),
            doc=docs.get(name, ""),
            section=POSITIONALS if POSITIONAL in marks else CLASS_SECTIONS.get(owner, run_on),
            is_switch=hint is bool and value is False,
        )


def _config_fields(kind: Any, default: Any) -> Iterator[Flag]:
    holder = next((field for field in dataclasses.fields(kind) if field.name == "fields"), None)
    if holder is None:
        return
    made: Any = holder.default_factory  # of a ConfigArgs
    values, docs, section = getattr(default, "fields", None) or made(), field_docs(type(made())), ""
    names = {field.name for field in dataclasses.fields(kind)}
    for name, hint in option_types(kind).items():
        if name in names:
            continue
        section = CONFIG_SECTIONS.get(name, section)
        yield Flag(
            name=name, hint=hint, default=getattr(values, name), doc=docs[name], section=section, is_switch=False
        )


def _order(flags: list[Flag]) -> list[str]:
    there = {flag.section for flag in flags}
    known = [POSITIONALS, OPTIONS, *SWEEP_SECTIONS.values(), *CLASS_SECTIONS.values(), *CONFIG_SECTIONS.values()]
    return [section for section in known if section in there or section == OPTIONS]


def _value_name(part: Any) -> str:
    if get_origin(part) in (tuple, list):
        return f"{_value_name(get_args(part)[0])} ..."
    return {int: "INT", float: "NUMBER", str: "TEXT"}.get(part, "VALUE")


def _spelled(flag: Flag, underscores: bool) -> str:
    if underscores:
        return f"--{flag.name} {flag.metavar}".rstrip()
    metavar = flag.metavar.removesuffix(" ...")  # such a flag of `launch` is repeated
    return f"--{flag.name.replace('_', '-')} {metavar}".rstrip()


def _positional(flag: Flag) -> str:
    name = flag.name.upper()
    if get_origin(flag.hint) is not tuple:
        return name
    many = get_args(flag.hint)[-1] is Ellipsis
    one = name.removesuffix("S")
    return f"[{one} ...]" if many else " ".join([one] * len(get_args(flag.hint)))


def _entry(shown: str, text: str, width: int) -> list[str]:
    wrapped = _wrapped(text, width - COLUMN)
    head = f"  {shown}"
    if len(head) <= COLUMN - 2 and wrapped:
        return [head.ljust(COLUMN) + wrapped[0], *(" " * COLUMN + line for line in wrapped[1:])]
    return [head, *(" " * COLUMN + line for line in wrapped)]


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text; what stands in backquotes, such as a command, is not broken."""
    whole = re.sub(r"`[^`]*`", lambda span: "\0".join(span[0].split()), " ".join(text.split()))
    lines = textwrap.wrap(whole, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]
