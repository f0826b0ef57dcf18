"""Hosts join and leave a job that runs."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
from elastic import elastic
from hosts import Cluster
from ranks import is_waiting_spare

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control import inbox
from roxxel_dist.launcher.fleet import driver, events, looks
from roxxel_dist.launcher.fleet.driver import Driver
from roxxel_dist.launcher.fleet.step import fleet_of
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.launcher.output import Console
from roxxel_dist.launcher.preflight.run import PreflightReport
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.process.interrupt import SignalPipe

RUN_ID = f"members_{os.getpid()}"
Until = Callable[[Callable[[], Any], str], None]
Alive = Callable[[int], bool]

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
attempt, ranks = os.environ["ROXXEL_ATTEMPT"], os.environ["ROXXEL_NUM_PROCESSES"]
name = f"up.{attempt}.{ranks}.{os.environ['ROXXEL_PROCESS_ID']}"
with open("." + name, "w") as file:
    file.write(os.environ.get("HOST", os.uname().nodename))
os.rename("." + name, name)
while not os.path.exists("end"):
    time.sleep(0.05)
    if os.path.exists("save"):
        from roxxel_dist.process.progress import agent_pipe
        agent_pipe().send({"saved": 1})
"""

# Found by every process: which are spares, and that of one host cannot import what a rank imports.
SITE = """
import os
if "ROXXEL_SPARE" in os.environ:
    open(f"spare.{os.environ['HOST']}.{os.getpid()}", "w").close()
    if os.environ["HOST"] == "bad":
        os.write(2, b"Traceback\\nImportError: no jax here\\n")
        os._exit(1)
"""


CONTROLLER = """
import sys
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.process.interrupt import SignalPipe
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output import Console
from roxxel_dist.launcher.preflight.run import PreflightReport
from roxxel_dist.launcher.transport.pool import HostPool
first = tuple(Path("hosts.txt").read_text().split())
class Backend(LocalBackend):  # agents on this machine stand for hosts
    is_local, takes_hosts, hosts, given, listed = False, True, first, (), first
    def check_joining(self, hosts):
        pass
    def argv(self, host, module, *words):
        return ["env", f"HOST={host}", "PYTHONPATH=site", *super().argv(host, module, *words)]
job = JobSpec(
    command=("python", "program.py"), nprocs=len(first), run_id=sys.argv[1], log_dir=Path("run/logs"),
    hosts_from="hosts.txt", min_hosts=len(first), max_hosts=3, grow_at_checkpoint=sys.argv[2] == "late",
    preflight=sys.argv[3] or None,
)
sys.exit(run(job, Backend()))
"""


@dataclass
class LocalJob:
    """A job on this machine, whose agents stand for hosts."""

    folder: Path
    until: Until
    launch: "subprocess.Popen[bytes]" = field(init=False)

    def start(self, *hosts: str, late: bool = False, preflight: str = "", program: str = PROGRAM) -> None:
        (self.folder / "program.py").write_text(program)
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text(SITE)
        self.name(*hosts)
        words = [sys.executable, "-c", CONTROLLER, RUN_ID, "late" if late else "at once", preflight]
        with (self.folder / "screen.txt").open("wb") as screen:
            self.launch = subprocess.Popen(
                words, cwd=self.folder, stdout=screen, stderr=screen, stdin=subprocess.DEVNULL
            )

    @property
    def screen(self) -> str:
        return (self.folder / "screen.txt").read_text()

    def name(self, *hosts: str) -> None:
        (self.folder / "hosts.txt").write_text("\n".join(hosts) + "\n")

    def up(self, attempt: int, ranks: int) -> list[str]:
        """The hosts of these ranks, when they are up."""
        self.until(lambda: len(list(self.folder.glob(f"up.{attempt}.{ranks}.*"))) == ranks, f"attempt {attempt}")
        return [file.read_text() for file in sorted(self.folder.glob(f"up.{attempt}.{ranks}.*"))]

    def says(self, words: str) -> None:
        self.until(lambda: words in self.screen, words)

    def spares(self) -> dict[str, int]:
        """The hosts that have had one, and its process."""
        return {path.name.split(".")[1]: int(path.suffix[1:]) for path in self.folder.glob("spare.*")}

    def end(self) -> None:
        (self.folder / "end").touch()
        assert self.launch.wait(60) == 0, self.screen


@pytest.fixture
def local(tmp_path: Path, until: Until) -> Iterator[LocalJob]:
    job = LocalJob(tmp_path, until)
    yield job
    job.launch.kill()
    job.launch.wait()


