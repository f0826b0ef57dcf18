"""A process of its own for `data.encode`: `python -m roxxel_dist.data.build.encode_worker WORDS`.

WORDS are `encode TOKENIZER DTYPE` or `train VOCAB [bar]`. It reads frames from stdin and writes frames to stdout
(`data.frames`) until stdin ends. An answer begins with b"ok" and what was asked for, or with b"no" and the message of a
ValueError.

- encode: texts (UTF-8) to the ids of each, in DTYPE.
- train: frames of texts, and an empty frame at their end, to a `tokenizer.json`.
"""

import signal
import sys
from collections.abc import Iterator
from typing import IO

import numpy as np

from roxxel_dist.data.build.encode import read_frame, write_frame
from roxxel_dist.data.build.tokenizer import Tokenizer, train_tokenizer


def main(words: list[str]) -> None:
    """Answer until stdin ends."""
    # Ctrl-C reaches every process of the terminal; the one that asks ends this one by closing stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    try:
        if words[0] == "encode":
            _encode(stdin, stdout, Tokenizer.load(words[1]), np.dtype(words[2]))
        else:
            trained = train_tokenizer(
                "bpe", _texts(stdin), int(words[1]) if words[1] else None, progress="bar" in words
            )
            write_frame(stdout, [b"ok", trained.to_json()])
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads any more, and Python would complain about stdout when it ends


def _encode(stdin: IO[bytes], stdout: IO[bytes], tokenizer: Tokenizer, dtype: np.dtype) -> None:
    while (parts := read_frame(stdin)) is not None:
        try:
            ids = tokenizer.encode_batch([part.decode() for part in parts])
            answer = [b"ok", *(np.array(one, dtype).tobytes() for one in ids)]
        except ValueError as error:
            answer = [b"no", str(error).encode()]
        write_frame(stdout, answer)


def _texts(stdin: IO[bytes]) -> Iterator[str]:
    while parts := read_frame(stdin):
        for part in parts:
            yield part.decode()


if __name__ == "__main__":
    main(sys.argv[1:])
