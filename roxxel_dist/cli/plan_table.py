"""The text of the `plan` command."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.model.attention.kernels import LONGEST_WHOLE
from roxxel_dist.run.estimate.figures import PhaseEstimate, RunEstimate
from roxxel_dist.run.estimate.step_costs import largest
from roxxel_dist.run.estimate.target_layouts import LayoutComparison
from roxxel_dist.utils.display import aligned, duration, size

NAMES = 3
"""Arrays of a group that are named; --arrays and --json name all."""


def table(run: RunEstimate, *, every_array: bool = False, every_part: bool = False) -> str:
    """A whole estimate in sections; with `every_array` each parameter has a line, and with `every_part` each part of a
    target's training steps."""
    sections = {
        "phases": [run.description, *run.notes],
        "data": _data(run),
        "model": _model(run),
        "optimizer": _optimizer(run),
        "devices": _devices(run),
        "memory of each device": _memory(run),
        **({} if run.target is None else {f"compiled for {run.target}": _on_devices(run)}),
        **({"costs, each kernel at the limit of the device": _costs(run)} if every_part else {}),
        "sharding": _sharding(run, every_array),
        "compute": _compute(run),
        "time": _time(run),
    }
    return "\n\n".join("\n".join([f"{name}:", *lines]) for name, lines in sections.items())


def _data(run: RunEstimate) -> list[str]:
    lines = [
        f"{name}: {of['tokens']:,} tokens to train on, {of['passes']:.2f} passes" for name, of in run.datasets.items()
    ]
    sets = [f"{name or 'held out'}: {tokens:,} tokens" for name, tokens in run.validation.items() if tokens]
    read = f"; of each at most {run.validation_rows.eval_iters:,} batches of {run.validated_on}"
    validated = ", ".join(sets) + read if sets else "none"
    return [*lines, f"validation: {validated}", f"vocabulary: {run.vocab_size:,}"]


def _model(run: RunEstimate) -> list[str]:
    rows = [["parameters", f"{run.parameters:,}", ""]]
    rows += [[name, f"{count:,}", f"{count / run.parameters:.1%}"] for name, count in run.parts.items()]
    if (trained := run.trainable_parameters) < run.parameters:
        rows.append(["trainable", f"{trained:,}", f"{trained / run.parameters:.2%}"])
    return aligned(rows)


def _optimizer(run: RunEstimate) -> list[str]:
    rows = [["", "parameters", "weight decay", "arrays"]]
    for group in run.updates:
        count = len(group.arrays)
        how = f"{group.matrices:,} matrices in " if group.matrices else ""
        shown = group.arrays[:NAMES]  # all of them with --json
        more = f" and {count - len(shown)} more" if count > len(shown) else ""
        decay = {True: "yes", False: "no", None: "its own"}[group.weight_decay]
        named = f"{how}{count} array{'s' * (count > 1)}: {', '.join(shown)}{more}"
        rows.append([group.optimizer, f"{group.parameters:,}", decay, named])
    return aligned(rows, left=None)


def _devices(run: RunEstimate) -> list[str]:
    several = run.processes > 1
    kind = ", simulated" if run.simulated else f" ({run.device_kind})" if run.device_kind != run.platform else ""
    lines = [f"{run.devices} {run.platform} device(s){f' in {run.processes} processes' if several else ''}{kind}"]
    for phase in run.phases:
        line = f"phase {phase.phase}: a batch of {phase.batch_size:,} rows x {phase.seq_len:,} tokens"
        line += f", in {run.grad_accum} micro-batches" if run.grad_accum > 1 else ""
        line += f": {phase.layout}"
        line += f"; a process reads {phase.rows_a_process} of {phase.batch_size} rows" if several else ""
        lines.append(line)
    return lines


def _memory(run: RunEstimate) -> list[str]:
    rows, limit = [["", "state and batch", "temporaries", "results", "total", "of its memory"]], run.memory_limit
    for phase in run.phases:
        cells = ["", "", "", "does not fit", ""]
        if (of := phase.memory) is not None:
            share = "unknown" if limit is None else f"{of.peak / limit:.0%}"
            cells = [*map(size, (of.arguments, of.temporaries, of.results + of.code, of.peak)), share]
        rows.append([f"phase {phase.phase}", *cells])
    device = run.device_kind
    if run.platform == "cpu":
        device = (
            "CPU: the state is exact; temporaries are only an estimate for an accelerator, whose compiler has other "
            "kernels"
        )
    return [
        "state: " + ", ".join(f"{name} {size(count)}" for name, count in run.state.items()),
        *aligned(rows),
        *map(_scores, (phase for phase in run.phases if phase.score_bytes is not None)),
        "the memory of a device is unknown: give --device_memory_gb"
        if limit is None
        else f"a device has {size(limit)}",
        f"source: XLA's memory analysis of the compiled step, for {device}",
    ]


