"""What ranks are given and what becomes of their output."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import TERMINAL, on_terminal
from cpu_quota import GROUPS

from roxxel_dist.launcher.agent.ranks import HostRanks, Watch
from roxxel_dist.launcher.host.protocol import LIMITS, NONCE, Outbox, encode
from roxxel_dist.launcher.job.placement import coordinator_port
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.process import progress

Launch = Callable[..., Any]
Alive = Callable[[int], bool]
Until = Callable[[Callable[[], Any], str], None]

SHOW = """
import json, os, sys
rank = os.environ["ROXXEL_PROCESS_ID"]
facts = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "session": os.getsid(0) == os.getpid(),
         "stdin": sys.stdin.read(), "progress": os.path.getsize(os.environ["ROXXEL_PROGRESS"])}
open(f"facts.{rank}", "w").write(json.dumps(facts))
"""
WORDS = ["a b", "", "q'uo\"te", "é ☃", "$HOME", "back\\slash", "line\nbreak", "-m", "\udcff"]


def test_what_each_rank_sees(launch: Launch, tmp_path: Path) -> None:
    stale = {
        "ROXXEL_COORDINATOR": "stale:1",
        "ROXXEL_PROCESS_ID": "99",
        "ROXXEL_LOCAL_DEVICES": "99",
        "ROXXEL_ATTEMPT": "99",
        "ROXXEL_PROGRESS": "/stale",
        "PJRT_NPROC": "99999",
    }
    job = launch("env", sys.executable, "-c", SHOW, *WORDS, nprocs=3, environ=stale, env={"MINE": "é"}, port=None)
    assert job.wait() == (0, "", "")
    facts = [json.loads((tmp_path / f"facts.{rank}").read_text()) for rank in range(3)]
    envs = [fact["env"] for fact in facts]
    assert [fact["argv"] for fact in facts] == [WORDS] * 3
    assert [env["ROXXEL_PROCESS_ID"] for env in envs] == ["0", "1", "2"]
    for env in envs:
        assert env["ROXXEL_COORDINATOR"] == envs[0]["ROXXEL_COORDINATOR"]
        assert env["PJRT_NPROC"] == str(max(os.cpu_count() or 1, 3))
        assert (env["ROXXEL_NUM_PROCESSES"], env["ROXXEL_ATTEMPT"], env["ROXXEL_STATUS"]) == ("3", "0", "1")
        assert (env["ROXXEL_RUN_ID"], env["PYTHONUNBUFFERED"], env["MINE"]) == (f"run_{os.getpid()}", "1", "é")
        assert "ROXXEL_LOCAL_DEVICES" not in env
        assert env["ROXXEL_PROGRESS"].startswith(str(tmp_path / "tmp"))
    assert re.fullmatch(r"127\.0\.0\.1:\d+", envs[0]["ROXXEL_COORDINATOR"])
    assert all(fact["session"] and fact["stdin"] == "" and fact["cwd"] == str(tmp_path) for fact in facts)
    assert [fact["progress"] for fact in facts] == [3 * progress.RECORD.size] * 3
    assert list((tmp_path / "tmp").iterdir()) == []


CLEANED = """
import os, time
from pathlib import Path
from roxxel_dist.process.progress import Progress
rank, file = int(os.environ["ROXXEL_PROCESS_ID"]), Path(os.environ["ROXXEL_PROGRESS"])
if rank == 1:
    Progress.from_env(rank).enter(4)
    file.write_bytes(b"") if os.environ["HOW"] == "short" else file.unlink()
while file.exists() and file.stat().st_size:
    time.sleep(0.01)
