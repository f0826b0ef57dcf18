"""What a run holds on this process until it ends: its folder, its checkpoints, the compiler, the log."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.generations import run_identity
from roxxel_dist.checkpoint.memory import MemoryTier, open_memory
from roxxel_dist.checkpoint.metadata import CURSOR, read_cursor, write_cursor
from roxxel_dist.checkpoint.reader import DamagedCheckpoint
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cluster.distributed import broadcast_from_primary, is_primary, process_index
from roxxel_dist.place.directory import check_run_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import hold_folder
from roxxel_dist.process.progress import Progress
from roxxel_dist.train.log.base import CRASH_LIMIT_S, LogQueue
from roxxel_dist.train.log.timeline import Timeline
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.resume import run_fingerprint
from roxxel_dist.train.step.compile import AotCompiler


@dataclass(frozen=True)
class Resources:
    """The resources of a run on this process. `open` takes all of them, `close` gives them back."""

    folder: Path
    """The run directory; rank 0 holds its lock."""
    progress: Progress
    """Says to the launcher what this process does."""
    timeline: Timeline
    log: LogQueue
    """Keeps lines until the run opens it."""
    store: CheckpointStore
    memory: MemoryTier | None
    """The copies in memory, where the job has a place for them."""
    compiler: AotCompiler
    release_folder: Callable[[], None]
    discard: Callable[[], None]
    """Instead of `close`, for a run that could not begin: the store of a given checkpointer stays open."""

    @classmethod
    def open(cls, parts: Parts) -> "Resources":
        """Take what the run needs; writes nothing. All ranks call it together. Raises UserError, on every rank, where
        another process trains in the folder, or it is no place for a run."""
        progress = Progress.from_env(process_index())
        timeline = Timeline(None if process_index() else parts.folder, progress)
        log = LogQueue()
        with contextlib.ExitStack() as undo:
            release_folder = _lock_folder(parts.folder)
            undo.callback(release_folder)
            store = _open_store(parts)
            if parts.checkpointer is None:
                undo.callback(store.close)
            compiler = AotCompiler(parts.mesh)
            undo.callback(compiler.close)
            memory = _open_memory(parts, log)
            if memory is not None:
                undo.callback(memory.close)
            held = parts.folder, progress, timeline, log, store, memory, compiler
            return cls(*held, release_folder, discard=undo.pop_all().close)

    def set_aside(self, damage: DamagedCheckpoint) -> None:
        """Take a damaged checkpoint of the run, not of another one, out of the way of the next older complete one."""
        if damage.folder != self.store.folder:
            raise damage
        self.log.text(self.store.set_aside(damage))
        if is_primary() and (cursor := read_cursor(self.folder)):  # a run that was finished is so no longer
            write_cursor(self.folder, self.store.latest_step() or 0, cursor.get("last_step", 0), finished=False)

    def check_nothing_saved_after(self, step: int) -> None:
        """Check a run without checkpoints that begins at a step: its log would begin anew where they are only away.

        Raises UserError, on every rank, where it has saved a later step.
        """
        saved = read_cursor(self.folder).get("step", 0) if is_primary() else 0
        if (saved := int(broadcast_from_primary("saved step", str(saved)))) > step:
            raise UserError(
                f"{self.store.folder} has no checkpoint, and {self.folder / CURSOR} says that step {saved} was saved: "
                f"put the checkpoints back (a disk may not be mounted), or begin a new run in another folder"
            )

    def close(self, *, failed: bool) -> None:
        """Give all of it back. After a failure, wait for a save under way for at most `CRASH_LIMIT_S`."""
        self.log.close()
        self.store.close(CRASH_LIMIT_S if failed else None)
        if self.memory is not None:
            self.memory.close(CRASH_LIMIT_S if failed else None)
        self.compiler.close()
        self.release_folder()


def _lock_folder(run: Path) -> Callable[[], None]:
    """Lock a run directory on rank 0 for all ranks; returns the function that releases it.

    Raises ValueError, on every rank, where another process trains in it, it cannot be written, or it has files that no
    run made and a run would replace.
    """
    release, problem = lambda: None, ""
    if is_primary():
        try:
            check_run_folder(run)
            release = hold_folder(run, "training in")
        except UserError as error:
            problem = str(error)
    if problem := broadcast_from_primary("run directory is free", problem):
        raise UserError(problem)
    return release


def _open_store(parts: Parts) -> CheckpointStore:
    """The run's checkpoints, or those of a given checkpointer, of which this process becomes the writer."""
    options = parts.options
    if parts.checkpointer is not None:
        parts.checkpointer.store.begin_writing()
        return parts.checkpointer.store
    return CheckpointStore(
        parts.folder / files.CHECKPOINTS,
        options.max_to_keep,
        keep_every=options.keep_every,
        keep_steps=options.keep_steps,
        remote=None if parts.bucket is None else parts.bucket.checkpoints,
    )


def _open_memory(parts: Parts, log: LogQueue) -> MemoryTier | None:
    options, run = parts.options, parts.folder
    made_with = run_fingerprint(parts.training, options.seed), options.seed, options.fsdp, options.use_bf16
    return open_memory(
        run_identity(run.absolute() if parts.bucket is None else parts.bucket, parts.mesh, made_with),
        every=options.memory_checkpoint_every,
        replicas=options.memory_replicas,
        log=log.text,
        rows=[run / name for name in ("training_log.csv", "metrics.jsonl")],
    )
