"""What failures cost a run on a cluster: years of it simulated by the launcher's own rules. No jax."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from roxxel_dist.launcher.fleet.simulation import COPY_SHARE, SHARES, Kind, Simulation, Work, failures
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.log.timeline import read_timeline
from roxxel_dist.utils.display import aligned, duration
from roxxel_dist.utils.voice import argument

DAY_S = 86_400.0
LARGEST = 12
"""Hosts in the simulation: those of a larger cluster stand for several each, and the job fails as often. With
1,024 hosts that fail each 100 days that is 0.4 points of goodput below a simulation of all, which takes 40 times as
long."""
FAILURES = 150
"""So many happen in each simulated history: a share of the time is known to about a tenth of itself."""
TIMES = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
"""Times Young's interval, which are tried for `checkpoint_every`."""
MOST_SPARES = 8
NAMES: Mapping[Kind, str] = {"lost": "lost hosts", "crash": "crashes", "runtime": "runtime errors", "hang": "hangs"}
START_S = 60.0
"""Of a start that was not measured."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts that fail, and what a run takes on them. Raises UserError for what cannot be.

    Attributes: times of a step, of the stand-still for a save, and of a start are in seconds; None where unknown.
    """

    mtbf_days: float
    """Mean time between two failures of one host."""
    hosts: int
    """All of them, the spare ones too."""
    spare_hosts: int = 0
    repair_hours: float = 2.0
    step_s: float | None = None
    save_s: float | None = None
    start_s: float | None = None

    def __post_init__(self) -> None:
        for name, value, rule in (
            ("mtbf", self.mtbf_days, "days between two failures of a host, more than 0; for example 50"),
            ("repair_hours", self.repair_hours, "hours, more than 0; for example 2"),
            ("step_s", self.step_s, "seconds, more than 0; leave it out to use those of a run"),
            ("hosts", self.hosts, "at least 1"),
        ):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{argument(name, value)}: must be {rule}")
        for name, value in (("save_s", self.save_s), ("start_s", self.start_s)):
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"{argument(name, value)}: must be seconds, 0 or more")
        if not 0 <= self.spare_hosts < self.hosts:
            why = f"there are {self.hosts} hosts, and one has to work; use 0 to {self.hosts - 1}"
            raise UserError(f"{argument('spare_hosts', self.spare_hosts)}: {why}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a user can choose, and what it gives."""

    checkpoint_every: int
    spare_hosts: int
    memory_copies: bool
    """Whether the state is copied into the memory of a neighboring host (memory_checkpoint_every)."""
    goodput: float
    """The share of the time of all hosts that trains, and is not repeated."""


@dataclass(frozen=True, kw_only=True)
class FailureEstimate:
    """What failures cost a run: JSON of `plan --mtbf`."""

    hosts: int
    mtbf_days: float
    interruptions_a_day: float
    step_s: float
    save_s: float
    start_s: float
    goodput: float
    """The share of the time of all hosts that trains, and is not repeated, with the settings as they are."""
    lost: dict[str, float]
    """The rest, by cause; their sum is 1 - goodput. Of a failure: the time until it is seen, the wait for hosts, the
    start, and the steps that are done again."""
    given: Choice
    best: Choice


def measured_times(run: Path) -> dict[str, float]:
    """The times `step_s`, `save_s` and `start_s` that a run's timeline has, in seconds; those that it has."""
    steps, saves, starts = list[float](), list[float](), dict[int, float]()
    trained = set[int]()
    for row in read_timeline(run):
        attempt, seconds = row["attempt"], row["seconds"]
        match row.get("activity"):
            case "step" if isinstance(row.get("steps"), list):
                first, last = row["steps"]
                if attempt in trained or last > first:  # the first step alone may compile
                    steps.append(seconds / (last - first + 1))
                trained.add(attempt)
            case "save":
                saves.append(seconds)
            case "start" | "restore" | "compile" if attempt not in trained:
                starts[attempt] = starts.get(attempt, 0.0) + seconds
            case _:
                pass
    every = {"step_s": steps, "save_s": saves, "start_s": [*starts.values()]}
    return {name: max(median(values), 1e-6) for name, values in every.items() if values}


def estimate_failures(cluster: Cluster, *, checkpoint_every: int, copies: bool, run: Path | None) -> FailureEstimate:
    """The goodput of a run as it is set, and the best settings. Raises UserError where the time of a step is unknown.

    `copies`: whether it copies its state into memory. `run`: where the times that are not given were measured.
    """
    found = {} if run is None else measured_times(run)
    step_s = cluster.step_s or found.get("step_s")
    if step_s is None:
        where = f"{run} has no timeline of steps" if run else "no run is named"
        raise UserError(
            f"the time of a step is not known ({where}): give {argument('step_s', 'SECONDS')}, or name a run"
        )
    save_s = found.get("save_s", 0.0) if cluster.save_s is None else cluster.save_s
    start_s = found.get("start_s", START_S) if cluster.start_s is None else cluster.start_s
    work = Work(step_s=step_s, save_s=save_s, start_s=start_s, checkpoint_every=checkpoint_every)
    given, lost = _simulated(cluster, replace(work, copy_every=_copy_every(work) * copies))
    choices = [given]
    for every in _intervals(work, cluster):
        for copy_every in {0, _copy_every(work)}:
            choices.append(_simulated(cluster, replace(work, checkpoint_every=every, copy_every=copy_every))[0])
    best = max(choices, key=lambda choice: choice.goodput)
    chosen = replace(work, checkpoint_every=best.checkpoint_every, copy_every=_copy_every(work) * best.memory_copies)
    for spares in range(min(cluster.hosts, MOST_SPARES + 1)):
        other = _simulated(replace(cluster, spare_hosts=spares), chosen)[0]
        best = max(best, other, key=lambda choice: choice.goodput)
        if spares > best.spare_hosts + 1:
            break
    return FailureEstimate(
        hosts=cluster.hosts,
        mtbf_days=cluster.mtbf_days,
        interruptions_a_day=(cluster.hosts - cluster.spare_hosts) / cluster.mtbf_days,
        step_s=step_s,
        save_s=save_s,
        start_s=start_s,
        goodput=given.goodput,
        lost=lost,
        given=given,
        best=best,
    )


def young(work: Work, mtbf_s: float) -> float:
    """Young's best time between two checkpoints of a job that fails once in `mtbf_s` seconds."""
    return math.sqrt(2 * work.save_s * mtbf_s)


def _copy_every(work: Work) -> int:
    """As often as `auto` copies, if a copy stops the devices as long as a save."""
    return max(1, math.ceil(work.save_s / (COPY_SHARE * work.step_s)))


def _intervals(work: Work, cluster: Cluster) -> Sequence[int]:
    best_s = young(work, cluster.mtbf_days * DAY_S / (cluster.hosts - cluster.spare_hosts))
    return sorted({max(1, _rounded(best_s * times / work.step_s)) for times in TIMES})


def _rounded(steps: float) -> int:
    """To two digits, which is as well as a best interval is known."""
    digits = max(0, int(math.log10(max(steps, 1.0))) - 1)
    return round(steps / 10**digits) * 10**digits


def _simulated(cluster: Cluster, work: Work) -> tuple[Choice, dict[str, float]]:
    """What a setting gives: the same failures happen to each."""
    working = min(LARGEST, cluster.hosts - cluster.spare_hosts)
    names = [f"h{number}" for number in range(working + cluster.spare_hosts)]
    job_mtbf_s = cluster.mtbf_days * DAY_S / (cluster.hosts - cluster.spare_hosts)
    job = JobSpec(
        command=("true",),
        nprocs=working,
        spare_hosts=cluster.spare_hosts,
        max_restarts=10**6,
        host_timeout=1e9,
        run_id="plan",
        log_dir=Path("plan"),
    )
    many = failures(random.Random(0), names, job_mtbf_s * working, repair_s=3600 * cluster.repair_hours)
    outcome = Simulation(job, names, work, many).run(FAILURES * job_mtbf_s)
    share = 1 - cluster.spare_hosts / cluster.hosts
    lost: dict[str, Any] = {cause: share * value for cause, value in outcome.lost.items()}
    lost |= {"spare hosts": 1 - share} if cluster.spare_hosts else {}
    choice = Choice(
        checkpoint_every=work.checkpoint_every,
        spare_hosts=cluster.spare_hosts,
        memory_copies=bool(work.copy_every),
        goodput=share * outcome.goodput,
    )
    return choice, lost


def failure_table(found: FailureEstimate) -> str:
    """The text of an estimate."""
    rows = [["of the time of all hosts", ""], ["trains", f"{found.goodput:.1%}"]]
    rows += [[cause, f"{share:.2%}"] for cause, share in sorted(found.lost.items(), key=lambda item: -item[1])]
    ways = [["", "checkpoint_every", "spare hosts", "copies in memory", "trains"]]
    for name, way in (("now", found.given), ("best", found.best)):
        copies = "yes" if way.memory_copies else "no"
        ways.append([name, f"{way.checkpoint_every:,}", str(way.spare_hosts), copies, f"{way.goodput:.1%}"])
    times = f"a step {duration(found.step_s)}, a save {duration(found.save_s)}, a start {duration(found.start_s)}"
    about = f"{found.hosts} hosts, {found.interruptions_a_day:.2g} interruptions a day; {times}"
    causes = ", ".join(f"{share:.0%} {NAMES[kind]}" for kind, share in SHARES.items())
    return "\n".join(
        [about, f"causes as in arXiv 2407.21783, table 5: {causes}", "", *aligned(rows), "", *aligned(ways)]
    )
