"""This process among the others: joining, asking who is who, waiting with a limit, agreeing, stopping together.

The launcher describes the job in ROXXEL_* variables; without them jax's own cluster detection (SLURM, Kubernetes, TPU
pods, Open MPI) is asked, and a process that is alone stays alone.
"""

import contextlib
import errno
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from roxxel_dist.cluster import interrupt
from roxxel_dist.cluster.exit_codes import LostRankError
from roxxel_dist.cluster.jax_private import backends_are_initialized, coordinator_client

INIT_TIMEOUT_S = 300
WAIT_LIMIT_S = 600.0
DEFAULT_MIN_COMPILE_S = 1.0
"""jax's own: programs that compile faster are not kept in its cache."""
DETERMINISTIC = "xla_gpu_deterministic_ops"
"""XLA's flag for the same bits each time on a GPU. It excludes kernels whose sums depend on the order in which threads
come (atomics), and takes the first kernel that fits where XLA would measure which is fastest. (XLA, gpu/autotuning:
the same as xla_gpu_exclude_nondeterministic_ops and xla_gpu_autotune_level=0.)"""
BITS = ("jax_default_matmul_precision", "jax_threefry_partitionable", "jax_default_prng_impl", "jax_enable_x64")
"""Settings of jax that decide bits."""

_calls: dict[str, int] = {}
_no_cache: set[Path] = set()
_stop, _stepped = threading.Event(), threading.Event()


def pin_threads(count: int | None = None) -> int:
    """Fix the size of XLA's CPU thread pool, before jax makes its first device, and return it.

    XLA splits a contraction by the size of the pool, so the pool decides the last bits of a result. It follows the
    cores and the local devices unless PJRT_NPROC says otherwise; one number for every rank and every restart keeps a
    run's losses bitwise the same.

    Args:
        count: the number to use, from an earlier run; by default what the environment says, or else the larger of the
            machine's cores and the devices of this process.
    """
    if count is None:
        devices = int(os.environ.get("ROXXEL_LOCAL_DEVICES") or 1)
        count = int(os.environ.get("PJRT_NPROC") or max(os.cpu_count() or 1, devices))
    os.environ["PJRT_NPROC"] = str(count)
    return count


def make_deterministic() -> None:
    """Have XLA give the same bits each time, through XLA_FLAGS, before jax makes its first device.

    The flags that are there stay. On a CPU the flag changes nothing.

    Raises:
        ValueError: XLA_FLAGS forbids it, or names a file that cannot be read.
        RuntimeError: jax uses its GPUs already.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA takes it for the name of a file with flags
        try:
            flags = Path(flags).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"XLA_FLAGS is {flags!r}, a file that cannot be read ({error.strerror})") from error
    said = [word.partition("=")[2].lower() for word in flags.split() if word.strip("-").split("=")[0] == DETERMINISTIC]
    if said and said[-1] in ("false", "0"):
        raise ValueError(
            f"deterministic is true, but XLA_FLAGS has --{DETERMINISTIC}={said[-1]}: take it out, or set deterministic "
            f"to false"
        )
    if said:
        return
    if backends_are_initialized() and jax.default_backend() == "gpu":
        raise RuntimeError(
            f"deterministic is true, but jax uses its GPUs already, and XLA has read its flags: ask for it first, or "
            f"set XLA_FLAGS=--{DETERMINISTIC}=true before the program starts"
        )
    os.environ["XLA_FLAGS"] = f"{flags} --{DETERMINISTIC}=true".strip()


def what_decides_bits() -> dict[str, Any]:
    """All that can change the last bits of a loss, besides config and data; plain values, to be kept with a run.

    Makes jax's devices, so it comes after `make_deterministic` and `initialize`.
    """
    devices = jax.devices()
    nproc = os.environ.get("PJRT_NPROC")
    return {
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "pjrt_nproc": int(nproc) if nproc else None,
        "processes": jax.process_count(),
        "devices": dict(Counter(_kind(device) for device in devices)),
        "platform": " ".join(devices[0].client.platform_version.split()),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        **{name: getattr(jax.config, name) for name in BITS},
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each thing that decides bits and is not what it was; what only one of the two knows is left out."""
    return [f"{name}: {saved[name]!r} -> {now[name]!r}" for name in now if name in saved and saved[name] != now[name]]


def _kind(device: Any) -> str:
    """What a device is; for a CPU, whose instructions decide how sums are split, the model of the processor."""
    if device.platform != "cpu":
        return device.device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {models[0] if models else 'CPU'}"


def initialize() -> None:
    """Join the other processes of this job. Harmless when called twice, or in a process that is alone.

    Raises:
        PortTakenError: this is rank 0, and somebody listens where its coordinator shall.
        RuntimeError: the coordinator was not reached within 300 s.
    """
    if jax.distributed.is_initialized():
        return
    env = os.environ
    if devices := env.get("ROXXEL_LOCAL_DEVICES"):
        jax.config.update("jax_num_cpu_devices", int(devices))
    pin_threads()
    if coordinator := env.get("ROXXEL_COORDINATOR"):
        if env["ROXXEL_PROCESS_ID"] == "0":
            _check_port(coordinator)
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


class PortTakenError(RuntimeError):
    """Somebody listens where rank 0's coordinator shall. It was free when the launcher looked, some seconds ago."""


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


