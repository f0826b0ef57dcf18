"""The contents of a frame, as plain values for JSON."""

import dataclasses
from typing import Any

from roxxel_dist.sweep.report.text import as_json
from roxxel_dist.utils.display import plain
from roxxel_dist.view.items import State
from roxxel_dist.view.job import JobState
from roxxel_dist.view.run import RunState


def values(state: State) -> dict[str, Any]:
    """The numbers of a frame; values that are not finite become None."""
    if isinstance(state, RunState):
        more: dict[str, Any] = {name: getattr(state, name) for name in ("left_s", "goodput", "curves")}
        more |= {"phase": state.phase + 1 if state.phases else None}
        values = dataclasses.asdict(dataclasses.replace(state, buckets={})) | more
        del values["buckets"]  # the curves say what they are
        return {"kind": "run", **plain(values)}
    if isinstance(state, JobState):
        return {"kind": "job", **plain(dataclasses.asdict(state))}
    more = {name: getattr(state, name) for name in ("state", "workers", "began", "left_s", "steps_left")}
    return {"kind": "study", **plain({"path": state.study.place, **as_json(state.study), **more})}
