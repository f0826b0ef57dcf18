"""Moves of keys and values of rows that are cut, and of sums of their gradients, between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.train.exact.key_moves import KeyMoves, Part, parts_of
from roxxel_dist.train.exact.layout import ShardLayout, rows_sharding
from roxxel_dist.train.step.compile import AotCompiler

SHARDS, SIZE, WIDTH = 8, 2, 3


class Moves:
    """What `AotCompiler` makes moves of, of (keys, values) float32[N, C, WIDTH] and float32[N, C]."""

    def __init__(self, layout, cut):
        self.layout, self.cut = layout, cut

    def compile(self, compiler):
        like = tuple(jax.ShapeDtypeStruct((self.cut.blocks, SIZE, *more), jnp.float32) for more in ((WIDTH,), ()))
        return KeyMoves.compile_moves(self.layout, self.cut, like, compiler)


def moves_on(devices, rows, per_piece):
    mesh = make_mesh(devices)
    layout = ShardLayout(SHARDS, rows_sharding(batch_sharding(mesh), SHARDS))
    cut = RowCut(SHARDS // rows, 2 * per_piece, SIZE)
    compiler = AotCompiler(mesh)
    compiler.prepare("moves", Moves(layout, cut))
    moves = compiler.get("moves")
    compiler.close()
    return moves, layout, cut


def tree_sum(parts):
    """Neighbours are added, then their sums."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


QUICK = [(3, 2, 2)]
MORE = [(3, 1, 2), (4, 2, 1), (3, 1, 1), (6, 4, 2), (5, 2, 1), (7, 1, 2), (3, 4, 1), (7, 4, 1), (1, 1, 1)]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]


@pytest.mark.parametrize(("devices", "rows", "per_piece"), CASES)
def test_each_shard_gets_the_keys_of_its_row_and_the_sums_of_its_own(devices, rows, per_piece):
    moves, layout, cut = moves_on(devices, rows, per_piece)
    rng = np.random.default_rng(0)
    # Of rows: keys and values, and of each shard the gradients of all keys of its row. Some are -0.0.
    keys = rng.normal(size=(rows, cut.row_blocks, SIZE, WIDTH)).astype(np.float32)
    grads = rng.normal(size=(SHARDS, cut.row_blocks, SIZE, WIDTH)).astype(np.float32)
    keys[..., 0] = grads[..., 0] = -0.0

    def both(x, device):
        return jax.device_put((x, x[..., 1]), device)

    shards = [layout.shards_of(device) for device in layout.devices]
    assert [shard for own in shards for shard in own] == list(range(SHARDS))
    numbers = [np.asarray(cut.numbers(shard)) for shard in range(SHARDS)]
    parts = [
        [both(keys[shard // cut.parts, numbers[shard]], device) for shard in own]
        for own, device in zip(shards, layout.devices, strict=True)
    ]
    for own, found in zip(shards, moves.keys_of_rows(parts), strict=True):
        for shard, (whole, second) in zip(own, found, strict=True):
            assert np.asarray(whole).tobytes() == keys[shard // cut.parts].tobytes()
            assert np.asarray(second).tobytes() == keys[shard // cut.parts][..., 1].tobytes()
    sums = moves.sums(lambda i, k: both(grads[shards[i][k]], layout.devices[i]))
    for own, found in zip(shards, sums, strict=True):
        for shard, (mine, second) in zip(own, found, strict=True):
            first = shard // cut.parts * cut.parts
            total = tree_sum(list(grads[first : first + cut.parts]))[numbers[shard]]
            assert np.asarray(mine).tobytes() == total.tobytes()
            assert np.asarray(second).tobytes() == total[..., 1].tobytes()


PARTS = [
    (range(8), 8, [Part(0, 0, 8)]),
    (range(8), 4, [Part(0, 0, 4), Part(1, 0, 4)]),
    (range(2, 5), 8, [Part(0, 2, 2), Part(0, 4, 1)]),
    (range(3, 6), 4, [Part(0, 3, 1), Part(1, 0, 2)]),
    (range(1, 7), 8, [Part(0, 1, 1), Part(0, 2, 2), Part(0, 4, 2), Part(0, 6, 1)]),
    (range(5, 6), 2, [Part(2, 1, 1)]),
]


@pytest.mark.parametrize(("shards", "of_row", "parts"), PARTS)
def test_the_subtrees_of_a_row_that_a_device_has(shards, of_row, parts):
    assert parts_of(shards, of_row) == parts
