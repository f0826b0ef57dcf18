"""Replay of steps of a run in a temporary folder, compared with its log and its checkpoints. The run is only read."""

import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.audit.record import RunRecord, Segment
from roxxel_dist.checkpoint.digests import TABLE, DigestTable
from roxxel_dist.checkpoint.files import read_named
from roxxel_dist.checkpoint.metadata import CHECKPOINTS, META
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cluster import determinism
from roxxel_dist.cluster.distributed import initialize_alone, make_devices
from roxxel_dist.cluster.mesh import simulate_devices
from roxxel_dist.cluster.xla_flags import CPU_DEVICES
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.input.stream import Stream
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import RunComponents, build_components
from roxxel_dist.run.evaluate import open_data
from roxxel_dist.run.metadata import RunMetadata
from roxxel_dist.run.record import kernel_begun_with
from roxxel_dist.settings.config import RECORD, Config
from roxxel_dist.train.log.csv_jsonl import DIGEST
from roxxel_dist.train.loop import Loop
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.step.bad_steps import BadStep
from roxxel_dist.utils.display import aligned

NEVER = 1 << 40
LOSSES = ("train_loss", "train_bal", "val_loss", "val_bal", "train_eval_loss", "grad_norm", "update_norm")
"""The compared values of a row, besides its digest and the val_loss of each data set."""
FORGOTTEN = "health/"
"""Arrays of a checkpoint that are not compared: a resume resets the health of steps."""


class Differs(BaseException):
    """The first row that differs. Not an Exception: training drops a tracker that raises one, and continues."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """Steps to replay."""

    start: int
    """Steps before the replay: the step of a checkpoint, or 0."""
    first: int
    """The first step whose row is compared, from 1."""
    last: int
    segment: Segment
    notes: tuple[str, ...] = ()

    def digests(self, run: RunRecord) -> bool:
        """Whether the replay has the same chain of digests as the run."""
        known = not self.start or run.checkpoint(self.start)[0].digest
        return bool(known) and all(DIGEST in row for step, row in run.rows.items() if self.start < step <= self.last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a replay."""

    steps: int
    """The number of compared steps, up to the first that differs."""
    rows: int
    checkpoints: int
    problem: str = ""
    """The first difference; empty if all is equal bit for bit."""


def interval_of(run: RunRecord, steps: tuple[int, int] | None) -> Interval:
    """The interval to replay for the steps from the first to the last, counted from 1; for None, all logged steps.

    Raises ValueError if the run has no such rows, or they cannot be replayed from a checkpoint or the beginning.
    """
    if not run.rows:
        raise UserError(f"{run.name} has no rows yet: nothing can be compared")
    begin, end = run.begins_after, max(run.rows)
    first, last = steps or (begin + 1, end)
    first = max(first, 1)
    if not begin < first <= last <= end:
        raise UserError(
            f"steps is {first}:{last}, and {run.name} has rows of the steps {begin + 1} to {end}: use those"
        )
    kept = [step for step in run.steps if step < first]
    start = max(kept, default=0)
    if start < begin or (begin and not kept):
        raise UserError(
            f"{run.name} was forked after step {begin}, and has no checkpoint before step {first}: begin after one; "
            f"kept are {', '.join(map(str, run.steps)) or 'none'}"
        )
    segments = run.segments()
    ends = [*(segment.start for segment in segments[1:]), end]
    chosen = [s for s, stop in zip(segments, ends, strict=True) if s.start < last and stop > start]
    if len(chosen) > 1:
        changes = [f"after step {segment.start}" for segment in chosen[1:]]
        raise UserError(
            f"{run.name} was resumed with another config or on other devices ({', '.join(changes)}), and steps "
            f"{start + 1} to {last} are before and after that: audit them separately, with steps="
            f"{first}:{chosen[1].start} and steps={chosen[1].start + 1}:{last}"
        )
    return Interval(start=start, first=first, last=last, segment=chosen[0])


def intervals_of(run: RunRecord, steps: tuple[int, int] | None, every: int = 1) -> list[Interval]:
    """The interval of some steps, from `interval_of`; or every `every`-th of the intervals between kept checkpoints."""
    whole = interval_of(run, steps)
    if every == 1:
        return [whole]
    starts = [whole.start, *(step for step in run.steps if whole.first <= step < whole.last), whole.last]
    return [interval_of(run, (max(low + 1, whole.first), high)) for low, high in list(pairwise(starts))[::every]]


