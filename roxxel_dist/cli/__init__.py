"""The command line: one small function a sub-command, nothing that computes.

What `--help` touches imports neither jax nor numpy, so that it answers at once.
"""

import contextlib
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence

from roxxel_dist.cli.arguments import as_flags
from roxxel_dist.cli.data import data_build, data_info, data_verify
from roxxel_dist.cli.doctor import doctor
from roxxel_dist.cli.jobs import attach, logs, ps, stop
from roxxel_dist.cli.launch import command_of
from roxxel_dist.cli.models import evaluate, export, generate
from roxxel_dist.cli.report import report
from roxxel_dist.cli.sweep import sweep
from roxxel_dist.cli.train import batch, find_lr, plan, save, train
from roxxel_dist.cluster import interrupt
from roxxel_dist.cluster.exit_codes import EXIT_FILES, EXIT_USAGE, FileSystemError
from roxxel_dist.config import UsageError
from roxxel_dist.launcher.output.console import info

Command = Callable[[list[str]], int]


def main(argv: Sequence[str]) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    words = list(argv)
    if words[:1] == ["--version"]:
        from roxxel_dist import __version__

        print(f"roxxel-dist {__version__}")
        return 0
    if words[:1] and words[0] in HEAR_THEMSELVES:
        interrupt.end()
    # It warns where HOME cannot be written, and does without.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        _check_text(words)
        return _dispatch("", COMMANDS, words)
    except UsageError as error:
        info(as_flags(str(error)))
        return EXIT_USAGE
    except FileSystemError as error:
        info(as_flags(str(error)))
        return EXIT_FILES
    except KeyboardInterrupt:
        return 130


def _check_text(words: list[str]) -> None:
    """Raises UsageError for names that the locale makes no text of: they could not be written down in any file."""
    folder = ""
    with contextlib.suppress(FileNotFoundError):
        folder = os.getcwd()
    for text in (*words, folder):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{text!a} is no text in this locale ({sys.getfilesystemencoding()}), and a run is written in UTF-8: "
                f"set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
            ) from error


def _dispatch(group: str, table: dict[str, Command], words: list[str]) -> int:
    """Call the command that the first word names, or tell which there are."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(group, table))
        return 0 if words else EXIT_USAGE
    word, full = words[0], f"{group} {words[0]}".strip()
    if word in table:
        return table[word](words[1:])
    near = difflib.get_close_matches(word, table, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(table)}"
    raise UsageError(f"there is no command {full!r}: {hint}")


def _overview(group: str, table: dict[str, Command]) -> str:
    width = max(map(len, table))
    lines = [
        f"  {name:<{width}}  {(command.__doc__ or '').splitlines()[0].rstrip('.')}" for name, command in table.items()
    ]
    name = f"roxxel-dist {group}".strip()
    what = (ABOUT.get(group) or "") + "\n\n"
    return (
        f"usage: {name} COMMAND …\n\n{what}"
        + "\n".join(lines)
        + f"\n\n`{name} COMMAND --help` tells the options of a command."
    )


ABOUT = {
    "": "Launch, feed and train language models in JAX and Flax NNX on many hosts.",
    "data": "Tokens on disk.",
    "launch": "Start one program as many processes that know each other, and watch over them.",
}


def data(words: list[str]) -> int:
    """Make, describe and check shards of tokens: build, info, verify."""
    return _dispatch("data", {"build": data_build, "info": data_info, "verify": data_verify}, words)


def launch(words: list[str]) -> int:
    """Start a program as many processes, here or on many hosts, and watch over them."""
    from roxxel_dist.launcher.backends import options

    return _dispatch("launch", {name: command_of(name, kind) for name, kind in options().items()}, words)


HEAR_THEMSELVES = frozenset({"sweep", "launch", "ps", "logs", "attach", "stop", "save", "doctor"})
"""Commands that wait for other processes, and tell or ask them something when they are interrupted."""
COMMANDS: dict[str, Command] = {
    "data": data,
    "batch": batch,
    "train": train,
    "find-lr": find_lr,
    "plan": plan,
    "save": save,
    "eval": evaluate,
    "generate": generate,
    "export": export,
    "report": report,
    "sweep": sweep,
    "launch": launch,
    "doctor": doctor,
    "ps": ps,
    "logs": logs,
    "attach": attach,
    "stop": stop,
}
