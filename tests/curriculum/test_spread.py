"""The order of units in a pass: each stretch is spread over the data set."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.curriculum.permutation import SpreadOrder
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape

SOURCES = 4


@given(st.integers(1, 3000), st.integers(1, 400), st.integers(0, 99))
def test_is_a_bijection(n, block, key):
    order = SpreadOrder(n, (key, 7), block)
    units = order(np.arange(n))
    assert np.array_equal(np.sort(units), np.arange(n))


@given(st.integers(100_000, 1 << 40), st.integers(1, 5000), st.integers(0, 99), st.data())
def test_stays_inside_large_domains_and_never_repeats(n, block, key, data):
    near = st.integers(0, n - 1) | st.integers(n - 300, n - 1)
    places = np.array(data.draw(st.lists(near, min_size=1, max_size=99, unique=True)))
    units = SpreadOrder(n, (key,), block)(places)
    assert ((units >= 0) & (units < n)).all()
    assert len(np.unique(units)) == len(places)


@given(st.integers(2_000, 1 << 36), st.integers(1, 5000), st.integers(0, 99), st.data())
def test_each_stretch_is_spread_over_everything(n, block, key, data):
    count = data.draw(st.integers(1, 1500))
    first = data.draw(st.integers(0, n - count))
    units = SpreadOrder(n, (key,), block)(np.arange(first, first + count))
    quarters = np.bincount(units * SOURCES // n, minlength=SOURCES)
    assert np.abs(quarters - count / SOURCES).max() <= 8


# As folders are built: a source behind the other. `tokens` of all, and the phases as (steps, batch_size, seq_len).
CORPORA = {
    "one short phase": (16_000_000, [(30, 16, 65)]),
    "a few hundred steps": (16_000_000, [(300, 16, 65)]),
    "a thousand steps": (16_000_000, [(1000, 16, 65)]),
    "a small corpus": (400_000, [(30, 16, 65)]),
    "a large corpus": (40_000_000_000, [(30, 16, 65), (1000, 16, 65)]),
    "short between long ones": (16_000_000, [(500, 64, 65), (40, 8, 65), (500, 64, 65)]),
    "a long phase behind": (4_000_000_000, [(20, 16, 129), (2_000_000, 16, 129)]),
    "short rows, long ones later": (16_000_000, [(30, 16, 65), (20, 16, 513)]),
    "long rows": (16_000_000, [(20, 16, 4097)]),
    "more than a pass": (400_000, [(600, 16, 65)]),
}


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_phase_reads_every_source_by_its_size(name, seed):
    tokens, phases = CORPORA[name]
    plan = Plan([Shape(steps=s, batch_size=b, seq_len=n) for s, b, n in phases], {"self": [(0, tokens)]}, seed)
    first = 0
    for steps, batch, _ in phases:
        read = min(steps, 1000)
        offsets = np.concatenate([plan.rows(step).offset for step in range(first, first + read)])
        rows = np.bincount(offsets * SOURCES // tokens, minlength=SOURCES)
        expected = read * batch / SOURCES
        assert np.abs(rows - expected).max() <= 3 * np.sqrt(expected * (1 - 1 / SOURCES)), rows
        first += steps


def test_sources_in_many_shards():
    """1,000 shards of a few rows each, a tenth of them of one source."""
    ranges = [(i * 700, 650) for i in range(1000)]
    plan = Plan([Shape(steps=20, batch_size=8, seq_len=65)], {"self": ranges}, 0)
    offsets = np.concatenate([plan.rows(step).offset for step in range(20)])
    assert abs(int((offsets < 100 * 700).sum()) - 16) <= 8


def test_a_long_run_reads_few_places_of_a_large_corpus_at_a_time():
    plan = Plan([Shape(steps=10**7, batch_size=512, seq_len=1025)], {"self": [(0, 10**13)]}, 0)
    offsets = np.concatenate([plan.rows(step).offset for step in range(5000, 5400)])
    stretches = np.unique(offsets >> 18).size
    assert stretches <= 3 * 1024  # of 38 million; at random each of the 204,800 rows would be in one of its own


def rows_of(plan):
    digest = hashlib.sha256()
    for step in range(plan.total_steps):
        rows = plan.rows(step)
        digest.update(rows.dataset.astype("<i4").tobytes() + rows.offset.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def test_the_rows_of_a_plan_stay_as_they_are():
    """A run that is resumed with a later version reads what it would have read."""
    both = (("self", 0.7), ("code", 0.3))
    shapes = (
        Shape(steps=60, batch_size=4, seq_len=65, weights=both, blend="row"),
        Shape(steps=60, batch_size=2, seq_len=257, weights=(("self", 1.0),), blend="step"),
    )
    ranges = {"self": [(0, 3_000_000), (3_000_000, 1_000_000)], "code": [(0, 50_000)]}
    plan = Plan(shapes, ranges, 3)
    assert rows_of(plan) == "e4d0fea59cbd4af6"
    longer = plan.amend(50, datasets={**ranges, "self": [*ranges["self"], (5_000_000, 900_000)]})
    assert rows_of(longer) == "4a882a3349d49539"
    for one in (plan, longer):
        again = Plan.from_state(json.loads(json.dumps(one.state(7))))
        assert (rows_of(again), again.fingerprint) == (rows_of(one), one.fingerprint)
