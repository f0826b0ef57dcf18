"""Where every host has a launcher of its own (`launch member`): what each must know of the ranks of the others.

Each launcher sees the ranks of its own host. Soon after one hangs none of them moves, wherever the culprit is: a
launcher that finds a hang writes what it sees beside the logs, which hosts share, waits a moment, and reads what the
others wrote. In the same way it learns which sources the ranks of the first host run.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.hang import Hang
from roxxel_dist.launcher.policy.outcome import CodeDiffers

LOOK_S = 2.0
"""How often a launcher sends the others the sources that its ranks run, and looks at those of the first host."""


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


@dataclass(frozen=True)
class Imported:
    """A source as a rank imported it."""

    checksum: str
    rank: int
    host: str
    path: str

    def difference(self, first: "Imported") -> CodeDiffers:
        """That this rank runs another source than `first`."""
        text = f"rank {self.rank} on host {self.host} runs another {self.path} than rank {first.rank} on host "
        text += first.host + (f" ({first.path})" if first.path != self.path else "")
        return CodeDiffers(rank=self.rank, host=self.host, text=text)


class MemberSources:
    """The sources that the ranks of each host imported before their first step, in one attempt.

    The launcher of each host writes those of its own ranks, again and again while ranks start: a file that is there
    and does not change is of a launch before this one. It reads those of the first host alone, for hosts are many.

    Args:
        job: its `first_rank` names the file of this launcher; rank 0 is on the first host.
        attempt: its number; each attempt has files of its own.
    """

    def __init__(self, job: JobSpec, attempt: int) -> None:
        self._folder = job.log_dir
        self._pattern = f".code-{attempt}-*.json"
        self._own = job.log_dir / f".code-{attempt}-{job.first_rank}.json"
        self._first = job.log_dir / f".code-{attempt}-0.json"
        self._sources: dict[str, Imported] = {}
        self._next = 0.0
        self._beats = 0
        with suppress(OSError):
            self._own.unlink(missing_ok=True)
        self._old = {path: _beat(path) for path in self._folder.glob(self._pattern)}

    def add(self, name: str, source: Imported) -> None:
        """A source of a rank of this host."""
        self._sources[name] = source

    def check(self, now: float) -> CodeDiffers | None:
        """Tell the others, each `LOOK_S` seconds, and look at the first host; what differs there."""
        if now < self._next or not self._sources:  # of a program that is not Python nothing is known
            return None
        self._next = now + LOOK_S
        self._tell()
        return None if self._own == self._first else next(self._differences(self._first), None)

    def last_check(self) -> CodeDiffers | None:
        """At the end of an attempt that has failed: what differs from any other host, which may have ended by it."""
        if not self._sources:
            return None
        self._tell()
        found = (one for path in self._folder.glob(self._pattern) for one in self._differences(path))
        return next(found, None)

    def close(self) -> None:
        """Take away the file of this launcher."""
        with suppress(OSError):
            self._own.unlink(missing_ok=True)

    def _tell(self) -> None:
        self._beats += 1
        sources = {name: asdict(source) for name, source in self._sources.items()}
        _write(self._own, {"beat": f"{os.getpid()}.{self._beats}", "sources": sources})

    def _differences(self, path: Path) -> Iterator[CodeDiffers]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            values = json.loads(path.read_text(encoding="utf-8"))
            if path == self._own or self._old.get(path) == values["beat"]:
                return
            for name, found in values["sources"].items():
                theirs, mine = Imported(**found), self._sources.get(name)
                if mine is not None and mine.checksum != theirs.checksum:
                    yield theirs.difference(mine) if mine.rank < theirs.rank else mine.difference(theirs)


def _write(path: Path, values: dict[str, Any]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # it comes with the first line of a rank
        write_file(path, json.dumps(values), sync=False)


def _beat(path: Path) -> str | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return json.loads(path.read_text(encoding="utf-8"))["beat"]
    return None


def _read(path: Path) -> tuple[Hang, str] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        host = str(values.pop("host"))
        return Hang(**values), host
    except (OSError, ValueError, TypeError, KeyError):
        return None
