"""Compilation ahead of time: programs are compiled in a background thread before the step that needs them.

jax's own cache keeps them on disk for the next start of the job, those of other ranks than 0 where they are not there.

With `SHARE_COMPILATION`, processes that need the same program at about the same time, such as the trials of a sweep,
compile it once: the first one holds a file lock, and the others wait and read it from jax's compilation cache. That is
for processes that are alone: several that train together may exchange measurements while they compile (XLA's autotuning
on GPUs), and one that waits for a lock would keep the others waiting.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from roxxel_dist.cluster.distributed import barrier
from roxxel_dist.cluster.jax_private import keep_noted_programs
from roxxel_dist.cluster.mesh import one_device
from roxxel_dist.settings.training import SHARE_COMPILATION

COMPILE_LIMIT_S = LOCK_LIMIT_S = 3600.0
LOCK_PAUSE_S = 0.1


class Compiler(NamedTuple):
    """What compiles the programs of a step."""

    one: Callable[[Any, Sequence[Any], Mesh], Any]
    """(jitted function, arguments, mesh that is set while it is traced) -> its program."""
    each: Callable[[Any, Sequence[Any], Sequence[Any]], list[Any]]
    """(jitted function of one device, arguments, devices) -> its program on each of the devices."""

    @classmethod
    def by_device(cls, one: Callable[[Any, Sequence[Any], Mesh], Any], mesh: Mesh) -> "Compiler":
        """Compiles a program of one device anew for each: nothing in it tells on which one it is."""

        def each(jitted: Any, args: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
            return [one(jitted, on_device(args, device), one_device(mesh, device)) for device in devices]

        return cls(one, each)

    def step(self, jitted: Any, args: Sequence[Any], mesh: Mesh) -> Any:
        """The program of a jitted step, or the callable that a `Composite` makes, for such abstract arguments.

        While a step is traced, the mesh of the last argument is set: that of a batch is its phase's.
        """
        if isinstance(jitted, Composite):
            with jax.set_mesh(one_device(mesh)):
                return jitted.compile(self, *args)
        return self.one(jitted, args, mesh_of(args[-1], mesh) or mesh)


@runtime_checkable
class Composite(Protocol):
    """Several programs that are called as one."""

    def compile(self, compiler: Compiler, *args: Any) -> Any:
        """The callable made from the programs for such `jax.ShapeDtypeStruct`s."""
        ...


class AotCompiler:
    """Compiles in one background thread, one program after another, each once.

    The `mesh` is set while a program is traced, so that a model may name its axes; `options` are XLA's, by their names.
    """

    def __init__(self, mesh: Mesh, options: Mapping[str, Any] | None = None) -> None:
        self.mesh: Mesh = mesh
        self._options = None if options is None else dict(options)
        self._pool = ThreadPoolExecutor(1, "roxxel-compile")
        self._programs: dict[Hashable, Future[Any]] = {}
        self._flops: dict[Hashable, Future[float | None]] = {}
        self._shared: set[Hashable] = set()
        self.seconds: dict[Hashable, float] = {}
        """What each program took to trace and compile."""

    def prepare(self, key: Hashable, jitted: Callable[..., Any] | Composite, *args: Any, on_mesh: bool = True) -> None:
        """Begin to compile `jitted` for such arrays, or jax.ShapeDtypeStructs with shardings, unless `key` is known.

        Without `on_mesh` it is a program of one device, which waits for no other rank; else see `Compiler.step`.
        """
        if key not in self._programs:
            self._programs[key] = self._pool.submit(self._compile, key, jitted, abstract(args), on_mesh)

    def rest_until(self, result: Any) -> None:
        """Delay all later compilations until this array is computed: the work of the devices comes first."""
        self._pool.submit(jax.block_until_ready, result)

    def get(self, key: Hashable) -> Any:
        """The program, once it is compiled."""
        return self._programs[key].result()

    def get_together(self, key: Hashable) -> Any:
        """The program, once every rank has it, so that all reach its first collective at about the same time.

        Some ranks compile for a minute longer than others, which find it in their cache, and on CPU (Gloo) the first
        collective of a process fails if another one is more than 30 s late. Every rank makes the same calls; later
        calls for the same program do not wait.
        """
        program = self.get(key)
        if key not in self._shared:
            barrier("compiled", COMPILE_LIMIT_S)
            self._shared.add(key)
            self._pool.submit(keep_noted_programs)  # now that those of rank 0 are kept
        return program

    def is_shared(self, key: Hashable) -> bool:
        """Whether every rank is known to have the program."""
        return key in self._shared

    def wait_together(self) -> None:
        """Wait until every rank has all that it began to compile: as `get_together`, where it is not one program."""
        for program in list(self._programs.values()):
            program.result()
        barrier("compiled", COMPILE_LIMIT_S)

    def count_flops(self, key: Hashable, count: Callable[[Any], float | None]) -> None:
        """Have the FLOPs of a program counted in the background, after its compilation."""
        if key not in self._flops:
            self._flops[key] = self._pool.submit(lambda: count(self.get(key)))

    def flops(self, key: Hashable) -> float | None:
        """What one device computes in a program; None if `count_flops` was not asked, or cannot say it."""
        counted = self._flops.get(key)
        return None if counted is None or counted.exception() is not None else counted.result()

    def is_ready(self, key: Hashable) -> bool:
        """Whether `get` would return at once."""
        return self._programs[key].done()

    def _compile(self, key: Hashable, jitted: Any, args: Any, on_mesh: bool) -> Any:
        start = time.perf_counter()
        compiler = Compiler.by_device(self._compile_one, self.mesh)
        program = compiler.step(jitted, args, self.mesh) if on_mesh else self._compile_one(jitted, args, None)
        self.seconds[key] = time.perf_counter() - start
        return program

    def _compile_one(self, jitted: Any, args: Sequence[Any], mesh: Mesh | None) -> Any:
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            lowered = jitted.lower(*args)
            with compile_lock(lowered, self._options):
                return lowered.compile(compiler_options=self._options)

    def close(self) -> None:
        """Compile no more. The compilation under way ends in the background: XLA cannot break one off.

        This method does not wait for it: a large program takes minutes, and a failure must be known at once. The
        interpreter waits at its exit (the thread is no daemon: one inside XLA while C++ is torn down crashes the
        process); a launched rank that failed ends without that wait.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)


