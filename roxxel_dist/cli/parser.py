"""The words of a command line as an object of the dataclass that has the arguments of the command.

Each field is an option, `--name VALUE`; `_` and `-` in a name are the same. A field marked `Positional` is given by
place, one marked `Short` has a short form too. The docstring of a field is its help (`cli/help.py`), and where it says
that the value is in seconds, 5m and 1.5h are times. Nothing here imports a Config, unless the command takes one.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from roxxel_dist.cli.argument_types import POSITIONAL, Short, marks, option_types, parts, plain
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.job.flags import split_flags
from roxxel_dist.utils.component import field_docs

T = TypeVar("T")
HELP = frozenset({"-h", "--help"})
DURATION = re.compile(r"(\d+(?:\.\d*)?)(s|sec|m|min|h|d)")
UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
LONGEST_S = 10 * 365 * 86_400.0
"""The longest time of an option: clocks of the system take no times of 1e20 s."""
BOOLEANS = {"true": True, "false": False}
REMOVED = {
    "launch": {"replace_slow": "leave it out: it compared CPU times, which say nothing about an accelerator"},
    "plan": {"coordinates": "run examples/coordinate_check.py with the config"},
    "sweep": {"keep_gb": "leave it out: paused trials keep their checkpoints, which max_to_keep and --count limit"},
    "train": {"from_step": "begin a new run with --fork RUN@STEP and another --run_dir; RUN stays as it is"},
    "verify": {"deep": "leave it out: all arrays are compared always"},
}
"""Options that a command had, with what to do instead."""


def parse(
    kind: type[T],
    words: list[str],
    command: str,
    *,
    underscores: bool = True,
    default: T | None = None,
    normalised: bool = False,
) -> T:
    """The words as an object.

    With `--help` among them it prints the help of the command and exits with 0.

    Args:
        kind: the dataclass of the arguments.
        words: the command line after the command.
        command: its name, for messages.
        underscores: how options are written in its help: --max_steps, or --max-steps.
        default: has the values of options that are not given; without it the fields' own defaults hold.
        normalised: whether `words` come from `normalise_switches`.

    Raises:
        UserError: a word is no option and has no place, a value is none of its type, or something is not given. The
            message names the option, and the nearest one where there is none of that name.
    """
    if HELP.intersection(words):
        from roxxel_dist.cli.help import help_text

        print(help_text(kind, command, default=default, underscores=underscores))
        raise SystemExit(0)
    return read(kind, words if normalised else normalise_switches(words, kind), command, default)


def read(kind: type[T], words: list[str], command: str, default: T | None) -> T:
    """As `parse`, for words of `normalise_switches` without `--help`."""
    taken = _Arguments(kind, command)
    given = taken.given(words)
    values = {name: taken.value(name, found) for name, found in given.items()}
    names = {field.name for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    of_config = {name: values.pop(name) for name in [*values] if name not in names}
    if default is None:
        return kind(**values)
    if of_config:
        values["fields"] = dataclasses.replace(getattr(default, "fields"), **of_config)  # noqa: B009
    return dataclasses.replace(default, **values)  # pyright: ignore[reportArgumentType]


def flags_in(words: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) of every flag, guessed without knowing which flags take one; "" if none follows."""
    return [(name, value or "") for name, value, _ in split_flags(words) if name]


def normalise_switches(words: list[str], kind: Any) -> list[str]:
    """The words with `--switch True` as `--switch` and False as `--no-switch`, without those that change nothing.

    A field of a config that is true or false gets its value: `--fsdp` alone is `--fsdp True`. So does one with more
    levels.
    """
    types, fields = option_types(kind), dataclasses.fields(kind)
    switches = {field.name: field.default for field in fields if plain(types.get(field.name)) is bool}
    has_config = any(field.name == "fields" for field in fields)
    of_config = {name for name, held in types.items() if held is bool and name not in switches}
    with_levels = {name for name, held in types.items() if bool in parts(held) and name not in switches} - of_config
    takes_words = any(POSITIONAL in marks(hint) for hint in types.values())
    result: list[str] = []
    switch = ""
    for name, value, group in split_flags(words, switches.keys() | of_config):
        flag = group[0].partition("=")[0]
        if not name and switch and not takes_words and group[0].isalnum():  # a path has another message
            raise UserError(f"{switch} {group[0]}: must be True or False")
        is_switch = name in of_config or name.removeprefix("no_") in switches
        if is_switch and value is not None and value.lower() not in BOOLEANS:
            raise UserError(f"{flag} {value}: must be True or False")
        switch = flag if is_switch and value is None else ""
        given = BOOLEANS.get((value or "").lower(), True)
        if name in of_config or (name in with_levels and (value is None or value.lower() in BOOLEANS)):
            result += [flag, str(given)]
        elif has_config and value is not None and (choice := _choice(types.get(name), value)) != value:
            result += [flag, choice]
        elif name not in switches:
            result += group
        elif given != switches[name]:
            result.append(flag if given else f"--no-{flag[2:]}")
    return result


