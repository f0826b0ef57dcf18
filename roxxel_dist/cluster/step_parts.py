"""Parts of a training step, as `jax.named_scope`s: a kernel of the compiled program belongs to its innermost one.

A model or a loss function of your own may name its parts so too. Profiles show the same names.
"""

import re
from collections.abc import Sequence

EMBEDDING = "embedding"
ATTENTION = "attention"
MLP = "mlp"
EXPERTS = "experts"
NORMS = "norms"
"""Norms, and what is added to the residual stream."""
HEAD_AND_LOSS = "head_and_loss"
OPTIMIZER = "optimizer"
"""The optimizer, and the numbers of a step that are logged."""
CASTS = "casts"
"""Casts of parameters to the type that is computed in, and their cut into layers; with `fsdp` their gathering."""
OTHER = "other"
PARTS = (EMBEDDING, ATTENTION, MLP, EXPERTS, NORMS, HEAD_AND_LOSS, OPTIMIZER, CASTS, OTHER)
BACKWARD = " backward"


def part_of(paths: Sequence[str]) -> str:
    """The part of a kernel by the paths of its instructions, such as "jit(step)/jvp(mlp)/mul": of the first that names
    one; with " backward" for what differentiation transposed, what is computed again for it included."""
    # XLA joins the paths of equal instructions.
    named = [(path, words) for path in paths if (words := _parts_in(path.split(";", maxsplit=1)[0]))]
    path, words = named[0] if named else (next(iter(paths), ""), [OTHER])
    return words[-1] + (BACKWARD if "transpose(" in path else "")


def _parts_in(path: str) -> list[str]:
    # A word in quotes is a key of the arguments.
    return [word for word in re.findall(r"(?<![\w.'-])[\w.-]+", path) if word in PARTS]