def _on_devices(run: RunEstimate) -> list[str]:
    """The figures of each step by the target's compiler."""
    rows = [["", "memory", "of its memory", "FLOPs a device", "x devices / one", "at least", "compiled in"]]
    sent: list[str] = []
    for phase in run.phases:
        assert phase.target is not None
        for what, step in (("training", phase.target), ("validation", phase.target.validation)):
            if step is None:
                continue
            name = f"phase {phase.phase}, {what}"
            cells = [size(step.peak_bytes) if step.peak_bytes else "too much", "", "", "does not fit", ""]
            if step.flops_per_device is not None:
                share = step.peak_bytes / step.device_bytes if step.peak_bytes and step.device_bytes else None
                ratio, bound = step.flops_ratio, step.bound_seconds
                cells[1] = "unknown" if share is None else f"{share:.0%}"
                cells[2:4] = [f"{step.flops_per_device:.3g}", "" if ratio is None else f"{ratio:.2f}"]
                longest = max(bound, key=lambda name: bound[name], default=None)
                cells[4] = "" if longest is None else f"{1000 * bound[longest]:.3g} ms ({longest})"
                links = ", ".join(f"{kind} {size(count)}" for kind, count in step.collectives.items()) or "nothing"
                whole = max(step.gathered.items(), key=lambda item: item[1], default=None)
                links += "" if whole is None else f"; the largest array that it gathers is {whole[0]}, {size(whole[1])}"
                sent.append(f"{name}: a device sends {links}")
            rows.append([name, *cells, f"{step.compile_seconds:.0f} s"])
    known = accelerator(run.device_kind)
    figures = "" if known is None else f" ({known.source})"
    return [
        *aligned(rows),
        *sent,
        f"at least: the longest of computing, memory and links by public figures{figures}; a real step takes longer",
    ]


def _costs(run: RunEstimate) -> list[str]:
    """The time of the training steps, by part."""
    lines: list[str] = []
    for phase in run.phases:
        step = phase.target
        if step is None or step.roofline_seconds is None:
            lines.append(f"phase {phase.phase}: nothing is known")
            continue
        whole = 1000 * step.roofline_seconds
        rows = [[f"phase {phase.phase}", "ms", "", "limit", "TFLOP", "bytes", "sent", "kernels"]]
        for of in step.costs:
            figures = f"{of.milliseconds:.3f}", f"{of.milliseconds / whole:.0%}", of.limit, f"{of.flops / 1e12:.3f}"
            rows.append([of.part, *figures, size(of.bytes), size(of.sent_bytes), f"{of.launches:,.0f}"])
        flops, data, sent, kernels = (
            sum(getattr(of, name) for of in step.costs) for name in ("flops", "bytes", "sent_bytes", "launches")
        )
        rows.append(["all", f"{whole:.3f}", "", "", f"{flops / 1e12:.3f}", size(data), size(sent), f"{kernels:,.0f}"])
        lines += [*aligned(rows), largest(step.costs)]
        if known := accelerator(run.device_kind):
            most = phase.flops / phase.steps / run.devices / (step.roofline_seconds * known.tera_flops * 1e12)
            lines.append(f"so the MFU is at most {most:.2f}: a real kernel takes longer, and most wait for one another")
    return lines


OPEN = (
    "not compiled: by FLOPs and bytes alone it is worse than the others; eight that fit are compiled, or what takes "
    "four minutes of two cores"
)
SCANNED = "scan_layers: one block is compiled for all, with the same numbers, so that the answer takes minutes"


