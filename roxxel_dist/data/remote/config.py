"""Settings to read data in an object store."""

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.component import component

MOST_GB, MOST_SECONDS = 1e9, 1e7


@component
class RemoteConfig:
    """The cache of data that is in an object store, and how long the store may fail."""

    cache_dir: str | None = None
    """Folder on a local disk for data of an object store, shared by all processes of the host. Default:
    $XDG_CACHE_HOME/roxxel-dist, or ~/.cache/roxxel-dist."""
    cache_gb: float = 32.0
    """Maximum size of that data in cache_dir, in GB (10^9 bytes). What was not used for longest is deleted first."""
    store_timeout: float = 120.0
    """Seconds for which a failed operation of an object store is retried; then the run ends with exit code 74."""

    def __post_init__(self) -> None:
        if self.cache_dir == "":
            raise UserError("cache_dir is empty: name a folder, or leave it out")
        for name, most in (("cache_gb", MOST_GB), ("store_timeout", MOST_SECONDS)):
            if not 0 < getattr(self, name) <= most:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0, and at most {most:,.0f}")
