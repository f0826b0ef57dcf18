"""Reading: shuffled batches to numpy and to a mesh, a cold start, memory, and verification.

    python benchmarks/data_read.py [FOLDER] [--quick] [--json FILE]

FOLDER keeps the data that is made at first: 2^27 random tokens as one file, as eight shards, and as a peer's archive.
Another row of the table is another function in ROWS.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import peers
import plans
from measure import QUICK_ROUNDS, ROUNDS, Lines, Result, flags, interleave, ratios

from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.verify import VerifiedBlocks, find_damage
from roxxel_dist.input.stream import Stream
from roxxel_dist.input.verify_ahead import STEPS_AT_ONCE
from roxxel_dist.utils.display import ProgressBars

TOKENS, SHARDS, VOCABULARY = 1 << 27, 8, 50_257
DEVICES = 8


@dataclass(frozen=True)
class Corpus:
    """The data that all rows read."""

    folder: Path
    rounds: int = ROUNDS

    @cached_property
    def shards(self) -> Roxxel:
        """All tokens in eight shards."""
        data = Roxxel(self.folder / "shards_*.rox")
        if not list(self.folder.glob("shards_*.rox")):
            data.write(self._documents(), separator=None, vocab_size=VOCABULARY, max_shard_bytes=2 * TOKENS // SHARDS)
        return data

    @cached_property
    def tokens(self) -> np.ndarray:
        """The same in one file, mapped: what the peers read."""
        path = self.folder / "flat.npy"
        if not path.exists():
            np.save(path, np.concatenate(list(self._documents())))
        return np.load(path, mmap_mode="r")

    def _documents(self) -> Iterable[np.ndarray]:
        rng = np.random.default_rng(0)
        for _ in range(SHARDS):
            yield rng.integers(0, VOCABULARY, TOKENS // SHARDS, np.uint16)

    def plan(self, batch: int, seq_len: int, seed: int = 1) -> Plan:
        """An order over the shards that outlasts every row."""
        return Curriculum(self.shards, [Phase(1_000_000, batch, seq_len)]).plan(seed)

    def warm(self) -> None:
        """Bring all files into the page cache and map their pages."""
        self.shards.verify()
        self.tokens.sum()


def to_numpy(corpus: Corpus) -> Iterable[Result]:
    """Shuffled rows to numpy, with the plan's time and without."""
    targets = {(16, 1025): (0.30, 2.5, 12), (1, 32769): (0.60, None, None), (256, 2049): (0.30, None, None)}
    for (batch, seq_len), (copy, torch, grain) in targets.items():
        name = f"{batch}x{seq_len} to numpy"
        calls = max(10, 3_000_000 // (batch * seq_len))
        times = interleave(_to_numpy(corpus, batch, seq_len), calls, rounds=corpus.rounds)
        yield from ratios(name, "ours", times, {"sequential copy": copy})
        yield from ratios(f"{name}, order known", "ours without the plan", times, {"sequential copy": None})
        if torch is not None:
            yield from ratios(name, "ours", times, {"torch DataLoader": torch, "grain": grain})


def _to_numpy(corpus: Corpus, batch: int, seq_len: int) -> dict[str, Callable[[], object]]:
    stream = Stream(corpus.plan(batch, seq_len), corpus.shards, None)
    plan = corpus.plan(batch, seq_len, seed=2)  # another order: rows that were just read are in the processor's cache
    known = iter([plan.rows(step).offset for step in range(10 * max(10, 3_000_000 // (batch * seq_len)) + 10)])
    found: dict[str, Callable[[], object] | None] = {
        "sequential copy": peers.sequential(corpus.tokens, batch, seq_len),
        "ours": lambda: next(stream),
        "ours without the plan": lambda: corpus.shards.read(next(known), seq_len, np.int32),
    }
    if (batch, seq_len) == (16, 1025):
        found["torch DataLoader"] = peers.torch_loader(corpus.tokens, batch, seq_len)
        found["grain"] = peers.grain_source(corpus.tokens, batch, seq_len)
    return {name: call for name, call in found.items() if call is not None}


def to_mesh(corpus: Corpus) -> Iterable[Result]:
    """Rows to a mesh of eight simulated devices, by the wall clock: jax copies in threads of its own."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from roxxel_dist.cluster.mesh import make_mesh

    batch, seq_len = 16, 1025
    sharding = NamedSharding(make_mesh(), P("data", None))
    stream = Stream(corpus.plan(batch, seq_len), corpus.shards, sharding)
    host = peers.sequential(corpus.tokens, batch, seq_len)

    def put(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    plan = corpus.plan(batch, seq_len, seed=2)
    known = iter([plan.rows(step) for step in range(4100)])
    found = {
        "raw slice + the same put": lambda: put(host()),
        "ours": lambda: next(stream),
        "ours without the plan": lambda: stream.place(next(known)),
        "roxxel": peers.roxxel_stream(corpus.folder, corpus.tokens, batch, seq_len, sharding),
    }
    grain = peers.grain_source(corpus.tokens, batch, seq_len)
    if grain is not None:
        found["grain + the same put"] = lambda: put(grain())
    ready = {name: _blocking(call) for name, call in found.items() if call is not None}
    times = interleave(ready, 200, time.perf_counter, rounds=5 * corpus.rounds // 3)
    name = f"{batch}x{seq_len} to {DEVICES} devices"
    targets = {"raw slice + the same put": 0.85, "roxxel": 1.4, "grain + the same put": 4}
    yield from ratios(name, "ours", times, targets)
    yield from ratios(f"{name}, order known", "ours without the plan", times, {"raw slice + the same put": None})
    one = NamedSharding(make_mesh(1), P("data", None))
    peer = peers.roxxel_stream(corpus.folder, corpus.tokens, batch, seq_len, one)
    numpy_stream = Stream(corpus.plan(batch, seq_len), corpus.shards, None)
    both = {"ours": lambda: next(numpy_stream), **({"roxxel (with its put)": _blocking(peer)} if peer else {})}
    times = interleave(both, 200, time.perf_counter, corpus.rounds)
    yield from ratios(f"{batch}x{seq_len} to numpy", "ours", times, {"roxxel (with its put)": 5})


def _blocking(call: Callable[[], object]) -> Callable[[], object]:
    import jax

    return lambda: jax.block_until_ready(call())


COLD = """
import sys
from roxxel_dist import Roxxel
batch = next(Roxxel(sys.argv[1]).stream(1025, 16, seed=1, steps=1000))
assert batch.shape == (16, 1025) and "jax" not in sys.modules
"""


def cold_start(corpus: Corpus) -> Iterable[Result]:
    """CPU seconds of a process from its start to its first batch and its end."""
    found = []
    for _ in range(corpus.rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", COLD, corpus.shards.filepath], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    yield Result(
        what="cold process to the first batch",
        against="s CPU",
        measured=statistics.median(found),
        target=0.4,
        at_most=True,
    )


MEMORY = """
import sys
from roxxel_dist import Roxxel
import roxxel_dist.input.stream, roxxel_dist.curriculum.phases
def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))
anonymous, all_of_it = kib("RssAnon"), kib("VmRSS")
data = Roxxel(sys.argv[1])
for batch in data.stream(1025, 16, seed=1, steps=3000):
    pass
print((kib("RssAnon") - anonymous) * 1024 / 1e6, (kib("VmRSS") - all_of_it) * 1024 / 1e6)
"""


def memory(corpus: Corpus) -> Iterable[Result]:
    """What a process takes over its imports after 3,000 batches."""
    command = [sys.executable, "-c", MEMORY, corpus.shards.filepath]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    anonymous, everything = map(float, printed.split())
    name = "memory while streaming"
    yield Result(what=name, against="MB anonymous", measured=anonymous, target=30, at_most=True)
    yield Result(what=name, against="MB with the page cache", measured=everything)


def verify(corpus: Corpus) -> Iterable[Result]:
    """Verification in one process, against reading the files once."""
    buffer = bytearray(1 << 20)

    def read_once() -> None:
        for shard in corpus.shards.shards:
            with shard.path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def check() -> None:
        assert not list(find_damage(corpus.shards.shards, ProgressBars(False), workers=1))

    times = interleave({"reading the files once": read_once, "ours": check}, 1, rounds=corpus.rounds)
    yield from ratios("data verify", "ours", times, {"reading the files once": 0.5})


def verify_ahead(corpus: Corpus) -> Iterable[Result]:
    """Verification ahead of the steps over a pass, CPU time of its thread, against steps of 20 ms."""
    for batch, seq_len in ((16, 1025), (16, 8193)):
        steps, found = corpus.shards.estimate_steps(seq_len, batch), []
        for _ in range(corpus.rounds):
            stream = Stream(corpus.plan(batch, seq_len), corpus.shards, None)
            blocks, begun = VerifiedBlocks(VOCABULARY), time.thread_time()
            for first in range(0, steps, STEPS_AT_ONCE):
                stream.verify(first, min(first + STEPS_AT_ONCE, steps), blocks)
            found.append((time.thread_time() - begun) / (steps * 0.02))
        yield Result(
            what=f"verifying {batch}x{seq_len} ahead", against="of a step of 20 ms", measured=statistics.median(found),
            target=0.01, at_most=True,
        )  # fmt: skip


def plan_rows(corpus: Corpus) -> Iterable[Result]:
    """Finding the rows of a step, in order and at random."""
    return plans.rows(corpus.rounds)


def far_start(corpus: Corpus) -> Iterable[Result]:
    """Open ten sparse shards and read a batch far into them."""
    return plans.far_start(corpus.folder / "sparse", 2 * corpus.rounds)


ROWS: list[Callable[[Corpus], Iterable[Result]]] = [
    to_numpy, to_mesh, plan_rows, far_start, cold_start, memory, verify, verify_ahead,
]  # fmt: skip


def main() -> int:
    """Print the table."""
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".cache/benchmarks"))
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(asked.folder, QUICK_ROUNDS if asked.quick else ROUNDS)
    corpus.warm()
    report = Lines(asked.json)
    for row in ROWS:
        report.add((row.__doc__ or "").splitlines()[0], lambda row=row: row(corpus))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
