"""Preflight with real probes: children of this process in other folders and variables, and hosts behind sshd."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import wait_for
from hosts import Cluster
from machines import PATH

import roxxel_dist
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.spec import JobSpec, Limits, log_dir_for
from roxxel_dist.launcher.preflight.run import PreflightReport, check_job_hosts
from roxxel_dist.launcher.transport import questions as questions_module
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import HostQuestions, Interrupted

NAMES = ("a", "b", "c")
SILENT = "import sys; sys.stdin.read()"
FACTS = {"ask": "facts", "run_dir": None, "run_id": None, "data_path": None, "resume": False}


class Children(LocalBackend):
    """Hosts that are processes here, each in a folder and with variables of its own, or another program altogether."""

    def __init__(self, hosts: Mapping[str, Mapping[str, Any]]) -> None:
        self._by_name = hosts

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        own = self._by_name[host]
        outer = {name: value for name, value in os.environ.items() if not name.startswith("ROXXEL_")}
        return subprocess.Popen(
            own.get("argv") or self.argv(host, module, *words),
            cwd=own.get("cwd"),
            env={**outer, **own.get("env", {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


@pytest.fixture(autouse=True)
def _no_probe_is_left() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


def job(*command: str, **more: Any) -> JobSpec:
    command = command or ("true",)
    return JobSpec(command=command, nprocs=3, run_id="r", log_dir=log_dir_for(command, "r"), **more)


def check(
    hosts: Mapping[str, Mapping[str, Any]], *command: str, port: int | None = None, **more: Any
) -> PreflightReport:
    return check_job_hosts(job(*command, **more), Children(hosts), tuple(hosts), port=port)


def errors(ready: PreflightReport) -> dict[str, tuple[str, ...]]:
    return {one.check: one.hosts for one in ready.findings if one.level == "error"}


def test_this_machine_alone_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Here(LocalBackend):
        def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
            raise AssertionError("a process for what this one can see itself")

    backend = Here()
    ready = check_job_hosts(job(), backend, backend.hosts, port=None)
    assert ready.passed
    assert ready.address == "127.0.0.1"
    with socket.socket() as free:
        free.bind((ready.address, ready.port))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = check_job_hosts(job(), backend, backend.hosts, port=port)
    assert errors(taken) == {"port": tuple(backend.hosts)}
    assert f"--port {port}" in next(one.text for one in taken.findings if one.level == "error")
    assert check_job_hosts(job(), backend, backend.hosts, port=port).port == port
    assert list(tmp_path.iterdir()) == []


def test_hosts_that_worked_together_are_asked_for_facts_and_a_port_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = HostQuestions.ask

    def count(questions: HostQuestions, what: Mapping[str, Message], limit_s: float | None = None) -> Any:
        asked.extend({str(question["ask"]) for question in what.values()})
        return ask(questions, what, limit_s)

    monkeypatch.setattr(HostQuestions, "ask", count)
    backend = Children({name: {"cwd": tmp_path} for name in NAMES})

    def kinds(known: PreflightReport | None) -> tuple[PreflightReport, list[str]]:
        asked.clear()
        report = check_job_hosts(job(), backend, backend.hosts, port=None, pool=pool, known=known)
        assert report.passed, report
        return report, [*asked]

    with HostPool(backend) as pool:
        first, every = kinds(None)
        assert every == ["facts", "listen", "connect"]
        again, few = kinds(first)
        assert few == ["facts", "listen"]
        assert again.address == first.address
        elsewhere = replace(first, machines={**first.machines, "b": "another one"})
        assert kinds(elsewhere)[1] == every, "a host that has started anew since"
    assert first.covers(("a", "c"))
    assert not first.covers(("b", "c")), "rank 0 would be elsewhere"
    assert not first.covers(("a", "d"))


def test_three_that_are_alike(tmp_path: Path) -> None:
    ready = check({name: {"cwd": tmp_path} for name in NAMES})
    assert ready.passed, ready
    with socket.socket() as free:  # no process holds it any more, nor does a closed connection
        free.bind((ready.address, ready.port))
    checks = {one.check: one.level for one in ready.findings if one.check not in ("disk",)}
    equal = dict.fromkeys(("devices", "versions", "port"), "ok")
    assert checks == {**equal, "host": "warning"}  # they are one machine
    assert list(tmp_path.iterdir()) == []


def test_hosts_that_differ(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.txt").write_text("text")
    hosts: dict[str, dict[str, Any]] = {name: {"cwd": tmp_path / name} for name in NAMES}
    (tmp_path / "b" / "runs").write_text("a file")
    ready = check(hosts, "train", "--data_path", "data.txt", "--run_dir", "runs/x")
    assert errors(ready) == {"disk": ("b",), "run directory": ("b", "c")}
    assert not ready.passed
    assert ready.port


UNREACHABLE = [
    (["sh", "-c", "echo connect to host b port 22: No route to host >&2; exit 255"], ["No route to host (code 255)"]),
    (["sh", "-c", "cat >/dev/null & echo gone >&2"], ["gone (code 0)"]),
    ([sys.executable, "-m", "roxxel_dist.nothing"], ["No module named roxxel_dist.nothing", "--python"]),
    (["sh", "-c", "echo Welcome; cat"], ["it sends back what it is sent (its last line: Welcome)"]),
    (["sh", "-c", "echo This account is not available; exit 1"], ["This account is not available (code 1)"]),
    (["true"], ["nothing was said: does the login shell", "~/.bashrc", "(code 0)"]),
    (["sh"], ["a shell there runs what is meant for the agent (", "ask:", "~/.bashrc"]),
    (["bash"], ["a shell there runs what is meant for the agent (", "ask:", "~/.bashrc"]),
    (["/nowhere/python"], ["no agent could be started", "/nowhere/python"]),
]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(*row, id=row[1][0], marks=pytest.mark.long if row[0][0] in ("true", "sh") and number else ())
        for number, row in enumerate(UNREACHABLE)
    ],
)
def test_a_host_that_is_not_there(argv: list[str], words: list[str]) -> None:
    ready = check({"a": {}, "b": {"argv": argv}, "c": {}})
    assert set(ready.unreachable) == {"b"}
    assert not [word for word in words if word not in ready.unreachable["b"]], ready.unreachable
    assert not ready.passed
    assert errors(ready) == {}
    assert all("b" not in one.hosts for one in ready.findings)
    assert ready.port  # of the others, who may go on without it


def test_no_host_is_there() -> None:
    ready = check({name: {"argv": ["false"]} for name in NAMES})
    assert (ready.address, ready.port, ready.findings) == ("", 0, ())
    assert set(ready.unreachable) == set(NAMES)


def test_a_silent_host_has_a_limit() -> None:
    hosts = {"a": {}, "b": {"argv": [sys.executable, "-c", SILENT]}}
    with HostPool(Children(hosts)) as pool:
        questions = HostQuestions(pool)
        assert "machine" in questions.ask({"a": {**FACTS, "compare": False}})["a"]
        answers = questions.ask({host: {"ask": "nothing"} for host in hosts}, limit_s=0.5)
        assert set(answers) == {"a"}
        assert "did not answer within 0.5 s" in questions.unreachable["b"]
        assert set(questions.ask({host: {"ask": "nothing"} for host in hosts})) == {"a"}  # it is not waited for again


def test_clients_that_linger_are_waited_for_beside_the_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, a hundred of them would hold up a start for minutes: here c is asked meanwhile."""
    monkeypatch.setattr(questions_module, "AT_ONCE", 2)
    monkeypatch.setattr(questions_module, "PROBE_END_S", 20.0)
    here = tmp_path / "c is asked"
    lingers = ["sh", "-c", f"exec >&-; until [ -e '{here}' ]; do sleep 0.02; done; exit 7"]
    asked = ["sh", "-c", f"touch '{here}'; exec {sys.executable} -m roxxel_dist.launcher.agent.agent"]
    hosts = {"a": {"argv": lingers}, "b": {}, "c": {"argv": asked}}
    with HostPool(Children(hosts)) as pool:
        questions = HostQuestions(pool)
        answers = questions.ask({host: {"ask": "nothing"} for host in hosts})
    assert set(answers) == {"b", "c"}
    assert "(code 7)" in questions.unreachable["a"]


