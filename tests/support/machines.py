"""Machines for tests, each a set of namespaces (network, host name, mounts) and the process that holds them.

The namespaces have no names and mounts in them are private: when the processes in them have ended, all of it is gone.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

LIMIT_S = 20.0
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "nsenter": "util-linux"}
UNSHARE = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "--"]

# It says "ready" when the namespaces are there, reads the address of its end of the cable, and becomes what is to run.
HOLD = """
set -eu
name=$1 hosts=$2 log=$3
shift 3
hostname "$name"
mount --bind "$hosts" /etc/hosts
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
ip link set dev lo up
echo ready
read -r address
if [ -n "$address" ]; then ip address add "$address" dev eth0; ip link set dev eth0 up; fi
exec "$@" </dev/null >"$log" 2>&1
"""


def missing() -> str | None:
    """Why there can be no machines here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "hosts for tests are network namespaces, which only root may make"
    if absent := sorted({package for tool, package in PACKAGES.items() if shutil.which(tool, path=PATH) is None}):
        return f"hosts for tests need: apt-get install {' '.join(absent)}"
    tried = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True, text=True)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


class Machine:
    """One machine; `start` is to follow.

    Args:
        name: its host name.
        address: the IPv4 address of eth0, or "" for none.
        folder: has its file `hosts`; `log` is written there.
        runs: what the holder becomes, until the end.
    """

    def __init__(self, *, name: str, address: str, folder: Path, runs: Iterable[str]) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.log = folder / "log"
        # If the process of the tests is killed the holders do not outlive it.
        self.holder = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                *UNSHARE,
                "sh",
                "-c",
                HOLD,
                name,
                name,
                folder / "hosts",
                self.log,
                *runs,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": PATH},
        )
        self.namespace = 0

    def wait_ready(self) -> None:
        """Wait until the namespaces are there: cables can be plugged in."""
        self._expect("ready\n")
        self.namespace = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino

    def go(self) -> None:
        """Give eth0 its address and start what the machine runs."""
        assert self.holder.stdin is not None
        self.holder.stdin.write(f"{self.address}/24\n" if self.address else "\n")
        self.holder.stdin.close()
        self._expect("")

    def _expect(self, line: str) -> None:
        assert self.holder.stdout is not None
        said = self.holder.stdout.readline()
        if said != line:
            raise RuntimeError(f"{self.name} could not be made: {said}{self.holder.stdout.read()}")

    def words(self, words: Iterable[object], cwd: str | Path) -> list[str]:
        """The command line that runs words in here; it execs, so that its process is the program's own."""
        inside = ["nsenter", "--target", str(self.holder.pid), "--mount", "--uts", "--net", "--"]
        # A process that enters a mount namespace lands in its root folder.
        return [*inside, "env", f"--chdir={cwd}", *map(str, words)]

    def change(self, *words: object, given: str = "") -> None:
        """Run a program in here that has to succeed."""
        done = subprocess.run(
            self.words(words, "/"), input=given, capture_output=True, text=True, env={**os.environ, "PATH": PATH}
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, words))} on {self.name}: {done.stdout}{done.stderr}{given}")

    def wait_said(self, line: str, times: int = 1) -> None:
        """Wait until what the machine runs has said a line so often."""
        end = time.monotonic() + LIMIT_S
        while self.count_said(line) < times:
            if self.holder.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.name} does not say {line!r}: {self.log.read_text()}")
            time.sleep(0.005)

    def wait_listens_to(self, number: int) -> None:
        """Wait until what the machine runs catches a signal."""
        status, end = Path("/proc", str(self.holder.pid), "status"), time.monotonic() + LIMIT_S
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1:
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name} does not catch signal {number}")
            time.sleep(0.005)

    def count_said(self, line: str) -> int:
        """How often what the machine runs has said a line."""
        return self.log.read_text().count(line) if self.log.exists() else 0

    def processes(self) -> list[int]:
        """All processes in here but the holder; zombies do not count."""
        return [pid for pid in _processes(self.namespace) if pid != self.holder.pid]

    def end(self) -> None:
        """End all processes in here, the holder last."""
        end = time.monotonic() + LIMIT_S
        while pids := self.processes():
            for pid in pids:
                _kill(pid, self.namespace)
            if time.monotonic() > end:
                raise RuntimeError(f"processes that do not end on {self.name}: {pids}")
            time.sleep(0.002)
        self.holder.kill()
        self.holder.wait()
        for stream in (self.holder.stdin, self.holder.stdout):
            if stream is not None:
                stream.close()


def _processes(namespace: int) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}/ns/net").st_ino == namespace:
                found.append(int(name))
        except OSError:  # it has ended
            continue
    return found


def _kill(pid: int, namespace: int) -> None:
    try:
        handle = os.pidfd_open(pid)
        try:
            # The number may be another process's by now; from here on the handle cannot become another's.
            if os.stat(f"/proc/{pid}/ns/net").st_ino == namespace:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    except OSError:  # it has ended
        return


def stuck_disk(folder: Path, *words: object) -> list[str]:
    """The command that runs another one beside a disk that does not answer, at FOLDER/disk."""
    if why := missing():
        pytest.skip(why)
    (folder / "disk").mkdir()
    program = Path(__file__).parent / "stuck_disk.py"
    words = ("unshare", "--mount", "--propagation", "private", sys.executable, program, folder / "disk", *words)
    return [str(word) for word in words]
