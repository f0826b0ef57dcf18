"""Shell completion: a script for bash or zsh, made of what each command's `--help` lists."""

import contextlib
import dataclasses
import io
import re
from typing import Literal

from roxxel_dist import cli
from roxxel_dist.cli.argument_types import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.launcher.backends import BACKENDS

GROUPS = {"data": cli.DATA, "launch": BACKENDS}
FLAG = re.compile(r"^  (--[\w-]+)(?: (\S+))?", re.MULTILINE)
SCRIPT = """\
# Completion for roxxel-dist. In ~/.bashrc or ~/.zshrc: eval "$(roxxel-dist completion SHELL)"
_roxxel_dist() {{
    local first=0 i path word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words="" prefix=""
    case "$word" in  # --flag=value is three words in bash, and one in zsh
        =) word="" ;;
        --*=*) before=${{word%%=*}} prefix="${{word%%=*}}=" word=${{word#*=}} ;;
        *) if [ "$before" = = ]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi ;;
    esac
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [ "${{COMP_WORDS[i]}}" = -- ]; then first=$i; fi  # the command that is launched
    done
    path=""
    if ((COMP_CWORD > first + 1)); then path=${{COMP_WORDS[first+1]}}; fi
    case "$path" in
        {groups}) if ((COMP_CWORD > first + 2)); then path="$path ${{COMP_WORDS[first+2]}}"; fi ;;
    esac
    case "$path:$before" in
{values}
        *) case "$path:$word" in
{flags}
        esac ;;
    esac
    COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$word"))
}}
complete -o default -F _roxxel_dist roxxel-dist
"""

ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit"
"""With this before it zsh runs a completion of bash."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionArgs:
    """Print a script that completes commands and flags in your shell.

    Add this line to ~/.bashrc: eval "$(roxxel-dist completion bash)". For zsh, write `zsh` in place of `bash`, and add
    it to ~/.zshrc.
    """

    shell: Positional[Literal["bash", "zsh"]]
    """The shell."""


def completion(words: list[str]) -> int:
    """Print a script that completes commands and flags in bash or zsh."""
    shell = parse(CompletionArgs, words, "completion").shell
    if shell == "zsh":
        print(ZSH)
    print(script(), end="")
    return 0


def script() -> str:
    """The script, for bash."""
    paths = [[name, sub] for name in GROUPS for sub in GROUPS[name]]
    paths += [[name] for name in cli.COMMANDS if name not in GROUPS]
    flags = [('":"*', list(cli.COMMANDS)), *((f'"{name}:"*', list(subs)) for name, subs in GROUPS.items())]
    values: list[tuple[str, list[str]]] = []
    for path in paths:
        name, listed = " ".join(path), FLAG.findall(_help(path))
        flags.append((f'"{name}:"-*', [flag for flag, _ in listed] + ["--help"]))  # else a file
        choices = [(flag, value) for flag, value in listed if "|" in value and not value.isupper()]
        values += [(f'"{name}:{flag}"', value.split("|")) for flag, value in choices]
    return SCRIPT.format(groups="|".join(GROUPS), values=_cases(values), flags=_cases(flags))


def _help(path: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main([*path, "--help"])
    return text.getvalue()


def _cases(cases: list[tuple[str, list[str]]]) -> str:
    return "\n".join(f'        {case}) words="{" ".join(words)}" ;;' for case, words in cases)
