"""Compiled programs on disk: one file for each program and rank, for the process that replaces the rank at a restart.

jax's own cache is beneath it, and does not do this on CPUs: its key has the fingerprint of the devices as one process
sees them, which differs by rank, and only rank 0 writes. Elsewhere its keys are the same for all ranks, and nothing is
kept here (a GPU program that one rank compiles and another one loads would wait for measurements that never arrive).

A file is a digest and a pickle. Reading a pickle runs code, and so does loading a program. So this user must own the
folder and the files, and no other user may write them: other files are not read. If a file is damaged, the program is
compiled and written again.
"""

import contextlib
import functools
import hashlib
import json
import os
import pickle
import platform
import re
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from roxxel_dist.cluster.determinism import numerics_fingerprint
from roxxel_dist.cluster.jax_private import lowering_details, lowering_devices

FORMAT = b"roxxel executable 1\n"
PROGRAM, ALIAS = ".program", ".alias"
ASKED_EVENT, HIT_EVENT = (f"/jax/compilation_cache/{name}" for name in ("compile_requests_use_cache", "cache_hits"))
LIMIT_BYTES = 1 << 30
"""Of a folder: beyond it the files that were not used for longest are removed."""
STALE_S = 3600.0
"""A temporary file that is older was left by a writer that was killed."""
SETTLED_S = 2.0
"""A source file that changed less than this before the process began may have been read as it was before."""
FLAGS_ENV = ("XLA_", "LIBTPU_", "TF_XLA_", "PJRT_", "FLAX_", "NNX_")


