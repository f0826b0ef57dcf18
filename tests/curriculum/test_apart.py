"""Passes apart: every data set keeps its share over its passes, and no share changes the order it is read in."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.units import APART, SPREAD, rows_in_a_pass

SETS = {"self": [(0, 6000), (6100, 2900)], "code": [(0, 2600)], "math": [(50, 900)]}
share = st.integers(0, 20)
shares = st.tuples(share, share, share).filter(any)
STEPS, ROWS, LENGTH = 120, 6, 17


def curriculum(weights, end, blend="row", lengths=(LENGTH, LENGTH)):
    """Two phases of the weights of two mixtures, of which the first has `end` of the steps."""
    return [
        Shape(
            steps=steps,
            batch_size=ROWS,
            seq_len=length,
            weights=tuple((name, float(weight)) for name, weight in zip(SETS, given, strict=True) if weight),
            blend=blend,
        )
        for steps, given, length in zip((end, STEPS - end), weights, lengths, strict=True)
    ]


def windows(plan):
    """The windows that a plan reads of each data set, in its order."""
    found = {name: [] for name in plan.datasets}
    for step in range(plan.total_steps):
        rows = plan.rows(step)
        for number, offset in zip(rows.dataset.tolist(), rows.offset.tolist(), strict=True):
            found[plan.datasets[number]].append((offset, rows.seq_len))
    return found


def apart(*args, **options):
    return Plan(curriculum(*args, **options), SETS, 3, order=APART)


@given(shares, shares, shares, shares, st.integers(1, STEPS - 1), st.integers(1, STEPS - 1), st.booleans())
def test_no_share_and_no_end_of_a_phase_changes_the_order(a, b, c, d, first, second, by_row):
    blend = "row" if by_row else "step"
    one, other = (windows(apart(pair, end, blend)) for pair, end in (((a, b), first), ((c, d), second)))
    for name in SETS:
        both = min(len(one[name]), len(other[name]))
        assert one[name][:both] == other[name][:both]


def test_passes_together_do_not_have_that():
    """What the setting is for: from the second phase on the windows are others."""
    pairs = (((1, 1, 1), (1, 1, 1)), ((3, 1, 1), (3, 1, 1)))
    one, other = (windows(Plan(curriculum(pair, 40), SETS, 3, order=SPREAD)) for pair in pairs)
    both = min(len(one["code"]), len(other["code"]))
    assert one["code"][:both] != other["code"][:both]


@given(shares, shares, st.integers(1, STEPS - 1))
def test_every_pass_reads_each_window_once(first, second, end):
    for name, found in windows(apart((first, second), end)).items():
        size = rows_in_a_pass(SETS[name], LENGTH)
        for begin in range(0, len(found), size):
            assert len(set(found[begin : begin + size])) == len(found[begin : begin + size])
        whole = [set(found[begin : begin + size]) for begin in range(0, len(found) - size + 1, size)]
        assert all(one == whole[0] for one in whole)
        assert len(whole) < 2 or found[:size] != found[size : 2 * size], "each pass has an order of its own"


@given(shares, shares, st.integers(1, STEPS - 1))
def test_shares_hold_whatever_the_passes(first, second, end):
    plan = apart((first, second), end)
    for low, stop, weights in ((0, end, first), (end, STEPS, second)):
        read = plan.rows_read(low, stop)
        for name, weight in zip(SETS, weights, strict=True):
            assert abs(read[name] - weight / sum(weights) * ROWS * (stop - low)) < 1 + 1e-9 or weight == 0 == read[name]


@given(shares, shares, st.integers(1, STEPS - 1), st.sampled_from([(17, 33), (33, 17), (17, 17)]))
def test_no_token_twice_in_a_pass_whatever_the_lengths(first, second, end, lengths):
    plan = apart((first, second), end, lengths=lengths)
    for number, name in enumerate(plan.datasets):
        counts = Counter()
        for step in range(plan.total_steps):
            rows = plan.rows(step)
            for offset in rows.offset[rows.dataset == number].tolist():
                counts.update(range(offset, offset + rows.seq_len))
        passes = [segment.after(segment.steps)[name] for segment in plan.segments][-1]
        assert max(counts.values(), default=0) <= passes.pass_index + (passes.windows > 0)


def test_a_step_is_a_pure_function():
    plan = apart(((1, 2, 3), (3, 2, 1)), 50)
    forward = [plan.rows(step).offset.tolist() for step in range(STEPS)]
    assert [Plan.from_state(plan.state(7)).rows(step).offset.tolist() for step in reversed(range(STEPS))] == forward[
        ::-1
    ]
    assert Plan.from_state(plan.state(0)).fingerprint == plan.fingerprint
    assert plan.fingerprint != Plan(plan.shapes, SETS, 3).fingerprint
    assert "begins" not in plan.describe()


@pytest.mark.parametrize("step", [1, 37, 50, 119])
@pytest.mark.parametrize("grown", [False, True])
def test_an_amendment_goes_on_in_the_pass(step, grown):
    """A rewind that leaves steps out, and shards that were added: no window comes twice in a pass."""
    plan = apart(((3, 1, 1), (2, 2, 1)), 50)
    sets = SETS | {"self": [*SETS["self"], (9000, 3000)]} if grown else SETS
    amended = plan.amend(step, datasets=sets, skip=0 if grown else 1)
    assert [amended.rows(n).offset.tolist() for n in range(step)] == [plan.rows(n).offset.tolist() for n in range(step)]
    found = windows(amended)["self"]
    size = sum(length for _, length in sets["self"]) // LENGTH
    assert len(set(found)) == len(found) <= size
    assert amended.rows(STEPS - 1).offset.shape == (ROWS,)
    assert windows(Plan.from_state(amended.state(0))) == windows(amended)


def test_passes_are_limited_to_the_window():
    """Two passes of `math` exactly, and one window more."""
    size = rows_in_a_pass(SETS["math"], LENGTH)
    for rows, fits in ((2 * size, True), (2 * size + 1, False)):
        shape = Shape(steps=rows, batch_size=1, seq_len=LENGTH, weights=(("math", 1.0),))
        if fits:
            assert Plan([shape], SETS, 0, max_passes=2, order=APART).rows_read(0, rows)["math"] == rows
            continue
        with pytest.raises(ValueError, match=r"phase 1: it reads 'math' up to pass 3, and max_passes is 2"):
            Plan([shape], SETS, 0, max_passes=2, order=APART)


def test_a_far_step_of_a_huge_corpus():
    huge = {"self": [(i * 10**12, 10**12) for i in range(10)], "code": [(0, 10**9)]}
    shape = Shape(steps=10**8, batch_size=256, seq_len=2049, weights=(("self", 0.9), ("code", 0.1)), blend="row")
    plan = Plan([shape], huge, 3, order=APART)
    rows = plan.rows(10**8 - 1)
    assert len(plan.segments) == 1
    assert 0 <= rows.offset.min() < rows.offset.max() < 10**13
    assert plan.segments[0].allocations[1].passes_begun(plan.rows_read(0, 10**8)["code"]) > 5000
    assert np.isin([0, 1], rows.dataset).all()
