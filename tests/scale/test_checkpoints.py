"""Tables of a checkpoint of many shards: looked up, not compared each with each."""

from collections.abc import Callable

import numpy as np
import pytest
from pretended import cpu_of, exponent

from roxxel_dist.checkpoint.blocks import Header
from roxxel_dist.checkpoint.digests import BlockDigest, Bounds, DigestTable, containment, digest, shares
from roxxel_dist.checkpoint.generations import Inventory

SIZES = [(1024, 8192)]  # a smaller table fits a cache that other programs use too


def rows_of(count: int, shards: int) -> list[Bounds]:
    """An array of 16 rows a shard, cut into so many parts."""
    return [((n * 16 * count // shards, (n + 1) * 16 * count // shards), (0, 4)) for n in range(shards)]


def blocks_inside(count: int, shards: int) -> float:
    is_inside = containment(rows_of(count, shards))
    return cpu_of(lambda: [is_inside(bounds) for bounds in rows_of(count, count)])


def arrays_checked(count: int, parts: int) -> float:
    data = np.zeros((16, 4), np.float32)
    table = DigestTable(step=1, blocks={"a": tuple(BlockDigest(at, digest(data), 0) for at in rows_of(count, count))})
    return cpu_of(lambda: table.check_array("a", dict.fromkeys(rows_of(count, count)[:parts], lambda: data)))


COSTS: dict[str, Callable[[int], float]] = {
    "the same shards": lambda count: blocks_inside(count, count),
    "half as many shards": lambda count: blocks_inside(count, count // 2),
    "shares of work": lambda count: cpu_of(lambda: shares({f"{n}": n % 7 for n in range(4 * count)}, count)),
    "arrays of a rank": lambda count: arrays_checked(count, 8),
}


def inventory_of(rank: int, ranks: int, arrays: int) -> Inventory:
    """Of a rank that has a part of each array, and of some that are whole on every rank; one of two generations."""
    cut = [n * (ranks + 1) + rank for n in range(arrays)]
    whole = [n * (ranks + 1) + ranks for n in range(arrays)]
    common = {"run": "r" * 32, "table": "t" * 32, "total": arrays * (ranks + 1), "pending": None, "metadata": {}}
    header = Header(generation="ab12.7", step=100, rank=rank, needs=sorted([*cut, *whole]), **common)
    generations = [{"header": vars(header), "numbers": cut, "slot": slot} for slot in (0, 1)]
    return Inventory(address=("10.0.0.1", 5000), generations=generations)


def test_what_a_thousand_ranks_have_in_memory_is_a_megabyte() -> None:
    """Rank 0 reads it once. It once handed all of it to each rank: 22 kB x 1,024 x 1,024."""
    one = inventory_of(300, 1024, 672)
    assert Inventory.from_text(one.to_text()).generations == one.generations
    assert len(one.to_text()) * 1024 < 1 << 20


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", COSTS)
def test_a_table_costs_as_much_as_it_has_blocks(case: str, sizes: tuple[int, int]) -> None:
    """But for a logarithm: one of them sorts, and a look into a table that no cache holds takes longer.

    What compares each block with each has 1.9; beside programs that use all of the memory's width 1.2 was seen.
    """
    assert exponent(COSTS[case], *sizes, log_too=True) <= 1.4


def test_blocks_are_found_in_places_that_make_a_grid_and_in_others() -> None:
    grid = [((i * 6, i * 6 + 6), (j * 4, j * 4 + 4)) for i in range(3) for j in range(2)]
    others = [((0, 7), (0, 8)), ((7, 18), (0, 3)), ((9, 18), (3, 8))]
    for places in (grid, others, [], grid[:5]):
        is_inside = containment(places)
        for a in range(0, 18, 3):
            for b in range(0, 8, 2):
                for height, width in ((3, 2), (6, 4), (1, 1)):
                    block = BlockDigest(((a, a + height), (b, b + width)), "", 0)
                    assert is_inside(block.bounds) == any(block.lies_within(place) for place in places)
    assert containment([()])(())


def test_damage_in_a_part_is_found_whether_blocks_are_cut_as_it_or_smaller() -> None:
    data = np.arange(64, dtype=np.float32).reshape(16, 4)
    rows = [((n, n + 4), (0, 4)) for n in range(0, 16, 4)]
    table = DigestTable(step=1, blocks={"a": tuple(BlockDigest(at, digest(data[slice(*at[0])]), 1) for at in rows)})
    parts = {((0, 4), (0, 4)): lambda: data[:4], ((4, 16), (0, 4)): lambda: data[4:]}
    assert table.check_array("a", parts) == []
    data[[1, 9]] += 1
    assert [problem.partition(" ")[0] for problem in table.check_array("a", parts)] == ["a[0:4,0:4]", "a[8:12,0:4]"]


def test_shares_are_dealt_to_whom_has_the_least() -> None:
    work = {f"{n:02}": (37 * n) % 11 for n in range(40)}
    sizes, expected = [0] * 6, [[] for _ in range(6)]
    for item in sorted(work, key=lambda item: (-work[item], item)):
        least = sizes.index(min(sizes))
        sizes[least] += work[item]
        expected[least].append(item)
    assert shares(work, 6) == expected
