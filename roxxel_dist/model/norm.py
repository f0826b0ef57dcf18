"""What brings the residual stream to one scale before each part reads it."""

from flax import nnx

from roxxel_dist.model.config import ModelConfig

Norm = nnx.RMSNorm | nnx.LayerNorm


def make_norm(config: ModelConfig, size: int, rngs: nnx.Rngs) -> Norm:
    """A layer over the last axis, of `size` numbers, computed in float32.

    rmsnorm: x / sqrt(mean(x^2) + norm_eps) * scale (Zhang and Sennrich, 2019).
    layernorm: (x - mean(x)) / sqrt(var(x) + norm_eps) * scale + bias (Ba et al., 2016).
    """
    kind = nnx.RMSNorm if config.norm_type == "rmsnorm" else nnx.LayerNorm
    return kind(size, epsilon=config.norm_eps, rngs=rngs)
