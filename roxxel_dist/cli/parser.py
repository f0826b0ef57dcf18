"""The words of a command line as an object of the dataclass that has the arguments of a command (`flags.py`).

argparse reads them. `_` and `-` in the name of a flag are the same, no name is abbreviated, and a value may begin with
a dash. Where the docstring of a field says that it is in seconds, hours or days, 5m and 1.5h are times.
"""

import argparse
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from roxxel_dist.cli.flags import OPTIONS, Flag, flags_of
from roxxel_dist.launcher.job.spec import flags_in, split_flags
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.values import as_choice
from roxxel_dist.utils.component import number_of

T = TypeVar("T")
HELP = frozenset({"-h", "--help"})
DURATION = re.compile(r"(\d+(?:\.\d*)?)(s|sec|m|min|h|d)")
UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
TIMES_S = {"seconds": 1, "hours": 3600, "days": 86_400}
LONGEST_S = 10 * 365 * 86_400.0
"""The longest time of an option: clocks of the system take no times of 1e20 s."""
BOOLEANS = {"true": True, "false": False}
MIN_WIDTH, MAX_WIDTH, COLUMN = 60, 100, 26
"""The width of the text of `--help`, and the column where the texts of flags begin."""


class HelpShown(SystemExit):
    """The end of a command whose help was printed."""

    def __init__(self, parser: "Parser") -> None:
        super().__init__(0)
        self.parser = parser


def parse(kind: type[T], words: list[str], command: str) -> T:
    """The words after a command as an object of its dataclass. Raises UserError where a word is no option and has no
    place, a value is none of its type, or something is not given; it names the option, and the nearest one where there
    is none of that name. Raises HelpShown where `--help` is among the words, and the help was printed."""
    return build(kind, read(kind, words, command), command)


def read(kind: type, words: list[str], command: str) -> dict[str, Any]:
    """The values of the arguments that are given, by their names; raises UserError as `parse` does. With `--help` among
    the words there is the key "help", and the other values are words that nobody has judged."""
    if HELP.intersection(words):
        return {**flags_in(words), "help": True}
    return Parser(kind, command).read(words)


