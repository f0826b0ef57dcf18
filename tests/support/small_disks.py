"""File systems of a given size, for tests of disks that are full or read-only."""

import os
import subprocess
from contextlib import contextmanager

import pytest
from leftovers import MARK, MOUNT


@contextmanager
def mounted_disk(folder, size, *unmount_options):
    """Makes ``folder`` and mounts a tmpfs of ``size`` (``"600k"``) on it; skips where mounting is not allowed."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", f"{MOUNT}{os.environ[MARK]}", folder]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", *unmount_options, folder], check=True)
