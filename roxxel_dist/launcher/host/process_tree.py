"""A program and everything that it starts, killed as a whole, however its processes detach from each other.

A process with PR_SET_CHILD_SUBREAPER becomes the parent of every process below it whose own parent ends: daemons,
`setsid`, a double fork, even with a cleared environment. So if it kills its children until it has none, nothing is
left. Two processes do that on a host. The guard is the parent of the agent; if the agent dies, it kills the processes
that are left. A keeper is the parent of one rank; it kills that rank's tree when the agent says so, or is gone. They
wait for the killed processes so that the agent never does. A worker of Ray, which has threads and cannot fork, starts
its keepers as programs: a trial of a sweep is such a tree.

A process is signalled only while its number cannot be reused: a child that was not reaped, or by pidfd.

As a program, `process_tree.py CHILD LIMIT KILL NONCE FOLDER…`, this file is the guard, and `process_tree.py keep LINGER
KILL CMD…` a keeper. Of the package it imports `process/process_stat.py` alone, at its start: it must start within
milliseconds, without site-packages. Decision 21.
"""

import ctypes
import math
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":  # last: a folder of other packages must not stand in for the standard library
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))))

from roxxel_dist.process.process_stat import GROUP, PARENT, SESSION, STARTED, processes, stat

if TYPE_CHECKING:
    import subprocess

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here, not after a fork, where a lock may be held for ever
FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.5
NOT_FOLLOWED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Requests to leave, which guards, keepers and agents do not follow themselves: they end with the ranks."""
HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Those of a system that ends this host, or the whole job: guard and agent hand them on to the controller. Not SIGHUP
and SIGINT: a connection or a terminal ends, and the controller has its own."""
STOP, STOP_GROUP, KILL = b"stop", b"stop group", b"kill"
GONE = b'\n{"n":"%s","type":"gone","code":%d}\n'
"""The last word of a guard: nothing is left of its agent. It may follow a line that the agent has not ended."""
SHELL = re.compile(r"(a|ba|da|z|k|mk|fi|c|tc)?sh[-0-9.]*|busybox")
"""Programs that do not pass SIGTERM on to the programs that they run."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent (the thread that started it) ends."""
    _prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def descendants(ancestor: int) -> dict[int, bytes]:
    """The processes below one, each with when it started (in the kernel's units)."""
    children: dict[int, list[tuple[int, bytes]]] = {}
    for pid, fields in processes():
        children.setdefault(int(fields[PARENT]), []).append((pid, fields[STARTED]))
    below: dict[int, bytes] = {}
    parents = [ancestor]
    while parents:
        for pid, started in children.get(parents.pop(), ()):
            below[pid] = started
            parents.append(pid)
    return below


def is_shell(pid: int) -> bool:
    """Whether a process is a shell, as which file it runs says: a script has a name of its own."""
    with suppress(OSError):
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
        return SHELL.fullmatch(name.removesuffix(" (deleted)")) is not None
    return False


def send(pid: int, started: bytes, number: int) -> None:
    """Signal a process, unless its number has become another's."""
    with suppress(OSError):  # it is gone, or another user's
        pidfd = os.pidfd_open(pid)
        try:
            if stat(pid)[STARTED] == started:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def remove(folders: Iterable[str]) -> None:
    """Remove folders with their contents, as far as possible. Follows no link."""
    for folder in folders:
        for place, names, files in os.walk(folder, topdown=False):
            for name in (*names, *files):
                path = os.path.join(place, name)
                with suppress(OSError):
                    os.rmdir(path) if name in names and not os.path.islink(path) else os.unlink(path)
        with suppress(OSError):
            os.rmdir(folder)


