"""A real training on real hosts under random faults: what comes out is, to the bit, what an undisturbed run gives.

python tests/support/chaos.py [--faults 30] [--seed N] [--kinds KIND,KIND] [--way ssh] [--folder DIR]

Faults come in the middle of steps, saves and validations, and while the job still starts again after the one before.
What a person would do is done too: a launch that ended is made again, and a host that came back unfit is repaired.
Every row that was ever logged, the last state and the exit codes are compared, and nothing may be left on any host.
Signals go to processes in the network namespaces of the hosts alone.
"""

import argparse
import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos_faults import KINDS, STEPS_A_FAULT, Fault, choose
from chaos_injector import Injector
from chaos_training import Training, last_state, left_behind, prepare
from hosts import CONTROLLER, Cluster

from roxxel_dist.process.exit_codes import EXIT_USAGE
from roxxel_dist.view.run import RunReader

STALL_S = 240.0
"""A job that makes no new step for so long hangs: that is longer than any pause before a restart, and a start."""
HITS_S = 120.0
"""A fault that finds nothing to hit for so long is left out; the training is slowed down until then."""
EARLY = 0.75
"""All faults come within this share of the steps: the rest is for waits, in which the training goes on slowly."""
GONE_S, LEASH_S = 5.0, 80.0
"""Of processes when their launcher has ended; and where a host was out of reach, or an agent stopped, just before: the
ranks live on for --host-lease (60 s) where no host hears the launcher."""
UNREADY = 69
ASKED = {"SIGTERM", "SIGUSR1", "SIGHUP", "Ctrl-C twice", "stop data workers", "kill launcher while it drains"}
"""Kinds after which the ranks stop and save."""
WHILE_STOPPING = {1, 76, 77, 134, 137}
"""What a launch may end with if another fault hits it while its ranks stop and save."""
GIVEN_UP = ("roxxel-dist: not started again: no rank", "roxxel-dist: not started again: rank")
UNSAVED = "could not be saved"
POLL_S = 0.01
MAY_BE_SAID = 100
"""Characters of a line in the table."""


@dataclass(kw_only=True)
class Outcome:
    """What became of a fault, until the next one came."""

    number: int
    fault: Fault
    hit: str
    at: float
    """Seconds since the begin."""
    step: int
    """The newest one that was logged then."""
    said: list[str] = field(default_factory=list)
    """By the launcher."""
    followed: list[str] = field(default_factory=list)
    after: int = 0
    """The newest step when the last of these came."""
    recovery_s: float | None = None
    """From the fault to the second new step after all that followed: the first may have been under way."""

    def __str__(self) -> str:
        said = [line[:MAY_BE_SAID] + "…" * (len(line) > MAY_BE_SAID) for line in self.said] or ["nothing"]
        took = "the next fault came first" if self.recovery_s is None else f"{self.recovery_s:.1f} s"
        lines = [f"{self.number}: {self.fault.kind} ({self.hit}) at {self.at:.1f} s, after step {self.step}"]
        lines += [f"    {'said:' if line is said[0] else '':9} {line}" for line in said]
        lines += [f"    followed: {'; '.join(self.followed) or 'nothing, it went on'}", f"    recovery: {took}"]
        return "\n".join(lines)


@dataclass(kw_only=True)
class Summary:
    """What happened; `str` is for people."""

    outcomes: list[Outcome] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Kinds of faults that found nothing to hit."""
    codes: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    redone: int = 0
    attempts: int = 0
    gone_s: float = 0.0
    leash_s: float = 0.0
    seconds: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds by kind, from the timeline of the run."""

    @property
    def faults(self) -> Counter[str]:
        """How often each kind came."""
        return Counter(outcome.fault.kind for outcome in self.outcomes)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        codes = ", ".join(f"{code} ({count})" for code, count in sorted(self.codes.items()))
        times = ", ".join(f"{kind} {took / self.seconds:.0%}" for kind, took in self.spent.items())
        left_out = f"; nothing to hit for: {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"{len(self.outcomes)} faults ({kinds}){left_out} in {self.seconds:.0f} s; {self.codes.total()} launches, "
            f"which ended with {codes}; {self.steps} steps, resumed {self.attempts} times, and at least {self.redone} "
            f"of them done again; no process left {self.gone_s:.2f} s after a launcher's end, and {self.leash_s:.2f} s "
            f"where a host was cut off or an agent stopped. Of the time: {times}. Every row and the last state are as "
            "if nothing had been."
        )


