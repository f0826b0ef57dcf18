"""The plan of one data set. Blends and amendments have files of their own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.units import Units, unit_size

RANGES = [(0, 50_000), (50_000, 31_007), (90_000, 12_345), (110_000, 40_000)]  # with gaps: held-out text
phases = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(2, 300)), min_size=1, max_size=4)


def plan_of(shapes, ranges=RANGES, seed=3, **options):
    made = [Shape(steps=steps, batch_size=batch, seq_len=length) for steps, batch, length in shapes]
    return Plan(made, {"self": ranges}, seed, **options)


def spans(plan, step):
    rows = plan.rows(step)
    return [(int(start), int(start) + rows.seq_len) for start in rows.offset]


@given(phases, st.integers(0, 2**31))
def test_windows_are_contiguous_text_inside_one_range(shapes, seed):
    plan = plan_of(shapes, seed=seed)
    for step in range(plan.total_steps):
        batch, seq_len = plan.shape(step)
        found = spans(plan, step)
        assert len(found) == batch
        for start, stop in found:
            assert stop - start == seq_len
            assert any(lo <= start and stop <= lo + n for lo, n in RANGES)


@given(phases, st.integers(0, 2**31))
def test_no_token_twice_in_a_pass_whatever_the_phases(shapes, seed):
    plan = plan_of(shapes, seed=seed)
    seen = {}
    for step in range(plan.total_steps):
        counts = seen.setdefault(plan.segment(step).allocations[0].cursor.pass_index, np.zeros(150_000, int))
        for start, stop in spans(plan, step):
            counts[start:stop] += 1
    assert all(counts.max() == 1 for counts in seen.values())


def test_a_pass_reads_nearly_everything_exactly_once():
    steps = Units(RANGES, unit_size(RANGES, 65)).count * (unit_size(RANGES, 65) // 65) // 4
    plan = plan_of([(steps, 4, 65)], max_passes=1)
    read = {span for step in range(steps) for span in spans(plan, step)}
    assert len(read) == steps * 4
    assert len(read) * 65 > 0.97 * sum(n for _, n in RANGES)


def test_a_step_is_a_pure_function():
    """Asked backwards, alone, or by another object: the same rows."""
    shapes = [(40, 8, 33), (30, 2, 257), (500, 8, 65)]
    plan, other = plan_of(shapes), plan_of(shapes)
    forward = [plan.rows(step).offset.tolist() for step in range(plan.total_steps)]
    backward = [other.rows(step).offset.tolist() for step in reversed(range(plan.total_steps))][::-1]
    assert forward == backward
    assert [plan_of(shapes).rows(step).offset.tolist() for step in (569, 17, 300)] == [
        forward[step] for step in (569, 17, 300)
    ]


def test_the_next_pass_is_shuffled_anew():
    plan = plan_of([(2000, 8, 65)])
    first, second = plan.segments[0].first_step, plan.segments[1].first_step
    assert plan.segments[1].allocations[0].cursor.pass_index == 1
    windows = [
        [start for step in range(begin, begin + 100) for start, _ in spans(plan, step)] for begin in (first, second)
    ]
    assert windows[0] != windows[1]
    assert len(set(windows[0]) & set(windows[1])) < 0.6 * len(windows[0])


def test_the_seed_decides():
    one, other = (plan_of([(10, 8, 65)], seed=seed).rows(0).offset.tolist() for seed in (1, 2))
    assert one != other


def test_neighbours_in_a_unit_are_not_neighbours_in_a_batch():
    plan = plan_of([(200, 8, 65)], seed=5)
    gaps = np.concatenate([np.abs(np.diff(plan.rows(step).offset)) for step in range(200)])
    assert (gaps == 65).mean() < 0.02


def test_a_far_step_of_a_huge_corpus_is_found_at_once():
    """Ten shards of a terabyte each: the plan holds a handful of segments and no list of units."""
    huge = [(i * 10**12, 10**12) for i in range(10)]
    plan = plan_of([(10**8, 256, 2049), (10**6, 16, 32_769)], huge)
    rows = plan.rows(10**8 - 1)
    assert len(rows.offset) == 256
    assert len(plan.segments) < 20
    assert 0 <= rows.offset.min() < rows.offset.max() < 10**13
    assert len(str(plan.state(10**8))) < 2000


def test_units_shrink_on_small_and_scattered_corpora():
    assert unit_size([(0, 10**9)], 1025) == 8 * 1025
    small = unit_size([(0, 20_000)], 129)
    assert small % 129 == 0
    assert Units([(0, 20_000)], small).count * small > 0.95 * 20_000
    scattered = [(i * 5000, 5000) for i in range(100)]
    unit = unit_size(scattered, 129)
    assert Units(scattered, unit).count * unit > 0.95 * 500_000


def test_too_little_data_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"phase 2: a batch of 64 rows of 513 tokens .* holds \d+ such rows"):
        plan_of([(5, 4, 65), (5, 64, 513)], [(0, 20_000)])


def test_passes_can_be_forbidden():
    with pytest.raises(ValueError, match=r"phase 1: all of its data is used up at step \d+, and max_passes is 1"):
        plan_of([(2000, 8, 65)], max_passes=1)
    assert len(plan_of([(2000, 8, 65)], max_passes=8).segments) == 8


def test_steps_outside_the_plan_are_refused():
    plan = plan_of([(5, 4, 65)])
    for step in (-1, 5):
        with pytest.raises(IndexError, match="the plan has steps 0 to 4"):
            plan.rows(step)


def test_tokens_and_fingerprint():
    shapes = [(5, 4, 65), (7, 2, 129)]
    plan = plan_of(shapes)
    assert plan.tokens(0) == 0
    assert plan.tokens(6) == 5 * 4 * 65 + 2 * 129
    assert plan.tokens(12) == 5 * 4 * 65 + 7 * 2 * 129
    others = [plan_of([(5, 4, 65), (7, 2, 128)]), plan_of(shapes, RANGES[:-1]), plan_of(shapes, seed=4)]
    assert len({plan.fingerprint, *(p.fingerprint for p in others)}) == 4


def test_the_table_for_people():
    text = plan_of([(5, 4, 65), (2000, 8, 129)]).describe().splitlines()
    assert text[1].split()[:4] == ["1", "1", "to", "5"]
    assert text[2].split()[:4] == ["2", "6", "to", "2,005"]
    assert text[3].split()[:2] == ["all", "2,005"]
    assert text[4].startswith("step 131: all tokens of 'self' are read: the next pass begins")
    assert text[5] == "step 131: this pass and the 13 that follow take 127 steps each"
    assert text[6].startswith("step 1,909: all tokens of 'self' are read: the next pass begins")