def test_a_list_and_requests_change_the_hosts_of_a_job(
    local: LocalJob, tmp_path: Path, cli: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    local.start("a", "b")
    assert local.up(0, 2) == ["a", "b"]
    refused = cli("leave", "run", "--hosts", "a", cwd=tmp_path)
    assert refused.returncode == 1
    assert "a cannot leave: of the 2 hosts that are there, at least 2 stay (--min-hosts)" in refused.stderr
    local.name("a", "bad", "b")
    local.says("host bad does not join yet, and is asked from time to time: a process that imports what a rank imports")
    assert "ended there: ImportError: no jax here\n" in local.screen
    local.name("d", "c", "b", "a")
    assert local.up(1, 3) == ["a", "b", "d"], local.screen
    assert local.spares().keys() == {"bad", "d"}
    record = tmp_path / "run" / "logs" / "launcher.json"  # replaced once a second
    local.until(lambda: len(json.loads(record.read_text())["ranks"]) == 3, "the record has three ranks")
    started = json.loads(record.read_text())["ranks"][2]
    assert started["pid"] == local.spares()["d"], "its imports were done before"
    shown = cli("logs", "run", "--rank", "2", cwd=tmp_path)
    assert "rank-2.log is not there: nothing was printed yet" in shown.stderr, "its start had ranks 0 and 1"
    assert "has the ranks 0 to 2" in cli("logs", "run", "--rank", "3", cwd=tmp_path).stderr
    left = cli("leave", "run", "--hosts", "b", cwd=tmp_path)
    assert (left.returncode, "continues without b" in left.stderr) == (0, True), left.stderr
    assert local.up(2, 3) == ["a", "d", "c"], "the spare takes its place"
    local.end()
    assert "is a spare: it passed the checks, and --max-hosts is 3" in local.screen
    assert "b shall leave the job: the ranks get 30 s to save and exit; the job continues without b" in local.screen
    assert list((tmp_path / "run" / "logs").glob("members/*")) == []
    late = cli("join", "run", "--hosts", "e", cwd=tmp_path)
    assert (late.returncode, "is ended: launch it again with other --hosts" in late.stderr) == (2, True)


COMPILING = """
import os
from roxxel_dist.process.progress import Progress
Progress.from_env(int(os.environ["ROXXEL_PROCESS_ID"])).enter(1)
""" + PROGRAM.replace(
    'os.path.exists("save"):',
    'os.path.exists("done"):\n        Progress.from_env(int(os.environ["ROXXEL_PROCESS_ID"])).finish(1)\n    if False:',
)


@pytest.mark.long
def test_a_host_that_comes_during_the_first_step_joins_when_it_is_done(local: LocalJob, tmp_path: Path) -> None:
    """It compiles, which may take minutes: ranks that have nothing to save would begin again for each host."""
    local.start("a", "b", program=COMPILING)
    assert local.up(0, 2) == ["a", "b"]
    local.name("a", "b", "c")
    local.until(lambda: is_waiting_spare(local.spares().get("c", 0)), "c is warm")
    time.sleep(1.0)  # the controller looks four times a second
    assert "the ranks get" not in local.screen
    (tmp_path / "done").touch()
    assert local.up(1, 3) == ["a", "b", "c"], local.screen
    local.end()
    assert local.screen.count("the ranks get") == 1
    assert "c can join the job: the ranks get 30 s to save and exit; the job continues with c" in local.screen


@pytest.mark.long
def test_a_list_that_cannot_be_read_before_the_ranks_start_is_named(local: LocalJob) -> None:
    local.start("a", preflight="echo no host > hosts.txt; sleep 1.5")
    assert local.up(0, 1) == ["a"]
    local.says("line 1: 'no host': write a host, or `host slots=N`; the list stays as it was")
    local.end()


def listing(*hosts: str) -> LocalBackend:
    backend = LocalBackend()
    backend.listed = hosts
    return backend


def test_a_list_that_fails_again_and_again_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "COMMAND_S", 0.01)
    monkeypatch.setattr(inbox, "AGAIN_S", 0.01)
    count = tmp_path / "count"
    command = f"echo >> {count}; echo E1127 08:00:0$(wc -l < {count}) port $$ >&2; exit 1"
    job = JobSpec(command=("true",), nprocs=1, run_id="x", log_dir=tmp_path, hosts_from=command)
    happened = SimpleQueue[Any]()
    with inbox.Inbox(job, listing("a"), happened):
        while not count.exists() or count.stat().st_size < 4:
            time.sleep(0.01)
    assert "failed (exit code 1): E1127 08:00:0" in happened.get_nowait()[0].text
    assert happened.empty()


