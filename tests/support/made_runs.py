"""Run directories that no training has made: a config, a tokenizer and random weights, in seconds."""

import jax
import numpy as np
from flax import nnx

from roxxel_dist import Config, Transformer
from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.split import split_module
from roxxel_dist.weights.files import NEWEST, write_weights

TEXT = "def f(x):\n    return x + 1  # żółć, 漢字, 🙂\n"
SHAPE = {"dim": 32, "num_blocks": 2, "head_size": 8, "kv_heads": 2, "max_context": 64}


def make_run(folder, **fields):
    """A run directory without checkpoints, of a model with larger weights than at its beginning."""
    folder.mkdir()
    config = Config(**{**SHAPE, "tokenizer_type": "byte", **fields})
    tokenizer = train_tokenizer(config.tokenizer_type, [TEXT * 20], 300)
    config.vocab_size = tokenizer.vocab_size
    model = Transformer(config.part(ModelConfig), nnx.Rngs(0))
    params = {
        name: np.asarray(leaf) * (1 if name.endswith("scale") else 5) for name, leaf in split_module(model)[1].items()
    }
    key = jax.random.key(1)
    for name in [name for name in params if name.endswith("scale")]:
        params[name] = np.asarray(1 + 0.3 * jax.random.normal(key, params[name].shape))
    for name in [name for name in params if name.endswith("bias")]:
        params[name] = np.asarray(jax.random.normal(key, params[name].shape))
    write_weights(folder / NEWEST, 7, params)
    config.save_yaml(folder / "config.yaml")
    tokenizer.save(folder / "tokenizer.json")
    return folder
