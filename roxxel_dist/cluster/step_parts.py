"""Parts of a training step, as `jax.named_scope`s: a kernel of the compiled program belongs to its innermost one.

A model or a loss function of your own may name its parts so too. Profiles show the same names.
"""

import re

EMBEDDING = "embedding"
ATTENTION = "attention"
MLP = "mlp"
EXPERTS = "experts"
NORMS = "norms"
"""And what is added to the residual stream."""
HEAD_AND_LOSS = "head_and_loss"
OPTIMIZER = "optimizer"
"""And the numbers of a step that are logged."""
CASTS = "casts"
"""Of parameters to the type that is computed in, and their cut into layers; with `fsdp` their gathering."""
OTHER = "other"
PARTS = (EMBEDDING, ATTENTION, MLP, EXPERTS, NORMS, HEAD_AND_LOSS, OPTIMIZER, CASTS, OTHER)
BACKWARD = " backward"


def part_of(path: str) -> str:
    """The part of an instruction by its path, such as "jit(step)/jvp(mlp)/mul"; with " backward" for what
    differentiation transposed, computed again included."""
    path = path.split(";", maxsplit=1)[0]  # XLA joins the paths of equal instructions
    found = [word for word in re.findall(r"[\w.-]+", path) if word in PARTS]
    return (found[-1] if found else OTHER) + (BACKWARD if "transpose(" in path else "")
