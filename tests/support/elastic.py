"""A real training whose hosts join and leave it at random: what comes out is, to the bit, what one host gives.

python tests/support/elastic.py [--changes 100] [--minutes N] [--seed N] [--folder DIR]

A change rewrites the list of hosts (in one piece or in two), or is a `join` or a `leave`. The next one comes when the
hosts that are wanted work, and have done a step. No step may be repeated, and nothing may be left on any host.
"""

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chaos_training import Training, last_state, left_behind, prepare
from hosts import Cluster

from roxxel_dist.launcher.fleet.state import Wanted

LIMIT_S = 400.0
# Found by every rank: the steps of a job that waits for hosts are to leave the cores to others.
SLOW = """
import sys, time
from roxxel_dist.process.progress import Progress
enter = Progress.enter
def slowly(self, *step):
    if not any(word.endswith("/alone") for word in sys.orig_argv):
        time.sleep(0.05)
    enter(self, *step)
Progress.enter = slowly
"""
# Found by the launcher: a host that comes and goes is not held back, or the job would soon change no more.
EAGER = """
from roxxel_dist.launcher.fleet import state
state.HOLD_S = 0.0
"""
CONFIG = """
dim: 16
num_blocks: 1
kv_heads: 1
head_size: 8
max_context: 64
dropout_rate: 0.1
phases:
  - {steps: 1000000, batch_size: 8, seq_len: 33}
virtual_shards: 8
lr: 3.0e-3
log_every: 1
eval_every: 1000000
checkpoint_every: 100000
max_to_keep: 100000
wandb: "off"
"""


@dataclass(kw_only=True)
class Summary:
    """What happened."""

    kinds: Counter[str] = field(default_factory=Counter)
    changes: list[float] = field(default_factory=list)
    """Seconds from each change to the first step with the hosts that it asked for."""
    steps: int = 0
    attempts: int = 0
    repeated: list[str] = field(default_factory=list)
    """Restarts that began before the last step."""
    lost_saves: list[int] = field(default_factory=list)
    """Steps at which the ranks left, and of which no checkpoint is there."""
    same: bool = False
    """Whether all rows, and the last state, are those of one host."""
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        times, left = sorted(self.changes), self.left or "nothing"
        return (
            f"{len(times)} changes ({dict(self.kinds)}), {self.attempts} attempts, {self.steps} steps; a change took "
            f"{times[len(times) // 2]:.1f} s (median; {times[-1]:.1f} s at most); "
            f"repeated: {self.repeated or 'nothing'}; saves lost: {self.lost_saves or 'none'}; same bits: {self.same}; "
            f"left: {left}"
        )


class Elastic(Training):
    """One run on the hosts of `hosts.txt`."""

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it."""
        options = ["--min-hosts", 1, "--devices-per-proc", 1, "--max-restarts", 9]
        train = ["train", "--config", "elastic.yaml", "--data_path", "data", "--run_dir", self.folder]
        return self.start(options, train, ["--hosts-from", self._work / "hosts.txt"])

    def working(self) -> list[str]:
        """The hosts that have ranks by the record of the job."""
        with suppress(OSError, ValueError):
            record = json.loads((self.folder / "logs" / "launcher.json").read_text())
            return sorted({rank["host"] for rank in record["ranks"]} if record["state"] == "running" else [])
        return []

    def ask(self, command: str, hosts: Sequence[str]) -> None:
        """`join` or `leave`."""
        words = [sys.executable, "-m", "roxxel_dist", command, self.folder, "--hosts", ",".join(hosts)]
        result = self._hosts.run(words, cwd=self._work, timeout=LIMIT_S)
        if result.returncode:
            raise AssertionError(result.stderr)

    def alone(self, steps: int) -> "Training":
        """The same run with one host, undisturbed, to that step."""
        other = Elastic(self._hosts, self._work, "alone")
        train = ["train", "--config", "elastic.yaml", "--data_path", "data", "--run_dir", other.folder]
        options = ["--devices-per-proc", 1]
        process = other.start(options, [*train, "--max_steps", steps], ["--hosts", self._hosts.names[0]])
        if process.wait():
            raise AssertionError(other.screen.read_text())
        return other


def write(path: Path, hosts: Sequence[str], rng: random.Random) -> None:
    """Write a list in one piece, or in two with a pause, as an editor or a slow disk does."""
    text = "".join(f"{host}\n" for host in hosts)
    if rng.random() < 0.5:
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)
        return
    cut = rng.randrange(len(text))
    with path.open("w") as file:
        file.write(text[:cut])
        file.flush()
        time.sleep(rng.random() * 0.3)
        file.write(text[cut:])


def change(run: Elastic, work: Path, wanted: Wanted, rng: random.Random, names: Sequence[str]) -> tuple[str, Wanted]:
    """Let hosts join or leave; the kind of change, and which hosts are wanted then."""
    while True:
        goal = rng.sample(names, rng.randint(1, len(names)))
        if {*goal} == {*wanted.hosts}:
            continue
        joins = [host for host in goal if host not in wanted.hosts]
        leaves = [host for host in wanted.hosts if host not in goal]
        match rng.choice(("list", "join", "leave")):
            case "join" if joins:
                run.ask("join", joins)
                return "join", wanted.with_join(joins)
            case "leave" if leaves and len(leaves) < len(wanted.hosts):
                run.ask("leave", leaves)
                return "leave", wanted.with_leave(leaves)
            case "list" if {*wanted.with_list(goal).hosts} not in ({*wanted.hosts}, set()):
                write(work / "hosts.txt", goal, rng)
                return "list", wanted.with_list(goal)
            case _:
                continue


def wait(condition: Callable[[], bool], run: Elastic, process: "subprocess.Popen[bytes]") -> float:
    """Wait until a condition holds; when it did."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(run.screen.read_text()[-4000:])
        time.sleep(0.05)
    return time.monotonic()


