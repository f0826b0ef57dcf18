"""Which hosts work, which rank runs on which of them, what its environment is, and what of that may be shown."""

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.process.exit_codes import EXIT_SLACK_S, EXIT_TIMEOUT_ENV, REACHED_ENV, STATUS_ENV, UserError

GPU = re.compile(r"\d+|(GPU|MIG)-\S+")
"""A device in CUDA_VISIBLE_DEVICES: its number, or its UUID."""


def visible_gpus(gpus: int, procs: int, index: int, outer: str | None = None) -> str:
    """The value of CUDA_VISIBLE_DEVICES for process `index` of the `procs` on a host with `gpus`: its part, in order.

    `outer` is the list that the host's processes may use, where somebody has set one already (a scheduler, a user): the
    part is taken from its beginning. Raises ValueError where the processes do not divide the GPUs, or `outer` is short.
    """
    if gpus % procs:
        raise UserError(
            f"--gpus-per-host {gpus} is not a multiple of the {procs} processes of a host: use a number that "
            f"divides {gpus}"
        )
    names = [name.strip() for name in outer.split(",") if name.strip()] if outer is not None else None
    wrong = [name for name in names or () if not GPU.fullmatch(name)]
    if wrong or len(names or ()) != len({*(names or ())}):
        what = f"{wrong[0]!r} is no GPU" if wrong else "it names a GPU twice"
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={outer}: {what}; write numbers or UUIDs, each once, with commas between them, as in "
            "0,1, or unset the variable"
        )
    if names is not None and len(names) < gpus:
        raise UserError(
            f"--gpus-per-host {gpus}, but CUDA_VISIBLE_DEVICES={outer} allows {len(names)}: use --gpus-per-host "
            f"{len(names) or 1}, or unset the variable"
        )
    share = gpus // procs
    numbers = range(gpus) if names is None else names
    return ",".join(map(str, numbers[index * share : (index + 1) * share]))


def rank_environment(
    job: JobSpec,
    rank: int,
    coordinator: str,
    outer: Mapping[str, str],
    attempt: int = 0,
    cores: int | None = None,
    reached: int = 0,
) -> dict[str, str]:
    """The variables that a rank has beside those of its host (`outer`: the launcher's own environment).

    PJRT_NPROC decides the bits of a sum on CPU (how work is split among threads), so all ranks get one value from here.
    It follows the CPUs of the hosts (`cores`, the most that one has; not given, those of this machine), so that it does
    not matter where the launch was typed. `reached`: the largest step of earlier attempts.
    """
    caller = {**outer, **job.env}
    if "ROXXEL_COORDINATOR" in outer and "PJRT_NPROC" not in job.env:
        caller.pop("PJRT_NPROC", None)  # an outer launch chose it for its own number of devices
    threads = max(cores or os.cpu_count() or 1, job.total * (job.devices_per_proc or 1))
    own = {
        "PJRT_NPROC": caller.get("PJRT_NPROC") or str(threads),
        "PYTHONUNBUFFERED": "1",
        "ROXXEL_COORDINATOR": coordinator,
        "ROXXEL_NUM_PROCESSES": str(job.total),
        "ROXXEL_PROCESS_ID": str(rank),
        "ROXXEL_ATTEMPT": str(attempt),
        "ROXXEL_RUN_ID": job.run_id,
        STATUS_ENV: "1",
        EXIT_TIMEOUT_ENV: f"{job.exit_timeout and job.exit_timeout + EXIT_SLACK_S:g}",
    }
    if job.devices_per_proc is not None:
        own["ROXXEL_LOCAL_DEVICES"] = str(job.devices_per_proc)
        own["JAX_PLATFORMS"] = job.jax_environment(outer)["JAX_PLATFORMS"]
    if reached and job.program.reports_steps:
        own[REACHED_ENV] = str(reached)
    return {**job.env, **own}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks that one host is to start: the environment of each of its ranks, beside the host's own."""

    host: str
    ranks: Mapping[int, Mapping[str, str]]