class ExecutableStore:
    """The programs that this process has compiled, or one before it in its place.

    Args:
        folder: of this user alone; made where it is missing.
        limit_bytes: of all files together.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder: Path = folder
        self._limit = limit_bytes

    @classmethod
    def beside_jax_cache(cls) -> "ExecutableStore | None":
        """The store in the folder of jax's compilation cache; None where there is no such cache, or none is needed."""
        folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
        if not (folder and enabled) or "://" in folder or jax.default_backend() != "cpu":
            return None
        return cls(Path(folder) / f"executables-{os.geteuid()}")

    def load(self, key: str) -> Any:
        """The program of a key; None where there is none that is whole and this user's own."""
        data = self._read(key + PROGRAM)
        if data is None:
            return None
        with contextlib.suppress(Exception):  # of another jax, or one that XLA does not take: it is compiled then
            *program, ids = pickle.loads(data)
            devices = {device.id: device for device in jax.devices()}
            return serialize_executable.deserialize_and_load(*program, execution_devices=[devices[i] for i in ids])
        return None

    def keep(self, key: str, program: Any, devices: list[int]) -> None:
        """Write a program of the devices with these ids.

        A disk that takes none, and a program that cannot be written, are no errors.
        """
        try:
            data = pickle.dumps((*serialize_executable.serialize(program), devices))
        except Exception:  # jax and XLA have many: a backend, an effect, a constant that cannot be written
            return
        self._write(key + PROGRAM, data)
        self._remove_oldest()

    def recall(self, name: str) -> Any:
        """The program that was `remember`ed by a name, if every source file is what it was then; else None."""
        data = self._read(name + ALIAS)
        if data is None:
            return None
        entry = json.loads(data)
        return self.load(entry["key"]) if all(_version(path) == was for path, was in entry["sources"]) else None

    def remember(self, name: str, key: str) -> None:
        """Have `recall` find the program of a key by a name, until a source file that this process runs changes."""
        sources = source_files()
        if sources is not None:
            self._write(name + ALIAS, json.dumps({"key": key, "sources": sources}).encode())

    def _read(self, name: str) -> bytes | None:
        try:
            if not _is_own(os.stat(self.folder, follow_symlinks=False)):
                return None
            with open(os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                if not _is_own(os.fstat(file.fileno())):
                    return None
                content = file.read()
                os.utime(file.fileno())  # used now
        except OSError:
            return None
        data = content[len(FORMAT) + 32 :]
        return data if content == _sealed(name, data) else None

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.folder / f".{name}.{os.urandom(4).hex()}.tmp"
        with contextlib.suppress(OSError):  # no room, or no right to: compiled again next time
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(os.stat(self.folder, follow_symlinks=False)):
                return
            try:
                # Not synced: after a power failure the digest tells.
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(_sealed(name, data))
                temporary.replace(self.folder / name)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def _remove_oldest(self) -> None:
        files, now = [], time.time()
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                with contextlib.suppress(OSError):  # another process removes too
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(".tmp") and now - status.st_mtime > STALE_S:
                        os.unlink(entry.path)
                    files.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if total <= self._limit:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size


def compile_kept(
    store: ExecutableStore | None,
    jitted: Callable[..., Any],
    args: Iterable[Any],
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    lock: Callable[[Any], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Any:
    """The compiled program of a jitted function for such arguments: loaded where the store has it, or else compiled.

    Args:
        store: where programs are kept; None: they are not kept.
        jitted: made by `jax.jit`.
        args: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        options: XLA's, by their names.
        name: of all that determines the program but the source files; if the store has the name, the program is not
            even traced. None if that is unknown, as for a function of the user's.
        lock: given the lowered program, a lock to hold while the program is looked up and compiled.
    """
    if store is not None and name is not None and (program := store.recall(name)) is not None:
        return program
    lowered: Any = jitted.lower(*args)  # pyright: ignore[reportFunctionMemberAccess]
    key = None if store is None else program_key(lowered, options)
    with lock(lowered):
        program = None if store is None or key is None else store.load(key)
        if program is None:
            program, is_new = _compile(lowered, options)
            if store is None or key is None or not is_new:
                return program
            store.keep(key, program, lowering_devices(lowered))
    if store is not None and key is not None and name is not None:
        store.remember(name, key)
    return program


def _compile(lowered: Any, options: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """The program, and whether XLA compiled it now.

    A program that jax has read from its own cache cannot be written here: the copy lacks the functions that it calls,
    so XLA loads it and fails when it runs (jaxlib 0.10.2 on a CPU). It is read from jax's cache again next time.
    """
    _heard.events = []
    _listen()
    program = lowered.compile(compiler_options=None if options is None else dict(options))
    is_heard = ASKED_EVENT in _heard.events
    if not is_heard:  # no cache, or all listeners were cleared
        _listen.cache_clear()
    return program, is_heard and HIT_EVENT not in _heard.events


_heard = threading.local()


@functools.cache
def _listen() -> None:
    """Have each thread's `_heard.events` name what jax does in it from now on."""
    jax.monitoring.register_event_listener(lambda event, **_: getattr(_heard, "events", []).append(event))


def program_key(lowered: Any, options: Mapping[str, Any] | None = None) -> str | None:
    """64 hexadecimal digits, a hash of everything that determines a program; None if it only works in its process.

    That is: the text of the lowered program, the placement of its arguments and results, the devices and this process's
    place among them, versions, settings, flags. It differs between ranks.
    """
    details = lowering_details(lowered)
    if details is None:
        return None
    # The arguments that the function does not use are not in the text, and a program refuses those of other shapes.
    trees = str(lowered.args_info), str(lowered.in_tree), str(lowered.out_tree)
    return hashed(details, lowered.as_text(), *trees, _options(options), _environment())


def hashed(*parts: str) -> str:
    """Some texts as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def program_name(identity: str, jitted: Any, args: Any, options: Mapping[str, Any] | None = None) -> str:
    """The name of a program, from `identity` (everything that determines it) and its arguments."""
    leaves, tree = jax.tree.flatten(args)
    places = [(leaf.shape, str(leaf.dtype), str(leaf.sharding), _device_ids(leaf.sharding)) for leaf in leaves]
    return hashed(identity, jitted.__name__, str(tree), str(places), _options(options), _environment())


def all_installed() -> bool:
    """Whether all modules that are imported are this package's, Python's or installed ones, and none a user's own.

    A module of the user's may have changed any other one.
    """
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*map(os.path.realpath, folders), str(Path(__file__).parent.parent)]
    roots = tuple(folder + os.sep for folder in folders)
    return all(path.startswith(roots) for path in _module_files())


def source_files() -> list[tuple[str, list[int]]] | None:
    """(path, version) of the file of each module that is imported; None where one changed since this process began."""
    begun, files = _process_start_ns(), []
    for path in _module_files():
        version = _version(path)
        if begun is None or version is None or max(version[1:]) > begun - SETTLED_S * 1e9:
            return None
        files.append((path, version))
    return files


def _module_files() -> list[str]:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(file for file in files if isinstance(file, str))


def _version(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@functools.cache
def _process_start_ns() -> float | None:
    """When this process began, nanoseconds since 1970; None on a system that does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")) * 1e9
    except (OSError, ValueError, AttributeError):
        return None


def _sealed(name: str, data: bytes) -> bytes:
    """The contents of a file of that name: the digest covers the name too, so that no file can replace another."""
    return FORMAT + hashlib.sha256(name.encode() + b"\n" + data).digest() + data


def _is_own(status: os.stat_result) -> bool:
    """Whether this user owns a file or folder, and no other user can write it."""
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _options(options: Mapping[str, Any] | None) -> str:
    return str(sorted((options or {}).items()))


def _device_ids(sharding: Any) -> list[int]:
    mesh = getattr(sharding, "mesh", None)
    devices = mesh.devices.flat if mesh is not None else sorted(sharding.device_set, key=lambda device: device.id)
    return [device.id for device in devices]


@functools.cache
def _environment() -> str:
    """What decides a program beside its text, in this process: machine, devices, rank, versions, settings, flags."""
    info = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    machine = re.search(r"^(?:flags|Features)\s*: *(.+)", info, re.MULTILINE)  # the code is for these instructions
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}  # pyright: ignore[reportAttributeAccessIssue]
    flags = {name: value for name, value in os.environ.items() if name.startswith(FLAGS_ENV)}
    devices = [(device.id, device.process_index, device.device_kind) for device in jax.devices()]
    parts: list[Any] = [numerics_fingerprint(), platform.platform(), sys.version, machine and machine[1]]
    parts += [jax.process_index(), devices, sorted(settings.items()), sorted(flags.items())]
    return str(parts)
