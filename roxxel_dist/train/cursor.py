"""`training_cursor.json`: how far a run is, for people and for programs that shall not read a checkpoint."""

import contextlib
import json
from pathlib import Path
from typing import Any

from roxxel_dist.data.commit import write_file

NAME = "training_cursor.json"


def write_cursor(run: Path, step: int, last_step: int, *, finished: bool) -> None:
    """Say, in one move, which step is saved and whether it was the last one; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        cursor = {"step": step, "last_step": last_step, "finished": finished}
        write_file(run / NAME, json.dumps(cursor) + "\n")


def read_cursor(run: Path) -> dict[str, Any]:
    """What was written last; empty where there is nothing that can be read."""
    try:
        found = json.loads((run / NAME).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
