"""Ranks on the nodes of a Ray cluster: an actor a node starts the agents, and Ray carries what they say."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from roxxel_dist.launcher.backends.ray import cluster
from roxxel_dist.launcher.backends.ray.process import NoNodeError, RayProcess, gone
from roxxel_dist.launcher.host.process_tree import HEARTBEAT_TIMEOUT_S

ACTOR_S = 20.0
"""How long a new actor may take where the old one died: Ray may first have to find another node."""
CLOSE_S = 10.0
LEAVE_S = 3.0
THREADS = 32
"""Calls that an actor answers at once: up to four a program, more where stuck ones are left behind."""


class RayBackend:
    """One agent a node, started by an actor in a placement group that spreads over `count` nodes.

    Before it is opened (as a context) it only tells what it would do. Opened, it is connected, and holds the nodes. A
    host is then called by the address of its node. An actor that died is made anew at the next `start`, on the node to
    which Ray has moved its bundle.

    Args:
        address: `auto`, or HOST:PORT of the head.
        count: how many nodes.
        cpus: of each node, kept for the job.
        gpus: of each node; None asks Ray for none, and leaves those of the node visible.
        python: the interpreter on the nodes; by default the path of this one.
        directory: the working directory there; by default that of this process, or in a Ray job with a working_dir,
            the node's own copy of that.
        insecure: use the cluster also without a token.
        place_s: seconds that Ray may take to find the nodes.
        say: tells a person a line.

    Raises:
        ValueError: a number that cannot be.
    """

    address: str | None = None
    heartbeat_timeout_s: float | None = HEARTBEAT_TIMEOUT_S

    def __init__(
        self,
        address: str,
        count: int,
        *,
        cpus: float = 1,
        gpus: int | None = None,
        python: str | None = None,
        directory: str | None = None,
        insecure: bool = False,
        place_s: float = 60.0,
        say: Callable[[str], None] = print,
    ) -> None:
        cluster.check_address(address)
        for flag, value in (("--hosts", count), ("--cpus-per-host", cpus), ("--gpus-per-host", gpus)):
            if value is not None and not 1 <= value < float("inf"):
                raise ValueError(f"{flag} {value}: must be at least 1")
        if not 0 < place_s < float("inf"):
            raise ValueError(f"--place-timeout {place_s:g}: must be seconds, more than 0")
        self._cluster, self._insecure, self._place_s, self._say = address, insecure, place_s, say
        self._bundle = {"CPU": cpus, **({} if gpus is None else {"GPU": gpus})}
        self._python = python or sys.executable
        self._chosen, self._directory = directory, directory or os.getcwd()
        self._homes = [f"bundle-{index}" for index in range(count)]  # may change in the middle of an attempt
        self._parts = {home: index for index, home in enumerate(self._homes)}  # every name that a bundle ever had
        self._actors: list[Any] = []
        self._locks = [threading.Lock() for _ in range(count)]
        self._processes: list[RayProcess] = []
        self._closed = threading.Event()
        self._open, self._in_worker, self._is_free = ExitStack(), False, False
        self.abandoned: bool = False
        """Whether closing was given up: an ordinary end of this process would then wait for Ray again."""
        self._ray: Any = None
        self._group: Any = None

    @property
    def hosts(self) -> Sequence[str]:
        """The addresses of the nodes, as of now; `bundle-0` and so on before it is opened."""
        return tuple(self._homes)

    @property
    def python(self) -> str:
        """The interpreter on the nodes."""
        return self._python

    @property
    def environment(self) -> Mapping[str, str]:
        """Nothing of the launcher's own goes there by itself."""
        return {}

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """What `start` runs on the node."""
        return [self._python, "-u", "-m", module, *words]

    def __enter__(self) -> "RayBackend":
        """Connect, and wait for the nodes.

        Raises:
            ValueError: Ray is not installed, or there is no token.
            ClusterError: it does not answer, or has no room.
        """
        with ExitStack() as stack:
            self._ray = stack.enter_context(cluster.connected(self._cluster, insecure=self._insecure))
            environment = self._ray.get_runtime_context().runtime_env or {}
            self._in_worker = self._chosen is None and bool(environment.get("working_dir"))
            end = time.monotonic() + self._place_s
            placing = cluster.placed(self._ray, len(self._homes), self._bundle, self._place_s)
            self._group = stack.enter_context(placing)
            self._actors = [self._make(index) for index in range(len(self._homes))]
            self._await_actors(max(ACTOR_S, end - time.monotonic()))
            now = unique(cluster.addresses(self._ray, self._group))
            self._homes = [self._name(index, address) for index, address in enumerate(now)]
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the nodes, and whatever runs there; not for longer than CLOSE_S, where Ray does not answer."""
        self._closed.set()
        closing = threading.Thread(target=self._close, name="ray-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if not self._is_free:
            self.abandoned = True
            self._say("Ray does not answer any more (is its head up?); it frees the nodes when it misses this process")

    def _close(self) -> None:
        for actor in self._actors:
            with suppress(Exception):  # of many kinds, where the head is gone
                self._ray.kill(actor)  # what is asked of one that does not answer fails then
        for process in self._processes:
            process.leave(LEAVE_S)
        with suppress(Exception):
            self._open.close()
            self._is_free = True

    def start(self, host: str, module: str, *words: str) -> RayProcess:
        """Start `python -m MODULE WORDS` on a node; returns at once, also where its actor has to be made first."""
        index = self._parts[host]
        directory = None if self._in_worker else self._directory
        argv = self.argv(host, module, *words)
        number = len(self._processes)
        self._processes.append(RayProcess(lambda: self._reach(index, host), number, argv, directory, self._closed))
        return self._processes[number]

    def describe(self) -> Mapping[str, Any]:
        """What a dry run tells of it."""
        return {"kind": "ray", "directory": self._directory}

    def _make(self, index: int) -> Any:
        return cluster.actor(self._ray, self._group, index, self._bundle, THREADS)

    def _await_actors(self, limit_s: float) -> None:
        waiting = [actor.ready.remote() for actor in self._actors]
        try:
            self._ray.get(waiting, timeout=limit_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise cluster.ClusterError(
                f"Ray gave the nodes, but its workers there did not start within {limit_s:.0f} s: see `ray logs`"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise cluster.ClusterError(f"Ray's workers on the nodes did not start: {gone(error)}") from error

    def _reach(self, index: int, host: str) -> Any:
        """The actor of a bundle, a new one where the last is dead. Raises NoNodeError."""
        errors = self._ray.exceptions
        with self._locks[index]:
            self._check_head()
            for again in (True, False):
                try:
                    self._ray.get(self._actors[index].ready.remote(), timeout=ACTOR_S)
                    break
                except errors.GetTimeoutError:
                    self._ray.kill(self._actors[index])  # it may never answer again, though its node is well
                    self._actors[index] = self._make(index)
                    raise NoNodeError(
                        f"Ray had no node for it within {ACTOR_S:g} s, or the node does not answer (`ray status`)"
                    ) from None
                except errors.RayError as problem:
                    if not again:
                        raise NoNodeError(gone(problem)) from None
                    self._actors[index] = self._make(index)
            self._note_move(index, host)
            return self._actors[index]

    def _check_head(self) -> None:
        """Raises NoNodeError where the head is gone: Ray would wait for it, for minutes, in calls that cannot end."""
        head = self._ray.get_runtime_context().gcs_address
        try:
            cluster.check_head(head)
        except cluster.ClusterError:
            raise NoNodeError(
                f"the head of the Ray cluster is gone, or stuck ({head} does not answer): a Ray that has lost its head "
                "must be started again, on all nodes"
            ) from None

    def _name(self, index: int, address: str) -> str:
        """What a bundle is called at an address; a name that another bundle had goes on to mean that one."""
        if self._parts.setdefault(address, index) == index:
            return address
        self._parts[f"{address}#{index}"] = index
        return f"{address}#{index}"

    def _note_move(self, index: int, host: str) -> None:
        now = self._name(index, unique(cluster.addresses(self._ray, self._group))[index])
        if now != self._homes[index]:
            self._say(f"Ray has moved the part of {self._homes[index]} to {now}; this attempt still calls it {host}")
            self._homes[index] = now


def unique(addresses: Sequence[str]) -> list[str]:
    """Names of the bundles by the addresses of their nodes: Ray can run several nodes on one machine."""
    return [
        address if address and list(addresses).count(address) == 1 else f"{address or 'bundle'}#{index}"
        for index, address in enumerate(addresses)
    ]
