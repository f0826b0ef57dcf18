"""Checkpoints and small files of a run in a bucket, on a real S3 server."""

import json
import os
import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from commands import wait_for

from roxxel_dist.checkpoint.reader import CheckpointReader, DamagedCheckpoint
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.objects import lease
from roxxel_dist.objects.errors import StoreTimeoutError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.place import bucket_run as run_mirror
from roxxel_dist.place.bucket_folder import BucketFolder
from roxxel_dist.place.bucket_run import BucketRun
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process.durable import SAVE_FOLDER, SaveRequests

STATE = {"params": {"w": jnp.arange(600_000.0), "b": jnp.arange(3.0)}, "step": jnp.int32(1)}


@pytest.fixture
def link(server):
    with server.link() as link:
        yield link


@pytest.fixture
def url(server, link, request, tmp_path):
    with server.environment(link, XDG_CACHE_HOME=str(tmp_path / "cache")):
        yield server.url(request.node.name.partition("[")[0])


def opened(url, folder, kind=CheckpointStore, **options):
    """The checkpoints of the run as a host has them that keeps its files in `folder`."""
    run = BucketRun(url, folder, timeout_s=2)
    return kind(run.folder / "checkpoints", remote=run.checkpoints, **options)


def saved(store, step, val_loss=None):
    store.save(step, {**STATE, "step": jnp.int32(step)}, {}, val_loss)
    store.wait()


def keys(url, below="checkpoints"):
    return [info.key for info in ObjectStore.open(url).list(below)]


def flip(url, key):
    """One bit in the middle of an object is another one."""
    store = ObjectStore.open(url)
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    store.write(key, bytes(data))


def largest(url, step):
    return max(ObjectStore.open(url).list(f"checkpoints/{step}"), key=lambda info: info.size).key


def test_a_host_that_has_nothing_restores_what_another_one_has_saved(url, tmp_path):
    first = opened(url, tmp_path / "first", max_to_keep=2)
    for step, val_loss in ((1, 1.0), (2, 3.0), (3, 2.0), (4, 2.5)):
        saved(first, step, val_loss)
    first.close()
    assert first.steps() == [1, 3, 4]  # the best one too
    assert {key.split("/")[1] for key in keys(url)} == {"1", "3", "4"}
    folder = BucketFolder(url, tmp_path / "first").folder
    assert keys(url) == sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != ".lock"
    )

    other = opened(url, tmp_path / "other")
    assert (other.steps(), other.best_step()) == ([1, 3, 4], 1)
    restored = other.restore(4, STATE)
    np.testing.assert_array_equal(restored["params"]["w"], STATE["params"]["w"])
    assert int(restored["step"]) == 4
    other.delete_later(3, {"again": True})
    other.close()
    assert opened(url, tmp_path / "third").meta(3) == {"again": True}
    assert {key.split("/")[1] for key in keys(url)} == {"1", "3"}


def test_a_save_that_was_cut_off_is_never_taken(url, tmp_path):
    store = opened(url, tmp_path / "first")
    saved(store, 1)
    saved(store, 2)
    store.close()
    ObjectStore.open(url).delete(["checkpoints/2/digests.json"])  # as if it had been killed before the last object
    reader = opened(url, tmp_path / "reader", CheckpointReader)
    assert reader.steps() == [1]
    assert any(key.startswith("checkpoints/2/") for key in keys(url))  # it only reads
    again = opened(url, tmp_path / "first")  # which has a whole checkpoint 2 on its disk
    assert again.steps() == [1]
    assert not any(key.startswith("checkpoints/2/") for key in keys(url))
    saved(again, 2)
    assert opened(url, tmp_path / "other").steps() == [1, 2]


def test_a_damaged_object_is_set_aside_and_a_damaged_copy_is_fetched_again(url, tmp_path):
    store = opened(url, tmp_path / "first")
    saved(store, 1)
    saved(store, 2)
    local = BucketFolder(url, tmp_path / "first").folder / largest(url, 1)
    local.write_bytes(bytes(local.stat().st_size))
    np.testing.assert_array_equal(store.restore(1, STATE)["params"]["w"], STATE["params"]["w"])

    flip(url, largest(url, 2))
    other = opened(url, tmp_path / "other")
    with pytest.raises(DamagedCheckpoint, match=r"params/w.* does not agree with its digest, written by rank 0"):
        other.restore(2, STATE)
    with pytest.raises(DamagedCheckpoint) as damage:
        other.restore(2, STATE)
    assert "going on from step 1" in other.set_aside(damage.value)
    assert opened(url, tmp_path / "third").steps() == [1]
    flip(url, "checkpoints/1/digests.json")
    with pytest.raises(DamagedCheckpoint, match=r"digests\.json"):
        opened(url, tmp_path / "fourth").meta(1)


