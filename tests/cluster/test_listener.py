"""A rank that is ready before rank 0 waits for its coordinator without failed connections."""

import socket
import threading

from roxxel_dist.cluster import distributed


def test_it_waits_until_somebody_listens():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        listens = threading.Event()

        def listen():
            listens.set()
            server.listen()

        timer = threading.Timer(0.2, listen)
        timer.start()
        assert distributed._wait_for_listener(f"127.0.0.1:{server.getsockname()[1]}")
        assert listens.is_set()
        timer.join()


def test_it_leaves_to_jax_what_nobody_can_reach(monkeypatch):
    monkeypatch.setattr(distributed, "LISTENER_LIMIT_S", 0.1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert not distributed._wait_for_listener(f"127.0.0.1:{server.getsockname()[1]}")
    assert not distributed._wait_for_listener("no-such-host.invalid:1")
