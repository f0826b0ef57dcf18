"""One compilation of one program for processes that need it at the same time."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from commands import environment, wait_for

from roxxel_dist.settings.training import SHARE_COMPILATION

# Forks a process for each line of stdin that is a name, whose imports are done, and says its number. At an empty line
# it says how they ended. Each tells when it is ready, waits for the file "go", and compiles a program that takes a
# second or more.
COMPILES = """
import os, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.cluster.determinism import enable_compilation_cache
from roxxel_dist.train.step.compile import AotCompiler
def compile(name):
    log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    enable_compilation_cache()
    def step(x, factor):
        for i in range(60):
            x = jnp.sin(x @ x) * factor + i
        return x.sum()
    programs = AotCompiler(make_mesh(1))
    x, factor = jnp.ones((32, 32)), jnp.float32(0.5)
    Path(name).touch()
    while not Path("go").exists():
        time.sleep(0.005)
    jax.monitoring.register_event_listener(lambda event, **_: print(event, flush=True))
    programs.prepare("step", jax.jit(step), x, factor)
    programs.get("step")
    programs.close()
begun = []
for line in sys.stdin:
    if not line.strip():
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in begun), flush=True)
        continue
    begun.append(os.fork())
    if not begun[-1]:
        compile(line.strip())
        break
    print(begun[-1], flush=True)
"""


@contextlib.contextmanager
def forking(folder, share):
    """(a function from a name to the number of its process, a function that waits for all: their exit codes)."""
    env = environment(JAX_COMPILATION_CACHE_DIR=str(folder / "cache"), **{SHARE_COMPILATION: share})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", COMPILES], cwd=folder, env=env, **pipes) as parent:

        def ask(line):
            print(line, file=parent.stdin, flush=True)
            return parent.stdout.readline()

        yield lambda name: int(ask(name)), lambda: list(map(int, ask("").split()))
        parent.stdin.close()


def misses(folder, *names):
    return sum((folder / f"{name}.log").read_text().count("/jax/compilation_cache/cache_misses") for name in names)


def both(folder, begin, codes):
    """Two processes come to the program at the same time, and compile it; how all ended."""
    for name in ("a", "b"):
        begin(name)
    wait_for(lambda: (folder / "a").exists() and (folder / "b").exists())
    (folder / "go").touch()
    return codes()


def test_one_compiles_and_the_other_reads_it(tmp_path):
    """Also behind one that was killed in the midst of it: it keeps nobody waiting."""
    locks = tmp_path / "cache" / "locks"
    with forking(tmp_path, "1") as (begin, codes):
        killed = begin("c")
        (tmp_path / "go").touch()
        wait_for(lambda: locks.exists() and any(locks.iterdir()))
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "go").unlink()
        assert both(tmp_path, begin, codes) == [-signal.SIGKILL, 0, 0]
    assert misses(tmp_path, "a", "b") == 1


@pytest.mark.long
def test_without_the_lock_both_compile_it(tmp_path):
    with forking(tmp_path, "") as (begin, codes):
        assert both(tmp_path, begin, codes) == [0, 0]
    assert misses(tmp_path, "a", "b") == 2
    assert not (tmp_path / "cache" / "locks").exists()
