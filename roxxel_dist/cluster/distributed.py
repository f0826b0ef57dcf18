"""This process among the others: joining, ranks and hosts, waiting with a limit, agreeing.

The launcher describes the job in ROXXEL_* variables; without them jax's own cluster detection (SLURM, Kubernetes, TPU
pods, Open MPI) is asked, and a process that is alone stays alone.
"""

import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable

import jax

from roxxel_dist.cluster.determinism import pin_threads
from roxxel_dist.cluster.jax_private import key_value_store
from roxxel_dist.process.exit_codes import LostRankError, UserError
from roxxel_dist.process.platforms import why_no_platform

INIT_TIMEOUT_S = 300
LISTENER_LIMIT_S, CONNECT_LIMIT_S, LISTENER_PAUSE_S = 30.0, 5.0, 0.02
WAIT_LIMIT_S = 600.0

_calls: Counter[str] = Counter()


def initialize() -> None:
    """Join the other processes of this job. Harmless when called twice, or in a process that is alone.

    Raises:
        PortTakenError: this is rank 0, and the port of its coordinator is taken.
        RuntimeError: the coordinator was not reached within 300 s.
    """
    if jax.distributed.is_initialized():
        return
    env = os.environ
    if devices := env.get("ROXXEL_LOCAL_DEVICES"):
        jax.config.update("jax_num_cpu_devices", int(devices))
    pin_threads()
    # Else jax keeps SIGTERM to itself, and a request from before the first step is lost.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator := env.get("ROXXEL_COORDINATOR"):
        if env["ROXXEL_PROCESS_ID"] == "0":
            _check_port(coordinator)
        else:
            _wait_for_listener(coordinator)
        # For one process too: its devices then reduce in the order in which those of several processes do, so that the
        # same number of devices gives the same bits however they are split.
        jax.distributed.initialize(
            coordinator,
            int(env["ROXXEL_NUM_PROCESSES"]),
            int(env["ROXXEL_PROCESS_ID"]),
            # The coordinator would listen on every interface: it has no password.
            coordinator_bind_address=coordinator,
            initialization_timeout=INIT_TIMEOUT_S,
            # In a SLURM step jax would still give each process one device, by the step's own numbers (jax#23452).
            cluster_detection_method="deactivate",
        )
        return
    try:
        jax.distributed.initialize()
    except ValueError as error:
        if "coordinator_address" not in str(error):  # jax says so where it detects no cluster
            raise
    except RuntimeError as error:
        if "before any JAX" not in str(error):  # a process that has used its devices is alone already
            raise


def make_devices() -> None:
    """Join the other processes of this job, and have jax make its devices: the first call of it in any command.

    Raises:
        UserError: a platform that JAX_PLATFORMS names is not there; or, in a process that no launcher has started, jax
            cannot use the accelerator.
        PortTakenError, RuntimeError: as `initialize`; or the accelerator of a rank failed.
    """
    initialize()
    platforms = str(jax.config.jax_platforms or "")  # pyright: ignore[reportAttributeAccessIssue]
    if why := why_no_platform(platforms, os.environ):
        raise UserError(why)
    try:
        jax.devices()
    except RuntimeError as error:
        if "ROXXEL_COORDINATOR" in os.environ:  # it may be another rank's fault, or be over at a restart
            raise
        first = str(error).splitlines()[0].partition(" (set JAX_PLATFORMS")[0].partition(" (you may need")[0]
        cure = "see that the driver is loaded and no other process has the device, or set JAX_PLATFORMS=cpu for the CPU"
        if "gpu" in platforms.split(","):  # jax takes it for every kind of GPU, and needs all of them
            cure = "JAX_PLATFORMS has gpu: name the kind, as cuda or rocm"
        raise UserError(f"jax cannot make its devices: {first}: {cure}") from error


def initialize_alone() -> None:
    """Join a job of this process alone, so that its devices reduce in the order in which those of a launched one do.

    It comes before `initialize`, which is harmless then.
    """
    if jax.distributed.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    jax.distributed.initialize(address, 1, 0, coordinator_bind_address=address, cluster_detection_method="deactivate")


def _wait_for_listener(coordinator: str) -> bool:
    """Wait some seconds for rank 0's coordinator to take connections; returns whether it does. If not, jax goes on.

    gRPC, refused once, tries again after a whole second.
    """
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + LISTENER_LIMIT_S
    while time.monotonic() < end:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.settimeout(CONNECT_LIMIT_S)
                probe.bind(("", 0))
                if probe.getsockname()[1] != int(port):  # on its own machine it would meet itself, and take the port
                    probe.connect(address)
                    return True
        except ConnectionRefusedError:
            time.sleep(LISTENER_PAUSE_S)
        except OSError:  # a name that is not known yet, a link that is cut
            return False
    return False


