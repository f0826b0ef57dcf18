"""The rows of the validations of a run: the same in every phase, resume and branch, or a line says that they differ."""

import json

import pytest
from runs import STILL, rows, told, train

from roxxel_dist import Phase
from roxxel_dist.checkpoint.metadata import CheckpointRef, EarlyStopping, ResumeSpec
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.train.validation.evaluator import ValidationRows, validation_note

OTHER_ROWS = "These are other rows: do not compare val_loss before and after"


def shapes(*phases):
    return [
        Shape(steps=1, batch_size=size, seq_len=length, packing=packing[0] if packing else "contiguous")
        for size, length, *packing in phases
    ]


def batches(found):
    return [(batch.batch_size, batch.seq_len, batch.packing) for batch in found.batches]


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([(8, 17)], [(8, 17)]),
        ([(4, 17), (8, 17), (64, 17)], [(4, 17)]),
        ([(64, 17), (4, 17)], [(4, 17)]),
        ([(64, 17), (8, 65)], [(8, 65), (64, 17)]),
        ([(16, 17), (8, 17, "documents"), (4, 17, "documents")], [(4, 17, "documents"), (16, 17)]),
    ],
)
def test_phases_with_rows_of_one_length_share_a_batch(phases, expected):
    found = ValidationRows.of_phases(shapes(*phases), 10, {"": 1000})
    assert batches(found) == [(*batch, "contiguous")[:3] for batch in expected]
    assert ValidationRows.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    for shape in shapes(*phases):
        assert (found.batch_of(shape).seq_len, found.batch_of(shape).packing) == (shape.seq_len, shape.packing)


def test_a_branch_keeps_those_that_fit_and_adds_what_it_needs():
    trunk = ValidationRows.of_phases(shapes((8, 17), (16, 33)), 10, {"": 1000})
    assert batches(trunk.with_phases(shapes((2, 17), (64, 65)))) == [
        (8, 17, "contiguous"), (16, 33, "contiguous"), (64, 65, "contiguous")
    ]  # fmt: skip
    fewer = trunk.with_phases(shapes((2, 17)), lambda shape: shape.batch_size != 8)
    assert batches(fewer) == [(16, 33, "contiguous"), (2, 17, "contiguous")]


def test_a_line_says_what_is_read_where_phases_differ():
    assert validation_note({}, shapes((8, 17), (4, 17))) == ""
    for phases, line in (
        ([(8, 17), (8, 17)], ""),
        ([(8, 17), (4, 17)], "validation: at most 10 batches of 4 x 17 tokens in every phase, the same rows"),
        (
            [(8, 17), (4, 17), (2, 33)],
            "validation: at most 10 batches of 4 x 17 tokens (phases 1, 2), 2 x 33 tokens (phase 3); val_loss of other "
            "lengths is of other rows",
        ),
    ):
        saved = ValidationRows.of_phases(shapes(*phases), 10, {"": 1000}).to_dict()
        assert validation_note(saved, shapes(*phases)) == line


def test_the_best_of_other_rows_is_not_compared():
    stopping = EarlyStopping().on_rows("a").observe(2.0).observe(3.0)
    assert stopping == EarlyStopping(best_loss=2.0, evals_since_best=1, rows="a")
    assert stopping.on_rows("a") == stopping
    assert stopping.on_rows("b").observe(5.0) == EarlyStopping(best_loss=5.0, rows="b")


def losses(path):
    return [row["val_loss"] for row in rows(path)]


def test_a_ramp_validates_on_the_same_rows_and_so_do_its_branches(corpus, tmp_path):
    """The weights never change: what changes val_loss are the rows alone."""
    options = {"optimizer": STILL, "eval_every": 1, "checkpoint_every": 2, "max_to_keep": None}
    ramp = [Phase(2, 4, 17), Phase(2, 8, 17), Phase(2, 8, 9)]
    train(corpus, tmp_path / "run", ramp, max_steps=3, **options)
    train(corpus, tmp_path / "run", ramp, **options)  # a resume within the second phase
    found = losses(tmp_path / "run")
    assert len(found) == 6
    assert len(set(found[:4])) == 1
    assert found[4] == found[5] != found[0]
    log = told(tmp_path / "run")
    assert log.count(OTHER_ROWS) == 1
    assert "validation of step 5: 2 batches of 8 x 9 tokens, of held out (" in log
    assert "; until now: 2 batches of 4 x 17 tokens, of held out (" in log

    fork = {"origin": ResumeSpec(fork=CheckpointRef(tmp_path / "run", 2)), **options}
    train(corpus, tmp_path / "fork", [*ramp[:1], Phase(2, 8, 17)], **fork)
    assert set(losses(tmp_path / "fork")) == {found[0]}
    assert OTHER_ROWS not in told(tmp_path / "fork")

    train(corpus, tmp_path / "run", [*ramp, Phase(2, 4, 17)], amend=True, **options)
    assert losses(tmp_path / "run")[6:] == [found[0]] * 2
    train(corpus, tmp_path / "run", [*ramp, Phase(4, 4, 17)], amend=True, **options | {"eval_iters": 1})
    assert "validation of step 9: 1 batch of 4 x 17 tokens" in told(tmp_path / "run")


def test_patience_counts_through_a_ramp_and_anew_on_other_rows(corpus, tmp_path):
    options = {"optimizer": STILL, "eval_every": 1, "patience": 3}
    ended = train(corpus, tmp_path / "ramp", [Phase(2, 4, 17), Phase(4, 8, 17)], **options)
    assert ended.step == 4  # one that is the lowest, and three that are not lower
    ended = train(corpus, tmp_path / "longer", [Phase(2, 8, 17), Phase(4, 8, 9)], **options)
    assert ended.step == 6
