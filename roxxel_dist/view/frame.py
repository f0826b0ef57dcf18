"""One frame of `roxxel-dist top`: lines of text that fit the terminal."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from roxxel_dist.launcher.control.record import Restart
from roxxel_dist.launcher.output import clock, printable, scaled
from roxxel_dist.sweep.report.text import STATES, counts, parameter_columns, short_names, varied_parameters
from roxxel_dist.sweep.report.versus import versus_text
from roxxel_dist.sweep.study.folder import flat, short
from roxxel_dist.train.log.timeline import SPENT
from roxxel_dist.utils.display import aligned, counted
from roxxel_dist.view.curve import Points
from roxxel_dist.view.items import JobState, State, StudyState
from roxxel_dist.view.run import RankState, RunState, worst_ranks

CURVES = ("cyan", "yellow", "green", "magenta")
ALIVE = ("training", "searching", "running", "starting", "restarting", "stopping")
STILL_S = 5.0
"""Seconds without progress after which a rank shows the time since its last progress."""
MOST_RANKS, MOST_CURVE, LEAST_CURVE = 16, 16, 5
MOST_GAPS = 3
"""Metrics whose values that are not finite are counted in a frame."""
LONG_NAME, MOST_METRIC = 24, 20
ZOOM = 4
"""A zoomed curve shows the last 1 / this of its range."""
LONG = 60
"""Most columns of the bar of phases."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The display options of a frame."""

    width: int
    height: int
    ascii_only: bool = False
    """Whether the terminal has no Unicode."""
    zoom: bool = False
    """Show only the last quarter of a curve."""
    chosen: int = 0
    """The selected item of a list: its curve is in front, and Enter opens it."""


def frame(states: Sequence[State], look: Look, keys: str = "") -> list[Text]:
    """The lines of one item, or of a list of several; the last one names the keys."""
    room = look.height - bool(keys)
    lines = one(states[0], look, room) if len(states) == 1 else many(states, look, room)
    lines = [*lines[:room], *[Text()] * (room - len(lines) if keys else 0), *([Text(keys, "dim")] if keys else [])]
    for line in lines:
        if (shown := printable(line.plain)) != line.plain or "\n" in shown or "\t" in shown:
            line.plain = shown.replace("\n", "\\n").replace("\t", " ")
        line.no_wrap = True
        line.truncate(look.width, overflow="crop" if look.ascii_only else "ellipsis")
    return lines


def one(state: State, look: Look, room: int) -> list[Text]:
    """The details of one item."""
    if isinstance(state, RunState):
        return _run(state, look, room)
    return _study(state, room) if isinstance(state, StudyState) else _job(state, room)