Progress.from_env(rank).say("")
time.sleep(0.5)
raise SystemExit(rank * 5)
"""


@pytest.mark.parametrize(("how", "step"), [("gone", ", in step 4"), pytest.param("short", "", marks=pytest.mark.long)])
def test_an_emptied_temporary_folder_does_not_end_the_job(how: str, step: str, launch: Launch) -> None:
    code, _, err = launch("env", sys.executable, "-c", CLEANED, env={"HOW": how}).wait()
    assert code == 5
    assert f"rank 1 failed first: exit code 5{step} (host" in err


def test_simulated_devices_are_cpu_devices(launch: Launch, tmp_path: Path) -> None:
    environ = {"JAX_PLATFORMS": "", "PJRT_NPROC": ""}
    port = coordinator_port(None)
    job = launch("env", sys.executable, "-c", SHOW, devices_per_proc=40, port=port, environ=environ)
    assert job.wait()[0] == 0
    env = json.loads((tmp_path / "facts.1").read_text())["env"]
    assert (env["ROXXEL_LOCAL_DEVICES"], env["JAX_PLATFORMS"]) == ("40", "cpu")
    assert int(env["PJRT_NPROC"]) >= 80
    assert env["ROXXEL_COORDINATOR"] == f"127.0.0.1:{port}"


OUTPUT = r"""
import os
def say(data): os.write(1, data)
say(b"plain [/x] :smile:\n")
say(b"\x1e{\"step\": 1}\n\x1efailed 7\n")
os.write(2, b"from stderr\n")
say(b"caf\xe9\n")
say(b"10%\r20%\r30%\n")
say(b"x" * 3_000_000 + b"\n")
say(b"no newline at the end")
"""
MARKS = ['\x1e{"step": 1}', "\x1efailed 7"]  # what once meant something to the launcher
EXPECTED = ["plain [/x] :smile:", *MARKS, "from stderr", "caf\\xe9", "30%", "x" * 3_000_000, "no newline at the end"]


def test_every_line_arrives_once_in_order_with_time_host_and_rank(launch: Launch) -> None:
    job = launch("env", sys.executable, "-c", OUTPUT)
    code, out, err = job.wait()
    assert (code, err) == (0, "")
    shown = out.rstrip("\n").split("\n")
    assert all(re.match(r"\d\d:\d\d:\d\d 0 \| ", line) for line in shown)
    assert [line.split(" | ", 1)[1] for line in shown] == EXPECTED
    for rank in (0, 1):
        header, *lines = job.log(rank).rstrip("\n").split("\n")
        assert re.match(r"# \d{4}-\d\d-\d\d \d\d:\d\d:\d\d attempt 0, run run_\d+: env .*python", header)
        start = rf"\d\d:\d\d:\d\d\.\d{{3}} {re.escape(socket.gethostname())} {rank} \| "
        assert all(re.match(start, line) for line in lines)
        assert job.lines(rank) == EXPECTED


PIPE = """
import os, subprocess, sys
from roxxel_dist.process.progress import agent_pipe

def pipes():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.exists(path)]

own = os.readlink(f"/proc/self/fd/{agent_pipe()._fd}")
assert own.startswith("pipe:") and own in pipes() and "ROXXEL_PIPE" not in os.environ
seen = "import os; print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]))"
assert own not in subprocess.check_output([sys.executable, "-c", seen], text=True, close_fds=False)
if os.fork() == 0:
    os._exit(agent_pipe().send({"failed": 5}) or own in pipes())
assert os.wait()[1] == 0
subprocess.check_call(["sh", "-c", "printf '\\036failed 7\\n'; printf '\\036failed 7\\n' >&2"])
assert agent_pipe().send({"no": "message"})
print("the end", flush=True)
"""


def test_what_a_rank_tells_its_agent_comes_from_its_own_program_alone(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PIPE)
    job = launch("python", "program.py", nprocs=1)
    assert job.wait()[::2] == (0, "")
    assert job.lines(0) == ["\x1efailed 7", "\x1efailed 7", "the end"]


def test_all_ranks_on_the_screen(launch: Launch) -> None:
    _, out, _ = launch("bash", "-c", "echo I am $ROXXEL_PROCESS_ID", nprocs=3, all_ranks=True).wait()
    assert sorted(line.split(" ", 1)[1] for line in out.splitlines()) == [f"{n} | I am {n}" for n in range(3)]


FLOOD = """
import os, sys
line = b"x" * 99 + b"\\n"
for _ in range(500):
    sys.stdout.buffer.write(line * 1000)
