"""One compilation of one program for processes that need it at the same time."""

import os
import signal

import pytest
import warm
from commands import environment, wait_for

from roxxel_dist.settings.training import SHARE_COMPILATION

# Tells when it is ready, waits for the file "go", and compiles a program that takes a second or more.
COMPILES = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.cluster.determinism import enable_compilation_cache
from roxxel_dist.train.step.compile import AotCompiler
enable_compilation_cache()
def step(x, factor):
    for i in range(60):
        x = jnp.sin(x @ x) * factor + i
    return x.sum()
programs = AotCompiler(make_mesh(1))
x, factor = jnp.ones((32, 32)), jnp.float32(0.5)
Path(sys.argv[1]).touch()
while not Path("go").exists():
    time.sleep(0.005)
jax.monitoring.register_event_listener(lambda event, **_: print(event, flush=True))
programs.prepare("step", jax.jit(step), x, factor)
programs.get("step")
programs.close()
"""


def begin(folder, name, share="1"):
    """A process that compiles, and says in a log what it does."""
    env = environment(JAX_COMPILATION_CACHE_DIR=str(folder / "cache"), **{SHARE_COMPILATION: share})
    with (folder / f"{name}.log").open("w") as log:
        return warm.start(COMPILES, [name], folder, env, (log, log))


def misses(folder, *names):
    return sum((folder / f"{name}.log").read_text().count("/jax/compilation_cache/cache_misses") for name in names)


def both(folder, share="1"):
    """Two processes come to the program at the same time, and compile it; how they ended."""
    begun = [begin(folder, name, share) for name in ("a", "b")]
    wait_for(lambda: (folder / "a").exists() and (folder / "b").exists())
    (folder / "go").touch()
    return [process.wait() for process in begun]


def test_one_compiles_and_the_other_reads_it(tmp_path):
    """Also behind one that was killed in the midst of it: it keeps nobody waiting."""
    locks = tmp_path / "cache" / "locks"
    killed = begin(tmp_path, "c")
    (tmp_path / "go").touch()
    wait_for(lambda: locks.exists() and any(locks.iterdir()))
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    (tmp_path / "go").unlink()
    assert both(tmp_path) == [0, 0]
    assert misses(tmp_path, "a", "b") == 1


@pytest.mark.long
def test_without_the_lock_both_compile_it(tmp_path):
    assert both(tmp_path, share="") == [0, 0]
    assert misses(tmp_path, "a", "b") == 2
    assert not (tmp_path / "cache" / "locks").exists()
