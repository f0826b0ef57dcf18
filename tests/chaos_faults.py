"""Which faults a seed brings upon a training, on which host, and when."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = (
    "kill rank",
    "stop rank",
    "exception",
    "cut link",
    "drop link",
    "kill agent",
    "stop agent",
    "kill launcher",
    "SIGTERM",
)
LINKS = ("cut link", "drop link")
STEPS_A_FAULT = 24


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and when it comes."""

    kind: str
    host: str
    place: float
    """At this share of the run's steps,"""
    seconds: float
    """or so many seconds after the one before, whichever is first; infinite for most."""
    lasts: float
    """Seconds, of a link."""


def choose(seed: int, count: int, hosts: Sequence[str], kinds: Sequence[str] = KINDS) -> list[Fault]:
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
                lasts=chance.uniform(1, 14),
            )
            faults.append(fault)
    return faults[:count]