def test_what_fails_in_a_heartbeat_ends_no_heartbeat(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without them each agent would end its ranks."""
    limits = Limits(heartbeat_s=0.01)
    with HostPool(Children({"a": {}, "b": {}}), limits=limits) as pool:
        first, second = (pool.connect(host) for host in "ab")
        first.started = second.started = True
        monkeypatch.setattr(first, "_outbox", None)  # a TypeError at each heartbeat of it
        sent: list[Message] = []
        send = second.send
        monkeypatch.setattr(second, "send", lambda *messages: (sent.extend(messages), send(*messages)))
        pool._begin_heartbeat()
        wait_for(lambda: len(sent) > 3)
        monkeypatch.undo()
    assert {message["type"] for message in sent} == {"alive"}
    said = capfd.readouterr().err
    assert said.count("no heartbeat was sent to host a (TypeError(") == 1, said


def test_a_signal_breaks_it_off() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"\x02")
    hosts = {"a": {}, "b": {"argv": [sys.executable, "-c", SILENT]}}
    try:
        with HostPool(Children(hosts), reads) as pool, pytest.raises(Interrupted):
            check_job_hosts(job(), Children(hosts), tuple(hosts), port=None, pool=pool)
        assert os.read(reads, 9) == b"\x02"
    finally:
        os.close(reads)
        os.close(writes)


def test_a_port_in_use_on_the_first_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ready = check({"a": {}, "b": {}}, port=port)
    assert errors(ready) == {"port": ("a",)}
    assert ready.port == 0
    assert f"a: --port {port}" in next(one.text for one in ready.findings if one.level == "error")


# -- real hosts, behind sshd, with `doctor` on a machine beside them


def doctor(hosts: Cluster, folder: Path, *words: object) -> dict[str, Any]:
    """What `doctor --json` says, run on the controller with the hosts' working directory being `folder`."""
    program = [sys.executable, "-m", "roxxel_dist", "doctor", "--json", "--hosts", ",".join(hosts.names)]
    more = ["--ssh-config", hosts.ssh_config, *words]
    done = hosts.run([*program, *more], cwd=folder, env={"PYTHONPATH": str(Path(roxxel_dist.__file__).parent.parent)})
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["fit"] else 69)
    return told