def elastic(
    hosts: Cluster,
    work: Path,
    changes: int,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
    limit_s: float = math.inf,
) -> Summary:
    """Train while hosts join and leave so often, for `limit_s` at most, and compare it with an undisturbed run."""
    end = time.monotonic() + limit_s
    rng, summary = random.Random(seed), Summary()
    prepare(work, hosts, 10)
    (work / "elastic.yaml").write_text(CONFIG)
    (work / "site" / "sitecustomize.py").write_text(SLOW)
    (work / "launcher-site").mkdir()
    (work / "launcher-site" / "sitecustomize.py").write_text(EAGER)
    wanted = Wanted(given=(), listed=(hosts.names[0],))
    write(work / "hosts.txt", wanted.listed, rng)
    run = Elastic(hosts, work, "elastic")
    process = run.launch()
    wait(lambda: run.step > 1, run, process)
    for number in range(changes):
        if time.monotonic() > end:
            break
        kind, wanted = change(run, work, wanted, rng, hosts.names)
        begun = time.monotonic()
        goal = sorted(wanted.hosts)
        wait(lambda goal=goal: run.working() == goal, run, process)
        step = run.step
        summary.changes.append(wait(lambda step=step: run.step > step, run, process) - begun)
        summary.kinds[kind] += 1
        say(f"{number + 1}: {kind} -> {','.join(goal)}, step {run.step}, {summary.changes[-1]:.1f} s")
    stop = hosts.run([sys.executable, "-m", "roxxel_dist", "stop", run.folder], cwd=work, timeout=LIMIT_S)
    if stop.returncode or process.wait(LIMIT_S) != 42:
        raise AssertionError(stop.stderr + run.screen.read_text()[-4000:])
    judge(run, hosts, work, summary)
    return summary


def judge(run: Elastic, hosts: Cluster, work: Path, summary: Summary) -> None:
    """What became of the run."""
    summary.left = left_behind(work, hosts) + [
        f"{host}: {pid}" for host in hosts.names for pid in hosts.processes(host)
    ]
    rows, summary.steps = run.rows(), run.step
    screen = run.screen.read_text()
    saved = [int(step) for step in re.findall(r"asked to stop: step (\d+) is saved", screen)]
    resumed = [int(step) for step in re.findall(r"resuming after step (\d+) ", screen)]
    summary.attempts = len(saved)  # each ends by a stop, the last one too
    summary.repeated = [f"{after} after {step}" for step, after in zip(saved, resumed, strict=False) if step != after]
    if len(resumed) != len(saved) - 1:
        summary.repeated.append(f"{len(resumed)} restarts after {len(saved)} saves")
    there = {int(path.name) for path in (run.folder / "checkpoints").iterdir() if path.name.isdecimal()}
    summary.lost_saves = [step for step in saved if step not in there]
    alone = run.alone(summary.steps)
    same_state = last_state(run.folder, summary.steps) == last_state(alone.folder, summary.steps)
    others = alone.rows()
    for found in (rows, others):
        del found[summary.steps]  # the end of a run is validated, and a stop is not
    summary.same = rows == others and same_state


def main() -> int:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="roxxel-elastic-"))
    folder.mkdir(exist_ok=True)
    print(f"seed {args.seed}, in {folder}", flush=True)
    with Cluster(args.hosts) as hosts:
        say = partial(print, flush=True)
        summary = elastic(hosts, folder, args.changes, args.seed, say, 60 * args.minutes)
    print(summary)
    return 0 if summary.same and not (summary.left or summary.repeated or summary.lost_saves) else 1


if __name__ == "__main__":
    sys.exit(main())
