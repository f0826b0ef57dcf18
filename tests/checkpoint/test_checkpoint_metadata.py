import json
from pathlib import Path

import pytest

from roxxel_dist.checkpoint.metadata import BaseModelRef, CheckpointMetadata, EarlyStopping, MetaFile
from roxxel_dist.process.durable import FormatError


def test_the_best_loss_and_the_validations_since():
    stopping, found = EarlyStopping(), []
    for loss in (3.0, 2.0, 2.5, float("nan"), 2.0, -1.0):
        stopping = stopping.observe(loss)
        found.append((stopping.best_loss, stopping.evals_since_best))
    assert found == [(3.0, 0), (2.0, 0), (2.0, 1), (2.0, 2), (2.0, 3), (-1.0, 0)]


def test_patience():
    stopping = EarlyStopping(best_loss=2.0, evals_since_best=3)
    assert stopping.should_stop(3)
    assert not stopping.should_stop(4)
    assert not stopping.should_stop(0)


def test_what_is_written_is_read():
    base = BaseModelRef(Path("/runs/base"), 12, "runs/base", "2ca2b83692306b02")
    stopping = EarlyStopping(best_loss=1.5, evals_since_best=2, rows="a")
    for metadata in (
        CheckpointMetadata(),
        CheckpointMetadata(plan={"step": 8}, early_stopping=stopping, adapter_scales={"head": 2.0}, base=base),
    ):
        assert CheckpointMetadata.from_dict(json.loads(json.dumps(metadata.to_dict()))) == metadata
    for of_a_checkpointer in ({}, {"metrics": {}}):
        assert CheckpointMetadata.from_dict(of_a_checkpointer) == CheckpointMetadata()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "no format, and this version reads format 1: it was written by an earlier version of roxxel-dist"),
        (0, "format 0, and .* by an earlier version of roxxel-dist, which reads it: begin anew"),
        ("x", "format 'x', and .* by an earlier version"),
        (2, "format 2, and .* by a newer version of roxxel-dist, which reads it: update"),
    ],
)
def test_a_checkpoint_of_another_format_is_refused(tmp_path, found, said):
    text = MetaFile({}, {}, None).to_json()
    assert MetaFile.from_json(text.encode(), tmp_path).shapes == {}
    values = {name: value for name, value in json.loads(text).items() if name != "format"}
    (tmp_path / "meta.json").write_text(json.dumps(values | ({} if found is None else {"format": found})))
    with pytest.raises(FormatError, match=f"meta.json: {said}"):
        MetaFile.read(tmp_path)
