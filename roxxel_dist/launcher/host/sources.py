"""What a rank imports: each source's checksum, taken at its import, and a spare that has imported it ahead of time.

All ranks of an attempt must run the same code. What lies on a disk now says nothing about a process that imported it
before an edit, such as a warm spare. Files of the standard library and of installed packages do not count, but for this
package: their versions are compared before a start.

A spare is a worker that imports the same modules as its rank, and waits for the order to become the rank. It may leave
no trace that the program of the rank could see: no thread, no signal handler, no variable. It imports in slices, most
of the time asleep. A lower priority would do less: it applies only within a session if the kernel groups sessions
(autogroup), and without privileges a process cannot go back from nice 19 or SCHED_IDLE. Decision 25.
"""

import functools
import json
import os
import resource
import signal
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from roxxel_dist.process.exit_codes import AT_ONCE, SPARE_ENV
from roxxel_dist.process.progress import agent_pipe, is_short

PACKAGE = os.path.join(Path(__file__).parents[2], "")
INSTALLED = ("/site-packages/", "/dist-packages/")
ENTRIES, SHOWN = 16, 500
"""Sources in one message to the agent, which has a largest size, and letters of what has changed."""


@dataclass(frozen=True)
class SourceFile:
    """A file as it was imported."""

    path: str
    checksum: str


def checksum_of(path: str) -> str:
    """The checksum of the content of a file. Raises OSError."""
    return f"{zlib.crc32(Path(path).read_bytes()):08x}"


def is_tracked_source(path: str) -> bool:
    """Whether a file is code of this package or of the user. It is asked for each module that is imported."""
    if path.startswith(PACKAGE):
        return True
    return not (any(folder in path for folder in INSTALLED) or path.startswith(_standard_library()))


@functools.cache
def _standard_library() -> tuple[str, ...]:
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


class _Loader(SourceFileLoader):
    """Loads a module as Python does."""

    def get_code(self, fullname: str) -> CodeType | None:
        recorder().add(fullname, self.path)
        return super().get_code(fullname)


@dataclass(eq=False)
class SourceRecorder(MetaPathFinder):
    """Notes the sources that are imported from `install` on, and those that were before."""

    sources: dict[str, SourceFile] = field(default_factory=dict)
    """The sources by the name of the module, or another name that is the same in all ranks."""
    _untold: list[str] = field(default_factory=list)
    _tells: bool = False

    def install(self) -> None:
        """Record from now on; a second call does nothing."""
        if self not in sys.meta_path:
            for name, module in list(sys.modules.items()):
                spec = getattr(module, "__spec__", None)
                if spec is not None and type(spec.loader) is SourceFileLoader and is_tracked_source(spec.loader.path):
                    self.add(spec.name or name, spec.loader.path)
            sys.meta_path.insert(0, self)

    def send(self) -> None:
        """Have the agent know all sources, those too that are imported from now on."""
        self._tells, count = True, ENTRIES
        while names := self._untold[:count]:
            message = {"code": [[name, self.sources[name].path, self.sources[name].checksum] for name in names]}
            fits = is_short(message)  # paths may be long
            if not fits and len(names) > 1:
                count = len(names) // 2
            elif not fits or agent_pipe().send(message):
                del self._untold[: len(names)]
            else:
                return

    def add(self, name: str, path: str) -> None:
        """A file whose content is the same in all ranks."""
        with suppress(OSError):  # the import itself will say so
            self.sources[name] = SourceFile(path, checksum_of(path))
            self._untold.append(name)
        if self._tells:
            self.send()

    def changed(self) -> str:
        """A file that has another content than when it was imported; empty where there is none."""
        for source in self.sources.values():
            try:
                if checksum_of(source.path) != source.checksum:
                    return source.path
            except OSError:
                return source.path
        return ""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find as the other finders do, with a loader that notes the source where it counts."""
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if type(spec.loader) is SourceFileLoader and is_tracked_source(spec.loader.path):
                spec.loader = _Loader(spec.loader.name, spec.loader.path)
            return spec
        return None


@functools.cache
def recorder() -> SourceRecorder:
    """The recorder of this process."""
    return SourceRecorder()


NAME = "roxxel-spare"
"""What `ps` calls it while it waits."""
SLICE_S, PAUSE_S = 0.01, 0.04
"""CPU time between two pauses, and a pause: a spare that imports takes a fifth of a core."""
FIRST_VICTIM = "1000"
"""The kernel's score of a process to be killed first where memory is short."""


def become_rank(modules: Sequence[str]) -> None:
    """Import modules, and wait; returns as the rank, with its variables.

    Ends the process where its agent does, and where the rank would run other code than a process that starts now.
    """
    from roxxel_dist.launcher.host.probe import versions  # late: no rank needs it

    given = os.environ.pop(SPARE_ENV)
    orders = int(given.removesuffix(AT_ONCE))
    pipe = agent_pipe()
    recorder().install()
    before = versions()
    with _shown_as_spare():
        with nullcontext() if given.endswith(AT_ONCE) else _in_slices():
            for module in modules:
                import_module(module)
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        pipe.send({"spare": "ready", "size": size})
        order = b""
        while not order.endswith(b"\n"):
            piece = os.read(orders, 1 << 16)
            if not piece:
                os._exit(0)
            order += piece
    os.close(orders)
    installed = [name for name, version in versions().items() if before.get(name) != version]
    if changed := recorder().changed() or ", ".join(installed):
        pipe.send({"spare": "stale", "changed": changed[:SHOWN]})
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(order)["env"])
    if not pipe.send({"spare": "taken"}):
        os._exit(1)
    sys.stdout.flush()


@contextmanager
def _shown_as_spare() -> Iterator[None]:
    """Within it `ps` shows this process as no rank, and the kernel ends it first where memory is short."""
    values = {Path("/proc/self/comm"): NAME, Path("/proc/self/oom_score_adj"): FIRST_VICTIM}
    before = {path: path.read_text(encoding="ascii").strip() for path in values}
    for path, value in values.items():
        with suppress(OSError):
            path.write_text(value, encoding="ascii")
    yield
    for path, value in before.items():
        with suppress(OSError):
            path.write_text(value, encoding="ascii")


@contextmanager
def _in_slices() -> Iterator[None]:
    """Within it this process sleeps after each slice of CPU time."""
    before = signal.signal(signal.SIGPROF, lambda *_: time.sleep(PAUSE_S))
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, SLICE_S, SLICE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
