"""Copies of a neighbour over real sockets: who knows the key is let in, and what comes is what was sent."""

import socket

import numpy as np
import pytest

from roxxel_dist.checkpoint import replicas
from roxxel_dist.checkpoint.blocks import BlockFile, Header, read_blocks, read_header
from roxxel_dist.checkpoint.replicas import CopyServer, WrongKey, address_towards, fetch_blocks, send_file

KEY = bytes(range(32))


@pytest.fixture
def host(tmp_path):
    """(folder, server, the lines that it logged) of a host that keeps copies."""
    folder, lines = tmp_path / "host", []
    folder.mkdir()
    server = CopyServer(folder, "127.0.0.1", KEY, lines.append)
    yield folder, server, lines
    server.close()


@pytest.fixture
def file(tmp_path):
    """A file of two blocks, the first larger than a frame, as its bytes."""
    written = BlockFile(tmp_path / "1-3.own", [5 << 20, 40])
    written.write(0, np.arange(5 << 20, dtype=np.uint8))
    written.write(1, np.full(10, 7, np.float32))
    header = Header(
        generation="g.1", step=9, run="", table="", total=2, pending=None, metadata={}, rank=3, needs=[4, 6]
    )
    size = written.finish(header, [4, 6])
    written.close()
    return memoryview(written.path.read_bytes())[:size]


def test_a_neighbour_keeps_a_file_and_gives_its_blocks_back(host, file):
    folder, server, lines = host
    assert server.address[0] == "127.0.0.1"
    send_file(server.address, KEY, "1-3", file)
    kept = folder / "1-3.copy"
    assert read_header(kept).step == 9
    whole = {number: bytes(data) for number, data in read_blocks(kept, read_header(kept)).items()}
    fetched = fetch_blocks(server.address, KEY, "g.1", [6, 4])
    assert {number: bytes(data) for number, data in fetched.items()} == whole
    with pytest.raises(OSError, match="does not have block 5"):
        fetch_blocks(server.address, KEY, "g.1", [5])
    with pytest.raises(OSError, match="does not have block 4"):
        fetch_blocks(server.address, KEY, "g.2", [4])
    assert lines == []


def test_a_wrong_key_is_refused_and_logged_once(host, file):
    folder, server, lines = host
    for _ in range(3):
        with pytest.raises(WrongKey):
            send_file(server.address, bytes(32), "1-3", file)
    send_file(server.address, KEY, "0-3", file)  # the server goes on, and has logged what was before
    assert lines == [
        "a connection from 127.0.0.1 for copies in memory was refused: it does not know the key of this job"
    ]
    assert [path.name for path in folder.iterdir()] == ["0-3.copy"]


def test_a_stranger_gets_no_proof_of_the_key(host):
    _, server, _ = host
    with socket.create_connection(server.address, 5) as stranger:
        stranger.sendall(replicas.HELLO + bytes(32) + bytes(32))
        answer = b""
        while piece := stranger.recv(4096):
            answer += piece
    assert len(answer) == len(replicas.HELLO) + 32  # its nonce alone


def test_what_is_changed_on_its_way_is_refused(host, file):
    folder, server, _ = host
    with replicas._connected(server.address, KEY) as channel:
        channel.send({"put": "1-3", "size": len(file)})
        assert channel.receive_json() == ""
        channel._out = bytes(32)  # who is in between has no key of the connection
        channel.send(file[4096:8192])
        with pytest.raises(ConnectionError):
            channel.receive()
    assert read_header(folder / "1-3.copy") is None


def test_a_copy_that_is_cut_off_is_none(host, file):
    folder, server, _ = host
    send_file(server.address, KEY, "1-3", file)
    with replicas._connected(server.address, KEY) as channel:
        channel.send({"put": "1-3", "size": len(file)})
        assert channel.receive_json() == ""
        channel.send(file[4096:8192])
    for _ in range(2):  # the second answer comes when the first connection was served
        with pytest.raises(OSError, match="does not have"):
            fetch_blocks(server.address, KEY, "g.1", [4])
    assert read_header(folder / "1-3.copy") is None


def test_names_of_other_files_are_not_written(host, file):
    folder, server, _ = host
    for name in ("../x", "2-1", "0-1/../../x", "key"):
        with pytest.raises(ConnectionError):
            send_file(server.address, KEY, name, file)
    assert list(folder.iterdir()) == []


def test_the_address_is_that_of_the_way_to_the_coordinator():
    assert address_towards("127.0.0.1:4242") == "127.0.0.1"
    assert address_towards("[::1]:4242") == "::1"