class Subreaper:
    """A process of one thread, this one, as the parent of `child` and of all that `child` leaves.

    Args:
        child: a process that this one has started.
        on_exit: called with how it ended (negative: a signal), once.
    """

    def __init__(self, child: int, on_exit: Callable[[int], None] = lambda code: None) -> None:
        self.child: int = child
        self._on_exit = on_exit
        self.code: int | None = None

    def reap(self) -> bool:
        """Take note of every child that has ended; whether there are others."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.child:
                    self.code = os.waitstatus_to_exitcode(status)
                    self._on_exit(self.code)
        return False

    def ask_to_stop(self, field: int = SESSION) -> None:
        """SIGTERM, once, to the child; where that is a shell, to the programs that it runs as well.

        Not to processes that a program has started (workers of a data loader, of a pool): it needs them to save, and
        ends them itself. Of a shell's programs only those of the session, or of the process group (GROUP), that the
        child leads: what has left it is to outlive a Ctrl-C.
        """
        listed = dict(processes())  # at first: processes that a handler starts are not asked
        asked = [self.child] if self.code is None else []
        for pid in asked:  # grows
            if pid in listed and is_shell(pid):
                asked += [other for other, fields in listed.items() if int(fields[PARENT]) == pid]
        for pid in asked:
            if pid in listed and int(listed[pid][field]) == self.child:
                send(pid, listed[pid][STARTED], signal.SIGTERM)

    def kill(self, limit_s: float) -> bool:
        """SIGKILL all processes below this one until none is left; False if some are left at the limit."""
        end, pause_s = time.monotonic() + limit_s, FIRST_PAUSE_S
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)
        while self.reap():  # a child that ends leaves its own children to this process
            for pid, started in descendants(os.getpid()).items():
                send(pid, started, signal.SIGKILL)
            if time.monotonic() >= end:
                return not self.reap()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return True


def _receive(control: socket.socket) -> bytes:
    """The next message; empty where the other end is gone, also if it had not read all: what it said comes first."""
    with suppress(ConnectionResetError):
        return control.recv(32)
    return control.recv(32)


class ProcessTree:
    """A program under a keeper: a small process, forked from this one, that adopts all orphans of the program.

    This process must have one thread. The descriptor `fd` is readable when there is something to `receive`.

    Args:
        start: starts the program, as the leader of a session, from inside the keeper.
        holds: descriptors that `start` needs; the keeper closes all others, and these when the program is there.
        folders: removed by the keeper where this process ends before the program: its guard may be gone too.
        kill_s: how long the keeper waits for killed processes.

    Raises:
        ChildProcessError: the program could not be started.
    """

    def __init__(
        self,
        start: Callable[[], "subprocess.Popen[bytes]"],
        holds: tuple[int, ...] = (),
        folders: Sequence[str] = (),
        *,
        kill_s: float,
    ) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stderr.flush()
        keeper = os.fork()
        if keeper == 0:
            _run_keeper(far, start, holds, kill_s, folders=folders)
        far.close()
        self._meet(near, keeper)

    def _meet(self, control: socket.socket, keeper: int) -> None:
        self._control = control
        self.keeper: int = keeper
        said, pidfds, *_ = socket.recv_fds(control, 1024, 1, socket.MSG_CMSG_CLOEXEC)
        if not pidfds:
            control.close()
            os.waitpid(keeper, 0)  # it ends now
            number, _, text = said.decode(errors="replace").partition(" ")
            raise ChildProcessError(int(number or 0), text or "its keeper was killed")
        self.pid: int = int(said)
        self.pidfd: int = pidfds[0]
        """Of the program; the keeper opened it while the number was its own."""
        self.code: int | None = None
        """How the program ended, as soon as the keeper has said so (negative: a signal)."""
        self.is_empty: bool = False
        """Whether nothing is left of it, but for what its keeper could not kill and has left to the guard."""

    @property
    def fd(self) -> int:
        """The descriptor of the keeper's messages."""
        return self._control.fileno()

    def receive(self) -> None:
        """Take in one message of the keeper."""
        if said := _receive(self._control):
            self.code = int(said)
        else:
            self.is_empty = True
            if self.code is None:  # the keeper was killed, and the kernel has killed the program with it
                self.code = -signal.SIGKILL

    def ask_to_stop(self, *, group: bool = False) -> None:
        """SIGTERM to the program, see `Subreaper.ask_to_stop`; `group`: of a shell's programs, those of its group."""
        self._order(STOP_GROUP if group else STOP)

    def kill(self) -> None:
        """Kill whatever there is of it; `is_empty` says when that is done."""
        self._order(KILL)

    def _order(self, order: bytes) -> None:
        with suppress(OSError):  # the keeper is gone
            self._control.send(order)

    def close(self) -> None:
        """Close the connection to the keeper, which kills the rest of the tree."""
        self._control.close()


