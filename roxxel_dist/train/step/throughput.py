"""Throughput: the time of a step, tokens/s, model FLOPs utilisation (MFU), memory; and how far the host runs ahead."""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.devices.accelerators import peak_flops
from roxxel_dist.process.process_stat import free_bytes

ON_ACCELERATORS = 3
"""Steps that may wait: enough to keep the devices busy, few enough to stop soon."""


class InflightThrottler:
    """Keeps the host at most `limit` steps ahead of the devices of a mesh.

    On a CPU one step at a time: XLA's in-process collectives starve where several programs wait for them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.limit = 1 if mesh.devices.flat[0].platform == "cpu" else ON_ACCELERATORS
        self._waiting: deque[jax.Array] = deque()

    def add(self, result: jax.Array) -> None:
        """A step was dispatched; `result` is one of its outputs that no later step is given (and so is not donated)."""
        self._waiting.append(result)

    def wait_for_next(self) -> bool:
        """Wait until another step may be dispatched; returns whether all steps before it are done."""
        while len(self._waiting) >= self.limit:
            jax.block_until_ready(self._waiting.popleft())
        return not self._waiting

    def wait_for_all(self) -> None:
        """Wait until the devices have done all steps."""
        jax.block_until_ready(list(self._waiting))
        self._waiting.clear()


class StepTimer:
    """Times the steps between two reports; `pause` and `resume` leave out validations, saves and compilations."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """As of the last report."""
        self.restart()

    def restart(self) -> None:
        """Start afresh, after a compilation."""
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        self._finished_at: float | None = None
        self._steps = self._tokens = 0

    def step(self, tokens: int) -> None:
        """One step was begun that computes `tokens` tokens: of each row all but one, as the last is no input."""
        self._steps += 1
        self._tokens += tokens
        self._finished_at = None

    def mark_done(self) -> None:
        """Note that all steps begun until now are done: the next report ends here, not when it is made."""
        self._finished_at = time.perf_counter()

    def pause(self) -> None:
        """Pause: from here on it is not training."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def report(self) -> dict[str, float]:
        """{"ms_per_step", "tokens_per_s" (computed)} since the last report; empty where no step was timed."""
        if not self._steps:
            return {}
        end = self._finished_at or self._paused_at or time.perf_counter()
        spent = max(end - self._since, 1e-9)
        self.tokens_per_s = self._tokens / spent
        result = {"ms_per_step": 1000 * spent / self._steps, "tokens_per_s": self.tokens_per_s}
        self._since, self._finished_at, self._steps, self._tokens = end, None, 0, 0
        return result


def mfu(tokens_per_s: float, flops_per_token: float, devices: Sequence[Any], dtype: Any = "bfloat16") -> float | None:
    """Model FLOPs utilisation: the share (0 to 1) of the devices' peak that training uses; None where it is not known.

    Speed and devices are those of all processes, the FLOPs those of a training step, forward and backward. What
    rematerialisation computes twice is not counted: it is no use to the model. With the FLOPs of the compiled program
    it is the utilisation of the hardware (HFU). The peak is that of matrix products of the dtype. A run logs it against
    bfloat16, whatever it computes in: so runs compare.
    """
    peaks = [peak_flops(device.device_kind, dtype) for device in devices]
    if not peaks or None in peaks:
        return None
    return tokens_per_s * flops_per_token / sum(filter(None, peaks))


def peak_memory_gb(devices: Sequence[Any] | None = None) -> dict[str, float]:
    """The most memory held so far, in GB of 10^9 bytes: {"vram_gb": of the fullest device of this process}.

    Or {"ram_gb": of this process} where devices do not report, as on CPU.
    """
    stats = [device.memory_stats() or {} for device in (jax.local_devices() if devices is None else devices)]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    if peaks:
        return {"vram_gb": max(peaks) / 1e9}
    return {"ram_gb": peak_rss_bytes() / 1e9}


def device_bytes(tree: Any) -> int:
    """Bytes that the arrays of a tree, or their shapes with shardings, take on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def free_device_bytes() -> float:
    """The free memory of this process's fullest device; on CPU a device's share of the host's (see `free_bytes`)."""
    devices = jax.local_devices()
    stats = [device.memory_stats() or {} for device in devices]
    free = [stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats if "bytes_limit" in stat]
    if free:
        return min(free)
    return free_bytes() / len(devices)


def peak_rss_bytes() -> int:
    """The most memory that this process has held in RAM.

    From /proc: the figure of getrusage includes the peak of the parent process.
    """
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


class Profiler:
    """Traces the steps from `first` to `last`, 1-based and both included; never stops training.

    The trace goes into `plugins/profile/<time>/` of the folder, and `log` has the line that says so, or why there is
    none. A run that resumes after `first` begins at once.
    """

    def __init__(self, folder: str | Path, first: int, last: int, log: Callable[[str], None] = print) -> None:
        self._folder, self._first, self._last, self._log = Path(folder), first, last, log
        self._running = self._done = False
        self._traced = (0, 0)

    def begin_step(self, step: int, pending: Any = None) -> None:
        """Get ready for `step`; where tracing begins, wait for the arrays in `pending` first."""
        if self._done or self._running or not self._first <= step <= self._last:
            return
        self._guarded(lambda: self._start(pending))
        self._running, self._traced = not self._done, (step, step)

    def end_step(self, step: int, pending: Any = None) -> None:
        """`step` was begun; if tracing ends here, first wait for `pending`, the arrays that it computes."""
        if self._running:
            self._traced = (self._traced[0], step)
            if step >= self._last:
                self.close(pending)

    def close(self, pending: Any = None) -> None:
        """Write the trace, should it be running still: training ended before its last step."""
        if not self._running:
            return
        self._running = False
        self._guarded(lambda: (jax.block_until_ready(pending), jax.profiler.stop_trace()))
        if not self._done:
            self._log(f"profile of steps {self._traced[0]} to {self._traced[1]}: {self._folder}")
        self._done = True

    def _start(self, pending: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)  # jax would find out at the end, and go on tracing for ever
        jax.block_until_ready(pending)
        jax.profiler.start_trace(self._folder)

    def _guarded(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self._done = True
            self._log(f"no profile of steps {self._first} to {self._last}: {error}")
