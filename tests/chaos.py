"""A real training on real hosts under random faults: what comes out is, to the bit, what an undisturbed run gives.

python tests/chaos.py [--faults 30] [--seed N] [--folder DIR]

Faults come in the middle of steps, saves and validations, and while the job still starts again after the one before.
What a person would do is done too: a launch that ended is made again. Every row that was ever logged, the last state
and the exit codes are compared, and nothing may be left on any host.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos_faults import LINKS, STEPS_A_FAULT, Fault, choose
from chaos_training import Training, activity, catches, last_state, prepare
from hosts import CONTROLLER, Cluster

STALL_S = 240.0
"""A job that makes no new step for so long hangs: that is longer than any pause before a restart, and a start."""
GONE_S, LEASH_S = 5.0, 20.0
"""Of processes when their launcher has ended; and where a host was out of reach, or an agent stopped, just before."""
CODES = {"exception": {1}, "kill launcher": {-9}, "SIGTERM": {42, 143, 137, -15}}
"""With what a launch may end after each kind of fault; the others are for the launcher to mend.

137: a rank or an agent that was killed while the others saved. -15: the launcher was starting, and nothing ran yet.
"""
UNREADY = 69
GIVEN_UP = ("roxxel-dist: not started again: no rank", "roxxel-dist: not started again: rank")
POLL_S = 0.01


@dataclass(kw_only=True)
class Summary:
    """What happened; `str` is for people."""

    faults: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    redone: int = 0
    attempts: int = 0
    gone_s: float = 0.0
    leash_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        codes = ", ".join(f"{code} ({count})" for code, count in sorted(self.codes.items()))
        return (
            f"{sum(self.faults.values())} faults ({kinds}) in {self.seconds:.0f} s; {self.codes.total()} launches, "
            f"which ended with {codes}; {self.steps} steps, resumed {self.attempts} times, and at least {self.redone} "
            f"of them done again; no process left {self.gone_s:.2f} s after a launcher's end, and {self.leash_s:.2f} s "
            "where a host was cut off or an agent stopped. Every row and the last state are as if nothing had been."
        )


class Chaos:
    """Brings faults upon a training, and launches it again where a person would.

    Args:
        hosts: where it runs.
        training: was not launched yet.
        wanted: the rows of the undisturbed run.
        say: where a line for people goes.
    """

    def __init__(
        self, hosts: Cluster, training: Training, wanted: dict[int, str], say: Callable[[str], None] = print
    ) -> None:
        self._hosts, self._training, self._wanted, self._say = hosts, training, wanted, say
        self.summary = Summary(steps=len(wanted))
        self._begun = time.monotonic()
        self._restore_at: dict[str, float] = {}
        self._bad_until = 0.0
        """Until then a host may be out of reach, or an agent stopped."""
        self._unreachable_until = 0.0
        self._codes: set[int] = set()
        self._kinds: set[str] = set()
        self._given_up = False
        self._told = 0
        self._newest, self._moved = 0, time.monotonic()
        self._process = training.launch()

    def run(self, faults: Sequence[Fault]) -> None:
        """All faults, one after the other, and then to the end of the training."""
        for number, fault in enumerate(faults, 1):
            step, begun = max(2, int(fault.place * self.summary.steps)), time.monotonic()
            while self._newest < step and time.monotonic() < begun + fault.seconds:
                assert not self._tend(), f"the training was over before fault {number}: it needs more steps"
            while not self._inflict(fault):
                assert not self._tend(), f"the training was over before fault {number}: it needs more steps"
            lasts = f" for {fault.lasts:.1f} s" if fault.kind in LINKS else ""
            self._note(f"fault {number}: {fault.kind} on {fault.host}{lasts}, after step {self._training.step}")
            self.summary.faults[fault.kind] += 1
            self._moved = time.monotonic()
        while not self._tend():
            pass
        self.summary.seconds = time.monotonic() - self._begun

    def _inflict(self, fault: Fault) -> bool:
        """Inflict a fault; returns whether there was a process or link that it could hit."""
        if fault.kind in LINKS:
            if fault.host in self._restore_at:
                return False
            (self._hosts.cut if fault.kind == "cut link" else self._hosts.drop)(fault.host)
            self._restore_at[fault.host] = time.monotonic() + fault.lasts
            self._bad_until = self._unreachable_until = max(self._bad_until, time.monotonic() + fault.lasts + LEASH_S)
            return True
        whom, number = {
            "kill rank": (self._training.ranks, signal.SIGKILL),
            "stop rank": (self._training.ranks, signal.SIGSTOP),
            "exception": (self._training.ranks, signal.SIGUSR2),
            "kill agent": (self._training.agents, signal.SIGKILL),
            "stop agent": (self._training.agents, signal.SIGSTOP),
            "kill launcher": (lambda _: [self._process.pid], signal.SIGKILL),
            "SIGTERM": (lambda _: [self._process.pid], signal.SIGTERM),
        }[fault.kind]
        for pid in whom(fault.host):
            if fault.kind == "exception" and not catches(pid, number):
                continue  # it has just begun
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                if fault.kind == "stop rank" and activity(pid) != "step":
                    os.kill(pid, signal.SIGCONT)  # a start, a save and others have long limits
                    return False
                if fault.kind == "stop agent":
                    self._bad_until = max(self._bad_until, time.monotonic() + LEASH_S)
                self._codes |= CODES.get(fault.kind, set())
                self._kinds.add(fault.kind)
                return True
        return False

    def _tend(self) -> bool:
        """Do what is due now; whether the training is over."""
        time.sleep(POLL_S)
        now = time.monotonic()
        for host in [host for host, when in self._restore_at.items() if now >= when]:
            self._hosts.restore(host)
            del self._restore_at[host]
            self._note(f"{host} is back")
        self._echo()
        if (step := self._training.step) > self._newest:
            self._newest, self._moved = step, now
        assert now - self._moved < STALL_S, f"no new step for {STALL_S:g} s\n{self._tail()}"
        if (code := self._process.poll()) is None:
            return False
        self._echo()
        self._on_end(code)
        if code != 0:
            self._process = self._training.launch()
        return code == 0

    def _on_end(self, code: int) -> None:
        self.summary.codes[code] += 1
        gone_s = self._wait_gone()
        slow = time.monotonic() - gone_s < self._bad_until
        if slow:
            self.summary.leash_s = max(self.summary.leash_s, gone_s)
        else:
            self.summary.gone_s = max(self.summary.gone_s, gone_s)
        self._note(f"the launch ended with {code}; {gone_s:.2f} s later nothing of it is left; {self._check_rows()}")
        fine = code in self._codes | {0} or self._given_up
        unreachable = time.monotonic() < self._unreachable_until + gone_s
        # A rank that loses the others while they stop and save fails, and nothing is started again after a SIGTERM.
        fine = fine or (unreachable and (code == UNREADY or (code == 1 and "SIGTERM" in self._kinds)))
        assert fine, f"no fault explains the code {code}\n{self._tail()}"
        self._codes, self._kinds, self._given_up = set(), set(), False

    def _wait_gone(self) -> float:
        """Seconds until nothing runs on any host."""
        begun = time.monotonic()
        limit = LEASH_S if begun < self._bad_until else GONE_S
        while left := {name: pids for name in (*self._hosts.names, CONTROLLER) if (pids := self._left_on(name))}:
            assert time.monotonic() - begun < limit, f"still there {limit:g} s after the launcher's end: {left}"
            for host in [host for host, when in self._restore_at.items() if time.monotonic() >= when]:
                self._hosts.restore(host)
                del self._restore_at[host]
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
                self._note(f"    {line.removeprefix('roxxel-dist: ')}")
                self._given_up = self._given_up or line.startswith(GIVEN_UP)
            if "resuming after step" in line:
                self._note(f"    {line}")
                self.summary.attempts += 1
                self.summary.redone += max(0, self._newest - int(line.split("resuming after step ")[1].split()[0]))

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
) -> Summary:
    """Train twice, once under these faults. Raises AssertionError for whatever differs, hangs or is left behind."""
    steps = steps or STEPS_A_FAULT * (len(faults) + 1)
    prepare(work, hosts, steps)
    say(f"an undisturbed run of {steps} steps on {len(hosts.names)} hosts")
    peaceful = undisturbed(hosts, work)
    wanted = peaceful.rows()
    assert sorted(wanted) == list(range(1, steps + 1))
    assert len({row.partition(",")[2] for row in wanted.values()}) == steps  # other rows would show
    training = Training(hosts, work, "torn")
    driver = Chaos(hosts, training, wanted, say)
    driver.run(faults)
    assert training.rows() == wanted
    ours, theirs = last_state(training.folder, steps), last_state(peaceful.folder, steps)
    assert ours
    unlike = [name for name in theirs if ours.get(name) != theirs[name]]
    assert not unlike, f"the last state differs in {unlike}"
    assert ours.keys() == theirs.keys()
    left = [path for path in (work / "tmp").rglob("*") if not path.is_dir() or path.parent != work / "tmp"]
    left += [path for path in training.folder.rglob("*") if "tmp" in path.name]
    assert not left, f"temporary files are left: {left}"
    return driver.summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30, help="how many")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="chooses faults and moments")
    parser.add_argument("--steps", type=int, help="of the training; a busy machine gets by with fewer")
    parser.add_argument("--folder", type=Path, help="an empty folder to be kept; by default a temporary one")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.faults} faults", flush=True)
    with tempfile.TemporaryDirectory(prefix="roxxel-chaos-") as temporary, Cluster(3) as hosts:
        work = args.folder.absolute() if args.folder else Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        faults = choose(args.seed, args.faults, hosts.names)
        print(chaos(hosts, work, faults, args.steps, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main()
