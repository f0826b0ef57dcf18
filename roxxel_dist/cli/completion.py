"""Shell completion: a script that shtab makes of the parsers of all commands."""

import argparse
import contextlib
import dataclasses
import io
import re
from typing import Any, Literal

from roxxel_dist import cli
from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import HelpShown, Parser, parse
from roxxel_dist.launcher.backends import BACKENDS

GROUPS = {"data": cli.DATA, "launch": BACKENDS}
BASH = """
# What stands behind `--` is a command of its own, and --flag=value is three words of bash.
_roxxel_dist() {
    local words=("${COMP_WORDS[0]}") word i prefix=""
    for ((i = 1; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        case "$word" in
            --) if ((i < COMP_CWORD)); then words=("${COMP_WORDS[0]}"); else words+=("$word"); fi ;;
            =) if ((i == COMP_CWORD)); then words+=(""); fi ;;
            --*=*)  # where COMP_WORDBREAKS has no =
                words+=("${word%%=*}" "${word#*=}")
                if ((i == COMP_CWORD)); then prefix=${word%%=*}=; fi ;;
            *) words+=("$word") ;;
        esac
    done
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
    _shtab_roxxel_dist
    COMPREPLY=("${COMPREPLY[@]/#/$prefix}")
}
complete -o default -F _roxxel_dist roxxel-dist
"""

LAUNCHED = """
_roxxel_dist_launched() {
    [[ $words[1] == -- && $CURRENT -gt 1 ]] || return 1
    words[1]=roxxel-dist
    _shtab_roxxel_dist
}
"""
"""Completes, in zsh, the command behind `--`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionArgs:
    """Print a script that completes commands, flags and their values in your shell.

    Add this line to ~/.bashrc: eval "$(roxxel-dist completion bash)". For zsh, write `zsh` in place of `bash`, and add
    it to ~/.zshrc, behind compinit. For tcsh: roxxel-dist completion tcsh > ~/.roxxel-dist.tcsh, and source that file
    in ~/.tcshrc.
    """

    shell: Positional[Literal["bash", "zsh", "tcsh"]]
    """The shell."""


def completion(words: list[str]) -> int:
    """Print a script that completes commands and flags in bash, zsh or tcsh."""
    shell = parse(CompletionArgs, words, "completion").shell
    import shtab

    print(shtab.complete(program(shell), shell=shell), end=BASH if shell == "bash" else "\n")
    return 0


def program(shell: str) -> argparse.ArgumentParser:
    """The parser of the whole program, as shtab needs it for a shell."""
    whole = argparse.ArgumentParser(prog="roxxel-dist", allow_abbrev=False)
    commands = whole.add_subparsers()
    for name in cli.COMMANDS:
        if name not in GROUPS:
            _add(commands, name, [name], shell)
            continue
        group = commands.add_parser(name, help=cli.ABOUT[name]).add_subparsers()
        for sub in GROUPS[name]:
            _add(group, sub, [name, sub], shell)
    return whole


def _add(commands: Any, name: str, path: list[str], shell: str) -> None:
    import shtab

    parser = parser_of(path)
    for flag, action in parser.described:
        if str in flag.kinds and not flag.choices:
            setattr(action, "complete", shtab.FILE)  # noqa: B010
        if shell == "zsh" and not flag.is_switch:  # so that it takes --flag=value too
            action.option_strings = [f"{option}=" for option in action.option_strings]
    about = re.split(r"[.:]\s", parser.description or "", maxsplit=1)[0]
    made = commands.add_parser(name, parents=[parser], description=about, help=about, add_help=False)
    if path[0] == "launch" and shell == "zsh":
        launched = made.add_argument("launched", nargs=argparse.REMAINDER, help="the command to launch")
        setattr(launched, "complete", {"zsh": "_roxxel_dist_launched", "preamble": {"zsh": LAUNCHED}})  # noqa: B010


def parser_of(path: list[str]) -> Parser:
    """The parser of a command, with its texts."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main([*path, "--help"])
    except HelpShown as shown:
        return shown.parser
    raise AssertionError(f"{' '.join(path)} has no help")
