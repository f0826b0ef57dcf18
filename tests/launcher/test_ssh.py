"""`launch ssh` on real hosts: what ranks get there, and that nothing is left of them, whatever breaks."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts import Cluster

from roxxel_dist.launcher.backends.ssh import Options

Alive = Callable[[int], bool]
Until = Callable[[Callable[[], Any], str], None]

SHOW = """
import json, os, socket, sys
facts = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "host": socket.gethostname()}
json.dump(facts, open("facts." + os.environ["ROXXEL_PROCESS_ID"], "w"))
print("here", os.environ["ROXXEL_PROCESS_ID"])
"""
STAY = "touch up.$ROXXEL_PROCESS_ID; sleep 1000; true"


@dataclass
class Ssh:
    """Launches on the hosts of a cluster, with a folder that all of them see as working directory."""

    hosts: Cluster
    folder: Path
    until: Until
    way: str = "ssh"
    """As of `Cluster.launch`."""

    def words(self, *words: object) -> list[object]:
        return [sys.executable, "-m", "roxxel_dist", *self.hosts.launch(self.way), *words]

    def run(self, *words: object, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.hosts.run(self.words(*words), cwd=self.folder, **more)

    def start(self, *words: object, ranks: int) -> subprocess.Popen[bytes]:
        """A launch whose ranks are all up."""
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        launch = self.hosts.popen(self.words(*words), cwd=self.folder, **pipes)
        self.until(lambda: launch.poll() is not None or len(list(self.folder.glob("up.*"))) == ranks, "the ranks")
        assert launch.poll() is None, launch.communicate()
        return launch

    def pid(self, host: str, part: str) -> int:
        """The one process of a host (the oldest of several) whose command line holds `part`."""

        def words(pid: int) -> str:
            try:
                return " ".join(psutil.Process(pid).cmdline())
            except psutil.NoSuchProcess:  # it ended meanwhile
                return ""

        return min(pid for pid in self.hosts.processes(host) if part in words(pid))

    def left(self) -> dict[str, list[int]]:
        """What runs on the hosts and the controller."""
        left = {name: self.hosts.processes(name) for name in (*self.hosts.names, "controller")}
        return {name: pids for name, pids in left.items() if pids}


@pytest.fixture
def ssh(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until, request: pytest.FixtureRequest
) -> Callable[[int], Ssh]:
    def make(count: int) -> Ssh:
        hosts = cluster(count)
        for name in hosts.names:
            (hosts.home(name) / "tmp").mkdir()
            hosts.set_env(name, TMPDIR=str(hosts.home(name) / "tmp"))
        return Ssh(hosts=hosts, folder=tmp_path, until=until, way=getattr(request, "param", "ssh"))

    return make


BOTH = pytest.mark.parametrize("ssh", ["ssh", pytest.param("exec", marks=pytest.mark.cluster)], indirect=True)
BOTH_CUT = pytest.mark.parametrize("ssh", ["ssh", "exec over ssh"], indirect=True)
"""Where a link is cut: the tests of the two backends are the same."""


@BOTH
def test_what_each_rank_sees(ssh: Callable[[int], Ssh], tmp_path: Path) -> None:
    two = ssh(2)
    words = ["a b", "", "q'uo\"te", "é ☃", "$HOME", "back\\slash", "line\nbreak", "-m", "`id`"]
    options = ["--procs-per-host", 2, "--env", "MY_TOKEN=sekrit", "--env", "PASSED"]
    folder = tmp_path / "with space; $(touch no)"
    folder.mkdir()
    two.folder = folder
    result = two.run(*options, "--", "env", sys.executable, "-c", SHOW, *words, env={"PASSED": "on"})
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"\d\d:\d\d:\d\d 0 \| here 0\n", result.stdout)
    facts = [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(4)]
    assert [fact["argv"] for fact in facts] == [words] * 4
    assert [fact["host"] for fact in facts] == ["h1", "h1", "h2", "h2"]
    assert {fact["cwd"] for fact in facts} == {str(folder)}
    for rank, fact in enumerate(facts):
        env = fact["env"]
        assert (env["ROXXEL_PROCESS_ID"], env["ROXXEL_NUM_PROCESSES"]) == (str(rank), "4")
        assert (env["MY_TOKEN"], env["PASSED"]) == ("sekrit", "on")
        assert re.fullmatch(rf"{two.hosts.address('h1')}:\d+", env["ROXXEL_COORDINATOR"])
        assert env["ROXXEL_COORDINATOR"] == facts[0]["env"]["ROXXEL_COORDINATOR"]
    (log,) = folder.glob("runs/*/logs/rank-3.log")
    assert re.search(r" h2 3 \| here 3\n", log.read_text())
    assert "sekrit" not in log.read_text()
    assert sorted(path.name for path in folder.iterdir()) == [*(f"facts.{rank}" for rank in range(4)), "runs"]
    assert not two.left()


@BOTH
@pytest.mark.long
def test_64_hosts(ssh: Callable[[int], Ssh]) -> None:
    """Twice as many as are asked at a time; and the failure of one rank is that of all."""
    many = ssh(64)
    done = many.run("--all-ranks", "--", "env", "sh", "-c", "echo here $ROXXEL_PROCESS_ID", timeout=280)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split(" | ")[1] for line in done.stdout.splitlines()) == sorted(f"here {n}" for n in range(64))
    assert not many.left()
    failing = 'test "$ROXXEL_PROCESS_ID" != 40 || exit 7; sleep 1000'
    done = many.run("--max-restarts", 0, "--", "env", "sh", "-c", failing, timeout=280)
    assert done.returncode == 7
    assert "rank 40 failed first: exit code 7 (host h41" in done.stderr
    assert not many.left()


JAX = """
import sys, jax, jax.numpy as jnp
from jax.experimental import multihost_utils
ranks = multihost_utils.process_allgather(jnp.full((), jax.process_index()))
print(ranks.tolist(), jax.device_count(), flush=True)
if jax.process_index() == 1 and sys.argv[1:]:
    raise KeyError("of rank 1")