def layouts_table(found: LayoutComparison) -> str:
    """The layouts of a phase, the best first."""
    title = (
        f"layouts of phase {found.phase} ({found.share:.0%} of the computed tokens), a batch of {found.batch_size:,} "
        f"rows x {found.seq_len:,} tokens on {found.devices} devices of {found.target}:"
    )
    rows = [["lines of the config", "roofline", "memory", "of its memory", "sent", "x devices / one", "limit"]]
    for each in found.layouts:
        step = each.step
        memory = each.state_bytes if step is None or step.peak_bytes is None else step.peak_bytes
        share = "" if found.device_bytes is None else f"{memory / found.device_bytes:.0%}"
        cells = ["does not fit", size(memory), share, "", "", ""]
        if each.is_open:
            about = "" if each.estimated_seconds is None else f", about {1000 * each.estimated_seconds:.3g} ms"
            cells[0] = f"not compiled{about}"
        if step is not None and step.flops_per_device is not None:
            bounds = step.bound_seconds
            bound = max(bounds, key=lambda name: bounds[name], default="")
            known = None if step.roofline_seconds is None else f"{1000 * step.roofline_seconds:.3g} ms"
            cells[0] = (known or "unknown") if each.fits else cells[0]
            ratio = "" if step.flops_ratio is None else f"{step.flops_ratio:.2f}"
            cells[3:] = [size(sum(step.collectives.values())), ratio, bound]
        rows.append([each.lines, *cells])
    lines = [title, *aligned(rows)]
    best, is_open = found.layouts[0] if found.layouts else None, any(each.is_open for each in found.layouts)
    if best is not None and best.fits:
        lines += [
            "",
            f"the best of them: {best.text}",
            *(f"{name}: {str(value).lower()}" for name, value in best.fields.items()),
        ]
    return "\n".join(
        [
            *lines,
            "",
            *([OPEN, ""] if is_open else []),
            *([SCANNED, ""] if any("scan_layers" in each.fields for each in found.layouts) else []),
            "roofline: every kernel and every transfer at the limit of the device, one after the other; a real step "
            "overlaps some of them, and none is faster",
        ]
    )


def _scores(phase: PhaseEstimate) -> str:
    """The memory of the attention kernel, which is part of the temporaries."""
    is_whole = phase.attention == "xla" and phase.seq_len - 1 <= LONGEST_WHOLE
    how = "all scores of a row at once" if is_whole else "scores in blocks"
    return f"attention of phase {phase.phase}: {phase.attention}, {how}, {size(phase.score_bytes or 0)} per layer"


def _sharding(run: RunEstimate, every_array: bool) -> list[str]:
    cut = [array for array in run.arrays if any(array["cut"])]
    bytes_held, whole = sum(array["device_bytes"] for array in run.arrays), len(run.arrays) - len(cut)
    what = "fsdp: " if run.fsdp else "" if cut else "no fsdp: "
    line = (
        f"{what}{len(cut)} of {len(run.arrays)} parameter arrays are sharded over the devices, {whole} are replicated; "
        f"each device holds {size(bytes_held)} of parameters"
    )
    if every_array:
        rows = [["array", "shape", "type", "sharding", "per device"]]
        rows += [[of["name"], *_shape_and_cut(of, of["dtype"]), size(of["device_bytes"])] for of in run.arrays]
    else:
        ways = Counter(_shape_and_cut(array) for array in cut)
        rows = [[f"{count} arrays of", *way] for way, count in ways.items()]
    return [line, *(aligned(rows) if rows else [])]


def _shape_and_cut(array: Mapping[str, Any], *between: str) -> tuple[str, ...]:
    cut = [f"dimension {i} over {axis}" for i, axis in enumerate(array["cut"]) if axis]
    return " x ".join(map(str, array["shape"])) or "1", *between, ", ".join(cut) or "replicated"


def _compute(run: RunEstimate) -> list[str]:
    rows = [["FLOPs", "per token", "per step", "total"]]
    for of in run.phases:
        rows.append([f"phase {of.phase}", *(f"{n:.3g}" for n in (of.flops_per_token, of.flops / of.steps, of.flops))])
    return aligned([*rows, ["all", "", "", f"{run.flops:.3g}"]])


def _time(run: RunEstimate) -> list[str]:
    if run.seconds is None:
        return [run.speed]
    speed = run.tokens_per_s or run.predicted_tokens / run.seconds
    by_phase = ", ".join(f"phase {phase.phase} {duration(phase.seconds or 0.0)}" for phase in run.phases)
    work = f"{run.predicted_tokens:,} computed tokens at {speed:,.0f} tokens/s ({run.speed})"
    return [
        f"{duration(run.seconds)} for {work}: {by_phase}",
        "steps alone: validations, saves and compilations come on top",
    ]
