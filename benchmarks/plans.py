"""Finding rows: what `Plan.rows` takes, and a start far into ten terabytes that are not there."""

import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from measure import Result

from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.format import Metadata, ShardLayout, chain_of, checksum, npy_header, offsets, pack_end
from roxxel_dist.input.stream import Stream

SHARES = {"self": 0.6, "code": 0.3, "books": 0.1}
SHARDS = {"self": 6, "code": 3, "books": 1}
STEPS, START = 1_500_000, 1_000_000
TERABYTE, IN_ORDER, AT_RANDOM = 10**12, 1024, 50


def rows(rounds: int) -> Iterable[Result]:
    """Microseconds of `Plan.rows` over 10 TB, one step after the other and at random steps."""
    ranges = {name: [(i * TERABYTE // 2, TERABYTE // 2) for i in range(count)] for name, count in SHARDS.items()}
    for batch in (16, 256):
        for what, shares in (("one data set", {"self": 1.0}), ("three by row", SHARES)):
            weights = tuple(shares.items())
            shape = Shape(steps=STEPS, batch_size=batch, seq_len=1025, weights=weights, blend="row")
            plan = Plan([shape], {name: ranges[name] for name in shares}, 1)
            name = f"Plan.rows, {batch} rows of {what}"
            for how, target, at_random in (("in order", 50, False), ("at random", 1000, True)):
                measured = 1e6 * _rows(plan, at_random, rounds)
                yield Result(what=name, against=f"us {how}", measured=measured, target=target, at_most=True)


def _rows(plan: Plan, at_random: bool, rounds: int) -> float:
    """Median CPU seconds of a call."""
    pick, found = random.Random(0), []
    for number in range(rounds):
        begin = number * IN_ORDER
        steps = [pick.randrange(STEPS) for _ in range(AT_RANDOM)] if at_random else range(begin, begin + IN_ORDER)
        start = time.thread_time()
        for step in steps:
            plan.rows(step)
        found.append((time.thread_time() - start) / len(steps))
    return statistics.median(found)


def far_start(folder: Path, rounds: int) -> Iterable[Result]:
    """CPU milliseconds to open ten shards, plan a blend in three phases and read the batch of step 1,000,000."""
    sizes = {"10 TB": TERABYTE, "100 MB": 10**7}
    times: dict[str, list[float]] = {name: [] for name in sizes}
    for name, size in sizes.items():
        _make_sparse(folder / name.replace(" ", ""), size)
        _begin(folder / name.replace(" ", ""))
    for _ in range(rounds):
        for name, found in times.items():
            found.append(_begin(folder / name.replace(" ", "")))
    large, small = (statistics.median(found) for found in times.values())
    what = f"open + first batch at step {START:,}"
    yield Result(what=f"{what} of 10 TB", against="ms CPU", measured=1e3 * large, target=5, at_most=True)
    yield Result(what=f"{what} of 100 MB", against="ms CPU", measured=1e3 * small)
    yield Result(
        what=f"{what} of 10 TB", against="x the time for 100 MB", measured=large / small, target=1.5, at_most=True
    )


def _begin(folder: Path) -> float:
    start = time.thread_time()
    data = {name: Roxxel(folder / name) for name in SHARES}
    others = {name: dataset for name, dataset in data.items() if name != "self"}
    phases = [
        Phase(STEPS // 3, 16, 1025, weights=SHARES, blend="row"),
        Phase(STEPS // 4, 16, 1025, weights={"self": 0.5, "code": 0.5}, blend="row"),
        Phase(STEPS, 16, 1025, weights=SHARES, blend="row"),
    ]
    plan = Curriculum(data["self"], phases, others).plan(1)
    batch = next(Stream(plan, data, None, start_step=START))
    seconds = time.thread_time() - start
    assert batch.shape == (16, 1025)
    for dataset in data.values():
        dataset.close()
    return seconds


def _make_sparse(folder: Path, size: int) -> None:
    """Shards of `size` bytes of zeros that take no room: whole files, but for the checksum of their one block."""
    for name, count in SHARDS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        chain = ""
        for index in range(count):
            layout = _layout(size // 2, index, chain)
            chain = layout.metadata.chain
            with (folder / name / f"shard_{index:05d}.rox").open("wb") as file:
                file.write(npy_header(layout.dtype, layout.metadata.tokens))
                file.seek(layout.meta_offset)
                file.write(pack_end(layout))


def _layout(tokens: int, index: int, before: str) -> ShardLayout:
    dtype, ends_sum, sums_sum = np.dtype("<u2"), checksum(b""), checksum(bytes(8))
    metadata = Metadata(
        tokens=tokens, documents=0, vocab_size=50_257, tokenizer_fingerprint=None, separator=None, index=index,
        first_token=index * tokens, first_document=0, chain="",
    )  # fmt: skip
    end, sums, meta = offsets(dtype, tokens, 0, 2 * tokens)
    return ShardLayout(
        metadata=replace(metadata, chain=chain_of(before, metadata, dtype, ends_sum, sums_sum)), dtype=dtype,
        block_size=2 * tokens, ends_offset=end, sums_offset=sums, meta_offset=meta,
        ends_checksum=ends_sum, sums_checksum=sums_sum,
    )  # fmt: skip
