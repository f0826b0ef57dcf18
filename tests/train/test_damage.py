"""Checkpoints that are damaged: the next older complete one is used, and the run is what it would have been."""

import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial

import jax
import numpy as np
import pytest
from damage import KINDS, copy_damaged, damage, rows_of, state_of
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models import with_numbers
from runs import PHASES, losses, make, saved, told, train

from roxxel_dist import Checkpointer, Phase
from roxxel_dist.checkpoint.digests import DigestTable, digest
from roxxel_dist.checkpoint.metadata import CheckpointRef, ResumeSpec
from roxxel_dist.checkpoint.reader import CheckpointReader, DamagedCheckpoint
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.process.durable import FormatError

SEEDS = 15
LAST = 13


def check_resumed(corpus, finished_run, tmp_path, kind, seed, newest=1):
    run, step = copy_damaged(finished_run, tmp_path / "damaged", kind, seed, newest)
    resumed = make(corpus, run, checkpoint_every=4, max_to_keep=None)
    assert resumed.start_step == step, (kind, seed)
    resumed.run()
    resumed.close()
    assert (run / "checkpoints" / f"{LAST}.damaged").is_dir()
    log = told(run)[len(told(finished_run)) :]
    assert re.search(rf"step {LAST} in .* is damaged: .*written by rank 0.*it is kept as {LAST}.damaged", log), log
    assert rows_of(run) == rows_of(finished_run), (kind, seed)
    assert saved(run) == saved(finished_run)
    assert state_of(run, LAST) == state_of(finished_run, LAST), (kind, seed)
    shutil.rmtree(run)


