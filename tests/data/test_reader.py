import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.reader import MappedReader, map_files


@pytest.fixture
def files(tmp_path):
    """Some files of odd sizes, and their bytes."""
    rng = np.random.default_rng(3)
    contents = [rng.bytes(size) for size in (1, 5000, 4096, 12_345)]
    paths = [tmp_path / f"{number}.bin" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths, contents


def mapped(folder):
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_files_are_mapped_and_let_go(files, tmp_path):
    paths, contents = files
    arrays = map_files(paths)
    assert [array.tobytes() for array in arrays] == contents
    assert not any(array.flags.writeable for array in arrays)
    assert mapped(tmp_path) == 4
    assert not any(str(tmp_path) in os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    one = arrays[3][100:200]
    del arrays
    gc.collect()
    assert one.tobytes() == contents[3][100:200]
    del one
    gc.collect()
    assert mapped(tmp_path) == 0


def test_a_replaced_file_is_read_as_it_was_opened(files):
    paths, contents = files
    arrays = map_files(paths)
    paths[1].with_name("new").write_bytes(b"x" * 5000)
    paths[1].with_name("new").replace(paths[1])
    assert arrays[1].tobytes() == contents[1]


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", "<f8"])
@pytest.mark.parametrize("header", [0, 3])
def test_windows_at_any_byte_offset(files, dtype, header):
    """Tokens behind headers of any length: in one range, in several, and in ordinary memory."""
    paths, contents = files
    tokens = [content[header : header + 4088] for content in contents[1:]]
    firsts = np.cumsum([7, *(len(data) // np.dtype(dtype).itemsize for data in tokens)])
    for arrays in (
        map_files(paths)[1:],
        [map_files([path])[0] for path in paths[1:]],
        list(map(np.frombuffer, contents[1:], ["u1"] * 3)),
    ):
        reader = MappedReader([array[header : header + 4088].view(dtype) for array in arrays], firsts[:-1].tolist())
        last = 4088 // np.dtype(dtype).itemsize - 6
        places = [(number, at) for number in (2, 0, 1) for at in (0, 1, 77, last)]
        offsets = np.array([firsts[number] + at for number, at in places])
        rows = reader.read(offsets, 6, np.dtype(dtype))
        expected = [np.frombuffer(tokens[number], dtype)[at : at + 6] for number, at in places]
        assert [row.tobytes() for row in rows] == [row.tobytes() for row in expected]
        assert not any(np.shares_memory(rows, array) for array in arrays)
        if dtype[1] != "f":
            assert np.array_equal(reader.read(offsets, 6, np.dtype("f8")), np.stack(expected).astype("f8"))
        assert reader.read(offsets[:1], 6, np.dtype(dtype)).tobytes() == expected[0].tobytes()
        reader.prefetch(offsets, 6)
        for outside in (6, firsts[1] - 5, firsts[-1] - 5, firsts[-1] + 100):
            with pytest.raises(ValueError, match=f"a window of 6 tokens at token {outside} is not within one of the 3"):
                reader.read(np.array([offsets[0], outside]), 6, np.dtype(dtype))
        with pytest.raises(ValueError, match="a window has at least 1 token"):
            reader.read(offsets, 0, np.dtype(dtype))


def test_many_shards_need_no_file_descriptors(tmp_path):
    data = Roxxel(tmp_path)
    data.write([np.full(10, number, np.uint16) for number in range(500)], separator=None, max_shard_bytes=20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}  # tests before this one have left some open
    free = [number for number in range(soft) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[32], hard))
    try:
        with Roxxel(tmp_path) as ds:
            assert len(ds.shards) == 500
            rows = ds.read(np.arange(0, 5000, 10)[::-1], 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rows.tolist() == [[number] * 10 for number in range(499, -1, -1)]


def test_an_empty_file_and_a_missing_one(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty: the file is empty"):
        map_files([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError):
        map_files([tmp_path / "none"])
    assert map_files([]) == []


# -- files that are truncated while they are mapped: real SIGBUS, so in a process of its own


def run(code, folder):
    """What a Python program says: (exit code, stdout, stderr)."""
    text = f"import os, sys, threading\nimport numpy as np\nfrom roxxel_dist.data.dataset import Roxxel\n{code}"
    result = subprocess.run(
        [sys.executable, "-u", "-X", "faulthandler", "-c", text, folder], capture_output=True, text=True, timeout=60
    )
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def three(tmp_path):
    Roxxel(tmp_path).write([np.arange(50_000, dtype=np.uint16)] * 3, separator=None, max_shard_bytes=100_000)
    return tmp_path


READ = """
ds = Roxxel(sys.argv[1])
assert len(ds.shards) == 3
def read(offset):
    try:
        print(ds.read(np.array([offset, 10, offset + 5]), 1000)[:, 0].tolist())
    except ValueError as error:
        print("ValueError:", error)
read(80_000)
"""


def test_touching_what_was_cut_off_ends_the_process(three):
    """By SIGBUS, which the launcher explains: nothing turns it into zeros."""
    code = READ + "os.truncate(ds.shards[1].path, 30_000)\nread(10_000)\nread(90_000)\nprint('unreachable')"
    status, out, err = run(code, three)
    assert status == -signal.SIGBUS
    assert out.splitlines() == ["[30000, 10, 30005]", "[10000, 10, 10005]"]
    assert "Bus error" in err


@pytest.mark.parametrize("left", [4096 + 100_000 - 500, 8192])
def test_a_source_that_is_cut_short_is_no_zeros_in_a_new_data_set(three, tmp_path, left):
    """Its last page too, of which the kernel makes zeros without any signal."""
    with Roxxel(three) as source:
        last = source.shards[2]
        os.truncate(last.path, left)
        with pytest.raises(
            ValueError, match=rf"{last.path.name} was truncated while it was read: {left} bytes are left"
        ):
            Roxxel(tmp_path / "copy" / "a_*.rox").write(source)
        assert not (tmp_path / "copy").exists()


def test_documents_read_are_the_documents(tmp_path):
    documents = [np.arange(count, dtype=np.uint16) + count for count in (5, 0, 30_000, 1)]
    data = Roxxel(tmp_path / "a_*.rox")
    data.write(documents, max_shard_bytes=20_000)
    for part in (data, *data.split(0.3)):
        assert [one.tolist() for one in part.read_documents()] == [one.tolist() for one in part]
