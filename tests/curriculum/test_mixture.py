import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist import Curriculum, Phase, Roxxel
from roxxel_dist.curriculum.mixture import BLOCK, Mixture
from roxxel_dist.curriculum.plan import APART, Plan
from roxxel_dist.curriculum.segments import Shape

weights = st.lists(st.floats(1e-3, 1), min_size=1, max_size=6)
DATA = {
    "self": [(0, 60_000), (70_000, 30_000)],
    "code": [(0, 21_000)],
    "books": [(500, 9_000), (9_500, 40_000)],
}


@given(weights, st.integers(1, 3000), st.integers(0, 2**31))
def test_shares_are_exact_at_every_block_end_and_at_the_end(shares, items, key):
    blend = Mixture(shares, items, (key,))
    chosen, before = blend.choose(0, items)
    assert not before.any()
    exact = np.asarray(shares) / sum(shares)
    ends = [*range(blend.block, items - blend.block + 1, blend.block), items]
    for end in ends:
        counts = np.bincount(chosen[:end], minlength=len(shares))
        assert np.abs(counts - exact * end).max() < 1
        assert np.array_equal(counts, blend.counts(end))


@given(weights, st.integers(1, 5000), st.integers(0, 2**31))
def test_blocks_are_what_the_pages_say(shares, items, key):
    """64 items; 128, 256 and so on where a share is below 1/64. The last one has what fills none: less than one more.

    So at the end of every block, and of all, each data set is within one item of its share; within a block it may be
    further away.
    """
    blend = Mixture(shares, items, (key,))
    least = min(shares) / sum(shares)
    block = next(64 * 2**n for n in range(20) if 64 * 2**n * least >= 1)
    assert blend.block == block
    chosen, _ = blend.choose(0, items)
    exact = np.asarray(shares) / sum(shares)
    ends = [0, *range(block, items - block + 1, block), items] if items > block else [0, items]
    assert max(np.diff(ends)) < 2 * block
    for first, end in itertools.pairwise(ends):
        assert np.abs(np.bincount(chosen[:end], minlength=len(shares)) - exact * end).max() <= 1 + 1e-9
        assert np.abs(np.bincount(chosen[first:end], minlength=len(shares)) - exact * (end - first)).max() < 2


@given(weights, st.integers(1, 1000), st.data())
def test_any_stretch_is_found_without_its_past(shares, items, data):
    first = data.draw(st.integers(0, items - 1))
    stop = data.draw(st.integers(first + 1, items))
    whole, _ = Mixture(shares, items, (1,)).choose(0, items)
    part, counts = Mixture(shares, items, (1,)).choose(first, stop)
    assert np.array_equal(part, whole[first:stop])
    before = np.bincount(whole[:first], minlength=len(shares))
    assert np.array_equal(counts, before)
    assert np.array_equal(Mixture(shares, items, (1,)).counts(first), before)


def test_blocks_are_64_items_unless_a_share_is_tiny():
    assert Mixture([0.5, 0.5], 1000, (0,)).block == BLOCK == 64
    assert Mixture([0.999, 0.001], 10_000, (0,)).block == 1024


def test_the_order_inside_blocks_is_shuffled():
    chosen, _ = Mixture([0.5, 0.5], 64 * 200, (3,)).choose(0, 64 * 200)
    blocks = {tuple(block) for block in chosen.reshape(-1, 64)}
    assert len(blocks) == 200
    switches = (np.diff(chosen) != 0).mean()
    assert 0.45 < switches < 0.56


def shape(steps, batch, length, blend="step", **shares):
    return Shape(steps=steps, batch_size=batch, seq_len=length, weights=tuple(shares.items()), blend=blend)


blends = st.lists(
    st.builds(
        shape,
        st.integers(1, 80),
        st.integers(1, 8),
        st.integers(2, 200),
        st.sampled_from(["step", "row"]),
        self=st.floats(0.05, 1),
        code=st.floats(0.05, 1),
        books=st.floats(0.05, 1),
    ),
    min_size=1,
    max_size=3,
)


@given(blends, st.integers(0, 2**31))
def test_no_token_twice_in_a_pass_of_any_data_set(shapes, seed):
    plan = Plan(shapes, DATA, seed)
    seen = {}
    for step in range(plan.total_steps):
        rows, segment = plan.rows(step), plan.segment(step)
        assert len(rows.offset) == segment.shape.batch_size
        if segment.shape.blend == "step":
            assert len(set(rows.dataset.tolist())) == 1
        passes = {allocation.source.name: allocation.cursor.pass_index for allocation in segment.allocations}
        for number, start in zip(rows.dataset, rows.offset, strict=True):
            name = plan.datasets[number]
            assert any(lo <= start and start + rows.seq_len <= lo + n for lo, n in DATA[name])
            counts = seen.setdefault((name, passes[name]), np.zeros(100_000, int))
            counts[start : start + rows.seq_len] += 1
    assert all(counts.max() == 1 for counts in seen.values())