def wrong(told: dict[str, Any], level: str = "error") -> dict[str, dict[str, Any]]:
    return {one["check"]: one for one in told["findings"] if one["level"] == level}


@pytest.mark.cluster
def test_hosts_that_are_fit(cluster: Callable[[int], Cluster], corpus: Roxxel, tmp_path: Path) -> None:
    hosts = cluster(3)
    told = doctor(hosts, tmp_path, "--run_dir", "runs/x", "--", "train", "--data_path", "corpus")
    assert told["fit"], told
    assert told["address"] == hosts.address("h1")
    assert wrong(told, "warning") == {}
    assert corpus.fingerprint in wrong(told, "ok")["data"]["text"]
    assert not list(tmp_path.glob(".*"))
    assert not [pid for name in hosts.names for pid in hosts.processes(name)]


@pytest.mark.cluster
def test_hosts_that_are_not(cluster: Callable[[int], Cluster], corpus: Roxxel, tmp_path: Path) -> None:
    hosts = cluster(3)
    (tmp_path / "runs").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.rox").write_bytes(b"no shard")
    hosts.resolve("h2", own="127.0.1.1")
    hosts.tmpfs("h3", tmp_path / "runs", "128k")
    hosts.bind("h2", tmp_path / "other" / "a.rox", tmp_path / "corpus_00001.rox")
    hosts.run(["ip", "route", "add", "blackhole", hosts.address("h1")], on="h2")
    told = doctor(hosts, tmp_path, "--", "train", "--data_path", "corpus", "--run_dir", "runs/x")
    found = wrong(told)
    assert {check: tuple(one["hosts"]) for check, one in found.items()} == {
        "name": ("h2",),
        "disk": ("h3",),
        "data": ("h2",),
        "run directory": ("h3",),
        "port": ("h2", "h1"),
    }
    assert "127.0.1.1" in found["name"]["text"]
    assert f"{hosts.address('h2')} h2" in found["name"]["text"]
    assert "0.1 MiB" in found["disk"]["text"]


