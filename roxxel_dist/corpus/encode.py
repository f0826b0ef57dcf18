"""Encodes texts as token ids, in order, on several processes.

A worker process (this module as a program) encodes with one thread. That costs less CPU time than `encode_batch` on the
threads of the `tokenizers` library (`benchmarks/data_build.py`), and ids become arrays in parallel too. Its messages
are pickles through its stdin and stdout; a few batches per worker are in memory at a time. It is not a pool of
`concurrent.futures`, because those processes run the caller's main program again and outlive a killed caller.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import tokenizers

from roxxel_dist.corpus.documents import pieces
from roxxel_dist.corpus.tally import EncodedText, Tally, changes
from roxxel_dist.data.files.format import smallest_dtype
from roxxel_dist.data.files.writer import TextDocument
from roxxel_dist.data.tokenizer.tokenizer import Kind, Tokenizer, train_tokenizer
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import ProgressBars

if TYPE_CHECKING:  # a worker does without
    from roxxel_dist.corpus.inputs import BuildInputs

BATCH_CHARACTERS = 1 << 20
PARALLEL_BYTES = 8 << 20
"""Texts smaller than this are encoded in this process, because starting workers would take longer."""
END_LIMIT_S = 10.0
Batch = list[tuple[str, bool, int]]
"""(a document or a piece of one, whether the document ends with it, the bytes read for it)."""


def encode_inputs(
    inputs: "BuildInputs",
    split: str,
    skipped: int,
    tokenizer: Tokenizer | None,
    path: Path,
    workers: int,
    log: ProgressBars,
    tally: Tally,
    *,
    separated: bool,
) -> Iterator[np.ndarray | TextDocument]:
    """The documents of a split without the first `skipped`, with a bar: texts as `encode_documents` has them, tokens as
    they are."""
    name = f" for {split}" if split else ""
    if inputs.corpus is None:
        with log.bar(f"copying{name}", inputs.size) as advance:
            yield from inputs.arrays(split, skipped, advance)
        return
    assert tokenizer is not None
    processes = 0 if inputs.size < PARALLEL_BYTES else workers
    with log.bar(f"encoding{name} with {tokenizer.vocab_size} ids", inputs.size) as advance:
        texts = inputs.texts(split, skipped, tally)
        yield from encode_documents(texts, tokenizer, path, processes, advance, tally, separated=separated)


def encode_documents(
    documents: Iterable[tuple[str, int]],
    tokenizer: Tokenizer,
    path: Path,
    workers: int,
    advance: Callable[[int], None],
    tally: Tally,
    *,
    separated: bool,
) -> Iterator[np.ndarray | TextDocument]:
    """The ids of each document [tokens], in the smallest dtype that holds them.

    The documents are (text, bytes read for it); `advance` is called with the bytes of every finished document. The
    tokenizer is saved at `path`, for the workers; with fewer than 2 workers one thread of this process encodes. A
    document comes with the bytes of its text where the tokenizer may change it; `separated` says whether end-of-text
    will stand between documents. What the tokenizer changes is added to `tally`.
    """
    dtype = smallest_dtype(tokenizer.vocab_size)
    counts = None if tokenizer.is_lossless else tokenizer.text_bytes
    parts: list[np.ndarray] = []
    size_of_text = 0
    batches = _batches(documents, whole=counts is not None or not tokenizer.cuttable)
    encode = _encode_in_workers(batches, path, workers) if workers > 1 else _encode_here(batches, tokenizer)
    with closing(encode):
        for batch, encoded in encode:
            for one, (text, is_last, size) in zip(encoded, batch, strict=True):
                parts.append(np.frombuffer(one.ids, dtype))
                size_of_text += len(text) if text.isascii() else len(text.encode())
                if is_last:
                    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
                    tally.add(size_of_text, one)
                    # Where a text may change its document is not cut, so `one` is of the whole.
                    yield ids if counts is None else TextDocument(ids, size_of_text, counts.bytes_of(ids, separated))
                    parts, size_of_text = [], 0
                    advance(size)


def train_on(kind: Kind, texts: Iterator[str], vocab_size: int | None, threads: int) -> Tokenizer:
    """`train_tokenizer` with some threads, in a worker; in this process if `threads` is 0."""
    if kind != "bpe" or not threads:
        with _one_thread():
            return train_tokenizer(kind, texts, vocab_size)
    with _worker(threads, "train", str(vocab_size or "")) as worker:
        with suppress(BrokenPipeError):  # it has ended; reading its answer raises the error
            for batch in _batches(((text, 0) for text in texts), whole=True):
                _send(worker.stdin, [text for text, _, _ in batch])
        return Tokenizer(tokenizers.Tokenizer.from_buffer(_answer(worker, [])))


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


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[EncodedText]:
    dtype, ids = smallest_dtype(tokenizer.vocab_size), tokenizer.encode_batch(texts)
    found = changes(tokenizer, texts, ids)
    return [one._replace(ids=np.array(each, dtype).tobytes()) for one, each in zip(found, ids, strict=True)]


def _encode_here(
    batches: Iterator[Batch], tokenizer: Tokenizer
) -> Generator[tuple[Batch, list[EncodedText]], None, None]:
    for batch in batches:
        with _one_thread():  # around each batch: between batches the caller may do anything
            encoded = _encode(tokenizer, [text for text, _, _ in batch])
        yield batch, encoded


def _encode_in_workers(
    batches: Iterator[Batch], path: Path, workers: int
) -> Generator[tuple[Batch, list[EncodedText]], None, None]:
    with ExitStack() as stack:
        idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(workers):
            idle.put(stack.enter_context(_worker(1, "encode", str(path))))
        # One thread a worker, so that no pipe fills up while its other end waits.
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(threads.shutdown, cancel_futures=True)
        running: deque[Future[tuple[Batch, list[EncodedText]]]] = deque()

        def encode(batch: Batch) -> tuple[Batch, list[EncodedText]]:
            worker = idle.get()
            try:
                return batch, _answer(worker, [text for text, _, _ in batch])
            finally:
                idle.put(worker)

        for batch in batches:
            running.append(threads.submit(encode, batch))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


@contextmanager
def _worker(threads: int, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "roxxel_dist.corpus.encode", *words]
    variables = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | variables
    ) as process:
        try:
            with interrupt.cleanup(process.kill):
                yield process
        except BaseException:
            process.kill()  # it may train for minutes before it reads its stdin again
            raise
        finally:
            try:
                assert process.stdin
                process.stdin.close()
                process.wait(END_LIMIT_S)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                process.kill()


def _send(stream: IO[bytes] | None, message: object) -> None:
    assert stream
    pickle.dump(message, stream)
    stream.flush()


def _answer(worker: "subprocess.Popen[bytes]", texts: list[str]) -> Any:
    """The result of a worker for some texts. Raises the worker's ValueError, and RuntimeError if it has ended."""
    assert worker.stdout
    try:
        with suppress(BrokenPipeError):  # it has ended; reading its answer raises the error
            _send(worker.stdin, texts)
        result, error = pickle.load(worker.stdout)
    except (EOFError, pickle.UnpicklingError) as ended:
        raise RuntimeError(
            f"helper process {worker.pid} of the build ended (exit code {worker.wait()}); build again"
        ) from ended
    if error is not None:
        raise UserError(error)
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    """The `tokenizers` library reads this variable at every call, but the number of its threads only once."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def main(words: list[str]) -> None:
    """A worker: `encode TOKENIZER_FILE` lists of texts, or `train VOCAB_SIZE` on all lists up to an empty one. The
    answers are (result, None), or (None, message of a ValueError), after which it ends."""
    # Ctrl-C reaches every process of the terminal; the caller ends this one by closing its stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    messages = iter(lambda: pickle.load(sys.stdin.buffer), [])
    try:
        if words[0] == "train":
            texts = (text for message in messages for text in message)
            vocab_size = int(words[1]) if words[1] else None
            _send(answers, (train_tokenizer("bpe", texts, vocab_size).to_json(), None))
        else:
            tokenizer = Tokenizer.load(words[1])
            for message in messages:
                _send(answers, (_encode(tokenizer, message), None))
    except ValueError as error:
        _send(answers, (None, str(error)))
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):
        pass  # the caller has ended


if __name__ == "__main__":
    main(sys.argv[1:])
