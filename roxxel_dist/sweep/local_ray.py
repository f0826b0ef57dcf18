"""A Ray of the sweep's own on this machine: as large as its workers, on loopback, gone with its driver."""

import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.backends.ray.cluster import ClusterError, ray_variables
from roxxel_dist.process.exit_codes import UserError, pip_install

PREFIX = "roxxel-ray-"
HELD = "held"
FOLDERS = ("ray", "ra2")
"""Folders of the two tries to start it."""
TOKEN = secrets.token_hex(32)
"""The token of all that this process starts: Ray keeps the first one that a process has used."""
LONGEST = 40
"""Characters of the temporary directory: Ray makes sockets some 63 characters below it, and 107 are the most."""
STORE_BYTES = 80_000_000
"""Ray's least is 75 MB; trials send numbers."""
WAIT_ENV, WAIT_S = "RAY_gcs_server_port_wait_time_s", 120
"""Ray's variable for the seconds that its head may take to start, and what it is here; Ray gives it 30."""
NODE_IS_LATE = "The current node timed out"
"""The words of Ray where its node took more than 30 s."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    # Unused, and they would cost the driver time.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    # What Ray does where it cannot make clusters: it listens on loopback alone, as no option lets it on Linux.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@contextmanager
def local_ray(workers: int, cpus: float, log: Callable[[str], None]) -> Iterator[tuple[Any, Path]]:
    """The module ray, with a new cluster that has room for so many trials of so many CPUs, and the cluster's folder.
    Its ports accept only clients with the token, which is in its directory, readable for this user alone. Raises
    ValueError if Ray is not installed or in use by this process, ClusterError if it does not start."""
    if find_spec("ray") is None:
        raise UserError(f"Ray is not installed: {pip_install('sweep')}")
    sweep_leftovers()
    handler, wait = signal.getsignal(signal.SIGTERM), os.environ.get(WAIT_ENV, str(WAIT_S))
    with (
        _held_folder() as folder,
        ray_variables({**ENVIRONMENT, WAIT_ENV: wait, "RAY_AUTH_TOKEN_PATH": str(folder / "token")}),
    ):
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(TOKEN)
        os.environ.pop("RAY_AUTH_TOKEN", None)
        import ray

        if ray.is_initialized():
            raise UserError("this process has a Ray already: end it first (ray.shutdown())")
        try:
            first, second = (folder / name for name in FOLDERS)
            try:
                _start(ray, first, max(1, math.ceil(workers * cpus)))
            except ClusterError as error:
                log(f"Ray did not start on this machine ({error.__cause__}): it is started again")
                ray.shutdown()
                _start(ray, second, max(1, math.ceil(workers * cpus)))
            yield ray, folder
        finally:
            ray.shutdown()
            with suppress(ValueError):  # not in the main thread: Ray has left it alone
                signal.signal(signal.SIGTERM, handler)


def _start(ray: Any, folder: Path, cpus: int) -> None:
    """Start Ray, with its files in a folder. Raises ClusterError."""
    # Its processes inherit what is blocked. A terminal that is closed signals all of its processes, and those of Ray
    # would end before their driver has asked its trials to save.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        ray.init(
            address="local",  # also where RAY_ADDRESS names a cluster
            num_cpus=cpus,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),  # Ray lets everybody write to it
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # a bare one, where its processes took too long
        why = " ".join(str(error).split())
        # The variable is of the head's port alone; to its node Ray gives 30 s, which nothing changes.
        longer = "" if NODE_IS_LATE in why else f"set {WAIT_ENV} to more than {os.environ[WAIT_ENV]} s, "
        raise ClusterError(
            f"Ray does not start on this machine ({why}): start the sweep again when the machine has less to do, "
            f"{longer}or use a cluster that runs (--ray_address)"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _held_folder() -> Iterator[Path]:
    """A new directory, which is held as long as this process lives, and taken away at the end."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_parent()))
    lock = os.open(hidden / HELD, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = hidden.rename(hidden.with_name(hidden.name[1:]))  # seen by others only now that it is held
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep_leftovers() -> None:
    """Take away the directories of this user's drivers that were killed."""
    for parent in {_parent(), Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                lock = os.open(folder / HELD, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if folder.lstat().st_uid == os.getuid():
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _parent() -> Path:
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) + len(PREFIX) + 8 <= LONGEST else Path("/tmp")
