"""Changing a plan in mid-run: the past stays, and what a pass has read is not read again."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import RemainingUnits, Shape

SIZE = 400_000
OLD = {"self": [(0, 100_000), (100_000, 60_000)], "code": [(0, 50_000)]}
LONGER = {**OLD, "self": [*OLD["self"], (200_000, 90_000)]}
SHORTER = {**OLD, "self": OLD["self"][:1]}
OTHER = {"self": OLD["self"], "books": [(0, 80_000)]}


def shapes(*phases):
    return [
        Shape(steps=s, batch_size=b, seq_len=n, weights=tuple(w.items()), blend=blend) for s, b, n, w, blend in phases
    ]


BOTH = {"self": 0.7, "code": 0.3}
START = shapes((60, 4, 65, BOTH, "row"), (60, 2, 257, BOTH, "step"))
CHANGES = {
    "weights": (shapes((60, 4, 65, {"self": 0.2, "code": 0.8}, "row"), (60, 2, 257, BOTH, "step")), None),
    "lengthened": (shapes((90, 4, 65, BOTH, "row"), (60, 2, 257, BOTH, "step")), None),
    "another batch": (shapes((60, 6, 65, BOTH, "step"), (60, 3, 257, BOTH, "row")), None),
    "longer windows": (shapes((60, 4, 65, BOTH, "row"), (60, 2, 257, BOTH, "step"), (10, 1, 600, BOTH, "step")), None),
    "context extended": (shapes((60, 4, 65, BOTH, "row"), (60, 2, 257, BOTH, "step"), (3, 1, 9000, BOTH, "row")), None),
    "shard added": (START, LONGER),
    "shard taken away": (START, SHORTER),
    "data set swapped": (shapes((130, 4, 65, {"self": 0.5, "books": 0.5}, "row")), OTHER),
    "same": (None, None),
}


def trace(plan, steps):
    return [(plan.rows(step).dataset.tolist(), plan.rows(step).offset.tolist()) for step in steps]


def check_disjoint(plan, size=SIZE):
    """No token of a pass is read twice; returns the tokens read in first passes, by data set."""
    seen = {}
    for step in range(plan.total_steps):
        rows = plan.rows(step)
        passes = {allocation.source.name: allocation.cursor.pass_index for allocation in plan.segment(step).allocations}
        for number, start in zip(rows.dataset, rows.offset, strict=True):
            name = plan.datasets[number]
            counts = seen.setdefault((name, passes[name]), np.zeros(size, int))
            counts[start : start + rows.seq_len] += 1
    assert all(counts.max() == 1 for counts in seen.values())
    return seen


@given(
    st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 40), st.integers(0, 15)), max_size=4),
    st.integers(0, 2**31),
)
def test_whatever_changes(changes, seed):
    plan, step, refused = Plan(START, OLD, seed), 0, []
    for name, later, skip in changes:
        step = min(step + later, plan.total_steps - 1)
        phases, datasets = CHANGES[name]
        before = trace(plan, range(step))
        try:
            amended = plan.amend(step, phases, datasets=datasets, skip=skip)
        except ValueError as error:
            refused.append(str(error))
            continue
        assert trace(amended, range(step)) == before
        assert amended.segment(step).first_step == step
        plan = amended
    words = ("weights name", "the phases end at step", "an amendment adds shards after the existing ones")
    assert all(any(word in message for word in words) for message in refused)
    seen = check_disjoint(plan)
    for (name, _), counts in seen.items():
        readable = np.zeros(SIZE, bool)
        for amendment in plan.amendments:
            if name in amendment.sources:
                for start, length in amendment.sources[name].units.ranges:
                    readable[start : start + length] = True
        assert not counts[~readable].any()
    again = Plan.from_state(json.loads(json.dumps(plan.state(0))))
    assert again.fingerprint == plan.fingerprint
    assert trace(again, range(plan.total_steps)) == trace(plan, range(plan.total_steps))


def test_an_amendment_that_changes_nothing_later_still_reads_everything_once():
    """A pass amended in its midst gives up at most a chunk; the rest is read."""
    plan = Plan(shapes((100, 4, 65, {"self": 1.0}, "step")), {"self": [(0, 400_000)]}, 3)
    one_pass = plan.segments[0].allocations[0].source.units.size * plan.segments[0].allocations[0].source.units.count
    longer = shapes((one_pass // (4 * 65) + 200, 4, 65, {"self": 1.0}, "step"))
    amended = plan.amend(50, longer)
    seen = check_disjoint(amended)
    assert (seen["self", 0] > 0).sum() > 0.85 * one_pass
    assert ("self", 1) in seen


def test_a_plan_can_be_lengthened_at_its_end():
    plan = Plan(START, OLD, 3)
    longer = plan.amend(120, [*START, *shapes((20, 4, 65, BOTH, "row"))])
    assert longer.total_steps == 140
    assert trace(longer, range(120)) == trace(plan, range(120))
    check_disjoint(longer)


def test_steps_left_out_are_never_read():
    plan = Plan(START, OLD, 9)
    amended = plan.amend(20, skip=60)  # more than the rest of a chunk, which an amendment gives up anyway
    left_out = {
        (d, o) for step in range(20, 80) for d, o in zip(*map(np.ndarray.tolist, _rows(plan, step)), strict=True)
    }
    read = {(d, o) for step in range(120) for d, o in zip(*map(np.ndarray.tolist, _rows(amended, step)), strict=True)}
    assert left_out
    assert not left_out & read


def test_a_data_set_that_comes_back_goes_on_where_it_was():
    plan = Plan(START, OLD, 9).amend(20, *CHANGES["data set swapped"][:1], datasets=OTHER)
    back = plan.amend(40, START, datasets={**OTHER, **OLD})
    code = back.datasets.index("code")
    before, after = (
        {o for step in steps for d, o in zip(*map(np.ndarray.tolist, _rows(back, step)), strict=True) if d == code}
        for steps in (range(20), range(40, 60))
    )
    assert before
    assert after
    assert not before & after
    check_disjoint(back)


def _rows(plan, step):
    rows = plan.rows(step)
    return rows.dataset, rows.offset


def test_an_added_shard_is_read_in_this_pass():
    plan = Plan(shapes((500, 4, 65, {"self": 1.0}, "step")), {"self": OLD["self"]}, 3)
    amended = plan.amend(100, datasets={"self": LONGER["self"]})
    new = [o for step in range(100, 500) for o in amended.rows(step).offset.tolist() if o >= 200_000]
    expected = 400 * 4 * 90_000 / (250_000 - 100 * 4 * 65)
    assert abs(len(new) - expected) < 0.25 * expected


@pytest.mark.parametrize("times", [9, 32, 100])
def test_rows_of_any_length_may_follow(times):
    """A longer context in mid-run: the past stays, and a pass begins whose units hold the longer rows."""
    ranges = {"self": [(0, 300_000), (300_000, 100_000)], "code": [(0, 50_000)]}
    first = shapes((100, 4, 65, BOTH, "step"))
    plan = Plan(first, ranges, 3)
    unit, length = plan.amendments[0].sources["self"].units.size, 65 * times
    amended = plan.amend(70, [*first, *shapes((10, 2, length, {"self": 1.0}, "step"))])
    assert trace(amended, range(70)) == trace(plan, range(70))
    assert amended.shape(105) == (2, length)
    last = amended.amendments[-1].sources
    assert last["code"] is plan.amendments[0].sources["code"]  # no longer row reads it
    if length > unit:
        assert last["self"].units.size >= length
        assert "step 71: the next pass over 'self' (units of" in amended.describe()
    more = amended.amend(90, datasets={**ranges, "self": [*ranges["self"], (400_000, 90_000)]})
    for one in (amended, more):
        check_disjoint(one, 500_000)
        held = [*ranges["self"], (400_000, 90_000)]
        for rows in map(one.rows, range(100, 110)):
            for offset in rows.offset.tolist():
                assert any(start <= offset and offset + rows.seq_len <= start + count for start, count in held)
        again = Plan.from_state(json.loads(json.dumps(one.state(0))))
        assert trace(again, range(110)) == trace(one, range(110))


def test_a_row_longer_than_every_shard_is_refused():
    with pytest.raises(
        ValueError, match="does not hold one such row: the training part of its longest shard has 100000"
    ):
        Plan(START, OLD, 3).amend(5, shapes((60, 1, 100_001, {"self": 1.0}, "step")))


def test_the_past_cannot_be_amended():
    plan = Plan(START, OLD, 3).amend(50)
    for step in (49, 121):
        with pytest.raises(ValueError, match=f"step {step} cannot be amended: the last amendment is of step 50"):
            plan.amend(step)
    with pytest.raises(ValueError, match="skip is -1"):
        plan.amend(50, skip=-1)
    with pytest.raises(ValueError, match="the phases end at step 40"):
        plan.amend(50, shapes((40, 4, 65, BOTH, "row")))


@pytest.mark.parametrize(
    "ranges", [SHORTER["self"], [(0, 100_000), (100_000, 50_000)], [(0, 90_000), *LONGER["self"][1:]]]
)
def test_what_takes_data_away_is_a_fork(ranges):
    plan = Plan(START, OLD, 3)
    with pytest.raises(
        ValueError, match=r"the data 'self' differs .* from shard [01] on: an amendment adds .*fork=RUN@STEP"
    ):
        plan.amend(20, datasets={**OLD, "self": ranges})
    state = Plan(START, LONGER, 3).amend(20).state(0)
    state["amendments"][1]["datasets"]["self"]["ranges"].pop()
    with pytest.raises(ValueError, match=r"from shard 2 on: an amendment adds shards"):
        Plan.from_state(state)


def test_a_fork_without_a_shard_begins_the_next_pass():
    plan = Plan(START, OLD, 3)
    forked = plan.amend(20, START, datasets=SHORTER, is_fork=True)
    assert trace(forked, range(20)) == trace(plan, range(20))
    passes = {a.source.name: a.cursor.pass_index for a in forked.segment(20).allocations}
    assert passes == {"self": 1, "code": 0}
    assert "step 21: the next pass over 'self' begins, because shards were taken away" in forked.describe()
    for rows in map(forked.rows, range(20, 120)):
        assert max(rows.offset[rows.dataset == 0], default=0) + rows.seq_len <= 100_000
    check_disjoint(forked)
    again = Plan.from_state(json.loads(json.dumps(forked.state(0))))
    assert trace(again, range(120)) == trace(forked, range(120))
    added = plan.amend(20, START, datasets=LONGER, is_fork=True)  # what only adds reads what an amendment reads
    assert trace(added, range(120)) == trace(plan.amend(20, START, datasets=LONGER), range(120))


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 50)), max_size=4),
    st.integers(0, 99),
    st.integers(1, 40),
)
def test_a_pool_is_what_is_left(units, changes, seed, block):
    pool, left, total = RemainingUnits.first(units, (seed,), block), set(range(units)), units
    for level, (used_share, added) in enumerate(changes):
        used = int(used_share * pool.size)
        left -= set(pool.units(np.arange(used)).tolist()) if used else set()
        pool = pool.amend(used, (total, total + added), (seed, level))
        left |= set(range(total, total + added))
        total += added
        assert pool.size == len(left)
        if left:
            assert set(pool.units(np.arange(pool.size)).tolist()) == left
