"""Attention of rows that are cut over devices, against all scores at once in float64."""

import jax
import numpy as np
import pytest

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.model.cut_attention import Cut, cut_attention

SCALE = 0.25


def dense(q, k, v, segments, window, d_out):
    """(the sum of output x d_out, gradients of q, k, v), in float64."""
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    shared, length = q.shape[2] // k.shape[2], q.shape[1]
    keys, values = np.repeat(k, shared, 2), np.repeat(v, shared, 2)
    back = np.arange(length)[:, None] - np.arange(length)
    seen = np.broadcast_to((back >= 0) & (back < (window or length)), (len(q), 1, length, length))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = np.where(seen, np.einsum("blhk,bshk->bhls", q, keys) * SCALE, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    total = (np.einsum("bhls,bshk->blhk", weights, values) * d_out).sum()
    d_weights = np.einsum("blhk,bshk->bhls", d_out, values)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * SCALE
    d_keys, d_values = np.einsum("bhls,blhk->bshk", d_scores, q), np.einsum("bhls,blhk->bshk", weights, d_out)
    of_groups = (x.reshape(*k.shape[:3], shared, -1).sum(3) for x in (d_keys, d_values))
    return total, np.einsum("bhls,bshk->blhk", d_scores, keys), *of_groups


@pytest.mark.parametrize(
    ("devices", "rows", "length", "heads", "groups", "window", "packed"),
    [
        (8, 1, 256, 2, 1, None, False),
        (8, 1, 257, 2, 2, None, True),  # a remainder
        (6, 2, 100, 2, 1, None, True),  # 2 rows x 3 devices
        (8, 6, 64, 2, 2, 9, True),  # 2 groups of 3 rows
        (8, 1, 300, 4, 2, 40, False),  # the neighbours of a window
        (4, 1, 300, 2, 1, 250, False),  # a window that is nearly the row
        (5, 1, 9, 1, 1, None, False),  # fewer than two tokens a device
    ],
)
def test_the_same_as_all_scores_at_once(devices, rows, length, heads, groups, window, packed):
    rng = np.random.default_rng(length)
    shapes = (heads, 16), (groups, 16), (groups, 8), (heads, 8)
    q, k, v, d_out = (rng.normal(size=(rows, length, *shape)).astype(np.float32) for shape in shapes)
    segments = np.sort(rng.integers(0, 4, (rows, length)), 1).astype(np.int32) if packed else None

    def total(q, k, v):
        return (cut_attention(q, k, v, segments, window, SCALE) * d_out).sum()

    with jax.set_mesh(phase_mesh(make_mesh(devices), rows)):
        found, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)
    expected, *of_inputs = dense(q, k, v, segments, window, d_out)
    assert float(found) == pytest.approx(expected, rel=1e-5, abs=1e-4)
    for mine, whole in zip(gradients, of_inputs, strict=True):
        np.testing.assert_allclose(mine, whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize("devices", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("length", [1000, 4096, 33_000])
def test_every_device_has_as_many_keys_to_look_at(devices, length):
    """Of 2 t segments, i and 2 t - 1 - i: the blocks of keys that a device computes on are the same number for all."""
    cut = Cut.of(devices, length, None)
    half = cut.blocks // 2
    pairs = [(i, 2 * devices - 1 - i) for i in range(devices)]
    seen = {sum(segment * half + n + 1 for segment in pair for n in range(half)) for pair in pairs}
    assert len(seen) == 1
    assert length <= cut.tokens < length + 2 * devices * half, "less than a token of padding for each block"
