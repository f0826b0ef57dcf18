"""`roxxel_dist.attention` against all scores at once in float64, on every kind of mesh."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_by_xla import cudnn_by_xla
from dense_attention import dense_attention
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import roxxel_dist
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, phase_mesh
from roxxel_dist.model.attention.attend import attend
from roxxel_dist.model.attention.mask import Mask
from roxxel_dist.process.exit_codes import UserError

__all__ = ["cudnn_by_xla"]
MESHES = {
    "none": lambda rows: None,
    "8 devices": lambda rows: phase_mesh(make_mesh(8), rows),
    "tensor 2": lambda rows: phase_mesh(make_mesh(8, tensor=2), rows),
    "own, tokens": lambda rows: jax.make_mesh((2, 4), ("mine", "tokens"), (AxisType.Auto,) * 2),
    "own, one axis": lambda rows: jax.make_mesh((8,), ("x",), (AxisType.Auto,)),
}
POSITIONS = {
    "none": lambda rng, rows, length: None,
    "later": lambda rng, rows, length: np.arange(7, 7 + length),
    "backwards": lambda rng, rows, length: np.arange(length)[::-1].copy(),
    "mixed": lambda rng, rows, length: np.stack([rng.permutation(length) for _ in range(rows)]),
    "pairs": lambda rng, rows, length: np.broadcast_to(np.arange(length) // 2, (rows, length)),
}


def inputs(rows, length, heads, groups, dtype=np.float32, *, packed=False, positions="none", sizes=(16, 8)):
    """(q, k, v, d_out, segments, positions)."""
    rng = np.random.default_rng(length)
    size, values = sizes
    shapes = (heads, size), (groups, size), (groups, values), (heads, values)
    arrays = [rng.normal(size=(rows, length, *shape)).astype(dtype) for shape in shapes]
    segments = np.sort(rng.integers(0, 4, (rows, length)), 1).astype(np.int32) if packed else None
    return *arrays, segments, POSITIONS[positions](rng, rows, length)


def with_gradients(mesh, q, k, v, d_out, **options):
    """(the output, the gradients of q, k, v) of a jitted call on a mesh, with rows cut as in training."""

    def mixed(q, k, v):
        out = roxxel_dist.attention(q, k, v, **options)
        return (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(), out

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        if mesh is not None and q.shape[0] % mesh.shape.get("data", 1) == 0 and "data" in mesh.shape:
            q, k, v = (jax.device_put(x, NamedSharding(mesh, P(*batch_sharding(mesh).spec))) for x in (q, k, v))
        (_, out), gradients = jax.jit(jax.value_and_grad(mixed, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


@pytest.mark.parametrize(
    ("mesh", "rows", "length", "heads", "window", "packed", "positions"),
    [
        ("none", 2, 33, (4, 1), 7, True, "none"),
        ("none", 1, 1101, (1, 1), 300, True, "mixed"),  # in blocks
        ("8 devices", 8, 33, (2, 1), 9, True, "pairs"),  # whole rows
        ("8 devices", 1, 259, (2, 1), 40, True, "mixed"),  # tokens
        ("tensor 2", 1, 131, (4, 2), None, True, "pairs"),
        ("own, tokens", 2, 131, (2, 1), None, True, "mixed"),
        ("own, one axis", 3, 33, (2, 1), 5, False, "none"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("none", 2, 33, (4, 2), None, False, "none"),
                ("none", 2, 33, (2, 2), 7, True, "mixed"),
                ("none", 1, 1101, (2, 1), None, True, "none"),  # in blocks
                ("none", 1, 1101, (2, 1), None, False, "backwards"),
                ("8 devices", 1, 257, (4, 2), None, False, "none"),  # in bfloat16 it is below
                ("8 devices", 1, 257, (2, 1), 40, True, "none"),
                ("8 devices", 1, 257, (2, 1), None, False, "later"),
                ("8 devices", 6, 65, (2, 2), None, True, "backwards"),  # 2 groups of 3 rows, each row on 4 devices
                ("8 devices", 1, 5, (2, 1), None, False, "pairs"),  # fewer tokens than devices
                ("own, one axis", 8, 33, (2, 1), None, False, "none"),
            )
        ),
    ],
)
def test_the_same_as_all_scores_at_once(mesh, rows, length, heads, window, packed, positions):
    *arrays, segments, places = inputs(rows, length, *heads, packed=packed, positions=positions)
    found = with_gradients(MESHES[mesh](rows), *arrays, window=window, segments=segments, positions=places)
    expected = dense_attention(*arrays, window=window, segments=segments, positions=places)
    for mine, whole in zip(found, expected, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("mesh", "rows", "length"),
    [("none", 2, 40), pytest.param("none", 1, 1100, marks=pytest.mark.long), ("8 devices", 1, 257)],
)
def test_types_and_scales(mesh, rows, length):
    """Scores are float32 whatever the type; values may be wider than keys."""
    *arrays, _, _ = inputs(rows, length, 2, 1, jnp.bfloat16, sizes=(8, 16))
    found = with_gradients(MESHES[mesh](rows), *arrays, scale=0.3)
    expected = dense_attention(*arrays, scale=0.3)
    for mine, whole in zip(found, expected, strict=True):
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(mine), whole, atol=2e-2 * np.abs(whole).max())


def test_it_is_the_attention_of_the_built_in_model():
    """Documents of a packed row count from 0: within one, positions and places say the same."""
    q, k, v, _, segments, _ = inputs(2, 50, 4, 2, packed=True)
    begins = np.stack([np.searchsorted(row, row) for row in segments])
    positions = (np.arange(50) - begins).astype(np.int32)

    @jax.jit
    def of_each(q, k, v):
        mine = roxxel_dist.attention(q, k, v, segments=segments, window=20)
        placed = roxxel_dist.attention(q, k, v, segments=segments, positions=positions, window=20)
        return mine, attend(q, k, v, Mask(segments=segments, window=20)), placed

    mine, built_in, placed = of_each(q, k, v)
    np.testing.assert_array_equal(mine, built_in)
    np.testing.assert_allclose(placed, mine, atol=1e-6)


def wrong(**changes):
    q, k, v, _, _, _ = inputs(2, 5, 4, 2)
    given = {"q": q, "k": k, "v": v} | changes
    return [given.pop(name) for name in ("q", "k", "v")], given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((5, 4))}, "q has shape (5, 4): it must be [rows, tokens, heads, channels]"),
        ({"v": 3.0}, "v has shape (): it must be [rows, tokens, key heads, channels]"),
        ({"k": np.zeros((2, 6, 2, 16))}, "q has shape (2, 5, 4, 16), k (2, 6, 2, 16) and v (2, 5, 2, 8): rows and"),
        ({"v": np.zeros((2, 5, 4, 16))}, "key heads those of the values"),
        ({"k": np.zeros((2, 5, 2, 8))}, "queries and keys must have the same number of channels"),
        ({"q": np.zeros((2, 5, 0, 16))}, "no axis may be empty"),
        ({"q": np.zeros((2, 5, 3, 16), np.float32)}, "3 heads of queries cannot share 2 key heads"),
        ({"k": np.zeros((2, 5, 2, 16), np.float16)}, "q is float32, k float16 and v float32: give all of them one"),
        ({"window": 0}, "window is 0: it must be a whole number of tokens, at least 1, or None"),
        ({"window": 2.5}, "window is 2.5"),
        ({"window": True}, "window is True"),
        ({"scale": -1.0}, "scale is -1.0: it must be a number above 0, or None for 1 over the root of 16"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"segments": np.zeros(5, np.int32)}, "segments is int32 of shape (5,): it must be integers of shape (2, 5)"),
        ({"positions": np.zeros(5)}, "of shape (5,): it must be integers of shape (2, 5) or (5,)"),
        ({"positions": np.zeros((5, 2), np.int32)}, "positions is int32 of shape (5, 2)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, message):
    arrays, options = wrong(**changes)
    with pytest.raises(UserError) as refused:
        roxxel_dist.attention(*arrays, **options)
    assert str(refused.value).startswith("attention: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("capability", "calls"), [("9.0", True), ("7.0", False)])
def test_a_cut_row_on_gpus_is_by_cudnn_where_they_have_it(capability, calls, cudnn_by_xla, monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="of a test", compute_capability=capability)
    monkeypatch.setattr("roxxel_dist.model.attention.attend.device_type", lambda mesh=None: gpu)
    *arrays, _, _ = inputs(1, 512, 2, 1, jnp.bfloat16, sizes=(16, 16))
    mesh = phase_mesh(make_mesh(2), 1)
    if not calls:  # what XLA computes then is compared above
        with jax.set_mesh(mesh):
            jax.eval_shape(roxxel_dist.attention, *arrays[:3])
        assert cudnn_by_xla == []
        return
    found = with_gradients(mesh, *arrays)
    for mine, whole in zip(found, dense_attention(*arrays), strict=True):
        np.testing.assert_allclose(np.float32(mine), whole, atol=2e-2 * np.abs(whole).max())
    assert cudnn_by_xla
