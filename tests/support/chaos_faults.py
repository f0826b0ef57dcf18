"""Which faults a seed brings upon a training, on which host, and when."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STEPS_A_FAULT = 24


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is known of a kind of fault."""

    codes: tuple[int, ...] = ()
    """With what a launch may end after it, beside 0; none: it is for the launcher to mend."""
    lasts: tuple[float, float] = (0.0, 0.0)
    """Seconds after which it is undone, the least and the most; 0: it is never undone."""
    alone: bool = False
    """It is over before the next one comes, and the training is slowed down until then."""
    unready: bool = False
    """While it lasts, and soon after, hosts may be refused at a start (69)."""


# 137: a rank or an agent that was killed while the others saved. Negative: the launcher was starting, and nothing ran.
KINDS: Mapping[str, Kind] = {
    "kill rank": Kind(),
    "stop rank": Kind(),
    "exception": Kind(codes=(1,)),
    "runtime exception": Kind(),
    "crash in the first step": Kind(),
    "reset connections": Kind(),
    "cut link": Kind(lasts=(1, 14), unready=True),
    "drop link": Kind(lasts=(1, 14), unready=True),
    "launcher's link": Kind(lasts=(13, 13), unready=True),
    "reset ssh": Kind(),
    "kill agent": Kind(),
    "stop agent": Kind(),
    "host back without its folder": Kind(lasts=(16, 24), alone=True),
    "host back with other versions": Kind(lasts=(16, 24), alone=True),
    "read-only folder": Kind(codes=(1,), lasts=(3, 8), unready=True),
    "full state folder": Kind(lasts=(3, 8)),
    "deleted logs": Kind(),
    "kill launcher": Kind(codes=(-9,)),
    "kill launcher while it drains": Kind(codes=(-9, 42, 143, 137, -15)),
    "kill launcher in a save": Kind(codes=(-9,)),
    "kill launcher while a host is replaced": Kind(codes=(-9,), lasts=(16, 20), unready=True),
    "SIGTERM": Kind(codes=(42, 143, 137, -15)),
    "SIGUSR1": Kind(codes=(42, 138, 137, -10)),
    "SIGHUP": Kind(codes=(42, 129, 137, -1)),
    "Ctrl-C twice": Kind(codes=(42, 130, 137, -2)),
    "stop data workers": Kind(codes=(42, 143, 137, -15)),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and when it comes."""

    kind: str
    host: str
    """Where it comes, if there is something there that it can hit; else on another host."""
    place: float
    """At this share of the run's steps,"""
    seconds: float
    """or so many seconds after the one before, whichever is first; infinite for most."""
    lasts: float
    """Seconds until it is undone."""


def choose(seed: int, count: int, hosts: Sequence[str], kinds: Sequence[str] = tuple(KINDS)) -> list[Fault]:
    """The faults of a seed, over the whole run: each kind as often as any other, in another order each time."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        for kind in chance.sample(kinds, len(kinds)):
            soon = chance.random() < 0.4
            fault = Fault(
                kind=kind,
                host=chance.choice(hosts),
                place=(len(faults) + chance.random()) / (count + 1),
                seconds=chance.uniform(0, 10) if soon else float("inf"),
                lasts=chance.uniform(*KINDS[kind].lasts),
            )
            faults.append(fault)
    return faults[:count]
