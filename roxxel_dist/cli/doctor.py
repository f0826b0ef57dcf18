"""The command that checks hosts by hand, as each launch does before it starts."""

import dataclasses
import json as json_text
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roxxel_dist.cli.arguments import Switch, parse, parse_train
from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT
from roxxel_dist.config import usage_errors

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.base import Backend
    from roxxel_dist.launcher.preflight.run import PreflightReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Check hosts: `doctor [options] [-- CMD…]`; without hosts, this machine. Exits with 69 where something is wrong.

    With a command after `--`, as for `launch`, its script, its data and its run directory are checked too.
    """

    hosts: str | None = None
    """Names of hosts as ssh knows them, a comma between them."""
    hostfile: str | None = None
    """A file with a host a line, as for `launch ssh`."""
    run_dir: str | None = None
    """A folder that all hosts shall see, with room for checkpoints."""
    data_path: str | None = None
    """Shards that shall be the same on all hosts."""
    port: int | None = None
    """The coordinator's port; a free one where not given."""
    gpus_per_host: int | None = None
    """GPUs that each host shall have."""
    ssh_config: str | None = None
    """A configuration file for ssh; its usual ones where not given."""
    python: str | None = None
    """The Python of the hosts; the path of this one where not given."""
    directory: str | None = None
    """The working directory on the hosts; that of this process where not given."""
    json: Switch = False
    """Print JSON."""


def doctor(words: list[str]) -> int:
    """Check hosts: are they there, alike, and fit to train on?"""
    cut = words.index("--") if "--" in words else len(words)
    args, command = parse(DoctorArgs, words[:cut], "doctor", underscores=False), words[cut + 1 :]
    with usage_errors():
        _check(args)
        if command[:1] == ["train"]:
            parse_train(command[1:])
        return examine(args, command, _backend(args))


def examine(args: DoctorArgs, command: Sequence[str], backend: "Backend") -> int:
    """Check the hosts of a backend, print what was found, and return the exit code."""
    from roxxel_dist.launcher.preflight.requirements import requirements_by_hand
    from roxxel_dist.launcher.preflight.run import check_hosts

    wanted = requirements_by_hand(command, run_dir=args.run_dir, data_path=args.data_path, gpus=args.gpus_per_host)
    ready = check_hosts(wanted, backend, backend.hosts, port=args.port)
    print(_as_json(ready) if args.json else _as_text(ready, len(backend.hosts)))
    return 0 if ready.passed else EXIT_PREFLIGHT


def _check(args: DoctorArgs) -> None:
    if args.port is not None and not 1 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: must be within 1 and 65535; leave --port out to take a free one")
    if args.gpus_per_host is not None and args.gpus_per_host < 1:
        raise ValueError(f"--gpus-per-host {args.gpus_per_host}: must be at least 1; leave it out where there are none")


def _backend(args: DoctorArgs) -> "Backend":
    if args.hosts is None and args.hostfile is None:
        for name in ("ssh_config", "python", "directory"):
            if (value := getattr(args, name)) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {value} is for other hosts: name them with --hosts or --hostfile")
        from roxxel_dist.launcher.backends.local import LocalBackend

        return LocalBackend()
    from roxxel_dist.launcher.backends.ssh import SshBackend, hosts_of

    hosts, _ = hosts_of(args.hosts, args.hostfile)
    return SshBackend(hosts, config=args.ssh_config, python=args.python or "", directory=args.directory or "")


def _as_text(ready: "PreflightReport", hosts: int) -> str:
    """A line a finding; then the count."""
    from roxxel_dist.launcher.control.report import count

    rows = [(one.level, one.check, one.text) for one in ready.findings]
    rows += [("error", "host", f"{host}: {why}") for host, why in ready.unreachable.items()]
    width = max(len(check) for _, check, _ in rows)
    lines = [f"{level:<8} {check:<{width}}  {text}" for level, check, text in rows]
    levels = [level for level, _, _ in rows]
    total = ", ".join(count(levels.count(level), level) for level in ("error", "warning"))
    return "\n".join([*lines, f"{count(hosts, 'host')}: {total}"])


def _as_json(ready: "PreflightReport") -> str:
    told = {
        "fit": ready.passed,
        "address": ready.address,
        "port": ready.port,
        "findings": [dataclasses.asdict(one) for one in ready.findings],
        "unreachable": dict(ready.unreachable),
    }
    return json_text.dumps(told, indent=2)
