"""A restart of a run against its cold start, and a job's ranks killed with -9: whole processes of the command line.

python benchmarks/train_restart.py [--kills N] [--every SECONDS] [--ssh] [--lose-host] [FOLDER]

With --kills the kills alone: the time from each to the first new step, and where it went on each rank. With --ssh the
ranks are on two hosts, which are network namespaces with an sshd each (as root); with --lose-host the cable of one of
them is pulled instead, and a third host takes its place.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]  # this checkout, and the hosts of its tests

from hosts import Cluster
from measure import Result, table

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.launcher.job.spec import Limits

ROUNDS = 2
LIMIT_S = 300.0
MODELS = {
    "demo's model": ["--dim", "128", "--num_blocks", "4"],
    "14 blocks": ["--dim", "128", "--num_blocks", "14"],
}
"""The one of `make demo`, and a deeper one."""
CONFIG = """
phases:
  - {steps: 320, batch_size: 16, seq_len: 129}
  - {steps: 80, batch_size: 8, seq_len: 257}
log_every: 1
eval_every: 1000
checkpoint_every: 4
"""


DEMO = HERE.parent / "roxxel_dist" / "demo.yaml"
KILLS, KILL_EVERY_S, FIRST_KILL = 10, 30.0, 25
SETTLED_S = 0.5
"""After a kill: then no row of the ranks before comes any more, and none of the new ones has come."""
SENT = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "RESTART_MARKS")
"""Variables of the ranks on other hosts."""
ENDLESS = "[{steps: 1000000, batch_size: 16, seq_len: 129}]"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", nargs="?", metavar="FOLDER")
    flags.add_argument("--kills", type=int, default=0, metavar="N")
    flags.add_argument("--ssh", action="store_true")
    flags.add_argument("--lose-host", action="store_true")
    flags.add_argument("--every", type=float, default=KILL_EVERY_S, metavar="SECONDS")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if not (given.kills or given.lose_host):
            print(table(restarts(Path(folder))))
            return
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(Cluster(2 + given.lose_host)) if given.ssh or given.lose_host else None
            job = KilledJob(Path(folder), given.kills, hosts)
            print(table(job.losses() if given.lose_host else job.results(given.every)))
            print(job.places())


def kills(folder: Path, count: int = KILLS) -> Iterable[Result]:
    """The first new step after a kill -9 of a rank, of two with the demo's model."""
    return KilledJob(folder, count).results(KILL_EVERY_S)


