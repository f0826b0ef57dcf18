"""Errors of object stores: one class for each way to handle them."""

from roxxel_dist.process.exit_codes import FileSystemError, UserError


class StoreError(OSError):
    """An operation on an object failed; the message has the operation, the cause and the fix in one line."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """The object, or its bucket, is not there."""


class StoreDeniedError(StoreError, PermissionError):
    """The credentials are missing, wrong or out of date, or do not allow the operation."""


class StorePreconditionError(StoreError, FileExistsError):
    """The condition of a write or a read failed: the object exists already, or was replaced."""


class StoreTimeoutError(StoreError, TimeoutError, FileSystemError):
    """The store failed until the time limit; a command that cannot continue without it ends with exit code 74."""


class MissingLibraryError(ImportError, UserError):
    """obstore, which the extra `cloud` has, is not installed."""
