"""Run by every rank: saves while the disk of one of them fails, or restores; writes what it saw to `saw-<rank>`."""

import contextlib
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist import initialize
from roxxel_dist.checkpoint.store import CheckpointStore, SaveError
from roxxel_dist.cluster.distributed import barrier, process_index
from roxxel_dist.cluster.mesh import make_mesh

SPECS = {"cut": P("data"), "half": P(None, "data"), "whole": P()}


def make_state(seed):
    rng = np.random.default_rng(seed)
    values = {
        "cut": rng.standard_normal((400, 300), np.float32),
        "half": np.asarray(jnp.asarray(rng.standard_normal((4, 50_000)), jnp.bfloat16)),
        "whole": rng.standard_normal(100_000).astype(np.float32),
    }
    mesh = make_mesh()
    return values, {
        name: jax.make_array_from_callback(value.shape, NamedSharding(mesh, SPECS[name]), value.__getitem__)
        for name, value in values.items()
    }


@contextlib.contextmanager
def small_files_only(when):
    """Every longer write to a file fails: as on a full disk, but for this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if when:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def say(text):
    with Path(f"saw-{process_index()}").open("a") as file:
        file.write(f"{text}\n")


def save(folder):
    try:
        CheckpointStore(f"own-{process_index()}")  # as with folders that are not on a shared file system
    except ValueError as error:
        say("refused " + str(error).split("(")[1].split(")")[0])
    store = CheckpointStore(folder, max_to_keep=2)
    _, state = make_state(0)
    store.save(1, state, {})
    for step, failing in ((2, 1), (3, 0)):
        store.settle()
        with small_files_only(process_index() == failing):
            store.save(step, state, {})
            store.settle()
        say(f"latest {store.latest_step()}")
        while ended := store.poll():
            say(f"{ended.step}: {ended.problem or 'saved'}")
    try:
        store.wait()
    except SaveError as error:
        say(f"error {error}")
    barrier("before looking", 60)
    say(f"left {sorted(path.name for path in folder.iterdir())}")
    barrier("after looking", 60)
    _, state = make_state(4)
    store.save(4, state, {"rows": 7}, val_loss=0.5)
    store.save(5, state, {}, val_loss=0.7)
    store.wait()
    say(f"steps {store.steps()} best {store.best_step()}")
    store.close()


def restore(folder):
    store = CheckpointStore(folder)
    values, _ = make_state(4)
    _, like = make_state(1)
    back = store.restore(4, like)
    for name, leaf in back.items():
        assert leaf.sharding == like[name].sharding
        for shard in leaf.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), values[name][shard.index]), name
    say(f"restored {store.meta(4)} on {len(jax.devices())} devices")
    store.close()


initialize()
globals()[sys.argv[1]](Path(sys.argv[2]))
barrier("end", 60)