def prepare(run: RunRecord, interval: Interval, devices: int | None) -> None:
    """Set up devices, threads and flags of this process so that it can reproduce the run bit for bit.

    Raises ValueError, with the differences, if it cannot.
    """
    was = dict(interval.segment.bits)
    theirs = sum(was.get("devices", {}).values()) or RunMetadata.from_config(run.saved).devices
    exact = interval.segment.is_exact
    if devices not in (None, theirs) and not exact:
        raise UserError(
            f"devices is {devices}, and {run.name} had {theirs}: the result depends on this number; leave it out"
        )
    shards: int = interval.segment.config.get("virtual_shards", 0)
    if devices and exact and devices > shards:
        raise UserError(f"devices is {devices}, and {run.name} has virtual_shards {shards}: use at most {shards}")
    on_cpu = RunMetadata.from_config(run.saved).platform in ("", "cpu")
    if on_cpu:
        simulate_devices(devices or theirs)
    if exact or interval.segment.config.get("deterministic"):
        determinism.make_deterministic()
    determinism.pin_threads(was.get("pjrt_nproc"))
    if on_cpu and was.get("distributed", was.get("processes", 1) > 1):
        initialize_alone()
    make_devices()
    determinism.enable_compilation_cache()
    now = determinism.numerics_fingerprint()
    if exact:
        was, now = map(determinism.without_topology, (was, now))
    for bits in (was, now):
        flags = str(bits.get("xla_flags", "")).split()
        bits["xla_flags"] = " ".join(flag for flag in flags if not flag.startswith(f"--{CPU_DEVICES}"))
        if on_cpu:  # on a CPU the number of processes does not matter if the number of devices is the same
            bits.pop("processes", None)
    if other := determinism.changed(was, now):
        raise UserError(f"{run.name} cannot be compared here, what decides bits is not the same: {'; '.join(other)}")


@contextlib.contextmanager
def loop_of(run: RunRecord, interval: Interval, watch: "Watch", *, last: int) -> Iterator[tuple[RunComponents, Loop]]:
    """The training loop at the start of the interval, in a separate folder.

    Raises ValueError if data or checkpoint are missing, or do not fit.
    """
    saved = {**interval.segment.config, RECORD: run.saved.get(RECORD, {})}
    config = Config.from_dict({name: value for name, value in saved.items() if name != RECORD})
    if interval.segment.is_exact:
        devices = min(config.virtual_shards, jax.device_count())
        config = dataclasses.replace(config, n_devices=devices, fsdp_devices=0)
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="roxxel-audit-")))
        data = held.enter_context(open_data(run.folder, saved, None, config))
        components = build_components(config, data, begun_with=kernel_begun_with(saved))
        if interval.start:
            held.enter_context(run.fetch_checkpoints(interval.start))
            _link_checkpoint(run, interval, folder)
        else:
            _check_plan(run, interval)
        logged = {step for step in run.rows if interval.start < step <= last}
        validated = {step for step in logged if run.rows[step].get("val_loss") is not None}
        options = dataclasses.replace(
            components.options,
            max_steps=last,
            patience=0,
            export_weights=False,
            profile_steps=None,
            log_every=_every(logged, last),
            eval_every=_every(validated, last),
            checkpoint_every=NEVER,
            memory_checkpoint_every=0,
            max_to_keep=1,
            keep_every=None,
            keep_steps=[step for step in run.steps if interval.start < step <= last],
            on_bad_step="raise" if components.options.on_bad_step == "rewind" else components.options.on_bad_step,
        )
        parts = Parts(
            components.build,
            components.optimizer,
            components.curriculum,
            components.loss,
            folder,
            validation=components.validation,
            mesh=components.mesh(),
            grad_accum=components.grad_accum,
            logger=watch,
            options=options,
        )
        loop = Loop.open(parts)
        held.callback(loop.close)
        yield components, loop


def replay(run: RunRecord, interval: Interval, advance: Callable[[int], None] = lambda more: None) -> Finding:
    """Replay the steps of an interval, and compare; `advance` is called with the number of new steps.

    Raises ValueError as `loop_of`.
    """
    watch = Watch(run, interval, advance)
    problem, reached = "", interval.last
    with loop_of(run, interval, watch, last=interval.last) as (_, loop):
        try:
            loop.run()
        except Differs as difference:
            problem, reached = str(difference), watch.step - 1  # the checkpoint of a step comes after its row
        except BadStep as bad:
            problem, reached = f"step {bad.step} differs: it went well in the run, and here not ({bad})", bad.step - 1
        store = loop.held.store
        store.settle()
        steps = [step for step in store.steps() if interval.first <= step <= reached and step in run.steps]
        steps = [step for step in steps if run.has_checkpoint(step)]
        for number, step in enumerate(steps):
            if wrong := first_difference(run, step, store):
                reached, problem, steps = step, f"the checkpoint of step {step} differs: {wrong}", steps[: number + 1]
                break
    rows = sum(step <= reached for step in watch.compared)
    return Finding(steps=reached - interval.first + 1, rows=rows, checkpoints=len(steps), problem=problem)


