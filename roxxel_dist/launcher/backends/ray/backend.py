"""Ranks on the nodes of a Ray cluster: an actor a node starts the agents, and Ray carries their messages."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, ClassVar

from roxxel_dist.launcher.backends.ray import actor, cluster
from roxxel_dist.launcher.control.new_job import job_of
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import python_words, ranks_on
from roxxel_dist.launcher.output import info
from roxxel_dist.process.exit_codes import EXIT_PREFLIGHT, UserError

CHUNK = 1 << 16
KILL_S = 5.0
"""How long to wait for a node's report of how a killed program ended."""
LOOK_S = 1.0
LOST = 255
"""The exit code of a program whose node is gone, as with ssh."""


class NoNodeError(Exception):
    """The lack of an actor that could run anything. The message says why."""


class RayProcess:
    """A program on a node, with as much of `subprocess.Popen` as the launcher needs.

    Args:
        reach: makes sure of the actor; may wait. Raises NoNodeError.
        number: names the program, for this actor and all that follow it.
        words: its command line.
        directory: where it runs; None: where Ray's worker does.
        closed: set before Ray is shut down; nothing is asked of it any more.
    """

    def __init__(
        self,
        reach: Callable[[], Any],
        number: int,
        words: Sequence[str],
        directory: str | None,
        closed: threading.Event,
    ) -> None:
        self._reach, self._number, self._closed = reach, number, closed
        self._words, self._directory = list(words), directory
        self._code: int | None = None
        self._ended = threading.Event()
        self._actor: Any = None
        self._kill_by = math.inf
        """By the launcher's clock; finite when it was killed."""
        self._threads: list[threading.Thread] = []
        orders, stdin = os.pipe()
        stdout, out = os.pipe()
        stderr, err = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb")
        self.stderr: IO[bytes] | None = os.fdopen(stderr, "rb")
        self._thread(self._run, orders, out, err)

    def poll(self) -> int | None:
        """The exit code; None while the program runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; LOST where its node is gone. Raises subprocess.TimeoutExpired.

        One that was killed is waited for KILL_S at most: its node may be gone too, and its agent has a limit.
        """
        limit = min(math.inf if timeout is None else timeout, max(0.0, self._kill_by - time.monotonic()))
        if not self._ended.wait(min(limit, threading.TIMEOUT_MAX)):
            if time.monotonic() < self._kill_by:
                raise subprocess.TimeoutExpired(self._words, timeout or 0)
            return LOST
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """End it now; see `wait`."""
        from ray.exceptions import RayError

        self._kill_by = min(self._kill_by, time.monotonic() + KILL_S)
        if self._actor is not None:
            with suppress(RayError):
                self._actor.kill.remote(self._number)

    def leave(self, limit_s: float) -> None:
        """Wait until no thread of this one is in Ray any more, when `closed` is set."""
        end = time.monotonic() + limit_s
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _thread(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments, name=f"ray-{self._number}", daemon=True))
        try:
            self._threads[-1].start()
        except RuntimeError as error:
            self._threads.pop()
            raise OSError(f"{error}: this machine allows no more processes (ulimit -u, pids.max)") from None

    def _run(self, orders: int, out: int, err: int) -> None:
        """The life of the program: started, its output carried here, its end received."""
        code = LOST
        try:
            self._actor = self._reach()
            reason = self._ask("start", self._words, self._directory)
            if not reason:
                if self._kill_by < math.inf:  # before it was there
                    self.kill()
                self._thread(self._carry_orders, orders)
                code = self._carry_output(out, err)
        except NoNodeError as problem:
            reason = str(problem)
        except Exception as problem:  # of many kinds, if Ray is gone; an uncaught one would leave callers waiting
            reason = reason_of(problem)
        if len(self._threads) == 1:
            os.close(orders)
        if reason:
            with suppress(OSError):
                os.write(err, f"{reason}\n".encode())
        os.close(err)
        self._code = code
        self._ended.set()
        os.close(out)  # last: the reader looks for the reason at the end of stdout

    def _ask(self, method: str, *arguments: object) -> Any:
        """The answer of the actor. Raises RayError, also when the launcher has closed."""
        from ray.exceptions import GetTimeoutError

        if self._closed.is_set():
            raise GetTimeoutError("the launcher has ended")
        return result(getattr(self._actor, method).remote(self._number, *arguments), self._closed)

    def _carry_output(self, out: int, err: int) -> int:
        """Bring the output of the program into the pipes here, to its end; returns its exit code."""
        while True:
            *pieces, code = self._ask("read")
            for fd, data in zip((out, err), pieces, strict=True):
                view = memoryview(data)
                with suppress(BrokenPipeError):  # the reader has closed its end
                    while view:
                        view = view[os.write(fd, view) :]
            if code is not None:
                return code

    def _carry_orders(self, fd: int) -> None:
        from ray.exceptions import RayError

        with os.fdopen(fd, "rb", buffering=0) as orders, suppress(RayError):
            while self._ask("write", orders.read(CHUNK)):
                pass


