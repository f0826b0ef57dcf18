"""What is wrong with a host's TPU: pure functions, as in `checks`."""

from collections.abc import Iterator

from roxxel_dist.launcher.preflight.findings import Finding, Hosts, finding
from roxxel_dist.launcher.preflight.requirements import Wanted


def tpu_locks(wanted: Wanted, hosts: Hosts) -> Iterator[Finding]:
    """What is wrong with the lock, for a job that may use TPUs."""
    for host, facts in hosts.items():
        lock, platforms = facts["tpu_lock"], wanted.platforms or facts["platforms"]
        if lock is None or (platforms and "tpu" not in platforms.split(",")):
            continue
        where = f"{host}: {lock['path']}, libtpu's lock,"
        if lock["holder"] is not None:
            text = f"{where} is held by {lock['holder']}, which uses the TPU; end it, or JAX_PLATFORMS=cpu goes without"
            yield finding("error", "tpu lock", [host], text)
        elif lock["why"] is not None:
            text = f"{where} cannot be opened ({lock['why']}), and nothing can use the TPU; sudo rm {lock['path']}"
            yield finding("error", "tpu lock", [host], text)
        else:
            yield finding("ok", "tpu lock", [host], f"{where} is there, and nobody holds it")
