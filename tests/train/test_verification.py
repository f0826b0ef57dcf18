"""Training never uses damaged tokens: no row, no checkpoint."""

import threading

import numpy as np
import pytest
from runs import make, rows, saved, train

from roxxel_dist import Phase, Roxxel
from roxxel_dist.data.verify import DamagedData
from roxxel_dist.input.stream import locate_token


@pytest.fixture
def data(tmp_path):
    """Two shards of documents of some 100 tokens, without a vocabulary of their own."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 500, rng.integers(50, 150)).astype(np.uint16) for _ in range(200)]
    with Roxxel(tmp_path / "data" / "a_*.rox") as dataset:
        dataset.write(documents, block_size=512, max_shard_bytes=20_000)
    return tmp_path / "data"


def overwrite(dataset, token, value):
    """Put another id where a token is, behind the back of who has the file open."""
    number = int(np.searchsorted(dataset.first_tokens, token, side="right")) - 1
    shard, inside = dataset.shards[number], token - int(dataset.first_tokens[number])
    with shard.path.open("r+b") as file:
        file.seek(shard.offset + inside * shard.dtype.itemsize)
        file.write(np.array(value, shard.dtype).tobytes())


def first_read(trainer, step):
    """A token that a step, counted from 1, is the first to read, and reads in a block of its own."""
    rows = trainer.plan.rows(step - 1)
    return int(rows.offset[0])


def test_a_damaged_block_with_valid_ids_ends_the_run_by_name(data, tmp_path):
    with Roxxel(data) as dataset:
        trainer = make(dataset, tmp_path / "run", val_fraction=0.0)
        token = first_read(trainer, 9)
        overwrite(dataset, token, 7)
        with pytest.raises(DamagedData) as caught:
            trainer.run()
        trainer.close()
        place = locate_token(dataset, token)
    text = str(caught.value)
    assert "data 'self'" in text
    assert f"{place.path}: block " in text
    assert "document" in text
    assert f"data verify {data}" in text
    damaged = int(text.split()[1])
    assert 1 <= damaged <= 9, "it ends at the first step that reads the block"
    assert all(row["step"] < damaged for row in rows(tmp_path / "run"))
    assert all(step < damaged for step in saved(tmp_path / "run"))
    assert not [thread for thread in threading.enumerate() if thread.name == "roxxel-verify"]


def test_the_step_at_which_it_ends_is_always_the_same(data, tmp_path):
    ends, options = set(), {"val_fraction": 0.0, "log_every": 100, "checkpoint_every": 100}
    for number in range(2):
        with Roxxel(data) as dataset:
            trainer = make(dataset, tmp_path / str(number), [Phase(13, 8, 17)], **options)
            overwrite(dataset, first_read(trainer, 11), 7)
            with pytest.raises(DamagedData, match="cannot be done") as caught:
                trainer.run()
            trainer.close()
            ends.add(str(caught.value).split(":")[0])
    assert len(ends) == 1


def test_off_trains_on_it_as_it_is(data, tmp_path):
    with Roxxel(data) as dataset:
        overwrite(dataset, 1000, 7)
        train(dataset, tmp_path / "run", [Phase(13, 8, 17)], val_fraction=0.0, verify_data="off")
    assert len(rows(tmp_path / "run")) == 13


def test_what_is_held_out_is_verified_too(data, tmp_path):
    with Roxxel(data) as dataset:
        trainer = make(dataset, tmp_path / "run", val_fraction=0.1, eval_iters=100)
        held_out = dataset.split(0.1)[1]
        overwrite(dataset, held_out.ranges[0][0] + 3, 7)
        with pytest.raises(DamagedData, match="is damaged"):
            trainer.run()
        trainer.close()
    assert rows(tmp_path / "run") == []


def test_damaged_document_ends_end_a_run_that_packs_them(data, tmp_path):
    with Roxxel(data) as dataset:
        shard = dataset.shards[0]
        with shard.path.open("r+b") as file:
            file.seek(shard.layout.ends_offset)
            file.write(np.array(3, "<i8").tobytes())
        phases = [{"steps": 3, "batch_size": 8, "seq_len": 17}]
        train(dataset, tmp_path / "one", phases, val_fraction=0.0)
        with pytest.raises(DamagedData, match="document ends are damaged"):
            train(dataset, tmp_path / "two", [phases[0] | {"packing": "documents"}], val_fraction=0.0)


def test_an_id_that_the_model_does_not_have_is_named(tmp_path):
    """In a file without checksums or a vocabulary: nothing else could say it."""
    tokens = np.random.default_rng(0).integers(0, 500, 20_000).astype(np.uint16)
    tokens[777] = 612
    np.save(tmp_path / "a.npy", tokens)
    with Roxxel(tmp_path / "a.npy") as dataset, pytest.raises(DamagedData) as caught:
        train(dataset, tmp_path / "run", [{"steps": 100, "batch_size": 16, "seq_len": 17}], val_fraction=0.0)
    assert "a.npy: token 777 (document 0) is the id 612, and the vocabulary has the ids 0 to 499" in str(caught.value)


def test_each_block_is_looked_at_once(data, tmp_path, monkeypatch):
    from roxxel_dist.data.files.shard import Shard

    seen, damaged = [], Shard.damaged_blocks
    monkeypatch.setattr(Shard, "damaged_blocks", lambda self, blocks: seen.extend(blocks) or damaged(self, blocks))
    with Roxxel(data / "a_00000.rox") as dataset:
        phases, seldom = [{"steps": 60, "batch_size": 16, "seq_len": 33}], {"eval_every": 50, "checkpoint_every": 50}
        train(dataset, tmp_path / "run", phases, log_every=50, **seldom)
        blocks = len(dataset.shards[0].checksums)
    assert len(seen) == len(set(seen))
    assert blocks - 2 <= len(seen) <= blocks