def enable_compilation_cache(folder: str | Path | None = None) -> None:
    """Keep compiled programs in the user's cache folder, so that a restart compiles nothing twice.

    A folder chosen in the environment (JAX_COMPILATION_CACHE_DIR) or by an earlier call wins.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(folder or base / "roxxel-dist" / "xla")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            if is_primary() and folder not in _no_cache:
                _no_cache.add(folder)
                print(
                    f"roxxel-dist: {folder} cannot be written ({error.strerror}): compiled programs are not kept; "
                    f"JAX_COMPILATION_CACHE_DIR names another folder",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
        else:
            jax.config.update("jax_compilation_cache_dir", str(folder))
    # The default of one second leaves out most of a small model's programs. It holds for the whole process, so what its
    # program or its environment has chosen stays.
    if jax.config.jax_persistent_cache_min_compile_time_secs == DEFAULT_MIN_COMPILE_S:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def process_index() -> int:
    """The rank of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """How many processes the job has."""
    return jax.process_count()


def is_primary() -> bool:
    """Whether this is rank 0, which alone prints and writes."""
    return jax.process_index() == 0


def key_value_store() -> Any:
    """The client of jax's coordinator: keys that all processes see, barriers with a limit.

    Keys are written once. A wait that times out costs the coordinator some 34 KB that it never gives back.
    """
    return coordinator_client()


def unanswered(error: Exception, what: str) -> TimeoutError | LostRankError:
    """The exception for a wait at jax's coordinator that came to nothing: `what` says for whom and how long it was."""
    first = str(error).splitlines()[0]
    if first.startswith("DEADLINE_EXCEEDED"):
        return TimeoutError(f"rank {process_index()} {what}: {first}")
    return LostRankError(f"rank {process_index()} has lost another rank, or jax's coordinator in rank 0: {first}")


def once(name: str) -> str:
    """A key that is new each time: all ranks make the same calls in the same order, so they get the same keys."""
    _calls[name] = _calls.get(name, 0) + 1
    return f"roxxel/{name}/{_calls[name]}"


def barrier(name: str, limit_s: float = WAIT_LIMIT_S) -> None:
    """Wait until every process has come to this line.

    Raises:
        TimeoutError: somebody did not come within `limit_s` seconds; names the place and who is missing.
        LostRankError: a rank is lost, by jax's own heartbeat.
    """
    if jax.process_count() == 1:
        return
    try:
        key_value_store().wait_at_barrier(once(name), int(limit_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise unanswered(
            error, f"waited {limit_s:.0f} s at '{name}' and not all of the {process_count()} processes came"
        ) from error


def agree(name: str, value: str, limit_s: float = WAIT_LIMIT_S) -> str:
    """Rank 0's `value`, on every rank.

    Raises:
        TimeoutError: rank 0 did not say it within `limit_s` seconds.
        LostRankError: a rank is lost, by jax's own heartbeat.
    """
    if jax.process_count() == 1:
        return value
    key = once(name)
    if is_primary():
        key_value_store().key_value_set(key, value)
        return value
    try:
        return key_value_store().blocking_key_value_get(key, int(limit_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise unanswered(error, f"waited {limit_s:.0f} s for rank 0 to decide '{name}'") from error


def collect(name: str, value: str, limit_s: float = WAIT_LIMIT_S) -> list[str]:
    """On rank 0 every rank's `value`, in their order, when all have said it; on the others nothing.

    Raises:
        TimeoutError: on rank 0, a rank did not say it within `limit_s` seconds.
        LostRankError: a rank is lost, by jax's own heartbeat.
    """
    if jax.process_count() == 1:
        return [value]
    key = once(f"collect {name}")
    if not is_primary():
        key_value_store().key_value_set(f"{key}/{process_index()}", value)
        return []
    values, end = [value], time.monotonic() + limit_s
    for rank in range(1, process_count()):
        left_ms = int(1000 * max(end - time.monotonic(), 0.001))
        try:
            values.append(key_value_store().blocking_key_value_get(f"{key}/{rank}", left_ms))
        except jax.errors.JaxRuntimeError as error:
            raise unanswered(error, f"waited {limit_s:.0f} s for rank {rank} to say '{name}'") from error
    key_value_store().key_value_delete(key)
    return values


@contextlib.contextmanager
def watching_for_stop() -> Iterator[None]:
    """Within it SIGTERM, SIGHUP and Ctrl-C ask the training loop to stop after the step in hand; another Ctrl-C kills.

    A command that has done no step yet has nothing to save: it ends at once. A SIGHUP that is ignored (`nohup`) stays
    so. In a job of several processes jax has taken SIGTERM over already, and passes it on to all of them.
    """
    _stop.clear()
    _stepped.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = [signal.SIGINT] + ([signal.SIGTERM] if jax.process_count() == 1 else [])
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        watched.append(signal.SIGHUP)
    with interrupt.paused():
        before = {number: signal.signal(number, _ask_to_stop) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ask_to_stop(signum: int, frame: FrameType | None) -> None:
    again = signum == signal.SIGINT and _stop.is_set()
    if interrupt.active() and (again or not (_stepped.is_set() or jax.process_count() > 1)):
        interrupt.leave(signum)
    if again:
        raise KeyboardInterrupt
    _stop.set()
    if jax.process_count() > 1:
        # Tell everybody by the way that jax knows: all ranks must leave after the same step.
        signal.raise_signal(signal.SIGTERM)


def stop_requested(step: int) -> bool:
    """Whether to save and leave after `step`: the same answer on every rank, which must all ask after every step."""
    _stepped.set()
    if jax.process_count() == 1:
        return _stop.is_set()
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)
