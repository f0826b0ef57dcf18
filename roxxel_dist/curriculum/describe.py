"""A plan in words: a table of its phases, and what happens in it at which step."""

from typing import TYPE_CHECKING

from roxxel_dist.curriculum.segments import Segment

if TYPE_CHECKING:
    from roxxel_dist.curriculum.plan import Plan

HEAD = ("phase", "steps", "batch x seq_len", "tokens", "passes", "data")


def describe(plan: "Plan") -> str:
    """The table of phases and, below it, every step at which a data set leaves the blend or a new pass begins."""
    table: list[tuple[str, ...]] = [HEAD]
    readable = sum(source.units.count * source.units.size for source in plan.amendments[-1].sources.values())
    first = 0
    for number, shape in enumerate(plan.shapes):
        stop = first + shape.steps
        tokens = plan.tokens(stop) - plan.tokens(first)  # an amended phase may have begun in another shape
        shares = sum(weight for _, weight in shape.weights)
        data = ", ".join(f"{name} {weight / shares:.0%}" for name, weight in shape.weights)
        by = f" by {shape.blend}" if len(shape.weights) > 1 else ""
        cells = (f"{first + 1:,} to {stop:,}", f"{shape.batch_size:,} x {shape.seq_len:,}", f"{tokens:,}")
        apart = ", documents apart" if shape.packing == "documents" else ""
        table.append((str(number + 1), *cells, f"{tokens / readable:.2f}", data + by + apart))
        first = stop
    total = plan.tokens(plan.total_steps)
    table.append(("all", f"{plan.total_steps:,}", "", f"{total:,}", f"{total / readable:.2f}", ""))
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines + [f"step {step + 1:,}: {what}" for step, what in events(plan)])


def events(plan: "Plan") -> list[tuple[int, str]]:
    """(step, what begins with it) of everything that is no phase's beginning: amendments, new passes, exhaustion."""
    found = [(a.from_step, "amended" + (f", {a.skip} steps left out" if a.skip else "")) for a in plan.amendments[1:]]
    for before, segment in zip(plan.segments, plan.segments[1:], strict=False):
        found += [(segment.first_step, what) for what in _changes(before, segment)]
    for laps in dict.fromkeys(segment.laps for segment in plan.segments if segment.laps):
        found.append((laps.first_step, f"this pass and the {laps.count - 1} behind it take {laps.period:,} steps each"))
    return sorted(found, key=lambda event: event[0])


def _changes(before: Segment, now: Segment) -> list[str]:
    passes = {claim.source.name: claim.position.pass_index for claim in now.claims}
    known = {name: position.pass_index for name, position in before.before.items()}
    renewed = [f"{name!r}" for name, index in passes.items() if index > known.get(name, index)]
    left = [
        f"{claim.source.name!r}"
        for claim in before.claims
        if claim.source.name not in passes and claim.source.name in dict(now.shape.weights)
    ]
    told = [f"all is used up: a new pass over {', '.join(renewed)} begins, in another order"] if renewed else []
    return told + ([f"{', '.join(left)} is used up and leaves the blend"] if left else [])
