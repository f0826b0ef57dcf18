"""What a run would be, as text for people."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from roxxel_dist.outlook.look import Outlook
from roxxel_dist.outlook.phase import PhaseOutlook, size
from roxxel_dist.report.table import duration

SHARED = {"rows": "its rows are cut over {0} devices", "tokens": "its rows are cut along the tokens over {0} devices"}


def table(found: Outlook, *, every_array: bool = False) -> str:
    """All of an outlook in sections.

    Args:
        found: the outlook.
        every_array: whether each parameter gets a line, or all of them one.
    """
    parts = {
        "phases": [found.description, *found.notes],
        "data": _data(found),
        "model": _model(found),
        "devices": _devices(found),
        "memory of a device": _memory(found),
        "sharding": _sharding(found, every_array),
        "compute": _compute(found),
        "time": _time(found),
    }
    return "\n\n".join("\n".join([f"{name}:", *lines]) for name, lines in parts.items())


def _data(found: Outlook) -> list[str]:
    lines = [
        f"{name}: {one['tokens']:,} tokens to train on, {one['passes']:.2f} passes"
        for name, one in found.datasets.items()
    ]
    held = [f"{name or 'held out'}: {tokens:,} tokens" for name, tokens in found.validation.items() if tokens]
    return [*lines, "validation: " + (", ".join(held) or "none"), f"vocabulary: {found.vocab_size:,}"]


def _model(found: Outlook) -> list[str]:
    rows = [[name, f"{count:,}", f"{count / found.parameters:.1%}"] for name, count in found.parts.items()]
    if (trained := found.trainable_parameters) < found.parameters:
        rows.append(["of them trained", f"{trained:,}", f"{trained / found.parameters:.2%}"])
    return _aligned([["parameters", f"{found.parameters:,}", ""], *rows])


def _devices(found: Outlook) -> list[str]:
    of = f" in {found.processes} processes" if found.processes > 1 else ""
    made = (
        ", simulated" if found.simulated else f" ({found.device_kind})" if found.device_kind != found.platform else ""
    )
    lines = [f"{found.devices} {found.platform} device(s){of}{made}"]
    for phase in found.phases:
        how = SHARED.get(phase.layout.cut, "each device has all of it").format(phase.layout.pieces)
        if (together := phase.layout.together) > 1:
            how += f", {together} devices for each"
        groups = phase.layout.pieces + phase.layout.repeated
        who = "devices" if together == 1 else "groups of devices"
        again = f"; {phase.layout.repeated} of {groups} {who} repeat the work of others: use a batch_size "
        again += f"that divides by {groups * found.grad_accum}"
        micro = f", in {found.grad_accum} micro-batches" if found.grad_accum > 1 else ""
        reads = f"; a process reads {phase.rows_a_process} of {phase.batch_size} rows" if found.processes > 1 else ""
        lines.append(
            f"phase {phase.phase}: a batch of {phase.batch_size:,} rows x {phase.seq_len:,} tokens{micro}: {how}"
            + (again if phase.layout.repeated else "")
            + reads
        )
    return lines


def _memory(found: Outlook) -> list[str]:
    by = ", ".join(f"{name} {size(count)}" for name, count in found.state.items())
    rows = [["", "state and batch", "temporaries", "results", "in all", "of its memory"]]
    for phase in found.phases:
        rows.append([f"phase {phase.phase}", *_needs(phase, found.memory_limit)])
    lines = [f"state: {by}", *_aligned(rows)]
    if found.memory_limit is None:
        lines.append("what a device has is not known: give --device_memory_gb")
    else:
        lines.append(f"a device has {size(found.memory_limit)}")
    if found.platform == "cpu":
        what = (
            "the state is exact; temporaries are an estimate for an accelerator, whose compiler has kernels of its own"
        )
        lines.append(f"by XLA's account of the compiled step, for CPU: {what}")
    else:
        lines.append(f"by XLA's account of the compiled step, for {found.device_kind}")
    return lines


def _needs(phase: PhaseOutlook, limit: int | None) -> list[str]:
    needs = phase.memory
    if needs is None:
        return ["", "", "", "does not fit", ""]
    share = "unknown" if limit is None else f"{needs.peak / limit:.0%}"
    return [size(needs.arguments), size(needs.temporaries), size(needs.results + needs.code), size(needs.peak), share]


def _sharding(found: Outlook, every_array: bool) -> list[str]:
    cut = [one for one in found.arrays if any(one["cut"])]
    held, whole = sum(one["device_bytes"] for one in found.arrays), len(found.arrays) - len(cut)
    what = "fsdp: " if found.fsdp else "" if cut else "no fsdp: "
    lines = [
        f"{what}{len(cut)} of {len(found.arrays)} arrays of parameters are cut over the devices, {whole} are whole on "
        f"each; a device holds {size(held)} of parameters"
    ]
    if every_array:
        rows = [["array", "shape", "type", "cut", "on a device"]]
        rows += [[one["name"], _shape(one), one["dtype"], _cut(one), size(one["device_bytes"])] for one in found.arrays]
        return [*lines, *_aligned(rows)]
    ways = Counter((_shape(one), _cut(one)) for one in cut)
    rows = [[f"{count} arrays of", shape, how] for (shape, how), count in ways.items()]
    return [*lines, *(_aligned(rows) if rows else [])]


def _shape(array: Mapping[str, Any]) -> str:
    return " x ".join(map(str, array["shape"])) or "1"


def _cut(array: Mapping[str, Any]) -> str:
    found = [f"dimension {i} over {axis}" for i, axis in enumerate(array["cut"]) if axis]
    return ", ".join(found) or "whole"


def _compute(found: Outlook) -> list[str]:
    rows = [["", "FLOPs a token", "a step", "in all"]]
    for phase in found.phases:
        each = phase.flops_per_token
        rows.append([f"phase {phase.phase}", f"{each:.3g}", f"{phase.flops / phase.steps:.3g}", f"{phase.flops:.3g}"])
    rows.append(["all", "", "", f"{found.flops:.3g}"])
    return _aligned(rows)


def _time(found: Outlook) -> list[str]:
    if found.seconds is None:
        return [found.speed]
    speed = found.tokens_per_s or found.tokens / found.seconds
    by_phase = ", ".join(f"phase {one.phase} {duration(one.seconds or 0.0)}" for one in found.phases)
    return [
        f"{duration(found.seconds)} for {found.tokens:,} tokens at {speed:,.0f} tokens/s ({found.speed}): {by_phase}",
        "steps alone: validations, saves and compilations come on top",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
