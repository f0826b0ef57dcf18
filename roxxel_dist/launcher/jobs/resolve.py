"""Which job a person means."""

import difflib
import os
from collections.abc import Callable, Sequence

from roxxel_dist.launcher.jobs.record import Entry, path_of

MOST = 10


def find(name: str, among: Sequence[Entry]) -> Entry:
    """The job that a person means: a run id, the beginning of one, or a run directory (its newest job).

    Raises:
        ValueError: no job, or several; names the nearest one, or those that there are.
    """
    if not among:
        raise ValueError(f"there is no run {name!r}: no job of this user is known here")
    directory = os.path.realpath(name) if name else ""
    ways: list[Callable[[Entry], bool]] = [
        lambda entry: name in (entry.run_id, path_of(entry).stem),
        lambda entry: os.path.realpath(entry.run_dir) == directory,
        lambda entry: entry.run_id.startswith(name),
    ]
    for number, means in enumerate(ways):
        found = [entry for entry in among if name and means(entry)]
        if found and (number == 1 or len({(entry.run_id, entry.run_dir) for entry in found}) == 1):
            return found[-1]  # a SLURM job that was queued again has an entry a launch
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} runs are meant by {name!r}: say which, by its id or its run directory:{_list(found)}"
            )
        if found:
            return found[0]
    if not name:
        raise ValueError(f"say which run:{_list(among)}")
    near = difflib.get_close_matches(name, [entry.run_id for entry in among], n=1, cutoff=0.5)
    raise ValueError(
        f"there is no run {name!r}: " + (f"did you mean {near[0]}?" if near else f"they are{_list(among)}")
    )


def _list(among: Sequence[Entry]) -> str:
    lines = [f"\n  {entry.run_id}  {entry.state:<10}  {entry.run_dir}" for entry in reversed(among)]
    more = f"\n  and {len(lines) - MOST} more; `roxxel-dist ps --all` lists them" if len(lines) > MOST else ""
    return "".join(lines[:MOST]) + more
