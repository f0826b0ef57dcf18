"""Trials as processes of this machine, behind as much of the module `ray` as a sweep uses: one starts in milliseconds.

All but Ray is the real thing: the driver, its executor, and what a worker does (`body`) in a process of its own. In the
process of the tests the names of Ray are real too, and it checks the amounts.
"""

import _thread
import multiprocessing
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import names_of_ray

from roxxel_dist.launcher.backends.ray.cluster import ray_variables
from roxxel_dist.sweep import ray_executor

ADDRESS = "processes:0"
"""What stands for the address of a cluster."""
CPUS = 4
MORE: dict[str, float] = {}
"""What its one node has besides."""
CONTEXT = multiprocessing.get_context("forkserver")  # a process with jax has threads: it is not forked
CONTEXT.set_forkserver_preload(["names_of_ray", "trial_bodies", "roxxel_dist.sweep.ray_executor"])


def import_ray() -> Any:
    """The module, which reads how to use clusters when it is imported: with a token, as all of the tests' have one."""
    with ray_variables({"RAY_AUTH_MODE": "token"}):
        import ray
        import ray.exceptions
    return ray


class Stream:
    """What a trial yields."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.cancelled = False
        self.process = CONTEXT.Process(target=_work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def __next__(self) -> Any:
        from ray.exceptions import TaskCancelledError, WorkerCrashedError

        with suppress(EOFError, ConnectionResetError):
            return self.pipe.recv()
        self.end()
        if self.cancelled:
            raise TaskCancelledError
        if self.process.exitcode:
            raise WorkerCrashedError
        raise StopIteration

    def end(self) -> None:
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, run: str, task: ray_executor.Item, driver: Mapping[str, Any]) -> None:
    names_of_ray.install()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_heed, args=(pipe,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        for item in ray_executor.body(run, task, driver):
            pipe.send(item)


def _heed(pipe: Connection) -> None:
    """Do what Ray does to cancel a task: mark that the main thread shall raise KeyboardInterrupt."""
    with suppress(EOFError, OSError):
        while True:
            pipe.recv()
            _thread.interrupt_main()


class ProcessRay:
    """Stands for the module `ray`."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._gpus = 0.0

    def remote(self, *arguments: Any, **options: Any) -> Any:
        """In the order in which a pool uses it: the decorator, what it makes of the body, and a start."""
        if not options and len(arguments) > 1:
            if self._gpus > 1 and self._gpus % 1:  # Ray's own words, when a task is sent
                raise ValueError("GPU resource quantities >1 must", f" be whole numbers. {self._gpus} is invalid.")
            self._streams.append(Stream(arguments))
            return self._streams[-1]
        import_ray().remote(**options)(ray_executor.body)  # which checks the amounts
        self._gpus = options.get("num_gpus", 0.0)
        return lambda body: self

    def options(self, **options: Any) -> "ProcessRay":
        return self

    def wait(self, streams: Sequence[Stream], *, num_returns: int, timeout: float) -> tuple[list[Stream], None]:
        ready = wait([stream.pipe for stream in streams], timeout)
        return [stream for stream in streams if stream.pipe in ready][:num_returns], None

    def get(self, value: Any, *, timeout: float) -> Any:
        return value

    def cancel(self, stream: Stream) -> None:
        stream.cancelled = True
        with suppress(OSError):  # it has ended
            stream.pipe.send("cancel")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "Alive": True,
                "NodeManagerAddress": "127.0.0.1",
                "Resources": {"CPU": float(CPUS), **MORE},
            }
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": float(CPUS)}

    def shutdown(self) -> None:
        for stream in self._streams:
            if not stream.pipe.closed:
                stream.process.kill()
                stream.end()


@contextmanager
def connected(address: str, *, insecure: bool) -> Iterator[ProcessRay]:
    """For `roxxel_dist.launcher.backends.ray.cluster.connected`."""
    import_ray()
    ray = ProcessRay()
    try:
        yield ray
    finally:
        ray.shutdown()
