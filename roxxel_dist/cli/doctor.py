"""The command that checks hosts by hand, as each launch does before it starts."""

import dataclasses
import json
from typing import TYPE_CHECKING, Literal

from roxxel_dist.cli.arguments import parse_train
from roxxel_dist.cli.parser import parse
from roxxel_dist.launcher.output import printable
from roxxel_dist.place.run_place import local_folder
from roxxel_dist.process.exit_codes import EXIT_PREFLIGHT, UserError
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.utils.display import aligned

if TYPE_CHECKING:
    from roxxel_dist.launcher.job.backend import Backend
    from roxxel_dist.launcher.preflight.checks import Requirements
    from roxxel_dist.launcher.preflight.run import PreflightReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Check hosts before a run: `doctor [options] [-- CMD…]`. Without hosts it checks this machine. Exit code 69: a
    check failed.

    With a command after `--`, as in `launch`, it also checks the data and the run directory of that command.
    """

    hosts: str | None = None
    """Host names for ssh, or for --via, separated by commas."""
    hostfile: str | None = None
    """A file with one host in each line, as for `launch ssh`."""
    run_dir: str | None = None
    """A folder that all hosts must see, with space for checkpoints."""
    data_path: str | None = None
    """Shards that must be the same on all hosts."""
    port: int | None = None
    """Port of the coordinator. Default: a free port."""
    gpus_per_host: int | None = None
    """Number of GPUs that each host must have."""
    via: str | None = None
    """The command that reaches the hosts, as for `launch exec`. Default: ssh."""
    ssh_config: str | None = None
    """A configuration file for ssh. Default: the usual files of ssh."""
    python: str | None = None
    """Path of Python on the hosts. Default: the path of this Python."""
    directory: str | None = None
    """Working directory on the hosts. Default: the current directory."""
    same_machine: bool = False
    """Let several hosts be one machine, or this one, whatever their names, as for `launch`."""
    check_devices: Literal["auto", "on", "off"] = "auto"
    """Check the accelerators too: the driver's report, a matrix product, a copy and a sum. It takes some seconds. auto:
    on hosts with GPUs or TPUs."""
    preflight: str | None = None
    """Run this shell command on each host. An exit code other than 0 is an error."""
    forget: str | None = None
    """Forget that hosts failed in the last day: their names, separated by commas, or `all`. It checks nothing."""
    json: bool = False
    """Print JSON."""


def doctor(words: list[str]) -> int:
    """Check that hosts answer, are equal, and are ready to train."""
    cut = words.index("--") if "--" in words else len(words)
    args, command = parse(DoctorArgs, words[:cut], "doctor"), words[cut + 1 :]
    from roxxel_dist.launcher.preflight.run import (
        DeviceChecks,
        check_hosts,
        forget_failures,
        forget_failures_of_user,
        remember_failure,
    )

    with usage_errors():
        if args.forget is not None:
            gone = forget_failures_of_user(args.forget.split(","))
            print(f"forgotten: {', '.join(dict.fromkeys(gone)) or 'no host, for none of them has failed'}")
            return 0
        needs = requirements(args, tuple(command))
        if command[:1] == ["train"]:
            parse_train(command[1:])
        backend = backend_of(args)
        checks = DeviceChecks(mode=args.check_devices, command=args.preflight, pending={*backend.hosts}, lists=True)
        report = check_hosts(needs, backend, backend.hosts, port=args.port, devices=checks)
        for host, why in report.suspects.items():
            remember_failure(backend, host, why)
        forget_failures(backend, checks.passed)
        as_json = {"fit": report.passed, **dataclasses.asdict(report)}
        print(json.dumps(as_json, indent=2) if args.json else printable(_as_text(report, len(backend.hosts))))
        return 0 if report.passed else EXIT_PREFLIGHT


def backend_of(args: DoctorArgs) -> "Backend":
    """The backend that reaches the hosts. Raises ValueError for a slip."""
    from roxxel_dist.launcher.backends.exec import ExecBackend
    from roxxel_dist.launcher.backends.local import LocalBackend
    from roxxel_dist.launcher.backends.ssh import SshBackend, hosts_of

    if args.hosts is None and args.hostfile is None:
        for flag in ("via", "ssh-config", "python", "directory"):
            if (value := getattr(args, flag.replace("-", "_"))) is not None:
                raise UserError(f"--{flag} {value} is for other hosts: name them with --hosts or --hostfile")
        if args.same_machine:
            raise UserError("--same-machine is for other hosts: name them with --hosts or --hostfile")
        return LocalBackend()
    hosts, _ = hosts_of(args.hosts, args.hostfile)
    python, directory = args.python or "", args.directory or ""
    if args.via is None:
        backend = SshBackend(hosts, config=args.ssh_config, python=python, directory=directory)
    elif args.ssh_config is None:
        backend = ExecBackend(hosts, args.via, python=python, directory=directory)
    else:
        raise UserError(f"--ssh-config {args.ssh_config} is for ssh, and --via is given: write it into --via")
    backend.same_machine = args.same_machine
    return backend


def requirements(args: DoctorArgs, command: tuple[str, ...]) -> "Requirements":
    """The needs of a job that does not exist yet; `command` may be empty. Raises ValueError for a slip."""
    from roxxel_dist.launcher.job.spec import JobSpec, log_dir_for
    from roxxel_dist.launcher.preflight.checks import requirements_of

    run_dir = local_folder(args.run_dir)  # of a run in a bucket no folder is needed
    log_dir = run_dir / "logs" if run_dir else log_dir_for(command, "new")
    job = JobSpec(
        command=command or ("true",),
        nprocs=1,
        run_id="new",
        log_dir=log_dir,
        port=args.port,
        gpus_per_host=args.gpus_per_host,
        max_restarts=0,
    )
    needs = requirements_of(job, {}, writes=True)
    shared, data_path = needs.shared or bool(run_dir), args.data_path or needs.data_path
    return dataclasses.replace(needs, shared=shared, data_path=data_path, jax=needs.jax or {})


def _as_text(report: "PreflightReport", hosts: int) -> str:
    """A line a finding; then the count."""
    from roxxel_dist.launcher.preflight.checks import CheckResult, merge_alike

    gone = [CheckResult("error", "host", (host,), f"{host}: {why}") for host, why in report.unreachable.items()]
    rows = merge_alike([*report.findings, *gone])
    lines = aligned([(f"{level:<7}", check, text) for level, check, text in rows], left=None)
    levels = [level for level, _, _ in rows]
    counts = {"host": hosts, "error": levels.count("error"), "warning": levels.count("warning")}
    host, *total = (f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())
    return "\n".join([*lines, f"{host}: {', '.join(total)}"])