QUICK = ("flip",)


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in QUICK)]
)
def test_the_next_older_whole_one_is_taken(corpus, finished_run, tmp_path, kind):
    check_resumed(corpus, finished_run, tmp_path, kind, seed=0, newest=1 + (kind == "flip"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_damages(corpus, finished_run, tmp_path, kind):
    for seed in range(1, 1 + SEEDS):
        check_resumed(corpus, finished_run, tmp_path, kind, seed, newest=1 + seed % 2)


def test_none_whole_is_an_error_and_never_a_new_run(corpus, finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    for step in saved(run):
        damage(run / "checkpoints", step, "flip", step)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged \(step 13: .*; step 12: .*step 1: "):
        make(corpus, run, max_to_keep=None)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    for step in saved(run):
        (run / "checkpoints" / str(step)).rename(run / "checkpoints" / f"{step}.damaged")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged \(.*13.damaged"):
        make(corpus, run, max_to_keep=None)
    assert losses(run) == losses(finished_run)


def test_what_is_set_aside_is_not_counted_and_not_swept(corpus, finished_run, tmp_path):
    run, _ = copy_damaged(finished_run, tmp_path / "run", "truncation", 1)
    (run / "checkpoints" / f"{LAST}.damaged").mkdir()
    train(corpus, run, max_to_keep=1)
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert left == {f"{LAST}.damaged", f"{LAST}.damaged2", str(LAST), str(best(run))}


def best(run):
    return min((loss, step) for step, _, loss in losses(run) if loss is not None)[1]


@pytest.fixture
def large(tmp_path):
    """Checkpoints of three steps whose arrays are in files that have no digest of their own."""
    arrays = {"a": np.arange(1 << 19, dtype=np.float32).reshape(512, 1024), "b": np.arange(9, dtype=np.float32)}
    state = jax.device_put({"params": arrays})
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, jax.device_put({"params": {name: x + step for name, x in arrays.items()}}), {"step": step})
    store.wait()
    yield tmp_path, store, state
    store.close()


def file_of_arrays(folder, step):
    return max((folder / str(step) / "state").rglob("*"), key=lambda path: path.stat().st_size)


def devices_as(state, axis):
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(axis if x.ndim > 1 else None))), state)


@pytest.mark.parametrize("axis", [None, "x"])
def test_arrays_are_compared_when_they_are_read(large, axis):
    """Where they lie as they did, and where no device has a block that was saved: there it is read once more."""
    folder, store, state = large
    table, path = DigestTable.read(folder / "2" / "digests.json"), file_of_arrays(folder, 2)
    assert [name for name, file in table.files.items() if not file.digest] == [str(path.relative_to(folder / "2"))]
    like = devices_as(state, axis)
    assert np.array_equal(store.restore(2, like)["params"]["a"], np.asarray(state["params"]["a"]) + 2)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert table.check_files(folder / "2") == []
    with pytest.raises(DamagedCheckpoint, match=r"step 2 .*: params/a\[0:512,0:1024\] does not agree .* by rank 0"):
        store.restore(2, like)
    with pytest.raises(DamagedCheckpoint, match=r"params/a\[0:512,0:1024\] does not agree"):
        store.check(2)


def test_damages_of_large_files(large, tmp_path_factory):
    folder, store, state = large
    whole = tmp_path_factory.mktemp("whole") / "3"
    shutil.copytree(folder / "3", whole)
    for kind in KINDS:
        for seed in range(5):
            damage(folder, 3, kind, seed)
            for look in (partial(store.restore, 3, state), partial(store.check, 3)):
                store.refresh()
                with pytest.raises(DamagedCheckpoint, match=r"step 3 .* written by rank 0"):
                    look()
            shutil.rmtree(folder / "3")
            shutil.copytree(whole, folder / "3")
    store.refresh()
    assert np.array_equal(store.restore(3, state)["params"]["b"], np.asarray(state["params"]["b"]) + 3)


@pytest.mark.parametrize("file", ["meta.json", "digests.json"])
def test_a_checkpoint_of_another_format_is_refused_and_stays(large, file):
    """It is not damaged: it is not renamed, and no older one takes its place."""
    folder, store, _ = large
    meta = json.loads((folder / "3" / "meta.json").read_text())
    table = json.loads((folder / "3" / "digests.json").read_text())
    del (meta if file == "meta.json" else table)["format"]
    (folder / "3" / "meta.json").write_text(json.dumps(meta))
    table["meta"] = [digest((folder / "3" / "meta.json").read_bytes())]
    text = json.dumps({**table, "digest": None}).removesuffix(', "digest": null}')
    (folder / "3" / "digests.json").write_text(f'{text}, "digest": "{digest((text + "}").encode())}"}}')
    store.refresh()
    for read in (store.check, store.meta):
        with pytest.raises(FormatError, match=rf"3/{file}: no format, and .* an earlier version of roxxel-dist"):
            read(3)
    assert (folder / "3").is_dir()


FLIPPER = """
import sys, time
for line in sys.stdin:
    path, offset, delay_s = line.split("\\t")
    time.sleep(float(delay_s))
    with open(path, "r+b") as file:
        file.seek(int(offset))
        byte = file.read(1)[0]
        file.seek(int(offset))
        file.write(bytes([byte ^ 1]))
    print("flipped", flush=True)
"""


def test_another_process_damages_it_while_it_is_read(tmp_path):
    """Whenever the bit is flipped, the restore gives what was saved or raises; it never gives the damage."""
    state = jax.device_put({"params": {"a": np.arange(1 << 20, dtype=np.float32)}})
    store = CheckpointStore(tmp_path)
    store.save(1, state, {})
    store.wait()
    largest = max((tmp_path / "1" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    begun = time.perf_counter()
    store.restore(1, state)
    span, raised = time.perf_counter() - begun, 0
    random, whole = np.random.default_rng(0), largest.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", FLIPPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as flipper:
        assert flipper.stdin is not None
        assert flipper.stdout is not None
        for delay in (*np.linspace(0.0, span, 15), 0.0):
            print(largest, random.integers(1000, len(whole) - 1000), delay, sep="\t", file=flipper.stdin, flush=True)
            if not delay:
                flipper.stdout.readline()
            try:
                restored = store.restore(1, state)["params"]["a"]
                assert np.array_equal(restored, state["params"]["a"]), delay
            except DamagedCheckpoint:
                raised += 1
            if delay:
                flipper.stdout.readline()
            largest.write_bytes(whole)
        flipper.stdin.close()
    assert raised >= 2  # the two whose damage was there before
    store.close()


def test_a_run_whose_checkpoints_are_away_does_not_begin_again(corpus, finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "checkpoints").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"has no checkpoint, and .*cursor.json says that step 13 was saved: put"):
        make(corpus, run)
    assert rows_of(run) == rows_of(finished_run)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (tmp_path / "away").rename(run / "checkpoints")
    made = make(corpus, run, checkpoint_every=4, max_to_keep=None)
    assert made.start_step == LAST
    made.close()


def test_a_reader_of_another_run_renames_nothing(corpus, finished_run, tmp_path):
    run, step = copy_damaged(finished_run, tmp_path / "other", "flip", 3, newest=2)
    hint = rf"step {LAST} in .* is damaged: .*; the next older complete one is of step {step}: name that"
    reader = CheckpointReader(run / "checkpoints")
    with pytest.raises(DamagedCheckpoint, match=hint):
        reader.check(LAST)
    reader.close()
    longer, origin = [*PHASES[:2], Phase(9, 8, 33)], ResumeSpec(fork=CheckpointRef(run, LAST))
    with pytest.raises(ValueError, match=hint):
        make(corpus, tmp_path / "fork", longer, origin=origin)
    assert saved(run) == saved(finished_run)


def test_a_checkpointer_takes_the_next_older_one(tmp_path, caplog):
    model = with_numbers(lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    with Checkpointer(tmp_path / "c", model) as checkpointer:
        for step in (1, 2):
            model.kernel.set_value(jax.device_put(np.full((3, 3), step, np.float32)))
            checkpointer.save(step)
    damage(tmp_path / "c", 2, "flip", 0)
    with Checkpointer(tmp_path / "c", model) as checkpointer:
        assert checkpointer.restore() == 1
        assert (np.asarray(model.kernel) == 1).all()
        assert "the checkpoint of step 2" in caplog.text
        assert not (tmp_path / "c" / "2.damaged").exists()  # it only reads until it saves
        checkpointer.save(2)
        checkpointer.wait()
        assert checkpointer.store.steps() == [1, 2]
    assert (tmp_path / "c" / "2.damaged").is_dir()


def test_going_back_is_no_damage(tmp_path):
    """A run that goes back writes `meta.json` anew, and the table with it."""
    store = CheckpointStore(tmp_path)
    store.save(1, {"params": jax.device_put({"a": np.arange(9, dtype=np.float32)})}, {"x": 1})
    store.save(2, {"params": jax.device_put({"a": np.arange(9, dtype=np.float32)})}, {"x": 1})
    store.wait()
    store.delete_later(1, {"x": 2})
    assert store.meta(1) == {"x": 2}
    store.check(1)
    store.close()