class Chaos:
    """Brings faults upon a training, and launches it again where a person would.

    Args:
        hosts: where it runs.
        training: was not launched yet.
        work: its folder, as `prepare` has made it.
        wanted: the rows of the undisturbed run.
        say: where a line for people goes.
    """

    def __init__(
        self,
        hosts: Cluster,
        training: Training,
        work: Path,
        wanted: dict[int, str],
        say: Callable[[str], None] = print,
    ) -> None:
        self._hosts, self._training, self._wanted, self._say = hosts, training, wanted, say
        self._injector = Injector(hosts, training, work, self._note)
        self.summary = Summary(steps=len(wanted))
        self._begun = time.monotonic()
        self._slow_until = 0.0
        """Until then a host may be out of reach, or an agent stopped."""
        self._unready_until = 0.0
        self._codes: set[int] = set()
        self._kinds: set[str] = set()
        self._given_up = False
        self._told = 0
        self._newest, self._moved = 0, time.monotonic()
        self._process = training.launch()

    def run(self, faults: Sequence[Fault]) -> None:
        """All faults, one after the other, and then to the end of the training."""
        for number, fault in enumerate(faults, 1):
            step, begun = max(2, int(fault.place * EARLY * self.summary.steps)), time.monotonic()
            while self._newest < step and time.monotonic() < begun + fault.seconds:
                assert not self._tend(), f"the training was over before fault {number}: it needs more steps"
            self._inject(number, fault)
            while self._injector.is_slowed:
                assert not self._tend(), f"the training was over in fault {number}: it needs more steps"
        while not self._tend():
            pass
        while self._injector.undo:  # a host that is not back yet
            self._undo()
        if self.summary.outcomes:
            self._say(f"fault {self.summary.outcomes[-1]}")
        self.summary.seconds = time.monotonic() - self._begun

    def close(self) -> None:
        """End the launcher, and with it all ranks, where the run was left early."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(90)

    def _inject(self, number: int, fault: Fault) -> None:
        end = time.monotonic() + HITS_S
        while not (hit := self._injector.inject(fault, self._process)):
            self._injector.is_slowed = True
            assert not self._tend(), f"the training was over before fault {number}: it needs more steps"
            if time.monotonic() > end:
                self._note(f"fault {number}: {fault.kind} finds nothing to hit")
                self.summary.left_out.append(fault.kind)
                self._injector.release()
                return
        if not KINDS[fault.kind].alone:
            self._injector.release()
        kind, now, step = KINDS[fault.kind], time.monotonic(), self._training.step
        if self.summary.outcomes:
            self._say(f"fault {self.summary.outcomes[-1]}")
        outcome = Outcome(number=number, fault=fault, hit=hit, at=now - self._begun, step=step, after=step)
        self.summary.outcomes.append(outcome)
        self._note(f"fault {number}: {fault.kind}: {hit}, after step {step}")
        self._codes |= set(kind.codes)
        self._kinds.add(fault.kind)
        undone = max((undo.when for undo in self._injector.undo), default=now)
        if kind.lasts[1] or fault.kind == "stop agent":
            self._slow_until = max(self._slow_until, undone + LEASH_S)
        if kind.unready:
            self._unready_until = max(self._unready_until, undone + LEASH_S)
        self._moved = time.monotonic()

    def _follow(self, text: str) -> None:
        """Something followed that stopped the steps for a while."""
        if self.summary.outcomes:
            outcome = self.summary.outcomes[-1]
            outcome.followed.append(text)
            outcome.after, outcome.recovery_s = self._newest, None

    def _undo(self) -> None:
        for text in self._injector.tend(time.monotonic()):
            self._note(text)

    def _tend(self) -> bool:
        """Do what is due now; whether the training is over."""
        time.sleep(POLL_S)
        now = time.monotonic()
        self._undo()
        self._echo()
        if (step := self._training.step) > self._newest:
            self._newest, self._moved = step, now
            outcome = self.summary.outcomes[-1] if self.summary.outcomes else None
            if outcome is not None and outcome.recovery_s is None and step > outcome.after + 1:
                outcome.recovery_s = now - self._begun - outcome.at
        assert now - self._moved < STALL_S, f"no new step for {STALL_S:g} s\n{self._tail()}"
        if (code := self._process.poll()) is None:
            return False
        self._echo()
        self._on_end(code)
        if code != 0:
            self._process = self._training.launch()
            self._follow(f"the launch ended with {code}, and was made again")
        return code == 0

    def _on_end(self, code: int) -> None:
        self.summary.codes[code] += 1
        gone_s = self._wait_gone()
        slow = time.monotonic() - gone_s < self._slow_until
        if slow:
            self.summary.leash_s = max(self.summary.leash_s, gone_s)
        else:
            self.summary.gone_s = max(self.summary.gone_s, gone_s)
        self._note(f"the launch ended with {code}; {gone_s:.2f} s later nothing of it is left; {self._check_rows()}")
        fine = code in self._codes | {0} or self._given_up
        unready = time.monotonic() < self._unready_until + gone_s
        # A rank that fails, or loses the others, while they stop and save; nothing is started again after a request.
        asked, disturbed = self._kinds & ASKED, self._kinds - ASKED or self._injector.is_staged
        # A launch that is made while its folder is read-only says so, by what it would write first, and begins nothing.
        refused = code == UNREADY or (code == EXIT_USAGE and os.strerror(errno.EROFS) in self._tail())
        fine = fine or (unready and refused) or (bool(asked and disturbed) and code in WHILE_STOPPING)
        assert fine, f"no fault explains the code {code}\n{self._tail()}"
        self._codes, self._kinds, self._given_up = set(), set(), False

    def _wait_gone(self) -> float:
        """Seconds until nothing runs on any host."""
        begun = time.monotonic()
        limit = LEASH_S if begun < self._slow_until else GONE_S
        while left := {name: pids for name in (*self._hosts.names, CONTROLLER) if (pids := self._left_on(name))}:
            assert time.monotonic() - begun < limit, f"still there {limit:g} s after the launcher's end: {left}"
            self._undo()
            time.sleep(POLL_S)
        return time.monotonic() - begun

    def _left_on(self, name: str) -> list[str]:
        found = []
        for pid in self._hosts.processes(name):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if pid != self._process.pid:
                    found.append(f"{pid} {words[:120]}")
        return found

    def _check_rows(self) -> str:
        rows = self._training.rows()
        for step, row in rows.items():
            assert row == self._wanted[step], f"step {step} is another one\n{row}\n{self._wanted[step]}"
        return f"{len(rows)} rows are right"

    def _echo(self) -> None:
        """Show what the launcher says of itself."""
        data = self._training.screen.read_bytes()[self._told :]
        whole = data[: data.rfind(b"\n") + 1]
        self._told += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith("roxxel-dist: "):
                said = line.removeprefix("roxxel-dist: ")
                self._note(f"    {said}")
                if self.summary.outcomes:
                    self.summary.outcomes[-1].said.append(said)
                self._given_up = self._given_up or line.startswith(GIVEN_UP)
            if UNSAVED in line and self.summary.outcomes and UNSAVED not in "".join(self.summary.outcomes[-1].said):
                self._note(f"    {line}")
                self.summary.outcomes[-1].said.append(line)
            if "resuming after step" in line:
                self._note(f"    {line}")
                self.summary.attempts += 1
                resumed = int(line.split("resuming after step ")[1].split()[0])
                self.summary.redone += max(0, self._newest - resumed)
                self._follow(f"resumed after step {resumed}")

    def _note(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._begun:6.1f} s  {text}")

    def _tail(self, lines: int = 60) -> str:
        return "\n".join(self._training.screen.read_text(errors="replace").splitlines()[-lines:])


def undisturbed(hosts: Cluster, work: Path) -> Training:
    """The run that the other one is compared with."""
    training = Training(hosts, work, "undisturbed")
    code = training.launch().wait(STALL_S)
    assert code == 0, training.screen.read_text()
    return training


def chaos(
    hosts: Cluster,
    work: Path,
    faults: Sequence[Fault],
    steps: int | None = None,
    say: Callable[[str], None] = print,
    way: str = "ssh",
) -> Summary:
    """Train twice, once under these faults. Raises AssertionError for whatever differs, hangs or is left behind."""
    steps = steps or int(STEPS_A_FAULT * (len(faults) + 1) / EARLY)
    prepare(work, hosts, steps)
    say(f"an undisturbed run of {steps} steps on {len(hosts.names)} hosts")
    peaceful = undisturbed(hosts, work)
    wanted = peaceful.rows()
    assert sorted(wanted) == list(range(1, steps + 1))
    assert len({row.partition(",")[2] for row in wanted.values()}) == steps  # other rows would show
    training = Training(hosts, work, "torn", way)
    driver = Chaos(hosts, training, work, wanted, say)
    try:
        driver.run(faults)
    finally:
        driver.close()
    assert training.rows() == wanted
    ours, theirs = last_state(training.folder, steps), last_state(peaceful.folder, steps)
    assert ours
    unlike = [name for name in theirs if ours.get(name) != theirs[name]]
    assert not unlike, f"the last state differs in {unlike}"
    assert ours.keys() == theirs.keys()
    left = left_behind(work, hosts) + [str(path) for path in training.folder.rglob("*") if "tmp" in path.name]
    assert not left, f"these are left: {left}"
    driver.summary.spent = RunReader(training.folder).read().spent
    return driver.summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30, help="how many")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="chooses faults and moments")
    parser.add_argument("--steps", type=int, help="of the training; a busy machine gets by with fewer")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of the faults, separated by commas")
    parser.add_argument("--way", default="ssh", choices=["ssh", "exec over ssh"], help="how hosts are reached")
    parser.add_argument("--folder", type=Path, help="an empty folder to be kept; by default a temporary one")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the blocks that end what was started
    print(f"seed {args.seed}, {args.faults} faults", flush=True)
    with tempfile.TemporaryDirectory(prefix="roxxel-chaos-") as temporary, Cluster(3) as hosts:
        work = args.folder.absolute() if args.folder else Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        faults = choose(args.seed, args.faults, hosts.names, args.kinds.split(","))
        print(chaos(hosts, work, faults, args.steps, lambda text: print(text, flush=True), args.way))


if __name__ == "__main__":
    main()
