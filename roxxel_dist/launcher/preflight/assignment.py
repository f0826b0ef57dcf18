"""Who works when hosts are missing: the most devices that divide every phase's batch. Pure functions.

The global batch and the data stay the same; only how many devices share them changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roxxel_dist.launcher.spec import JobSpec, working_hosts


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The hosts that work in an attempt, and the job as they do it."""

    hosts: tuple[str, ...]
    job: JobSpec
    note: str = ""
    """Which hosts are missing and which devices idle, for people; empty where all is as it was asked for."""


def crew(job: JobSpec, hosts: Sequence[str], present: Sequence[str]) -> Crew:
    """The largest crew out of the hosts that are there.

    Args:
        job: as it was asked for, on all of `hosts`.
        hosts: all hosts, in rank order, the spare ones last.
        present: those that can be used now, in the same order; at least one.
    """
    working = working_hosts(job, hosts)
    if len(present) >= len(working):
        chosen = tuple(present[: len(working)])
        gone = [host for host in working if host not in present]
        instead = ", ".join(host for host in chosen if host not in working)
        note = f"going on without {', '.join(gone)}, with {instead} instead" if gone else ""
        return Crew(hosts=chosen, job=job, note=note)
    procs = job.nprocs // len(working)
    devices = _devices_per_process(job, procs)
    count, used = max(
        (
            (number * procs * some, number)
            for number in range(1, len(present) + 1)
            for some in range(1, devices + 1)
            if not any(rows % (number * procs * some) for rows in job.micro_batches)
        ),
        default=(len(present) * procs * devices, len(present)),  # the program itself will say why it cannot be
        key=lambda choice: (choice[0], -choice[1]),  # few hosts, each with many devices: the network is what is slow
    )
    share = count // (used * procs)
    smaller = replace(
        job,
        nprocs=used * procs,
        devices_per_proc=share if job.devices_per_proc is not None else None,
        gpus_per_host=share * procs if job.gpus_per_host is not None else None,
    )
    missing = [host for host in hosts if host not in present]
    note = f"going on without {', '.join(missing)}: {count} of {len(working) * procs * devices} devices"
    idle = [f"{host} ({procs * devices})" for host in present[used:]]
    if share < devices:
        idle += [f"{host} ({procs * (devices - share)})" for host in present[:used]]
    if idle:
        note += f"; idle, because every phase's batch must divide by the devices: {', '.join(idle)}"
    return Crew(hosts=tuple(present[:used]), job=smaller, note=note)


def _devices_per_process(job: JobSpec, procs: int) -> int:
    """As far as the command line tells; 1 where only jax knows, so that whole processes are counted."""
    if job.devices_per_proc is not None:
        return job.devices_per_proc
    return job.gpus_per_host // procs if job.gpus_per_host is not None else 1


def micro_batches(command: Sequence[str]) -> tuple[int, ...]:
    """Rows of each phase's micro-batch, by the words of a `train` command; none for another program.

    Asked once, at the launch: the file of the config may be another one an hour later.

    Raises:
        ValueError: the words, or the config that they name, cannot be used.
    """
    if command[:1] != ("train",):
        return ()
    from roxxel_dist.curriculum.phases import Phase
    from roxxel_dist.flags import parse_train

    _, config = parse_train(list(command[1:]))
    if not config.phases:
        return (config.batch_size,)
    return tuple(Phase.of(phase).batch_size // config.grad_accum for phase in config.phases)


def count_working(hosts: int, spare: int, least: int | None) -> int:
    """How many hosts have ranks at a time. Raises ValueError where the numbers do not fit together."""
    if not 0 <= spare < hosts:
        raise ValueError(f"--spare-hosts {spare}: there are {hosts} hosts; use at most {hosts - 1}")
    if least is not None and least > hosts - spare:
        raise ValueError(f"--min-hosts {least}: there are {hosts - spare} hosts; use at most {hosts - spare}")
    return hosts - spare
