"""A trained model from its folder, ready to be called."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from roxxel_dist.assemble import model_builder
from roxxel_dist.data.tokenizer import Tokenizer
from roxxel_dist.train import checkpoint_files as files
from roxxel_dist.train.state import take_apart
from roxxel_dist.weights import Weights, weights_of


def load_run(run_dir: str | Path, step: int | None = None, *, best: bool = False) -> tuple[Any, Tokenizer, Any, int]:
    """(model with dropout off, tokenizer, Config, step) of a run, from its newest checkpoint or the one of `step`.

    Args:
        run_dir: a run directory, RUN@STEP, or what `weights.weights_of` reads besides.
        step: the checkpoint of this step.
        best: the one with the lowest val_loss; the newest where none was validated.

    Raises:
        ValueError: the folder holds no run, no checkpoint, or not that step.
    """
    weights = weights_of(run_dir, step=step, best=best)
    if weights.tokenizer is None:
        raise ValueError(
            f"{run_dir} has no tokenizer.json: it was trained on tokens alone, so there is no text to generate"
        )
    return model_of(weights, run_dir), Tokenizer.load(weights.tokenizer), weights.config, weights.step


def load_transformer(path: str | Path, *, best: bool = True) -> Any:
    """What `Transformer.from_pretrained` gives."""
    weights = weights_of(path, best=best)
    if weights.config.model is not None:
        raise ValueError(
            f"{path} has model {weights.config.model!r}, which is no Transformer: load it with "
            f"roxxel_dist.load.load_run, from the folder that has that module"
        )
    return model_of(weights, path)


def model_of(weights: Weights, path: str | Path) -> Any:
    """The module of some weights, with dropout off.

    Args:
        weights: from `weights_of`.
        path: where they are from, for messages.

    Raises:
        ValueError: they are of another model than the config says.
    """
    build = model_builder(weights.config)
    parts, like, _, inputs = take_apart(nnx.eval_shape(build))
    # What adapters of the user's own model stand on is not in a run: the model makes it.
    frozen = [name for name in parts.frozen.names if weights.config.model is None or name in weights.params]
    like |= {name: inputs[name] for name in frozen}
    if wrong := files.difference(files.shapes(weights.params), files.shapes(like), whole=False):
        raise ValueError(f"the weights in {path} are of another model than its config ({wrong}): put the right back")

    def others() -> Any:
        """Only what is asked for is computed: none of the weights that the model would begin with."""
        _, _, rest, inputs = take_apart(build())
        return rest, {name: one for name, one in inputs.items() if name not in frozen}

    rest, inputs = jax.jit(others)()
    params = {name: jnp.asarray(weights.params[name]) for name in parts.params.names}
    inputs |= {name: jnp.asarray(weights.params[name]) for name in frozen}
    return parts.merge(params, rest, inputs, training=False)


def check_continues(model: Any, config: Any) -> None:
    """Raises ValueError where a model of the user's own cannot continue a text: tokens in, logits out, as built in."""
    if config.model is None:
        return
    graphdef, state = nnx.split(model)
    wanted = f"to generate, a model takes int32[1, L] tokens alone and returns [1, L, {config.vocab_size}] logits"
    try:
        found = jax.eval_shape(
            lambda state, tokens: nnx.merge(graphdef, state)(tokens), state, np.zeros((1, config.max_context), np.int32)
        )
    except Exception as error:
        raise ValueError(f"model is {config.model!r}: {wanted}, and this one says {error!r}") from error
    shape = getattr(found, "shape", type(found).__name__)
    if shape != (1, config.max_context, config.vocab_size):
        raise ValueError(f"model is {config.model!r}: {wanted}, and for L = {config.max_context} it returns {shape}")
