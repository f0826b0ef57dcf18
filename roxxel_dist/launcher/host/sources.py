"""Which sources this process runs: each file's checksum, taken when the file is imported.

All ranks of an attempt must run the same code. What lies on a disk now says nothing about a process that imported it
before an edit, such as a warm spare. Files of the standard library and of installed packages do not count, but for this
package: their versions are compared before a start.
"""

import functools
import os
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from roxxel_dist.process.progress import agent_pipe

PACKAGE = os.path.join(Path(__file__).parents[2], "")
INSTALLED = ("/site-packages/", "/dist-packages/")
ENTRIES = 16
"""Of one message to the agent, which has a largest size."""


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
    """By the name of the module, or another name that is the same in all ranks."""
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
        self._tells = True
        while names := self._untold[:ENTRIES]:
            files = [[name, self.sources[name].path, self.sources[name].checksum] for name in names]
            if not agent_pipe().send({"code": files}):
                return
            del self._untold[: len(names)]

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
