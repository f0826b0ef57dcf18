"""What saves leave in the memory of their process: nothing that grows."""

import ctypes
import gc
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import tensorstore

from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.checkpoint.stored_blocks import METRICS_OF_STORES, avoid_leaks

WARM, COUNT = 8, 16


@pytest.fixture
def store(tmp_path):
    opened = CheckpointStore(tmp_path / "c")
    yield opened
    opened.close()


def save(store, state, step):
    store.save(step, state, {})
    store.settle()
    while store.poll():
        pass


def blocks():
    gc.collect()
    return sys.getallocatedblocks()


def test_saves_and_restores_leave_nothing(store):
    """Objects of Python are counted: the bytes of a process come and go with what its allocator holds."""
    state = {f"w{i}": jnp.full((16, 16), float(i)) for i in range(8)}
    for act in (lambda step: save(store, state, step), lambda step: store.restore(store.latest_step(), state)):
        for step in range(WARM):
            act(step)
        before = blocks()
        for step in range(WARM, WARM + COUNT):
            act(step)
        assert (blocks() - before) / COUNT < 60  # 300, where tensorstore is asked for JSON


def test_a_plain_folder_is_named_without_json():
    avoid_leaks()
    spec = tensorstore.KvStore.Spec({"driver": "file", "path": "/tmp/x/"})
    before = blocks()
    for _ in range(500):
        spec.to_json()
    assert blocks() - before < 100


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_saves_are_flat(store):
    """What is in use is. What the process holds grows by 2 KB a save: holes between blocks that glibc does not give
    back, and not with MALLOC_ARENA_MAX=1."""
    state = {f"w{i}": jnp.full((16, 16), float(i)) for i in range(8)}
    for step in range(1000):
        save(store, state, step)
    in_use, resident = allocated_mb(), resident_mb()
    for step in range(1000, 11_000):
        save(store, state, step)
        if step % 1000 == 999:
            print(f"after {step + 1:,} saves: {allocated_mb():.2f} MB in use, {resident_mb():.1f} MB held")
    assert allocated_mb() - in_use < 1  # 0.3
    assert resident_mb() - resident < 50  # 530, where tensorstore is asked for JSON


class Mallinfo2(ctypes.Structure):
    """What glibc says of its memory, in bytes."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def allocated_mb():
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return (info.uordblks + info.hblkhd) / 1e6


def resident_mb():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.parametrize(
    "spec",
    [
        {"driver": "file", "path": "/tmp/x/"},
        {"driver": "file", "path": "/tmp/mo'e/ü\n\u2028 [1]*/"},
        {"driver": "file", "path": "/tmp/x/", "file_io_sync": False},
        {"driver": "file", "path": "/tmp/x/", "file_io_locking": {"mode": "non_atomic"}},
        {"driver": "file", "path": "/tmp/x/", "context": {"file_io_concurrency": {"limit": 3}}},
        {"driver": "memory", "path": "x/"},
        {"driver": "ocdbt", "base": {"driver": "file", "path": "/tmp/x/"}, "config": {"max_inline_value_bytes": 10}},
    ],
    ids=str,
)
def test_a_specification_is_what_it_was(spec):
    """Those of a plain folder are made of its path; all others by tensorstore."""
    avoid_leaks()
    made = tensorstore.KvStore.Spec(spec)
    assert tensorstore.KvStore.Spec(made.to_json()) == made
    plain = {"driver", "path"}
    assert (made.to_json().keys() == plain) == (spec.keys() == plain)
    assert made.to_json(include_defaults=True).keys() > spec.keys() - {"file_io_sync"}


def test_other_metrics_are_still_there(store):
    save(store, {"w": jnp.ones(3)}, 1)
    assert tensorstore.experimental_collect_matching_metrics(METRICS_OF_STORES) == []
    assert tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")


def test_tensorstore_still_keeps_what_it_makes_of_json():
    """If this fails, `avoid_leaks` can go."""
    avoid_leaks()
    spec = tensorstore.KvStore.Spec({"driver": "memory", "path": "x/"})
    before = blocks()
    for _ in range(100):
        spec.to_json()
    assert blocks() - before >= 100
