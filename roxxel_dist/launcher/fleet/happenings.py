"""What happens to the hosts of a job: by chance, at rates that are known, or as somebody has told it."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["crash", "runtime", "hang", "refused", "lost", "link", "preempted", "slow", "join", "leave"]
LLAMA_3: Mapping[Kind, int] = {"lost": 268 + 21 + 32, "crash": 54 + 2, "runtime": 35, "hang": 7}
"""The 419 unexpected interruptions of Llama 3 405B on 16,384 GPUs in 54 days (arXiv 2407.21783, table 5), by what the
launcher sees. A GPU or another part of a host, and maintenance: the host is out until it is repaired. Software: a rank
ends. The network: the ranks end with an error of their runtime, on hosts that are well. A timeout of collectives: a
hang. That the parts of a host put it out is read into the table, which does not say so."""
SHARES: Mapping[Kind, float] = {kind: count / 419 for kind, count in LLAMA_3.items()}


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Something that happens to hosts (for `link`, to all); some kinds mean nothing where no rank runs."""

    at: float
    kind: Kind
    hosts: tuple[str, ...] = ()
    seconds: float = 0.0
    """How long they are away, or slow."""


def failures(
    rng: random.Random,
    hosts: Sequence[str],
    mtbf_s: float,
    *,
    repair_s: float = 7200.0,
    shares: Mapping[Kind, float] = SHARES,
    burst: float = 0.0,
) -> Iterator[Happening]:
    """Failures without end: each host fails once in `mtbf_s` seconds, on average, and is away for `repair_s` if it is
    lost. `burst`: the share of failures that hit neighbours too, at once or within minutes."""
    now, kinds, weights = 0.0, list[Kind](shares), [*shares.values()]
    while True:
        now += rng.expovariate(len(hosts) / mtbf_s)
        kind, first = rng.choices(kinds, weights)[0], rng.randrange(len(hosts))
        number = rng.randint(2, 4) if rng.random() < burst else 1
        near = tuple(hosts[(first + n) % len(hosts)] for n in range(min(number, len(hosts))))
        for some in (near,) if kind in ("lost", "preempted") else [(host,) for host in near]:
            yield Happening(at=now, kind=kind, hosts=some, seconds=rng.expovariate(1 / repair_s))
            now += rng.expovariate(1 / 120) if len(some) < len(near) else 0.0
