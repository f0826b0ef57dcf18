"""Where every host has a launcher of its own (`launch member`): what each must know of the ranks of the others.

Each launcher sees the ranks of its own host. Soon after one hangs none of them moves, wherever the culprit is: a
launcher that finds a hang writes what it sees beside the logs, which hosts share, waits a moment, and reads what the
others wrote.
"""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.hang import Hang


class MemberHangs:
    """The hangs of one attempt, by the launchers of all hosts of a job.

    Args:
        job: its `first_rank` names the file of this launcher.
        attempt: its number; each attempt has files of its own.
    """

    def __init__(self, job: JobSpec, attempt: int) -> None:
        self._folder = job.log_dir
        self._pattern = f".hang-{attempt}-*.json"
        self._own = job.log_dir / f".hang-{attempt}-{job.first_rank}.json"
        with suppress(OSError):
            self._own.unlink(missing_ok=True)

    def write(self, hang: Hang, host: str) -> None:
        """Tell the others what this launcher sees."""
        _write(self._own, {**asdict(hang), "host": host})

    def first(self, hang: Hang, host: str) -> tuple[Hang, str]:
        """(the hang that all wait for, its host): that of the rank which has entered the fewest steps."""
        others = [found for path in self._folder.glob(self._pattern) if path != self._own and (found := _read(path))]
        behind = [found for found in others if found[0].step < hang.step]
        if behind:
            return min(behind, key=lambda found: (found[0].step, found[0].rank))
        beside = sum(found[0].tied for found in others if found[0].step == hang.step)
        return replace(hang, tied=hang.tied + beside, alone=not others), host


def _write(path: Path, values: dict[str, Any]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # it comes with the first line of a rank
        write_file(path, json.dumps(values), sync=False)


def _read(path: Path) -> tuple[Hang, str] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        host = str(values.pop("host"))
        return Hang(**values), host
    except (OSError, ValueError, TypeError, KeyError):
        return None
