"""Who saves in a folder of checkpoints, and what a reader beside the writer may change: nothing."""

import subprocess
import sys

import jax.numpy as jnp
import pytest
from flax import nnx

import roxxel_dist
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.process.exit_codes import UserError

HOLDER = """
import sys
from pathlib import Path
from roxxel_dist.process.file_lock import hold_folder
hold_folder(Path(sys.argv[1]), "saving checkpoints in")
print("held", flush=True)
sys.stdin.read()
"""
WRITER = """
import sys
import jax.numpy as jnp
from flax import nnx
import roxxel_dist
model = nnx.Linear(512, 2048, rngs=nnx.Rngs(0))
checkpointer = roxxel_dist.Checkpointer(sys.argv[1], model)
for step in range(1, 13):
    checkpointer.save(step)
    print(step, flush=True)
checkpointer.close()
print(checkpointer.store.steps(), flush=True)
"""


def small(value=0.0):
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.full((3, 3), value)
    return model


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))} if folder.exists() else None


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints, and what another program is writing now."""
    with roxxel_dist.Checkpointer(tmp_path / "run" / "c", small(1)) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    (tmp_path / "run" / "c" / "3.orbax-checkpoint-tmp-3" / "state").mkdir(parents=True)
    return tmp_path / "run" / "c"


READERS = {
    "open and close": lambda folder: roxxel_dist.Checkpointer(folder, small()).close(),
    "restore": lambda folder: roxxel_dist.Checkpointer(folder, small()).restore(),
    "list": lambda folder: roxxel_dist.Checkpointer(folder, small()).store.steps(),
    "read only store": lambda folder: CheckpointReader(folder).close(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_changes_nothing(folder, name):
    before = contents(folder)
    READERS[name](folder)
    assert contents(folder) == before
    READERS[name](folder / "missing" / "c")
    assert contents(folder) == before


def test_a_reader_sees_new_checkpoints_at_each_restore(folder):
    model = small()
    reader = roxxel_dist.Checkpointer(folder, model)
    assert reader.restore() == 2
    with roxxel_dist.Checkpointer(folder, small(3)) as writer:
        writer.save(3)
    assert reader.restore() == 3
    assert (model.kernel[...] == 3).all()


@pytest.mark.long
def test_readers_beside_a_writer_disturb_no_save(tmp_path):
    """They open, restore and close all the time while another process saves twelve times."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as writer:
        while writer.poll() is None:
            roxxel_dist.Checkpointer(tmp_path / "c", small()).close()
        text = writer.stdout.read()
    assert writer.returncode == 0, text
    assert text.splitlines()[-1] == "[10, 11, 12]", text


def held(path):
    """A process that holds the lock of a folder until its input ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    return holder


def save_four(folder):
    with roxxel_dist.Checkpointer(folder, small()) as checkpointer:
        checkpointer.save(4)


@pytest.mark.parametrize("write", [save_four, CheckpointStore], ids=["checkpointer", "store"])
@pytest.mark.parametrize(
    ("name", "locked"), [("c", "c"), ("checkpoints", "checkpoints/..")], ids=["own folder", "in a run directory"]
)
def test_a_second_writer_is_refused_and_changes_nothing(folder, write, name, locked):
    folder = folder.rename(folder.with_name(name))
    with held((folder.parent / locked).resolve()) as holder:
        before = contents(folder)
        with pytest.raises(UserError, match=f"another process \\(pid {holder.pid} .*is saving checkpoints in"):
            write(folder)
        assert contents(folder) == before
        assert roxxel_dist.Checkpointer(folder, small()).restore() == 2  # reading is free
        holder.stdin.close()
    write(folder)
    assert not list(folder.glob("*tmp*"))  # under the lock what an interrupted save left is removed


def test_a_second_writer_of_the_same_process_is_refused_until_the_first_is_closed(tmp_path):
    first = roxxel_dist.Checkpointer(tmp_path / "c", small())
    first.save(1)
    second = roxxel_dist.Checkpointer(tmp_path / "c", small())
    with pytest.raises(UserError, match=r"this process is saving checkpoints in .* already: close that one first"):
        second.save(2)
    first.close()
    second.save(2)
    second.close()
    assert second.store.steps() == [1, 2]


def test_a_writer_that_nobody_closed_and_nobody_has_lets_the_next_one_write(tmp_path):
    """As a cell of a notebook that is run again."""
    for step in (1, 2):
        checkpointer = roxxel_dist.Checkpointer(tmp_path / "c", small())
        checkpointer.save(step)
        checkpointer.wait()
        del checkpointer
    assert roxxel_dist.Checkpointer(tmp_path / "c", small()).store.steps() == [1, 2]


def test_the_first_save_looks_again_under_the_lock(folder):
    late = roxxel_dist.Checkpointer(folder, small())
    with roxxel_dist.Checkpointer(folder, small(3)) as writer:
        writer.save(3)
    with pytest.raises(UserError, match=r"has a checkpoint of step 3 already: call restore\(\) first"):
        late.save(3)
