"""What the kernel says of the connections of clients from which nothing comes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import wait_for
from hosts import ROOT, Cluster
from machines import PATH

from roxxel_dist.launcher.transport.questions import _stuck, stuck_connection

MAPPED = "0000000000000000FFFF0000"
LINES = {
    # remote address, state, queues, timer, repeats, inode as in /proc/net/tcp and tcp6
    "a connection that nobody takes": (
        "02004D0A:0016 02 00000001:00000000 01:000001FF 00000003", "10.77.0.2:22 takes no connection",
    ),
    "bytes that are sent again": (
        "02004D0A:0016 01 00000508:00000000 01:000001FF 00000005",
        "10.77.0.2:22 has taken the connection, and does not acknowledge 1288 bytes: packets of full size are lost (an "
        "MTU: `ping -M do -s 1472 10.77.0.2`)",
    ),
    "the same over IPv6": (
        "000000FD000000000000000002000000:1F90 01 00000010:00000000 01:000001FF 00000001",
        "[fd00::2]:8080 has taken the connection, and does not acknowledge 16 bytes: packets of full size are lost (an "
        "MTU: `ping -M do -s 1452 fd00::2`)",
    ),
    "an IPv4 address in IPv6": (
        f"{MAPPED}02004D0A:0016 02 00000000:00000000 01:00000000 00000000", "10.77.0.2:22 takes no connection",
    ),
    "bytes that were just sent": ("02004D0A:0016 01 00000508:00000000 01:000001FF 00000000", ""),
    "a reader that does not read": ("02004D0A:0016 01 00000508:00000000 04:000001FF 00000003", ""),
    "nothing is on its way": ("02004D0A:0016 01 00000000:00000000 00:00000000 00000000", ""),
    "the other side has closed": ("02004D0A:0016 08 00000000:00000000 01:00000000 00000003", ""),
}  # fmt: skip


@pytest.mark.skipif(sys.byteorder == "big", reason="/proc writes these addresses in the order of the machine")
@pytest.mark.parametrize("case", LINES)
def test_a_line_of_the_kernel(case: str) -> None:
    line, said = LINES[case]
    found = list(_stuck([["0:", "FE004D0A:B39E", *line.split(), "0", "0", "1633363"]]))
    assert len(found) == bool(said), found
    assert "".join(found).startswith(said)


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])))"


def test_a_program_that_a_client_has_started_is_seen_too() -> None:
    """As a ProxyCommand, which makes the connection for ssh."""
    with socket.socket() as full, socket.socket() as first:  # a full queue takes no connection
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        host, port = full.getsockname()
        words = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-S", "-c", CONNECT, host, str(port)]
        client = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: stuck_connection(client.pid))
            assert stuck_connection(client.pid) == f"127.0.0.1:{port} takes no connection"
        finally:
            os.killpg(client.pid, signal.SIGKILL)
            client.wait()
    wait_for(lambda: not stuck_connection(client.pid))


ASK = """
import sys
from roxxel_dist.launcher.backends.ssh import SshBackend
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import HostQuestions
with HostPool(SshBackend(("h1", "h2"), config=sys.argv[1])) as pool:
    questions = HostQuestions(pool)
    facts = {"ask": "facts", "run_dir": None, "data_path": None, "resume": False, "compare": False}
    answers = questions.ask({"h1": facts, "h2": facts}, 8)
print(*answers, *questions.unreachable.items())
"""
FULL = "meta length > 1000 drop"
TAKEN = "10.77.0.2:22 has taken the connection, and does not acknowledge 1"
LINKS = {
    # the machine that drops what comes in, and the words about h2
    "all that comes to the host": (("h2", FULL), TAKEN),
    "ssh to the host alone": (("h2", f"tcp dport 22 {FULL}"), TAKEN),
    "ssh on its way back": (("controller", f"ip saddr 10.77.0.2 {FULL}"), "are packets of full size lost on the way"),
    "packets of full size alone, on their way back": (
        ("controller", "ip saddr 10.77.0.2 meta length > 1400 drop"), "are packets of full size lost on the way",
    ),
}  # fmt: skip


@pytest.mark.cluster
@pytest.mark.parametrize("case", LINKS)
def test_the_link_itself_loses_packets_of_full_size(
    case: str, cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    if shutil.which("nft", path=PATH) is None:
        pytest.skip("firewalls for tests need: apt-get install nftables")
    hosts = cluster(2)
    (machine, rule), said = LINKS[case]
    hosts.firewall(machine, rule)
    done = hosts.run([sys.executable, "-c", ASK, hosts.ssh_config], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.startswith("h1 ('h2', 'it did not answer within 8 s: "), done
    assert said in done.stdout, done
