"""The versions of installed packages. Starts fast."""

import os
import sys
from contextlib import suppress

PACKAGES = ("roxxel-dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Of `PACKAGES`, by the names of the folders that pip makes: `importlib.metadata` takes as long as all the rest."""
    installed: dict[str, str] = {}
    for place in sys.path:
        with suppress(OSError):
            for name in os.listdir(place or "."):
                if name.endswith(".dist-info"):
                    package, _, version = name.removesuffix(".dist-info").partition("-")
                    installed.setdefault(package.lower().replace("_", "-"), version)
    return {name: installed[name] for name in PACKAGES if name in installed}
