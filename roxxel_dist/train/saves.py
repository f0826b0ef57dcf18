"""After which steps the state of a run is saved or copied in memory, and whether it stops."""

from roxxel_dist.checkpoint.memory import MemoryTier
from roxxel_dist.model.split import has_random_streams_alone
from roxxel_dist.train.agreement import StepAgreement
from roxxel_dist.train.position import Position
from roxxel_dist.train.resources import Resources
from roxxel_dist.train.writer import CheckpointManager


class Saves:
    """Saves and copies the state of a run where it is due, or asked for. All ranks make the same calls.

    Attributes:
        stopped: whether the run was asked to stop before its end; that step is saved.
        checkpoints: writes the checkpoints of the run.
        agreement: what rank 0 announces for a step.
        memory: the copies in memory; None: there are none.
    """

    def __init__(self, held: Resources, position: Position) -> None:
        options = position.parts.options
        self._held, self._position, self._options = held, position, options
        self.stopped: bool = False
        self.memory: MemoryTier | None = held.memory
        self.checkpoints: CheckpointManager = CheckpointManager(
            held.folder,
            held.store,
            position.last_step,
            held.log.text,
            export=options.export_weights,
            with_state=not has_random_streams_alone(position.split),
        )
        self.agreement: StepAgreement = StepAgreement(self.checkpoints.requests, self.memory)
        self._needed = False  # whether the last save must be on disk, whatever copies there are in memory

    def due(self, done: int) -> tuple[bool, bool]:
        """Whether to save a checkpoint after a step, as it is due or asked for; whether to copy the state in memory."""
        last_step, announced = self._position.last_step, self.agreement.after(done)
        self.stopped = announced.stop and done < last_step
        save = announced.save or self.stopped or self._options.is_due("checkpoint", done, last_step)
        copy = self.memory is not None and self.memory.accept(announced.copy)
        return save, copy and done < last_step

    def idle_since(self) -> float:
        """The time on the clock of the copies in memory."""
        return self.memory.clock() if self.memory is not None else 0.0

    def keep(self, done: int, val_loss: float | None, idle_since: float, *, save: bool, copy: bool) -> None:
        """Save and copy the state after a step; the devices have waited since `idle_since`."""
        if save:
            self._held.progress.say("save")
            self.save(done, val_loss)
        if self.memory is not None and copy:  # behind the save: the copy says what is on its way to the disk
            pending = self._held.store.pending_step if self._needed else None
            metadata = self._position.checkpoint_metadata(done).to_dict()
            self.memory.save(done, self._position.state, metadata, pending, idle_since)

    def save(self, done: int, val_loss: float | None = None) -> None:
        """Begin to save a checkpoint; raises SaveError where it is the first one and fails."""
        options, position = self._options, self._position
        forever = done in (options.keep_steps or ()) or (options.keep_every and done % options.keep_every == 0)
        self._needed = bool(forever or val_loss is not None or options.on_bad_step == "rewind")
        self.checkpoints.save(done, position.state, position.checkpoint_metadata(done), val_loss)
