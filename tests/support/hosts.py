"""Real hosts for tests: machines on a switch of their own, each with a name, a hosts file, a home and a real sshd.

They share this machine's files (but for what `bind` and `tmpfs` put in place) and its process numbers.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from machines import LIMIT_S, PATH, Machine

ROOT = Path(__file__).parents[2]
CONTROLLER = "controller"
SWITCH = "switch"
LISTENS = "Server listening on"

SSH = """\
Host *
User root
BatchMode yes
IdentityFile "{folder}/key"
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile "{folder}/known_hosts"
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
# The default takes 0.1 s of CPU.
KexAlgorithms curve25519-sha256
"""

SSHD = """\
AddressFamily inet
HostKey "{folder}/{name}/host_key"
AuthorizedKeysFile "{folder}/key.pub"
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
SetEnv {variables}
"""


ENTER = """\
#!/bin/sh
name=$1
shift
case $name in
{pids}*) echo "no host $name" >&2; exit 1;;
esac
exec nsenter --target $pid --mount --uts --net -- env -i PATH="$PATH" $(cat "{folder}/$name/variables") "$@"
"""


class Cluster:
    """Hosts h1, h2 … (10.77.0.1, …2 …) and a machine named "controller" (10.77.0.254); a context manager.

    `names` calls the hosts otherwise. From each of them `ssh -F {ssh_config} h2` logs in as root. Sessions find
    PYTHONPATH (this checkout) and HOME (a folder of the host's own). Clusters do not see each other, whatever their
    addresses.
    """

    def __init__(self, count: int, names: tuple[str, ...] = ()) -> None:
        self.names = names or tuple(f"h{number + 1}" for number in range(count))
        self._addresses = {name: f"10.77.0.{number + 1}" for number, name in enumerate(self.names)}
        self._addresses[CONTROLLER] = "10.77.0.254"
        self.folder = Path(tempfile.mkdtemp(prefix="roxxel-hosts-"))
        self.ssh_config = self.folder / "ssh_config"
        self._variables = {name: {"PYTHONPATH": str(ROOT), "HOME": str(self.home(name))} for name in self.names}
        self._settings: dict[str, dict[str, str]] = {name: {} for name in self.names}
        self._machines: dict[str, Machine] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._silent: set[str] = set()
        self._impaired: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, name: str) -> str:
        """The IPv4 address of a host, or of the controller."""
        return self._addresses[name]

    def home(self, name: str) -> Path:
        """HOME on a host, or on the controller."""
        return self.folder / name / "home"

    @property
    def enter(self) -> Path:
        """A program that runs others on a host, as `kubectl exec -i` does in a pod: `enter h1 WORDS`."""
        path = self.folder / "enter"
        if not path.exists():
            pids = "".join(f"{name}) pid={machine.holder.pid};;\n" for name, machine in self._machines.items())
            path.write_text(ENTER.format(pids=pids, folder=self.folder))
            path.chmod(0o755)
        return path

    def launch(self, way: str = "ssh") -> list[object]:
        """The first words of a launch on all hosts: by `ssh`, `exec`, or `exec over ssh`, whose link can be cut."""
        return [*self.reach(way), "--hosts", ",".join(self.names)]

    def reach(self, way: str = "ssh") -> list[object]:
        """As `launch`, without the hosts."""
        if way == "ssh":
            return ["launch", "ssh", "--ssh-config", self.ssh_config]
        if way == "exec":
            return ["launch", "exec", "--via", f"{self.enter} {{host}}"]
        return ["launch", "exec", "--via", f"ssh -F {self.ssh_config} -o ConnectTimeout=10 {{host}} {{command}}"]

    def run(
        self,
        words: Iterable[object],
        *,
        on: str = CONTROLLER,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        **more: Any,
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` on a host, not by ssh: text, output captured, `env` added to this process's variables."""
        more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        if "input" not in more:
            more.setdefault("stdin", subprocess.DEVNULL)
        command = self._machines[on].words(words, cwd or Path.cwd())
        return subprocess.run(command, env=self._environ(on, env), text=True, timeout=timeout, **more)

    def popen(
        self,
        words: Iterable[object],
        *,
        on: str = CONTROLLER,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """`subprocess.Popen` on a host, as `run`; its pid is the program's. With the cluster it ends at the latest."""
        command = self._machines[on].words(words, cwd or Path.cwd())
        process = cast("subprocess.Popen[bytes]", subprocess.Popen(command, env=self._environ(on, env), **more))
        self._started.append(process)
        return process

    def processes(self, name: str) -> list[int]:
        """Pids of all that runs on a host but for its sshd, those of sshd's sessions included."""
        return [pid for pid in self._machines[name].processes() if not _name(pid).startswith("sshd")]

    def signal(self, name: str, pid: int, number: int) -> None:
        """Send a signal to a process of a host, and to no other that has its number by now. Raises OSError if gone."""
        handle = os.pidfd_open(pid)
        try:
            if os.stat(f"/proc/{pid}/ns/net").st_ino != self._machines[name].namespace:
                raise ProcessLookupError(pid)
            signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

    def reset(self, name: str, *filters: str) -> int:
        """Reset the TCP connections of a host that are open (both ends get an error), and return how many they were.

        `filters` are words of `ss`; by default all connections but those of ssh.
        """
        words = filters or ("not", "(", "sport", "=", ":22", "or", "dport", "=", ":22", ")")
        return len(self.run(["ss", "-HKtn", "state", "established", *words], on=name).stdout.splitlines())

    def cut(self, name: str) -> None:
        """Pull a host's cable at the switch: its carrier is gone, and its peers get no message."""
        self._switch(f"link set dev {name} down")
        self._silent.discard(name)  # a port that comes up again forwards

    def drop(self, name: str) -> None:
        """Lose every packet from and to a host in silence; its link stays up."""
        self._machines[SWITCH].change("bridge", "link", "set", "dev", name, "state", "0")
        self._silent.add(name)

    def impair(self, name: str, *, delay_ms: float = 0, loss: float = 0) -> None:
        """Delay every packet from and to a host, and lose this share of them, until `restore`."""
        self.restore(name)
        far, near, between = f"{name}.far", f"{name}.near", f"{name}.mid"
        words = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            sys.executable,
            Path(__file__).with_name("impaired_link.py"),
            far,
            near,
        ]
        link = self.popen([*words, delay_ms, loss], on=SWITCH, stdout=subprocess.PIPE)
        self._impaired[name] = link
        assert link.stdout is not None
        if link.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the cable of {name} cannot be impaired: TAP devices cannot be made here")
        self._switch(
            f"link add name {between} type bridge",
            f"link set dev {between} up",
            f"link set dev {far} master {between} up",
            f"link set dev {near} master bridge up",
            f"link set dev {name} master {between}",
        )

    def restore(self, name: str) -> None:
        """Undo `cut`, `drop` and `impair`.

        As on any network, a host that just failed to reach this one may get "No route to host" for another second.
        """
        self._switch(f"link set dev {name} up")
        if name in self._silent:
            self._machines[SWITCH].change("bridge", "link", "set", "dev", name, "state", "3")
            self._silent.discard(name)
        if name in self._impaired:
            self._switch(f"link set dev {name} master bridge", f"link delete dev {name}.mid")
            link = self._impaired.pop(name)
            link.kill()
            link.wait()

    def bind(self, name: str, source: str | Path, target: str | Path) -> None:
        """Let one host alone find the file or folder `source` at the existing path `target`."""
        self._machines[name].change("mount", "--bind", source, target)

    def tmpfs(self, name: str, path: str | Path, size: str) -> None:
        """Let one host alone find an empty file system of this size ("10m") at an existing folder."""
        self._machines[name].change("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)

    def remount(self, name: str, path: str | Path, mode: str) -> None:
        """Make the last `bind` at this path read-only ("ro") for one host, or writable again ("rw")."""
        self._machines[name].change("mount", "-o", f"remount,bind,{mode}", path)

    def unmount(self, name: str, path: str | Path) -> None:
        """Undo the last `bind` or `tmpfs` at this path."""
        self._machines[name].change("umount", "--lazy", path)

    def change(self, name: str, *words: object) -> None:
        """Run a program on a host that has to succeed, such as `iptables`; RuntimeError where it does not."""
        self._machines[name].change(*words)

    def resolve(self, name: str, own: str | None = None) -> None:
        """Let a host's own name mean this address (such as 127.0.1.1) to itself; None: its real one."""
        known = {**self._addresses, name: own} if own is not None else self._addresses
        lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in known.items()), ""]
        # Written in place: the file is mounted, a new one of its name would not be.
        (self.folder / name / "hosts").write_text("\n".join(lines))

    def firewall(self, name: str, incoming: str = "", outgoing: str = "") -> None:
        """Let a host filter packets by these rules of nftables, a rule a line; needs Debian's nftables."""
        chains = (("input", incoming), ("output", outgoing))
        rules = "".join(f"chain {hook} {{\ntype filter hook {hook} priority 0\n{lines}\n}}\n" for hook, lines in chains)
        self._machines[name].change("nft", "-f", "-", given=f"table inet wall {{\n{rules}}}\n")

    def add_address(self, name: str, interface: str, address: str) -> None:
        """Give a host an interface without a cable, with this address ("172.17.0.1/16"), as docker0 has."""
        for words in (
            f"link add {interface} type bridge",
            f"addr add {address} dev {interface}",
            f"link set {interface} up",
        ):
            self._machines[name].change("ip", *words.split())

    def set_env(self, name: str, **values: str) -> None:
        """Add to the variables that later ssh sessions find on a host."""
        self._variables[name].update(values)
        self._reconfigure(name)

    def configure(self, name: str, **settings: str) -> None:
        """Change settings of a host's sshd, for later sessions."""
        self._settings[name].update(settings)
        self._reconfigure(name)

    def _reconfigure(self, name: str) -> None:
        self._configure(name)
        machine = self._machines[name]
        before = machine.count_said(LISTENS)
        machine.wait_listens_to(signal.SIGHUP)  # sshd speaks before it does, and would die of it
        machine.holder.send_signal(signal.SIGHUP)
        machine.wait_said(LISTENS, before + 1)

    def close(self) -> None:
        """End everything that runs on the hosts and take them away."""
        for process in self._started:  # before the machines: one may not have entered its own yet
            if process.poll() is None:
                process.kill()
        for machine in self._machines.values():
            machine.end()
        for process in self._started:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            process.wait(LIMIT_S)
        shutil.rmtree(self.folder)

    def _build(self) -> None:
        self.ssh_config.write_text(SSH.format(folder=self.folder))
        for name in (SWITCH, *self._addresses):
            self.home(name).mkdir(parents=True)
            self.resolve(name)
        self._make_keys()
        sshd = [str(shutil.which("sshd", path=PATH)), "-D", "-e", "-f"]
        for name in (SWITCH, *self._addresses):
            if name in self.names:
                self._configure(name)
            folder = self.folder / name
            self._machines[name] = Machine(
                name=name,
                address=self._addresses.get(name, ""),
                folder=folder,
                runs=[*sshd, str(folder / "sshd_config")] if name in self.names else ["sleep", "infinity"],
            )
        for machine in self._machines.values():
            machine.wait_ready()
        cables = ["link add name bridge type bridge", "link set dev bridge up"]
        for name in self._addresses:
            cables.append(f"link add name {name} type veth peer name eth0 netns {self._machines[name].holder.pid}")
            cables.append(f"link set dev {name} master bridge up")
        self._switch(*cables)
        for machine in self._machines.values():
            machine.go()
        for name in self.names:
            self._machines[name].wait_said(LISTENS)

    def _make_keys(self) -> None:
        files = [self.folder / "key", *(self.folder / name / "host_key" for name in self.names)]
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"]
        codes = [process.wait(LIMIT_S) for process in [subprocess.Popen([*words, file]) for file in files]]
        if any(codes):
            raise RuntimeError(f"ssh-keygen ended with {codes}")
        known = [
            f"{name},{self.address(name)} {file.with_suffix('.pub').read_text()}"
            for name, file in zip(self.names, files[1:], strict=True)
        ]
        (self.folder / "known_hosts").write_text("".join(known))

    def _configure(self, name: str) -> None:
        # For `enter`; none of them has spaces.
        (self.folder / name / "variables").write_text(" ".join(f"{k}={v}" for k, v in self._variables[name].items()))
        variables = " ".join(f'"{key}={value}"' for key, value in self._variables[name].items())
        first = "".join(f"{key} {value}\n" for key, value in self._settings[name].items())  # the first value counts
        text = first + SSHD.format(folder=self.folder, name=name, variables=variables)
        (self.folder / name / "sshd_config").write_text(text)

    def _switch(self, *commands: str) -> None:
        self._machines[SWITCH].change("ip", "-batch", "-", given="\n".join(commands))

    def _environ(self, on: str, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "HOME": str(self.home(on)), **(env or {})}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
