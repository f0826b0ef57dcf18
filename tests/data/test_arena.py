import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roxxel_dist.data.arena import Windows, map_files
from roxxel_dist.data.dataset import Roxxel


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
def test_windows_at_any_byte_offset(files, dtype):
    """Tokens behind headers of any length: in one range, in several, and in ordinary memory."""
    paths, contents = files
    for arrays in (
        map_files(paths),
        [map_files([path])[0] for path in paths],
        list(map(np.frombuffer, contents, ["u1"] * 4)),
    ):
        windows = Windows(arrays)
        size = 6 * np.dtype(dtype).itemsize
        places = [(number, at) for number in (1, 2, 3) for at in (0, 1, 77, 1013, len(contents[number]) - size)]
        index = np.array([windows.starts[number] + at for number, at in places])
        rows = windows.copy(index, size)
        assert [row.tobytes() for row in rows] == [contents[number][at : at + size] for number, at in places]
        assert rows.view(dtype).shape == (len(places), 6)
        assert not any(np.shares_memory(rows, array) for array in arrays)


def test_many_shards_need_no_file_descriptors(tmp_path):
    data = Roxxel(tmp_path)
    data.write([np.full(10, number, np.uint16) for number in range(500)], separator=None, max_shard_bytes=20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
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


# -- files that are cut short while they are mapped: real SIGBUS, so in a process of its own


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


def test_reading_what_was_cut_off_is_an_error_that_names_the_file(three):
    code = (
        READ
        + 'os.truncate(ds.shards[1].path, 30_000)\nread(90_000)\nread(10_000)\nread(80_000)\nds.close()\nprint("end")'
    )
    status, out, err = run(code, three)
    assert status == 0, err
    first, *errors, good, again, last = out.splitlines()
    assert first == "[30000, 10, 30005]"
    assert len(errors) == 1
    for line in (*errors, again):
        assert line.startswith(
            f"ValueError: {three}/shard_00001.rox was cut short while it was read: 30000 bytes are left"
        )
    assert good == "[10000, 10, 10005]"
    assert last == "end"


def test_in_a_thread_while_others_read(three):
    code = (
        READ
        + """
os.truncate(ds.shards[2].path, 5000)
found = []
def loop(offset):
    try:
        for _ in range(2000):
            ds.read(np.array([offset]), 40_000)
    except ValueError as error:
        found.append(str(error))
threads = [threading.Thread(target=loop, args=[at]) for at in (0, 100, 105_000, 50_000)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(found), "shard_00002.rox was cut short" in found[0])
"""
    )
    status, out, err = run(code, three)
    assert status == 0, err
    assert out.splitlines()[1:] == ["1 True"]


def test_documents_of_a_file_that_was_cut_short(three):
    """A document is a view: what is missing reads as zeros, a line says so, and the next look is an error."""
    code = (
        READ
        + """
document = ds[1]
os.truncate(ds.shards[1].path, 8192)
print(int(document[-1]), int(document[0]), int(ds[2][-1]))
try:
    ds[1]
except ValueError as error:
    print(error)
"""
    )
    status, out, err = run(code, three)
    assert status == 0, err
    assert out.splitlines()[1] == "0 0 49999"
    assert "shard_00001.rox was cut short" in out.splitlines()[2]
    assert "its missing part reads as zeros" in err


@pytest.mark.parametrize("late", ["", "import faulthandler; faulthandler.disable(); faulthandler.enable()"])
def test_other_peoples_faults_are_theirs(three, late):
    """A fault in memory that is not ours ends the process as it would without us, with faulthandler's report."""
    code = (
        f"{READ}\n{late}"
        + """
with Roxxel(sys.argv[1]):
    pass
path = sys.argv[1] + "/other"
other = np.memmap(path, np.uint8, "w+", shape=100_000)
os.truncate(path, 10)
print(other.sum())
"""
    )
    status, out, err = run(code, three)
    assert status == -7
    assert "Bus error" in err
    assert len(out.splitlines()) == 1