class PortTakenError(RuntimeError):
    """The port of rank 0's coordinator is taken. It was free when the launcher looked, some seconds ago."""


def _check_port(coordinator: str) -> None:
    """Raises PortTakenError. (jax aborts, or shares the port with another job of this user.)"""
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"another process listens at {coordinator}, where rank 0 should") from error


process_index: Callable[[], int] = jax.process_index
"""The rank of this process, from 0."""
process_count: Callable[[], int] = jax.process_count
"""How many processes the job has."""


def is_primary() -> bool:
    """Whether this is rank 0, which alone prints and writes."""
    return process_index() == 0


def unanswered(error: Exception, what: str) -> TimeoutError | LostRankError:
    """The exception for a wait at jax's coordinator that failed: `what` says which process it waited for, how long."""
    first = str(error).splitlines()[0]
    if first.startswith("DEADLINE_EXCEEDED"):
        return TimeoutError(f"rank {process_index()} {what}: {first}")
    return LostRankError(f"rank {process_index()} has lost another rank, or jax's coordinator in rank 0: {first}")


def unique_key(name: str) -> str:
    """A key that is new each time: all ranks make the same calls in the same order, so they get the same keys."""
    _calls[name] += 1
    return f"roxxel/{name}/{_calls[name]}"


def wait_for_key(key: str, limit_s: float, what: str) -> str:
    """The value that a rank has set, or sets within `limit_s` seconds, in jax's key-value store.

    Raises:
        TimeoutError: none did; `what` says which rank, what for, and how long it was.
        LostRankError: jax's heartbeat reports a lost rank.
    """
    try:
        return key_value_store().blocking_key_value_get(key, max(1, int(limit_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        raise unanswered(error, what) from error


def barrier(name: str, limit_s: float = WAIT_LIMIT_S) -> None:
    """Wait until every process has come to this line.

    Raises:
        TimeoutError: a process did not arrive within `limit_s` seconds; names the place and the missing processes.
        LostRankError: a rank is lost, by jax's own heartbeat.
    """
    if process_count() == 1:
        return
    try:
        key_value_store().wait_at_barrier(unique_key(name), int(limit_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        what = f"waited {limit_s:.0f} s at '{name}' and not all of the {process_count()} processes came"
        raise unanswered(error, what) from error


def broadcast_from_primary(name: str, value: str, limit_s: float = WAIT_LIMIT_S) -> str:
    """Rank 0's `value`, on every rank.

    Raises:
        TimeoutError: rank 0 did not say it within `limit_s` seconds.
        LostRankError: a rank is lost, by jax's own heartbeat.
    """
    if process_count() == 1:
        return value
    key = unique_key(name)
    if not is_primary():
        return wait_for_key(key, limit_s, f"waited {limit_s:.0f} s for rank 0 to decide '{name}'")
    key_value_store().key_value_set(key, value)
    return value


def gather_to_primary(name: str, value: str, limit_s: float = WAIT_LIMIT_S) -> list[str]:
    """Collect on rank 0 every rank's `value`, in their order, once all have sent it; on the others nothing.

    Raises:
        TimeoutError: on rank 0, a rank did not send it within `limit_s` seconds.
        LostRankError: a rank is lost, by jax's own heartbeat.
    """
    key, values = keep_for_all(name, value, limit_s)
    if process_count() > 1 and is_primary():
        key_value_store().key_value_delete(key)
    return values


def keep_for_all(name: str, value: str, limit_s: float = WAIT_LIMIT_S) -> tuple[str, list[str]]:
    """Gather as `gather_to_primary` does; but each rank's value stays at jax's coordinator, by the returned key with
    /RANK, for the ranks that need it (`wait_for_key`)."""
    if process_count() == 1:
        return "", [value]
    key = unique_key(f"gather {name}")
    key_value_store().key_value_set(f"{key}/{process_index()}", value)
    if not is_primary():
        return key, []
    values, end = [value], time.monotonic() + limit_s
    for rank in range(1, process_count()):
        what = f"waited {limit_s:.0f} s for rank {rank} to say '{name}'"
        values.append(wait_for_key(f"{key}/{rank}", end - time.monotonic(), what))
    return key, values
