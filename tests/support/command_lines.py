"""Command lines that stand in texts, and what the program's own parsers say against them. No process is started."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from roxxel_dist.cli import COMMANDS, arguments, main, parser
from roxxel_dist.cli.completion import parser_of
from roxxel_dist.cli.flags import Flag
from roxxel_dist.launcher.backends import options
from roxxel_dist.place.bucket_folder import BucketFolder
from roxxel_dist.settings.config import Config

GROUPS = {
    "data": ("build", "append", "info", "verify", "index"),
    "launch": tuple(options()),
}
PATHS = [path for word in COMMANDS for path in ([(word, sub) for sub in GROUPS[word]] if word in GROUPS else [(word,)])]
SPAN = re.compile(r"(?<![`\w])`([^`]+)`(?!`)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"""(?:(?<![\w./'"`$-])(?<!usage: )roxxel-dist|-m roxxel_dist) (?=[a-z])""")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OPERATOR = re.compile(r"[|&;<>()]+")
ELLIPSIS = re.compile(r"(?:…|\.\.\.|CMD…?|WORDS|\"?\$@\"?)")


class Parsed(BaseException):
    """The words of a command are right; what it would do with them is not done."""


def problem(words: list[str]) -> str:
    """What the parser of a command says against its words, the command after `--` included; empty if nothing."""
    return _problem(tuple(words))


@cache
def _problem(given: tuple[str, ...]) -> str:
    words, said = list(given), io.StringIO()
    if words[:1] == ["sweep"] and "--confirm" in words:  # it reads the study before the other words
        at = words.index("--confirm")
        del words[at : at + 2]
    try:
        with _parsing_alone(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(words)
    except Parsed:
        if words[0] in ("launch", "doctor") and "--" in words:
            launched = words[words.index("--") + 1 :]
            return problem(launched) if launched[:1] and launched[0] in COMMANDS else ""
        return ""
    except SystemExit:
        pass
    return " ".join(said.getvalue().split()) or "it is not parsed"


@contextlib.contextmanager
def _parsing_alone() -> Iterator[None]:
    """Within it a command ends by `Parsed` once its words are parsed; config files and buckets need not be there."""
    build, from_yaml, pull = parser.build, Config.from_yaml, BucketFolder.pull

    def parse(*args: Any) -> None:
        build(*args)
        raise Parsed

    parser.build = arguments.build = parse
    Config.from_yaml = lambda path: from_yaml(path) if Path(path).exists() else Config()
    BucketFolder.pull = lambda self: self.folder
    try:
        yield
    finally:
        parser.build = arguments.build = build
        Config.from_yaml, BucketFolder.pull = from_yaml, pull


@cache
def flags(path: tuple[str, ...]) -> dict[str, Flag]:
    """The arguments of a command, as --a_b."""
    return {f"--{name}": flag for name, flag in parser_of([*path]).flags.items()}


FOREIGN = {
    "--batch", "--build-arg", "--exclusive", "--flag", "--gres", "--no-kill", "--no-requeue", "--noheader",
    "--open-mode", "--overlap", "--signal", "--states", "--user", "--xla_gpu_deterministic_ops",
}  # fmt: skip
"""Options of docker, SLURM and XLA that texts name alone."""


def is_option(word: str) -> bool:
    """Whether some command has this option, or another program that is named in FOREIGN."""
    name = "--" + word[2:].replace("-", "_")
    return (
        word in FOREIGN or name.startswith("--slurm_") or name == "--help" or any(name in flags(path) for path in PATHS)
    )


def words_of(text: str) -> list[str]:
    """The words of a command line as a shell has them, up to the first operator or comment; [] if it has no end."""
    text = re.sub(r"(?<=\w)(\|[\w.]+)+", "", text)  # one of several that may stand there
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found = []
    for word in lexer:
        if OPERATOR.fullmatch(word):
            break
        found.append(word)
    return found


def complaint(words: list[str], *, inline: bool) -> str:
    """What is wrong with a command line of a text.

    Args:
        words: without the name of the program.
        inline: it stands within a sentence, where a command may be named without all of its words.
    """
    open_end = any(ELLIPSIS.fullmatch(word) for word in words)
    words = [word for word in words if not ELLIPSIS.fullmatch(word) and word not in ("[options]", "COMMAND", "NAME…")]
    if words[:1] and words[0] in GROUPS and words[1:2] == ["1"]:
        words = [words[0], GROUPS[words[0]][0], *(word for word in words[2:] if word != "1")]  # any of them is put in
    if words and words[0] not in COMMANDS:
        return f"there is no command {words[0]!r}"
    path = tuple(words[: 2 if words and words[0] in GROUPS else 1])
    if inline and (path in PATHS or len(path) < 2) and len(words) <= 2 and not words[len(path) :]:
        return ""  # named alone
    if path not in PATHS:
        return f"there is no command {' '.join(path)!r}"
    words = [re.sub(r"^\[(?=-)|(?<=\w)\]$", "", word) for word in words]
    words = [re.sub(r"\$\{?\w+\}?|\$\([^)]*\)", "1", word) for word in words]
    words = ["1" if re.fullmatch(r"[A-Z][A-Z_]*", word) else word for word in words]
    own = words[: words.index("--")] if "--" in words else words
    given = [word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in own if word.startswith("--")]
    given = [name for name in given if not (path == ("launch", "slurm") and name.startswith("--slurm_"))]
    unknown = [name for name in given if name.split(".")[0] not in {*flags(path), "--help"}]
    if unknown:
        return f"`{' '.join(path)}` has no option {', '.join(unknown)}"
    if open_end or (inline and len(own) == len(path) + len(given) and not any("=" in word for word in own)):
        return ""  # the command and some of its options are named
    if inline and path[0] == "launch" and "--" not in words:
        words = [*words, "--", "true"]
    found = problem(words)
    return "" if inline and "` needs " in found else found


def command_lines(text: str, *, prose: bool) -> Iterator[tuple[int, list[str], bool]]:
    """(line, words, whether within a sentence) of every command line in a text, the words without the program's name.

    Args:
        text: of a page, a script, a file of settings, or a message.
        prose: what stands outside of blocks and of `this` are sentences.
    """
    joined = re.sub(r"\\\n[ #]*", lambda cut: " " + "\0" * cut[0].count("\n"), text)  # keeps the count of lines

    def line(at: int) -> int:
        return joined.count("\n", 0, at) + joined.count("\0", 0, at) + 1

    def split(part: str) -> list[str]:
        return words_of(part.replace("\0", ""))

    fences = [match.span() for match in FENCE.finditer(joined)]
    spans = [match for match in SPAN.finditer(joined) if not any(a < match.start() < b for a, b in fences)]
    for match in spans:
        content = re.sub(r"\n[ #]*", " ", match[1])
        begin = PROGRAM.search(content)
        content = content[begin.end() :] if begin else content
        with contextlib.suppress(ValueError):
            words = split(content)
            if words and (begin or words[0] in COMMANDS):
                yield line(match.start()), words, True
    for match in PROGRAM.finditer(joined):
        if any(span.start() < match.start() < span.end() for span in spans):
            continue
        if prose and not any(a < match.start() < b for a, b in fences):
            continue
        end = match.end()
        while True:  # quotes may hold lines
            end = joined.find("\n", end + 1)
            try:
                words = split(joined[match.end() : None if end < 0 else end])
            except ValueError:
                if end < 0:
                    break
                continue
            yield line(match.start()), words, False
            break


def listed_commands(text: str) -> Iterator[list[str]]:
    """The commands of containers in a manifest or in a compose file, without the program's name."""

    def lists(value: Any) -> Iterator[list[Any]]:
        if isinstance(value, list):
            yield value
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from lists(part)

    for document in yaml.safe_load_all(text):
        for words in lists(document):
            if words[:1] == ["roxxel-dist"]:
                yield words[1:]
        for service in document.get("services", {}).values():
            if "command" in service:
                member = ["launch", "member"] if "ROXXEL_HOSTS" in service.get("environment", {}) else []
                yield member + service["command"]
