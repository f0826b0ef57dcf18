"""A job that goes on without a host takes it in again when it is back."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from commands import FAST
from hosts import CONTROLLER, ROOT, Cluster
from pretended import PretendedJob
from tables import one_test

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.launcher.job.placement import placements
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.launcher.policy.outcome import AttemptResult, Cause, HostLost, RankExit, classify, exit_code

Until = Callable[[Callable[[], Any], str], None]
WAYS = pytest.mark.parametrize("way", ["ssh", "exec over ssh"])
WORDS = "every rank saved and exited (42); the job continues with h2"


def ended(*codes: int, killed: bool = False, **more: Any) -> AttemptResult:
    ends = [
        RankExit(rank=rank, host="h", pid=1, code=code, killed_by_us=killed, step=3) for rank, code in enumerate(codes)
    ]
    return AttemptResult(exits=ends, host_change=WORDS, **more)


@one_test(
    ("result", "cause", "code"),
    [
        (ended(42, 42), Cause.PREEMPTED, 42),
        (ended(-15, -15), Cause.PREEMPTED, 42),  # a program that saves nothing
        (ended(-9, -9, killed=True), Cause.PREEMPTED, 42),  # one that did not leave in its time
        (ended(1, -9), Cause.PREEMPTED, 1),
        (ended(0, 0), Cause.DONE, 0),  # the last step was done before
        (ended(42, lost=HostLost(host="h", code=137, text="")), Cause.INFRASTRUCTURE, 137),
        (ended(42, 42, requested=signal.SIGINT), Cause.REQUESTED, 42),
    ],
)
def test_how_an_attempt_ends_that_made_room_for_a_host(result: AttemptResult, cause: Cause, code: int) -> None:
    assert (classify(result), exit_code(result)) == (cause, code)


def end_output(job: PretendedJob, host: int) -> None:
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), job.backend.processes[job.backend.hosts[host]].output)


def fall_silent(job: PretendedJob, host: int) -> None:
    job.pool.connect(job.backend.hosts[host]).last_seen -= 100.0
    job.pool._looked -= 1.0


LOSSES: dict[str, Callable[[PretendedJob, int], object]] = {
    "its agent died": end_output,
    "its agent died, and its guard has said so": lambda job, host: job.say(host, {"type": "gone", "code": 137}),
    "it is silent": fall_silent,
    "something else speaks": lambda job, host: job.say(host, {"id": 0}),
}


@pytest.mark.parametrize("code", [0, 42, 7, None])
@pytest.mark.parametrize("how", LOSSES)
def test_a_host_whose_ranks_have_ended_well_ends_no_other_rank(how: str, code: int | None, tmp_path: Path) -> None:
    """Though its agent has not said `done`: something that a rank left cannot be killed."""
    with PretendedJob(2, 1, tmp_path, silent_s=50.0, linger_s=0.0) as job:
        if code is not None:
            job.say(1, {"type": "exit", "rank": 1, "pid": 1, "code": code, "killed_by_us": False, "step": 3})
            job.turn()
        job.orders()
        LOSSES[how](job, 1)
        for _ in range(3):
            job.turn()
        assert [link.host for link in job.pool.at_work] == ["h0000"]
        is_well = code in (0, 42)
        assert job.orders()["kill"] == (0 if is_well else code is None)  # the failure itself has killed them before
        assert (job.attempt._result.lost is None) == is_well


def stand_still(job: PretendedJob, seconds: float) -> None:
    """As after a stop of so many seconds: each time that the pool has noted is so much older."""
    job.pool._looked -= seconds
    for link in job.pool.all:
        link.last_seen -= seconds
    if job.pool._kill_by is not None:
        job.pool._kill_by -= seconds


def test_after_a_pause_of_the_launcher_no_clock_runs_into_the_future(tmp_path: Path) -> None:
    with PretendedJob(2, 1, tmp_path, still_s=5.0, kill_s=10.0) as job:
        heard, silent = job.pool.all
        begun = time.monotonic()
        stand_still(job, 20.0)
        job.report(0, 1)
        job.turn()
        assert begun <= heard.last_seen <= time.monotonic()
        assert silent.last_seen <= time.monotonic()
        assert silent.leased
        stand_still(job, 20.0)
        job.say(1, {"type": "exit", "rank": 1, "pid": 1, "code": 7, "killed_by_us": False, "step": 3})
        job.turn()  # it has the ranks killed
        ordered = job.pool._kill_by
        assert ordered is not None
        assert ordered <= time.monotonic() + 10.0
        stand_still(job, 20.0)
        job.report(0, 2)
        job.turn()
        assert job.pool._kill_by is not None
        assert ordered <= job.pool._kill_by, "the ranks have as long as they had"


@pytest.mark.parametrize("has_guard", [True, False])
@pytest.mark.parametrize("of", ["an attempt", "the pool"])
def test_clients_that_stay_are_waited_for_together(of: str, has_guard: bool, tmp_path: Path) -> None:
    limit_s = 0.05
    with PretendedJob(5, 1, tmp_path, linger_s=limit_s, agent_end_s=limit_s) as job:
        clients = job.backend.processes.values()
        for host, client in enumerate(clients):
            client.lingers = True
            job.say(host, *[{"type": "gone", "code": 137}] * has_guard)
            end_output(job, host)
        if of == "an attempt":
            job.turn()
            assert job.pool.at_work, "it goes on meanwhile"
            while job.pool.at_work:
                job.turn(limit_s)
        job.pool.disconnect(list(job.pool.all))
        assert all(client.is_killed for client in clients)
        assert sum(sum(client.waited) for client in clients) <= limit_s


def test_without_room_for_a_process_or_a_thread_no_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PretendedJob(2, 1, tmp_path, linger_s=0.0) as job:
        placed = placements(job.job, job.backend.hosts, "127.0.0.1:1", {})
        (first, second), heartbeat = job.pool.all, job.pool._heartbeat
        for link in (first, second):
            job.pool.forget(link)
        job.pool.disconnect([second])
        no_process, no_thread = "Resource temporarily unavailable", "can't start new thread"
        failures = [(no_process, job.backend, BlockingIOError), (no_thread, threading.Thread, RuntimeError)]
        for said, place, kind in failures:
            job.orders()

            def fail(*_: object, said: str = said, kind: type = kind) -> None:
                raise kind(said)

            with monkeypatch.context() as patch:
                patch.setattr(place, "start", fail)
                patch.setattr(job.pool, "_heartbeat", heartbeat if place is job.backend else None)
                lost = job.pool.start(job.job, placed, "key", "off")
            assert lost is not None
            assert said in lost.text
            assert not job.pool.at_work
            assert classify(AttemptResult(lost=lost)) is Cause.INFRASTRUCTURE
            assert not job.orders(), "no host has begun"
        assert job.pool.start(job.job, placed, "key", "off") is None


def started(hosts: Cluster, folder: Path, *words: object, way: str = "ssh", **env: str) -> subprocess.Popen[bytes]:
    """A launch on all hosts of a cluster that goes on with one of them; what it says goes into screen.txt."""
    options = ["--min-hosts", 1, "--host-timeout", 1, *words]
    with (folder / "screen.txt").open("ab") as screen:
        return hosts.popen(
            [sys.executable, "-m", "roxxel_dist", *hosts.launch(way), *options], cwd=folder,
            stdin=subprocess.DEVNULL, stdout=screen, stderr=subprocess.STDOUT, env=env,
        )  # fmt: skip


@pytest.mark.cluster
@pytest.mark.parametrize("at_checkpoint", [False, True])
@WAYS
def test_a_host_that_is_back_is_taken_in_again(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until, at_checkpoint: bool, way: str
) -> None:
    hosts = cluster(2)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "from roxxel_dist.process.progress import agent_pipe\n"
        "env, pipe = os.environ, agent_pipe()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "attempt, ranks = env['ROXXEL_ATTEMPT'], env['ROXXEL_NUM_PROCESSES']\n"
        "open(f'up.{attempt}.{ranks}.' + env['ROXXEL_PROCESS_ID'], 'w').close()\n"
        "while attempt != '2':\n"
        "    time.sleep(0.1)\n"
        "    if os.path.exists('save'):\n"
        "        pipe.send({'saved': 1})\n"
    )
    options = ["--grow-at-checkpoint"] if at_checkpoint else []
    launch = started(hosts, tmp_path, *options, "--", "python", program, way=way)

    def up(attempt: int, ranks: int) -> bool:
        assert launch.poll() is None, (tmp_path / "screen.txt").read_text()
        return len(list(tmp_path.glob(f"up.{attempt}.{ranks}.*"))) == ranks

    until(lambda: up(0, 2), "both hosts")
    hosts.cut("h2")
    until(lambda: up(1, 1), "one host")
    hosts.restore("h2")
    if at_checkpoint:
        time.sleep(2 * Limits().look_s)  # it is back, and no checkpoint is saved
        assert up(1, 1)
        (tmp_path / "save").touch()
    assert launch.wait(200) == 0, (tmp_path / "screen.txt").read_text()
    assert len(list(tmp_path.glob("up.2.2.*"))) == 2
    screen = (tmp_path / "screen.txt").read_text()
    assert "going on without h2: 1 of 2 devices" in screen
    assert "h2 can be used again: the ranks get 30 s to save and exit" in screen
    assert WORDS in screen
    assert "(it counts for nothing)" in screen


CONFIG: dict[str, Any] = {
    "dim": 32, "num_blocks": 2, "kv_heads": 1, "head_size": 8, "max_context": 64, "dropout_rate": 0.1, "lr": 3e-3,
    "phases": [{"steps": 120, "batch_size": 8, "seq_len": 33}, {"steps": 80, "batch_size": 4, "seq_len": 65}],
    "virtual_shards": 4, "log_every": 1, "checkpoint_every": 10, "wandb": "off",
    "eval_every": 1, "eval_iters": 2,
}  # fmt: skip


def rows(run: Path) -> list[dict[str, Any]]:
    """Those of metrics.jsonl, without what is of the time."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    names = ("step", "train_loss", "val_loss", "grad_norm", "digest")
    return [{name: json.loads(line)[name] for name in names} for line in lines]


