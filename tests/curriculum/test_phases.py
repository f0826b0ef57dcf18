import dataclasses
import json

import numpy as np
import pytest

from roxxel_dist import Curriculum, Phase, Plan


def test_positional_order_is_steps_batch_seq_len_epochs():
    phase = Phase(10, 8, 129)
    assert (phase.steps, phase.batch_size, phase.seq_len, phase.epochs) == (10, 8, 129, None)
    assert [f.name for f in dataclasses.fields(Phase)][-2:] == ["blend", "packing"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 1, "seq_len": 2}, "give steps or epochs"),
        ({"steps": 1, "seq_len": 2}, "batch_size and seq_len must be given"),
        ({"steps": 0, "batch_size": 1, "seq_len": 2}, "steps is 0, and must be a whole number of at least 1"),
        ({"steps": 1, "batch_size": 2.0, "seq_len": 2}, "batch_size is 2.0"),
        ({"steps": 1, "batch_size": 1, "seq_len": 1}, "seq_len is 1, and must be a whole number of at least 2"),
        (
            {"steps": 1, "batch_size": 1, "seq_len": 2, "packing": "rows"},
            "packing is 'rows', and must be 'contiguous' or",
        ),
        ({"epochs": -1, "batch_size": 1, "seq_len": 2}, "epochs is -1"),
    ],
)
def test_errors_name_field_value_and_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        Phase(**fields)


def test_steps_win_over_epochs(corpus):
    curriculum = Curriculum(corpus, [Phase(steps=3, epochs=7, batch_size=2, seq_len=17)])
    assert (curriculum.total_steps, curriculum.hold_out(0.5)[0].total_steps) == (3, 3)


def test_a_phase_knows_its_steps_once_a_curriculum_has_counted_them(corpus):
    """A schedule over `sum(phase.steps for phase in phases)`; another curriculum counts in its own data."""
    phases = [Phase(epochs=0.5, batch_size=2, seq_len=17), Phase(steps=5, batch_size=2, seq_len=17)]
    curriculum = Curriculum(corpus, phases)
    whole = curriculum.total_steps
    assert [phase.steps for phase in phases] == [whole - 5, 5]
    part, _ = curriculum.hold_out(0.5)
    assert part.total_steps < whole
    assert Curriculum(part.primary_streamer, phases).total_steps == part.total_steps
    assert Curriculum(corpus, phases).total_steps == whole


def test_mappings_stand_for_phases(corpus):
    curriculum = Curriculum(corpus, [{"steps": 3, "batch_size": 2, "seq_len": 17}, Phase(4, 2, 33)])
    assert [p.steps for p in curriculum.phases] == [3, 4]
    assert curriculum.total_steps == 7
    with pytest.raises(ValueError, match="'batchsize' is not a field of a phase"):
        Curriculum(corpus, [{"steps": 3, "batchsize": 2, "seq_len": 17}])
    with pytest.raises(ValueError, match="at least one phase"):
        Curriculum(corpus, [])


def test_packing_changes_no_row_and_is_part_of_the_plan(corpus):
    """A plan without it says nothing about it: checkpoints from before there was any are still its own."""
    plain, packed = (
        Curriculum(corpus, [Phase(3, 4, 33), {"steps": 2, "batch_size": 8, "seq_len": 65, **more}]).plan(5)
        for more in ({}, {"packing": "documents"})
    )
    for step in range(5):
        one, other = plain.rows(step), packed.rows(step)
        assert np.array_equal(one.offset, other.offset)
        assert (one.packed, other.packed) == (False, step >= 3)
    assert plain.fingerprint != packed.fingerprint
    assert "packing" not in json.dumps(plain.state(0))
    again = Plan.from_state(json.loads(json.dumps(packed.state(3))))
    assert again.shapes == packed.shapes
    assert again.fingerprint == packed.fingerprint
    assert [again.rows(step).packed for step in (2, 3)] == [False, True]
    assert "self 100%, documents apart" in packed.describe()
    assert "documents apart" not in plain.describe()


@pytest.mark.parametrize("epochs", [0.25, 1, 2.5])
def test_epochs_become_steps(corpus, epochs):
    one_pass = corpus.estimate_steps(seq_len=65, batch_size=4)
    curriculum = Curriculum(corpus, [Phase(epochs=epochs, batch_size=4, seq_len=65)])
    assert curriculum.phases[0].steps == int(one_pass * epochs)
    passes = {segment.allocations[0].cursor.pass_index for segment in curriculum.plan(0).segments}
    assert passes == set(range(-(-int(epochs * 4) // 4)))


def test_epochs_of_less_than_a_step(corpus):
    with pytest.raises(ValueError, match="less than one step"):
        Curriculum(corpus, [Phase(epochs=0.001, batch_size=64, seq_len=65)])
