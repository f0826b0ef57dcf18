"""How devices share the rows and tokens of a batch, in numbers and in words."""

from dataclasses import dataclass
from typing import Literal

from jax.sharding import NamedSharding

from roxxel_dist.cluster.mesh import AXES, TENSOR, fit_sharding, micro_batches, token_shards


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the devices share a batch, or with gradient accumulation each micro-batch."""

    rows: int
    """Of the batch, or the micro-batch."""
    row_pieces: int
    """Into how many pieces its rows are cut."""
    token_pieces: int
    """Into how many pieces the tokens of each row are cut."""
    repeated: int
    """Devices, or groups of them, that compute the same piece as another."""
    together: int = 1
    """Devices in a group: those along "tensor", which share the work on each piece."""
    shards: int = 0
    """Virtual shards, where the devices do not divide them and so have unequally many; else 0."""
    hint: str = ""
    """What would let them share it, where the mesh or the sharding is the user's own."""

    @property
    def pieces(self) -> int:
        """Pieces of the batch."""
        return self.row_pieces * self.token_pieces

    @property
    def cut(self) -> Literal["rows", "tokens", "both", "nothing"]:
        """Along which axis the batch is cut."""
        if self.row_pieces > 1:
            return "rows" if self.token_pieces == 1 else "both"
        return "nothing" if self.token_pieces == 1 else "tokens"

    @property
    def is_plain(self) -> bool:
        """Whether each device has whole rows of its own."""
        return self.cut == "rows" and not self.repeated and not self.shards

    def __str__(self) -> str:
        """Words such as "1 row, cut along the tokens over 8 devices"."""
        who = "devices" if self.together == 1 else f"groups of {self.together} devices (tensor)"
        rows = f"{self.rows:,} row{'' if self.rows == 1 else 's'}"
        if self.shards:
            least, most = self.shards // self.row_pieces, -(-self.shards // self.row_pieces)
            return f"{self.shards} virtual shards over {self.row_pieces} devices, {least} or {most} on each"
        match self.cut:
            case "rows":
                text = f"{rows} over {self.row_pieces} {who}"
            case "tokens":
                text = f"{rows}, {'' if self.rows == 1 else 'each '}cut along the tokens over {self.token_pieces} {who}"
            case "both":
                text = f"{rows} over {self.pieces} {who}, each cut along the tokens over {self.token_pieces}"
            case "nothing":
                text = f"{rows} on {'each device' if self.together == 1 else f'each of the {who}'}"
        if self.repeated:
            text += f"; {self.repeated} of {self.pieces + self.repeated} {who} repeat the work of others"
        return f"{text} ({self.hint})" if self.hint else text


def batch_layout(
    sharding: NamedSharding, rows: int, length: int, grad_accum: int, virtual_shards: int = 0
) -> BatchLayout:
    """How devices share a batch of `rows` x `length` tokens with `grad_accum` micro-batches.

    Devices that do not divide the virtual shards hold all rows, and each computes on those of its shards.

    Of a row of `length` tokens a step computes on `length` - 1, so it takes as many to be cut over all devices.
    """
    if virtual_shards % sharding.mesh.size:
        size = sharding.mesh.size
        return BatchLayout(rows=rows, row_pieces=size, token_pieces=1, repeated=0, shards=virtual_shards)
    fitted = fit_sharding(sharding, (rows, length), grad_accum)
    micro = rows // micro_batches(grad_accum, rows), length
    by_row, by_token = (whole // part for whole, part in zip(micro, fitted.shard_shape(micro), strict=True))
    if 1 < token_shards(fitted.mesh) < length:
        by_token = token_shards(fitted.mesh)
    together = sharding.mesh.shape.get(TENSOR, 1)
    repeated = sharding.mesh.size // together - by_row * by_token
    hint = ""
    if repeated and length > sharding.mesh.size // together:
        if sharding.mesh.axis_names != AXES:
            axes = ", ".join(f"{axis} {size}" for axis, size in sharding.mesh.shape.items())
            hint = f"a mesh of make_mesh would cut their tokens, and this one has the axes {axes}"
        else:
            hint = f"without data_sharding, which is {sharding.spec}, their tokens would be cut"
    return BatchLayout(
        rows=micro[0], row_pieces=by_row, token_pieces=by_token, repeated=repeated, together=together, hint=hint
    )


def cut_rows_text(virtual_shards: int, rows: int, length: int) -> str:
    """How virtual shards cut the rows of a phase, such as "each row in 8 virtual shards of 4,096 tokens"; else ""."""
    if rows >= virtual_shards:
        return ""
    each = virtual_shards // rows
    return f"each row in {each} virtual shards of {-(-(length - 1) // each):,} tokens"
