"""Hosts join and leave a job that runs."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from elastic import elastic
from hosts import Cluster

RUN_ID = f"members_{os.getpid()}"
Until = Callable[[Callable[[], Any], str], None]

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
attempt, ranks = os.environ["ROXXEL_ATTEMPT"], os.environ["ROXXEL_NUM_PROCESSES"]
name = f"up.{attempt}.{ranks}.{os.environ['ROXXEL_PROCESS_ID']}"
with open("." + name, "w") as file:
    file.write(os.uname().nodename)
os.rename("." + name, name)
while not os.path.exists("end"):
    time.sleep(0.05)
"""


CONTROLLER = """
import sys
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.job.spec import JobSpec
class Backend(LocalBackend):  # agents on this machine stand for hosts
    is_local, takes_hosts, hosts, given, listed = False, True, ("a", "b"), (), ("a", "b")
    def check_joining(self, hosts):
        pass
job = JobSpec(
    command=("python", sys.argv[1]), nprocs=2, run_id=sys.argv[2], log_dir=Path("run/logs"), hosts_from="hosts.txt",
    min_hosts=2, max_hosts=3, warm_spares="off",
)
sys.exit(run(job, Backend()))
"""


def test_a_list_and_requests_change_the_hosts_of_a_job(
    tmp_path: Path, until: Until, cli: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "hosts.txt").write_text("a\nb\n")
    words = [sys.executable, "-c", CONTROLLER, "program.py", RUN_ID]
    with (tmp_path / "screen.txt").open("wb") as screen:
        launch = subprocess.Popen(words, cwd=tmp_path, stdout=screen, stderr=screen, stdin=subprocess.DEVNULL)

    def up(attempt: int, ranks: int) -> None:
        until(lambda: len(list(tmp_path.glob(f"up.{attempt}.{ranks}.*"))) == ranks, f"{ranks} ranks in {attempt}")

    try:
        up(0, 2)
        refused = cli("leave", "run", "--hosts", "a", cwd=tmp_path)
        assert refused.returncode == 1
        assert "a cannot leave: of the 2 hosts that are there, at least 2 stay (--min-hosts)" in refused.stderr
        (tmp_path / "hosts.txt").write_text("d\nc\nb\na\n")
        up(1, 3)
        left = cli("leave", "run", "--hosts", "b", cwd=tmp_path)
        assert (left.returncode, "continues without b" in left.stderr) == (0, True), left.stderr
        up(2, 3)  # the spare takes its place
        (tmp_path / "end").touch()
        assert launch.wait(60) == 0
    finally:
        launch.kill()
        launch.wait()
    screen = (tmp_path / "screen.txt").read_text()
    assert "is a spare: it passed the checks, and --max-hosts is 3" in screen
    assert "b shall leave the job: the ranks get 30 s to save and exit; the job continues without b" in screen
    assert list((tmp_path / "run" / "logs").glob("members/*")) == []
    late = cli("join", "run", "--hosts", "e", cwd=tmp_path)
    assert (late.returncode, "is ended: launch it again with other --hosts" in late.stderr) == (2, True)


@dataclass
class Job:
    """A job of `launch ssh` on a cluster, whose ranks write where they are."""

    hosts: Cluster
    folder: Path
    until: Until
    launch: subprocess.Popen[bytes] = field(init=False)

    def start(self, *options: object, by: str = "ssh") -> None:
        reach = ["--ssh-config", self.hosts.ssh_config]
        if by == "exec":
            reach = ["--via", f"ssh -F {self.hosts.ssh_config} {{host}} {{command}}"]
        (self.folder / "program.py").write_text(PROGRAM)
        words = [sys.executable, "-m", "roxxel_dist", "launch", by, *reach, *options]
        words += ["--run-id", "one", "--warm-spares", "off", "--", "python", self.folder / "program.py"]
        with (self.folder / "screen.txt").open("ab") as screen:
            self.launch = self.hosts.popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=screen, stderr=subprocess.STDOUT
            )

    @property
    def screen(self) -> str:
        return (self.folder / "screen.txt").read_text()

    def up(self, attempt: int, *hosts: str) -> None:
        """Wait until an attempt runs on these hosts."""

        def is_up() -> bool:
            assert self.launch.poll() is None, self.screen
            files = sorted(self.folder.glob(f"up.{attempt}.{len(hosts)}.*"))
            return [file.read_text() for file in files] == list(hosts)

        try:
            self.until(is_up, f"{hosts} in attempt {attempt}")
        except AssertionError as error:
            raise AssertionError(self.screen) from error

    def says(self, words: str) -> None:
        self.until(lambda: words in self.screen, words)

    def asks(self, command: str, hosts: str, code: int, words: str) -> None:
        """`join` or `leave`, what it says, and its exit code."""
        result = self.hosts.run(
            [sys.executable, "-m", "roxxel_dist", command, self.folder / "runs" / "run_one", "--hosts", hosts],
            cwd=self.folder,
        )
        assert (result.returncode, words in result.stderr) == (code, True), result.stderr

    def end(self, *away: str) -> None:
        """Let the ranks end; nothing is left, but on hosts that are away."""
        (self.folder / "end").touch()
        assert self.launch.wait(200) == 0, self.screen
        for host in {*self.hosts.names} - {*away}:
            assert self.hosts.processes(host) == [], f"something is left on {host}"


