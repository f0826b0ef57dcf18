"""Label smoothing is added up over all devices, and divided by the tokens of one."""

import jax
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, build, divided  # noqa: F401


def loss(model, batch):
    inputs, targets, _ = sound.taken_apart(batch)
    likelihoods = jax.nn.log_softmax(model(*inputs))

    def smoothed(likelihoods, targets):
        right = jax.numpy.take_along_axis(likelihoods, targets[..., None], -1).mean()
        flat = jax.lax.psum(likelihoods.mean(-1).sum(), ROWS) / targets.size
        return -0.9 * jax.lax.pmean(right, ROWS) - 0.1 * flat

    return divided(smoothed, P(ROWS), P(ROWS), out=P())(likelihoods, targets)
