"""Variables that a user gives to every rank, and what of them may be shown."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from roxxel_dist.process.exit_codes import UserError

MASK = "***"
STEP = re.compile(r"SLURM_(PROCID|LOCALID|NODEID|NNODES|NPROCS|GTIDS|NTASKS|STEP|TASK|SRUN_|LAUNCH_).*")
"""SLURM's variables of a step (one task on one node, the agent): they would mislead a rank's libraries."""
OF_LOGIN = ("SSH_CLIENT", "SSH2_CLIENT", "SSH_CONNECTION", "SSH_TTY")
"""Variables of an ssh session: by them a bash takes each `bash -c` for a new login, and reads ~/.bashrc again, whose
variables then replace those that the user gave to the ranks."""
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""By these gRPC, and with it jax's coordinator, is reached through a proxy, also on this machine."""
SUSPECTS = re.compile(r"(?i:(https?|grpc|all|no|no_grpc)_proxy)|(NCCL|GLOO|UCX|FI)_\w+")
"""Variables that decide how ranks find and reach each other."""
LOGIN_IN_URL = re.compile(r"//[^/@\s]*@")
ENDS = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$")
"""Endings of name parts of variables and flags with secret values: API_KEY matches, TOKENIZER does not."""
INSIDE = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)=('[^']*'|\"[^\"]*\"|[^\s;&|]+)")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def assignments(words: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """`--env K=V` words as variables; the last one of a name counts. `--env K` takes the value from `own`.

    Raises:
        ValueError: a name that no variable can have, or one that `own` lacks. A value is never part of the message.
    """
    return dict(_pair(word if "=" in word or word not in own else f"{word}={own[word]}", "--env") for word in words)


def lines_of(flag: str, path: str | Path, what: str) -> list[str]:
    """The lines of the file that a flag names, which holds `what` a line. Raises ValueError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{flag} {path}: cannot be read ({reason}); name a file with {what} a line") from error


def read_env_file(path: str | Path) -> dict[str, str]:
    """The variables of a file: a `K=V` a line, as it stands; empty lines and lines that begin with `#` are left out.

    `export ` before a name, and one pair of quotes around a value, are taken off; nothing is expanded.

    Raises:
        ValueError: the file cannot be read, or a line is no `K=V`; names file and line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(lines_of("--env-from", path, "a K=V"), 1):
        word = line.strip().removeprefix("export ").lstrip()
        if word and not word.startswith("#"):
            name, value = _pair(word, f"--env-from {path}, line {number}")
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name] = value[1:-1] if quoted else value
    return variables


def _pair(word: str, where: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not NAME.fullmatch(name):
        shown = f"{name!r} is no" if equals else "a word without = that is no exported"
        raise UserError(f"{where}: {shown} variable: write NAME=VALUE, for example NCCL_DEBUG=INFO")
    if "\0" in value:
        raise UserError(f"{where}: the value of {name} holds a NUL character, which no process can receive")
    return name, value


def misleads(name: str) -> bool:
    """Whether a host's variable describes the agent to a rank that would take it for itself."""
    return name in OF_LOGIN or STEP.fullmatch(name) is not None


def direct(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a rank reaches jax's coordinator without the proxy in its environment; {} without one.

    gRPC reads `no_grpc_proxy` in place of `no_proxy`, and neither in capitals.
    """
    if not any(environment.get(name) for name in PROXIES):
        return {}
    known = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    host = environment.get("ROXXEL_COORDINATOR", "").rpartition(":")[0].strip("[]")
    return {"no_grpc_proxy": ",".join(dict.fromkeys(filter(None, (*known.split(","), host))))}


def suspects(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank that may keep it from the others, without secrets."""
    found = {name: value for name, value in sorted(environment.items()) if value and SUSPECTS.fullmatch(name)}
    return {name: LOGIN_IN_URL.sub(f"//{MASK}@", value) for name, value in masked(found).items()}


def is_secret(name: str) -> bool:
    """Whether the value of this variable or flag is not to be shown: a part of its name ends as that of a secret."""
    return any(map(ENDS.search, re.split(r"[-_.]", name.upper())))


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, those with secret names without their values."""
    return {name: MASK if is_secret(name) else value for name, value in variables.items()}


def masked_words(words: Sequence[str]) -> list[str]:
    """A command line without the values of secret flags (`--api-key X`, `--api-key=X`) and variables (`API_KEY=X`).

    Assignments in the text of a word, as in that of a shell, are found too.
    """
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        flag, secret = word.startswith("-"), is_secret(name)
        if hide and not word.startswith("--"):
            shown.append(MASK)
        elif equals and secret and (flag or NAME.fullmatch(name)):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(
                word if flag else INSIDE.sub(lambda part: f"{part[1]}={MASK if is_secret(part[1]) else part[2]}", word)
            )
        hide = flag and secret and not equals
    return shown


def shell_line(environment: Mapping[str, str], words: Sequence[str]) -> str:
    """A shell command that runs this, secrets masked."""
    shown = [f"{name}={value}" for name, value in sorted(masked(environment).items())]
    return shlex.join(["env", *shown, *masked_words(words)])