def working_hosts(job: JobSpec, hosts: Sequence[str]) -> Sequence[str]:
    """The hosts that start, where all are there: those before the spare ones."""
    number = len(hosts) - job.spare_hosts
    return hosts[: number if job.max_hosts is None else min(number, job.max_hosts)]


def ranks_on(hosts: int, procs_per_host: int, spare: int = 0, least: int | None = None, most: int | None = None) -> int:
    """The number of ranks that run at a time on so many hosts. Raises ValueError where the numbers do not fit."""
    if procs_per_host < 1:
        raise UserError(f"--procs-per-host {procs_per_host}: must be at least 1")
    if not 0 <= spare < hosts:
        raise UserError(f"--spare-hosts {spare}: there are {hosts} hosts; use at most {hosts - 1}")
    if least is not None and least > hosts - spare:
        raise UserError(f"--min-hosts {least}: there are {hosts - spare} hosts; use at most {hosts - spare}")
    if most is not None and most < 1:
        raise UserError(f"--max-hosts {most}: must be at least 1; leave it out to use all hosts")
    return procs_per_host * (hosts - spare if most is None else min(hosts - spare, most))


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The hosts that work in an attempt, and the job as they do it."""

    hosts: tuple[str, ...]
    job: JobSpec
    note: str = ""
    """Which hosts are missing and which devices idle, for people; empty where all is as it was asked for."""

    @property
    def devices(self) -> int:
        """The number of devices that work; of a process 1 where only jax knows."""
        job = self.job
        own = job.gpus_per_host
        return job.nprocs * (job.devices_per_proc or 1) if own is None else own * len(self.hosts)


def assign(job: JobSpec, hosts: Sequence[str], present: Sequence[str], *, elastic: bool = False) -> Assignment:
    """The largest assignment to the hosts that are there: the most devices that the program can use.

    The global batch and the data stay the same; only how many devices share them changes. `hosts` are all hosts in rank
    order, the spare ones last; `present` are those that can be used now, in the same order, at least one. `elastic`: of
    all of them too only as many work as the program can use, for their number is no choice of the user.
    """
    working, usable = working_hosts(job, hosts), {*present}
    needs = job.device_needs
    most_devices = _devices_of(job, len(working)) * len(working)
    if len(present) >= len(working) and not (elastic and needs.refusal(most_devices)):
        chosen = tuple(present[: len(working)])
        missing = [host for host in working if host not in usable]
        first = {*working}
        instead = ", ".join(host for host in chosen if host not in first)
        note = f"going on without {', '.join(missing)}, with {instead} instead" if missing else ""
        return Assignment(hosts=chosen, job=job, note=note)
    procs = job.nprocs // len(working)
    absent = [host for host in hosts if host not in usable]
    devices = _devices_of(job, len(working)) // procs
    present = present[: len(working)]
    most, used, share = 0, len(present), devices  # if it can use no number of them, the program will say so
    for number in range(1, len(present) + 1):  # of as many devices those on fewer hosts: the network is what is slow
        for part in range(1, devices + 1):
            total = number * procs * part
            if total > most and not needs.refusal(total):
                most, used, share = total, number, part
    smaller = replace(
        job,
        nprocs=used * procs,
        devices_per_proc=share if job.devices_per_proc is not None else None,
        gpus_per_host=share * procs if job.gpus_per_host is not None else None,
    )
    missing = ", ".join(absent)
    note = f"{used * procs * share} of {len(working) * procs * devices} devices" + ("" if missing else " work")
    note = f"going on without {missing}: {note}" if missing else note
    idle = {host: procs * (devices - share * (number < used)) for number, host in enumerate(present)}
    if names := [f"{host} ({count})" for host, count in idle.items() if count]:
        note += f"; idle: {', '.join(names)}; {needs.refusal(len(present) * procs * devices)}"
    return Assignment(hosts=tuple(present[:used]), job=smaller, note=note)


def _devices_of(job: JobSpec, working: int) -> int:
    """Devices of a host; where only jax knows, whole processes are counted."""
    procs = job.nprocs // working
    if job.devices_per_proc is not None:
        return procs * job.devices_per_proc
    return procs if job.gpus_per_host is None else job.gpus_per_host // procs * procs


def placements(
    job: JobSpec,
    hosts: Sequence[str],
    coordinator: str,
    outer: Mapping[str, str],
    attempt: int = 0,
    visible: Mapping[str, str] | None = None,
    cores: int | None = None,
    reached: int = 0,
) -> list[Placement]:
    """Deal the ranks to the hosts, in blocks; the arguments are those of `rank_environment`.

    `visible` is CUDA_VISIBLE_DEVICES of the hosts that have a list of their own; that of the job or of `outer` wins.
    Raises ValueError where a host would have no rank, or GPUs do not divide among the ranks of a host.
    """
    if job.nprocs < len(hosts):
        raise UserError(
            f"nprocs {job.nprocs}: there are {len(hosts)} hosts, and each has at least one process; use nprocs "
            f"{len(hosts)}, or fewer hosts"
        )
    common = {**outer, **job.env}.get("CUDA_VISIBLE_DEVICES")
    placed = []
    for number, host in enumerate(hosts):
        first, end = (job.first_rank + job.nprocs * n // len(hosts) for n in (number, number + 1))
        ranks = {
            rank: rank_environment(job, rank, coordinator, outer, attempt, cores, reached) for rank in range(first, end)
        }
        if job.gpus_per_host is not None:
            allowed = common if common is not None else (visible or {}).get(host)
            for index, env in enumerate(ranks.values()):
                env["CUDA_VISIBLE_DEVICES"] = visible_gpus(job.gpus_per_host, len(ranks), index, allowed)
        placed.append(Placement(host=host, ranks=ranks))
    return placed


def worker_argv(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """The words that start one rank."""
    return python_words(python, "roxxel_dist.launcher.host.worker", *command)


def python_words(python: str, module: str, *words: str) -> list[str]:
    """The words that run a module of this package, unbuffered.

    -P: the working folder is the user's, and its `queue.py` or `random.py` is not the standard library's.
    """
    return [python, "-u", "-P", "-m", module, *words]


def shell_text(directory: str, words: Sequence[str]) -> str:
    """The text for a shell on a host that runs a program in a folder. `~/` before either is the home there."""
    program, *rest = words
    return f"cd {_path(directory)} && exec {_path(program)} {shlex.join(rest)}"


def _path(path: str) -> str:
    """A path for a shell, quoted but for `~/` at its beginning."""
    if path == "~":
        return path
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") and path != "~/" else shlex.quote(path)


def coordinator_port(port: int | None, address: str = "127.0.0.1") -> int:
    """A free port of an address, or `port` itself. Raises ValueError if a process already listens on `port`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port or 0))
        except OSError as error:
            raise UserError(
                f"--port {port}: cannot be used on {address} ({error.strerror}); "
                "leave --port out to take a free one, or give another"
            ) from None
        return int(probe.getsockname()[1])


MASK = "***"
STEP = re.compile(r"SLURM_(PROCID|LOCALID|NODEID|NNODES|NPROCS|GTIDS|NTASKS|STEP|TASK|SRUN_|LAUNCH_).*")
"""SLURM's variables of a step (one task on one node, the agent): they would mislead a rank's libraries."""
OF_LOGIN = ("SSH_CLIENT", "SSH2_CLIENT", "SSH_CONNECTION", "SSH_TTY")
"""Variables of an ssh session: by them a bash takes each `bash -c` for a new login, and reads ~/.bashrc again, whose
variables then replace those that the user gave to the ranks."""
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables by which gRPC, and with it jax's coordinator, is reached through a proxy, also on this machine."""
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


def is_of_agent(name: str) -> bool:
    """Whether a host's variable describes the agent to a rank that would take it for itself."""
    return name in OF_LOGIN or STEP.fullmatch(name) is not None


def proxy_bypass(environment: Mapping[str, str]) -> dict[str, str]:
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