class Watch:
    """A tracker, in place of the console, that compares the rows of a replay with those of the run."""

    durable = True

    def __init__(self, run: RunRecord, interval: Interval, advance: Callable[[int], None]) -> None:
        self._run, self._interval, self._advance = run, interval, advance
        self._with_digest = interval.digests(run)
        self._digest = ""
        self.step: int = interval.start
        """The step of the last row."""
        self.compared: list[int] = []
        """The steps of the rows that were compared."""

    def tracker(self, total_steps: int, restored_step: int) -> "Watch":
        """Returns itself: the watch is the tracker."""
        return self

    def digest(self, text: str) -> None:
        """Take the digest of the next row."""
        self._digest = text

    def row(self, row: Mapping[str, Any]) -> None:
        """Compare a row. Raises Differs."""
        before, step = self.step, int(row["step"])
        self.step = step
        self._advance(step - before)
        theirs = self._run.rows.get(step)
        if theirs is None or step < self._interval.first:
            return
        mine = {name: value if math.isfinite(value) else None for name, value in row.items()} | {DIGEST: self._digest}
        validated = (name for name in theirs if name.startswith(("val_loss/", "val_bpb")))
        scalars = (name for name in theirs if name.startswith("val_") and name in mine)  # not those of an eval_fn
        names = [*dict.fromkeys((*LOSSES, *validated, *scalars))]
        names += [DIGEST] if self._with_digest else []
        other = [name for name in names if name in theirs and theirs[name] != mine.get(name)]
        if other:
            raise Differs(_in_words(step, max(self.compared, default=self._interval.first - 1), other, theirs, mine))
        self.compared.append(step)

    def text(self, text: str) -> None:
        """Does nothing: the run has already logged it."""

    def close(self) -> None:
        """Does nothing."""


