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


@pytest.mark.parametrize("share", ["1", pytest.param("", marks=pytest.mark.long)])
def test_one_compiles_and_the_other_reads_it(tmp_path, share):
    both = [begin(tmp_path, name, **{SHARE_COMPILATION: share}) for name in ("a", "bb")]
    wait_for(lambda: (tmp_path / "a").exists() and (tmp_path / "bb").exists())
    (tmp_path / "go").touch()
    assert [one.wait(120) for one in both] == [0, 0], [(tmp_path / f"{name}.log").read_text() for name in ("a", "bb")]
    # Without the lock both compile it: they come to it at the same time.
    assert misses(tmp_path, "a", "bb") == (1 if share else 2)
    assert (tmp_path / "cache" / "locks").exists() == bool(share)


def test_one_that_is_killed_keeps_nobody_waiting(tmp_path):
    first = begin(tmp_path, "a", **{SHARE_COMPILATION: "1"})
    (tmp_path / "go").touch()
    wait_for(lambda: (tmp_path / "cache" / "locks").exists() and any((tmp_path / "cache" / "locks").iterdir()))
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = begin(tmp_path, "bb", **{SHARE_COMPILATION: "1"})
    assert second.wait(120) == 0
    assert misses(tmp_path, "bb") == 1
