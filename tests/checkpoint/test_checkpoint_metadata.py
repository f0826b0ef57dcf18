import json

from roxxel_dist.checkpoint.metadata import CheckpointMetadata, EarlyStopping


def test_the_best_loss_and_the_validations_since():
    stopping, found = EarlyStopping(), []
    for loss in (3.0, 2.0, 2.5, float("nan"), 2.0, -1.0):
        stopping = stopping.after(loss)
        found.append((stopping.best_loss, stopping.evals_since_best))
    assert found == [(3.0, 0), (2.0, 0), (2.0, 1), (2.0, 2), (2.0, 3), (-1.0, 0)]


def test_patience():
    stopping = EarlyStopping(best_loss=2.0, evals_since_best=3)
    assert stopping.should_stop(3)
    assert not stopping.should_stop(4)
    assert not stopping.should_stop(0)


def test_a_checkpoint_of_an_earlier_version_is_read_and_written_with_its_keys():
    saved = {
        "corpus": "c", "curriculum": "p", "scales": {"head": 2.0}, "best_loss": 1.5, "waited": 2, "rewinds": 1,
        "base": {"run": "/runs/base", "step": 12, "asked": "runs/base", "fingerprint": "2ca2b83692306b02"},
        "plan": {"step": 8}, "schedule": {"kind": "cosine"},
    }  # fmt: skip
    metadata = CheckpointMetadata.from_dict(saved)
    assert (metadata.early_stopping.evals_since_best, metadata.rewinds, metadata.base.step) == (2, 1, 12)
    assert json.loads(json.dumps(metadata.to_dict())) == saved
    whole = CheckpointMetadata.from_dict({})
    assert whole == CheckpointMetadata()
    assert not {"scales", "base"} & whole.to_dict().keys()
