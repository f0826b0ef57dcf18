"""Run by every rank: loops that ask, at every step, whether to save. What each rank saw is in FOLDER/seen-RANK.json.

`lockstep` is a training loop in small: a collective a step, one in flight, until the file FOLDER/stop is there. In
`free` nothing holds the ranks together, and they leave one after the other, several times. In `late` rank 1 comes when
rank 0 has given it up.
"""

import json
import random
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster import request
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.cluster.process import barrier, initialize, is_primary, process_index
from roxxel_dist.cluster.request import SaveRequests
from roxxel_dist.run_directory import RunDirectory

PAUSES = (0.0, 0.0, 0.001, 0.02)


def lockstep(folder):
    mesh, chance = make_mesh(), random.Random()
    sharding = NamedSharding(mesh, P("data"))
    add = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
    seen, step, before = [], 0, None
    with SaveRequests(folder, limit_s=60) as requests:
        while True:
            step += 1
            time.sleep(chance.choice(PAUSES))
            stop = np.int32(is_primary() and (folder / "stop").exists())
            now = add(jax.make_array_from_callback((mesh.size,), sharding, lambda _, stop=stop: stop[None]))
            if before is not None and int(before):
                break
            before = now
            time.sleep(chance.choice(PAUSES))
            if requests.due(step):
                seen.append(step)
                barrier("save", limit_s=60)  # as a checkpoint's: it hangs where ranks save different steps
                requests.answered(step)
        assert int(now) in (0, 1)
    return seen


def free(folder):
    seen, chance = [], random.Random()
    request.POLL_S = 0.01  # many rounds, so that some meet a rank that leaves
    for turn in range(10):
        pace = chance.choice((0.002, 0.006, 0.01))
        with SaveRequests(folder, limit_s=60) as requests:
            for step in range(60):
                time.sleep(chance.random() * pace)
                if requests.due(step):
                    seen.append((turn, step))
        barrier("turn", limit_s=60)
    return seen


def late(folder):
    def until(condition, requests):
        end, step = time.monotonic() + 60, 0
        while not condition(step, requests):
            assert time.monotonic() < end
            time.sleep(0.01)
            step += 1

    if not is_primary():
        until(lambda *_: (folder / "come").exists(), None)
    seen = []
    with SaveRequests(folder, limit_s=1) as requests:
        if is_primary():
            until(lambda step, requests: requests.due(step) or (folder / "come").exists(), requests)
        barrier("together", limit_s=60)

        def saved(step, requests):
            if requests.due(step):
                seen.append(step)
                requests.answered(step)
            return bool(seen)

        until(saved, requests)
    return [len(seen)]


initialize()
chosen = {"lockstep": lockstep, "free": free, "late": late}[sys.argv[1]]
path = Path(sys.argv[2])
directory = RunDirectory(path)
if is_primary():
    directory.claim(resume=True)
(path / f"pid-{process_index()}").touch()
result = chosen(path)
(path / f"seen-{process_index()}.json").write_text(json.dumps(result))
directory.release()
