"""How the parameters of a Transformer lie on a mesh of "data" x "fsdp" x "tensor", as one table.

Along "tensor" devices share the work on the same rows (Shoeybi et al., "Megatron-LM", 2019): a matrix that leads into
heads, hidden units or the vocabulary is cut by what it gives, the one that leads back by what it takes, so that between
the two each device has its own heads or hidden units, and their results are added once. Along "fsdp" devices share
memory alone (Rajbhandari et al., "ZeRO", 2020): the other dimension is cut, and put together where it is used.
"""

import re

from roxxel_dist.cluster.mesh import FSDP, TENSOR
from roxxel_dist.cluster.parameter_sharding import Axes

WHOLE: Axes = ()
INTO: Axes = (FSDP, TENSOR)
"""[in, out]: what it gives is cut."""
BACK: Axes = (TENSOR, FSDP)
"""[in, out]: what it takes is cut."""
NARROW: Axes = (FSDP, None)
"""[in, out]: what it gives is needed whole by every device."""

TABLE: tuple[tuple[str, Axes], ...] = (
    (r"embedding\.embedding", BACK),  # [vocabulary, dim]
    (r"head\.kernel", INTO),
    (r"position\.embedding", (None, FSDP)),
    (r"attention\.(qkv|up_q|up_k|up_v|gate\.score)\.kernel", INTO),
    (r"attention\.(down_q|down_kv)\.kernel", NARROW),
    (r"attention\.out\.kernel", BACK),
    (r"feedforward\.(gate_up|up)\.kernel", INTO),
    (r"feedforward\.down\.kernel", BACK),
    (r"feedforward\.router\.kernel", NARROW),
    (r"feedforward\.(gate_up|up)", (None, *INTO)),  # [expert, in, out]
    (r"feedforward\.down", (None, *BACK)),
)
"""The end of a name, and the axis of each dimension. What is not here, norms and the like, is whole."""
ADAPTER = re.compile(r"(_adapter)?\.lora_([ab])$")
"""Of a matrix `x.kernel` adapters are `x.lora_a` and `x.lora_b`; of experts' `x`, `x_adapter.lora_a` and so on."""


def transformer_axes(name: str) -> Axes:
    """The axis that each dimension of a parameter is meant for (see `cluster.parameter_sharding.table_spec`).

    An adapter's `lora_a`, [in, rank], lies as the matrix beside it does along in, and `lora_b`, [rank, out], along out.
    """
    if adapter := ADAPTER.search(name):
        beside = name[: adapter.start()] + ("" if adapter[1] else ".kernel")
        *_, into, out = transformer_axes(beside) or (None, None)
        return (into, None) if adapter[2] == "a" else (None, out)
    return next((axes for end, axes in TABLE if re.search(rf"(^|\.){end}$", name)), WHOLE)
