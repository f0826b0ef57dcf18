"""How a token knows its place."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from roxxel_dist.model.rules import check_choice, check_sizes

PosEncoding = Literal["rotary", "absolute", "learned", "none"]


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Where the model gets positions from."""

    pos_encoding: PosEncoding = "rotary"
    """How a token knows its place: rotary turns queries and keys, absolute adds sinusoids to the embedding, learned
    adds a trained vector a place, none leaves it to the causal mask."""
    rope_scale_factor: float = 1.0
    """Of rotary: positions are divided by this, which stretches what was learned in a short context over a longer
    one."""
    rope_theta: float = 10_000.0
    """Of rotary: the longest wave that turns queries and keys takes about this times 2 pi tokens; larger for a longer
    context."""
    rope_trained_context: int | None = None
    """Of rotary: the context that was learned before rope_scale_factor came; only waves that were not seen whole in it
    are stretched, as in LLaMA 3.1. All of them where not given."""

    def __post_init__(self) -> None:
        check_choice("pos_encoding", self.pos_encoding, get_args(PosEncoding))
        if self.pos_encoding != "rotary":
            return
        if not 0 < self.rope_scale_factor < math.inf:
            raise ValueError(f"rope_scale_factor is {self.rope_scale_factor}: it must be above 0; 1 changes nothing")
        if not 1 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta is {self.rope_theta}: it must be above 1; 10000 is usual")
        check_sizes({"rope_trained_context": self.rope_trained_context})