@pytest.mark.cluster
def test_a_host_behind_a_cut_link(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    hosts = cluster(3)
    hosts.cut("h1")
    told = doctor(hosts, tmp_path)
    assert set(told["unreachable"]) == {"h1"}
    assert "port 22" in told["unreachable"]["h1"]
    assert told["address"] == hosts.address("h2")  # the others may go on
    assert wrong(told) == {}
    assert not told["fit"]


NAMES_OF_HOSTS = {
    # what each host's own name means to it: the check that fails, the hosts to blame, the words
    "a loopback address": ({"h2": "127.0.1.1"}, "name", ("h2",), "`10.77.0.2 h2` instead"),
    "nobody's address": ({"h2": "10.9.9.9"}, "name", ("h2",), "10.9.9.9, which no interface of h2 has"),
    "another host's address": ({"h2": "10.77.0.1"}, "name", ("h2",), "10.77.0.1, which no interface of h2 has"),
    "an address behind NAT": ({"h1": "10.0.2.15"}, "network", ("h1",), "h2, h3 do not reach h1 at 10.0.2.15:"),
    "docker0 on each": (dict.fromkeys(("h1", "h2", "h3"), "172.17.0.1"), "name", ("h3",), "so that nobody finds"),
    "docker0 on one": ({"h3": "172.17.0.1"}, "network", ("h3",), "/etc/hosts on h3 say `10.77.0.3 h3`"),
}


@pytest.mark.cluster
def test_own_names_are_tried(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    hosts = cluster(3)
    for name in hosts.names:
        hosts.add_address(name, "inner", "172.17.0.1/16")
    hosts.add_address("h1", "nat0", "10.0.2.15/24")
    for case, (own, check, blamed, said) in NAMES_OF_HOSTS.items():
        for name in hosts.names:
            hosts.resolve(name, own.get(name))
        told = doctor(hosts, tmp_path)
        found = wrong(told)
        assert set(found) == {check}, (case, told)
        assert tuple(found[check]["hosts"]) == blamed, case
        assert said in found[check]["text"], case
        good = [one for one in told["findings"] if one["level"] == "ok" and one["check"] in ("name", "network")]
        assert not [one for one in good if set(one["hosts"]) & set(own) and check == one["check"]], case


SSH = "tcp dport 22 accept\ntcp sport 22 accept\n"
"""Before a rule for all else. (Of `tcp dport != 22 tcp sport != 22` nft 1.0.6 makes one number: no packet has it.)"""
FULL = "meta length > 1000 drop"
LOST = r"^packets of full size \(1500 bytes\) are lost between"
WHY = "(small packets pass, and 64 KiB do not within 5 s): give their interfaces one MTU"


@pytest.mark.cluster
def test_two_names_of_one_host_are_refused(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    """As of a bastion's ProxyCommand that leads to one host, whatever its name; ssh is to check no key."""
    hosts = cluster(2)
    proxy = (
        f"ProxyCommand ssh -F {hosts.ssh_config} -W h1:22 h1\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
    )
    config = tmp_path / "config"
    config.write_text(f"Host h2\n{proxy}{hosts.ssh_config.read_text()}")
    hosts.ssh_config = config
    found = wrong(doctor(hosts, tmp_path))
    assert found["machine"]["hosts"] == ["h1", "h2"], found
    assert "machine" not in wrong(doctor(hosts, tmp_path, "--same-machine"))


OPEN = "ct state established,related accept\niif lo accept\ntcp dport 22 accept\n"
WALLS = {
    # the rules of a host: what fails, who is to blame, host pair and place, the reason
    "nothing new comes in, dropped": (
        ("h2", OPEN + "drop", ""), "network", ("h2",), r"h1, h3 do not reach h2 at 10\.77\.0\.2:\d+", "no answer",
    ),
    "nothing new comes in, rejected": (
        ("h3", OPEN + "reject", ""), "network", ("h3",), r"h1, h2 do not reach h3 at 10\.77\.0\.3:\d+", "refused",
    ),
    "nothing comes in from one host": (
        ("h3", "ip saddr 10.77.0.2 tcp flags & (syn | ack) == syn drop", ""),
        "network", ("h2", "h3"), r"h2 does not reach h3 at 10\.77\.0\.3:\d+", "no answer within 5 s",
    ),
    "nothing goes out": (
        ("h3", "", "ip daddr 10.77.0.0/28 tcp flags & (syn | ack) == syn reject with tcp reset"),
        "network", ("h3",), r"h3 does not reach h1 at .*, h2 at ", "refused",
    ),
    "of the first host the coordinator's port alone is open": (
        ("h1", OPEN + "tcp dport 7777-7790 accept\ndrop", ""),
        "network", ("h1",), r"h2, h3 do not reach h1 at 10\.77\.0\.1:\d+", "all TCP ports from 32768 to 60999",
    ),
    "of the first host the coordinator's port alone is closed": (
        ("h1", "tcp dport 7777-7790 drop", ""),
        "port", ("h1",), r"h2, h3 do not reach h1 at 10\.77\.0\.1:7777 ", "pass TCP port 7777",
    ),
    "packets of full size are lost on their way in": (
        ("h2", SSH + FULL, ""), "network", ("h2",), f"{LOST} h2 and h1, h3 ", WHY,
    ),
    "packets of full size are lost on their way out": (
        ("h3", "", SSH + FULL), "network", ("h3",), f"{LOST} h3 and h1, h2 ", WHY,
    ),
    "packets of full size are lost from one host to one other": (
        ("h3", f"ip saddr 10.77.0.2 {FULL}", ""), "network", ("h2", "h3"), f"{LOST} h[23] and h[23] ", WHY,
    ),
    "packets of full size are lost on their way to the first host": (
        ("h1", SSH + FULL, ""), "port", ("h1",), f"{LOST} h1 and h2, h3 ", WHY,
    ),
}  # fmt: skip


@pytest.mark.cluster
@pytest.mark.parametrize("case", WALLS)
def test_a_firewall_is_named_with_its_hosts_and_its_port(
    case: str, cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    if shutil.which("nft", path=PATH) is None:
        pytest.skip("firewalls for tests need: apt-get install nftables")
    hosts = cluster(3)
    (host, incoming, outgoing), check, blamed, pair, why = WALLS[case]
    assert doctor(hosts, tmp_path, "--port", "7777")["fit"]
    hosts.firewall(host, incoming, outgoing)
    told = doctor(hosts, tmp_path, "--port", "7777")
    found = [one for one in told["findings"] if one["level"] == "error" and one["check"] == check]
    assert len(found) == 1, told
    assert set(found[0]["hosts"]) == set(blamed)
    assert re.search(pair, found[0]["text"])
    assert why in found[0]["text"]
    assert not [one for one in told["findings"] if one["check"] == check and one["level"] == "ok"]


@pytest.mark.cluster
def test_packets_of_full_size_are_lost_over_ipv6(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    if shutil.which("nft", path=PATH) is None:
        pytest.skip("firewalls for tests need: apt-get install nftables")
    hosts = cluster(2)
    for number, name in enumerate(hosts.names, 1):
        hosts.change(name, "ip", "-6", "address", "add", f"fd00::{number}/64", "dev", "eth0", "nodad")
        hosts.resolve(name, f"fd00::{number}")
    assert doctor(hosts, tmp_path)["fit"]
    hosts.firewall("h2", f"meta nfproto ipv6 {FULL}")
    told = doctor(hosts, tmp_path)
    found = wrong(told)
    assert set(found) == {"network"}, told
    assert re.search(LOST + " h[12] and h[12] ", found["network"]["text"])
    assert re.search(r"`ping -M do -s 1452 fd00::[12]` on h[12]", found["network"]["text"])


def test_many_hosts_need_open_files_which_are_allowed_or_said() -> None:
    program = (
        "import resource, sys; from roxxel_dist.launcher.preflight.run import allow_hosts; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 1024)); "
        "print(allow_hosts(2), allow_hosts(40), resource.getrlimit(resource.RLIMIT_NOFILE), "
        "allow_hosts(400), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    few, some, limit, many = done.stdout.strip().split("|")
    assert (few, some, limit) == ("", "", "(1024, 1024)")
    assert many == (
        "400 hosts need up to 6464 open files here, and this machine allows 1024 (`ulimit -Hn`): raise the limit "
        "(`sudo prlimit --pid $$ --nofile=6464`), or use fewer hosts"
    )


def test_many_ranks_on_this_machine_may_open_their_files(tmp_path: Path) -> None:
    """A soft limit is raised: rank 61 of 120 once could not be started, and with a hard one the job is refused."""
    program = (
        "import resource, sys; from roxxel_dist.cli import main; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, int(sys.argv[1]))); sys.exit(main(sys.argv[2:]))"
    )
    words = ["launch", "local", "--nprocs", "8", "--max-restarts", "0", "--", "true"]
    for hard, code in ((4096, 0), (64, 69)):
        command = [sys.executable, "-c", program, str(hard), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
        assert done.returncode == code, done.stderr
    assert "8 ranks need up to 144 open files here, and this machine allows 64 (`ulimit -Hn`)" in done.stderr
    assert "(`sudo prlimit --pid $$ --nofile=144`), or use fewer ranks" in done.stderr


def test_a_job_that_needs_more_open_files_than_there_may_be_is_refused(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from roxxel_dist.cli import main; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512)); sys.exit(main(sys.argv[1:]))"
    )
    hosts = ",".join(f"h{number}.invalid" for number in range(300))
    words = ["launch", "ssh", "--hosts", hosts, "--", "true"]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (69, "")
    refused = "300 hosts need up to 4864 open files here, and this machine allows 512 (`ulimit -Hn`)"
    assert done.stderr.count("roxxel-dist: ") == 2, "why, and that it was not started"
    assert done.stderr.startswith(f"roxxel-dist: {refused}: raise the limit (`sudo prlimit --pid $$ ")


def test_more_hosts_than_are_asked_at_once() -> None:
    """All are asked, some fail, and none starts before another has made room."""
    names = tuple(f"h{number}" for number in range(8))
    hosts = {name: {"argv": ["false"]} if name in ("h3", "h7") else {} for name in names}
    with pytest.MonkeyPatch.context() as patch, HostPool(Children(hosts)) as pool:
        patch.setattr("roxxel_dist.launcher.transport.questions.AT_ONCE", 3)
        questions = HostQuestions(pool)
        answers = questions.ask({name: {"ask": "addresses", "towards": []} for name in names})
        assert list(answers) == [name for name in names if name not in questions.unreachable]
        assert set(questions.unreachable) == {"h3", "h7"}
        connected = [(link.host, link.ready) for link in pool.all]
    assert connected == [(name, name not in questions.unreachable) for name in names]