@pytest.mark.parametrize("blend", ["step", "row"])
def test_what_is_used_up_leaves_and_comes_back_in_the_next_pass(blend):
    """`code` is the smallest and has the largest share: it leaves, the others share the rest, then all begin again."""
    plan = Plan([shape(400, 4, 129, blend, self=0.3, code=0.4, books=0.3)], DATA, 5)
    live = [{allocation.source.name for allocation in segment.allocations} for segment in plan.segments]
    assert live[0] == {"self", "code", "books"}
    assert live[1] == {"self", "books"}
    assert len(live[2]) == 1
    assert live[3] == live[0]
    begun = plan.segments[1]
    after = [plan.rows(step).dataset for step in range(begun.first_step, begun.first_step + begun.steps)]
    counts = np.bincount(np.concatenate(after), minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] - counts[2]) <= 2 * (4 if blend == "step" else 1)
    text = plan.describe()
    assert "'code' is used up and leaves the blend" in text
    assert "all tokens of 'self', 'code', 'books' are read: the next pass begins" in text


@pytest.mark.parametrize("blend", ["step", "row"])
@pytest.mark.parametrize("order", ["spread", "apart"])
def test_the_shares_that_a_plan_shows_are_those_it_reads(blend, order):
    """Where a data set is used up, its share is not the one asked for, and the table has both."""
    phase = shape(900, 8, 129, blend, self=0.3, code=0.4, books=0.3)
    options = {} if order == "spread" else {"order": APART}
    plan = Plan([phase], DATA, 5, **options)
    rows = np.bincount(np.concatenate([plan.rows(step).dataset for step in range(900)]), minlength=3)
    assert plan.rows_read(0, 900) == dict(zip(plan.datasets, rows.tolist(), strict=True))
    first = plan.describe().splitlines()[1]
    share = {name: f"{count / rows.sum():.0%}" for name, count in zip(plan.datasets, rows, strict=True)}
    if order == "apart":
        assert f"self 30%, code 40%, books 30% by {blend}" in first
    else:
        assert f"code {share['code']} (40% asked)" in first
        assert f"self {share['self']} (30% asked)" in first


def test_a_data_set_that_a_short_phase_never_reads_is_shown():
    plan = Plan([shape(60, 8, 129, "step", self=0.9996, code=0.0004)], DATA, 5)
    assert plan.rows_read(0, 60) == {"self": 480, "code": 0, "books": 0}
    assert "self 100%, code nothing (0.04% asked) by step" in plan.describe()


def test_rows_of_many_passes_are_counted_at_once():
    long = Plan([shape(10**12, 4, 129, "row", self=0.3, code=0.4, books=0.3)], DATA, 5)
    assert sum(long.rows_read(0, 10**12).values()) == 4 * 10**12
    short, limited = (
        Plan([shape(3000, 4, 129, "row", self=0.3, code=0.4, books=0.3)], DATA, 5, max_passes=limit)
        for limit in (None, 999)
    )
    for first, stop in ((0, 3000), (7, 2990), (250, 251)):
        assert short.rows_read(first, stop) == limited.rows_read(first, stop)


REPEATING = {
    "one data set": [shape(900, 8, 129, self=1.0)],
    "by step": [shape(30, 4, 65, self=0.5, books=0.5), shape(900, 8, 129, self=0.3, code=0.4, books=0.3)],
    "by row, then others": [
        shape(900, 8, 129, "row", self=0.3, code=0.4, books=0.3),
        shape(300, 4, 257, books=1.0),
        shape(200, 4, 129, "row", self=0.9, code=0.1),
    ],
}


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_passes_that_repeat_are_found_without_those_before(name, seed):
    """Where the number of passes is limited, each is cut by itself: the rows are the same."""
    short, long = Plan(REPEATING[name], DATA, seed), Plan(REPEATING[name], DATA, seed, max_passes=99)
    assert max(segment.repeated.count for segment in short.segments if segment.repeated) >= 3
    assert len(short.segments) < len(long.segments)
    assert short.total_steps == long.total_steps
    steps = [*range(short.total_steps), *range(short.total_steps - 1, 0, -7)]
    for at in (None, 450, 451 + 50 * seed, 899):
        one, other = (short, long) if at is None else (p.amend(at, skip=seed) for p in (short, long))
        for step in steps if at is None else steps[at - 3 :: 5]:
            mine, its = one.rows(step), other.rows(step)
            assert np.array_equal(mine.dataset, its.dataset)
            assert np.array_equal(mine.offset, its.offset)
            assert (one.phase(step), one.shape(step), one.tokens(step)) == (
                other.phase(step), other.shape(step), other.tokens(step)
            )  # fmt: skip
            assert one.segment(step).after(1).keys() == other.segment(step).after(1).keys()