def test_a_request_that_comes_before_the_first_look_is_no_one_of_a_launch_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job has begun, so `join` takes it for one that runs. One that is no JSON object costs the others nothing."""
    monkeypatch.setattr(inbox, "AGAIN_S", 0.01)
    box = inbox.mailbox(tmp_path)
    old, new = (box.post({"joins": True, "hosts": [host]}) for host in "ab")
    box.post(["no request"])
    (earlier,) = box.folder.glob(f"{old}*")
    os.utime(earlier, (1.0, 1.0))
    job = JobSpec(command=("true",), nprocs=1, run_id="x", log_dir=tmp_path)
    happened = SimpleQueue[Any]()
    backend = listing("a")
    monkeypatch.setattr(backend, "check_joining", lambda hosts: None)
    with inbox.Inbox(job, backend, happened, since=2.0):
        event, reply = happened.get(timeout=30)
    reply([events.Answer(done=True, text="followed")])
    assert event.hosts == ("b",)
    assert box.take_answer(new) == {"done": True, "text": "followed"}
    assert happened.empty()


def test_a_mistake_in_a_thread_is_said_and_the_thread_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "AGAIN_S", 0.01)
    (tmp_path / "list").write_text("a\n")
    job = JobSpec(command=("true",), nprocs=1, run_id="x", log_dir=tmp_path / "logs", hosts_from=str(tmp_path / "list"))
    looks: list[int] = []

    def fails(_: object) -> list[Any]:
        looks.append(1)
        raise KeyError("machine")

    monkeypatch.setattr(inbox, "requests_in", fails)
    happened = SimpleQueue[Any]()
    with inbox.Inbox(job, listing("a"), happened):
        assert "could not be read: KeyError('machine')" in happened.get(timeout=30)[0].text
        seen = len(looks)
        end = time.monotonic() + 30
        while len(looks) == seen and time.monotonic() < end:
            time.sleep(0.01)
        assert len(looks) > seen
        assert happened.empty()


@contextmanager
def looking(tmp_path: Path, *wanted: str, **limits: float) -> Iterator[Driver]:
    """A job that runs on host a, to which these others are to come."""
    job = JobSpec(command=("true",), nprocs=1, run_id="x", log_dir=tmp_path / "logs", limits=Limits(**limits))
    fleet = fleet_of(job, ["a"], now=0.0, given=["a", *wanted])
    with (
        Console(all_ranks=False) as screen,
        SignalPipe(screen.info) as signals,
        HostPool(Remote(), limits=job.limits) as pool,
    ):
        found = Driver(fleet, Remote(), signals, screen, pool)
        assert isinstance(found.select({}), events.Start)
        with found.attempt():
            yield found


class Remote(LocalBackend):
    """Host a is fit, whatever is asked."""

    is_local, hosts = False, ("a",)


def passes(job: object, backend: object, hosts: Any, **more: Any) -> PreflightReport:
    return PreflightReport(address="10.0.0.1", port=1, cores=1)


def test_without_room_for_a_thread_a_job_goes_on_and_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name in ("fleet", "inbox"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(driver, "check_job_hosts", passes)
    monkeypatch.setattr(threading.Thread, "start", fails)
    with looking(tmp_path) as one, inbox.Inbox(one.fleet.given, listing("a"), one.happened):
        one.tick()
    said = capfd.readouterr().err
    assert "lists and requests are not read: can't start new thread" in said
    assert "no other host is looked at in this attempt: can't start new thread" in said


def test_a_look_whose_client_does_not_start_holds_up_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """The exec of a program on a file system that does not answer: its thread cannot be ended."""
    begun, answers = threading.Event(), threading.Event()

    def stuck(job: object, backend: object, hosts: Any, **more: Any) -> PreflightReport:
        if "b" in hosts:
            begun.set()
            assert answers.wait(60)
        return passes(job, backend, hosts)

    monkeypatch.setattr(driver, "check_job_hosts", stuck)
    with looking(tmp_path, "b", agent_end_s=0.05) as one:
        one.tick()
        assert begun.wait(60)
    assert "a look at other hosts does not end" in one._notes[-1]
    with one.attempt():
        answers.set()
        until(lambda: sum(thread.name == "fleet" for thread in threading.enumerate()) == 1, "the end of the first one")
        assert one.happened.empty()


def test_a_mistake_with_hosts_that_wait_is_said_and_others_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], until: Until
) -> None:
    tended: list[Any] = []

    def fails(looking: object) -> None:
        tended.append(looking)
        raise KeyError("machine")

    monkeypatch.setattr(driver.LookThread, "_tend", fails)
    monkeypatch.setattr(driver, "TEND_S", 0.01)
    monkeypatch.setattr(driver, "check_job_hosts", passes)
    with looking(tmp_path) as one:
        thread = one._thread
        assert thread is not None
        thread._waiting.connect("c")
        thread.work.put(
            events.Warm(plan=one.fleet.assignment_of("a"), report=one.fleet.report, candidates=())
        )  # it wakes the thread
        until(lambda: one.tick() or len(tended) >= 3, "three looks at the agents")
        one.tick()
    said = [line for line in capfd.readouterr().err.splitlines() if "a look at c failed" in line]
    assert len(said) == 1
    assert said[0].endswith("a look at c failed, and is repeated later: KeyError('machine')")


def test_a_mistake_in_a_look_at_hosts_is_said_and_they_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], until: Until
) -> None:
    looks_at: list[Any] = []

    def fails(job: object, backend: object, hosts: Any, **more: Any) -> PreflightReport:
        if "b" not in hosts:
            return passes(job, backend, hosts)
        looks_at.append(hosts)
        raise KeyError("machine")

    monkeypatch.setattr(driver, "check_job_hosts", fails)
    monkeypatch.setattr(looks, "LOOK_MOST_S", 0.01)
    with looking(tmp_path, "b") as one:
        until(lambda: one.tick() or len(looks_at) >= 3, "three looks")
    said = [line for line in capfd.readouterr().err.splitlines() if "a look at" in line]
    assert len(said) == 1
    assert said[0].endswith("a look at b failed, and is repeated later: KeyError('machine')")


def test_another_name_of_a_host_does_not_join(local: LocalJob) -> None:
    local.start("a")
    assert local.up(0, 1) == ["a"]
    local.name("a", "b")
    local.says("host b does not join yet, and is asked from time to time: it is the machine of a, by another name")
    local.end()
    assert local.spares() == {}


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["its agent dies", "it is listed no more"])
def test_a_host_that_goes_before_the_others_save_costs_no_restart(how: str, local: LocalJob, alive: Alive) -> None:
    local.start("a", "b", late=True)
    local.up(0, 2)
    local.name("a", "b", "c")
    local.until(lambda: is_waiting_spare(local.spares().get("c", 0)), "a spare")
    spare = psutil.Process(local.spares()["c"])
    guard = spare.parents()[2]
    if how == "its agent dies":
        guard.children()[0].kill()
        local.says("host c does not join yet, and is asked from time to time: its agent ended")
    else:
        local.name("a", "b")
    local.until(lambda: not alive(spare.pid) and not alive(guard.pid), "nothing is left there")
    (local.folder / "save").touch()
    local.end()
    assert "ranks get 30 s" not in local.screen


@pytest.mark.cluster
def test_a_host_that_comes_and_goes_is_held_back(
    local: LocalJob, tmp_path: Path, cli: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    local.start("a", "b")
    assert local.up(0, 2) == ["a", "b"]
    for attempt in (1, 3):
        local.name("a", "b", "c")
        assert local.up(attempt, 3) == ["a", "b", "c"]
        local.name("a", "b")
        assert local.up(attempt + 1, 2) == ["a", "b"]
    local.name("a", "b", "c")
    local.says("host c left the list 2 times soon after it came; it is taken in when it has stayed there for 60 s, or")
    assert local.screen.count("ranks get 30 s") == 4
    joined = cli("join", "run", "--hosts", "c", cwd=tmp_path)
    assert joined.returncode == 0, joined.stderr
    assert local.up(5, 3) == ["a", "b", "c"]
    local.end()


@dataclass
class Job:
    """A job on a cluster, whose ranks write where they are."""

    hosts: Cluster
    folder: Path
    until: Until
    launch: subprocess.Popen[bytes] = field(init=False)

    def start(self, *options: object, by: str = "ssh") -> None:
        (self.folder / "program.py").write_text(PROGRAM)
        words = [sys.executable, "-m", "roxxel_dist", *self.hosts.reach(by), *options]
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


WAYS = pytest.mark.parametrize("by", ["ssh", "exec over ssh"])


@pytest.fixture
def job(cluster: Callable[[int], Cluster], tmp_path: Path, until: Until) -> Callable[[int], Job]:
    return lambda count: Job(cluster(count), tmp_path, until)


@pytest.mark.cluster
@WAYS
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
@WAYS
def test_hosts_join_and_leave_by_a_list_however_it_is_written(job: Callable[[int], Job], by: str) -> None:
    one = job(4)
    path = one.folder / "hosts.txt"
    path.write_text("h1\nh2\n")
    one.start("--hosts-from", path, "--min-hosts", 2, by=by)
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
@WAYS
def test_a_start_needs_the_least_number_of_hosts_and_the_list_may_name_others_meanwhile(
    job: Callable[[int], Job], by: str
) -> None:
    """Of four hosts three are there at last; the fourth is taken in when it comes, and a fifth is a spare."""
    one = job(5)
    one.hosts.cut("h3")
    one.hosts.cut("h4")
    path = one.folder / "hosts.txt"
    path.write_text("h1\n")
    one.start("--hosts-from", f"cat {path}", "--min-hosts", 3, "--max-hosts", 4, by=by)
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
