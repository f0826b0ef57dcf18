"""What happens to checkpoints when disks are full, files are damaged and processes are killed."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import warm
from commands import environment, wait_for
from leftovers import MARK, MOUNT
from small_disks import mounted_disk

from roxxel_dist.checkpoint import files, store
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.checkpoint.store import CheckpointStore


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    with mounted_disk(tmp_path / "disk", "8m") as disk:
        yield disk


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def run_script(source, *words):
    """A script in a process of its own: what fails in the storage library leaves threads and noise behind."""
    return warm.run([*map(str, words)], Path.cwd(), environment(), source=source)


DAMAGED = """
import os, shutil, sys
from pathlib import Path
import jax.numpy as jnp
from roxxel_dist.checkpoint.store import CheckpointStore

for what in ("meta.json", "state/manifest.ocdbt", "state/d", "half"):
    folder = Path(sys.argv[1]) / what.replace("/", "_")
    state = {"w": jnp.arange(60000.0)}
    saver = CheckpointStore(folder)
    saver.save(1, state, {})
    saver.save(2, state, {})
    saver.close()
    if what == "half":
        largest = max((folder / "2" / "state").rglob("*"), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        damaged = folder / "2" / what
        shutil.rmtree(damaged) if damaged.is_dir() else damaged.unlink()
    reader = CheckpointStore(folder)
    try:
        reader.meta(2) if what == "meta.json" else reader.restore(2, state)
    except ValueError as error:
        print(reader.set_aside(error).replace("\\n", " "), flush=True)
    assert reader.latest_step() == 1 and (reader.restore(1, state)["w"] == state["w"]).all()
    reader.close()
"""


def test_a_damaged_one_is_named_with_the_way_out(tmp_path):
    done = run_script(DAMAGED, tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    for line in lines:
        assert re.search(r"the checkpoint of step 2 in .* is damaged: .*; it is kept as 2.damaged going on", line)


FULL = """
import json, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from flax import nnx
from roxxel_dist.checkpoint.store import CheckpointStore, SaveError
from roxxel_dist.train.checkpointer import Checkpointer

disk = Path(sys.argv[1])
numbers = np.random.default_rng(0).normal(size=(10, 60, 1000)).astype(np.float32)
state = {f"w{i}": jnp.asarray(numbers[i]) for i in range(10)}
store, told = CheckpointStore(disk / "c"), []
store.save(1, state, {})
store.wait()
while ended := store.poll():
    told.append([ended.step, ended.problem])
filler = disk / "filler"
filler.write_bytes(bytes(5 << 20))
for step in (2, 3):
    store.save(step, state, {})
    store.settle()
    while ended := store.poll():
        told.append([ended.step, ended.problem])
try:
    store.wait()
except SaveError as error:
    told.append(["wait", str(error)])
left = sorted(path.name for path in (disk / "c").iterdir() if path.name != ".lock")
known = store.steps()
filler.unlink()
store.save(3, {name: leaf + 1 for name, leaf in state.items()}, {})
store.wait()
back = store.restore(3, state)
exact = all(bool((back[name] == state[name] + 1).all()) for name in state)
store.close()

filler.write_bytes(bytes(3 << 20))
model = nnx.Linear(600, 1000, rngs=nnx.Rngs(0))
saver = Checkpointer(disk / "own", model)
saver.save(1)
saver.save(2)
try:
    saver.close()
except SaveError as error:
    told.append(["close", str(error)])
print(json.dumps([told, left, known, exact]))
"""


def test_a_full_disk(small_disk):
    """A real one: the save fails, is reported once, leaves nothing, and the next one succeeds once there is room."""
    done = run_script(FULL, small_disk)
    assert done.returncode == 0, done.stderr
    told, left, known, exact = json.loads(done.stdout)
    full = r"could not be saved in .*/c \(rank 0: No space left on device\); the newest complete one is of step 1"
    full += "; make room in .*"
    assert [what for what, _ in told] == [1, 2, 3, "wait", "close"]
    assert told[0][1] == ""
    for step, (_, said) in zip((2, 3, 3), told[1:4], strict=True):
        assert re.fullmatch(f"the checkpoint of step {step} {full}", said)
    assert "step 2 could not be saved" in told[4][1]
    assert "step 1 could not be saved" in done.stderr  # the standalone one warns, and goes on
    assert (left, known, exact) == (["1"], [1], True)


def test_a_folder_that_cannot_be_written(small_disk):
    state = {"step": jnp.int32(3)}
    saver = CheckpointStore(small_disk / "c")
    saver.save(1, state, {})
    saver.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for folder in (small_disk / "c", small_disk / "new"):
        with pytest.raises(ValueError, match=r"cannot be written .Read-only file system.: choose another folder"):
            CheckpointStore(folder)
    reader = CheckpointReader(small_disk / "c")
    assert int(reader.restore(1, state)["step"]) == 3
    reader.close()


def test_a_file_in_its_place(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(ValueError, match=r"c cannot be written .File exists."):
        CheckpointStore(tmp_path / "c")


ENDLESS = """
import sys
import jax.numpy as jnp
from roxxel_dist.checkpoint.store import CheckpointStore

store = CheckpointStore(sys.argv[1])
for step in range(1, 1000):
    store.save(step, {f"w{i}": jnp.full((500, 1000), float(step + i)) for i in range(10)}, {"step": step})
    store.wait()
"""


def test_killed_in_the_midst_of_a_save(tmp_path):
    folder = tmp_path / "c"

    def begun():
        return [name for name in names(folder) if "tmp" in name] if folder.is_dir() else []

    for _ in range(5):
        with (tmp_path / "log").open("w") as log:
            saver = warm.start(ENDLESS, [folder], tmp_path, environment(), (log, log))
        try:
            wait_for(lambda: any(not name.startswith(("1.", "2.")) for name in begun()), what="a save")
        finally:
            os.kill(saver.pid, signal.SIGKILL)
            saver.wait()
        if begun():  # or it was killed just after
            break
    left = names(folder)
    assert begun()
    reader = CheckpointReader(folder)
    newest = reader.latest_step()
    assert newest == max(int(name) for name in left if name.isdecimal())
    assert reader.meta(newest) == {"step": newest}
    back = reader.restore(newest, {f"w{i}": jnp.zeros((500, 1000)) for i in range(10)})
    assert all(bool((back[f"w{i}"] == newest + i).all()) for i in range(10))
    reader.close()
    assert names(folder) == left  # a reader removes nothing
    CheckpointStore(folder).close()
    assert names(folder) == [name for name in left if name.isdecimal()]


@contextmanager
def an_old_one_that_stays(folder, monkeypatch):
    """A file system is mounted on an old checkpoint: it cannot be renamed."""
    mount = ["mount", "-t", "tmpfs", f"{MOUNT}{os.environ[MARK]}"]
    subprocess.run([*mount, folder / "1"], check=True)
    yield r"older ones \(step 1\) could not be deleted \(.*: Device or resource busy\): the next save tries again"
    subprocess.run(["umount", folder / "1"], check=True)


@contextmanager
def a_folder_that_cannot_be_synced(folder, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(store, "sync_folder", fails)
        yield r"the folder of the checkpoint of step 2 could not be synced \(Input/output error\)"


@pytest.mark.parametrize("fault", [an_old_one_that_stays, a_folder_that_cannot_be_synced])
def test_what_fails_after_a_checkpoint_is_complete_is_no_failure_of_the_save(small_disk, monkeypatch, fault):
    state = {"step": jnp.int32(3)}
    saver = CheckpointStore(small_disk / "c", max_to_keep=1)
    saver.save(1, state, {})
    saver.wait()
    saver.poll()
    with fault(small_disk / "c", monkeypatch) as line:
        saver.save(2, state, {})
        saver.wait()
        ended = saver.poll()
        assert (ended.step, ended.problem) == (2, "")
        assert re.search(line, ended.warning)
        assert saver.steps() == [1, 2]
        assert names(small_disk / "c") == ["1", "2"]
    saver.save(3, state, {})
    saver.wait()
    assert saver.poll().warning == ""
    assert saver.steps() == [3]
    assert names(small_disk / "c") == ["3"]
    saver.close()


def test_a_folder_that_cannot_be_swept_keeps_no_rank_from_the_end_of_a_save(tmp_path, monkeypatch):
    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    saver = CheckpointStore(tmp_path / "c")
    monkeypatch.setattr(files, "sweep", stale)
    saver.save(1, {"step": jnp.int32(3)}, {})
    saver.wait()
    assert saver.steps() == [1]
    saver.close()


def test_a_save_deletes_nothing_of_another_one_under_way(tmp_path, monkeypatch):
    """Two writers of one process may have one folder; and a save has no name that one of an earlier job has."""
    slow, fast = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    goes_on, hash_blocks = threading.Event(), files.hash_blocks
    with monkeypatch.context() as patch:
        patch.setattr(files, "hash_blocks", lambda *given: goes_on.wait() and hash_blocks(*given))
        slow.save(1, {"w": jnp.arange(9.0)}, {})
        wait_for(lambda: list(tmp_path.glob("1.*/state/_METADATA")), what="its files")
    fast.save(2, {"w": jnp.arange(9.0)}, {})
    fast.wait()
    goes_on.set()
    slow.wait()
    assert names(tmp_path) == ["1", "2"]
    assert slow._token != fast._token
    slow.close()
    fast.close()


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """Orbax leaves a file to the system. Those of tensorstore, which syncs them itself, are not seen here."""
    synced, missing, fsync, rename = set(), [], os.fsync, os.rename

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def counts(source, target):
        ours = [path for path in files.files_below(source) if "ocdbt.process_" not in str(path)]
        missing.extend(path.name for path in ours if path.stat().st_ino not in synced)
        rename(source, target)

    saver = CheckpointStore(tmp_path)
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", counts)
    saver.save(1, {"w": jnp.arange(9.0)}, {})
    saver.wait()
    saver.close()
    assert names(tmp_path) == ["1"]
    assert synced
    assert missing == []


@pytest.mark.parametrize(
    ("error", "source", "is_shown"),
    [
        (RuntimeError("Event loop is closed"), None, False),
        (RuntimeError("Event loop is closed"), print, True),
        (RuntimeError("something else"), None, True),
    ],
)
def test_reads_that_end_behind_a_failed_one_print_nothing(monkeypatch, error, source, is_shown):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    files.drop_late_reads.__wrapped__()
    sys.unraisablehook(SimpleNamespace(exc_value=error, object=source))
    assert len(shown) == is_shown
