"""What cuDNN computes, by XLA: no machine of the tests has the hardware."""

import jax
import jax.numpy as jnp
import pytest

from roxxel_dist.cluster import jax_private


def _scores(q, k, bias, scale, causal, window):
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = jnp.einsum("blhk,bshk->bhls", q, keys, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        assert q.shape[1] % 128 == k.shape[1] % 128 == 0, "NaN in its backward pass on Hopper"
        scores += bias
    back = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    if window is not None:
        assert causal, "a window needs causality"
        scores = jnp.where(back < window, scores, -jnp.inf)
    return jnp.where(back >= 0, scores, -jnp.inf) if causal else scores


def forward(q, k, v, bias, *, scale, causal, window):
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[1] % 2 == 0, "cuDNN's backward pass takes even lengths"
    scores = _scores(q, k, bias, scale, causal, window)
    log_sums = jax.nn.logsumexp(scores, -1)
    values = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    out = jnp.einsum("bhls,bshv->blhv", jnp.exp(scores - log_sums[..., None]), values)
    return out.astype(q.dtype), log_sums


def gradients(q, k, v, bias, out, log_sums, d_out, *, scale, causal, window):
    shared = q.shape[2] // k.shape[2]
    keys, values = jnp.repeat(k, shared, 2), jnp.repeat(v, shared, 2)
    weights = jnp.exp(_scores(q, k, bias, scale, causal, window) - log_sums[..., None])
    whole = (d_out * out).sum(-1).swapaxes(1, 2)[..., None]
    d_scores = weights * (jnp.einsum("blhv,bshv->bhls", d_out, values) - whole) * scale

    def of_groups(x):
        return x.reshape(*k.shape[:3], shared, -1).sum(3)

    d_k, d_v = jnp.einsum("bhls,blhk->bshk", d_scores, q), jnp.einsum("bhls,blhv->bshv", weights, d_out)
    found = jnp.einsum("bhls,bshk->blhk", d_scores, keys), of_groups(d_k), of_groups(d_v)
    return tuple(x.astype(q.dtype) for x in found)


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    """A list of the calls of its forward pass: (queries, keys, whether causal, whether with a bias)."""
    calls = []

    def recorded(q, k, v, bias, **options):
        calls.append((q.shape[1], k.shape[1], options["causal"], bias is not None))
        return forward(q, k, v, bias, **options)

    monkeypatch.setattr(jax_private, "cudnn_attention", recorded)
    monkeypatch.setattr(jax_private, "cudnn_attention_gradients", gradients)
    return calls
