import gc
import os
from pathlib import Path

import numpy as np
import pytest
from commands import wait_for

from roxxel_dist.data import pread
from roxxel_dist.data.dataset import Roxxel


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, 60_000, 700).astype(np.uint16) for _ in range(20)]
    Roxxel(tmp_path).write(documents, max_shard_bytes=3000)
    return tmp_path


def windows(ds, length, count, seed):
    rng = np.random.default_rng(seed)
    chosen = [ds.ranges[number] for number in rng.integers(0, len(ds.ranges), count)]
    return np.array([first + rng.integers(0, size - length + 1) for first, size in chosen])


def open_files(folder):
    return sum(os.readlink(fd).startswith(str(folder)) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())


@pytest.mark.parametrize("kept_open", [256, 3])
def test_it_reads_what_the_map_reads(folder, monkeypatch, kept_open):
    monkeypatch.setattr(pread, "KEPT_OPEN", kept_open)
    with Roxxel(folder) as mapped, Roxxel(folder, io="pread") as files:
        assert len(mapped.shards) == 10
        for seed in range(40):
            length, rows = 1 + 37 * (seed % 5), seed % 7
            offsets = windows(mapped, length, rows, seed)
            if seed % 2:
                files.prefetch(offsets, length)
                files.prefetch(windows(mapped, length, rows, seed + 1000), length)  # never fetched
            got = files.read(offsets, length, np.int32)
            assert got.dtype == np.int32
            assert got.flags.writeable
            assert np.array_equal(got, mapped.read(offsets, length))
        wait_for(lambda: 0 < open_files(folder) <= min(10, kept_open), limit_s=30, what="the threads that read ahead")
        train, held_out = files.split(0.3)
        at = held_out.ranges[3][0]
        assert np.array_equal(held_out.read(np.array([at]), 50), mapped.read(np.array([at]), 50))
        assert train.io == "pread"


def test_files_and_threads_go_with_the_data_set(folder):
    ds = Roxxel(folder, io="pread")
    offsets = windows(ds, 20, 30, 0)
    ds.prefetch(offsets, 20)
    ds.read(offsets, 20)
    assert open_files(folder)
    ds.close()
    del ds
    gc.collect()
    assert open_files(folder) == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_file_that_was_cut_short_or_replaced(folder, ahead):
    def read(offset):
        if ahead:
            ds.prefetch(np.array([offset]), 100)
        return ds.read(np.array([offset]), 100)

    with Roxxel(folder, io="pread") as ds:
        low, size = ds.ranges[1]
        read(low)
        os.truncate(ds.shards[1].path, 4096 + 300)
        with pytest.raises(ValueError, match=r"shard_00001\.rox was cut short while it was read: 4396 bytes are left"):
            read(low + size - 100)
        read(low)
        path = ds.shards[2].path
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").replace(path)
        with pytest.raises(ValueError, match=r"shard_00002\.rox was replaced since the data set was opened"):
            read(ds.ranges[2][0])


def test_a_window_outside_and_a_wrong_option(folder):
    with Roxxel(folder, io="pread") as ds, pytest.raises(ValueError, match="is not within one of the 10 ranges"):
        ds.prefetch(np.array([ds.ranges[1][0] - 1]), 10)
    with pytest.raises(ValueError, match="io='read'"):
        Roxxel(folder, io="read")
