"""The hosts that other tests use are real: names, addresses, keys, cables and mounts of their own."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Cluster

pytestmark = pytest.mark.cluster
Make = Callable[[int], Cluster]
Until = Callable[[Callable[[], bool], str], None]

WHO = "import os, socket; own = socket.gethostname(); print(own, socket.gethostbyname(own), os.environ['HOME'])"
# Sends so many datagrams and waits until no more answers come; prints how many came and the shortest time of one.
ASK = """
import socket, sys, time
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent, times = {}, []
for number in range(int(sys.argv[2])):
    sent[number] = time.monotonic()
    asked.sendto(b"%d" % number, (sys.argv[1], 4000))
asked.settimeout(2)
try:
    while len(times) < len(sent):
        number = int(asked.recv(100))
        times.append(time.monotonic() - sent[number])
except TimeoutError:
    pass
print(len(times), min(times))
"""
ANSWER = """
import socket
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind(("", 4000))
print("ready", flush=True)
while True:
    here.sendto(*here.recvfrom(100))
"""


def ssh(hosts: Cluster, name: str, command: str, on: str = "controller") -> subprocess.CompletedProcess[str]:
    return hosts.run(["ssh", "-F", hosts.ssh_config, "-o", "ConnectTimeout=1", name, command], on=on)


def link(hosts: Cluster, name: str) -> str:
    return hosts.run(["ip", "-o", "link", "show", "dev", "eth0"], on=name).stdout


def test_each_host_has_a_name_an_address_and_a_home_of_its_own_and_ssh_leads_from_one_to_another(cluster: Make) -> None:
    hosts = cluster(2)
    for name, from_where in (("h1", "controller"), ("h2", "controller"), ("h2", "h1")):
        done = ssh(hosts, name, f"{sys.executable} -c {WHO!r}; echo $SSH_CONNECTION", on=from_where)
        assert done.stderr == ""
        who, connection = done.stdout.splitlines()
        assert who.split() == [name, hosts.address(name), str(hosts.home(name))]
        assert connection.split()[::2] == [hosts.address(from_where), hosts.address(name)]
    assert len({hosts.address(name) for name in ("h1", "h2", "controller")}) == 3
    assert socket.gethostname() not in hosts.names
    assert hosts.run(["hostname"]).stdout == "controller\n"


def test_an_unknown_host_key_and_an_unknown_user_are_refused(cluster: Make) -> None:
    hosts, others = cluster(1), cluster(1)
    assert hosts.address("h1") == others.address("h1")
    # The same name and address in another cluster is another machine with other keys.
    strange = hosts.run(["ssh", "-F", others.ssh_config, "h1", "true"])
    assert strange.returncode == 255
    assert "Host key verification failed" in strange.stderr
    unchecked = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    unknown = hosts.run(["ssh", "-F", others.ssh_config, *unchecked, "h1", "true"])
    assert unknown.returncode == 255
    assert "Permission denied" in unknown.stderr


@pytest.mark.parametrize("how", ["cut", "drop"])
def test_a_lost_link_is_silent_on_both_sides_and_comes_back(cluster: Make, until: Until, how: str) -> None:
    hosts = cluster(2)
    with hosts.popen(
        ["ssh", "-F", hosts.ssh_config, "h1", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as talk:
        assert talk.stdin is not None
        assert talk.stdout is not None

        def say(line: bytes) -> None:
            assert talk.stdin is not None
            talk.stdin.write(line)
            talk.stdin.flush()

        say(b"before\n")
        assert talk.stdout.readline() == b"before\n"
        getattr(hosts, how)("h1")
        assert ("NO-CARRIER" in link(hosts, "h1")) == (how == "cut")
        say(b"while\n")
        for name, from_where in (("h1", "controller"), ("h1", "h2"), ("h2", "h1")):
            done = ssh(hosts, name, "true", on=from_where)
            assert done.returncode == 255
            assert "onnect" in done.stderr
        assert ssh(hosts, "h2", "hostname").stdout == "h2\n"
        assert talk.poll() is None
        hosts.restore("h1")
        assert talk.stdout.readline() == b"while\n"
        until(lambda: ssh(hosts, "h2", "hostname", on="h1").stdout == "h2\n", "a way from h1 to h2")
        talk.stdin.close()
        assert talk.wait(20) == 0


def test_a_cable_can_delay_and_lose(cluster: Make) -> None:
    hosts = cluster(2)
    server = hosts.popen([sys.executable, "-c", ANSWER], on="h1", stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def ask(count: int) -> tuple[int, float]:
        answered, best = hosts.run([sys.executable, "-c", ASK, hosts.address("h1"), count], on="h2").stdout.split()
        return int(answered), float(best)

    hosts.impair("h1", delay_ms=10)
    answered, best = ask(20)
    assert answered == 20
    assert best >= 0.02  # 10 ms there and 10 ms back
    size = 1_000_000
    assert len(ssh(hosts, "h1", f"head -c {size} /dev/zero", on="h2").stdout) == size
    hosts.impair("h1", loss=0.3)
    answered, best = ask(200)
    assert 49 < answered < 147  # 0.7 x 0.7 of 200 are 98; the bounds are seven standard deviations away
    hosts.restore("h1")
    assert ask(20)[0] == 20


def test_a_mount_is_seen_on_one_host_only(cluster: Make, tmp_path: Path) -> None:
    hosts = cluster(2)
    shared, private = tmp_path / "shared", tmp_path / "private"
    for folder in (shared, private):
        folder.mkdir()
        (folder / "name").write_text(folder.name)

    def seen(name: str) -> str:
        return ssh(hosts, name, f"cat {shared}/name").stdout

    assert (seen("h1"), seen("h2")) == ("shared", "shared")
    hosts.bind("h2", private, shared)
    assert (seen("h1"), seen("h2")) == ("shared", "private")
    hosts.unmount("h2", shared)
    assert seen("h2") == "shared"
    hosts.tmpfs("h1", shared, "1m")
    full = ssh(hosts, "h1", f"head -c 2000000 /dev/zero > {shared}/zeros")
    assert "No space left" in full.stderr
    assert os.listdir(shared) == ["name"]
    assert (seen("h1"), seen("h2")) == ("", "shared")


def test_a_host_can_resolve_its_own_name_to_loopback(cluster: Make) -> None:
    hosts = cluster(2)

    def resolves(name: str, on: str) -> str:
        return hosts.run(["getent", "ahostsv4", name], on=on).stdout.split()[0]

    hosts.resolve("h1", own="127.0.1.1")
    assert [resolves("h1", "h1"), resolves("h1", "h2"), resolves("h2", "h1")] == ["127.0.1.1", "10.77.0.1", "10.77.0.2"]
    hosts.resolve("h1")
    assert resolves("h1", "h1") == "10.77.0.1"


def test_a_host_can_have_variables_of_its_own(cluster: Make) -> None:
    hosts = cluster(2)
    hosts.set_env("h1", FIRST="1", PLACE="here and there")
    hosts.set_env("h1", FIRST="2")
    assert (
        ssh(hosts, "h1", "echo $FIRST-$PLACE-$PYTHONPATH").stdout == f"2-here and there-{Path(__file__).parents[2]}\n"
    )
    assert ssh(hosts, "h2", "echo $FIRST-$PLACE").stdout == "-\n"


def test_nothing_is_left_afterwards_even_of_what_will_not_end(cluster: Make, until: Until) -> None:
    def machine() -> tuple[str, str, list[str]]:
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        return links, Path("/proc/self/mounts").read_text(), sorted(os.listdir("/run"))

    cluster(1)  # where there can be no hosts this skips; that one has nothing to do with the others
    before = machine()
    made: list[Cluster] = []

    def fail() -> None:
        with Cluster(2) as hosts:
            made.append(hosts)
            stubborn = "trap '' TERM HUP INT; sleep 1000 & wait"
            ssh(hosts, "h1", f"setsid sh -c {stubborn!r} >/dev/null 2>&1 </dev/null &")
            hosts.popen(["ssh", "-F", hosts.ssh_config, "h2", "sleep 1000"])
            hosts.impair("h2", delay_ms=1)
            until(lambda: len(hosts.processes("h1")) == 2 and len(hosts.processes("h2")) == 1, "what was started")
            pids.extend([*hosts.processes("h1"), *hosts.processes("h2"), *hosts.processes("controller")])
            raise LookupError("a test that fails")

    pids: list[int] = []
    with pytest.raises(LookupError):
        fail()
    assert len(pids) == 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}/ns/net").exists()]
    assert not made[0].folder.exists()
    assert machine() == before