def test_rights_that_lack_deletion_cost_no_checkpoint(url, link, tmp_path):
    store = opened(url, tmp_path / "first", max_to_keep=1)
    saved(store, 1)
    assert not store.poll().warning
    link.keep = True
    saved(store, 2)
    assert re.search(
        r"step 2 is saved .*, and older ones \(step 1\) could not be deleted .*s3://", store.poll().warning
    )
    assert store.steps() == [1, 2] == opened(url, tmp_path / "reader", CheckpointReader).steps()
    link.keep = False
    saved(store, 3)  # the next save deletes what was left
    assert not store.poll().warning
    store.close()
    assert store.steps() == [3]
    assert {key.split("/")[1] for key in keys(url)} == {"3"}


@pytest.mark.cluster
def test_a_store_that_is_away_for_a_moment_costs_no_save_and_one_that_stays_away_ends_the_run(url, link, tmp_path):
    store = opened(url, tmp_path / "first")
    saved(store, 1)
    link.down = True
    threading.Timer(0.7, lambda: setattr(link, "down", False)).start()
    saved(store, 2)
    assert store.steps() == [1, 2]
    link.down = True
    store.save(3, STATE, {})
    with pytest.raises(StoreTimeoutError, match=r"step 3 could not be saved .*write s3://.*/checkpoints/3/state/"):
        store.wait()
    store.close()
    link.down = False
    assert opened(url, tmp_path / "other").steps() == [1, 2]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run_mirror, "INTERVAL_S", 0.05)
    monkeypatch.setattr(lease, "SETTLE_S", 0.1)


def test_small_files_follow_and_are_there_at_the_end(url, tmp_path, quick):
    run, other = BucketRun(url, tmp_path / "first"), ObjectStore.open(url)
    run.pull()
    run.take()
    (run.folder / "config.yaml").write_text("dim: 32\n")
    run.begin()
    assert other.read("config.yaml") == b"dim: 32\n"  # before the first step
    rows = run.folder / "metrics.jsonl"
    rows.write_text('{"step": 1}\n')
    wait_for(lambda: "metrics.jsonl" in keys(url, ""))
    (run.folder / "config.yaml").unlink()  # as a cleaner of caches does
    run._mirror.flush()
    assert other.read("config.yaml") == b"dim: 32\n"
    (run.folder / "config.yaml").write_text("dim: 33\n")
    (run.folder / ".hidden.tmp").write_text("")
    (run.folder / "plots").mkdir()
    (run.folder / "plots" / "loss.png").write_text("picture")
    run.close()
    assert keys(url, "") == ["config.yaml", "metrics.jsonl", "plots/loss.png", "run.lease"]
    assert (local_run(url) / "config.yaml").read_text() == "dim: 33\n"

    rows.write_text('{"step": 1}\n{"step": 2}\n')  # not sent any more: this host has the newer rows
    (run.folder / "training_cursor.json").write_text("{}")  # and of another life of the run
    again = BucketRun(url, tmp_path / "first")
    again.pull()
    assert rows.read_text().count("\n") == 2
    assert not (run.folder / "training_cursor.json").exists()
    other.write("metrics.jsonl", b'{"step": 9}\n')
    again.pull()
    assert rows.read_text() == '{"step": 9}\n'


def test_requests_to_save_come_through_the_bucket(url, tmp_path, quick):
    run, other = BucketRun(url, tmp_path / "first"), ObjectStore.open(url)
    run.pull()
    other.write(".save/old.request", b"{}")
    run.begin()
    assert keys(url, ".save") == [], "what a dead run was asked"
    for step in (7, 9):
        other.write(f".save/{step}.request", b"{}")
        wait_for((run.folder / SAVE_FOLDER / f"{step}.request").exists)
        SaveRequests(run.folder).finish(step)
        wait_for(lambda: keys(url, ".save") == [f".save/{step}.answer"])  # noqa: B023
        assert json.loads(other.read(f".save/{step}.answer")) == {"step": step}
        other.delete([f".save/{step}.answer"])
    run.close()


def test_a_second_job_is_refused_and_an_attempt_of_the_same_job_is_not(url, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    monkeypatch.setattr(lease, "POLL_S", 0.2)
    first, second = BucketRun(url, tmp_path / "first"), BucketRun(url, tmp_path / "second")
    first.pull()
    first.take()
    with pytest.raises(ValueError, match=rf"roxxel-dist train \(pid {os.getpid()} on host .* s ago"):
        second.take()
    first.close()
    second.take()
    second.close()
    monkeypatch.setenv("ROXXEL_RUN_ID", "job")
    first.take()
    second.take()  # the process of the attempt before was killed
    wait_for(lambda: first._lease.lost)
    with pytest.raises(lease.LeaseLostError, match="was taken away"):
        first.check()
    second.close()
    first.abandon(1)


def test_slips_are_named(url, tmp_path):
    for wrong, message in (("s3://bucket", "a whole bucket"), ("s3://", "names no bucket")):
        with pytest.raises(ValueError, match=message):
            BucketRun(wrong, tmp_path)
    with pytest.raises(ValueError, match="local_dir is s3://b/k: name a folder"):
        BucketRun(url, "s3://b/k")