def abstract(tree: Any) -> Any:
    """Shapes, types and shardings of a tree of arrays: what a program is compiled for."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def on_device(tree: Any, device: Any) -> Any:
    """Shapes and types of a tree, on one device."""
    place = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


def batch_key(batch: Any) -> Hashable:
    """The key of a program for batches like this one: shapes, and how they lie on which mesh."""
    return tuple((leaf.shape, str(leaf.sharding.spec), mesh_of(leaf)) for leaf in jax.tree.leaves(batch))


def mesh_of(batch: Any, default: Mesh | None = None) -> Mesh | None:
    """The mesh that a batch lies on: the run's, or that of a phase whose rows the devices do not divide."""
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(batch) if isinstance(leaf.sharding, NamedSharding)]
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), default)


@contextlib.contextmanager
def compile_lock(lowered: Any, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Hold a lock, so that no other process compiles this program, where `SHARE_COMPILATION` asks for that.

    A process that was killed gives its lock back; after an hour of waiting the program is compiled without it.
    """
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    alone = os.environ.get(SHARE_COMPILATION) == "1" and cache and "://" not in cache and jax.process_count() == 1
    with contextlib.ExitStack() as stack:
        if alone:
            with contextlib.suppress(OSError):  # a disk that is full, or without locks: compile it then
                folder = Path(cache, "locks")
                folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(folder / _cache_key(lowered, options), os.O_RDWR | os.O_CREAT, 0o644)
                stack.callback(os.close, lock)
                _take(lock)
        yield


def _cache_key(lowered: Any, options: Mapping[str, Any] | None) -> str:
    """What the compiled program depends on, as jax's cache has it."""
    parts = [lowered.as_text(), version("jax"), version("jaxlib"), os.environ.get("XLA_FLAGS", "")]
    parts += [str(sorted((options or {}).items())), *(f"{d.platform} {d.device_kind}" for d in jax.devices())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _take(lock: int) -> None:
    end = time.monotonic() + LOCK_LIMIT_S
    while time.monotonic() < end:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device, from XLA's memory analysis of the compiled step."""

    arguments: int
    """State, settings and batch."""
    temporaries: int
    """Activations, gradients, gathered parameters."""
    results: int
    """Outputs besides the state, which reuses the memory of the previous state."""
    code: int
    """The program itself, if the backend reports it."""

    peak: int
    """All of them together."""

    @classmethod
    def of_parts(cls, **parts: int) -> "StepMemory":
        """The bytes of these parts, with their sum."""
        return cls(**parts, peak=sum(parts.values()))

    @classmethod
    def of_program(cls, program: Any) -> "StepMemory":
        """The bytes of each device for a compiled program."""
        account = program.memory_analysis()
        return cls.of_parts(
            arguments=account.argument_size_in_bytes,
            temporaries=account.temp_size_in_bytes,
            results=account.output_size_in_bytes - account.alias_size_in_bytes,
            code=account.generated_code_size_in_bytes,
        )
