"""Where every host has a launcher of its own (`launch member`): what each must know of the ranks of the others.

Each launcher sees the ranks of its own host. Soon after one hangs none of them moves, wherever the culprit is: a
launcher that finds a hang writes what it sees beside the logs, which hosts share, waits a moment, and reads what the
others wrote.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.process.durable import write_file

FOUND = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)\.json")
"""The names of their files say what is compared: each of many launchers lists a folder, and reads one file at most."""


class MemberHangs:
    """The hangs of one attempt, by the launchers of all hosts of a job.

    Args:
        job: its `first_rank` names the files of this launcher.
        attempt: its number; each attempt has files of its own.
    """

    def __init__(self, job: JobSpec, attempt: int) -> None:
        self._folder = job.log_dir
        self._prefix, self._member = f".hang-{attempt}-", job.first_rank
        self._clear()

    def _clear(self) -> None:
        """Take back what this launcher has told."""
        with suppress(OSError):
            for path in self._folder.glob(f"{self._prefix}{self._member}-*.json"):
                path.unlink()

    def write(self, hang: Hang, host: str) -> None:
        """Tell the others what this launcher sees."""
        self._clear()
        name = f"{self._prefix}{self._member}-{hang.step}-{hang.rank}-{hang.tied}.json"
        _write(self._folder / name, {**asdict(hang), "host": host})

    def first(self, hang: Hang, host: str) -> tuple[Hang, str]:
        """(the hang that all wait for, its host): that of the rank which has entered the fewest steps."""
        found = [
            FOUND.fullmatch(path.name.removeprefix(self._prefix)) for path in self._folder.glob(f"{self._prefix}*")
        ]
        seen = [tuple(map(int, match.groups())) for match in found if match]  # member, step, rank, how many are tied
        others = [(step, rank, tied, member) for member, step, rank, tied in seen if member != self._member]
        for step, rank, tied, member in sorted(one for one in others if one[0] < hang.step):
            if (behind := _read(self._folder / f"{self._prefix}{member}-{step}-{rank}-{tied}.json")) is not None:
                return behind
        beside = sum(tied for step, _, tied, _ in others if step == hang.step)
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
