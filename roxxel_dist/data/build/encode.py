"""From texts to token ids, in order, on as many processes as are wanted.

A helper process (`data.helper`) encodes with one thread. That costs less CPU time than `encode_batch` on the threads of
the `tokenizers` library (`benchmarks/data_build.py`), their number can be chosen anew for every build, and ids become
arrays in parallel too. Texts and ids go through pipes in batches; a few batches a process are in memory at a time.

What `data.encode` and its helper processes say to each other through pipes: lists of byte strings, and no pickle.
"""

import struct
from collections.abc import Sequence
from typing import IO
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
import numpy as np
from roxxel_dist.cluster import interrupt
from roxxel_dist.data.token_types import smallest_dtype
from roxxel_dist.data.build.documents import pieces
from roxxel_dist.data.build.tokenizer import Kind, Tokenizer, train_tokenizer

HEAD = struct.Struct("<I")


def write_frame(stream: IO[bytes], parts: Sequence[bytes]) -> None:
    """Send some byte strings as one frame."""
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    stream.write(b"".join([HEAD.pack(len(parts)), lengths, *parts]))
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[bytes] | None:
    """The byte strings of the next frame; None where the other side has ended."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (count,) = HEAD.unpack(head)
    table = stream.read(8 * count)
    if len(table) < 8 * count:
        return None
    parts = [stream.read(length) for length in struct.unpack(f"<{count}Q", table)]
    return parts if sum(map(len, parts)) == sum(struct.unpack(f"<{count}Q", table)) else None


BATCH_CHARACTERS = 1 << 20
PARALLEL_BYTES = 8 << 20
"""Texts smaller than this are encoded in this process: starting others would take longer."""
END_LIMIT_S = 10.0
Batch = list[tuple[str, bool, int]]
"""(a document or a piece of one, whether the document ends with it, the bytes that it took to read)."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encode_documents(
    documents: Iterable[tuple[str, int]],
    tokenizer: Tokenizer,
    path: Path,
    workers: int,
    advance: Callable[[int], None],
) -> Iterator[np.ndarray]:
    """The ids of each document [tokens], in the smallest dtype that holds them.

    Args:
        documents: (text, bytes that it took to read).
        tokenizer: what makes the ids.
        path: where it is saved, for the helper processes.
        workers: processes; with 1 the work is done in this one, by one thread.
        advance: told the bytes of every document that is done.
    """
    dtype = smallest_dtype(tokenizer.vocab_size)
    parts: list[np.ndarray] = []
    with ExitStack() as stack:
        batches = _batches(documents, whole=not tokenizer.cuttable)
        if workers > 1:
            found = stack.enter_context(closing(_by_helpers(batches, path, dtype, workers)))
        else:
            found = ((batch, _encode_here(tokenizer, batch, dtype)) for batch in batches)
        for batch, encoded in found:
            for ids, (_, is_last, size) in zip(encoded, batch, strict=True):
                parts.append(ids)
                if is_last:
                    yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                    parts = []
                    advance(size)


def _encode(tokenizer: Tokenizer, batch: Batch, dtype: np.dtype) -> list[np.ndarray]:
    return [np.array(ids, dtype) for ids in tokenizer.encode_batch([text for text, _, _ in batch])]


def _encode_here(tokenizer: Tokenizer, batch: Batch, dtype: np.dtype) -> list[np.ndarray]:
    with _one_thread():  # around each batch: the caller may do anything between two
        return _encode(tokenizer, batch, dtype)


def _batches(documents: Iterable[tuple[str, int]], *, whole: bool) -> Iterator[Batch]:
    """Pieces of documents, about `BATCH_CHARACTERS` characters at a time."""
    batch: Batch = []
    characters = 0
    for text, size in documents:
        cut = [text] if whole else list(pieces(text))
        for number, piece in enumerate(cut, 1):
            batch.append((piece, number == len(cut), size))
            characters += len(piece)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _by_helpers(
    batches: Iterator[Batch], path: Path, dtype: np.dtype, workers: int
) -> Generator[tuple[Batch, list[np.ndarray]], None, None]:
    with ExitStack() as stack:
        idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(workers):
            words = ["encode", str(path), dtype.str]
            idle.put(stack.enter_context(_helper(words, {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"})))
        # One thread a helper, so that no pipe fills up while its other end waits.
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        running: deque[tuple[Batch, Future[list[bytes]]]] = deque()

        def ask(batch: Batch) -> list[bytes]:
            helper = idle.get()
            try:
                return _answer(helper, [text.encode() for text, _, _ in batch])
            finally:
                idle.put(helper)

        def oldest() -> tuple[Batch, list[np.ndarray]]:
            batch, future = running.popleft()
            return batch, [np.frombuffer(ids, dtype) for ids in future.result()]

        try:
            for batch in batches:
                running.append((batch, threads.submit(ask, batch)))
                if len(running) > 2 * workers:
                    yield oldest()
            while running:
                yield oldest()
        finally:
            for _, future in running:
                future.cancel()


def _answer(helper: "subprocess.Popen[bytes]", parts: Sequence[bytes]) -> list[bytes]:
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        write_frame(helper.stdin, parts)
        answer = read_frame(helper.stdout)
    except BrokenPipeError:
        answer = None
    if answer is None:
        raise RuntimeError(f"helper process {helper.pid} of the build ended (exit code {helper.wait()}); build again")
    if answer[0] != b"ok":
        raise ValueError(answer[1].decode())
    return answer[1:]


@contextmanager
def _helper(words: Sequence[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "roxxel_dist.data.build.encode_worker", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment
    ) as process:
        try:
            with interrupt.cleanup(process.kill):
                yield process
        except BaseException:
            process.kill()  # it may train for minutes before it looks at its stdin again
            raise
        finally:
            assert process.stdin is not None
            try:
                process.stdin.close()
                process.wait(END_LIMIT_S)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                process.kill()


@contextmanager
def _one_thread() -> Iterator[None]:
    """The `tokenizers` library looks at this variable at every call, and only once at the number of its threads."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def train_on(kind: Kind, texts: Iterator[str], vocab_size: int | None, workers: int, *, progress: bool) -> Tokenizer:
    """`train_tokenizer` on so many threads: a helper process has as many as are wanted, this one what it began with."""
    if kind != "bpe" or workers == 1 or (vocab_size or 1 << 20) <= 256:
        with _one_thread():
            return train_tokenizer(kind, texts, vocab_size, progress=progress)
    environment = {"RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    with _helper(["train", str(vocab_size or ""), *["bar"] * progress], environment) as helper:
        assert helper.stdin is not None
        try:
            for batch in _batches(((text, 0) for text in texts), whole=True):
                write_frame(helper.stdin, [text.encode() for text, _, _ in batch])
        except BrokenPipeError:
            pass  # it has ended, which the answer tells
        return Tokenizer.of_json(_answer(helper, [])[0])
