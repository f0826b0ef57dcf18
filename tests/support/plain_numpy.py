"""Attention written out in plain numpy, float64, a row and a head at a time."""

import numpy as np


def float64(array):
    return np.asarray(array, np.float64)


def turn(x, positions, scale=1.0):
    """Rotary positions of x [L, K]."""
    half = x.shape[1] // 2
    out = np.zeros_like(x)
    for row, position in enumerate(positions):
        for i in range(half):
            angle = position / scale * 10_000.0 ** (-i / half)
            a, b = x[row, i], x[row, i + half]
            out[row, i], out[row, i + half] = (
                a * np.cos(angle) - b * np.sin(angle),
                b * np.cos(angle) + a * np.sin(angle),
            )
    return out


def visible(segments, window=None):
    """bool [L, L]: which j each i may see."""
    length = len(segments)
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            near = window is None or i - j < window
            seen[i, j] = j <= i and near and segments[i] == segments[j]
    return seen


def mix(q, k, v, seen):
    """One head: [L, K] queries and keys, [L, V] values."""
    scores = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * scale