sys.stdout.flush()
open("flooded." + os.environ["ROXXEL_PROCESS_ID"], "w").close()
__import__("time").sleep(1000)
"""


def test_a_flood_arrives_whole_and_takes_no_memory(launch: Launch) -> None:
    job = launch("env", sys.executable, "-c", FLOOD, nprocs=1, stdout=os.open(os.devnull, os.O_WRONLY))
    job.marks("flooded.0", 1)
    for pid in (job.process.pid, *job.family()["agent"]):
        assert psutil.Process(pid).memory_info().rss < 100 << 20
    job.process.send_signal(signal.SIGTERM)
    assert job.wait()[0] == 143
    lines = job.lines(0)
    assert len(lines) == 500_000
    assert set(lines) == {"x" * 99}


def test_a_reader_that_does_not_read_is_waited_for_by_nobody(launch: Launch, alive: Alive, until: Until) -> None:
    script = "seq 200000; touch said.$ROXXEL_PROCESS_ID; sleep 1000"
    job = launch("bash", "-c", script, nprocs=2, all_ranks=True)  # the test does not read the launcher's stdout
    job.marks("said.*", 2)
    until(lambda: all(job.log(rank).endswith("| 200000\n") for rank in (0, 1)), "the logs")
    family = job.family()["all"]
    os.kill(min(pid for pid in family if psutil.Process(pid).name() == "sleep"), signal.SIGKILL)
    assert job.process.wait(60) == 137
    until(lambda: not any(map(alive, family)), "all processes to be gone")


BAR = """
import os, time
from roxxel_dist.process.progress import agent_pipe
for step in range(3, 6):
    record = {"step": step, "total": 5, "start": 2, "phase": "warm [/x]", "loss": 1.5}
    record |= {"tokens_per_s": 1234.0, "eta_s": 65}
    agent_pipe().send(record)
    print("a line [/x]", step, flush=True)
"""


def test_a_terminal_has_a_bar_below_the_lines(launch: Launch) -> None:
    words = ["env", sys.executable, "-c", BAR]
    job, text = on_terminal(lambda theirs: launch(*words, stdout=theirs, environ=TERMINAL))
    assert job.wait()[0] == 0
    for fact in (
        "warm [/x]",
        "5/5",
        "loss 1.5000",
        "1.2k tok/s",
        "1:05 left",
        "0 | a line [/x] 3",
        "0 | a line [/x] 5",
    ):
        assert fact in text
    assert '{"step"' not in text
    assert job.lines(0) == ["a line [/x] 3", "a line [/x] 4", "a line [/x] 5"]


JAX = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("data",))
where = NamedSharding(mesh, PartitionSpec("data"))
x = jax.make_array_from_callback((4,), where, lambda index: jnp.arange(4.0)[index])
psum = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=where.spec, out_specs=PartitionSpec())
total = jax.jit(psum)
print(jax.process_count(), jax.local_device_count(), float(total(x)[0]), flush=True)
total(x).block_until_ready()  # all have printed
if jax.process_index() == 1:
    raise KeyError("of rank 1")
total(x + total(x)).block_until_ready()
"""


