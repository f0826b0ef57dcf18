"""The weights of a run in files of their own: their format, which step they are of, and what cannot harm them."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import wait_for
from flax import serialization
from runs import PHASES, module, stop_after, told, train
from small_disks import mounted_disk

from roxxel_dist import Phase
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.train import saves as saves_module
from roxxel_dist.train.saves import Exporter
from roxxel_dist.train.step.bad_steps import LossMonitorState
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.weights.files import BEST, NEWEST, read_weights, step_of, write_tensors, write_weights

ALL_KINDS = {
    "blocks.0.w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "blocks.1.w": np.asarray(jnp.linspace(-3, 3, 70_000, dtype=jnp.bfloat16)).reshape(700, 100),
    "turned": np.arange(6.0).reshape(2, 3).T,
    "single": np.array(7, np.int32),
    "none": np.zeros((0, 5), np.float16),
    "both.ends": np.array([True, False]),
}


def same(mine, theirs):
    assert list(mine) == list(theirs)
    for name, leaf in theirs.items():
        here, there = mine[name], np.asarray(leaf)
        assert (here.shape, here.dtype, here.tobytes()) == (there.shape, there.dtype, there.tobytes()), name


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def checkpoints(folder, losses, value=0.0):
    """A run's store with a checkpoint for each of {step: val_loss}, whose parameter is `value` + step."""
    store = CheckpointStore(folder / "checkpoints", max_to_keep=None)
    for step, val_loss in losses.items():
        params = {"w": jnp.full((300, 100), value + step)}
        store.save(
            step, TrainState(jnp.int32(step), params, {}, {"mu": params}, LossMonitorState.initial()), {}, val_loss
        )
    store.wait()
    return store


def export(store, *wanted, enabled=True):
    """What an exporter says that begins with the checkpoints of `store`, and is asked for these (name, step)."""
    said = []
    exporter = Exporter(store.folder.parent, store, said.append, enabled=enabled)
    exporter.begin(store.latest_step() or 0, store.best_step())
    for name, step in wanted:
        exporter.want(name, step)
    exporter.wait(60)
    return said


def unfinished(folder):
    return list(folder.glob(f".{BEST}.*.tmp"))


def value(path):
    """(step, the number that all of the parameter is)."""
    params, step = read_weights(path)
    assert params["w"].shape == (300, 100)
    return step, *{float(number) for number in params["w"].flat}


def test_flax_reads_it(tmp_path):
    path = tmp_path / "w.msgpack"
    write_weights(path, 300, ALL_KINDS)
    found = serialization.msgpack_restore(path.read_bytes())
    assert sorted(found) == ["digest", "digests", "params", "step"]
    assert found["step"] == step_of(path) == 300
    same(found["params"], ALL_KINDS)
    again, step = read_weights(path)
    assert step == 300
    same(again, ALL_KINDS)
    assert names(tmp_path) == ["w.msgpack"]


def test_the_step_is_known_of_such_files_alone(tmp_path):
    path = tmp_path / "w"
    assert step_of(path) is None
    write_weights(path, 2**40, {})
    assert step_of(path) == 2**40
    for other in (b"", b"\x82", b"\x82\xa4step", b"{", serialization.msgpack_serialize({"a": 1}), os.urandom(100)):
        path.write_bytes(other)
        assert step_of(path) is None
        with pytest.raises(ValueError, match="w holds no weights"):
            read_weights(path)
    with pytest.raises(FileNotFoundError):
        read_weights(tmp_path / "absent")


ENDLESS = """
import sys
from pathlib import Path
import numpy as np
from roxxel_dist.weights.files import write_weights

for step in range(1, 1000):
    write_weights(Path(sys.argv[1]), step, {f"w{i}": np.full((500, 1000), float(step + i)) for i in range(8)})
"""


def test_killed_in_the_midst_of_writing_it_leaves_the_file_before(tmp_path):
    path = tmp_path / BEST
    for _ in range(10):
        writer = subprocess.Popen([sys.executable, "-c", ENDLESS, path])
        try:
            wait_for(lambda: path.exists() and unfinished(tmp_path), what="a second file")
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        if unfinished(tmp_path):  # or it was killed just after
            break
    assert unfinished(tmp_path)
    params, step = read_weights(path)
    same(params, {f"w{i}": np.full((500, 1000), float(step + i)) for i in range(8)})
    store = CheckpointStore(tmp_path / "checkpoints", writes_later=True)
    Exporter(tmp_path, store, print, enabled=True).begin(step, None)  # a run whose checkpoints have no loss
    store.close()
    assert names(tmp_path) == []


def test_a_full_disk_is_a_line(tmp_path):
    with mounted_disk(tmp_path / "disk", "100k") as disk:
        store, said = checkpoints(tmp_path, {3: 1.0}), []
        store.close()
        write_weights(disk / NEWEST, 2, {"w": np.zeros(3)})
        exporter = Exporter(disk, store, said.append, enabled=True)
        exporter.want(NEWEST, 3)
        exporter.wait(60)
        full = "could not be written (No space left on device): the checkpoint of step 3 has the same weights"
        assert said == [f"{NEWEST} {full}"]
        assert (names(disk), step_of(disk / NEWEST)) == ([NEWEST], 2)


