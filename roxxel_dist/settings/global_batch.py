"""`batch_size` of a config file: the rows of the global batch, also where an older version wrote the file.

Without `phases`, `batch_size` once was the rows of a micro-batch, and a step trained on batch_size x grad_accum rows.
"""

from collections.abc import Mapping
from typing import Any

MEANING, GLOBAL = "batch_size", "global batch"
"""Key and value of a record that state the meaning of `batch_size` in the config beside it."""


def with_global_batch(values: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the fields of a saved config, its record): with the rows of the global batch, those of each resume too.

    The record of an older version does not state the meaning; here it still does not, until the config is saved again.
    """
    fields, record = dict(values), dict(record)
    if record.get(MEANING) == GLOBAL:
        return fields, record
    after, resumes = fields, list[dict[str, Any]]()
    fields = _multiplied(fields)
    for resume in reversed(record.get("resumes", [])):  # each has the values from before it
        changes = resume.get("changed_from", {})
        before = {**after, **changes}
        rows_before, rows_after = _multiplied(before).get("batch_size"), _multiplied(after).get("batch_size")
        changes = {name: value for name, value in changes.items() if name != "batch_size"}
        changes |= {"batch_size": rows_before} if rows_before != rows_after else {}
        resumes.insert(0, {**resume, "changed_from": changes} if "changed_from" in resume else resume)
        after = before
    return fields, {**record, "resumes": resumes} if resumes else record


def predates(record: Mapping[str, Any] | None) -> bool:
    """Whether an older version wrote the config that has this record; False without a record."""
    return record is not None and record.get(MEANING) != GLOBAL


def micro_batch_note(*, batch_size: int, grad_accum: int) -> str:
    """A line for a new run without phases: both meanings of its `batch_size`, and how to get the older one."""
    return (
        f"batch_size is {batch_size}, the rows of the global batch, in {min(grad_accum, batch_size)} micro-batches "
        f"(grad_accum); an earlier version trained on {batch_size} x {grad_accum} rows in a step: for that, use "
        f"batch_size {batch_size * grad_accum}"
    )


def _multiplied(values: Mapping[str, Any]) -> dict[str, Any]:
    rows, count = values.get("batch_size"), values.get("grad_accum", 1)
    if values.get("phases") or not (isinstance(rows, int) and isinstance(count, int)):
        return dict(values)
    return {**values, "batch_size": rows * count}
