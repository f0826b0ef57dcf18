"""What a run writes down about itself: versions, commit, sizes."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("roxxel-dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
MB = 1e6


def describe_environment() -> dict[str, Any]:
    """Versions, git commit of the working folder, processes and devices, and the thread pool that decides bits."""
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(Path.cwd()),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "platform": jax.devices()[0].platform,
        "pjrt_nproc": int(os.environ["PJRT_NPROC"]),
    }


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with "+changes" if files differ from it; None outside of git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def summarize(params: dict[str, jax.Array], opt_state: Any) -> dict[str, Any]:
    """Sizes of a model: parameters in all, memory of weights and optimizer in MB (10^6 bytes), dtype."""
    leaves = list(params.values())
    dtypes = sorted({str(leaf.dtype) for leaf in leaves})
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "weights_mem_MB": sum(leaf.nbytes for leaf in leaves) / MB,
        "optimizer_mem_MB": sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state)) / MB,
        "dtype": dtypes[0] if len(dtypes) == 1 else ", ".join(dtypes),
    }
