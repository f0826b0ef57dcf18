"""What others have told of their trainings, replayed: their events where they give them, else their rates.

Where a story says nothing of it, a host is away for a day, a step takes 10 s, and a checkpoint is made each 100 steps;
these are ours. Rollbacks that people decided on, because a loss grew, are no failures and left out.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from roxxel_dist.launcher.fleet.simulation import LLAMA_3, Happening, Kind, Simulation, Work
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.launcher.policy.outcome import BACKOFF_MOST_S

DAY_S, HOUR_S = 86_400.0, 3600.0
SEEN_S = 600.0
"""The longest limit of a hang of these steps, and of a silent host."""
ALL = -1


@dataclass(frozen=True, kw_only=True)
class Story:
    """A training and what happened to it."""

    source: str
    hosts: int
    spare: int = 0
    days: float
    events: Sequence[tuple[float, Kind, int, float]] = ()
    """The day, what it was, the number of the host (or `ALL`), and for how many hours it was away."""
    work: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    """How it ends; None: it trains."""
    told_h: float = math.inf
    """Hours that these events cost there at most, as far as it is told."""

    def happenings(self) -> list[Happening]:
        """The events, in order."""
        return [
            Happening(at=day * DAY_S, kind=kind, hosts=() if host == ALL else (f"h{host}",), seconds=hours * HOUR_S)
            for day, kind, host, hours in sorted(self.events, key=lambda event: event[0])
        ]


def evenly(number: int, first: float, last: float, kind: Kind, hosts: Iterable[int], hours: float = 24.0) -> Any:
    """So many events between two days, host after host: a story that gives a number and no days."""
    pause, some = (last - first) / number, iter(hosts)
    return [(first + pause * (count + 0.5), kind, next(some), hours) for count in range(number)]


def by_chance(counts: dict[Kind, int], days: float, hosts: int, hours: float) -> Any:
    """So many events of each kind, at days and on hosts by chance."""
    rng = random.Random(3)
    return [(rng.uniform(0, days), kind, rng.randrange(hosts), hours) for kind in counts for _ in range(counts[kind])]


STORIES = {
    "BLOOM": Story(
        source="bigscience-workshop/bigscience, train/tr11-176B-ml: chronicles.md, README.md. Days from 2022-03-11 "
        "19:42 UTC to 2022-07-04; 48 nodes and 4 in reserve; 105 s a step, 40 s a save, one in 100 steps. A GPU died "
        "'every week or so': from April on a rate. Left out: a node that was 5 % slow for a weekend",
        hosts=52,
        spare=4,
        days=115.0,
        work={"step_s": 105.0, "save_s": 40.0, "checkpoint_every": 100},
        events=[
            (9.7, "lost", 7, 24.0),  # 03-21 13:34 in Paris: a GPU; 7.3 h of work, for a save was due in two steps
            (10.9, "link", ALL, 3.0),  # 03-22: emergency maintenance of the site, 'some hours'
            *evenly(12, 21.0, 109.0, "lost", cycle((3, 11, 29, 40, 47))),
            (49.6, "hang", 21, 0.0),  # 04-30: in a validation; 18 h
            (58.6, "hang", 30, 0.0),  # 05-09: the same; 6 h
            (67.5, "hang", 38, 0.0),  # 05-18: again; 11 h
            (68.0, "crash", 12, 0.0),  # 05-18: the scheduler did not see the end of a job that had failed
        ],
        told_h=7.3 + 3 + 12 * 3 + 18 + 6 + 11,  # 3 h for each GPU, 'at most'
    ),
    "OPT-175B": Story(
        source="facebookresearch/metaseq, projects/OPT/chronicles: updates of 10, 27, 56 % and the final one. Days "
        "from 2021-11-11 to 2022-01-06; 1,024 GPUs, so 128 hosts; about 90 restarts; 33 days of computing for 300B "
        "tokens in batches of 2M: 19 s a step. Rates: the restarts that no date is given for",
        hosts=140,
        spare=12,
        days=56.0,
        work={"step_s": 19.0, "save_s": 30.0},
        events=[
            *evenly(30, 0.0, 6.0, "runtime", range(0, 128, 4)),  # missing GPUs, ECC and NCCL errors, hangs
            *evenly(40, 6.0, 22.0, "lost", range(1, 128, 3), 12.0),  # 11-17 to 12-03: 40 and more, nearly all hardware
            *((25.0, "lost", host, 24.0) for host in range(60, 65)),  # 12-06: five hosts together
            (40.0, "link", ALL, 12.0),  # 12-21: the provider deletes the cluster; it is back within the day
            *((40.4, "lost", host, 48.0) for host in range(100, 112)),  # of 16 that came back unfit those that a
            # reserve of 12 replaces: the job waited for the others, by hand, until the evening
            *evenly(8, 44.0, 50.0, "lost", range(5, 128, 16)),  # Christmas to New Year: eight recovered without people
        ],
    ),
    "Llama 3 405B": Story(
        source="arXiv 2407.21783, table 5: 419 unexpected interruptions in 54 days by cause, on 16,384 GPUs. A rate: "
        "days and hosts are by chance. 64 hosts stand for 2,048",
        hosts=68,
        spare=4,
        days=54.0,
        work={"copy_every": 10},
        events=by_chance(dict(LLAMA_3), 54.0, 64, 4.0),
    ),
    "IDEFICS-80B": Story(
        source="huggingface/m4-logs, tr-190-80b/chronicles.md. Days from 2023-05-18 21:25 UTC, on 64 nodes. Left out: "
        "eight rollbacks because the loss grew",
        hosts=65,
        spare=1,
        days=28.0,
        events=[
            (0.4, "runtime", 46, 0.0),  # 05-19 07:08: Xid 63; started again without the node
            (7.5, "lost", 35, 24.0),  # 05-26: a node with Xid 64 is out after a restart
            (10.2, "lost", 35, 24.0),  # 05-29 01:37: Xid 64 on a node that was still in the pool
            (13.5, "lost", 35, 24.0),  # 06-01: again; 45 minutes until the restart
        ],
    ),
    "BigScience 13B": Story(
        source="bigscience-workshop/bigscience, train/tr1-13B-base/chronicles.md: a node with a broken GPU failed, the "
        "scheduler gave it to the next job, which failed too. Two times, no dates",
        hosts=65,
        spare=1,
        days=3.0,
        work={"step_s": 23.0},
        events=[(1.0, "runtime", 5, 0.0), (1.01, "runtime", 5, 0.0), (1.02, "runtime", 5, 0.0)],
    ),
    "IDEFICS, before": Story(
        source="huggingface/m4-logs, tr_141-hanging/README.md: it hung or crashed after 3 to 4 hours, whatever was "
        "changed. A rate, for a week",
        hosts=8,
        days=7.0,
        events=evenly(48, 0.0, 7.0, "hang", cycle(range(8))),
    ),
    "504 B200s": Story(
        source="arXiv 2605.09370: 63 hosts, of which three were over half of the exclusions; retries each 11 minutes. "
        "A rate: one of 60 working hosts fails each hour for a day",
        hosts=63,
        spare=3,
        days=2.0,
        events=evenly(24, 0.0, 1.0, "crash", cycle([17])),
    ),
    "preemptions": Story(
        source="ray-project/ray#41285: each preemption took one of max_failures. A rate: one a day",
        hosts=4,
        spare=1,
        days=60.0,
        events=evenly(59, 0.0, 60.0, "preempted", cycle(range(3)), 0.2),
    ),
    "many retries": Story(
        source="ray-project/ray#41285: with many retries a bug is repeated as often",
        hosts=4,
        days=60.0,
        work={"step_s": 1.0, "save_s": 0.0, "bug": 70_000},
        job={"max_restarts": 999},
        code=77,
    ),
    "short cuts": Story(
        source="ray-project/ray#48797: cuts of a moment, hours apart, add up to the limit. A rate: one an hour",
        hosts=4,
        days=9.0,
        events=evenly(200, 0.0, 9.0, "link", cycle([ALL]), 0.025),
    ),
    "a job that ends each day": Story(
        source="rwth-i6/sisyphus#296: a job that ends each day and proceeds was given up. A rate",
        hosts=2,
        days=60.0,
        job={"max_restarts": 1},
        events=evenly(59, 0.0, 60.0, "runtime", cycle(range(2))),
    ),
    "ten retries": Story(
        source="marin-community/marin#4615: ten retries of what fails always",
        hosts=4,
        days=1.0,
        work={"bug": 0},
        job={"max_restarts": 10},
        code=77,
    ),
    "starts": Story(
        source="pytorch/pytorch#60910: a start that fails is repeated",
        hosts=4,
        days=1.0,
        work={"bug": 0, "bug_rank": None},
        job={"max_restarts": 3},
        code=75,
    ),
}


def replayed(story: Story) -> Simulation:
    names = [f"h{number}" for number in range(story.hosts)]
    working = story.hosts - story.spare
    of = {"spare_hosts": story.spare, "host_timeout": DAY_S, "nprocs": working, **story.job}
    job = JobSpec(command=("true",), run_id="r", log_dir=Path("x"), **of)
    work = Work(**{"step_s": 10.0, "save_s": 5.0, "checkpoint_every": 100, **story.work})
    one = Simulation(job, names, work, story.happenings())
    one.run(story.days * DAY_S)
    return one


@pytest.mark.parametrize("name", STORIES)
def test_what_happened_to_others(name: str) -> None:
    """What is lost is no more than a whole interval of checkpoints, a start and the longest pause an interruption,
    and the time that hosts were away for which no other was there."""
    story = STORIES[name]
    one = replayed(story)
    outcome, work = one.outcome, one.work
    assert outcome.code == story.code, outcome.why
    failed = sum(number for kind, number in outcome.interruptions.items() if kind != "growth")
    if story.code is not None:  # nothing is tried for longer than minutes
        assert failed <= (2 if story.code == 77 else one.fleet.given.max_restarts + 1)
        assert outcome.seconds - (work.bug or 0) * work.step_s < 1800
        return
    moments = len({at for at, *_ in story.events})
    sets_aside = any("whose ranks failed" in text for _, text in outcome.log)
    assert failed <= moments
    assert 2 * failed >= moments or sets_aside  # what happens to a host that does not work ends nothing
    interval_s = work.checkpoint_every * work.step_s + work.save_s
    each_s = interval_s + work.start_s + SEEN_S + BACKOFF_MOST_S + Limits.gone_s
    away_s = sum(hours * HOUR_S for _, kind, _, hours in story.events if kind == "link")
    lost_s = outcome.seconds * sum(share for cause, share in outcome.lost.items() if cause not in ("saves", "copies"))
    assert lost_s <= failed * each_s + away_s + work.start_s + 60, outcome.lost
    assert lost_s / HOUR_S < story.told_h, outcome.lost


def test_a_host_that_fails_again_and_again_is_set_aside() -> None:
    """Two failures within a day are enough, and a spare one works for it."""
    for name, host in (("BigScience 13B", "h5"), ("504 B200s", "h17")):
        one = replayed(STORIES[name])
        assert one.outcome.interruptions.total() - one.outcome.interruptions["growth"] == 2, name
        assert [host in hosts for _, hosts in one.starts][:3] == [True, True, False], name
