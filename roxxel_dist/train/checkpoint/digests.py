"""Digests of arrays and files: what a checkpoint proves itself by."""

from typing import Any

import numpy as np
import xxhash


def digest(data: Any) -> str:
    """The xxh3-128 of a buffer, or of an array's elements in C order, as 32 hexadecimal digits.

    Raises BufferError for what is neither.
    """
    if isinstance(data, np.ndarray):  # bfloat16 offers no buffer of its own
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_hexdigest(data)