def test_a_full_disk_is_named_with_the_file(tmp_path):
    with mounted_disk(tmp_path / "disk", "100k") as disk:
        with pytest.raises(OSError, match=r"No space left on device: '.*/disk/model.safetensors'"):
            write_tensors(disk, iter([("w", np.zeros(99_000))]), {"w": 792_000}, 1 << 30, 1)
        (disk / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(OSError, match=r"No space left on device: '.*/disk/model_weights.msgpack'"):
            write_weights(disk / NEWEST, 2, {"w": np.zeros(99_000)})
        assert names(disk) == []


def test_one_that_is_best_and_newest(tmp_path):
    store = checkpoints(tmp_path, {1: 2.0, 2: 1.0})
    assert export(store, (NEWEST, 2)) == []
    best, newest = tmp_path / BEST, tmp_path / NEWEST
    assert value(best) == value(newest) == (2, 2.0)
    store.save(
        3, TrainState(jnp.int32(3), {"w": jnp.full((300, 100), 3.0)}, {}, {}, LossMonitorState.initial()), {}, 0.5
    )
    store.close()
    assert export(store, (BEST, 3)) == []
    assert (value(best), value(newest)) == ((3, 3.0), (2, 2.0))
    assert names(tmp_path) == [BEST, "checkpoints", NEWEST]


def test_what_a_run_has_cut_off_goes_at_once(tmp_path):
    """Back to step 2: later files are of steps that never were, and the same number may come again."""
    store = checkpoints(tmp_path, {2: 2.0, 4: 1.0})
    assert export(store, (NEWEST, 4)) == []
    store.delete_later(2, {})
    assert export(store, enabled=False) == []
    assert names(tmp_path) == ["checkpoints"]
    store.close()
    store = checkpoints(tmp_path, {4: 1.0}, value=100.0)
    store.close()
    assert export(store, (NEWEST, 4)) == []
    assert value(tmp_path / BEST) == value(tmp_path / NEWEST) == (4, 104.0)


def test_a_best_that_a_dead_process_did_not_come_to(tmp_path):
    store = checkpoints(tmp_path, {2: 2.0, 4: 1.0, 6: 3.0})
    store.close()
    write_weights(tmp_path / BEST, 2, {"w": np.zeros((300, 100))})
    write_weights(tmp_path / NEWEST, 2, {"w": np.zeros((300, 100))})
    assert export(store) == []
    assert (value(tmp_path / BEST), value(tmp_path / NEWEST)) == ((4, 4.0), (2, 0.0))


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_news(tmp_path):
    store = checkpoints(tmp_path, {2: None, 4: None})
    store.close()
    shutil.rmtree(store.folder / "2")
    assert export(store, (NEWEST, 2)) == []
    assert names(tmp_path) == ["checkpoints"]
    (store.folder / "4" / "meta.json").write_text("{}")  # this one is damaged, and that is
    assert export(store, (NEWEST, 4)) == [
        f"{NEWEST} could not be written (meta.json does not agree with its digest): the checkpoint of step 4 is damaged"
    ]


def test_a_file_system_that_hangs_holds_up_nothing(tmp_path):
    """A pipe without a writer stands for it."""
    store, said = checkpoints(tmp_path, {2: None, 4: None}), []
    store.close()
    meta = store.folder / "2" / "meta.json"
    meta.unlink()
    os.mkfifo(meta)
    exporter = Exporter(tmp_path, store, said.append, enabled=True)
    exporter.want(NEWEST, 2)
    exporter.wait(0.2)
    assert said == ["weights are still being written after 0 s: going on without them"]
    exporter.want(NEWEST, 4)
    with meta.open("w") as pipe:
        pipe.write("no JSON")
    exporter.wait(60)
    assert len(said) == 2
    assert value(tmp_path / NEWEST) == (4, 4.0)


def restored(path, step, like):
    store = CheckpointReader(path / "checkpoints")
    try:
        return store.restore_params(step, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like))
    finally:
        store.close()


def test_the_weights_of_a_run_and_of_one_that_goes_back(corpus, tmp_path):
    """In bfloat16 and cut over two devices; the loss is lowest after step 5."""
    options = {
        "model": module(dim=160), "use_bf16": True, "fsdp": True, "val_fraction": 0, "max_to_keep": None,
        "eval_fn": lambda state: {"val_loss": abs(int(state.step) - 5)}, "eval_every": 5,
        "phases": [Phase(13, 2, 17)], "mesh": make_mesh(n_devices=2), "keep_best": True,
    }  # fmt: skip
    made = train(corpus, tmp_path, **options)
    assert any(not leaf.is_fully_replicated for leaf in made.state.params.values())
    for name, step in ((NEWEST, 13), (BEST, 5)):
        params, found = read_weights(tmp_path / name)
        assert found == step
        assert {str(leaf.dtype) for leaf in params.values()} == {"bfloat16"}
        same(params, restored(tmp_path, step, made.state.params))
    same(read_weights(tmp_path / NEWEST)[0], made.state.params)


def test_asked_to_stop_too_large_and_not_wanted(corpus, tmp_path, monkeypatch):
    options = {"phases": PHASES[:2], "max_steps": 8, "keep_best": True}
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        patch.setattr(saves_module, "LIMIT", 1000)
        assert train(corpus, tmp_path, **options).stopped
    assert "the weights take 0.0 GB" in told(tmp_path)
    assert told(tmp_path).count("the checkpoints have larger ones") == 1
    assert not list(tmp_path.glob("*.msgpack"))
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert train(corpus, tmp_path, **options).stopped
    assert (step_of(tmp_path / NEWEST), step_of(tmp_path / BEST)) == (7, 5)  # of the losses of steps 1 and 5
    before = (tmp_path / NEWEST).stat()
    train(corpus, tmp_path, PHASES[:2], max_steps=8, export_weights=False)
    assert (tmp_path / NEWEST).stat() == before
    assert json.loads((tmp_path / "training_cursor.json").read_text())["finished"]
