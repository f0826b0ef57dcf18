"""Where the blocks of arrays lie in the files of a checkpoint."""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.checkpoint.stored_blocks import Index, verify_checkpoints


@pytest.mark.parametrize("node_bytes", [300, 100_000_000])
def test_an_index_of_any_height(tmp_path, node_bytes):
    """Of arrays in several blocks: each is where the index says, and every node is fetched before it is read."""
    array = np.arange(64 * 300, dtype=np.float32).reshape(64, 300)
    base = {"driver": "file", "path": f"{tmp_path}/"}
    for name in ("params.a", "params.b"):
        config = {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": 1024}  # the second as Orbax has it
        place = {"driver": "ocdbt", "base": base, "path": f"{name}/", "config": config}
        spec = {"driver": "zarr", "kvstore": place, "metadata": {"chunks": [8, 150], "compressor": None}}
        ts.open(spec, create=True, dtype=np.float32, shape=array.shape).result().write(array).result()
    fetched = []
    index = Index(tmp_path, fetched.append)
    assert (len(fetched) > 1) == (node_bytes == 300)
    for row, column in ((0, 0), (56, 150)):
        (place,) = index.places("params/b", ((row, row + 8), (column, column + 150)))
        data = (tmp_path / place.file).read_bytes()[place.start : place.stop]
        assert data == np.ascontiguousarray(array[row : row + 8, column : column + 150]).tobytes()
    assert len(index.places("params/b", ((4, 20), (0, 300)))) == 6


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_damaged(tmp_path):
    saver = CheckpointStore(tmp_path)
    for step in (1, 2):
        saver.save(step, {"w": jnp.arange(9.0)}, {})
    saver.close()
    (tmp_path / "2" / "meta.json").unlink()
    verdicts = verify_checkpoints(tmp_path, [0, 1, 2], lambda count: None)
    assert [(verdict.name, verdict.state) for verdict in verdicts] == [("step 1", "complete"), ("step 2", "damaged")]