def many(states: Sequence[State], look: Look, room: int) -> list[Text]:
    """A line for each item, and below it the curves of up to four: the selected one and those after it."""
    rows = [["", "name", "state", "step", "of", "loss", "val_loss", "best", "tok/s"], *map(_row, states)]
    table = aligned(rows, left=None)
    runs = [(number, state) for number, state in enumerate(states) if isinstance(state, RunState)]
    drawn = [(number, run) for number, run in runs if run.buckets.get("train_loss")]
    drawn = sorted(drawn, key=lambda pair: (pair[0] < look.chosen, pair[0]))[: len(CURVES)]
    tall = min(MOST_CURVE, room - 1 - min(len(states), max(3, room // 2))) if drawn else 0
    listed = room - 1 - max(0, tall)
    first = max(0, min(look.chosen - listed // 2, len(states) - listed))
    lines = [Text(table[0], "bold")]
    for number in range(first, min(len(states), first + listed)):
        style = "green" if _state(states[number]) in ALIVE else ""
        text = (">" if number == look.chosen else " ") + table[number + 1][1:]
        line = Text(text, f"{style} reverse" if number == look.chosen else style)
        names = [CURVES[at] for at, (drawn_number, _) in enumerate(drawn) if drawn_number == number]
        lines.append(line.append(" *", f"bold {names[0]}") if names else line)
    return lines + _chart([_zoomed(state.losses, look) for _, state in drawn], look, tall)


def _row(state: State) -> list[str]:
    if isinstance(state, RunState):
        row = state.row
        return [
            " ", _end(state.name, LONG_NAME), state.state, f"{state.step:,}", _number(state.last_step, "{:,}"),
            _number(row.get("train_loss")), _number(row.get("val_loss")), _number(state.best_val_loss),
            _number(row.get("tokens_per_s"), scaled),
        ]  # fmt: skip
    if isinstance(state, StudyState):
        history = state.study.history
        ended = f"{len(history.trials) - len(history.running)}"
        best = _number(history.best and history.best.value)
        total = _number(state.study.sweep.run_cap, "{}")
        return [" ", state.study.name, state.state, f"{ended} trials", total, "", "", best, ""]
    job = state.record
    return [" ", job.run_id, job.state, f"{job.step:,}" if job.step else "-", *[""] * 5]


def _state(state: State) -> str:
    return state.record.state if isinstance(state, JobState) else state.state


def _number(value: float | None, form: str | Callable[[float], str] = "{:.4f}") -> str:
    if value is None:
        return "-"
    return form.format(value) if isinstance(form, str) else form(value)


# -- a run


def _run(run: RunState, look: Look, room: int) -> list[Text]:
    title = Text(_end(run.name, look.width // 3), "bold").append(
        f"  {run.state}", "green" if run.state in ALIVE else "yellow"
    )
    title.append(f"  {run.title}" if run.title else "", "bold").append("".join(f" #{tag}" for tag in run.tags), "cyan")
    share = f" ({min(1.0, run.step / run.last_step):.1%})" if run.last_step else ""
    title.append(f"  step {run.step:,}" + (f" of {run.last_step:,}{share}" if run.last_step else ""), "")
    title.append("" if run.left_s is None else f"  {clock(run.left_s)} left")
    title.append(f"  job {run.job}" if run.job else "", "dim")
    title.append("" if run.read_share == 1.0 else f"  reading {run.read_share:.0%}", "yellow")
    lines = [title, *_phases(run, look), _numbers(run.row, run.best_val_loss), *_gaps(run)]
    below = [*_blend(run), *_ranks(run.ranks), *_restarts(run.restarts), *_goodput(run), *_checkpoints(run)]
    tall = min(MOST_CURVE, max(LEAST_CURVE, room - len(lines) - len(below)))
    curves = [_zoomed(points, look) for points in (run.losses, run.validations)]
    return [*lines, *_chart(curves, look, min(tall, room - len(lines))), *below]


def _end(text: str, most: int) -> str:
    """The end of a name, which is more specific than its beginning."""
    return text if len(text) <= most else "..." + text[3 - most :]


def _phases(run: RunState, look: Look) -> list[Text]:
    if not run.phases or not run.last_step:
        return []
    now, phase = run.phase, run.phases[run.phase]
    columns = min(LONG, look.width - 20)
    full, empty, cut = ("#", "-", "|") if look.ascii_only else ("█", "░", "│")
    ends = {round(part.last / run.last_step * columns) for part in run.phases[:-1] if part.last < run.last_step}
    done = round(min(run.step, run.last_step) / run.last_step * columns)
    bar = "".join(cut if i in ends else full if i < done else empty for i in range(columns))
    end = min(phase.last, run.last_step)
    text = f"steps {phase.first:,} to {end:,}, {phase.batch_size} rows x {phase.seq_len} tokens"
    if phase.last < run.last_step and run.step < run.last_step:
        text += f"; the next one begins in {max(0, phase.last - run.step):,}"
    notes = [Text(f"  {note}", "dim") for note in (text, run.layout) if note]
    return [Text(f"phase {now + 1} of {len(run.phases)}  ").append(bar, "cyan"), *notes]


def _numbers(row: Mapping[str, float], best: float | None) -> Text:
    forms: dict[str, Callable[[float], str]] = {
        "train_loss": lambda value: f"loss {value:.4f}",
        "val_loss": lambda value: f"val {value:.4f}" + ("" if best is None else f" (best {best:.4f})"),
        "ms_per_step": lambda value: f"{value:.0f} ms/step",
        "tokens_per_s": lambda value: f"{scaled(value)} tokens/s",
        "mfu": lambda value: f"MFU {value:.1%}",
        "hfu": lambda value: f"HFU {value:.1%}",
        "expert_load_max": lambda value: f"busiest expert {value:.1f}x",
        "expert_dropped": lambda value: f"dropped {value:.1%}",
        "vram_gb": lambda value: f"VRAM {value:.2f} GB",
        "ram_gb": lambda value: f"RAM {value:.2f} GB",
        "lr": lambda value: f"lr {value:.3g}",
    }
    return Text(
        "  ".join(form(row[name]) for name, form in forms.items() if name in row)
        or ("no loss yet" if row else "no row yet")
    )


def _gaps(run: RunState) -> list[Text]:
    lines = []
    for name, gaps in run.gaps.items():
        count, first = sum(count for _, count in gaps), gaps[0][0]
        lines.append(f"{name}: {counted(count, 'value')} not finite" + f", first at step {first:,}")
    more = [f"… and {len(lines) - MOST_GAPS} metrics more"] if len(lines) > MOST_GAPS else []
    return [Text(line, "bold red") for line in [*lines[:MOST_GAPS], *more]]


def _zoomed(points: Points, look: Look) -> Points:
    if not (look.zoom and points):
        return points
    last = points[-1][0]
    return [point for point in points if point[0] >= last - last // ZOOM]


def _chart(curves: list[Points], look: Look, height: int) -> list[Text]:
    lines = []
    for parts in chart(curves, look.width, height, ascii_only=look.ascii_only):
        line = Text()
        for text, number in parts:
            line.append(text, "dim" if number < 0 else CURVES[number])
        lines.append(line)
    return lines


def _blend(run: RunState) -> list[Text]:
    planned = run.phases[run.phase].weights if run.phases else {}
    if len(planned) < 2:
        return []
    parts = [
        f"{name} {share:.1%}" + (f" (read {run.realised[name]:.1%})" if name in run.realised else "")
        for name, share in planned.items()
    ]
    return [Text("blend  " + "  ".join(parts))]


def _ranks(ranks: Sequence[RankState]) -> list[Text]:
    if not ranks:
        return []
    shown = worst_ranks(ranks, MOST_RANKS)
    rows = [["rank", "host", "pid", "state", "step", "behind", "ms/step"]]
    for rank in shown:
        still_s = rank.still_s or 0.0
        state = rank.state + (f" for {clock(still_s)}" if still_s > STILL_S else "")
        speed = _number(rank.ms_per_step, "{:.0f}")
        rows.append([str(rank.rank), rank.host, str(rank.pid), state, f"{rank.step:,}", str(rank.behind), speed])
    head, *table = aligned(rows, left=None)
    styles = ["bold red" if rank.state == "stopped" else "" for rank in shown]
    lines = [Text(head, "dim"), *(Text(line, style) for line, style in zip(table, styles, strict=True))]
    return [*lines, *([Text(f"… and {len(ranks) - len(shown)} ranks more", "dim")] if len(ranks) > len(shown) else [])]


def _restarts(restarts: Sequence[Restart]) -> list[Text]:
    lines = [f"{_clock(one.time)} attempt {one.attempt}, step {one.step:,}: {one.cause}" for one in restarts[-3:]]
    earlier = [f"{len(restarts) - 3} earlier"] if len(restarts) > 3 else []
    return [Text(f"restart  {line}", "yellow") for line in [*earlier, *lines]]


def _goodput(run: RunState) -> list[Text]:
    if run.goodput is None:
        return []
    total = sum(run.spent.values())
    parts = [f"{kind} {run.spent[kind] / total:.1%}" for kind in SPENT[1:] if run.spent[kind] / total >= 0.001]
    starts = f", {run.attempts} attempts" if run.attempts > 1 else ""
    return [Text(f"goodput  {run.goodput:.1%} of {clock(total)}{starts}  ").append(", ".join(parts), "dim")]


def _checkpoints(run: RunState) -> list[Text]:
    kept = [checkpoint for checkpoint in run.checkpoints if not checkpoint.set_aside]
    lines = []
    if kept:
        newest, others = kept[-1], [f"{checkpoint.step:,}" for checkpoint in kept[-6:-1]]
        text = f"saved  step {newest.step:,} on disk, {clock(time.time() - newest.saved)} ago"
        text += ", with digests" if newest.digests else ", without digests"
        lines.append(Text(text + (f"; before it {', '.join(others)}" if others else "")))
    if damaged := [checkpoint.name for checkpoint in run.checkpoints if checkpoint.set_aside]:
        lines.append(Text(f"damaged  {', '.join(damaged)}: renamed, the run continued from another one", "bold red"))
    return lines


def _clock(when: float) -> str:
    then = time.localtime(when)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%m-%d %H:%M", then)


# -- a study and a job


def _study(state: StudyState, room: int) -> list[Text]:
    study, history = state.study, state.study.history
    sweep = study.sweep
    scheduler = (sweep.early_terminate or {}).get("type")
    title = Text(study.name, "bold").append(f"  {state.state}", "green" if state.state in ALIVE else "yellow")
    title.append(f"  {counts(study)}" + (f" of {sweep.run_cap}" if sweep.run_cap else ""))
    method = f"{history.method or sweep.method}, {sweep.goal} {sweep.metric}; scheduler {scheduler or 'none'}"
    left = [f"{clock(time.time() - state.began)} since it began"] if state.began else []
    left += [] if state.left_s is None else [f"{clock(state.left_s)} left"]
    left += [] if state.steps_left is None else [f"{state.steps_left:,} steps left of the trials that run"]
    lines = [title, Text(method), Text("; ".join(left), "dim")]
    if sweep.versus is not None:
        lines += map(Text, versus_text(study).splitlines())
    elif (best := history.best) is not None:
        lines.append(
            Text(f"best {sweep.metric} {short(best.value)}: trial {best.number}, {_params(best.params)}", "green")
        )
    trials = sorted(history.trials.values(), key=lambda trial: (trial.state != "running", -trial.number))
    trials = trials[: max(0, room - len(lines) - 1)]
    names, *values = parameter_columns(trials, varied_parameters(study) or list(sweep.space.names))
    rows = [["trial", "state", "step", sweep.metric[-MOST_METRIC:], *names]]
    for trial, params in zip(trials, values, strict=True):
        step, value = trial.reports[-1] if trial.reports else ("", None)
        ruled = trial.stop is not None and trial.state in ("stopped", "paused")
        what = STATES[study.state_of(trial)] + (f": {trial.stop['rule']}" if trial.stop and ruled else "")
        what += f": {trial.reason}" if trial.state == "failed" else ""
        value = value if trial.value is None else trial.value
        rows.append([str(trial.number), what[:40], str(step), _number(value, short), *params])
    head, *table = aligned(rows, left=None)
    return [*lines, Text(head, "dim"), *map(Text, table)]


def _params(params: Mapping[str, object]) -> str:
    values = flat(params)
    names = short_names(list(values))
    return ", ".join(f"{names[name]} {short(value)}" for name, value in values.items())


def _job(state: JobState, room: int) -> list[Text]:
    job = state.record
    code = f" with {job.code}" if job.code is not None else ""
    known = "" if job.is_known else f", as of {_clock(job.updated)}"
    title = Text(job.run_id, "bold").append(f"  {job.state}{code}{known}", "green" if job.state in ALIVE else "yellow")
    title.append(f"  attempt {job.attempt}  step {job.step or '-'}  since {_clock(job.begun)}")
    hosts = f"{len(job.hosts)} host(s): {', '.join(job.hosts)}; {job.nprocs} rank(s); {job.command}"
    lines = [title, Text(hosts, "dim"), *_ranks(state.ranks)]
    lines += [*_restarts(job.restarts), Text()]
    return [*lines, *(Text(line) for line in state.lines[-max(1, room - len(lines)) :])]


BRAILLE, DOTS = 0x2800, ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
LABEL = 8
"""Columns of the values beside a curve."""


def chart(
    curves: Sequence[Points], width: int, height: int, *, ascii_only: bool = False
) -> list[list[tuple[str, int]]]:
    """Lines of a chart of `width` columns and `height` rows: parts of text, each with the number of its curve, or -1.
    The last row has the first and the last step. Empty if there are no points, or no room."""
    points = [point for curve in curves for point in curve if math.isfinite(point[1])]
    columns, rows = width - LABEL - 2, height - 1
    if len(points) < 2 or columns < 8 or rows < 2:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    x_dots, y_dots = (1, 1) if ascii_only else (2, 4)
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for number, curve in enumerate(curves):
        for x, y in _dots(curve, (left, right), (low, high), columns * x_dots, rows * y_dots):
            place = (y // y_dots, x // x_dots)
            bits, _ = cells.get(place, (0, number))
            cells[place] = bits | (1 if ascii_only else DOTS[x % 2][y % 4]), number
    labels = {0: high, rows - 1: low}
    lines = []
    for row in range(rows):
        value = f"{labels[row]:.4g}" if row in labels else ""
        parts = [(f"{value:>{LABEL}} {'|' if ascii_only else '│'}", -1)]
        for column in range(columns):
            bits, number = cells.get((row, column), (0, -1))
            text = " " if not bits else "*+xo"[number % 4] if ascii_only else chr(BRAILLE + bits)
            if parts[-1][1] == number:
                parts[-1] = parts[-1][0] + text, number
            else:
                parts.append((text, number))
        lines.append(parts)
    first, last = f"{left:,}", f"{right:,}"
    lines.append([(" " * (LABEL + 2) + first + last.rjust(columns - len(first)), -1)])
    return lines


def _dots(
    curve: Points, span: tuple[int, int], values: tuple[float, float], columns: int, rows: int
) -> list[tuple[int, int]]:
    """(column, row) of each dot: the points, and the line between neighbours."""
    (left, right), (low, high) = span, values
    scale = 1.0 if math.isfinite(high - low) else 0.5  # the width may be more than a float can say
    dots: list[tuple[int, int]] = []
    for step, value in curve:
        if not math.isfinite(value):
            continue
        x = round((step - left) / max(1, right - left) * (columns - 1))
        y = round((high * scale - value * scale) / ((high * scale - low * scale) or 1.0) * (rows - 1))
        if dots and (count := max(abs(x - dots[-1][0]), abs(y - dots[-1][1]))) > 1:
            (x0, y0), part = dots[-1], range(1, count)
            dots += [(x0 + round((x - x0) * i / count), y0 + round((y - y0) * i / count)) for i in part]
        dots.append((x, y))
    return dots
