"""A trained model from its run directory."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from roxxel_dist.assemble import model_builder
from roxxel_dist.cluster.process import enable_compilation_cache, initialize
from roxxel_dist.config import Config
from roxxel_dist.data.tokenizer import Tokenizer
from roxxel_dist.model.generate import generate
from roxxel_dist.run_directory import CHECKPOINTS, CONFIG, TOKENIZER
from roxxel_dist.train.base import below
from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.state import take_apart


def load_run(run_dir: str | Path, step: int | None = None) -> tuple[Any, Tokenizer, Any, int]:
    """(model with dropout off, tokenizer, Config, step) of a run, from its newest checkpoint or the one of `step`.

    Raises:
        ValueError: the folder holds no run, no checkpoint, or not that step.
    """
    run = Path(run_dir)
    if not (run / CONFIG).exists():
        raise ValueError(f"{run} is not a run directory: it has no config.yaml")
    if not (run / TOKENIZER).exists():
        raise ValueError(
            f"{run} has no tokenizer.json: it was trained on tokens alone, so there is no text to generate"
        )
    config = Config.from_yaml(run / CONFIG)
    checkpointer = CheckpointStore(run / CHECKPOINTS, read_only=True)
    try:
        newest = checkpointer.latest_step()
        if newest is None:
            raise ValueError(f"{run} has no complete checkpoint: train it until its first one is saved")
        model = nnx.jit(model_builder(config))()
        parts, params, rest, settings = take_apart(model)
        restored = checkpointer.restore_params(newest if step is None else step, params)
        base = below(checkpointer.meta(newest if step is None else step), config.init_from)
        if base is not None and parts.frozen.names:
            settings |= base({name: settings[name] for name in parts.frozen.names})
    finally:
        checkpointer.close()
    return (
        parts.merge(restored, rest, settings, training=False),
        Tokenizer.load(run / TOKENIZER),
        config,
        step or newest,
    )


def write_text(
    run_dir: str | Path, *, prompt: str, max_new_tokens: int, temperature: float, seed: int, step: int | None = None
) -> str:
    """What a run's model adds to `prompt` (see `model.generate`).

    Raises:
        ValueError: no such run or checkpoint, a model of one's own that is called in another way, or a prompt with
            characters that a char tokenizer does not have.
    """
    initialize()
    enable_compilation_cache()
    model, tokenizer, config, _ = load_run(run_dir, step)
    check_continues(model, config)
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.eos_id]
    new = generate(
        model, ids, min(max_new_tokens, config.max_context - 1), max_context=config.max_context,
        temperature=temperature, seed=seed, eos_id=tokenizer.eos_id,
    )  # fmt: skip
    return tokenizer.decode(new)


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
