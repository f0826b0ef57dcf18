"""What the launcher adds to a start, what a restart takes, and which steps are lost: with jax, and a real `train`."""

import json
import math
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from hosts import Cluster
from launch_jobs import JAX_RANK, START_S, Job, MissedError, local, over_ssh
from launch_table import Row, Setting, repeated

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.launcher.job.placement import coordinator_port, rank_environment
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.process import progress

MOST_S, MOST_SHARE = 0.3, 0.03
FEW_HOSTS, MANY_HOSTS, MOST_MS_A_HOST = 2, 48, 15.0
RESTART_S = 2.0
SAVE_EVERY = 100
CONFIG = f"""
phases:
  - {{steps: 1000000, batch_size: 8, seq_len: 129}}
log_every: 1
eval_every: 1000000
checkpoint_every: {SAVE_EVERY}
dim: 64
num_blocks: 2
"""


def starts(setting: Setting) -> Iterator[Row]:
    """The first step of the same two ranks, started by hand and by the launcher, in turns."""
    options = ("--devices-per-proc", 1)
    yield _start_row("one host", setting, _by_hand, lambda: Job(local(2, JAX_RANK, *options), 2))
    with Cluster(2) as hosts:
        mine = lambda: Job(over_ssh(hosts, JAX_RANK, *options), 2, hosts)  # noqa: E731
        yield _start_row("2 hosts by ssh", setting, lambda: _by_hand_over_ssh(hosts), mine)
    yield _cpu_row(setting)


def _cpu_row(setting: Setting) -> Row:
    """What each further host costs the controller, by the difference of two launches: its own start is not in it."""
    with Cluster(MANY_HOSTS) as hosts:
        few, many = hosts.names[:FEW_HOSTS], hosts.names
        tally = repeated(
            "CPU of the controller for each host",
            setting.count,
            lambda number: 1000 * (_cpu_s(hosts, many) - _cpu_s(hosts, few)) / (MANY_HOSTS - FEW_HOSTS),
        )
    return Row(
        what=f"CPU of the controller for each of {MANY_HOSTS} hosts by ssh, without that of ssh itself",
        target=f"median <= {MOST_MS_A_HOST:g} ms",
        limit=MOST_MS_A_HOST,
        times=tally.times,
        unit="ms",
        missed=tally.missed,
        by_median=True,
    )


COUNT_CPU = """
import resource, sys
from roxxel_dist.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print("cpu", used.ru_utime + used.ru_stime)
sys.exit(code)
"""