class Training:
    """A training on hosts of a cluster that goes on with fewer of them, and the same one of one process."""

    def __init__(self, hosts: Cluster, folder: Path, config: dict[str, Any]) -> None:
        self.hosts, self.folder = hosts, folder
        self.whole, self.elastic = folder / "whole", folder / "elastic"
        tokens = np.random.default_rng(0).integers(0, 500, 1 << 16, np.uint16)
        (folder / "data").mkdir()
        Roxxel(folder / "data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        for name in (*hosts.names, CONTROLLER):
            (folder / "tmp" / name).mkdir(parents=True)
            if name != CONTROLLER:
                hosts.set_env(name, TMPDIR=str(folder / "tmp" / name))
        self._train = ["train", "--config", "config.yaml", "--data_path", "data"]
        self._options = ["--env", f"XLA_FLAGS={FAST}", "--max-restarts", 9]  # flags decide bits

    def alone(self, devices: int, *more: object) -> None:
        """All of it in one process."""
        words = ["launch", "local", *self._options, "--devices-per-proc", devices, "--", *self._train]
        done = subprocess.run(
            [sys.executable, "-m", "roxxel_dist", *map(str, (*words, "--run_dir", self.whole, *more))],
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """On all hosts, a device each."""
        options = [*self._options, "--devices-per-proc", 1, "--", *self._train, "--run_dir", self.elastic]
        self.launch = started(self.hosts, self.folder, *options, TMPDIR=str(self.folder / "tmp" / CONTROLLER))

    def screen(self) -> str:
        return (self.folder / "screen.txt").read_text()

    def passed(self, step: int) -> None:
        """Wait until it is."""
        end = time.monotonic() + 300
        while not any(row["step"] >= step for row in rows(self.elastic)):
            assert self.launch.poll() is None, self.screen()
            assert time.monotonic() < end, self.screen()
            time.sleep(0.05)

    def rank_of(self, host: str) -> psutil.Process:
        workers = [psutil.Process(pid) for pid in self.hosts.processes(host)]
        return next(
            p for p in workers if "roxxel_dist.launcher.host.worker" in p.cmdline() and p.name() != "roxxel-spare"
        )

    def restored(self, host: str, until: Until) -> None:
        """The job has its host again."""
        rank = self.rank_of("h1")
        rank.suspend()  # the rest of the steps would take less time than two looks at the host
        self.hosts.restore(host)
        until(lambda: f"{host} can be used again" in self.screen(), "the host")
        rank.resume()

    def ended(self, last: int) -> None:
        """Wait for its end; all of it has the bits of the one that was alone."""
        assert self.launch.wait(400) == 0, self.screen()
        assert [row["step"] for row in rows(self.elastic)] == list(range(1, last + 1))
        assert rows(self.elastic) == rows(self.whole)
        weights = [(run / "model_weights.msgpack").read_bytes() for run in (self.elastic, self.whole)]
        assert weights[0] == weights[1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_loses_a_host_gets_it_back_and_is_killed_twice_has_the_bits_of_one_that_was_left_alone(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    hosts = cluster(2)
    training = Training(hosts, tmp_path, CONFIG)
    training.alone(4)
    training.start()
    training.passed(30)
    training.rank_of("h2").kill()
    training.passed(70)
    hosts.cut("h2")
    training.passed(140)
    training.restored("h2", until)
    training.passed(170)
    training.rank_of("h1").kill()
    training.ended(200)
    assert "going on without h2: 1 of 2 devices" in training.screen()
    assert WORDS in training.screen()
    assert training.screen().count("signal SIGKILL") == 2


SLICES: dict[str, Any] = CONFIG | {
    "dim": 96, "hidden_dim": 840, "virtual_shards": 4, "fsdp": True,  # 2 and 3 devices cut its matrices
    "phases": [{"steps": 60, "batch_size": 8, "seq_len": 33}, {"steps": 40, "batch_size": 4, "seq_len": 65}],
}  # fmt: skip


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_slices_of_three_hosts_then_of_two_and_of_three_again_have_the_bits_of_one_process(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    hosts = cluster(3)
    training = Training(hosts, tmp_path, SLICES)
    training.alone(1)
    training.start()
    training.passed(15)
    hosts.cut("h3")
    training.passed(45)
    training.restored("h3", until)
    training.passed(75)
    training.ended(100)
    assert "going on without h3: 2 of 3 devices" in training.screen()
    assert "every rank saved and exited (42); the job continues with h3" in training.screen()
    starts = [line.split("rank 0 of ")[1][0] for line in training.screen().splitlines() if "rank 0 of " in line]
    assert [*dict.fromkeys(starts)] == ["3", "2"], starts
    assert starts[-1] == "3", starts


GROWS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
attempt, ranks = os.environ["ROXXEL_ATTEMPT"], os.environ["ROXXEL_NUM_PROCESSES"]
if os.uname().nodename in os.environ.get("BROKEN", "").split():
    sys.exit("this host is broken")
open(f"up.{attempt}.{ranks}." + os.environ["ROXXEL_PROCESS_ID"], "w").close()
while not os.path.exists("end"):
    time.sleep(0.1)
"""


def until_up(launch: subprocess.Popen[bytes], folder: Path, until: Until) -> Callable[[int, int], None]:
    def is_up(attempt: int, ranks: int) -> bool:
        assert launch.poll() is None, (folder / "screen.txt").read_text()
        return len(list(folder.glob(f"up.{attempt}.{ranks}.*"))) == ranks

    return lambda attempt, ranks: until(lambda: is_up(attempt, ranks), f"{ranks} ranks in attempt {attempt}")


@pytest.mark.cluster
@WAYS
def test_a_job_starts_without_a_host_that_is_down_and_one_that_comes_and_goes_costs_no_wait(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until, way: str
) -> None:
    hosts = cluster(2)
    (tmp_path / "program.py").write_text(GROWS)
    hosts.cut("h2")
    launch = started(hosts, tmp_path, "--host-timeout", 1000, "--", "python", tmp_path / "program.py", way=way)
    up = until_up(launch, tmp_path, until)
    up(0, 1)
    hosts.restore("h2")
    up(1, 2)
    hosts.cut("h2")
    up(2, 1)
    (tmp_path / "end").touch()
    assert launch.wait(200) == 0, (tmp_path / "screen.txt").read_text()
    screen = (tmp_path / "screen.txt").read_text()
    assert "host h2 cannot be used: " in screen
    assert screen.count("going on without h2: 1 of 2 devices") == 2
    assert "h2 can be used again: the ranks get 30 s to save and exit" in screen


@pytest.mark.cluster
@WAYS
def test_a_host_on_which_the_program_fails_is_not_kept(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until, way: str
) -> None:
    hosts = cluster(2)
    (tmp_path / "program.py").write_text(GROWS)
    hosts.cut("h2")
    options = ["--env", "BROKEN=h2", "--max-restarts", 1]
    launch = started(hosts, tmp_path, *options, "--", "python", tmp_path / "program.py", way=way)
    up = until_up(launch, tmp_path, until)
    up(0, 1)
    hosts.restore("h2")
    up(2, 1)
    (tmp_path / "end").touch()
    assert launch.wait(200) == 0, (tmp_path / "screen.txt").read_text()
    screen = (tmp_path / "screen.txt").read_text()
    assert "this host is broken" in screen
    assert "the job goes on without h2, as before; restart immediately (it counts for nothing)" in screen


def fake_package(folder: Path, name: str) -> str:
    (folder / name / f"{name}-0.0.1.dist-info").mkdir(parents=True)
    return f"{folder / name}:{ROOT}"


LOOKS_OFTEN = """
import sys
from roxxel_dist.launcher.fleet import looks
from roxxel_dist.cli import main
looks.LOOK_MOST_S = 0.0
sys.exit(main(sys.argv[1:]))
"""
HANGS = "import sys, time\nif any('agent' in word for word in sys.orig_argv):\n    time.sleep(1000)\n"


@pytest.mark.cluster
@pytest.mark.timeout(1200)
@WAYS
def test_a_host_that_comes_back_unfit_is_named_once_and_costs_the_job_nothing(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until, way: str
) -> None:
    hosts = cluster(3)
    tokens = np.random.default_rng(0).integers(0, 500, 1 << 14, np.uint16)
    (tmp_path / "data").mkdir()
    Roxxel(tmp_path / "data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
    config = {**CONFIG, "phases": [{"steps": 100000, "batch_size": 6, "seq_len": 33}]}
    del config["virtual_shards"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "runs").mkdir()
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "sitecustomize.py").write_text(HANGS)
    (tmp_path / "started.py").write_text(LOOKS_OFTEN)

    def found(path: str) -> Callable[[], None]:
        return lambda: hosts.set_env("h3", PYTHONPATH=path)

    def firewall(action: str) -> Callable[[], None]:
        rules = ("INPUT -p tcp --dport 22 -j ACCEPT", "INPUT -m state --state ESTABLISHED -j ACCEPT", "INPUT -j DROP")

        def change() -> None:
            for rule in rules if action == "-A" else rules[::-1]:
                hosts.change("h3", "iptables", action, *rule.split())

        return change

    runs, data = str(tmp_path / "runs"), str(tmp_path / "data")
    unfit: list[tuple[Callable[[], None], Callable[[], None], str]] = [
        (found(fake_package(tmp_path, "jax")), found(str(ROOT)), "from time to time: jax differs: "),
        (found(fake_package(tmp_path, "flax")), found(str(ROOT)), "from time to time: flax differs: "),
        (lambda: hosts.tmpfs("h3", runs, "50m"), lambda: hosts.unmount("h3", runs), "on h3 is not the folder that h1"),
        (lambda: hosts.tmpfs("h3", runs, "64k"), lambda: hosts.unmount("h3", runs), "free, and 0.2 MiB is the least"),
        (lambda: hosts.tmpfs("h3", data, "1m"), lambda: hosts.unmount("h3", data), "h3: the data"),
        (firewall("-A"), firewall("-D"), "not reach h3 at "),
        (found(str(tmp_path / "hangs")), found(str(ROOT)), "it did not answer within 60 s"),
    ]

    def screen() -> str:
        assert launch.poll() is None, (tmp_path / "screen.txt").read_text()
        return (tmp_path / "screen.txt").read_text()

    hosts.cut("h3")
    words = [*hosts.launch(way), "--min-hosts", 2]
    words += ["--step-timeout", 10000, "--devices-per-proc", 1, "--warm-spares", "off", "--"]
    words += ["train", "--config", "config.yaml", "--data_path", "data", "--run_dir", "runs/one"]
    with (tmp_path / "screen.txt").open("ab") as output:
        launch = hosts.popen(
            [sys.executable, "started.py", *words], cwd=tmp_path, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    ranks: list[psutil.Process] = []

    def wait(condition: Callable[[], Any], what: str) -> None:
        """The ranks stand still meanwhile, but for a moment now and then, or jax would give them up."""
        end, moment = time.monotonic() + 400, time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, f"{what}:\n{screen()}"
            time.sleep(0.2)
            if time.monotonic() > moment:
                for number in (signal.SIGCONT, signal.SIGSTOP) if ranks else ():
                    for rank in ranks:
                        rank.send_signal(number)
                    time.sleep(1)
                moment = time.monotonic() + 10

    run = tmp_path / "runs" / "one"
    wait(lambda: rows(run), "a step")
    ranks += [
        process
        for host in ("h1", "h2")
        for process in map(psutil.Process, hosts.processes(host))
        if "roxxel_dist.launcher.host.worker" in process.cmdline()
    ]
    for rank in ranks:
        rank.suspend()
    for apply, undo, words in unfit:
        apply()
        hosts.restore("h3")
        wait(lambda words=words: words in screen(), words)
        hosts.cut("h3")
        undo()
    assert "can be used again" not in screen()
    for words in (words for *_, words in unfit):
        assert screen().count(words) == 1, screen()
    hosts.restore("h3")
    wait(lambda: "h3 can be used again: the ranks get 30 s" in screen(), "the host")
    assert all(rank.is_running() for rank in ranks), "those of the start"
    while ranks:
        ranks.pop().resume()
    wait(lambda: "every rank saved and exited (42); the job continues with h3" in screen(), "the growth")
    wait(lambda: "rank 0 of 3: 1 of 3 cpu devices" in screen(), "three ranks")
    launch.send_signal(signal.SIGINT)
    assert launch.wait(200) in (42, 130), (tmp_path / "screen.txt").read_text()
