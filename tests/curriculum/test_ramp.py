"""A ramp of the batch size as one line of a curriculum: the phases that it becomes."""

import pytest

from roxxel_dist import Config, Curriculum, Phase
from roxxel_dist.curriculum.phases import phases_of
from roxxel_dist.process.exit_codes import UserError


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"steps": 70, "batch_size": [4, 8, 16]}, [(40, 4), (20, 8), (10, 16)]),
        ({"steps": 10, "batch_size": [4, 8, 16]}, [(6, 4), (3, 8), (1, 16)]),
        ({"steps": 2, "batch_size": (4, 5)}, [(1, 4), (1, 5)]),
        ({"steps": 70, "batch_size": [8]}, r"batch_size is \[8\]: the sizes of a ramp are two or more, .* the number"),
        ({"steps": 70, "batch_size": [8, 8]}, r"batch_size is \[8, 8\]: .* each is larger than the one before"),
        ({"steps": 70, "batch_size": [16, 8]}, "each is larger than the one before"),
        ({"steps": 70, "batch_size": []}, r"batch_size is \[\]: the sizes of a ramp are two or more"),
        ({"steps": 70, "batch_size": [4, 0]}, "batch_size is 0, and must be a whole number of at least 1"),
        ({"steps": 70, "batch_size": [4, 8.5]}, "batch_size is 8.5, and must be a whole number"),
        ({"steps": 3, "batch_size": [2, 4, 64]}, r"steps is 3, and batch_size \[2, 4, 64\] is a ramp .* more steps"),
        ({"batch_size": [4, 8]}, "give steps or epochs"),
    ],
)
def test_steps_are_shared_so_that_each_size_reads_as_many_rows(fields, expected):
    phase = {**fields, "seq_len": 17}
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            phases_of(phase)
        with pytest.raises(UserError, match=expected):
            Config(phases=[phase]).validate()
        return
    parts = phases_of(phase)
    assert [(part.steps, part.batch_size) for part in parts] == expected
    assert sum(part.steps for part in parts) == fields["steps"]
    assert {part.seq_len for part in parts} == {17}


def test_epochs_are_shared_equally():
    parts = phases_of({"epochs": 0.9, "batch_size": [4, 8, 16], "seq_len": 17, "packing": "documents"})
    assert [part.epochs for part in parts] == [pytest.approx(0.3)] * 3
    assert {part.packing for part in parts} == {"documents"}


def test_its_plan_is_that_of_the_phases_written_out(corpus):
    ramp = Curriculum(corpus, [{"steps": 70, "batch_size": [4, 8, 16], "seq_len": 17}, Phase(3, 16, 33)])
    written = Curriculum(corpus, [Phase(40, 4, 17), Phase(20, 8, 17), Phase(10, 16, 17), Phase(3, 16, 33)])
    assert ramp.plan(7).fingerprint == written.plan(7).fingerprint
    assert ramp.plan(7).describe() == written.plan(7).describe()
    assert ramp.total_steps == 73
