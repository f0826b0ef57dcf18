"""Brings one fault upon a training: what is hit, and how it is undone."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos_faults import Fault
from chaos_training import RUNTIME_SIGNAL, WORKERS_STEPS, Training, Workers, catches, record_of
from hosts import CONTROLLER, ROOT, Cluster

WORKERS_LIMIT_S = 240.0
REPLACED = ("has sent nothing for", "going on without")
"""What the launcher says of a host that it loses."""
REPAIR_S = 25.0
"""A host that is back is unfit for so long, until a person repairs it; so long afterwards the job may take it in."""


@dataclass(kw_only=True)
class Undo:
    """What ends a fault, and when."""

    when: float
    text: str
    """For people; empty: not worth a line."""
    function: Callable[[], None]


class Injector:
    """Injects faults.

    Args:
        hosts: where the training runs.
        training: what is disturbed.
        work: its folder, as `prepare` has made it.
        note: shows a line to a person.
    """

    def __init__(self, hosts: Cluster, training: Training, work: Path, note: Callable[[str], None]) -> None:
        self._hosts, self._training, self._work, self._note = hosts, training, work, note
        self.undo: list[Undo] = []
        """What is still to be undone."""
        self._staged: Fault | None = None
        """Whose first part was done."""
        self._staged_at, self._mark = 0.0, 0
        self._workers_done: tuple[int, bytes] | None = None
        self._jobs = 0
        self._away: set[str] = set()
        self.is_slowed = False
        """Whether the training does a step in two seconds: until a fault is over, or it would be over before."""
        self._brake_at = 0.0
        self._held: tuple[str, int] | None = None
        """Host and pid of a rank that is stopped for a moment."""
        self._slowed: tuple[str, int] | None = None
        """The rank that is stopped again and again: to look for it takes longer than a step."""
        self._done: dict[int, int] = {}
        """The step that a rank, by its pid, had done then: it does one more before it is stopped again."""

    def inject(self, fault: Fault, launcher: subprocess.Popen[bytes]) -> str:
        """Inject a fault; returns what was hit, for people, or "" where there is nothing yet that it could hit."""
        with suppress(ProcessLookupError):
            return getattr(self, "_" + fault.kind.lower().replace("'", "").replace("-", "_").replace(" ", "_"))(
                fault, launcher
            )
        return ""

    @property
    def is_staged(self) -> bool:
        """Whether the first part of a fault was injected, and the second is to come."""
        return self._staged is not None

    def tend(self, now: float) -> Iterator[str]:
        """Undo what is due; the words for it."""
        if self.is_slowed:
            self._brake(now)
        for undo in [undo for undo in self.undo if now >= undo.when]:
            self.undo.remove(undo)
            undo.function()
            if undo.text:
                yield undo.text

    def _later(self, seconds: float, text: str, function: Callable[[], None]) -> None:
        self.undo.append(Undo(when=time.monotonic() + seconds, text=text, function=function))

    def _order(self, first: str) -> list[str]:
        """The hosts that are in reach, this one first."""
        return sorted((name for name in self._hosts.names if name not in self._away), key=lambda name: name != first)

    def _first_rank(self, fault: Fault, number: int, fits: Callable[[int], bool] = lambda pid: True) -> str:
        """Send a signal to a rank that fits."""
        for host in self._order(fault.host):
            for pid in filter(fits, self._training.ranks(host)):
                self._hosts.signal(host, pid, number)
                return f"pid {pid} on {host}"
        return ""

    # Ranks.

    def _kill_rank(self, fault: Fault, _: object) -> str:
        return self._first_rank(fault, signal.SIGKILL)

    def _stop_rank(self, fault: Fault, _: object) -> str:
        for host in self._order(fault.host):
            for pid in self._training.ranks(host):
                if (host, pid) == self._held:  # it would go on with the brake's next turn
                    continue
                self._hosts.signal(host, pid, signal.SIGSTOP)
                if record_of(pid).activity == "step":
                    return f"pid {pid} on {host}"
                self._hosts.signal(host, pid, signal.SIGCONT)  # a start, a save and others have long limits
        return ""

    def _exception(self, fault: Fault, _: object) -> str:
        return self._first_rank(fault, signal.SIGUSR2, lambda pid: catches(pid, signal.SIGUSR2))

    def _runtime_exception(self, fault: Fault, _: object) -> str:
        return self._first_rank(fault, RUNTIME_SIGNAL, lambda pid: catches(pid, RUNTIME_SIGNAL) and _has_joined(pid))

    def _crash_in_the_first_step(self, fault: Fault, _: object) -> str:
        """Of an attempt: one is started by the loss of a rank, if need be."""
        if hit := self._first_rank(fault, signal.SIGABRT, _is_in_first_step):
            self._staged = None
            return hit
        if self._staged is not fault and (killed := self._first_rank(fault, signal.SIGKILL)):
            self._staged = fault
            self._note(f"for a {fault.kind}: killed a rank, {killed}")
        return ""

    def _reset_connections(self, fault: Fault, _: object) -> str:
        for host in self._order(fault.host):
            if any(map(_has_joined, self._training.ranks(host))) and (count := self._hosts.reset(host)):
                return f"{count} of {host}"
        return ""

    # Networks and hosts.

    def _cut_link(self, fault: Fault, _: object) -> str:
        return self._disconnect(fault, fault.host, self._hosts.cut)

    def _drop_link(self, fault: Fault, _: object) -> str:
        return self._disconnect(fault, fault.host, self._hosts.drop)

    def _launchers_link(self, fault: Fault, _: object) -> str:
        return self._disconnect(fault, CONTROLLER, self._hosts.cut)

    def _disconnect(self, fault: Fault, name: str, cut: Callable[[str], None]) -> str:
        if name in self._away:
            return ""
        cut(name)
        self._away.add(name)
        self._later(fault.lasts, f"{name} is back", lambda: self._connect(name))
        return f"{name} for {fault.lasts:.1f} s"

    def _connect(self, name: str) -> None:
        self._hosts.restore(name)
        self._away.discard(name)

    def _reset_ssh(self, fault: Fault, _: object) -> str:
        for host in self._order(fault.host):
            address = self._hosts.address(host)
            if self._training.agents(host) and self._hosts.reset(CONTROLLER, "dst", address, "dport", "=", ":22"):
                return f"the launcher's, to {host}"
        return ""

    def _kill_agent(self, fault: Fault, _: object) -> str:
        return self._first_agent(fault, signal.SIGKILL)

    def _stop_agent(self, fault: Fault, _: object) -> str:
        return self._first_agent(fault, signal.SIGSTOP)

    def _first_agent(self, fault: Fault, number: int) -> str:
        for host in self._order(fault.host):
            for pid in self._training.agents(host):
                self._hosts.signal(host, pid, number)
                return f"pid {pid} on {host}"
        return ""

    def _host_back_without_its_folder(self, fault: Fault, _: object) -> str:
        folder = self._training.folder
        return self._come_back_unfit(
            fault,
            lambda host: self._hosts.tmpfs(host, folder, "16m"),
            lambda host: self._hosts.unmount(host, folder),
        )

    def _host_back_with_other_versions(self, fault: Fault, _: object) -> str:
        return self._come_back_unfit(
            fault,
            lambda host: self._hosts.set_env(host, PYTHONPATH=f"{self._work / 'other'}:{ROOT}"),
            lambda host: self._hosts.set_env(host, PYTHONPATH=str(ROOT)),
        )

    def _come_back_unfit(self, fault: Fault, spoil: Callable[[str], None], repair: Callable[[str], None]) -> str:
        """A host is lost, and all spare ones, so that the job would use it; these come back when it is repaired."""
        if self.undo or not self._training.folder.exists():
            return ""
        working = [host for host in self._order(fault.host) if self._training.ranks(host)]
        if len(working) < 2:
            return ""
        lost, *others = [host for host in self._order(working[0]) if host != working[1]]
        for host in (lost, *others):
            self._hosts.cut(host)
            self._away.add(host)
        spoil(lost)
        until = fault.lasts + REPAIR_S
        self._later(fault.lasts, f"{lost} is back, unfit", lambda: self._connect(lost))
        self._later(until, f"{lost} is repaired", lambda: repair(lost))
        for host in others:
            self._later(until, f"{host} is back", lambda host=host: self._connect(host))
        self._later(until + REPAIR_S, "", self.release)
        self.is_slowed = True
        return f"{lost} for {fault.lasts:.1f} s, and {REPAIR_S:g} s until it is repaired; {', '.join(others)} so long"

    def _brake(self, now: float) -> None:
        """Let the training do a step in two seconds, or it would be over before hosts are back."""
        if now < self._brake_at:
            return
        if self._held is None:
            if self._slowed is None or not record_of(self._slowed[1]).pid:
                ranks = ((host, pid) for host in self._order("") for pid in self._training.ranks(host))
                self._slowed = next(ranks, None)
            if self._slowed is None:
                return
            host, pid = self._slowed
            with suppress(OSError):
                record = record_of(pid)
                if record.activity == "step" and record.done > self._done.get(pid, 0):
                    self._done[pid] = record.done
                    self._hosts.signal(host, pid, signal.SIGSTOP)
                    self._held, self._brake_at = (host, pid), now + 2.0
        else:
            self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            with suppress(OSError):
                self._hosts.signal(*self._held, signal.SIGCONT)
            self._held = None

    def release(self) -> None:
        """Let the training go on as fast as it can."""
        self.is_slowed = False
        self._let_go()

    # Disks.

    def _read_only_folder(self, fault: Fault, _: object) -> str:
        """What is opened by its path from now on; what is open stays as it is, as with a file server's exports."""
        folder = self._training.folder
        host = next((host for host in self._order(fault.host) if self._training.ranks(host)), "")
        if not host or not folder.exists():
            return ""
        other = self._work / "read-only"
        other.mkdir(exist_ok=True)
        self._hosts.bind(host, folder, other)
        self._hosts.remount(host, other, "ro")  # before it is in its place: no file is open for writing there
        self._hosts.bind(host, other, folder)
        self._hosts.unmount(host, other)
        self._later(fault.lasts, f"{host} can write again", lambda: self._hosts.unmount(host, folder))
        return f"on {host} for {fault.lasts:.1f} s"

    def _full_state_folder(self, fault: Fault, _: object) -> str:
        file = self._work / "state" / "filler"
        self._hosts.run(["dd", "if=/dev/zero", f"of={file}", "bs=4k"], on=CONTROLLER)
        self._later(fault.lasts, "the state folder has room", lambda: self._remove(file))
        return f"for {fault.lasts:.1f} s"

    def _remove(self, file: Path) -> None:
        self._hosts.run(["rm", "-f", file], on=CONTROLLER)

    def _deleted_logs(self, _: Fault, __: object) -> str:
        logs = list((self._training.folder / "logs").glob("rank-*.log"))
        for path in logs:
            path.unlink()
        return ", ".join(path.name for path in logs)

    # The launcher.

    def _kill_launcher(self, _: Fault, launcher: subprocess.Popen[bytes]) -> str:
        launcher.kill()
        return f"pid {launcher.pid}"

    def _kill_launcher_while_it_drains(self, fault: Fault, launcher: subprocess.Popen[bytes]) -> str:
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.1 + fault.place % 0.01 * 50)  # within 0.6 s
        launcher.kill()
        return f"pid {launcher.pid}"

    def _kill_launcher_in_a_save(self, fault: Fault, launcher: subprocess.Popen[bytes]) -> str:
        """While a checkpoint is written, which has a temporary name then."""
        self._stage(fault)
        saving = any("tmp" in name for name in _names(self._training.folder / "checkpoints"))
        if not saving and time.monotonic() < self._staged_at + 30:
            return ""
        self._staged = None
        launcher.kill()
        return f"pid {launcher.pid}" + " (no save was seen)" * (not saving)

    def _kill_launcher_while_a_host_is_replaced(self, fault: Fault, launcher: subprocess.Popen[bytes]) -> str:
        if self._staged is not fault:
            host = next((host for host in self._order(fault.host) if self._training.ranks(host)), "")
            if host:
                self._stage(fault)
                self._note(f"to {fault.kind}: cut the link of {self._disconnect(fault, host, self._hosts.cut)}")
            return ""
        said = self._training.screen.read_bytes()[self._mark :].decode(errors="replace")
        seen = any(words in said for words in REPLACED)
        if not seen and time.monotonic() < self._staged_at + 30 and launcher.poll() is None:
            return ""
        self._staged = None
        launcher.kill()
        return f"pid {launcher.pid}" + " (no word of it was seen)" * (not seen)

    def _stage(self, fault: Fault) -> None:
        if self._staged is not fault:
            self._staged, self._staged_at = fault, time.monotonic()
            self._mark = self._training.screen.stat().st_size

    def _sigterm(self, _: Fault, launcher: subprocess.Popen[bytes]) -> str:
        return self._signal_launcher(launcher, signal.SIGTERM)

    def _sigusr1(self, _: Fault, launcher: subprocess.Popen[bytes]) -> str:
        return self._signal_launcher(launcher, signal.SIGUSR1)

    def _sighup(self, _: Fault, launcher: subprocess.Popen[bytes]) -> str:
        return self._signal_launcher(launcher, signal.SIGHUP)

    def _ctrl_c_twice(self, _: Fault, launcher: subprocess.Popen[bytes]) -> str:
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.2)
        return self._signal_launcher(launcher, signal.SIGINT)

    def _signal_launcher(self, launcher: subprocess.Popen[bytes], number: int) -> str:
        launcher.send_signal(number)
        return f"pid {launcher.pid}"

    # Another program.

    def _stop_data_workers(self, _: Fault, launcher: subprocess.Popen[bytes]) -> str:
        """Stop the training, and launch a program with data workers, which is stopped and launched again."""
        if self.undo:
            return ""  # it takes a while, and hosts have to come back in time
        self._let_go()  # a rank that is held would save nothing
        launcher.terminate()
        launcher.wait(WORKERS_LIMIT_S)
        if self._workers_done is None:
            calm = self._new_workers()
            assert self._ended(calm, calm.launch()) == 0, calm.screen.read_text()
            self._workers_done = calm.state()
        job = self._new_workers()
        process = job.launch()
        end = time.monotonic() + WORKERS_LIMIT_S
        while job.step < 20:
            assert process.poll() is None, job.screen.read_text()
            assert time.monotonic() < end, job.screen.read_text()
            time.sleep(0.01)
        process.terminate()
        code, text = self._ended(job, process), job.screen.read_text()
        assert code == 42, f"a program with data workers ended with {code} at SIGTERM\n{text}"
        done = job.state()[0]
        assert 20 <= done < WORKERS_STEPS
        assert self._ended(job, job.launch()) == 0, job.screen.read_text()
        assert job.state() == self._workers_done, "the program with data workers has another state"
        return f"it saved {done} of {WORKERS_STEPS} steps, ended with 42, and went on to the same state"

    def _new_workers(self) -> Workers:
        self._jobs += 1
        return Workers(self._hosts, self._work, f"workers-{self._jobs}")

    def _ended(self, job: Workers, process: subprocess.Popen[bytes]) -> int:
        code, end = process.wait(WORKERS_LIMIT_S), time.monotonic() + 5
        while left := job.processes():
            assert time.monotonic() < end, f"left of a program with data workers: {left}"
            time.sleep(0.02)
        return code


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _has_joined(pid: int) -> bool:
    return record_of(pid).activity not in ("", "start", "join")


def _is_in_first_step(pid: int) -> bool:
    record = record_of(pid)
    return not record.done and record.activity in ("compile", "step")
