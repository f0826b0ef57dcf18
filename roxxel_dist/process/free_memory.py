"""How much memory processes of this host can still have."""

from contextlib import suppress
from pathlib import Path


def free_bytes() -> int:
    """Bytes of memory that are free for processes of this host, or of the control groups that this one is in."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    root = Path("/sys/fs/cgroup")
    lines = Path("/proc/self/cgroup").read_text(errors="replace").splitlines()
    own = root / next((line[4:] for line in lines if line.startswith("0::/")), "")  # of version 2
    for group in (own, *own.parents):
        if group.is_relative_to(root):
            with suppress(OSError, ValueError, KeyError):  # no limit there
                limit = int((group / "memory.max").read_text(encoding="ascii"))
                stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                used = int((group / "memory.current").read_text(encoding="ascii")) - int(stat["inactive_file"])
                free = min(free, limit - used)
    return free
