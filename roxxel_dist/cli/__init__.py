"""The command line: one small function a sub-command, nothing that computes. What `--help` touches imports neither jax
nor numpy, so that it answers at once."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name

from roxxel_dist.launcher.backends import BACKENDS
from roxxel_dist.launcher.output import info
from roxxel_dist.objects.errors import StoreError, StoreTimeoutError
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import EXIT_FAILED, EXIT_FILES, EXIT_USAGE, FileSystemError, UserError
from roxxel_dist.utils.display import aligned
from roxxel_dist.utils.voice import command_line

NO_THREAD = "can't start new thread"
"""The words of Python where ulimit -u, or the pids.max of a container, is used up."""
Command = Callable[[list[str]], int]


def main(argv: Sequence[str]) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    words = list(argv)
    if words[:1] == ["--version"]:
        print(_versions())
        return 0
    if words[:1] and words[0] in HANDLE_INTERRUPTS:
        interrupt.end()
    # It warns where HOME cannot be written, and does without.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with command_line():
        return _run(words)


def _run(words: list[str]) -> int:
    """The exit code of a command; a mistake in it is printed in one line."""
    try:
        _check_text(words)
        if words and words[0] in COMPUTE and not HELP.intersection(words):
            from roxxel_dist.cluster.versions import check_versions

            check_versions()
            if "XLA_FLAGS" in os.environ:
                from roxxel_dist.cluster.xla_flags import check_flags

                check_flags()
        return _dispatch("", COMMANDS, lambda word: resolve_name(COMMANDS[word]), words)
    except (UserError, FileSystemError) as error:
        info(str(error))
        return error.exit_code
    except StoreError as error:
        info(str(error))
        return EXIT_FILES if isinstance(error, StoreTimeoutError) else EXIT_FAILED
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        info("no thread can be started: you have as many processes here as are allowed; end some, or raise `ulimit -u`")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _versions() -> str:
    """The version of this package, of Python, and of what decides the numbers and the processes of a run."""
    from importlib.metadata import PackageNotFoundError, version

    lines: list[str] = []
    for name in ("roxxel-dist", *VERSIONS):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # roxxel-dist itself too, on PYTHONPATH alone
            lines.append(f"{name} not installed")
    lines.insert(1, f"python {sys.version.split()[0]}")
    return "\n".join(lines)


def _check_text(words: list[str]) -> None:
    """Check that names are text in this locale, so that a file can name them, and that the working directory, to which
    nearly all of them are relative, is there. Raises UserError."""
    folder = ""
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        if words and words[0] not in ANYWHERE and not HELP.intersection(words):
            raise UserError(
                "the working directory is gone (deleted, or replaced by a new one of its name): change to one that is "
                'there, as with `cd "$PWD"`'
            ) from error
        os.chdir("/")  # a run is named by its id, or by a whole path
    for text in (*words, folder):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            encoding = sys.getfilesystemencoding()
            cure = "set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
            if encoding == "utf-8":
                cure = "write the text in UTF-8 too, and rename a file or folder whose name is not"
            raise UserError(
                f"{text!a} is no text in this locale ({encoding}), and a run is written in UTF-8: {cure}"
            ) from error


def _dispatch(group: str, names: Iterable[str], find: Callable[[str], Command], words: list[str]) -> int:
    """Call the command that the first word names, or list the commands."""
    if not words or words[0] in HELP:
        print(_overview(group, {name: find(name) for name in names}))
        return 0 if words else EXIT_USAGE
    word, full = words[0], f"{group} {words[0]}".strip()
    if word in names:
        return find(word)(words[1:])
    import difflib

    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    if group == "launch" and not near:
        line = "launch local --nprocs 2 -- train --data_path DIR"
        raise UserError(f"there is no launcher {word!r}: write one of {', '.join(names)} first, as in `{line}`")
    raise UserError(f"there is no command {full!r}: {hint}")


def _overview(group: str, commands: dict[str, Command]) -> str:
    rows = [(f"  {name}", (command.__doc__ or "").splitlines()[0].rstrip(".")) for name, command in commands.items()]
    name = f"roxxel-dist {group}".strip()
    lines = [f"usage: {name} COMMAND …", "", ABOUT[group], "", *aligned(rows, left=None), ""]
    lines.append(f"`{name} COMMAND --help` lists the options of a command.")
    if not group:
        lines.append("`roxxel-dist --version` prints the versions of this package and of those that it uses.")
    return "\n".join(lines)


VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "ray", "wandb", "obstore")
"""The packages whose versions `--version` prints."""
ABOUT = {
    "": "Launch, feed and train language models in JAX and Flax NNX on many hosts.",
    "data": "Tokens on disk.",
    "launch": "Start one program as many processes that know each other, and watch over them.",
}


def data_group(words: list[str]) -> int:
    """Make, describe and check shards of tokens: build, append, info, verify, index."""
    return _dispatch("data", DATA, lambda word: resolve_name(DATA[word]), words)


def launch_group(words: list[str]) -> int:
    """Start a program as many processes, here or on many hosts, and watch over them."""
    from roxxel_dist.cli.launch import command_of

    return _dispatch("launch", BACKENDS, command_of, words)


HELP = frozenset({"-h", "--help", "help"})
COMPUTE = frozenset({
    "demo", "batch", "train", "find-lr", "plan", "eval", "generate", "merge", "export", "verify", "audit",
    "check-layouts", "compare", "sweep", "versus",
})  # fmt: skip
"""Commands that import jax or flax, or start processes that do."""
ANYWHERE = frozenset({"ps", "logs", "attach", "stop", "join", "leave", "completion"})
"""Commands that need no working directory."""
HANDLE_INTERRUPTS = frozenset(
    {"sweep", "versus", "launch", "ps", "logs", "attach", "stop", "join", "leave", "save", "doctor"}
)
"""Commands that wait for other processes, and have work to do when they are interrupted."""
COMMANDS = {
    "demo": "roxxel_dist.cli.train:demo",
    "data": "roxxel_dist.cli:data_group",
    "batch": "roxxel_dist.cli.train:batch",
    "train": "roxxel_dist.cli.train:train",
    "find-lr": "roxxel_dist.cli.train:find_lr",
    "plan": "roxxel_dist.cli.train:plan",
    "save": "roxxel_dist.cli.train:save",
    "eval": "roxxel_dist.cli.models:evaluate",
    "generate": "roxxel_dist.cli.models:generate",
    "merge": "roxxel_dist.cli.models:merge",
    "export": "roxxel_dist.cli.models:export",
    "verify": "roxxel_dist.cli.audit:verify",
    "audit": "roxxel_dist.cli.audit:audit",
    "check-layouts": "roxxel_dist.cli.audit:check_layouts",
    "compare": "roxxel_dist.cli.audit:compare",
    "report": "roxxel_dist.cli.report:report",
    "top": "roxxel_dist.cli.top:top",
    "sweep": "roxxel_dist.cli.sweep:sweep",
    "versus": "roxxel_dist.cli.versus:versus",
    "launch": "roxxel_dist.cli:launch_group",
    "doctor": "roxxel_dist.cli.doctor:doctor",
    "ps": "roxxel_dist.cli.jobs:ps",
    "logs": "roxxel_dist.cli.jobs:logs",
    "attach": "roxxel_dist.cli.jobs:attach",
    "stop": "roxxel_dist.cli.jobs:stop",
    "join": "roxxel_dist.cli.jobs:join",
    "leave": "roxxel_dist.cli.jobs:leave",
    "completion": "roxxel_dist.cli.completion:completion",
}
"""The place of each command: only the one that is called is imported, so that ranks start without delay."""
DATA = {
    "build": "roxxel_dist.cli.data:data_build",
    "append": "roxxel_dist.cli.data:data_append",
    "info": "roxxel_dist.cli.data:data_info",
    "verify": "roxxel_dist.cli.data:data_verify",
    "index": "roxxel_dist.cli.data:data_index",
}