class SpawnedTree(ProcessTree):
    """A program under a keeper that is started, not forked: for a process with threads.

    Processes that are left `linger_s` after the program's end are killed; when this process ends, all of them.

    Args:
        command: the words of the program, which becomes the leader of a session.
        env: all of its variables.
        output: the descriptor for its stdout and stderr.
        directory: where it runs; None: where this process does.
        linger_s: how long processes that it leaves may go on.
        kill_s: as for `ProcessTree`, whose errors these are too.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        output: int,
        directory: str | None,
        linger_s: float,
        kill_s: float,
    ) -> None:
        import subprocess

        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            words = [sys.executable, "-P", "-S", __file__, "keep", str(linger_s), str(kill_s), *command]
            self._process = subprocess.Popen(
                words, stdin=far.fileno(), stdout=output, stderr=output, env=env, cwd=directory, start_new_session=True
            )
        self._kill_s, self._poll = kill_s, select.poll()  # select() knows no descriptor above 1,023
        self._meet(near, self._process.pid)
        self._poll.register(self.fd, select.POLLIN)

    def wait(self, limit_s: float) -> bool:
        """Whether nothing is left of it, waited for so long."""
        end = time.monotonic() + limit_s
        while not self.is_empty and self._poll.poll(1000 * max(0.0, end - time.monotonic())):
            self.receive()
            if self.is_empty:
                self._process.wait()
                self.close()
                os.close(self.pidfd)
        return self.is_empty

    def end(self, stop_s: float) -> None:
        """Ask its process group to stop, and kill what is left of it after `stop_s` seconds, or when interrupted."""
        try:
            if not self.wait(0):
                self.ask_to_stop(group=True)
                self.wait(stop_s)
        finally:
            self.kill()
            while not self.wait(2 * self._kill_s):  # its keeper was stopped
                self._process.kill()


def _run_spawned_keeper(linger_s: float, kill_s: float, command: Sequence[str]) -> NoReturn:
    import subprocess

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - a system call; this process has one thread
        )

    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a worker of Ray has signals blocked, which a program inherits
    _run_keeper(socket.socket(fileno=0), start, None, kill_s, linger_s)


def _run_keeper(
    control: socket.socket,
    start: Callable[[], "subprocess.Popen[bytes]"],
    holds: tuple[int, ...] | None,
    kill_s: float,
    linger_s: float = math.inf,
    folders: Sequence[str] = (),
) -> NoReturn:
    """Start a program and keep it; in a fork (`holds`) with no other files of the agent."""
    try:
        if holds is not None:
            _close_all_but((control.fileno(), *holds))
        for number in NOT_FOLLOWED:
            signal.signal(number, lambda *_: None)
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        program = start()  # kept: its destructor would reap it
        for fd in holds or ():
            os.close(fd)
        socket.send_fds(control, [b"%d" % program.pid], [os.pidfd_open(program.pid)])
        if not _keep(control, program.pid, linger_s, kill_s):
            remove(folders)
    except OSError as error:
        with suppress(OSError):
            control.send(f"{error.errno or 0} {error.strerror or error}".encode()[:1024])
    finally:  # a fork of the agent: nothing of that may go on in here
        os._exit(0)


def _close_all_but(kept: Sequence[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):  # the ends of other keepers' sockets among them
        if fd > 2 and fd not in kept:
            with suppress(OSError):
                os.close(fd)
    with open(os.devnull, "r+b") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)


def _keep(control: socket.socket, child: int, linger_s: float, kill_s: float) -> bool:
    """Report how the child ends; kill the rest `linger_s` later, or on an order, or when `control` closes.

    Returns whether the other end of `control` was still there for the report.
    """
    end, order = math.inf, KILL

    def report(code: int) -> None:
        nonlocal end
        end = time.monotonic() + linger_s
        with suppress(OSError):
            control.send(b"%d" % code)

    tree = Subreaper(child, report)
    wakes, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while tree.reap() and (now := time.monotonic()) < end:
        ready = select.select([wakes, control], [], [], None if end == math.inf else end - now)[0]
        if wakes in ready:
            os.read(wakes, 1024)
        if control in ready:
            order = _receive(control)
            if order not in (STOP, STOP_GROUP):
                break
            tree.ask_to_stop(SESSION if order == STOP else GROUP)
    while not tree.kill(kill_s) and tree.code is None:  # else what is left is the guard's
        continue
    return order != b""


def go_on_under_guard(
    folders: Sequence[str], kill_s: float, limit_s: float = math.inf, channel: int = 1, nonce: str = ""
) -> int:
    """Go on as the child of a guard, which keeps this process's number; returns the descriptor that `beat` writes to.

    The guard does nothing until this process is gone, or has not beaten for `limit_s` seconds and is killed. Then it
    kills all processes that are left, waits for them for `kill_s` seconds, removes `folders`, says so in `channel`
    (GONE, with `nonce`), closes it and stderr, and ends with the same exit code, or 128 + s for signal s. If the guard
    is killed, the keepers of this process's trees remain, which notice its end.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:  # a separate program: killing agents by their command line must not kill it too
        try:
            for number in NOT_FOLLOWED:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # until the guard can hand them on
            for number in HANDED_ON:  # an ignored one would not wait
                signal.signal(number, signal.SIG_DFL)
            _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            os.dup2(reads, 0)
            os.dup2(channel, 1)
            words = ["-P", "-S", __file__, str(child), str(limit_s), str(kill_s), nonce, *folders]
            os.execv(sys.executable, [sys.executable, *words])
        finally:
            os._exit(127)
    os.close(reads)
    os.setsid()  # killing the process group of the one must not kill the other
    die_with_parent(signal.SIGCONT)  # harmless; wakes this process if it is stopped, to see that the guard is gone
    return writes


def beat(heartbeat: int) -> None:
    """Tell the guard that this process lives. Raises BrokenPipeError where the guard is gone."""
    with suppress(BlockingIOError):  # the guard is stopped
        os.write(heartbeat, b".")


def _guard(child: int, limit_s: float, kill_s: float, nonce: str, folders: Sequence[str]) -> NoReturn:
    tree, started = Subreaper(child), stat(child)[STARTED]
    for number in HANDED_ON:  # SLURM may signal the process group of the step alone, in which the agent is not
        signal.signal(number, lambda number, _: send(child, started, number))  # it may have been reaped
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    while select.select([0], [], [], None if limit_s == math.inf else limit_s)[0] and os.read(0, 1 << 16):
        pass
    remove(folders)  # before the keepers die, which would remove them if this process were killed now
    is_empty = tree.kill(kill_s)
    remove(folders)  # what was made in them meanwhile
    code = -signal.SIGKILL if tree.code is None else tree.code
    code = code if code >= 0 else 128 - code  # of an end by a signal ssh would make that of a broken connection
    with suppress(OSError):  # the channel may be closed, or full
        if is_empty:
            os.write(1, GONE % (nonce.encode(), code))
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        _run_spawned_keeper(float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    _guard(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5:])
