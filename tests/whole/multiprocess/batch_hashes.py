"""Run by every rank: prints, on rank 0, a hash of each global batch as it lies on the mesh."""

import hashlib
import sys

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist import Curriculum, Phase, Roxxel
from roxxel_dist.cluster.distributed import barrier, is_primary
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.input.stream import Stream

data = Roxxel(sys.argv[1])
plan = Curriculum(data, [Phase(12, 8, 33), Phase(40, 4, 65)]).plan(42)
mesh = make_mesh()
for batch in Stream(plan, {"self": data}, NamedSharding(mesh, P("data", None))):
    whole = np.asarray(multihost_utils.process_allgather(batch, tiled=True))
    if is_primary():
        print(f"hash {hashlib.sha256(whole.tobytes()).hexdigest()} {whole.shape}", flush=True)
barrier("end", limit_s=60)
