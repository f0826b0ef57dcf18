"""The format of a file by its first bytes, whatever its name: formats that hold no plain tokens."""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from roxxel_dist.process.exit_codes import UserError

HEAD_BYTES = 4096
UNPACK = "unpack it first, and name the file that comes out"
SAVE = "load it with the program that wrote it, and save the ids: numpy.save('tokens.npy', ids)"
TEXT = "if it is text, name it .txt or .jsonl, so that `roxxel-dist data build` tokenizes it"
AGAIN = "name the file of tokens"
GET = "get the file itself"
MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x93NUMPY", "a NumPy array", "name it .npy"),
    (b"PK\x03\x04", "a zip archive, such as .npz or a file of torch.save", SAVE),
    (b"PK\x05\x06", "an empty zip archive", AGAIN),
    (b"\x1f\x8b\x08", "compressed with gzip", f"{UNPACK}: gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", f"{UNPACK}: unzstd"),
    (b"\xfd7zXZ\x00", "compressed with xz", f"{UNPACK}: unxz"),
    (b"BZh", "compressed with bzip2", f"{UNPACK}: bunzip2"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", f"{UNPACK}: unlz4"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"PAR1", "a Parquet file", "name it .parquet, if a column of it is text, or save its ids with numpy.save"),
    (b"ARROW1\x00\x00", "an Arrow file", SAVE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", SAVE),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9", "a file of torch.save", SAVE),
    (b"GGUF", "a GGUF file of weights", AGAIN),
    (b"MMIDIDX\x00\x00", "the index of a Megatron pair", "name it .idx, beside the .bin of the same name"),
    (b"TNTIDX\x00\x00", "an index of an old Megatron pair", "write the pair again with Megatron's preprocess_data.py"),
    (b"ROXXEL", "a part of a .rox file", AGAIN),
    (b"\x7fELF", "a program or a library", AGAIN),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", AGAIN),
    (b"\xff\xd8\xff", "a JPEG picture", AGAIN),
    (b"GIF8", "a GIF picture", AGAIN),
    (b"%PDF-", "a PDF document", AGAIN),
    (b"SQLite format 3\x00", "an SQLite database", SAVE),
    (b"version https://git-lfs.github.com/", "a pointer of Git LFS, not the file", f"{GET}: git lfs pull"),
    (b"/annex/objects/", "a pointer of git-annex, not the file", f"{GET}: git annex get"),
    *(
        (struct.pack("<i", number), f"a file of llm.c with {what}", AGAIN)
        for number, what in (
            (20240326, "weights"),
            (20240327, "a debug state"),
            (20240328, "a tokenizer"),
            (20240522, "an evaluation"),
            (20240527, "the state of a training"),
        )
    ),
)
"""(first bytes, what the file is, the fix)."""
MIN_TEXT = 64


CHECKS: dict[bytes, Callable[[bytes], bool]] = {
    b"\x1f\x8b\x08": lambda head: head[3] < 0x20,  # gzip: five flags are defined
    b"BZh": lambda head: head[3:4].isdigit() and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"),
    b"\xff\xd8\xff": lambda head: head[3] >= 0xC0,  # JPEG
}
"""More tests of formats whose magic numbers are short enough for a chance match."""


def known_format(head: bytes, size: int) -> tuple[str, str] | None:
    """(what a file of `size` bytes is, the fix) by its first `HEAD_BYTES` bytes; None if they may be tokens."""
    for magic, what, fix in MAGICS:
        if head.startswith(magic) and (size <= len(magic) or CHECKS.get(magic, lambda head: True)(head)):
            return what, fix
    if len(head) >= 16 and (what := _by_structure(head, size)) is not None:
        return what, AGAIN if "weights" in what else SAVE
    return ("a tar archive", UNPACK) if head[257:262] == b"ustar" else None


def _by_structure(head: bytes, size: int) -> str | None:
    """What a file without a long magic number is, by the lengths that its first bytes give."""
    length = int.from_bytes(head[:8], "little")  # safetensors: the bytes of a JSON object, and the object
    if 2 <= length <= size - 8 and re.match(rb'\{\s*("|\})', head[8:]):
        return "a safetensors file of weights"
    frame = int.from_bytes(head[3:11], "little")
    is_framed = head[:1] == b"\x80" and head[1] in (4, 5) and head[2:3] == b"\x95" and frame <= size
    if is_framed or re.match(rb"\x80[\x02\x03]([}\]]q\x00|c[a-z_.]+\n)", head):
        return "a Python pickle"
    mark, length = struct.unpack_from("<Ii", head)  # an Arrow stream: ffffffff, the bytes of a flat buffer
    if mark == 0xFFFFFFFF and 0 < length <= min(size, 1 << 24) and length % 8 == 0 and 4 <= head[8] <= 64:
        return "an Arrow stream"
    return None


def is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 text: printable characters, and line ends."""
    if len(head) < MIN_TEXT:
        return False
    try:
        text = head[:-3].decode()  # the last character may be cut
    except UnicodeDecodeError as error:
        if error.end < len(head) - 6:
            return False
        text = head[: error.start].decode()
    return len(set(text)) > 4 and all(character.isprintable() or character in "\n\r\t\f" for character in text)


def refuse_known(path: Path, data: memoryview, *, text: bool = True) -> None:
    """Raises UserError, with the format and the fix, for the bytes of a file that hold no plain tokens; nor `text`."""
    head = bytes(data[:HEAD_BYTES])
    found = known_format(head, len(data))
    if found is None and text and is_text(head):
        found = "text", TEXT
    if found is not None:
        what, fix = found
        raise UserError(f"{path}: the file is {what} (by its first bytes), and is not read as tokens: {fix}")


def wider_dtype(tokens: np.ndarray) -> str | None:
    """The dtype that a file really has, if its tokens, read as uint16, can only be the parts of wider numbers.

    Ids of a vocabulary below 2^20 that are saved in 32 bits are pairs of uint16, of which each second one is below 16;
    in 64 bits the third and the fourth are 0. A text in uint16 is never like that. `tokens` are uint16 [tokens] of an
    even number of bytes, beginning at a multiple of 8 bytes.
    """
    rows = tokens[: len(tokens) // 4 * 4].reshape(-1, 4)
    if len(rows) < 8 or len(np.unique(rows[:, 0])) < 5 or (rows[:, 1] >= 16).any():
        return None
    if not rows[:, 2:].any():
        return "uint64"
    return "uint32" if (rows[:, 3] < 16).all() and len(np.unique(rows[:, 2])) >= 5 else None
