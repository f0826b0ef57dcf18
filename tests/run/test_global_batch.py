"""`batch_size` is the rows of the global batch, which `grad_accum` divides."""

import pytest

from roxxel_dist import Config
from roxxel_dist.curriculum.segments import check_batches
from roxxel_dist.run.curriculum import build_curriculum

PHASES = [{"steps": 2, "batch_size": 6, "seq_len": 17}]


@pytest.mark.parametrize(
    ("fields", "rows", "divides"),
    [
        ({"batch_size": 8, "grad_accum": 2}, 8, True),
        ({"batch_size": 8, "grad_accum": 1}, 8, True),
        ({"batch_size": 2, "grad_accum": 4}, 2, True),  # fewer rows than micro-batches: single rows, as in a phase
        ({"batch_size": 8, "grad_accum": 3}, 8, False),
        ({"batch_size": 5, "grad_accum": 3, "phases": PHASES}, 6, True),
        ({"grad_accum": 4, "phases": PHASES}, 6, False),
    ],
)
def test_grad_accum_divides_the_batch_with_and_without_phases(corpus, fields, rows, divides):
    curriculum, _ = build_curriculum(Config(max_context=16, **fields), corpus)
    assert [shape.batch_size for shape in curriculum.shapes] == [rows]
    if divides:
        check_batches(curriculum.shapes, fields["grad_accum"])
        return
    with pytest.raises(ValueError, match=rf"batch_size is {rows}, which is not a multiple of grad_accum"):
        check_batches(curriculum.shapes, fields["grad_accum"])
