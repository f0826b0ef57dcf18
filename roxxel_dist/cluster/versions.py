"""Which versions of jax, flax and their plugins work together, and what jax renamed between them.

All that depends on the version of one of these is here or, where it is private to jax, in `jax_private.py`. Standard
library only: the check comes before the import of jax and flax, which fail without naming a cure.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress

from roxxel_dist.process.exit_codes import UserError

Version = tuple[int, ...]

OLDEST = {"jax": (0, 10), "flax": (0, 12, 8)}
"""The oldest versions, as in pyproject.toml. pip keeps to them until another package is installed."""
FLAX_FOR_JAX: tuple[tuple[Version, Version, Version | None], ...] = (
    ((0, 11, 2), (0, 12, 10), None),
    ((0, 11, 1), (0, 12, 9), None),
    ((0, 10), (0, 12, 8), (0, 12, 9)),
)
"""From which jax on, which flax is the oldest that works, and which the first that does not (None: none known). The
newest jax comes first. flax uses parts of jax that change with every minor version. Its own requirements exclude a flax
that is too new, and not one that is too old."""
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""jax takes a plugin of its own version only, and goes on with the CPU otherwise."""
PACKAGES = (*OLDEST, "jaxlib", *PLUGINS)


def check_versions() -> None:
    """Check the installed versions. Raises UserError, with a line that installs right ones, for known mistakes."""
    from importlib.metadata import PackageNotFoundError, version  # slow, for `--help`

    installed: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        installed = {name: text for name, text in installed.items() if name not in PLUGINS}
    if why := why_not(installed):
        raise UserError(why)


def why_not(installed: Mapping[str, str]) -> str | None:
    """The reason why packages do not work together, with the fix; None where nothing is known against them.

    `installed` has versions by the names of distributions; what it lacks is not judged.
    """
    for name, oldest in OLDEST.items():
        if name in installed and number(installed[name]) < oldest:
            return f"{name} {installed[name]} is too old: install {text(oldest)} or newer: {_pip(name, oldest)}"
    if "jax" in installed and "flax" in installed:
        jax, flax = number(installed["jax"]), number(installed["flax"])
        oldest, first_bad = next((flaxes[1:] for flaxes in FLAX_FOR_JAX if jax >= flaxes[0]), (OLDEST["flax"], None))
        if flax < oldest or (first_bad and flax >= first_bad):
            rule = f"{text(oldest)} or newer" if first_bad is None else f"a flax older than {text(first_bad)}"
            line = _pip("flax", oldest, first_bad)
            return f"flax {installed['flax']} does not work with jax {installed['jax']}, which needs {rule}: {line}"
    for name in PLUGINS:
        if name in installed and "jaxlib" in installed and number(installed[name]) != number(installed["jaxlib"]):
            extra = name.split("-")[1]
            return (
                f"{name} {installed[name]} does not work with jaxlib {installed['jaxlib']}, and jax would run on the "
                f"CPU: install the same version of both: pip install 'jax[{extra}]=={installed['jaxlib']}' "
                f"(JAX_PLATFORMS=cpu goes without)"
            )
    return None


def number(version: str) -> Version:
    """The leading numbers of a version: "0.12.0.1.dev3" is (0, 12, 0, 1)."""
    return tuple(int(part) for part in re.match(r"[0-9.]*", version)[0].strip(".").split(".") if part)  # pyright: ignore[reportOptionalSubscript]


def text(version: Version) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


def _pip(name: str, oldest: Version, first_bad: Version | None = None) -> str:
    return f"pip install '{name}>={text(oldest)}{f',<{text(first_bad)}' if first_bad else ''}'"