def result(answer: Any, closed: threading.Event, limit_s: float = math.inf) -> Any:
    """The answer of an actor.

    Raises RayError if the actor is lost, or a GetTimeoutError after `limit_s` seconds or when `closed` is set: a thread
    that waits in Ray during its shutdown crashes the process.
    """
    import ray
    from ray.exceptions import GetTimeoutError

    end = time.monotonic() + limit_s
    while True:
        try:
            return ray.get(answer, timeout=LOOK_S)
        except GetTimeoutError:
            if closed.is_set() or time.monotonic() > end:
                raise


def reason_of(problem: Exception) -> str:
    """The reason why an actor does not answer, in one line: Ray's own text has many."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, NodeDiedError

    if isinstance(problem, GetTimeoutError):
        return "Ray has no node for it yet, or the node does not answer (`ray status`)"
    if isinstance(problem, NodeDiedError) or "node has died" in str(problem):
        return "Ray says that the node died"
    if isinstance(problem, ActorDiedError):
        return "its Ray actor died (its process was killed, or its node is gone)"
    if isinstance(problem, ActorUnavailableError):
        return "the connection to its Ray actor broke"
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"Ray cannot reach its actor: {lines[0] if lines else type(problem).__name__}"


ACTOR_S = 20.0
"""How long a new actor may take where the old one died: Ray may first have to find another node."""
LEAVE_S = 3.0
THREADS = 32
"""Calls that an actor answers at once: up to three a program, more where stuck ones are left behind."""


class RayBackend(base.Backend):
    """One agent a node, started by an actor in a placement group that spreads over `options.hosts` nodes.

    Before it is `hold_nodes` it only describes what it would do. Then a host is called by the address of its node, and
    keeps that name: the next `start` replaces an actor that died, on the node to which Ray has moved its bundle.

    Args:
        options: which nodes, of which cluster.
        gpus: of each node; None asks Ray for none, and leaves those of the node visible.

    Raises:
        ValueError: an option that cannot be.
    """

    is_remote: ClassVar[bool] = True

    def __init__(self, options: "Options", gpus: int | None = None) -> None:
        cluster.check_address(options.address)
        for flag, value in (("--hosts", options.hosts), ("--cpus-per-host", options.cpus_per_host)):
            if not 1 <= value < float("inf"):
                raise UserError(f"{flag} {value}: must be at least 1")
        if not 0 < options.place_timeout < float("inf"):
            raise UserError(f"--place-timeout {options.place_timeout:g}: must be seconds, more than 0")
        self._options = options
        self._bundle = {"CPU": options.cpus_per_host, **({} if gpus is None else {"GPU": gpus})}
        self.python: str = options.python or sys.executable
        self.hosts: Sequence[str] = tuple(f"bundle-{index}" for index in range(options.hosts))
        self.directory: str = options.directory or os.getcwd()
        self._directory: str | None = self.directory  # None: that of Ray's workers
        self._ray: Any = None
        self._head = ""
        self._group: Any = None
        self._actors: list[Any] = []
        self._addresses: list[str] = []
        self._locks = [threading.Lock() for _ in self.hosts]
        self._processes: list[RayProcess] = []
        self._closed = threading.Event()

    @contextmanager
    def hold_nodes(self) -> Iterator[None]:
        """A context that is connected and holds the nodes; at the end they are released, and whatever runs there ends.

        Raises:
            ValueError: Ray is not installed, or there is no token.
            ClusterError: it does not answer, or has no room.
        """
        options = self._options
        with cluster.connected(options.address, insecure=options.insecure) as self._ray:
            context = self._ray.get_runtime_context()
            self._head = context.gcs_address
            if options.directory is None and (context.runtime_env or {}).get("working_dir"):
                self._directory = None
            end = time.monotonic() + options.place_timeout
            self._group = cluster.place(self._ray, len(self.hosts), self._bundle, options.place_timeout)
            self._actors = [self._make_actor(index) for index in range(len(self.hosts))]
            limit_s = max(ACTOR_S, end - time.monotonic())
            try:
                self._addresses = self._ray.get([node.ready.remote() for node in self._actors], timeout=limit_s)
            except self._ray.exceptions.RayError as error:
                raise cluster.ClusterError(
                    f"Ray gave the nodes, but its workers did not start within {limit_s:.0f} s ({reason_of(error)}): "
                    "see `ray logs`"
                ) from error
            self.hosts = tuple(unique(self._addresses))
            try:
                yield
            finally:
                self._closed.set()
                end = time.monotonic() + LEAVE_S
                for process in self._processes:
                    process.leave(max(0.0, end - time.monotonic()))

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The command that `start` runs on the node."""
        return python_words(self.python, module, *words)

    def start(self, host: str, module: str, *words: str) -> RayProcess:
        """Start `python -m MODULE WORDS` on a node; returns at once, also where its actor has to be made first."""
        index, number, argv = self.hosts.index(host), len(self._processes), self.argv(host, module, *words)
        self._processes.append(RayProcess(lambda: self._reach(index), number, argv, self._directory, self._closed))
        return self._processes[number]

    def _make_actor(self, index: int) -> Any:
        """A new actor on the node of a bundle; returns before it is up."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # By value: Ray's workers may be of a Python that has no roxxel_dist.
        self._ray.cloudpickle.register_pickle_by_value(actor)
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "max_concurrency": THREADS,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
        }
        given = list((self._ray.get_runtime_context().runtime_env or {}).get("env_vars") or {})
        return self._ray.remote(actor.RayNode).options(**options).remote(given)

    def _reach(self, index: int) -> Any:
        """The actor of a bundle, a new one where the last is dead. Raises NoNodeError."""
        with self._locks[index]:
            try:  # without its head Ray would wait, for minutes, in calls that cannot end
                cluster.check_head(self._head)
            except cluster.ClusterError:
                raise NoNodeError(
                    f"the head of the Ray cluster has ended or is stuck ({self._head} does not answer): "
                    "start Ray again on all nodes"
                ) from None
            reason = ""
            for _ in range(2):
                try:
                    address = result(self._actors[index].ready.remote(), self._closed, ACTOR_S)
                    break
                except self._ray.exceptions.RayError as problem:
                    reason = reason_of(problem)
                    if self._closed.is_set():
                        raise NoNodeError(reason) from None
                    self._ray.kill(self._actors[index])  # it may never answer again, though its node is well
                    self._actors[index] = self._make_actor(index)
            else:
                raise NoNodeError(reason)
            if address != self._addresses[index]:
                name = self.hosts[index]
                info(f"Ray has moved host {name} to {address}; it keeps the name {name} until the end of the job")
                self._addresses[index] = address
            return self._actors[index]


def unique(addresses: Sequence[str]) -> list[str]:
    """Names of the bundles by the addresses of their nodes: Ray can run several nodes on one machine."""
    return [
        address if address and list(addresses).count(address) == 1 else f"{address or 'bundle'}#{index}"
        for index, address in enumerate(addresses)
    ]


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    """Start a program on nodes of a Ray cluster: `launch ray --address auto --hosts N [options] -- CMD…`.

    The cluster is used with a token (RAY_AUTH_MODE=token). --gpus-per-host are asked of Ray too. To leave it to the
    cluster: `ray job submit --no-wait -- roxxel-dist launch ray --address auto --hosts N -- CMD…`.
    """

    example: ClassVar[str] = "--address auto --hosts 2"
    address: str
    """The cluster: `auto` on one of its nodes or in a Ray job, or HOST:PORT of its head."""
    hosts: int
    """How many nodes; Ray chooses which."""
    procs_per_host: int = 1
    """Processes to start on each node."""
    cpus_per_host: float = 1
    """CPUs of each node that Ray keeps for the job; processes may use more."""
    insecure: bool = False
    """Also use a cluster without a token. Anyone who reaches such a cluster can run programs as you."""
    place_timeout: float = 60.0
    """Seconds that Ray may take to find the nodes."""
    min_hosts: int | None = None
    """Continue with this many nodes if others do not come back after a failure. Default: all are needed."""
    host_lease: float = 60.0
    """Seconds that the processes continue if the launcher loses all nodes at once, because its connection is lost."""
    host_timeout: float = 60.0
    """Seconds to wait for a node after a failure, before the job continues without it or ends."""
    python: str | None = None
    """The interpreter on the nodes; not given, the path of this one."""
    directory: str | None = None
    """The working directory on the nodes; not given, that of the launcher, or the working_dir of the Ray job."""

    def launch(self, request: base.LaunchRequest) -> int:
        """Hold the nodes, and start the ranks there."""
        with request.usage_errors():
            if self.detach:
                raise UserError(
                    "--detach: leave the launcher to the cluster itself: `ray job submit --no-wait -- roxxel-dist "
                    "launch ray --address auto …`; `ray job logs` and `ray job stop` go with it"
                )
            backend = RayBackend(self, self.gpus_per_host)
            job = job_of(self, request, ranks_on(self.hosts, self.procs_per_host, 0, self.min_hosts), backend)
        if self.dry_run:
            return request.start(self, job, backend)
        with ExitStack() as stack:
            try:
                with request.usage_errors():
                    stack.enter_context(backend.hold_nodes())
            except cluster.ClusterError as problem:
                info(str(problem))
                return EXIT_PREFLIGHT
            return request.start(self, job, backend)