def build(kind: type[T], given: dict[str, Any], command: str, default: T | None = None) -> T:
    """The object with the values of `read`; `default` has the values that are not given."""
    if "help" in given:
        parser = Parser(kind, command, default, with_texts=True)
        print(parser.format_help(), end="")  # print_help says nothing of a full disk, or of a reader that has left
        raise HelpShown(parser)
    if default is None:
        return kind(**given)
    names = {field.name for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    values = {name: value for name, value in given.items() if name in names}
    if of_config := {name: value for name, value in given.items() if name not in names}:
        values["fields"] = dataclasses.replace(getattr(default, "fields"), **of_config)  # noqa: B009
    return dataclasses.replace(default, **values)  # pyright: ignore[reportArgumentType]


class Parser(argparse.ArgumentParser):
    """The parser of a command. With texts it describes the command to a person or a shell, and reads nothing."""

    def __init__(self, kind: Any, command: str, default: Any = None, *, with_texts: bool = False) -> None:
        self.width: int = (
            max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size().columns)) if with_texts else MAX_WIDTH
        )
        super().__init__(
            prog=f"roxxel-dist {command}",
            usage="",
            formatter_class=partial(argparse.RawTextHelpFormatter, max_help_position=COLUMN, width=self.width),
            argument_default=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
        )
        self.kind: Any = kind
        self.command: str = command
        self.flags: dict[str, Flag] = {flag.name: flag for flag in flags_of(kind, default)}
        self.described: list[tuple[Flag, argparse.Action]] = []
        self.places: list[Flag] = [flag for flag in self.flags.values() if flag.is_positional]
        if with_texts:
            self._describe()
        else:
            for flag in self.flags.values():
                self._add(self, flag)

    def _add(self, group: Any, flag: Flag, **texts: Any) -> argparse.Action:
        nargs = (flag.count or "*") if flag.is_list else None
        if flag.is_positional:
            action = group.add_argument(flag.name, action=_Value, nargs=nargs, **texts)
            action.required = False  # `read` looks
            return action
        if flag.short and not texts:
            group.add_argument(flag.short, dest=flag.name, action=_Value, nargs=0 if flag.is_switch else "?")
        nargs = 0 if texts and flag.is_switch else nargs
        return group.add_argument(self.option(flag.name), dest=flag.name, action=_Value, nargs=nargs, **texts)

    def _describe(self) -> None:
        """Give the command its texts, and its arguments their sections."""
        flags = self.flags.values()
        must = [flag for flag in flags if flag.default is dataclasses.MISSING and not flag.is_positional]
        words = [*map(_place, self.places), *(f"{self.option(flag.name)} {flag.metavar}" for flag in must)]
        self.usage: str | None = " ".join([self.prog, *words, "[OPTIONS]"]).replace("%", "%%")
        paragraphs = (inspect.getdoc(self.kind) or "").split("\n\n")
        self.description: str | None = "\n\n".join(_wrapped(text, self.width) for text in paragraphs).replace("%", "%%")
        titles = [flag.section for flag in flags]
        for title in dict.fromkeys([*titles[: len(self.places)], OPTIONS, *titles]):
            group = self.add_argument_group(title)
            for flag in flags:
                if flag.section == title:
                    text = _wrapped(flag.help, self.width - COLUMN).replace("%", "%%")
                    shown = None if flag.is_switch else _place(flag) if flag.is_positional else flag.metavar
                    action = self._add(group, flag, help=text, metavar=shown, choices=flag.choices or None)
                    self.described.append((flag, action))
            if title == OPTIONS:
                group.add_argument("-h", "--help", action="help", help="Print this text.")

    def option(self, name: str) -> str:
        """A flag as the help of the command writes it."""
        return f"--{name.replace('_', '-') if self.command.startswith(('launch', 'doctor')) else name}"

    @property
    def all_options(self) -> str:
        """A hint where a person finds all flags."""
        return f"`{self.prog} --help` lists all"

    def read(self, words: list[str]) -> dict[str, Any]:
        """The values that words give. Raises UserError for a slip in them."""
        namespace, rest = self.parse_known_intermixed_args([*self._spelled(words)])
        given = vars(namespace)
        if rest:
            self._refuse(rest, given)
        self._check_required(given)
        return given

    def _spelled(self, words: list[str]) -> Iterator[str]:
        """The words as argparse takes them: --NAME=VALUE, also for a switch, and where the value begins with a dash."""
        bools = {name for name, flag in self.flags.items() if flag.hint is bool}
        switch = ""
        for name, value, (word, *_) in split_flags(words, bools):
            if not name and switch and not self.places and word.isalnum():  # a path has another message
                raise UserError(f"{switch} {word}: must be True or False")
            if name.startswith("model_args.") and "model_args" in self.flags and name not in self.flags:
                self.flags[name] = dataclasses.replace(self.flags["model_args"], name=name)
                self._add(self, self.flags[name])
            flag, negated = self.flags.get(name), self.flags.get(name.removeprefix("no_"))
            switch = word if value is None and name and negated and negated.hint is bool else ""
            if not name:
                if word == "--":
                    raise UserError(f"there is no option --: {self.all_options}")
                yield word
            elif flag is None and negated and negated.hint is bool and not negated.is_of_config:
                yield f"{self.option(negated.name)}=False"
            elif flag is None or flag.is_positional:
                self._refuse_option(name)
            elif flag.is_list:
                has_own_word = value is not None and not value.startswith("-")
                yield from (
                    [self.option(name), value] if has_own_word else [word if value is None else f"{word}={value}"]
                )
            elif value is None and bool not in flag.kinds:
                self.convert(flag, None)
            else:
                yield f"{self.option(name)}={'True' if value is None else value}"

    def _refuse_option(self, name: str) -> NoReturn:
        """Raises UserError for a flag that the command does not have."""
        if name in self.flags:
            raise UserError(
                f"there is no option {self.option(name)}: {name.upper()} is given by its place: {self.all_options}"
            )
        near = nearest(name, self._options)
        hint = f"did you mean {self.option(near)}?" if near else "the command does not have it;"
        if name == "set" and any(flag.is_of_config for flag in self.flags.values()):
            hint = "each field is an option: write --NAME VALUE;"
        elif name == "config" and self.places and not near:
            hint = f"write the file by its place, as in `{self.prog} {self.places[0].name.upper()}`;"
        raise UserError(f"there is no option {self.option(name)}: {hint} {self.all_options}")

    @property
    def _options(self) -> list[str]:
        return [name for name, flag in self.flags.items() if not flag.is_positional]

    def _refuse(self, rest: Sequence[str], given: dict[str, Any]) -> NoReturn:
        """Raises UserError for words that have no place, of which there is one."""
        word = next((word for word in rest if word.startswith("-")), rest[0])
        name, equals, value = word.lstrip("-").partition("=")
        near = nearest(name.replace("-", "_"), self._options)
        if word.startswith("-"):
            hint = f"did you mean {self.option(near)}?" if near else self.all_options
            raise UserError(f"there is no option {word}: options begin with two dashes: {hint}")
        if short := next((flag for flag in self.places if flag.count and flag.name not in given), None):
            raise UserError(
                f"`{self.command}` needs {short.name.upper()}, {short.count} words, and has {len(rest)}. "
                f"{self.all_options}"
            )
        if self.places:
            names = " and ".join(sorted(flag.name.upper() for flag in self.places))
            raise UserError(
                f"`{self.command}` takes one {names}, and {word!r} is one more: leave it out, or write --OPTION {word}"
            )
        hint = ""
        if equals and near:
            hint = f": write {self.option(near)} {value}"
        elif word.endswith((".yaml", ".yml")) and "config" in self.flags:
            hint = f": write --{'sweep_config' if 'sweep_config' in self.flags else 'config'} {word}"
        elif "data_path" in self.flags:
            hint = f": write --data_path {word}"
        elif "hosts" in self.flags:
            hint = f": hosts are separated by commas, as in --hosts a,{word.strip(',')}"
        raise UserError(f"`{self.command}` takes only options, and {word!r} is not one{hint}")

    def _check_required(self, given: dict[str, Any]) -> None:
        """Raises UserError for arguments without a default that are not given."""
        missing = [
            flag for flag in self.flags.values() if flag.default is dataclasses.MISSING and flag.name not in given
        ]
        takers = [name for name, value in given.items() if self.flags[name].is_list and len(value or ()) > 1]
        for flag in [flag for flag in missing if flag.is_positional and takers]:
            taker, words = self.option(takers[-1]), " ".join(map(str, given[takers[-1]]))
            raise UserError(
                f"`{self.command}` needs {flag.name.upper()}, and {taker} has taken all of {words}: write "
                f"{flag.name.upper()} before {taker}. {self.all_options}"
            )
        needs = []
        for flag in missing:
            shown = flag.name.upper()
            if not flag.is_positional:
                shown = f"{self.option(flag.name)} {'|'.join(flag.choices) or shown}"
            needs.append(f"{shown} ({flag.doc.partition('. ')[0].rstrip('.')})")
        if needs:
            raise UserError(f"`{self.command}` needs {'; '.join(needs)}. {self.all_options}")

    def convert(self, flag: Flag, word: str | None, kinds: Sequence[Any] = ()) -> Any:
        """The value of one word; None: a flag that stands without one. Raises UserError for a word of another type."""
        shown, kinds = flag.name.upper() if flag.is_positional else self.option(flag.name), kinds or flag.kinds
        of_time = float in kinds and not flag.is_of_config
        unit = next((unit for unit in TIMES_S if of_time and re.search(rf"(?i)\b{unit}\b", flag.doc)), "")
        what = f"must be a number of {unit}, or a time such as 5m" if unit else _what(kinds)
        if word is None:
            what = f"write {shown} {flag.name.split('.')[-1].upper()}" if str in kinds or flag.is_yaml else what
            raise UserError(f"{shown} has no value: {what}")
        if word == "None" and flag.allows_none:
            return None
        if flag.is_yaml:
            from roxxel_dist.settings.config import parse_yaml

            return parse_yaml(word, shown)
        for kind in kinds:
            if get_origin(kind) is Literal:
                if (choice := word if bool in kinds else as_choice(kind, word)) in get_args(kind):
                    return choice
            elif kind is bool and word.lower() in BOOLEANS:
                return BOOLEANS[word.lower()]
            elif kind in (int, float):
                if unit and (match := DURATION.fullmatch(word)):
                    word = str(float(match[1]) * UNITS_S[match[2]] / TIMES_S[unit])
                try:
                    whole = number_of(word) if kind is int else None
                    number = whole if isinstance(whole, int) else kind(word)
                except ValueError:
                    continue
                if unit == "seconds" and LONGEST_S < number < float("inf"):
                    raise UserError(f"{shown} {word}: must be at most {LONGEST_S:,.0f} seconds, ten years")
                return number
            elif kind is str:
                return word
        raise UserError(f"{shown} {word}: {what}" if word else f"{shown} has no value: {what}")

    def error(self, message: str) -> NoReturn:
        """Raise a UserError for what argparse says of the words."""
        raise UserError(f"{message}; {self.all_options}")


