"""Where the time of a step would go: each kernel of the compiled program at the limit of its device, summed by part."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roxxel_dist.cluster.step_parts import (
    ATTENTION,
    BACKWARD,
    CASTS,
    EMBEDDING,
    EXPERTS,
    HEAD_AND_LOSS,
    MLP,
    OPTIMIZER,
    part_of,
)
from roxxel_dist.devices.accelerators import Accelerator, accelerator
from roxxel_dist.devices.program_cost import Kernel, ProgramCost

COMPUTE, MEMORY, LINKS = "compute", "memory", "links"


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """The kernels of a part of a step, on one device."""

    part: str
    """"embedding", "attention", "mlp", "experts", "norms", "head_and_loss", "optimizer", "casts" or "other"; with
    " backward" for its gradient, and what is computed again for it."""
    milliseconds: float
    """The sum over its kernels of the longer of computing and memory, and of links, by the figures of data sheets."""
    limit: str
    """"compute", "memory" or "links": what takes the most of these milliseconds."""
    flops: float
    """Of matrix products, convolutions and attention."""
    bytes: float
    """Read from and written to the device's memory."""
    sent_bytes: float
    """To other devices."""
    launches: float
    """Of kernels; not whole where the data decides how often a loop runs."""


def costs_of(cost: ProgramCost, device_kind: str) -> tuple[PartCost, ...]:
    """The parts of a program, the longest first; empty for an unknown device."""
    device = accelerator(device_kind)
    if device is None:
        return ()
    parts: dict[str, list[Kernel]] = {}
    for kernel in cost.kernels:
        parts.setdefault(part_of(kernel.paths), []).append(kernel)
    costs = (_cost(part, kernels, device) for part, kernels in parts.items())
    return tuple(sorted(costs, key=lambda cost: -cost.milliseconds))


def bounds(cost: ProgramCost, device_kind: str) -> dict[str, float]:
    """Seconds by "compute", "memory" and "links" that a program takes at least; empty for an unknown device."""
    if (device := accelerator(device_kind)) is None:
        return {}
    sent = sum(cost.collectives.values())
    seconds = device.seconds(cost.flops, cost.bytes_accessed, sent, cost.network_bytes)
    return dict(zip((COMPUTE, MEMORY, LINKS), seconds, strict=True))


def roofline_seconds(costs: Iterable[PartCost]) -> float:
    """Seconds of all parts together."""
    return sum(cost.milliseconds for cost in costs) / 1000


def _cost(part: str, kernels: list[Kernel], device: Accelerator) -> PartCost:
    spent, total = dict.fromkeys((COMPUTE, MEMORY, LINKS), 0.0), 0.0
    for kernel in kernels:
        compute, memory, links = device.seconds(
            kernel.flops, kernel.bytes_accessed, kernel.sent_bytes, kernel.network_bytes
        )
        spent[COMPUTE if compute > memory else MEMORY] += kernel.launches * max(compute, memory)
        spent[LINKS] += kernel.launches * links
        total += kernel.launches * (max(compute, memory) + links)
    return PartCost(
        part=part,
        milliseconds=1000 * total,
        limit=max(spent, key=lambda name: spent[name]),
        flops=sum(kernel.launches * kernel.flops for kernel in kernels),
        bytes=sum(kernel.launches * kernel.bytes_accessed for kernel in kernels),
        sent_bytes=sum(kernel.launches * kernel.sent_bytes for kernel in kernels),
        launches=sum(kernel.launches for kernel in kernels),
    )


def largest(costs: Sequence[PartCost]) -> str:
    """What takes the most of a step, forward and backward together, and what would change it; "" for no parts."""
    if not costs:
        return ""
    names = {cost.part.removesuffix(BACKWARD) for cost in costs}
    both = {name: [cost for cost in costs if cost.part.removesuffix(BACKWARD) == name] for name in sorted(names)}
    name = max(both, key=lambda name: roofline_seconds(both[name]))
    limit = max(both[name], key=lambda cost: cost.milliseconds).limit
    spent, total = 1000 * roofline_seconds(both[name]), 1000 * roofline_seconds(costs)
    advice = CHANGES.get((name, limit)) or CHANGES[limit]
    where = {COMPUTE: "its matrix products", MEMORY: "the memory of the device", LINKS: "what it sends"}[limit]
    return f"largest: {name}, {spent:.3g} of {total:.3g} ms ({spent / total:.0%}), mostly {where}: {advice}"


CHANGES: dict[tuple[str, str] | str, str] = {
    COMPUTE: "a smaller model, or a faster device, has less of it",
    MEMORY: "it reads and writes each token's numbers once or more: a smaller dim, or fewer blocks, has less of it",
    LINKS: "a larger batch_size has more tokens for each byte; with fsdp, fsdp_devices of one host spares the network",
    (HEAD_AND_LOSS, COMPUTE): "a smaller vocabulary has fewer logits, and more blocks make its share smaller",
    (HEAD_AND_LOSS, MEMORY): "a larger loss_chunk sums its gradient less often; a smaller vocabulary has fewer logits",
    (ATTENTION, COMPUTE): "shorter rows, or sliding_window, have fewer pairs of tokens",
    (
        ATTENTION,
        MEMORY,
    ): "attention cudnn (GPUs) or splash (TPUs) writes no scores, and xla does; shorter rows have fewer",
    (MLP, MEMORY): "a larger batch_size makes its matrix products larger for the same weights",
    (EXPERTS, COMPUTE): "a smaller top_k_mlp or hidden_dim computes less for a token",
    (
        EXPERTS,
        MEMORY,
    ): "a larger batch_size has more tokens for each expert's weights; fewer n_experts have fewer weights",
    (OPTIMIZER, MEMORY): "a larger batch_size makes its share smaller, and with fsdp each device updates a part",
    (
        CASTS,
        MEMORY,
    ): "use_bf16 stores parameters in the type that is computed in, and a larger batch_size needs as many",
    (EMBEDDING, MEMORY): "a smaller vocabulary has a smaller gradient, and a larger batch_size needs as many",
}
"""What makes a part shorter that is at such a limit."""
