"""Where the time of a step would go: each kernel of the compiled program at the limit of its device, summed by part."""

from collections.abc import Iterable
from dataclasses import dataclass

from roxxel_dist.cluster.accelerators import Accelerator, accelerator
from roxxel_dist.cluster.program_cost import Kernel, ProgramCost
from roxxel_dist.cluster.step_parts import part_of

COMPUTE, MEMORY, LINKS = "compute", "memory", "links"


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """All kernels of a part of a step, on one device."""

    part: str
    """One of `cluster.step_parts`, with " backward" for its gradient and what that computes again."""
    milliseconds: float
    """The sum over its kernels of the longer of computing and memory, and of links, by the figures of data sheets."""
    limit: str
    """"compute", "memory" or "links": what takes the most of these milliseconds."""
    flops: float
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
        parts.setdefault(part_of(kernel.path), []).append(kernel)
    return by_length(_cost(part, kernels, device) for part, kernels in parts.items())


def by_length(costs: Iterable[PartCost]) -> tuple[PartCost, ...]:
    """The longest first."""
    return tuple(sorted(costs, key=lambda cost: -cost.milliseconds))


def roofline_seconds(costs: Iterable[PartCost]) -> float:
    """Of all parts together."""
    return sum(cost.milliseconds for cost in costs) / 1000


def _cost(part: str, kernels: list[Kernel], device: Accelerator) -> PartCost:
    spent, total = dict.fromkeys((COMPUTE, MEMORY, LINKS), 0.0), 0.0
    for kernel in kernels:
        compute = kernel.flops / (device.tera_flops * 1e12)
        memory = kernel.bytes_accessed / (device.gigabytes_per_s * 1e9)
        links = link_seconds(device, kernel.sent_bytes, kernel.network_bytes)
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


def link_seconds(device: Accelerator, sent_bytes: float, network_bytes: float) -> float:
    """To send so much; 0 where the table has no speed of links."""
    seconds = sent_bytes / (device.link_gigabytes_per_s * 1e9) if device.link_gigabytes_per_s else 0.0
    if device.network_gigabytes_per_s:
        seconds = max(seconds, network_bytes / (device.network_gigabytes_per_s * 1e9))
    return seconds
