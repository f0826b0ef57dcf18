"""Run by every rank: a training loop in small, with a collective a step, one in flight, until FOLDER/stop is there.

The steps that each rank was asked to save are in FOLDER/seen-RANK.json.
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

from roxxel_dist.cluster.distributed import barrier, initialize, is_primary, process_index
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.place.directory import RunDirectory
from roxxel_dist.process.durable import SaveRequests
from roxxel_dist.train.saves import StepAgreement

PAUSES = (0.0, 0.0, 0.001, 0.02)


def lockstep(folder):
    mesh, chance = make_mesh(), random.Random()
    sharding = NamedSharding(mesh, P("data"))
    add = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
    seen, step, before = [], 0, None
    requests = SaveRequests(folder)
    agreement = StepAgreement(requests, None)
    agreement.begin(0)
    while True:
        step += 1
        time.sleep(chance.choice(PAUSES))
        stop = np.int32(is_primary() and (folder / "stop").exists())
        now = add(jax.make_array_from_callback((mesh.size,), sharding, lambda _, stop=stop: stop[None]))
        if before is not None and int(before):
            break
        before = now
        time.sleep(chance.choice(PAUSES))
        if agreement.announcement(step).save:
            seen.append(step)
            barrier("save", limit_s=60)  # as a checkpoint's: it hangs where ranks save different steps
            requests.saved(step)
    if is_primary():
        requests.finish(step)
    assert int(now) in (0, 1)
    return seen


initialize()
path = Path(sys.argv[1])
directory = RunDirectory(path)
if is_primary():
    directory.claim(resume=True)
(path / f"pid-{process_index()}").touch()
result = lockstep(path)
(path / f"seen-{process_index()}.json").write_text(json.dumps(result))
directory.release()
