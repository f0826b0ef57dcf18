"""What data in a bucket costs: steps that wait for it, the first batch far inside a large corpus, bytes, beside grain.

    python benchmarks/remote_data.py [FOLDER] [--quick] [--json FILE]

The server is MinIO's gateway of JuiceFS, the link a proxy of 50 ms and 20 MB/s in a process of its own. The corpus of
10 TB is no file: a small server answers for any range of it (tokens that are 0, with their real checksums).
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from measure import Lines, Result, flags

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from link import Link
from servers import S3Server

from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.format import (
    HEADER_BYTES,
    Metadata,
    ShardLayout,
    block_count,
    chain_of,
    checksum,
    npy_header,
    offsets,
    pack_end,
)
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.index import INDEX, SHARES, ShardEntry, cut_of, digests, pack, write_index
from roxxel_dist.input.stream import Stream
from roxxel_dist.objects.store import ObjectStore

DELAY_S, RATE = 0.05, 20e6
BATCH, SEQ_LEN = 64, 2049
STEP_BYTES = BATCH * SEQ_LEN * 2
STEP_S = STEP_BYTES / (RATE / 2)
STALL_S = 0.5 * STEP_S
"""A step that its batch keeps waiting for longer is stalled."""
FIRST = 10
VOCABULARY = 50_000
LARGE_SHARDS, LARGE_TOKENS = 10_000, 1 << 29
"""Of the large corpus: 10.7 TB in all."""
FAR = 1_000_000


class RemoteLink:
    """A link in a process of its own, so that its threads take nothing from the reader's."""

    def __init__(self, port: int, delay_s: float, rate: float) -> None:
        words = [sys.executable, __file__, "--link", str(port), str(delay_s), str(rate)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = str(self._ask("endpoint"))

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @property
    def counted(self) -> tuple[int, int]:
        """(requests, bytes of bodies) until now."""
        requests, size = self._ask("counted")
        return requests, size

    def __enter__(self) -> "RemoteLink":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


class Witness:
    """A process that does nothing but sleep: how late it wakes is the machine's doing, not the reader's."""

    SLEEP_S = 0.001

    def __init__(self) -> None:
        words = [sys.executable, __file__, "--witness", str(STALL_S)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def delays(self) -> list[float]:
        """Seconds of the delays that a step would have been called stalled for; the process ends."""
        return json.loads(self._process.communicate()[0])


def witness(limit_s: float) -> int:
    """The other process: until its input ends."""
    over, late = threading.Event(), []
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while True:
        at = time.monotonic()
        if over.wait(Witness.SLEEP_S):
            print(json.dumps(late), flush=True)
            return 0
        delay = time.monotonic() - at - Witness.SLEEP_S
        if delay > limit_s:
            late.append(delay)


def serve_link(port: int, delay_s: float, rate: float) -> int:
    """The other process."""
    with Link(("127.0.0.1", port), delay_s=delay_s, rate=rate) as link:
        for line in sys.stdin:
            answer = link.endpoint if line.strip() == "endpoint" else (len(link.requests), link.body_bytes)
            print(json.dumps(answer), flush=True)
    return 0


@contextlib.contextmanager
def cloud(endpoint: str, server: S3Server | None = None) -> Iterator[None]:
    """This process is a client of a server at an endpoint."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    variables = server.environ_at(endpoint) if server else keys | {"AWS_ENDPOINT_URL": endpoint}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Bench:
    """The server with a corpus of random tokens."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        shutil.rmtree(folder, ignore_errors=True)
        local = folder / "corpus"
        local.mkdir(parents=True)
        rng, document = np.random.default_rng(0), 1 << 17
        documents = int(1.15 * steps * STEP_BYTES / 2 / document) + 1
        Roxxel(local).write(
            (rng.integers(0, VOCABULARY, document, np.uint16) for _ in range(documents)),
            separator=None, vocab_size=VOCABULARY, max_shard_bytes=64 << 20,
        )  # fmt: skip
        self.local = Roxxel(local)
        self.server = S3Server(folder / "s3")
        self.server.start()
        self.url = self.server.url("corpus")
        with cloud(self.server.endpoint, self.server):
            store = ObjectStore.open(self.url)
            for shard in self.local.shards:
                store.upload(Path(str(shard.path)), Path(str(shard.path)).name)
            write_index(store)

    def close(self) -> None:
        self.server.stop()
        shutil.rmtree(self.folder)

    def link(self, delay_s: float = DELAY_S, rate: float = RATE) -> RemoteLink:
        return RemoteLink(self.server.port, delay_s, rate)

    def opened(self, cache: str, cache_gb: float = 8.0) -> Roxxel:
        shutil.rmtree(self.folder / cache, ignore_errors=True)
        return Roxxel(self.url, remote=RemoteConfig(cache_dir=str(self.folder / cache), cache_gb=cache_gb))

    def plan(self, data: Roxxel) -> Any:
        return Curriculum(data, [Phase(self.steps, BATCH, SEQ_LEN)]).plan(1)


def steady(bench: Bench) -> Iterable[Result]:
    """Steps that need half the link. One waits for the store where a chunk that it reads is not in the cache yet."""
    with bench.link() as link, cloud(link.endpoint, bench.server):
        watch, begin = Witness(), time.monotonic()
        data = bench.opened("steady")
        assert data.fetcher is not None
        stream = Stream(bench.plan(data), data, None)
        waits, fetches = [], []
        for _ in range(bench.steps):
            at = time.monotonic()
            next(stream)
            waits.append(time.monotonic() - at)
            fetches.append(data.fetcher.waits)
            time.sleep(max(0.0, STEP_S - waits[-1]))
        taken = time.monotonic() - begin
        requests, size = link.counted
        late = watch.delays()
    starved = np.diff(fetches)[FIRST - 1 :] > 0
    delayed = [wait for wait in np.array(waits[FIRST:])[~starved] if wait > STALL_S]
    what = f"{bench.steps:,} steps of {STEP_S * 1e3:.0f} ms that read half of 20 MB/s at 50 ms"
    first = f"the first {FIRST} waited {sum(waits[:FIRST]):.1f} s, the longest wait behind them was "
    yield Result(
        what=what, against=f"steps after the first {FIRST} that waited for the store", measured=int(starved.sum()),
        target=0, at_most=True,
        note=first + f"{max(waits[FIRST:]) * 1e3:.0f} ms; {requests:,} requests, {size / 1e6:,.0f} MB",
    )  # fmt: skip
    yield Result(
        what="the same", against=f"steps with all chunks in the cache, delayed over {STALL_S * 1e3:.0f} ms",
        measured=len(delayed), note=f"a process beside it that only sleeps was so late {len(late)} times"
        + (f", {max(late) * 1e3:.0f} ms at most" if late else ""),
    )  # fmt: skip
    yield Result(what="the same", against="s for the first batch", measured=waits[0])
    yield Result(what="the same", against="steps/s", measured=bench.steps / taken)


class FsspecRows:
    """The windows of some steps, for grain: one request each, by fsspec."""

    def __init__(self, bench: Bench, steps: int) -> None:
        from obstore.fsspec import FsspecStore

        plan, firsts = bench.plan(bench.local), bench.local.first_tokens
        offset = np.concatenate([plan.rows(step).offset for step in range(steps)])
        self._shards = firsts.searchsorted(offset, side="right") - 1
        self._starts = HEADER_BYTES + (offset - firsts[self._shards]) * 2
        self._paths = [f"bucket/corpus/{shard.path.name}" for shard in bench.local.shards]
        self._files = FsspecStore(
            "s3", region="us-east-1", client_options={"allow_http": True}, skip_instance_cache=True
        )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> np.ndarray:
        start = int(self._starts[number])
        data = self._files.cat_file(self._paths[self._shards[number]], start, start + SEQ_LEN * 2)
        return np.frombuffer(data, np.uint16).astype(np.int32)


def beside_grain(bench: Bench) -> Iterable[Result]:
    """The same rows as fast as it goes: ours, and grain's threads over fsspec."""
    with bench.link() as link, cloud(link.endpoint, bench.server):
        begin = time.monotonic()
        data = bench.opened("fast")
        stream = Stream(bench.plan(data), data, None)
        next(stream)
        ours_first = time.monotonic() - begin
        for _ in range(bench.steps - 1):
            next(stream)
        ours = bench.steps / (time.monotonic() - begin)
    what = "the same rows as fast as it goes, same link"
    yield Result(what=what, against="steps/s", measured=ours, note=f"{bench.steps} steps")
    try:
        import grain
    except ImportError:
        yield Result(what=what, against="x grain over fsspec", measured=None)
        return
    for threads in (16, 64):
        steps = min(bench.steps, 60)
        with bench.link() as link, cloud(link.endpoint, bench.server):
            begin, peer = time.monotonic(), f"grain over fsspec, {threads} threads"
            rows = grain.MapDataset.source(FsspecRows(bench, steps)).batch(BATCH)
            options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500)
            batches = iter(rows.to_iter_dataset(options))
            first = next(batches)
            theirs_first = time.monotonic() - begin
            count = 1 + sum(1 for _ in batches)
            theirs = count / (time.monotonic() - begin)
        if not np.array_equal(first, Stream(bench.plan(bench.local), bench.local, None).batch(0)):
            raise ValueError("grain has read other rows")
        note = f"{theirs:.1f} steps/s in {count} steps, the first after {theirs_first:.2f} s; ours {ours_first:.2f} s"
        yield Result(what=what, against=f"x {peer}", measured=ours / theirs, note=note)
        yield Result(what="the first batch, same link", against=f"x {peer}", measured=theirs_first / ours_first)


def whole_pass(bench: Bench) -> Iterable[Result]:
    """Bytes fetched over bytes used, in a cache of two chunks."""
    plan = Curriculum(bench.local, [Phase(epochs=1.0, batch_size=BATCH, seq_len=SEQ_LEN)]).plan(1)
    source = plan.amendments[0].sources["self"]
    chunk = source.chunk * source.units.size * 2
    with bench.link(0.0, 0.0) as link, cloud(link.endpoint, bench.server):
        data = bench.opened("pass", 2 * chunk / 1e9)
        for _ in Stream(plan, data, None):
            pass
        _, size = link.counted
    used = plan.total_steps * STEP_BYTES
    yield Result(
        what=f"a pass over {used / 1e6:,.0f} MB in a cache of two chunks ({2 * chunk / 1e6:,.0f} MB)",
        against="bytes fetched / bytes used", measured=size / used, target=1.3, at_most=True,
    )  # fmt: skip


class LargeCorpus:
    """A data set of 10 TB that is not stored: the bytes of any range of its shards are computed."""

    def __init__(self) -> None:
        dtype, documents, block = np.dtype("<u2"), 1 << 18, 4096
        size = LARGE_TOKENS // documents
        ends = np.arange(1, documents + 1, dtype="<i8") * size
        sums = np.full(block_count(LARGE_TOKENS * 2, block), checksum(bytes(block)), "<u8")
        self.tables = ends.tobytes() + sums.tobytes()
        self.ends_offset, sums_at, self.meta_offset = offsets(dtype, LARGE_TOKENS, documents, block)
        self.entries: list[ShardEntry] = []
        self.header = npy_header(dtype, LARGE_TOKENS)
        cuts = tuple(cut_of(ends, LARGE_TOKENS, share) for share in SHARES)
        parts = {"sums": digests(sums.tobytes()), "ends": digests(ends.tobytes()), "firsts": ends[::8192].copy()}
        sum_of_ends, sum_of_sums, chain = checksum(ends.data), checksum(sums.data), ""
        for index in range(LARGE_SHARDS):
            metadata = Metadata(
                tokens=LARGE_TOKENS, documents=documents, vocab_size=VOCABULARY, tokenizer_fingerprint=None,
                separator=None, index=index, first_token=index * LARGE_TOKENS, first_document=index * documents,
                chain="",
            )  # fmt: skip
            chain = chain_of(chain, metadata, dtype, sum_of_ends, sum_of_sums)
            layout = ShardLayout(
                metadata=replace(metadata, chain=chain), dtype=dtype, block_size=block, ends_offset=self.ends_offset,
                sums_offset=sums_at, meta_offset=self.meta_offset, ends_checksum=sum_of_ends,
                sums_checksum=sum_of_sums,
            )  # fmt: skip
            end = pack_end(layout)
            self.entries.append(
                ShardEntry(
                    name=f"shard_{index:05d}.rox", size=self.meta_offset + len(end), etag=f"{index:032x}", end=end,
                    cuts=cuts, **parts,
                )
            )  # fmt: skip
        # All shards have the same tables here: real digests would not be packed so small.
        real = sum(entry.sums.nbytes + entry.ends.nbytes for entry in self.entries if entry.sums is not None
                   and entry.ends is not None)  # fmt: skip
        self.index = pack(self.entries)
        self.padding = max(0, real - len(self.index))
        self.names = {entry.name: entry for entry in self.entries}

    def read(self, entry: ShardEntry, start: int, stop: int) -> bytes:
        """The bytes of a shard."""
        parts = [(0, self.header), (self.ends_offset, self.tables), (self.meta_offset, entry.end)]
        data = bytearray(stop - start)
        for at, part in parts:
            low, high = max(start, at), min(stop, at + len(part))
            if low < high:
                data[low - start : high - start] = part[low - at : high - at]
        return bytes(data)


class _Handler(BaseHTTPRequestHandler):
    """What a reader asks an S3 server for."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    corpus: LargeCorpus
    has_index = True

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        name, corpus = self.path.partition("?")[0].rpartition("/")[2], self.corpus
        entry = corpus.names.get(name)
        if name == INDEX and self.has_index:
            size, etag = len(corpus.index), "index"
        elif entry is not None:
            size, etag = entry.size, entry.etag
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", "none", 0)
            return
        start, stop = 0, size
        if span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1
        body = b""
        if with_body:
            body = corpus.index[start:stop] if entry is None else corpus.read(entry, start, stop)
        more = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if span else {}
        self._send(206 if span else 200, body, etag, stop - start, **more)

    def _send(self, status: int, body: bytes, etag: str, size: int, **more: str) -> None:
        self.send_response(status)
        fields = {"ETag": f'"{etag}"', "Content-Length": str(size or len(body)), "Accept-Ranges": "bytes"}
        fields["Last-Modified"] = "Mon, 01 Jan 2024 00:00:00 GMT"
        for name, value in {**fields, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    """Of connections that come at once; of 5, as it is elsewhere, some would be tried again after a second."""


def cold(folder: Path) -> Iterable[Result]:
    """The first batch of a process that has nothing, far inside a corpus of 10 TB."""
    _Handler.corpus = corpus = LargeCorpus()
    server = _Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shutil.rmtree(folder / "cold", ignore_errors=True)
    (folder / "cold").mkdir(parents=True)
    link = RemoteLink(server.server_address[1], DELAY_S, RATE)
    with link, cloud(link.endpoint):
        words = [sys.executable, __file__, "--cold", str(folder / "cold")]
        times = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
        requests, size = link.counted
    server.shutdown()
    waited = corpus.padding / RATE
    whole = times["opened"] + times["planned"] + times["batch"] + waited
    size_tb = LARGE_SHARDS * LARGE_TOKENS * 2 / 1e12
    what = f"cold first batch at step {FAR:,} of {size_tb:.1f} TB in {LARGE_SHARDS:,} shards"
    note = (
        f"{times['opened']:.2f} s to open, {times['planned']:.2f} s for the plan, {times['batch']:.2f} s for the "
        f"batch, {waited:.2f} s for an index as large as with real digests; {size / 1e6:.1f} MB"
    )
    yield Result(what=what, against="s", measured=whole, target=2, at_most=True, note=note)
    yield Result(
        what=what, against=f"requests a row of {BATCH}, the two for the index not counted", target=3, at_most=True,
        measured=(requests - 2) / BATCH,
    )  # fmt: skip


def cold_reader(folder: str) -> int:
    """The process that is timed, without its imports."""
    begin = time.monotonic()
    data = Roxxel("s3://bucket/large", remote=RemoteConfig(cache_dir=folder))
    opened = time.monotonic()
    train, _ = data.split(0.1)
    plan = Curriculum(train, [Phase(2 * FAR, BATCH, SEQ_LEN)]).plan(1)
    rows = plan.rows(FAR)
    planned = time.monotonic()
    train.read(rows.offset, SEQ_LEN, np.int32)
    ended = time.monotonic()
    times = {"opened": opened - begin, "planned": planned - opened, "batch": ended - planned}
    print(json.dumps(times), flush=True)
    return 0


def main() -> int:
    """Print the table."""
    if sys.argv[1:2] == ["--link"]:
        return serve_link(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
    if sys.argv[1:2] == ["--witness"]:
        return witness(float(sys.argv[2]))
    if sys.argv[1:2] == ["--cold"]:
        return cold_reader(sys.argv[2])
    parser: argparse.ArgumentParser = flags(__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    options = parser.parse_args()
    report, folder = Lines(options.json), Path(options.folder).resolve() / "remote_data"
    report.add("a cold start in 10 TB", lambda: cold(folder))
    bench = Bench(folder / "s3", 200 if options.quick else 1000)
    try:
        for name, group in (("steps", steady), ("grain", beside_grain), ("a pass", whole_pass)):
            report.add(name, partial(group, bench))
    finally:
        bench.close()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