@pytest.fixture
def job(cluster: Callable[[int], Cluster], tmp_path: Path, until: Until) -> Callable[[int], Job]:
    return lambda count: Job(cluster(count), tmp_path, until)


@pytest.mark.cluster
@pytest.mark.parametrize("by", ["ssh", "exec"])
def test_hosts_join_and_leave_by_request(job: Callable[[int], Job], by: str) -> None:
    one = job(3)
    one.start("--hosts", "h1,h2", "--min-hosts", 2, by=by)
    one.up(0, "h1", "h2")
    one.asks("leave", "h2", 1, "h2 cannot leave: of the 2 hosts that are there, at least 2 stay (--min-hosts)")
    one.asks("leave", "h7", 1, "h7 is no host of the job: it has h1, h2")
    one.asks("join", "-oProxyCommand=x", 1, "cannot be a host")
    one.asks("join", "h1", 0, "h1 is in the job already")
    one.asks("join", "nowhere", 0, "nowhere is checked now, and joins the job when it passes")
    one.says("host nowhere does not join yet, and is asked from time to time: ")
    one.asks("join", "h3", 0, "h3 is checked now, and joins the job when it passes")
    one.up(1, "h1", "h2", "h3")
    assert "h3 can join the job: the ranks get 30 s to save and exit; the job continues with h3" in one.screen
    one.asks("leave", "h1,nowhere", 0, "the ranks save, and the job continues without h1, nowhere")
    one.up(2, "h2", "h3")
    assert "h1 shall leave the job: the ranks get 30 s to save and exit; the job continues without h1" in one.screen
    assert one.hosts.processes("h1") == []
    assert one.screen.count("host nowhere does not join") == 1
    one.end()


@pytest.mark.cluster
def test_hosts_join_and_leave_by_a_list_however_it_is_written(job: Callable[[int], Job]) -> None:
    one = job(4)
    path = one.folder / "hosts.txt"
    path.write_text("h1\nh2\n")
    one.start("--hosts-from", path, "--min-hosts", 2)
    one.up(0, "h1", "h2")
    path.write_text("h1 h2 h3\n")
    one.says("line 1: 'h1 h2 h3': write a host, or `host slots=N`; the list stays as it was")
    path.write_text("")
    one.says("no host is in the list; the list stays as it was")
    path.unlink()
    one.says("there is no such file, and no such command")
    path.write_text("h1\n# soon: h2\n")
    one.says("h2 cannot leave the job yet: of the 2 hosts that are there, at least 2 stay (--min-hosts)")
    path.write_text("h4\nh3\nh1\n")
    one.up(1, "h1", "h4", "h3")
    assert "h4, h3 can join the job; h2 shall leave the job: the ranks get 30 s" in one.screen
    one.end()


@pytest.mark.cluster
def test_a_start_needs_the_least_number_of_hosts_and_the_list_may_name_others_meanwhile(
    job: Callable[[int], Job],
) -> None:
    """Of four hosts three are there at last; the fourth is taken in when it comes, and a fifth is a spare."""
    one = job(5)
    one.hosts.cut("h3")
    one.hosts.cut("h4")
    path = one.folder / "hosts.txt"
    path.write_text("h1\n")
    one.start("--hosts-from", f"cat {path}", "--min-hosts", 3, "--max-hosts", 4)
    one.says("has 1 of 3 hosts: waiting up to 60 s (--host-timeout)")
    path.write_text("h1\nh3\nh4\n")
    one.says("1 of at least 3 hosts (--min-hosts) are there: waiting up to 60 s for others (--host-timeout)")
    path.write_text("h1\nh2\nh3\nh4\n")
    one.hosts.restore("h3")
    one.up(0, "h1", "h3", "h2")
    one.hosts.restore("h4")
    one.up(1, "h1", "h3", "h4", "h2")
    path.write_text("h1\nh2\nh3\nh4\nh5\n")
    one.says("host h5 is a spare: it passed the checks, and --max-hosts is 4")
    one.hosts.cut("h3")
    one.up(2, "h1", "h4", "h2", "h5")
    one.end("h3")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_training_whose_hosts_come_and_go_is_the_undisturbed_one(
    cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    """ROXXEL_CHANGES says how often they do."""
    changes = int(os.environ.get("ROXXEL_CHANGES", "100"))
    summary = elastic(cluster(4), tmp_path, changes, seed=1)
    assert len(summary.changes) == changes
    assert summary.same, summary
    assert (summary.repeated, summary.lost_saves, summary.left) == ([], [], []), summary
