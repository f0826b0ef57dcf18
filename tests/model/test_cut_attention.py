"""Attention of rows that are cut over devices, against all scores at once in float64."""

import jax
import numpy as np
import pytest
from plain_numpy import attention_and_gradients

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.model.cut_attention import Cut, cut_attention

SCALE = 0.25


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
    expected, *of_inputs = attention_and_gradients(q, k, v, segments, window, SCALE, d_out)
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