def test_a_script_that_knows_nothing_of_us_computes_together_and_its_exception_is_the_jobs(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(JAX)
    job = launch("python", "program.py", devices_per_proc=2)
    code, _, err = job.wait()
    assert "2 2 6.0" in job.lines(0)
    assert "2 2 6.0" in job.lines(1)
    assert code == 1
    assert "rank 1 failed first" in err
    assert err.splitlines()[-1] == "KeyError: 'of rank 1'"


def test_an_agent_that_hears_nothing_says_so_and_ends(tmp_path: Path) -> None:
    """Its stdin stays open, as behind a cut link, and no order arrives."""
    words = [sys.executable, "-m", "roxxel_dist.launcher.agent.agent", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes) as agent:
        assert agent.wait(60) == 1
        assert agent.stderr.read() == b"it heard nothing from the launcher for 1 s\n"
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_hears_nothing_more_ends_its_ranks(tmp_path: Path, alive: Alive) -> None:
    words = [sys.executable, "-m", "roxxel_dist.launcher.agent.agent", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    start = {"type": "start", "command": ["sleep", "600"], "ranks": [{"rank": 0, "env": {}}], "total": 1}
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes) as agent:
        agent.stdin.write(encode({**start, NONCE: "ab"}))
        agent.stdin.flush()
        started = next(message for message in map(json.loads, agent.stdout) if message["type"] == "started")
        assert alive(started["pid"])
        agent.wait(60)  # its guard ends as it did
        assert b"it heard nothing from the launcher for 1 s\n" in agent.stderr.read()
        assert not alive(started["pid"])
    assert list(tmp_path.iterdir()) == []


def test_an_agent_without_room_for_its_guard_leaves_no_folder(tmp_path: Path) -> None:
    pids = GROUPS / "pids" if (GROUPS / "pids").exists() else GROUPS
    group = pids / f"roxxel-test-{os.getpid()}"
    if not os.access(pids, os.W_OK):
        pytest.skip("a limit of processes needs the right to write into /sys/fs/cgroup")
    group.mkdir()
    with suppress(OSError):  # version 1 has no such file
        (GROUPS / "cgroup.subtree_control").write_text("+pids")
    (group / "pids.max").write_text("1")
    try:
        agent = f"exec {sys.executable} -m roxxel_dist.launcher.agent.agent"
        words = ["sh", "-c", f"echo $$ > {group}/cgroup.procs; {agent}"]
        start = {"type": "start", "command": ["true"], "ranks": [{"rank": 0, "env": {}}], "total": 1, NONCE: "ab"}
        given = {"input": encode(start), "env": os.environ | {"TMPDIR": str(tmp_path)}, "capture_output": True}
        told = subprocess.run(words, timeout=60, check=False, **given)
    finally:
        group.rmdir()
    assert b"Resource temporarily unavailable" in told.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_only_host_of_a_job_that_was_suspended_within_its_lease_goes_on(tmp_path: Path, alive: Alive) -> None:
    """Its agent did not run, so at its first look it has heard nothing for longer than 0.5 s."""
    words = [sys.executable, "-m", "roxxel_dist.launcher.agent.agent", "0.5"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    lease = {"limit": 600.0, "hosts": 1, "index": 0, "token": "t", "address": "127.0.0.1"}
    limits = {"report_s": 0.05, "orphan_s": 0.4, "slack_s": 600.0}  # the guard does not count such a time
    start = {"type": "start", "command": ["sleep", "600"], "ranks": [{"rank": 0, "env": {}}], "total": 1}
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes) as guard:
        guard.stdin.write(encode({**start, "lease": lease, LIMITS: limits, NONCE: "ab"}))
        guard.stdin.flush()
        started = next(message for message in map(json.loads, guard.stdout) if message["type"] == "started")
        (agent,) = psutil.Process(guard.pid).children()
        agent.suspend()
        time.sleep(0.6)
        agent.resume()
        told = [json.loads(guard.stdout.readline())["type"] for _ in range(30)]
        assert told.count("progress") >= 20
        assert alive(started["pid"])
        guard.stdin.close()
        guard.wait(60)


def test_a_notice_to_the_host_between_two_attempts_is_told_within_the_next_one(tmp_path: Path) -> None:
    """The controller would not follow it before, and a system gives it once."""
    words = [sys.executable, "-m", "roxxel_dist.launcher.agent.agent"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    start = {"type": "start", "ranks": [{"rank": 0, "env": {}}], "total": 1, LIMITS: {"report_s": 0.05}}
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes) as agent:

        def told_until(kind: str, command: str, **more: object) -> list[str]:
            agent.stdin.write(encode({**start, "command": [command, "1000"], **more}))
            agent.stdin.flush()
            told = [""]
            while told[-1] != kind:
                told.append(json.loads(agent.stdout.readline())["type"])
            return told

        assert "signal" not in told_until("done", "true", **{NONCE: "ab"})
        agent.send_signal(signal.SIGTERM)  # to its guard
        assert [json.loads(agent.stdout.readline())["type"] for _ in range(10)] == ["progress"] * 10
        assert "done" not in told_until("signal", "sleep")
        agent.stdin.close()
        agent.stdout.read()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[HostRanks]:
    """Of an agent whose folder is `tmp_path/agent`."""
    (tmp_path / "agent").mkdir(0o700)
    reads, writes = os.pipe()
    watch = Watch()
    yield HostRanks(watch, Outbox(writes), tmp_path / "agent", None, Limits())
    watch.poll.close()
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize("by", ["a cleaner of old files", "nobody"])
def test_a_folder_that_was_removed_between_two_attempts_is_made_again(
    by: str, ranks: HostRanks, tmp_path: Path
) -> None:
    for _ in range(2):
        ranks.begin({"command": ["true"], "ranks": [], "total": 1})
        assert (tmp_path / "agent" / "progress").stat().st_size == progress.RECORD.size
        if by != "nobody":
            shutil.rmtree(tmp_path / "agent")
    ranks._clear()


@pytest.mark.parametrize(
    "acts",
    [
        (("kill_in", 5.0), ("stop", 30.0)),  # a configuration error, and then Ctrl-C
        (("stop", 30.0), ("kill_in", 5.0)),
        (("stop", 5.0), ("stop", 30.0)),
        (("kill_in", 5.0), ("kill_in", 30.0)),
    ],
)
def test_no_later_order_postpones_a_kill(acts: tuple[tuple[str, float], ...], ranks: HostRanks) -> None:
    for name, seconds in acts:
        getattr(ranks, name)(seconds)
    assert ranks.kill_at is not None
    assert ranks.kill_at <= time.monotonic() + 5.0