class KilledJob:
    """A launch of two ranks of the demo's model, here or on two hosts, whose ranks are killed in turns."""

    def __init__(self, folder: Path, count: int, hosts: Cluster | None = None) -> None:
        self._folder, self._count = folder.absolute(), count  # the ranks run in it
        self._run_id, self._hosts = f"kills_{os.getpid()}", hosts
        self._marks = self._folder / "marks"
        self._places: dict[tuple[int, str], list[tuple[float, float]]] = collections.defaultdict(list)
        """(seconds since the kill, CPU seconds of the process) by rank and place."""

    def results(self, every_s: float) -> Iterable[Result]:
        """The kills, so many seconds apart."""
        load, taken, imported = os.getloadavg()[0], [], []
        with self._running() as process:
            self._wait_row(process, FIRST_KILL)
            for number in range(1 + self._count):  # before the first one spare processes are not ready
                begun = time.monotonic()
                ranks = self._ranks()
                killed = time.monotonic()
                os.kill(ranks[number % 2], signal.SIGKILL)
                time.sleep(SETTLED_S)
                self._wait_row(process, self._last_row() + 1)
                taken.append(time.monotonic() - killed)
                imported.append(self._read_marks(killed, set(ranks.values())))
                if not number:
                    self._places.clear()
                print(f"  kill {number}: {taken[-1]:.2f} s, all imported {imported[-1]:.2f} s", file=sys.stderr)
                time.sleep(max(0.0, every_s - (time.monotonic() - begun)))
        where = "2 ranks" if self._hosts is None else "2 hosts by ssh"
        limit = 2.5 if self._hosts is None else 4.0
        what, note = f"kill -9 of a rank to the first new step, demo's model, {where}", f"load {load:.1f} at the start"
        yield Result(what=f"{what}, no spares ready", against="s, one kill", measured=taken.pop(0), note=note)
        yield Result(what=what, against="s, median", measured=statistics.median(taken), note=note)
        most = sorted(taken)[-(-95 * len(taken) // 100) - 1]
        yield Result(what=what, against=f"s, p95 of {len(taken)}", measured=most, target=limit, at_most=True, note=note)
        what = "of that, until Python and its imports are there on both ranks"
        yield Result(what=what, against="s, median", measured=statistics.median(imported[1:]), note=note)

    def places(self) -> str:
        """A table of where the time went: medians by rank, seconds since the kill and CPU seconds of the process."""
        lines = [f"{'rank':>4}  {'since the kill':>14}  {'CPU':>6}  place"]
        for (rank, what), times in sorted(self._places.items(), key=lambda item: (item[0][0], min(item[1]))):
            since, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            lines.append(f"{rank:>4}  {since:>14.2f}  {cpu:>6.2f}  {what}")
        return "\n".join(lines)

    @contextlib.contextmanager
    def _running(self) -> Iterator["subprocess.Popen[bytes]"]:
        """The launch, from its start to its end by SIGINT."""
        self._marks.mkdir()
        process = self._launch()
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _launch(self) -> "subprocess.Popen[bytes]":
        tokens = np.random.default_rng(0).integers(0, 2048, 1 << 22, np.uint16)
        Roxxel(self._folder / "corpus.rox").write([tokens], separator=None, vocab_size=2048)
        path = os.pathsep.join([str(HERE / "restart_marks"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(self._folder / "cache")}
        env |= {"PYTHONPATH": path, "RESTART_MARKS": str(self._marks)}
        words: list[object] = ["launch", "local", "--nprocs", 2]
        if self._hosts is not None:
            words = ["launch", "ssh", "--hosts", ",".join(self._hosts.names), "--ssh-config", self._hosts.ssh_config]
            words += ["--spare-hosts", len(self._hosts.names) - 2]
        words += ["--devices-per-proc", 2, "--max-restarts", self._count + 2, "--run-id", self._run_id, "--"]
        words += ["train", "--config", DEMO, "--data_path", "corpus.rox", "--run_dir", "run", "--resume"]
        words += ["--phases", ENDLESS, "--log_every", 1, "--eval_every", 1000000, "--checkpoint_every", 10]
        command = [sys.executable, "-m", "roxxel_dist", *map(str, words)]
        with (self._folder / "log").open("wb") as log:
            if self._hosts is None:
                return subprocess.Popen(
                    command, cwd=self._folder, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT
                )
            path = os.pathsep.join([str(HERE / "restart_marks"), str(HERE.parent)])
            for host in self._hosts.names:
                self._hosts.set_env(host, **{name: env[name] for name in SENT}, PYTHONPATH=path)
            return self._hosts.popen(command, cwd=self._folder, env=env, stdout=log, stderr=subprocess.STDOUT)

    def _last_row(self) -> int:
        file = self._folder / "run" / "metrics.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def _wait_row(self, process: "subprocess.Popen[bytes]", step: int) -> None:
        end = time.monotonic() + LIMIT_S
        while self._last_row() < step:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"step {step} did not come:\n{(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.005)

    def _ranks(self) -> dict[int, int]:
        """The pids of the ranks that train now; spare processes are not among them."""
        words = [sys.executable, "-m", "roxxel_dist", "ps", "--json"]
        jobs = json.loads(self._run(words).stdout)
        return {rank["rank"]: rank["pid"] for job in jobs if job["run_id"] == self._run_id for rank in job["ranks"]}

    def _run(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        if self._hosts is not None:
            return self._hosts.run(words, check=True)
        return subprocess.run(words, capture_output=True, check=True, text=True)

    def losses(self) -> Iterable[Result]:
        """The cable of the second host is pulled, and the third one takes its place."""
        assert self._hosts is not None
        with self._running() as process:
            self._wait_row(process, FIRST_KILL)
            time.sleep(KILL_EVERY_S)
            before, cut = self._last_row(), time.monotonic()
            self._hosts.cut(self._hosts.names[1])
            time.sleep(SETTLED_S)
            last = self._last_row()
            self._wait_row(process, last + 1)
            taken = time.monotonic() - cut
        again = re.findall(r"(resuming after .*)", (self._folder / "log").read_text(errors="replace"))
        note = f"step {before} at the cut; {again[-1] if again else 'no resume'}"
        what = "cable of a host pulled to the first new step, with a spare host"
        limit = Limits().silent_s + 5.0
        yield Result(what=what, against="s", measured=taken, target=limit, at_most=True, note=note)

    def _read_marks(self, killed: float, before: set[int]) -> float:
        """Keep the places of the new ranks; returns when the last of them had all imported."""
        imported = 0.0
        for rank, pid in self._ranks().items():
            if pid in before:
                continue
            for line in (self._marks / str(pid)).read_text(encoding="utf-8").splitlines():
                mark = json.loads(line)  # of a spare process some are from before the kill
                self._places[rank, mark["what"]].append((mark["time"] - killed, mark["cpu"]))
                if mark["what"] == "all imported":
                    imported = max(imported, mark["time"] - killed)
        return imported


def restarts(folder: Path, rounds: int = ROUNDS) -> Iterable[Result]:
    """Cold starts and restarts in turns; what a killed run had cached and saved is what its restart finds."""
    data, config = folder / "corpus.rox", folder / "config.yaml"
    tokens = np.random.default_rng(0).integers(0, 2048, 1 << 20, np.uint16)
    Roxxel(data).write([tokens], separator=None, vocab_size=2048)
    config.write_text(CONFIG, encoding="utf-8")
    for name, model in MODELS.items():
        cold, warm = [], []
        for number in range(rounds):
            run, cache = folder / f"run-{len(name)}-{number}", folder / f"cache-{len(name)}-{number}"
            command = [sys.executable, "-m", "roxxel_dist", "train", "--config", config, "--data_path", data]
            command += ["--run_dir", run, "--resume", *model]
            cold.append(seconds_to_first_row(command, cache, run, until_saved=8))
            warm.append(seconds_to_first_row(command, cache, run))
        what, median = f"restart to its first step, {name}", statistics.median
        yield Result(
            what=what, against="x the cold start", measured=median(warm) / median(cold), target=0.35, at_most=True
        )
        yield Result(what=what, against="s", measured=median(warm))
        yield Result(what=f"cold start to its first step, {name}", against="s", measured=median(cold))


def seconds_to_first_row(command: list[object], cache: Path, run: Path, until_saved: int = 0) -> float:
    """Seconds until a new process has logged a step; it is killed when the checkpoint of `until_saved` is there."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said = []
        for line in process.stdout or ():
            said.append(line)
            if line.startswith("Step"):
                break
        else:
            raise RuntimeError(f"the run ended before its first step:\n{''.join(said)}")
        taken = time.perf_counter() - start
        while until_saved and not (run / "checkpoints" / str(until_saved)).is_dir():
            if time.perf_counter() - start > LIMIT_S or process.poll() is not None:
                raise RuntimeError(f"step {until_saved} was not saved within {LIMIT_S:.0f} s")
            time.sleep(0.05)
        return taken
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
