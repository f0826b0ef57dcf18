"""Run directories that no training has made: a config, a tokenizer and random weights, in seconds."""

import numpy as np
from flax import nnx
from models import with_numbers

from roxxel_dist import Config, Transformer
from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.split import split_module
from roxxel_dist.weights.files import NEWEST, write_weights

TEXT = "def f(x):\n    return x + 1  # żółć, 漢字, 🙂\n"
SHAPE = {"dim": 32, "num_blocks": 2, "head_size": 8, "kv_heads": 2, "max_context": 64}


def larger(name, leaf):
    """How much, that texts differ: biases are about 1, as those of norms are."""
    return 1 if name.endswith("scale") else max(leaf.shape) ** 0.5 if name.endswith("bias") else 2


def make_run(folder, **fields):
    """A run directory without checkpoints, of a model with larger weights than at its beginning."""
    folder.mkdir()
    config = Config(**{**SHAPE, "tokenizer_type": "byte", **fields})
    tokenizer = train_tokenizer(config.tokenizer_type, [TEXT * 20], 300)
    config.vocab_size = tokenizer.vocab_size
    shape = config.part(ModelConfig)
    scalars = {"alpha_balance": shape.alpha_balance, "rate": shape.dropout_rate}
    model = with_numbers(lambda: Transformer(shape, nnx.Rngs(0)), **scalars)
    params = {name: np.asarray(leaf) * larger(name, leaf) for name, leaf in split_module(model)[1].items()}
    write_weights(folder / NEWEST, 7, params)
    config.save_yaml(folder / "config.yaml")
    tokenizer.save(folder / "tokenizer.json")
    return folder