def _choice(hint: Any, value: str) -> str:
    from roxxel_dist.settings.values import as_choice

    return as_choice(hint, value)


class _Arguments:
    """What a command takes."""

    def __init__(self, kind: Any, command: str) -> None:
        hints = option_types(kind)
        self._command = command
        self._types = {name: plain(hint) for name, hint in hints.items()}
        self._docs: Mapping[str, str] = field_docs(kind)
        self._positional = [name for name, hint in hints.items() if POSITIONAL in marks(hint)]
        self._short = {mark.flag: name for name, hint in hints.items() for mark in marks(hint) if type(mark) is Short}
        fields = dataclasses.fields(kind)
        self._switches = {field.name for field in fields if self._types.get(field.name) is bool}
        self._lists = {name for name, held in self._types.items() if any(map(_is_list, parts(held)))}
        no_default = dataclasses.MISSING
        self._required = [field.name for field in fields if field.default is field.default_factory is no_default]

    def flag(self, name: str) -> str:
        """An option as the help of the command writes it."""
        return f"--{name.replace('_', '-') if self._command.startswith(('launch', 'doctor')) else name}"

    @property
    def _all_options(self) -> str:
        return f"`roxxel-dist {self._command} --help` lists all"

    def given(self, words: list[str]) -> dict[str, list[str]]:
        """The words that each argument is given. Raises UserError for a word that belongs to none."""
        result: dict[str, list[str]] = {}
        placed: list[str] = []
        taker = ""  # the argument to which a word without a name belongs
        for name, value, (word, *_) in split_flags(words, self._switches):
            if name:
                taker = self._option(name, value, result)
            elif word in self._short:
                short = self._short[word]
                result[short] = ["True"] if short in self._switches else []
                taker = "" if short in self._switches else short
            elif taker and (taker in self._lists or not result[taker]):
                result[taker].append(word)
            else:
                self._check_word(word, placed)
                placed.append(word)
        self._place(placed, result)
        return result

    def _option(self, name: str, value: str | None, result: dict[str, list[str]]) -> str:
        """Note an option; its name where it takes words that follow."""
        switch = name.removeprefix("no_")
        if switch in self._switches:
            result[switch] = [str(switch == name)]
            return ""
        if name not in self._types or name in self._positional:
            raise UserError(self._no_option(name))
        if value is None and name not in self._lists:
            self.value(name, [])
        words = [] if value is None else [value]
        result[name] = [*result.get(name, []), *words] if name in self._lists else words
        return name if name in self._lists else ""

    def _no_option(self, name: str) -> str:
        if instead := REMOVED.get(self._command.split(maxsplit=1)[0], {}).get(name):
            return f"the option {self.flag(name)} was removed: {instead}"
        if name in self._positional:
            return f"there is no option {self.flag(name)}: {name.upper()} is given by its place: {self._all_options}"
        near = nearest(name, self._option_names)
        hint = f"did you mean {self.flag(near)}?" if near else "the command does not have it;"
        return f"there is no option {self.flag(name)}: {hint} {self._all_options}"

    @property
    def _option_names(self) -> list[str]:
        return [name for name in self._types if name not in self._positional]

    @property
    def _room(self) -> int | None:
        """How many words have a place; None for any number."""
        sizes = [get_args(held) if _is_list(held) else (held,) for held in map(self._types.get, self._positional)]
        return None if any(Ellipsis in size for size in sizes) else sum(map(len, sizes))

    def _check_word(self, word: str, placed: list[str]) -> None:
        """Raises UserError for a word that is neither an option nor a value, where the command has no place for it."""
        command = f"`{self._command}`"
        name, equals, value = word.lstrip("-").partition("=")
        near = nearest(name.replace("-", "_"), self._option_names)
        if word.startswith("-") and word != "-":
            hint = f"did you mean {self.flag(near)}?" if near else self._all_options
            raise UserError(f"there is no option {word}: options begin with two dashes: {hint}")
        if self._room is None or len(placed) < self._room:
            return
        if self._positional:
            names = " and ".join(name.upper() for name in sorted(self._positional))
            raise UserError(
                f"{command} takes one {names}, and {word!r} is one more: leave it out, or write --OPTION {word}"
            )
        hint = ""
        if equals and near:
            hint = f": write {self.flag(near)} {value}"
        elif word.endswith((".yaml", ".yml")) and "config" in self._types:
            hint = f": write --{'sweep_config' if 'sweep_config' in self._types else 'config'} {word}"
        elif "data_path" in self._types:
            hint = f": write --data_path {word}"
        elif "hosts" in self._types:
            hint = f": hosts are separated by commas, as in --hosts a,{word.strip(',')}"
        raise UserError(f"{command} takes only options, and {word!r} is not one{hint}")

    def _place(self, placed: list[str], result: dict[str, list[str]]) -> None:
        """Give words their places. Raises UserError for an argument without a default that is not given."""
        rest = list(placed)
        for name in self._positional:
            held = self._types[name]
            count = 1 if not _is_list(held) else len(rest) if Ellipsis in get_args(held) else len(get_args(held))
            if found := rest[:count]:
                result[name], rest = found, rest[count:]
            if 0 < len(found) < count:
                raise UserError(
                    f"`{self._command}` needs {name.upper()}, {count} words, and has {len(found)}. {self._all_options}"
                )
        missing = {name: self._types[name] for name in self._required if name not in result}
        if takers := [name for name in result if name in self._lists - {*self._positional} and len(result[name]) > 1]:
            for name in {*missing} & {*self._positional}:
                flag, words = self.flag(takers[-1]), " ".join(result[takers[-1]])
                raise UserError(
                    f"`{self._command}` needs {name.upper()}, and {flag} has taken all of {words}: write "
                    f"{name.upper()} before {flag}. {self._all_options}"
                )
        if len(missing) == 1 and placed and {*missing} <= {*self._positional}:
            names = " and ".join(name.upper() for name in sorted(self._positional))
            raise UserError(
                f"`{self._command}` needs {names}, {len(self._positional)} words, and has {len(placed)}. "
                f"{self._all_options}"
            )
        needs = []
        for name, held in missing.items():
            choices = get_args(held) if get_origin(held) is Literal else ()
            shown = name.upper() if name in self._positional else f"{self.flag(name)} "
            shown += "" if name in self._positional else "|".join(choices) or name.upper()
            needs.append(f"{shown} ({self._docs[name].partition('. ')[0].rstrip('.')})")
        if needs:
            raise UserError(f"`{self._command}` needs {'; '.join(needs)}. {self._all_options}")

    def value(self, name: str, words: list[str]) -> Any:
        """The value of an argument. Raises UserError where the words are none of its type."""
        held, flag = self._types[name], name.upper() if name in self._positional else self.flag(name)
        kinds = parts(held)
        if kinds != [held] and words == ["None"]:
            return None
        if _is_yaml(kinds[0]):
            from roxxel_dist.settings.config import parse_yaml

            return parse_yaml(self._one(flag, words, kinds), flag)
        if name in self._lists:
            inner = next(part for part in get_args(kinds[0]) if part is not Ellipsis)
            return get_origin(kinds[0])(self._convert(flag, word, [inner], name) for word in words)
        return self._convert(flag, self._one(flag, words, kinds), kinds, name)

    def _one(self, flag: str, words: list[str], kinds: list[Any]) -> str:
        if words:
            return words[0]
        if str in kinds or _is_yaml(kinds[0]):
            raise UserError(f"{flag} has no value: write {flag} {flag.strip('-').replace('-', '_').upper()}")
        raise UserError(f"{flag} has no value: must be {_what(kinds)}")

    def _convert(self, flag: str, word: str, kinds: list[Any], name: str) -> Any:
        in_seconds = "econds" in self._docs.get(name, "")
        for kind in kinds:
            if get_origin(kind) is Literal and word in get_args(kind):
                return word
            if kind is bool and word.lower() in BOOLEANS:
                return BOOLEANS[word.lower()]
            if kind is float and in_seconds and (match := DURATION.fullmatch(word)):
                word = str(float(match[1]) * UNITS_S[match[2]])
            if kind in (int, float):
                try:
                    number = kind(word)
                except ValueError:
                    continue
                if kind is float and in_seconds and LONGEST_S < number < float("inf"):
                    raise UserError(f"{flag} {word}: must be at most {LONGEST_S:,.0f} seconds, ten years")
                return number
            if kind is str:
                return word
        what = "a number of seconds, or a time such as 5m" if float in kinds and in_seconds else _what(kinds)
        raise UserError(f"{flag} {word}: must be {what}" if word else f"{flag} has no value: must be {what}")


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list) and not _is_yaml(kind)


def _is_yaml(kind: Any) -> bool:
    """Whether a value of this type is one word of YAML: a mapping, or a list of some."""
    return get_origin(kind) is dict or any(get_origin(part) is dict for part in get_args(kind))


def _what(kinds: list[Any]) -> str:
    if choices := [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]:
        return f"one of {', '.join(['True', 'False'] * (bool in kinds) + sorted(choices))}"
    return "a number" if float in kinds else "a whole number" if int in kinds else "True or False"


def nearest(name: str, names: list[str]) -> str | None:
    """The name that was probably meant; None where none is near."""
    from roxxel_dist.settings.config import nearest as near

    return near(name, names)