class _Value(argparse.Action):
    """Keep the value of an argument, by its type; the words of a list that is given again are added to it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        flag = parser.flags[self.dest]
        if not flag.is_list:
            # [] is what Python before 3.13 makes of --NAME=--
            value = parser.convert(flag, "True" if self.nargs == 0 else values or ("--" if values == [] else ""))
        elif values == ["None"] and flag.allows_none:
            value = None
        else:
            (kind,) = flag.kinds
            inner = next(part for part in get_args(kind) if part is not ...)
            found = [parser.convert(flag, word, [inner]) for word in values]
            value = get_origin(kind)([*(getattr(namespace, self.dest, None) or ()), *found])
        setattr(namespace, self.dest, value)


def _what(kinds: Sequence[Any]) -> str:
    if choices := [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]:
        return f"must be one of {', '.join(['True', 'False'] * (bool in kinds) + sorted(choices))}"
    return f"must be {'a number' if float in kinds else 'a whole number' if int in kinds else 'True or False'}"


def _place(flag: Flag) -> str:
    """The words of a usage for an argument that is given by place."""
    return (
        " ".join([flag.metavar] * flag.count)
        if flag.count
        else f"[{flag.metavar} ...]"
        if flag.is_list
        else flag.metavar
    )


def _wrapped(text: str, width: int) -> str:
    """A text in lines; what stands in backquotes, such as a command, is not broken."""
    whole = re.sub(r"`[^`]*`", lambda span: "\0".join(span[0].split()), " ".join(text.split()))
    return textwrap.fill(whole, width, break_on_hyphens=False, break_long_words=False).replace("\0", " ")


def nearest(name: str, names: list[str]) -> str | None:
    """The name that was probably meant; None where none is near."""
    from roxxel_dist.settings.config import nearest as near

    return near(name, names)
