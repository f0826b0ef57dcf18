"""What a W&B client writes beside a run, offline or online (`run-ID.wandb`), read while it is written.

The file is a log as LevelDB has it: blocks of 32 KiB, in them pieces with a header of 7 bytes (checksum, length, kind),
where a record may be several pieces. A record is a protocol buffer of the client's own schema. The client writes what
it has every second (`process.prompt_reports`; by itself every 15 s), and at the end.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError

HEAD = b":W&B"
HEAD_SIZE, BLOCK = 7, 1 << 15
PIECE = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbFile:
    """Follows one file.

    Attributes:
        run_id: of the run; None until the client has written it.
        config: of the run as it began, with the entries that begin with `_`.
        summary: of the run, as it stands.
        exit_code: of the program, once the client has written it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, HEAD_SIZE
        self._step = -1
        self.run_id: str | None = None
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(step, what was logged) of all that has come since the last call; the run's id and config come before these.

        Raises:
            ValueError: this is no such file, or a damaged one.
        """
        from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

        for data in self._records():
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = flattened(record.history.item)
                self._step = int(row.get("_step", max(record.history.step.num, self._step)))
                yield self._step, row
            elif kind == "run" and self.run_id is None:
                self.run_id, self.config = record.run.run_id, flattened(record.run.config.update)
            elif kind == "summary":
                self.summary |= flattened(record.summary.update)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def _records(self) -> Iterator[bytes]:
        """The records that are complete; the position is kept behind the last one that was taken."""
        with self._path.open("rb") as file:
            head = file.read(HEAD_SIZE)
            if not HEAD.startswith(head[:4]):
                raise UserError(f"{self._path} is no file of a W&B client")
            record, position = b"", self._position
            while True:
                left = BLOCK - position % BLOCK
                position += left if left < PIECE.size else 0
                file.seek(position)
                header = file.read(PIECE.size)
                if len(header) < PIECE.size:
                    return
                _, length, kind = PIECE.unpack(header)
                if (length, kind) == (0, 0):
                    return  # zeros: what was written there cannot be seen from this host yet
                piece = file.read(length)
                if len(piece) < length:
                    return
                if kind not in (FULL, FIRST, MIDDLE, LAST):
                    raise UserError(f"{self._path} is damaged at byte {position:,}")
                position += PIECE.size + length
                record = piece if kind in (FULL, FIRST) else record + piece
                if kind in (FULL, LAST):
                    self._position = position
                    yield record


def flattened(items: Any) -> dict[str, Any]:
    """Names and values of a record's items; what is nested has names with points between, and its own name too."""
    values: dict[str, Any] = {}
    for item in items:
        try:
            value = json.loads(item.value_json)  # NaN and Infinity as Python has them
        except ValueError:
            continue  # a picture, a table
        _put(values, item.key or ".".join(item.nested_key), value)
    return values


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    values[name] = value
    for key, nested in value.items() if isinstance(value, dict) else ():
        _put(values, f"{name}.{key}", nested)