def _cpu_s(hosts: Cluster, names: Sequence[str]) -> float:
    """What a launch of `true` on these hosts takes of the CPU, without its children."""
    words = ["launch", "ssh", "--hosts", ",".join(names), "--ssh-config", hosts.ssh_config, "--", "true"]
    done = hosts.run([sys.executable, "-c", COUNT_CPU, *words], cwd=hosts.folder, timeout=START_S)
    if done.returncode:
        raise MissedError(f"a launch on {len(names)} hosts ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(done.stdout.rpartition("cpu ")[2])


def _start_row(where: str, setting: Setting, by_hand: Callable[[], Job], mine: Callable[[], Job]) -> Row:
    hands: list[float] = []

    def pair(number: int) -> float:
        if number % 2:
            ours = _first_step(mine())
            hands.append(_first_step(by_hand()))
        else:
            hands.append(_first_step(by_hand()))
            ours = _first_step(mine())
        return ours - hands[-1]

    what = f"first step under the launcher, over the same 2 ranks by hand: {where}"
    tally = repeated(what, setting.count, pair)
    hand = statistics.median(hands) if hands else math.nan
    return Row(
        what=what,
        target=f"median <= +{MOST_S:g} s or {MOST_SHARE:.0%}",
        limit=max(MOST_S, MOST_SHARE * hand),
        times=tally.times,
        missed=tally.missed,
        by_median=True,
        note=f"by hand {hand:.3g} s",
    )


def _first_step(job: Job) -> float:
    with job:
        taken = max(when for _, when in job.wait_said("up", range(2)).values()) - job.started
        job.end(code=0)
        job.check_nothing_left()
        return taken


def _contract(rank: int, coordinator: str) -> dict[str, str]:
    """What the launcher would give to a rank, but for the file of its steps."""
    job = JobSpec(command=("true",), nprocs=2, run_id="hand", log_dir=Path("logs"), devices_per_proc=1)
    return rank_environment(job, rank, coordinator, {})


def _by_hand() -> Job:
    """Two shells, in the background of a third."""
    coordinator = f"127.0.0.1:{coordinator_port(None)}"
    lines = [shlex.join(_with(_contract(rank, coordinator), JAX_RANK)) for rank in range(2)]
    return Job(["bash", "-c", f"{lines[0]} & {lines[1]} & wait"], 2)


def _by_hand_over_ssh(hosts: Cluster) -> Job:
    """An ssh to each host, in the background of a shell."""
    folder = Path(tempfile.mkdtemp(prefix="roxxel-bench-launch-"))
    coordinator = f"{hosts.address('h1')}:{coordinator_port(None)}"
    lines = []
    for rank, host in enumerate(hosts.names):
        remote = f"cd {shlex.quote(str(folder))} && exec {shlex.join(_with(_contract(rank, coordinator), JAX_RANK))}"
        lines.append(shlex.join(["ssh", "-T", "-F", str(hosts.ssh_config), host, remote]))
    return Job(["bash", "-c", f"{lines[0]} & {lines[1]} & wait"], 2, hosts, folder=folder)


def _with(variables: dict[str, str], words: list[str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *words]


def restarts(setting: Setting) -> Iterator[Row]:
    """One run of `train`, which is killed, restarted by its launcher, drained, launched again, and so on."""
    with tempfile.TemporaryDirectory(prefix="roxxel-bench-launch-") as folder:
        yield from _restarts("one host, 2 ranks", setting, Run(Path(folder)), None)
    with Cluster(2) as hosts, tempfile.TemporaryDirectory(prefix="roxxel-bench-launch-") as folder:
        yield from _restarts("2 hosts by ssh", setting, Run(Path(folder)), hosts)


def _restarts(where: str, setting: Setting, run: "Run", hosts: Cluster | None) -> Iterator[Row]:
    what = f"restart after a kill -9 of a rank, down time less the new ranks' own start to their first step: {where}"
    tally = repeated(
        what, setting.count, lambda number: run.kill_and_drain(number, (number + 0.5) / setting.count, hosts)
    )
    whole = statistics.median(run.down) if run.down else math.nan
    yield Row(
        what=what,
        target=f"{RESTART_S:g} s",
        limit=RESTART_S,
        times=tally.times,
        missed=tally.missed,
        note=f"whole down time {whole:.3g} s",
    )
    drained, killed = (run.lost_by_drain, setting.count - 1, 0), (run.lost_by_kill, setting.count, SAVE_EVERY)
    for name, (lost, count, limit) in (("SIGTERM", drained), ("kill -9", killed)):
        what = f"steps lost by {name}, --checkpoint_every {SAVE_EVERY}: {where}"
        short = count - len(lost)
        missed = [f"{short} repetitions did not come so far"] if short > 0 else []
        yield Row(what=what, target=f"<= {limit}", limit=limit, times=lost, unit="steps", missed=missed)


class Run:
    """A training run in a folder, and what is known of its end so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tokens = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint16)
        Roxxel(folder / "data.rox").write([tokens], separator=None, vocab_size=256)
        (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        self._last = 0
        """The last step that was finished before the launch that follows."""
        self.down: list[float] = []
        self.lost_by_kill: list[float] = []
        self.lost_by_drain: list[float] = []

    def kill_and_drain(self, number: int, part: float, hosts: Cluster | None) -> float:
        """From the kill to the moment at which the last rank of the next attempt is a process.

        Args:
            number: decides which rank is killed.
            part: when, as a part of the interval between two saves.
            hosts: where.
        """
        with self._launch(hosts) as job:
            first = self._wait_stepping(job, attempt=0)[1]
            if self._last:
                self.lost_by_drain.append(self._last + 1 - first)
            self._wait_row(job, (first // SAVE_EVERY + 1 + part) * SAVE_EVERY)
            victim = _ranks(job, 0)[number % 2]
            done = _record(victim).done
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            ranks, first, stepped = self._wait_stepping(job, attempt=1)
            self.lost_by_kill.append(done + 1 - first)
            self.down.append(stepped - killed)
            born = max(map(_born, ranks.values()))
            self._wait_row(job, first + 3)
            job.process.send_signal(signal.SIGTERM)
            job.end(code=42)
            job.check_nothing_left()
            self._last = max(self._rows())
            return born - killed

    def _launch(self, hosts: Cluster | None) -> Job:
        words = ["train", "--config", "config.yaml", "--data_path", "data.rox", "--run_dir", "run", "--resume"]
        cache = {"JAX_COMPILATION_CACHE_DIR": "cache", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        # A spare has not the environment of the rank that it becomes; benchmarks/train_restart.py measures it.
        options = ["--devices-per-proc", 1, "--max-restarts", 1, "--warm-spares", "off"]
        for name, value in cache.items():
            options += ["--env", f"{name}={value}"]
        command = local(2, words, *options) if hosts is None else over_ssh(hosts, words, *options)
        return Job(command, 2, hosts, folder=self._folder, remove=False)

    def _wait_stepping(self, job: Job, attempt: int) -> tuple[dict[int, int], int, float]:
        """The ranks of an attempt, its first step, and when rank 0 had done it."""
        until = time.monotonic() + START_S
        ranks: dict[int, int] = {}
        first = 0
        while True:
            if job.process.poll() is not None or time.monotonic() > until:
                raise MissedError(f"attempt {attempt} has come to no step: {job.said[-2000:]}")
            if len(ranks) < 2:
                ranks = _ranks(job, attempt)
                time.sleep(0.05)
                continue
            record = _record(ranks[0])
            if record.activity == "step" and not first:
                first = record.entered
            if first and record.done >= first:
                return ranks, first, time.monotonic()
            time.sleep(0.003)

    def _wait_row(self, job: Job, step: float) -> None:
        until = time.monotonic() + START_S
        while max(self._rows(), default=0) < step:
            if job.process.poll() is not None or time.monotonic() > until:
                raise MissedError(f"step {step:g} was not logged: {job.said[-2000:]}")
            time.sleep(0.02)

    def _rows(self) -> list[int]:
        """The steps that are logged."""
        file = self._folder / "run" / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _ranks(job: Job, attempt: int) -> dict[int, int]:
    """The ranks of an attempt that are there: their pids."""
    found = {}
    for pid in job.everything():
        variables = _variables(pid)
        if variables.get("ROXXEL_ATTEMPT") == str(attempt) and _leads(pid):
            found[int(variables["ROXXEL_PROCESS_ID"])] = pid
    return found


def _leads(pid: int) -> bool:
    """Whether a process is a rank itself, and none that a rank has started."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _variables(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _record(pid: int) -> progress.Record:
    variables = _variables(pid)
    if progress.ENV not in variables:
        return progress.Record()
    try:
        file = os.open(variables[progress.ENV], os.O_RDONLY)
    except FileNotFoundError:  # its agent has ended
        return progress.Record()
    try:
        return progress.read(file, 2)[int(variables["ROXXEL_PROCESS_ID"])]
    finally:
        os.close(file)


def _born(pid: int) -> float:
    """When a process was started, by `time.monotonic`, to a hundredth of a second."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()
