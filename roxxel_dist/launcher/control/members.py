"""Hangs, where every host has a launcher of its own (`launch member`): what each must know of the ranks of the others.

Each launcher sees the ranks of its own host. Soon after one hangs none of them moves, wherever the culprit is: a
launcher that finds a hang writes what it sees beside the logs, which hosts share, waits a moment, and reads what the
others wrote. Each attempt has a folder for it: there is one file a launcher, and each lists them once.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.process.durable import write_file

FOUND = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)\.json")
"""The names of their files say what is compared: member, step, rank, and how many ranks are tied."""


class MemberHangs:
    """The hangs of one attempt, by the launchers of all hosts of a job.

    Args:
        job: its `first_rank` names the file of this launcher.
        attempt: its number.
    """

    def __init__(self, job: JobSpec, attempt: int) -> None:
        self._folder, self._member = job.log_dir / f".hangs-{attempt}", job.first_rank
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier job here, whose attempts had the same numbers

    def _path(self, member: int, step: int, rank: int, tied: int) -> Path:
        return self._folder / f"{member}-{step}-{rank}-{tied}.json"

    def write(self, hang: Hang, host: str) -> None:
        """Say to the others what this launcher sees."""
        path = self._path(self._member, hang.step, hang.rank, hang.tied)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps({**asdict(hang), "host": host}), sync=False)

    def first(self, hang: Hang, host: str) -> tuple[Hang, str]:
        """(the hang that all wait for, its host): that of the rank which has entered the fewest steps."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._folder)
        found = [tuple(map(int, match.groups())) for match in map(FOUND.fullmatch, names) if match]
        others = [(step, rank, tied, member) for member, step, rank, tied in found if member != self._member]
        for step, rank, tied, member in sorted(one for one in others if one[0] < hang.step):
            if (behind := _read(self._path(member, step, rank, tied))) is not None:
                return behind
        beside = sum(tied for step, _, tied, _ in others if step == hang.step)
        return replace(hang, tied=hang.tied + beside, alone=not others), host


def _read(path: Path) -> tuple[Hang, str] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        host = str(values.pop("host"))
        return Hang(**values), host
    except (OSError, ValueError, TypeError, KeyError):
        return None
