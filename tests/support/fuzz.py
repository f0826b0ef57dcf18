"""Every option of every command with values that a slip of the hand gives. No training and no host begins."""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from command_lines import PATHS, flags

from roxxel_dist.cli import main
from roxxel_dist.cli.arguments import ConfigArgs
from roxxel_dist.cli.flags import flags_of

FIELDS = {f"--{flag.name}" for flag in flags_of(ConfigArgs)}
BEGUN = {
    ("launch", "local"): ["--dry-run"],
    ("launch", "ssh"): ["--hosts", "a,b", "--dry-run"],
    ("launch", "exec"): ["--hosts", "a,b", "--via", "ssh {host} {command}", "--dry-run"],
    ("launch", "slurm"): ["--print"],
    ("launch", "ray"): ["--address", "auto", "--hosts", "2", "--dry-run"],
    ("launch", "k8s"): ["--image", "i", "--hosts", "2"],
    ("launch", "member"): ["--hosts", "2", "--index", "0", "--first", "a", "--dry-run"],
    ("data", "build"): ["none", "--out", "new"],
    ("data", "append"): ["none", "--out", "new"],
    ("compare",): ["none", "none"],
    ("export",): ["none", "--format", "hf", "--out", "new"],
    ("merge",): ["none@1:2", "--out", "new"],
    ("batch",): ["none", "--step", "1"],
    ("completion",): ["bash"],
    ("sweep",): ["--sweep_config", "none"],
    ("versus",): ["none.yaml", "none.yaml"],
}
"""Words that a command needs before it looks at the option in question; they name what is not there."""
NEEDED = {"--skip_steps": ["--fork", "none@1", "--run_dir", "new"]}
"""Words without which an option is refused, whatever its value."""
NO_WORDS = {"train", "check-layouts", "find-lr", "sweep", "plan", "doctor", "ps", "demo"}
"""Commands that need no word."""
LONG_RUNNING = {"demo", "doctor", "attach"}
"""Commands that would begin something: only values that no parser takes are tried."""
HUGE = "9" * 40
VALUES = ("", "x", "-1", "0", "nan", "inf", "1e400", HUGE, ".", "no/such/file", "none,none", "\u00b2", "a b", "--", "-")
RAW = re.compile(
    r"Traceback|\[Errno|unicode string|has no attribute|__init__|invalid literal|could not convert|can't decode|╭"
)


def options(path: tuple[str, ...]) -> dict[str, Any]:
    """The options of a command with their types; those of the config's fields with `train` alone."""
    return {
        name: flag.hint for name, flag in flags(path).items()
        if not flag.is_positional and (path == ("train",) or name not in FIELDS)
    }  # fmt: skip


def wrong(hint: Any, value: str) -> bool:
    """Whether a value is surely none of a type: no number, none of the choices, no True and no False."""
    kinds = {hint, *get_args(hint)} | {part for each in get_args(hint) for part in get_args(each)}
    if str in kinds or any(get_origin(kind) in (dict, list, tuple) for kind in kinds):
        return False
    choices = [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    if choices:
        return value not in choices
    if bool in kinds:
        return value.lower() not in ("true", "false")
    try:
        (float if float in kinds else int)(value)
    except ValueError:
        return True
    return False


def words(path: tuple[str, ...], name: str, *values: str) -> list[str]:
    """A command line with an option, given once a value."""
    written = name.replace("_", "-").replace("--", "--", 1) if path[0] in ("launch", "doctor") else name
    base = BEGUN.get(path, [] if path[0] in NO_WORDS else ["none"])
    base = [*base, *NEEDED.get(name, ())]
    if name.replace("_", "-") in base:
        at = base.index(name.replace("_", "-"))
        base = base[:at] + base[at + 2 :]
    given = [word for value in values for word in (f"{written}={value}",)]
    return [*path, *base, *given, *(["--", "true"] if path[0] == "launch" else [])]


def said(line: list[str]) -> tuple[Any, str]:
    """(exit code, what a command says on standard error); the code is an exception where one comes out."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code: Any = main(line)
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = error
    return code, err.getvalue()


def cases() -> Iterator[tuple[tuple[str, ...], str, Any, str]]:
    """(command, option, type, value) , of each case."""
    for path in PATHS:
        for name, hint in options(path).items():
            for value in VALUES:
                if wrong(hint, value) or path[0] not in LONG_RUNNING:
                    yield path, name, hint, value


def complaint(path: tuple[str, ...], name: str, hint: Any, value: str) -> str:
    """What is wrong with what a command says of a value; empty if nothing."""
    line = words(path, name, value)
    code, text = said(line)
    shown = " ".join(line).replace(HUGE, "9…")
    if isinstance(code, Exception):
        return f"{shown}: {code!r}"
    if RAW.search(text):
        return f"{shown}: {text[-300:]}"
    if not wrong(hint, value):
        return "" if code in (0, 1, 2, 69, 74) else f"{shown}: ended with {code}"
    if code != 2:
        return f"{shown}: ended with {code}"
    lines = [each for each in text.splitlines() if each.startswith("roxxel-dist: ")]
    named = name.replace("_", "-") in text.replace("_", "-") and value.strip() in text
    return "" if len(lines) == 1 and named else f"{shown}: {text[-300:]}"
