"""Compiled programs, made ahead of the step that needs them."""

import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.cluster.distributed import barrier
from roxxel_dist.train.one_compilation import one_compilation

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
