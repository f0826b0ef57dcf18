"""A decoder-only Transformer in Flax NNX."""
