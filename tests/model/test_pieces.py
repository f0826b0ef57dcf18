"""Attention of rows that are cut into pieces: the numbers of all scores at once, and the same bits on any devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from plain_numpy import attention_and_gradients

from roxxel_dist.model.pieces import PIECES, PieceLayout, piece_attention, sum_over_pieces, tree_sum

SCALE = 0.25


def on_devices(devices, shards, arrays, segments, window):
    """(the output, the gradients of queries, keys and values) of whole rows, from pieces on so many devices."""
    *inputs, d_out = arrays
    rows, length = d_out.shape[:2]
    layout = PieceLayout.of(rows, devices, shards, length, window)
    grid = np.array(jax.devices()[:devices]).reshape(min(rows, devices), -1)
    mesh = Mesh(grid, ("rows", PIECES), axis_types=(AxisType.Auto,) * 2)
    short = layout.of_row * layout.tokens - length

    def cut(x):
        x = np.pad(x, [(0, 0), (0, short), (0, 0), (0, 0)]).reshape(rows, layout.of_row, layout.tokens, *x.shape[2:])
        return x[:, layout.order]

    def whole(x):
        return np.asarray(x)[:, np.argsort(layout.order)].reshape(rows, -1, *x.shape[3:])[:, :length]

    def local(q, k, v, d_out, segments):
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, d_out)]
        out, back = jax.vjp(lambda *x: piece_attention(*x, segments, layout, window, SCALE), *flat[:3])
        return [x.reshape(layout.rows, layout.each, *x.shape[1:]) for x in (out, *back(flat[3]))]

    spec = P("rows", PIECES)
    with jax.set_mesh(mesh):
        run = jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4 + (P("rows"),), out_specs=spec, check_vma=False)
        )
        return [whole(x) for x in run(*map(cut, (*inputs, d_out)), segments)]


@pytest.mark.parametrize(
    ("shards", "rows", "length", "heads", "groups", "window", "packed"),
    [
        pytest.param(8, 1, 128, 2, 1, None, False, marks=pytest.mark.long),
        (8, 1, 131, 4, 2, None, True),  # pieces of unequal documents, the last one padded
        pytest.param(8, 2, 60, 2, 2, 20, True, marks=pytest.mark.long),
        pytest.param(8, 4, 40, 2, 1, None, False, marks=pytest.mark.long),
        pytest.param(4, 1, 1300, 2, 1, 200, False, marks=pytest.mark.long),  # several blocks a piece
    ],
)
def test_the_same_as_all_scores_at_once_and_the_same_bits_on_any_devices(
    shards, rows, length, heads, groups, window, packed
):
    rng = np.random.default_rng(length)
    shapes = (heads, 16), (groups, 16), (groups, 8), (heads, 8)
    arrays = [rng.normal(size=(rows, length, *shape)).astype(np.float32) for shape in shapes]
    segments = np.sort(rng.integers(0, 4, (rows, length)), 1).astype(np.int32) if packed else None
    found = {count: on_devices(count, shards, arrays, segments, window) for count in (1, 2, 4, 8) if count <= shards}
    for count, results in found.items():
        same = [np.array_equal(mine, alone) for mine, alone in zip(results, found[1], strict=True)]
        assert all(same), (count, same)
    total, *of_inputs = attention_and_gradients(*arrays[:3], segments, window, SCALE, arrays[3])
    out, *gradients = found[1]
    assert (out.astype(np.float64) * arrays[3]).sum() == pytest.approx(total, rel=1e-5, abs=1e-4)
    for mine, expected in zip(gradients, of_inputs, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5 * np.abs(expected).max())


def test_sums_are_those_of_a_tree():
    values = np.float32([1e8, 1, -1e8, 1, 3, 1e-3, 2.5, 1e6])
    total, squares = sum_over_pieces(lambda x: (x, x * x), values)
    a, b = (values[0] + values[1]) + (values[2] + values[3]), (values[4] + values[5]) + (values[6] + values[7])
    assert float(total) == float(tree_sum(values)) == float(a + b)
    np.testing.assert_array_equal(squares, values * values)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_device_has_as_many_keys_to_look_at(devices):
    layout = PieceLayout.of(1, devices, 8, 4096, None)
    seen = {sum(part + 1) for part in np.split(layout.order, devices)}
    assert len(seen) == 1
    assert sorted(layout.order) == list(range(16))
