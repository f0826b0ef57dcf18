"""A Ray cluster as the launcher meets it: connected to, with a token, and a place on each of several nodes."""

import atexit
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roxxel_dist.process.exit_codes import UserError, pip_install

HOST_PORT = re.compile(r"[^\s:/]+:\d{1,5}|\[[0-9A-Fa-f:]+\]:\d{1,5}")
MAX_NODES = 8
"""Nodes that a message names."""
ASK_S = 10.0
CLOSE_S = 10.0
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"


class ClusterError(Exception):
    """The cluster cannot be used now. The message is for people."""


@contextmanager
def connected(address: str, *, insecure: bool) -> Iterator[Any]:
    """The module ray, connected to the cluster at `auto` or `host:port`.

    Args:
        address: where the cluster is.
        insecure: use it also without a token.

    Raises:
        ValueError: no address of a cluster, Ray is not installed, or there is no token.
        ClusterError: it does not answer.
    """
    check_address(address)
    if find_spec("ray") is None:
        raise UserError(f"Ray is not installed: {pip_install('ray')}")
    # A head that is gone does not come back. Ray would end this process, with code 1 and its own words, after 60 s;
    # 600 s later the launcher has ended itself.
    values = {RECONNECT: os.environ.get(RECONNECT, "600")}
    if not insecure:
        check_token(address)
        values["RAY_AUTH_MODE"] = "token"
    head = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if HOST_PORT.fullmatch(head):
        check_head(head)
    with ray_variables(values):  # Ray reads them when it is imported
        import ray
        from ray.exceptions import RayError

        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, TimeoutError, RayError) as error:
            raise ClusterError(f"--address {address}: {no_answer(error)}") from error
        try:
            yield ray
        finally:  # in a thread: from a cluster that is gone Ray never comes back, nor when the interpreter ends
            closing = threading.Thread(target=ray.shutdown, name="ray-close", daemon=True)
            closing.start()
            closing.join(CLOSE_S)
            if closing.is_alive():
                atexit.unregister(ray.shutdown)


@contextmanager
def ray_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set some of Ray's variables; at the end all of Ray's are as they were before, also those that Ray has set."""
    before = _ray_variables()
    os.environ.update(values)
    try:
        yield
    finally:
        for name in _ray_variables():
            del os.environ[name]
        os.environ.update(before)


def _ray_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"}


def check_address(address: str) -> None:
    """Check the address of a cluster. Raises ValueError where it cannot be one."""
    if address.startswith("ray://"):
        raise UserError(
            f"--address {address}: the launcher must run inside the cluster; send it there with `ray job submit "
            "--address http://HEAD:8265 -- roxxel-dist launch ray --address auto …`, or run it on a node"
        )
    if address != "auto" and not HOST_PORT.fullmatch(address):
        raise UserError(
            f"--address {address!r}: write `auto`, or HOST:PORT of the cluster's head (port 6379 by default)"
        )


def no_answer(error: Exception) -> str:
    """The reason why Ray could not connect, in one line, and what to do."""
    reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
    return (
        f"this process could not join the Ray cluster ({reason}): is it up (`ray status`), is this machine one of its "
        "nodes, and is the token here that of the cluster (RAY_AUTH_MODE=token, and ~/.ray/auth_token or "
        "RAY_AUTH_TOKEN_PATH)?"
    )


def check_token(address: str) -> None:
    """Check the token. Raises ValueError where Ray would use the cluster without one: it reads this file."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    if mode.lower() != "token" and (mode or not has_token):
        state = repr(mode) if mode else "not set, and there is no token"
        raise UserError(
            f"--address {address}: RAY_AUTH_MODE is {state}; set it to token. Anyone who reaches a cluster without a "
            "token can run programs as you. Make a token with `ray get-auth-token --generate`, copy ~/.ray/auth_token "
            "to every node (mode 600), and start Ray with RAY_AUTH_MODE=token everywhere; or use --insecure, in a "
            "network where you trust everybody"
        )


def check_head(address: str) -> None:
    """Check that the head answers. Raises ClusterError after ASK_S: Ray itself would try for minutes."""
    import grpc

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ASK_S).close()
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
            with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
                grpc.channel_ready_future(channel).result(timeout=ASK_S)
    except (OSError, OverflowError, grpc.FutureTimeoutError) as error:
        raise ClusterError(
            f"--address {address}: no head of a Ray cluster answers there ({str(error) or 'it says nothing'}); see "
            "`ray status` on a node; the port is 6379 where none was chosen"
        ) from error


def place(ray: Any, count: int, bundle: Mapping[str, float], limit_s: float) -> Any:
    """A placement group: a bundle on each of `count` nodes, until Ray is left.

    Raises ClusterError where Ray has no room for it within `limit_s` seconds.
    """
    from ray.util.placement_group import placement_group

    group = placement_group([dict(bundle)] * count, strategy="STRICT_SPREAD", name="roxxel-dist")
    end = time.monotonic() + limit_s
    while not group.wait(max(0.1, min(1.0, end - time.monotonic()))):  # in pieces: Ctrl-C is received between them
        if time.monotonic() >= end:
            raise ClusterError(no_room(count, bundle, limit_s, ray.nodes(), ray.available_resources()))
    return group


def no_room(
    count: int,
    bundle: Mapping[str, float],
    limit_s: float,
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, float],
) -> str:
    """The words for what was asked, and for what there is."""
    return (
        f"Ray found no room within {limit_s:g} s (--place-timeout). Asked: {amounts(bundle, bundle)} on each of "
        f"{count} different nodes (--hosts, --cpus-per-host, --gpus-per-host). Alive: "
        f"{sum(bool(node['Alive']) for node in nodes)}: {capacities(nodes, bundle)}; "
        f"free now, together: {amounts(free, bundle)}. Ask for less, wait for what runs there (`ray status`), or "
        "start more nodes"
    )


def capacities(nodes: Sequence[Mapping[str, Any]], names: Iterable[str]) -> str:
    """The nodes that are alive, with how much each has of some resources, for people."""
    alive = [f"{node['NodeManagerAddress']} ({amounts(node['Resources'], names)})" for node in nodes if node["Alive"]]
    return ", ".join(alive[:MAX_NODES]) + (f" and {len(alive) - MAX_NODES} more" if len(alive) > MAX_NODES else "")


def amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    """The amounts of some resources, for people."""
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in names) or "nothing"
