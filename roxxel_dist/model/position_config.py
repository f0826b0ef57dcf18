"""How a token knows its place."""

from dataclasses import dataclass
from typing import Literal, get_args

from roxxel_dist.model.rules import check_built, check_choice

PosEncoding = Literal["rotary", "absolute", "learned", "none"]


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Where the model gets positions from."""

    pos_encoding: PosEncoding = "rotary"
    """How a token knows its place: rotary turns queries and keys, absolute adds sinusoids to the embedding, learned
    adds a trained vector a place, none leaves it to the causal mask."""
    rope_scale_factor: float = 1.0
    """Of rotary: positions are divided by this, which stretches what a shorter context taught over a longer one."""

    def __post_init__(self) -> None:
        check_choice("pos_encoding", self.pos_encoding, get_args(PosEncoding))
        check_built("pos_encoding", self.pos_encoding, "rotary")
        check_built("rope_scale_factor", self.rope_scale_factor, 1.0)
