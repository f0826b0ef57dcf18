"""One compilation for processes that come to the same program at about the same time, such as the trials of a sweep.

The first one compiles it while it holds a lock, and the others wait and read it from the compilation cache. It is for
processes that are alone: several that train together may exchange measurements while they compile (XLA's autotuning on
GPUs), and one that waits for a lock would keep the others waiting.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

SHARE_COMPILATION = "ROXXEL_SHARE_COMPILATION"
"""Set to 1 where other processes of this machine may need the same programs now; a sweep does."""
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
