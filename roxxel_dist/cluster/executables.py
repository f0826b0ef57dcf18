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
PROGRAM = ".program"
ASKED_EVENT, HIT_EVENT = (f"/jax/compilation_cache/{name}" for name in ("compile_requests_use_cache", "cache_hits"))
LIMIT_BYTES = 1 << 30
"""Of a folder: beyond it the files that were not used for longest are removed."""
STALE_S = 3600.0
"""A temporary file that is older was left by a writer that was killed."""
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
    def beside_jax_cache(cls, platform: str | None = None) -> "ExecutableStore | None":
        """The store in the folder of jax's compilation cache; None where there is no such cache, or none is needed.

        Programs are for devices of the `platform`, by default the one that jax uses here.
        """
        folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
        if not (folder and enabled) or "://" in folder or (platform or jax.default_backend()) != "cpu":
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
    lock: Callable[[Any], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Any:
    """The compiled program of a jitted function for such arguments: loaded where the store has it, or else compiled.

    Args:
        store: where programs are kept; None: they are not kept.
        jitted: made by `jax.jit`.
        args: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        options: XLA's, by their names.
        lock: given the lowered program, a lock to hold while the program is looked up and compiled.
    """
    lowered: Any = jitted.lower(*args)  # pyright: ignore[reportFunctionMemberAccess]
    key = None if store is None else program_key(lowered, options)
    with lock(lowered):
        program = None if store is None or key is None else store.load(key)
        if program is None:
            program, is_new = _compile(lowered, options)
            if store is None or key is None or not is_new:
                return program
            store.keep(key, program, lowering_devices(lowered))
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


def _sealed(name: str, data: bytes) -> bytes:
    """The contents of a file of that name: the digest covers the name too, so that no file can replace another."""
    return FORMAT + hashlib.sha256(name.encode() + b"\n" + data).digest() + data


def _is_own(status: os.stat_result) -> bool:
    """Whether this user owns a file or folder, and no other user can write it."""
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _options(options: Mapping[str, Any] | None) -> str:
    return str(sorted((options or {}).items()))


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
