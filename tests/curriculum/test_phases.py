import dataclasses
import json

import numpy as np
import pytest

from roxxel_dist import Config, Curriculum, Phase, Plan, Roxxel
from roxxel_dist.process.exit_codes import UserError


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 3, "batch_size": -4, "seq_len": 33}, "^phase 2 of 3: batch_size is -4, and must be"),
        ({"steps": 3, "batch": 4}, "^phase 2 of 3: 'batch' is not a field of a phase: did you mean 'batch_size'?"),
        ({"steps": 3, "batch_size": [8, 4], "seq_len": 33}, r"^phase 2 of 3: batch_size is \[8, 4\]: the sizes of a"),
        (3, "^phase 2 of 3: 3 is not a phase"),
    ],
)
def test_an_error_in_one_of_several_phases_has_its_number(corpus, wrong, message):
    right = {"steps": 3, "batch_size": 4, "seq_len": 33}
    with pytest.raises(ValueError, match=message):
        Curriculum(corpus, [right, wrong, right])
    if isinstance(wrong, dict):
        with pytest.raises(ValueError, match=message):
            Config(phases=[right, wrong, right]).validate()
    with pytest.raises(ValueError, match=message.replace(" of 3", "").replace("phase 2", "phase 1")):
        Curriculum(corpus, [wrong])


def test_shares_in_the_place_of_epochs():
    with pytest.raises(ValueError, match=r"epochs is a mapping: the shares of data sets are weights=\{'self': 1.0\}"):
        Phase(100, 16, 33, {"self": 1.0})


@pytest.mark.parametrize("make", [Phase, lambda **fields: Phase.of_value(fields)])
def test_a_phase_has_steps_or_epochs(make):
    with pytest.raises(UserError, match=r"steps is 3 and epochs is 7: .* so give one of them"):
        make(steps=3, epochs=7, batch_size=2, seq_len=17)


def test_the_phases_of_the_caller_stay_as_they_are(corpus):
    """`Curriculum.phases` has the steps, as new objects; another curriculum counts in its own data."""
    given = [Phase(epochs=0.5, batch_size=2, seq_len=17), Phase(steps=5, batch_size=2, seq_len=17)]
    texts, known = [repr(phase) for phase in given], {phase: number for number, phase in enumerate(given)}
    curriculum = Curriculum(corpus, given)
    whole = curriculum.total_steps
    assert [repr(phase) for phase in given] == texts
    assert [known[phase] for phase in given] == [0, 1]
    assert [(phase.steps, phase.epochs) for phase in curriculum.phases] == [(whole - 5, None), (5, None)]
    part, _ = curriculum.hold_out(0.5)
    assert part.total_steps < whole
    assert Curriculum(part.primary_streamer, given).total_steps == part.total_steps
    assert Curriculum(corpus, given).total_steps == whole


def test_mappings_stand_for_phases(corpus):
    curriculum = Curriculum(corpus, [{"steps": 3, "batch_size": 2, "seq_len": 17}, Phase(4, 2, 33)])
    assert [p.steps for p in curriculum.phases] == [3, 4]
    assert curriculum.total_steps == 7
    with pytest.raises(ValueError, match="'batchsize' is not a field of a phase"):
        Curriculum(corpus, [{"steps": 3, "batchsize": 2, "seq_len": 17}])
    with pytest.raises(ValueError, match="at least one phase"):
        Curriculum(corpus, [])


def test_packing_changes_no_row_and_is_part_of_the_plan(corpus):
    plain, packed = (
        Curriculum(corpus, [Phase(3, 4, 33), {"steps": 2, "batch_size": 8, "seq_len": 65, **more}]).plan(5)
        for more in ({}, {"packing": "documents"})
    )
    for step in range(5):
        one, other = plain.rows(step), packed.rows(step)
        assert np.array_equal(one.offset, other.offset)
        assert (one.packed, other.packed) == (False, step >= 3)
    assert plain.fingerprint != packed.fingerprint
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


BLENDS = {
    "half": ({"self": 0.5, "code": 0.5}, "step", 60_000),
    "half by row": ({"self": 0.5, "code": 0.5}, "row", 60_000),
    "rare self": ({"self": 0.02, "code": 0.98}, "step", 60_000),
    "rare self by row": ({"self": 0.02, "code": 0.98}, "row", 60_000),
    "the other is soon used up": ({"self": 0.5, "code": 0.5}, "step", 2_000),
    "the other is soon used up, by row": ({"self": 0.5, "code": 0.5}, "row", 2_000),
    "the other is large": ({"self": 0.9, "code": 0.1}, "step", 400_000),
    "of weight 0": ({"self": 2, "code": 0}, "step", 60_000),
    "three": ({"self": 0.4, "code": 0.3, "books": 0.3}, "row", 60_000),
}


@pytest.mark.parametrize("epochs", [0.5, 1, 2])
@pytest.mark.parametrize("name", BLENDS)
def test_epochs_count_passes_over_self_in_a_blend(corpus, tmp_path, name, epochs):
    weights, blend, tokens = BLENDS[name]
    others = {}
    for other in set(weights) - {"self"}:
        others[other] = Roxxel(tmp_path / f"{other}.rox")
        others[other].write([np.ones(tokens, np.uint16)], separator=None, vocab_size=300)
    alone = corpus.estimate_steps(seq_len=65, batch_size=4) * 4
    phases = [Phase(3, 4, 65), Phase(epochs=epochs, batch_size=4, seq_len=65, weights=weights, blend=blend)]
    curriculum = Curriculum(corpus, phases, others)
    rows = curriculum.plan(0).rows_read(3, curriculum.total_steps)["self"]
    assert abs(rows - epochs * alone) <= 4 * (2 * epochs + 2), (rows, alone)


@pytest.mark.parametrize("weights", [{"self": 0, "b": 1}, {"b": 1}, {"self": 0.0, "b": 0.5, "c": 2}])
def test_epochs_of_a_phase_that_does_not_read_self(weights):
    with pytest.raises(UserError, match="the weight of self is 0: give steps instead of epochs"):
        Phase(epochs=1, batch_size=4, seq_len=65, weights=weights)


def test_exponents_of_yaml_are_numbers():
    read = Phase.of_value({"steps": "1e3", "batch_size": 4, "seq_len": 65, "weights": {"self": 1, "b": "1e-3"}})
    assert (read.steps, read.weights) == (1000, {"self": 1, "b": 0.001})
    assert Phase.of_value({"epochs": "5e-1", "batch_size": 4, "seq_len": 65}).epochs == 0.5
    with pytest.raises(UserError, match=r"steps is 0\.15, and must be a whole number"):
        Phase.of_value({"steps": "1.5e-1", "batch_size": 4, "seq_len": 65})
