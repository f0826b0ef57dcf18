"""Compiled programs, made ahead of the step that needs them.

One compilation for processes that come to the same program at about the same time, such as the trials of a sweep.

The first one compiles it while it holds a lock, and the others wait and read it from the compilation cache. It is for
processes that are alone: several that train together may exchange measurements while they compile (XLA's autotuning on
GPUs), and one that waits for a lock would keep the others waiting.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.cluster.distributed import barrier
from roxxel_dist.train.config import SHARE_COMPILATION

LIMIT_S = 3600.0
PAUSE_S = 0.1


@contextlib.contextmanager
def one_compilation(lowered: Any, options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Within it, nobody else compiles this program, where that was asked for (`SHARE_COMPILATION`).

    A process that was killed gives its lock back; after an hour of waiting the program is compiled without it.

    Args:
        lowered: what `jax.jit(f).lower` returns.
        options: of the compiler.
    """
    folder = _folder()
    if folder is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a disk that is full, or without locks: compile it then
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / _name(lowered, options), os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, lock)
            _take(lock)
        yield


def _folder() -> Path | None:
    """Where the locks are, in jax's own cache; None where there is none, or this process is not alone."""
    if os.environ.get(SHARE_COMPILATION) != "1":
        return None
    import jax

    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(cache, "locks") if cache and "://" not in cache and jax.process_count() == 1 else None


def _name(lowered: Any, options: Mapping[str, Any] | None) -> str:
    """What the compiled program depends on, as jax's cache has it."""
    import jax

    parts = [lowered.as_text(), version("jax"), version("jaxlib"), os.environ.get("XLA_FLAGS", "")]
    parts += [str(sorted((options or {}).items())), *(f"{one.platform} {one.device_kind}" for one in jax.devices())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _take(lock: int) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
        else:
            return


COMPILE_LIMIT_S = 3600.0


class Programs:
    """Compiles in one background thread, one program after another, each once.

    Args:
        mesh: the mesh that is set while a program is traced, so that a model may name its axes.
        options: of XLA's compiler, by their names; its own choices where not given.
    """

    def __init__(self, mesh: Mesh, options: Mapping[str, Any] | None = None) -> None:
        self.mesh: Mesh = mesh
        self._options = None if options is None else dict(options)
        self._pool = ThreadPoolExecutor(1, "roxxel-compile")
        self._found: dict[Hashable, Future[Any]] = {}
        self._shared: set[Hashable] = set()
        self.seconds: dict[Hashable, float] = {}
        """What each program took to trace and compile."""

    def prepare(self, key: Hashable, jitted: Callable[..., Any], *args: Any) -> None:
        """Begin to compile `jitted` for such arguments, unless `key` is known.

        Args:
            key: what the program is asked for by.
            jitted: a function of `jax.jit`.
            args: arrays, or jax.ShapeDtypeStructs with shardings.
        """
        if key not in self._found:
            self._found[key] = self._pool.submit(self._compile, key, jitted, abstract(args))

    def get(self, key: Hashable) -> Any:
        """The program, once it is compiled."""
        return self._found[key].result()

    def get_together(self, key: Hashable) -> Any:
        """The program, once every rank has it, so that all come to its first collective at about the same time.

        Some compile for a minute longer than others, who find it in their cache, and on CPU (Gloo) the first collective
        of a process fails where another one is more than 30 s late. Every rank makes the same calls; once they have the
        program, nobody waits any more.
        """
        program = self.get(key)
        if key not in self._shared:
            barrier("compiled", COMPILE_LIMIT_S)
            self._shared.add(key)
        return program

    def shared(self, key: Hashable) -> bool:
        """Whether every rank is known to have the program."""
        return key in self._shared

    def wait_together(self) -> None:
        """Until every rank has all that it has begun to compile: as `get_together`, where it is not one program."""
        for found in list(self._found.values()):
            found.result()
        barrier("compiled", COMPILE_LIMIT_S)

    def ready(self, key: Hashable) -> bool:
        """Whether `get` would return at once."""
        return self._found[key].done()

    def _compile(self, key: Hashable, jitted: Any, args: Any) -> Any:
        start = time.perf_counter()
        with jax.set_mesh(self.mesh):
            lowered = jitted.lower(*args)
            with one_compilation(lowered, self._options):
                program = lowered.compile(compiler_options=self._options)
        self.seconds[key] = time.perf_counter() - start
        return program

    def close(self) -> None:
        """Compile no more. The compilation under way ends in the background: XLA cannot break one off.

        Nobody waits for it here, as a large program takes minutes and a failure must be known at once. The interpreter
        waits at its exit (the thread is no daemon: one inside XLA while C++ is torn down crashes the process), and a
        launched rank that failed ends without that wait.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)


def abstract(tree: Any) -> Any:
    """Shapes, types and shardings of a tree of arrays: what a program is compiled for."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def batch_key(batch: Any) -> Hashable:
    """What tells programs for one batch from those for another: shapes, and how they lie on the mesh."""
    return tuple((leaf.shape, str(leaf.sharding.spec)) for leaf in jax.tree.leaves(batch))
