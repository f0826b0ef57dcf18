"""One compilation of one program for processes that need it at the same time."""

import os
import signal
import subprocess
import sys

import pytest
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
scale = float(sys.argv[2])
def step(x, factor):
    for i in range(60):
        x = jnp.sin(x @ x) * factor + i
    return x.sum()
programs = AotCompiler(make_mesh(1))
x, factor = jnp.ones((32, 32)), jnp.float32(scale)
Path(sys.argv[1]).touch()
while not Path("go").exists():
    time.sleep(0.005)
jax.monitoring.register_event_listener(lambda event, **_: print(event, flush=True))
programs.prepare("step", jax.jit(step), x, factor)
programs.get("step")
programs.close()
"""


def begin(folder, name, **more):
    env = environment(JAX_COMPILATION_CACHE_DIR=str(folder / "cache"), **more)
    with (folder / f"{name}.log").open("w") as log:
        words = [sys.executable, "-c", COMPILES, name, str(len(name))]
        return subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)


def misses(folder, *names):
    return sum((folder / f"{name}.log").read_text().count("/jax/compilation_cache/cache_misses") for name in names)


def both(folder, share):
    """Two processes come to the program at the same time, and compile it."""
    two = [begin(folder, name, **{SHARE_COMPILATION: share}) for name in ("a", "bb")]
    wait_for(lambda: (folder / "a").exists() and (folder / "bb").exists())
    (folder / "go").touch()
    assert [one.wait(120) for one in two] == [0, 0], [(folder / f"{name}.log").read_text() for name in ("a", "bb")]


def test_one_compiles_and_the_other_reads_it(tmp_path):
    """Also behind one that was killed in the midst of it: it keeps nobody waiting."""
    killed, locks = begin(tmp_path, "ccc", **{SHARE_COMPILATION: "1"}), tmp_path / "cache" / "locks"
    (tmp_path / "go").touch()
    wait_for(lambda: locks.exists() and any(locks.iterdir()))
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    (tmp_path / "go").unlink()
    both(tmp_path, "1")
    assert misses(tmp_path, "a", "bb") == 1


@pytest.mark.long
def test_without_the_lock_both_compile_it(tmp_path):
    both(tmp_path, "")
    assert misses(tmp_path, "a", "bb") == 2
    assert not (tmp_path / "cache" / "locks").exists()
