"""A rank with jax, the same by hand and under a launcher: one step in which all ranks take part.

python launch_jax_rank.py           say "up" when the step is done, and end
python launch_jax_rank.py RANK      then RANK raises an exception, while the others wait for it in the next step
"""

import sys
import time

import roxxel_dist

roxxel_dist.initialize()

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from launch_rank import RANK, say

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("data"))
batch = jax.jit(lambda: jnp.ones((jax.device_count(), 64)), out_shardings=rows)()
step = jax.jit(lambda batch: (batch @ batch.T).sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
step(batch).block_until_ready()
say("up")
if sys.argv[1:]:
    if sys.argv[1] == RANK:
        time.sleep(0.5)
        say("raised")
        raise RuntimeError("broken on purpose")
    step(batch).block_until_ready()
