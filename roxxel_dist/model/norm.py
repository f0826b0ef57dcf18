"""What brings the residual stream to one scale before each part reads it."""

from flax import nnx

from roxxel_dist.model.config import ModelConfig

Norm = nnx.RMSNorm | nnx.LayerNorm


def make_norm(config: ModelConfig, size: int, rngs: nnx.Rngs) -> Norm:
    """A layer over the last axis, of `size` numbers, computed in float32.

    rmsnorm: x / sqrt(mean(x^2) + 1e-6) * scale (Zhang and Sennrich, 2019).
    layernorm: (x - mean(x)) / sqrt(var(x) + 1e-6) * scale + bias (Ba et al., 2016).
    """
    return nnx.RMSNorm(size, rngs=rngs) if config.norm_type == "rmsnorm" else nnx.LayerNorm(size, rngs=rngs)
