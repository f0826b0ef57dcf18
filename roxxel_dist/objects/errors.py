"""What can go wrong with an object: one class for each thing that a caller may want to do about it."""

from roxxel_dist.cluster.exit_codes import FileSystemError


class StoreError(OSError):
    """An operation on an object failed: what was tried, why it failed and what to do, in one line."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no such object, or no such bucket."""


class StoreDeniedError(StoreError, PermissionError):
    """The credentials are missing, wrong or out of date, or do not allow the operation."""


class StorePreconditionError(StoreError, FileExistsError):
    """The condition of a write or a read did not hold: the object is there already, or is another one now."""


class StoreTimeoutError(StoreError, TimeoutError, FileSystemError):
    """The store did not do it within the time limit; a command that cannot go on without it ends with exit code 74."""


class MissingLibraryError(ImportError, ValueError):
    """obstore is not installed, which the extra `cloud` has."""