multihost_utils.process_allgather(jnp.ones(()))
"""


@BOTH
@pytest.mark.cluster
def test_hosts_compute_together_and_the_first_exception_is_the_jobs(ssh: Callable[[int], Ssh]) -> None:
    two = ssh(2)
    (two.folder / "program.py").write_text(JAX)
    result = two.run("--devices-per-proc", 2, "--", "python", "program.py")
    assert (result.returncode, result.stderr) == (0, "")
    assert "0 | [0, 1] 4\n" in result.stdout
    result = two.run("--devices-per-proc", 2, "--", "python", "program.py", "fail")
    assert result.returncode == 1
    assert "rank 1 failed first: exit code 1 (host h2" in result.stderr
    assert result.stderr.splitlines()[-1] == "KeyError: 'of rank 1'"
    assert not two.left()


@BOTH
@pytest.mark.parametrize("victim", ["launcher", "agent", "rank"])
@pytest.mark.cluster
def test_kill_9_leaves_nothing_anywhere(victim: str, ssh: Callable[[int], Ssh], until: Until) -> None:
    two = ssh(2)
    launch = two.start("--max-restarts", 0, "--", "bash", "-c", STAY, ranks=2)
    pids = {"launcher": launch.pid, "agent": two.pid("h2", "launcher.agent.agent"), "rank": two.pid("h2", "bash -c")}
    os.kill(pids[victim], signal.SIGKILL)
    _, err = launch.communicate(timeout=60)
    until(lambda: not two.left(), "everything to be gone")
    assert launch.returncode == (-9 if victim == "launcher" else 137)
    if victim == "agent":
        assert b"the agent on host h2 ended before its ranks" in err
    if victim == "rank":
        assert b"rank 1 failed first: signal SIGKILL (host h2" in err
    assert not any(list((two.hosts.home(name) / "tmp").iterdir()) for name in two.hosts.names)


@BOTH_CUT
@pytest.mark.parametrize("how", ["the link is cut", "the launcher is killed too", "the agent is stopped"])
@pytest.mark.cluster
def test_a_host_that_is_not_heard_ends_its_ranks_by_itself(how: str, ssh: Callable[[int], Ssh], until: Until) -> None:
    two = ssh(2)
    launch = two.start("--max-restarts", 0, "--", "bash", "-c", STAY, ranks=2)
    if how == "the agent is stopped":
        os.kill(two.pid("h2", "launcher.agent.agent"), signal.SIGSTOP)
    else:
        two.hosts.drop("h2")
    if how == "the launcher is killed too":
        launch.kill()
    until(lambda: not two.left(), "everything to be gone")
    _, err = launch.communicate(timeout=60)
    if how == "the launcher is killed too":
        assert launch.returncode == -9
    else:
        assert launch.returncode == 137
        assert b"host h2 has sent nothing for 10 s" in err


@BOTH_CUT
@pytest.mark.cluster
def test_a_short_silence_is_survived(ssh: Callable[[int], Ssh], until: Until) -> None:
    two = ssh(2)
    launch = two.start("--", "bash", "-c", "touch up.$ROXXEL_PROCESS_ID; until [ -e go ]; do sleep 0.1; done", ranks=2)
    two.hosts.drop("h2")
    with pytest.raises(subprocess.TimeoutExpired):
        launch.wait(5)
    two.hosts.restore("h2")
    with pytest.raises(subprocess.TimeoutExpired):  # longer than the heartbeat timeout, were it not heard again
        launch.wait(11)
    (two.folder / "go").touch()
    assert launch.wait(60) == 0


@BOTH
@pytest.mark.cluster
def test_a_request_to_stop_reaches_all_hosts(ssh: Callable[[int], Ssh]) -> None:
    two = ssh(2)
    trap = "trap 'echo saved; exit 42' TERM; touch up.$ROXXEL_PROCESS_ID; while true; do sleep 0.1; done"
    launch = two.start("--all-ranks", "--", "bash", "-c", trap, ranks=2)
    launch.send_signal(signal.SIGINT)
    out, err = launch.communicate(timeout=60)
    assert launch.returncode == 42
    assert out.count(b"| saved\n") == 2
    assert b"stopped on request; every rank saved and exited" in err
    assert not two.left()


@BOTH_CUT
@pytest.mark.cluster
def test_a_lost_host_comes_back_or_the_job_goes_on_without(ssh: Callable[[int], Ssh], until: Until) -> None:
    three = ssh(3)
    script = "touch up.$ROXXEL_PROCESS_ID; echo attempt $ROXXEL_ATTEMPT of $ROXXEL_NUM_PROCESSES; "
    script += "[ $ROXXEL_ATTEMPT = 2 ] || sleep 1000"
    options = ["--min-hosts", 2, "--host-timeout", 3]
    launch = three.start(*options, "--", "bash", "-c", script, ranks=3)
    os.kill(three.pid("h2", "bash -c"), signal.SIGKILL)  # all are there again at once
    logs = next(three.folder.glob("runs/*/logs"))
    # Of every rank: hosts start one by one, and h3 is to go when its ranks are up.
    until(
        lambda: sum("attempt 1 of 3" in log.read_text() for log in logs.glob("rank-*.log")) == 3, "attempt 1 everywhere"
    )
    three.hosts.drop("h3")
    out, err = launch.communicate(timeout=60)
    assert launch.returncode == 0, err
    assert b"attempt 2 of 2\n" in out
    assert b"host h3 has sent nothing for 10 s" in err
    assert b"going on without h3: 2 of 3 devices" in err
    until(lambda: not three.left(), "everything to be gone")


@BOTH_CUT
@pytest.mark.cluster
def test_agents_outlive_an_attempt_and_a_spare_host_takes_the_place_of_a_lost_one(
    ssh: Callable[[int], Ssh], until: Until
) -> None:
    three = ssh(3)
    script = "echo $ROXXEL_MEMORY $(cat $ROXXEL_MEMORY/key) > tmp.$ROXXEL_PROCESS_ID; touch up.$ROXXEL_PROCESS_ID; "
    script += "mv tmp.$ROXXEL_PROCESS_ID at.$ROXXEL_ATTEMPT.$ROXXEL_PROCESS_ID; [ $ROXXEL_ATTEMPT = 2 ] || sleep 1000"
    options = ["--spare-hosts", 1, "--host-timeout", 3]
    launch = three.start(*options, "--", "bash", "-c", script, ranks=2)
    agents = {host: three.pid(host, "launcher.agent.agent") for host in ("h1", "h2")}
    os.kill(three.pid("h2", "bash -c"), signal.SIGKILL)
    until(lambda: len(list(three.folder.glob("at.1.*"))) == 2, "the second attempt")
    assert {host: three.pid(host, "launcher.agent.agent") for host in agents} == agents
    three.hosts.drop("h2")
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 0, err
    assert b"going on without h2, with h3 instead" in err
    at = [[(three.folder / f"at.{n}.{rank}").read_text().split() for rank in (0, 1)] for n in range(3)]
    folders = [[folder for folder, _ in attempt] for attempt in at]
    assert folders[0] == folders[1]
    assert folders[2][0] == folders[0][0]
    assert folders[2][1] not in folders[0]
    assert len({key for attempt in at for _, key in attempt}) == 1
    until(lambda: not three.left(), "everything to be gone")
    assert not any(os.path.exists(folder) for attempt in folders for folder in attempt)


@pytest.mark.cluster
@pytest.mark.parametrize("ssh", ["ssh", pytest.param("exec", marks=pytest.mark.cluster)], indirect=True)
def test_a_host_that_is_not_fit_any_more_is_left_out(ssh: Callable[[int], Ssh]) -> None:
    three = ssh(3)
    script = "touch up.$ROXXEL_PROCESS_ID; echo attempt $ROXXEL_ATTEMPT of $ROXXEL_NUM_PROCESSES; "
    script += "[ $ROXXEL_ATTEMPT = 1 ] || sleep 1000"
    options = ["--min-hosts", 2, "--host-timeout", 0, "--devices-per-proc", 1]
    launch = three.start(*options, "--", "bash", "-c", script, ranks=3)
    three.hosts.resolve("h3", own="127.0.1.1")
    launch.send_signal(signal.SIGTSTP)
    os.kill(three.pid("h2", "bash -c"), signal.SIGKILL)
    out, err = launch.communicate(timeout=60)
    assert launch.returncode == 0, err
    assert b"attempt 1 of 2\n" in out
    assert b"its own name 'h3' resolves to 127.0.1.1" in err
    assert b"going on without h3: 2 of 3 devices" in err
    assert b"Ctrl-Z is not followed" in err


@BOTH_CUT
@pytest.mark.cluster
def test_a_job_that_needs_every_host_waits_for_the_lost_one(ssh: Callable[[int], Ssh], until: Until) -> None:
    two = ssh(2)
    script = "touch up.$ROXXEL_PROCESS_ID; echo attempt $ROXXEL_ATTEMPT; [ $ROXXEL_ATTEMPT = 1 ] || sleep 1000"
    launch = two.start("--", "bash", "-c", script, ranks=2)
    two.hosts.cut("h2")
    assert launch.stderr is not None
    while b"host h2 cannot be used" not in (line := launch.stderr.readline()):
        assert line
    two.hosts.restore("h2")
    out, _ = launch.communicate(timeout=60)
    assert launch.returncode == 0
    assert b"| attempt 1\n" in out


def test_a_host_that_cannot_be_used_is_named_at_once(ssh: Callable[[int], Ssh]) -> None:
    one = ssh(1)
    command = [sys.executable, "-m", "roxxel_dist", "launch", "ssh", "--ssh-config", one.hosts.ssh_config]
    for options, said in (
        (["--hosts", "nowhere"], "host nowhere cannot be used: .*(resolve|Name)"),
        (["--hosts", "h1", "--directory", "/not there"], "host h1 cannot be used: .*not there"),
        (["--hosts", "h1", "--python", "/no/python"], "host h1 cannot be used: .*/no/python"),
    ):
        result = one.hosts.run([*command, *options, "--", "touch", "x"], cwd=one.folder)
        assert result.returncode == 69, result.stderr
        assert re.search(said, result.stderr), result.stderr
        assert "Traceback" not in result.stderr
    assert list(one.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "procs_per_host", "ranks"), [("a", None, 2), ("a slots=3", None, 6), ("a slots=3", 2, 4), ("a", 4, 8)]
)
def test_how_many_processes_a_host_has(line: str, procs_per_host: int | None, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{line}\n{line.replace('a', 'b', 1)}\n")
    assert Options(hostfile=str(tmp_path / "hosts"), procs_per_host=procs_per_host).backend()[1] == ranks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts", "h1,-oProxyCommand=touch"], "'-oProxyCommand=touch' cannot be a host"),
        (["--hosts", "h1,h1"], "host h1 is given twice"),
        (["--hosts", ""], "no hosts"),
        (["--hosts", "h1", "--hostfile", "x"], "give --hosts a,b,c or --hostfile FILE, not both"),
        (["--hosts", "h1", "--min-hosts", "2"], "--min-hosts 2: there are 1 hosts"),
        (["--hosts", "h1", "--procs-per-host", "0"], "--procs-per-host 0: must be at least 1"),
        (["--hosts", "h1", "--ssh-config", "none"], "--ssh-config none: no such file"),
    ],
)
def test_slips_are_named(options: list[str], said: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    result = cli("launch", "ssh", *options, "--", "touch", "x", cwd=tmp_path)
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr
    assert list(tmp_path.iterdir()) == []


@BOTH_CUT
@pytest.mark.cluster
def test_a_host_that_is_not_who_it_was_is_refused(ssh: Callable[[int], Ssh]) -> None:
    one = ssh(1)
    known = one.hosts.folder / "known_hosts"
    other = subprocess.run(
        ["ssh-keygen", "-y", "-f", one.hosts.folder / "key"], capture_output=True, text=True, check=True
    )
    known.write_text(f"h1,{one.hosts.address('h1')} {other.stdout}")
    result = one.run("--", "touch", "x")
    assert result.returncode == 69
    assert "host h1 cannot be used: " in result.stderr
    assert (
        "Host key verification failed: it HAS CHANGED; if a new machine has its name or address: ssh-keygen "
        in result.stderr
    )
    assert " -R " in result.stderr
    assert list(one.folder.iterdir()) == []


def behind(two: Ssh, bastion: str, name: str, more: str = "") -> Path:
    """An ssh_config in which all other hosts are behind a bastion, which has an sshd with its own defaults."""
    config = two.hosts.folder / name
    config.write_text(f"Host h* !{bastion}\n  ProxyJump {bastion}\n{more}{two.hosts.ssh_config.read_text()}")
    return config


@pytest.mark.cluster
@pytest.mark.parametrize(
    "more", ["", "Host h1\n  ControlMaster auto\n  ControlPath {folder}/mux\n"], ids=["plain", "mux"]
)
def test_24_hosts_behind_a_bastion_that_takes_ten_at_a_time(ssh: Callable[[int], Ssh], more: str) -> None:
    many = ssh(25)
    many.hosts.configure("h1", MaxStartups="10:30:100", MaxSessions="10")
    many.hosts.impair("controller", delay_ms=75)
    many.hosts.ssh_config = behind(many, "h1", "jump", more.format(folder=many.hosts.folder))
    command = [*many.words("--all-ranks", "--", "bash", "-c", "echo here $ROXXEL_PROCESS_ID")]
    command[command.index("--hosts") + 1] = ",".join(many.hosts.names[1:])
    done = many.hosts.run(command, cwd=many.folder, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split(" | ")[1] for line in done.stdout.splitlines()) == sorted(f"here {n}" for n in range(24))


@BOTH_CUT
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_64_hosts_through_one_bastion_with_the_limits_of_openssh(ssh: Callable[[int], Ssh]) -> None:
    """MaxStartups 10:30:100: where ten connections wait for a login, three in ten more are refused, and then all."""
    many = ssh(65)
    many.hosts.configure("h1", MaxStartups="10:30:100", MaxSessions="10")
    many.hosts.impair("controller", delay_ms=75)
    many.hosts.ssh_config = behind(many, "h1", "jump")
    command = [*many.words("--all-ranks", "--", "bash", "-c", "echo here $ROXXEL_PROCESS_ID")]
    command[command.index("--hosts") + 1] = ",".join(many.hosts.names[1:])
    done = many.hosts.run(command, cwd=many.folder, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split(" | ")[1] for line in done.stdout.splitlines()) == sorted(f"here {n}" for n in range(64))
    assert not any(many.hosts.processes(name) for name in many.hosts.names[1:])


CLOSE = "import socket, sys\nhere = socket.create_server(('', 2222))\nwhile True: here.accept()[0].close()"


@BOTH_CUT
@pytest.mark.cluster
def test_a_server_that_always_refuses_is_given_up_with_the_reason(ssh: Callable[[int], Ssh], until: Until) -> None:
    two = ssh(2)
    two.hosts.popen([sys.executable, "-c", CLOSE], on="h2")
    until(lambda: "2222" in two.hosts.run(["ss", "-ltn"], on="h2").stdout, "the server that closes")
    config = two.hosts.folder / "refused"
    config.write_text(f"Host h2\n  Port 2222\n{two.hosts.ssh_config.read_text()}")
    two.hosts.ssh_config = config
    done = two.run("--", "touch", "x")
    assert done.returncode == 69
    refused = "host h2 cannot be used: (kex_exchange_identification: |Connection (reset|closed) by )"
    assert re.search(refused, done.stderr)
    assert "refused 8 times: its server, or a bastion before it, takes fewer at once" in done.stderr
    assert not (two.folder / "x").exists()


CONFIGS = {
    # lines before those that reach the hosts: None where the job runs, else the message
    "HostName, User, Port, HostKeyAlias": (
        "Host a\n HostName 10.77.0.1\n User root\n Port 22\nHost b\n HostName 10.77.0.2\n HostKeyAlias h2\n", None,
    ),
    "RemoteCommand, RequestTTY": ("Host *\n RemoteCommand tmux new -A\n RequestTTY force\n", None),
    "LocalCommand": ("Host *\n PermitLocalCommand yes\n LocalCommand echo hello\n", None),
    "LogLevel": ("LogLevel DEBUG3\nVisualHostKey yes\n", None),
    "SendEnv, SetEnv": ("Host *\n SendEnv LANG LC_*\n SetEnv V=ssh\n", None),
    "forwards": ("Host *\n LocalForward 8888 a:1\n ExitOnForwardFailure yes\n ForwardX11 yes\n", None),
    "ControlMaster": ("Host *\n ControlMaster auto\n ControlPath {folder}/%h.mux\n ControlPersist 60\n", None),
    "ProxyJump": ("Host h2\n ProxyJump h1\n", None),
    "BatchMode no": ("BatchMode no\nNumberOfPasswordPrompts 3\n", None),
    "accept-new": ("StrictHostKeyChecking accept-new\nUserKnownHostsFile {folder}/new\n", None),
    "ask": ("StrictHostKeyChecking ask\nUserKnownHostsFile /dev/null\n", "log in once by hand, and compare its key"),
    "ask, at the bastion alone": (
        "Host h2\n ProxyJump h1\nHost h1\n StrictHostKeyChecking ask\n UserKnownHostsFile /dev/null\n",
        "Host key verification failed",
    ),
    "another user": ("Host h2\n User nobody2\n", "use a key without a passphrase, or an ssh-agent"),
    "another key": ("Host h2\n IdentityFile /dev/null\n IdentitiesOnly yes\n", None),  # files add up
    "no such name": ("Host h2\n HostName nowhere.invalid\n", "write names as ssh takes them"),
    "a host that is a tunnel": ("Host *\n SessionType none\n StdinNull yes\n ForkAfterAuthentication yes\n", None),
    "a ProxyCommand that fails": (
        "Host h2\n ProxyCommand sh -c 'echo the login is over >&2; exit 255'\n",
        "host h2 cannot be used: the login is over; ",
    ),
    "a ProxyCommand that is not there": (
        "Host h2\n ProxyCommand nosuch %h %p\n", "not found; a ProxyCommand or a bastion of ssh's configuration",
    ),
    "an unknown word": ("Host h2\n Potr 22\n", "Bad configuration option: potr"),
}  # fmt: skip


@pytest.mark.cluster
def test_the_users_own_ssh_config(ssh: Callable[[int], Ssh]) -> None:
    two = ssh(2)
    base, config = two.hosts.ssh_config.read_text(), two.hosts.folder / "own"
    two.hosts.ssh_config = config
    for case, (lines, said) in CONFIGS.items():
        config.write_text(lines.format(folder=two.hosts.folder) + base)
        command = two.words("--env", "V=mine", "--all-ranks", "--", "bash", "-c", "echo $ROXXEL_PROCESS_ID $V; cat")
        if "Host a" in lines:
            command[command.index("--hosts") + 1] = "a,b"
        done = two.hosts.run(command, cwd=two.folder)
        if said is None:
            assert (done.returncode, done.stderr) == (0, ""), case
            assert sorted(line.split(" | ")[1] for line in done.stdout.splitlines()) == ["0 mine", "1 mine"], case
        else:
            assert done.returncode == 69, case
            assert said in done.stderr, (case, done.stderr)


SERVERS = {
    # settings of one host's sshd, and the message
    "no session": ({"MaxSessions": "0"}, "or does sshd allow no session (MaxSessions)?"),
    "a program that is killed": ({"ForceCommand": "kill -9 $$"}, "Is it killed there, or"),
    "a program of the server's own": (
        {"ForceCommand": "echo This account is managed"},
        "This account is managed (code 0)",
    ),
    "a user who may not": ({"DenyUsers": "root"}, "use a key without a passphrase, or an ssh-agent"),
}


@pytest.mark.cluster
@pytest.mark.parametrize("case", SERVERS)
def test_a_server_that_lets_no_program_run(case: str, ssh: Callable[[int], Ssh]) -> None:
    two = ssh(2)
    settings, said = SERVERS[case]
    two.hosts.configure("h2", **settings)
    done = two.run("--", "touch", "x")
    assert (done.returncode, said in done.stderr) == (69, True), done.stderr


ANOTHER_SHELL = "must not start another shell where the login has no terminal"
BASHRC = {
    # ~/.bashrc of one host: None where the job runs, else the message
    "prints": ("echo Welcome", None),
    "prints no whole line": (r"printf 'Welcome \033[1m'", None),
    "prints JSON": ("echo '{\"a\": 1}'", None),
    "prints JSON with our keys": (r"""echo '{"id":1,"type":"gone","entry":0,"code":401,"message":"expired"}'""", None),
    "prints JSON for a while": (r"""(for i in {1..9}; do echo '{"type":"done"}'; sleep .1; done) &""", None),
    "prints to stderr": ("echo Welcome >&2", None),
    "prints when it ends": ("trap 'echo bye' EXIT", None),
    "stops at errors": ("set -eu", None),
    "wants a terminal": ("tput setaf 1; stty -echo", None),
    "exports again": ("export V=rc", None),
    "has another shell run the command": ('[ "$X" ] || { export X=1; exec sh -c "$BASH_EXECUTION_STRING"; }', None),
    "has functions and aliases": ('alias python=false; cd() { echo going; builtin cd "$@"; }', None),
    "limits": ("ulimit -n 256; umask 077", None),
    "ends": ("exit 0", "does the login shell, or its start-up file (~/.bashrc), end before the program?"),
    "ends with a word": ("echo not today; exit 3", "not today (code 3)"),
    "starts another shell": ("sh", ANOTHER_SHELL),
    "becomes another shell": ('[ "$X" ] || { export X=1; exec bash; }', ANOTHER_SHELL),
}


@pytest.mark.cluster
def test_what_a_bashrc_may_do(ssh: Callable[[int], Ssh]) -> None:
    two = ssh(2)
    for case, (lines, said) in BASHRC.items():
        (two.hosts.home("h2") / ".bashrc").write_text(lines + "\n")
        done = two.run("--env", "V=mine", "--all-ranks", "--", "bash", "-c", "echo $ROXXEL_PROCESS_ID $V")
        if said is None:
            assert (done.returncode, done.stderr) == (0, ""), case
            assert sorted(line.split(" | ")[1] for line in done.stdout.splitlines()) == ["0 mine", "1 mine"], case
        else:
            assert done.returncode == 69, case
            assert said in done.stderr, (case, done.stderr)
