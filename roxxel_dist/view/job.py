"""A job from its launcher's record, with the last lines of its logs."""

import os
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.view.run import RankRates, RankState

TAIL_BYTES, TAIL_LINES = 16 << 10, 12


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job at one moment."""

    record: JobRecord
    ranks: tuple[RankState, ...]
    lines: tuple[str, ...]
    """The last lines of rank 0, or of the launcher if rank 0 has none."""


class JobReader:
    """Reads one job; call `read` for each update."""

    def __init__(self, record: JobRecord) -> None:
        self.record: JobRecord = record
        self._rates = RankRates()

    def read(self) -> JobState:
        """The current state of the job."""
        self.record = self.record.now()
        logs = (Path(self.record.log_dir, "rank-0.log"), self.record.launcher_log)
        lines = next((lines for log in logs if (lines := last_lines(log))), ())
        return JobState(record=self.record, ranks=self._rates.read(self.record), lines=lines)


def last_lines(log: Path, count: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with log.open("rb", buffering=0) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return tuple(file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-count:])
    except OSError:
        return ()