def _in_words(step: int, equal: int, other: list[str], theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """A message about the differences in the row of a step, after equal rows up to `equal`."""
    values = ", ".join(f"{name} {theirs[name]} in the log, {mine.get(name)} here" for name in other[:3])
    text = f"step {step} differs ({values})"
    if DIGEST not in other and DIGEST in theirs and mine[DIGEST] == theirs[DIGEST] and "train_loss" in other:
        return f"{text}: its loss and its digest disagree, so the log was changed after the step"
    if DIGEST in other and "train_loss" not in other:
        between = f"one of the steps {equal + 1} to {step}" if equal + 1 < step else "it"
        return (
            f"{text}: its loss and its digest disagree; {between} read other rows or had another loss, or the log was "
            f"changed after the step"
        )
    return text


def first_difference(run: RunRecord, step: int, mine: CheckpointReader) -> str:
    """The first array of a checkpoint whose content differs, parameters first; empty if none does.

    An array that the run kept in other slices is read, and compared slice by slice.
    """
    theirs, folder = run.checkpoint(step)[1], mine.folder / str(step)
    table = DigestTable.read(folder / TABLE)
    names = [name for name in {**theirs.blocks, **table.blocks} if not name.startswith(FORGOTTEN)]
    for name in sorted(names, key=lambda name: (not name.startswith("params/"), name)):
        here, there = ({block.bounds: block.digest for block in each.blocks.get(name, ())} for each in (table, theirs))
        if here == there:
            continue
        if not here or not there or here.keys() == there.keys():
            return name
        array = read_named(folder, [name])[name]
        whole = tuple((0, size) for size in array.shape)
        if theirs.check_array(name, {whole: lambda array=array: array}):
            return name
    return ""


def _every(steps: set[int], last: int) -> int:
    """The interval that includes all of these steps; the first and the last step are always included."""
    return math.gcd(*(steps - {1, last})) or NEVER


def _link_checkpoint(run: RunRecord, interval: Interval, folder: Path) -> None:
    """Link the files of the start's checkpoint into the replay, with the plan of later checkpoints."""
    source, target = run.folder / CHECKPOINTS / str(interval.start), folder / CHECKPOINTS / str(interval.start)
    for path in (source, *(Path(parent, name) for parent, names, _ in os.walk(source) for name in names)):
        (target / path.relative_to(source)).mkdir(parents=True)
    for path in (Path(parent, name) for parent, _, names in os.walk(source) for name in names):
        copy = path.name in (META, TABLE) and path.parent == source  # these are written again
        name = target / path.relative_to(source)
        shutil.copyfile(path, name) if copy else name.symlink_to(path.absolute())
    later = [step for step in run.steps if step >= interval.start and step <= _end(run, interval)]
    metadata, newest = run.checkpoint(interval.start)[0], run.checkpoint(max(later))[0]
    plan = {**newest.plan, "step": interval.start}
    changed = dataclasses.replace(
        metadata,
        plan=plan,
        corpus=newest.corpus,
        curriculum=newest.curriculum,
        virtual_shards=None,  # the steps after it may have been amended; an audit compares what decides their bits
        grad_accum=None,
    )
    store = CheckpointStore(folder / CHECKPOINTS)
    store.delete_later(interval.start, changed.to_dict())
    store.close()


def _end(run: RunRecord, interval: Interval) -> int:
    """The last step with the same settings as the interval."""
    return min((s.start for s in run.segments() if s.start > interval.segment.start), default=NEVER)


def _check_plan(run: RunRecord, interval: Interval) -> None:
    """Raises ValueError if rows were skipped since the beginning, because only a checkpoint has such a plan."""
    later = [step for step in run.steps if step <= _end(run, interval)]
    plan = Plan.from_state(run.checkpoint(max(later))[0].plan) if later else None
    changed = [amendment.from_step for amendment in plan.amendments[1:]] if plan else []
    if changed and min(changed) < interval.last:
        raise UserError(
            f"what {run.name} reads was changed after step {min(changed)}, and it has no checkpoint before step "
            f"{interval.first}: audit the steps up to {min(changed)}, or those after a kept checkpoint"
        )


SHOWN = 12
"""Token ids per row in the table."""


def dump(run: RunRecord, interval: Interval, folder: str | Path) -> str:
    """Write step `interval.last` of a run as `step-N.npz` and a table `step-N.txt` into a folder; returns the table.

    The state before the step equals that of the run bit for bit; the step itself is computed on one device, as one
    batch, without gradient accumulation. The arrays are "tokens" int32[B, L], "dataset" int32[B], "offset" int64[B],
    "loss" float32[], and "grad_norm/<parameter>" float32[].

    Raises ValueError as `loop_of`, and if the folder cannot be written.
    """
    step = interval.last
    with loop_of(run, interval, Watch(run, interval, lambda more: None), last=step) as (components, loop):
        if step - 1 > interval.start:
            loop.position.last_step = step - 1
            loop.run()
        steps, plan = loop.position.steps, loop.position.plan
        params, rest, hparams = loop.state.local_leaves(loop.state.params)
        rows = plan.rows(step - 1)
        batch = Stream(plan, components.curriculum.datasets, None, step - 1).batch(step - 1)
        loss, grads = steps.gradient(params, rest, hparams, batch)
    norms = {name: np.asarray(jnp.linalg.norm(jnp.float32(grad).reshape(-1))) for name, grad in grads.items()}
    tokens = np.asarray(jax.tree.leaves(batch)[0])
    arrays = {"tokens": tokens, "dataset": rows.dataset, "offset": rows.offset, "loss": np.asarray(loss)}
    logged = run.rows.get(step, {}).get("train_loss", "not logged")
    total = float(np.sqrt(sum(norm.astype(np.float64) ** 2 for norm in norms.values())))
    table = [["parameter", "gradient norm"], *([name, f"{norm:.6g}"] for name, norm in norms.items())]
    head = [f"step {step} of {run.name}: loss {float(loss)!r} (in the log {logged}), gradient norm {total:.6g}"]
    for row, (number, first) in enumerate(zip(rows.dataset.tolist(), rows.offset.tolist(), strict=True)):
        ids = " ".join(map(str, tokens[row, :SHOWN].tolist()))
        head.append(f"row {row}: {plan.datasets[number]} token {first:,}: {ids} …")
    text = "\n".join([*head, *aligned([*table, ["all", f"{total:.6g}"]])])
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {**arrays, **{f"grad_norm/{name}": norm for name, norm in norms.items()}}
        np.savez(Path(folder, f"step-{step}.npz"), **arrays)
        Path(folder, f"step-{step}.txt").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"dump is {folder}, which cannot be written ({error.strerror}): name another folder") from error
    return text