def test_a_far_step_of_a_small_corpus_is_found_at_once():
    plan = Plan([shape(10**12, 4, 129, "row", self=0.3, code=0.4, books=0.3)], DATA, 5)
    assert len(plan.segments) < 20
    rows = plan.rows(10**12 - 1)
    assert len(rows.offset) == 4
    assert plan.segment(10**12 - 1).before["self"].pass_index > 10**9
    assert "that follow take" in plan.describe()


def test_it_stays_out_over_a_phase_boundary():
    plan = Plan([shape(60, 4, 129, self=0.2, code=0.8), shape(10, 1, 65, self=0.5, code=0.5)], DATA, 5)
    out = [s for s in plan.segments if {c.source.name for c in s.allocations} == {"self"}]
    assert {segment.phase for segment in out} == {0, 1}


def test_a_data_set_that_is_not_in_a_phase_waits():
    shapes = [shape(20, 4, 65, code=1.0), shape(20, 4, 65, self=1.0), shape(20, 4, 65, code=1.0)]
    plan = Plan(shapes, DATA, 5)
    first, third = ({int(o) for s in steps for o in plan.rows(s).offset} for steps in (range(20), range(40, 60)))
    assert not first & third
    assert plan.rows(0).dataset.tolist() == [1] * 4
    assert plan.rows(20).dataset.tolist() == [0] * 4


def test_weights_must_name_data_sets():
    with pytest.raises(ValueError, match="phase 1: weights name 'poems', and the data sets are self, code, books"):
        Plan([shape(1, 1, 10, poems=1.0)], DATA, 0)


@pytest.fixture
def two(tmp_path):
    rng = np.random.default_rng(0)
    found = []
    for name, count in (("a", 40), ("b", 10)):
        path = tmp_path / f"{name}_*.rox"
        Roxxel(path).write((rng.integers(1, 100, 300).astype(np.uint16) for _ in range(count)), vocab_size=100)
        found.append(Roxxel(path))
    yield found
    for data in found:
        data.close()


def test_the_curriculum_of_a_blend(two):
    phases = [
        Phase(30, 4, 33, weights={"self": 9, "domain": 1}),
        Phase(10, 4, 65, weights={"self": 0.5, "domain": 0.5}, blend="row"),
    ]
    plan = Curriculum(primary_streamer=two[0], phases=phases, mix_streamers={"domain": two[1]}).plan(1)
    assert plan.datasets == ("self", "domain")
    first = np.concatenate([plan.rows(step).dataset for step in range(30)])
    assert abs((first == 0).mean() - 0.9) < 1 / 30
    second = np.concatenate([plan.rows(step).dataset for step in range(30, 40)])
    assert (second == 0).sum() == 20
    assert any(len(set(plan.rows(step).dataset.tolist())) == 2 for step in range(30, 40))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"self": -1}, "the weight of 'self' is -1"),
        ({"self": float("nan")}, "the weight of 'self' is nan"),
        ({"self": 0.0}, "all weights are 0"),
        ({}, "weights must be a mapping"),
        ({"self": 1, "b": 1e-7}, "the weight of 'b' is 1e-07, which is 1e-07 of the sum of all weights"),
        (
            {"self": 1, "b": 1e-4},
            r"which is 9.999e-05 of the sum of all weights \(1.0001\): this share must be 0, or at",
        ),
        ({"self": 1, "b": 1e-4}, "use a weight of at least 0.0001001, or 0"),
        ({"self": 9999, "b": 0.9999, "c": 1}, "the weight of 'b' is 0.9999"),
        ({"self": 10**400, "b": 1}, "the weight of 'self' is 1000000"),
        ({"self": 1e308, "b": 1e308}, "must be a number of at least 0 and below"),
        ({"self": True}, "the weight of 'self' is True"),
        ({"self": "1"}, "the weight of 'self' is '1'"),
    ],
)
def test_weights_that_cannot_be(weights, message):
    with pytest.raises(ValueError, match=message):
        Phase(1, 1, 10, weights=weights)


def test_primary_is_called_self(two):
    with pytest.raises(ValueError, match='"self" is the primary data set'):
        Curriculum(two[0], [Phase(1, 1, 10)], {"self": two[1]})
