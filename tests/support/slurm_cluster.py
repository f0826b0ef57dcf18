"""A real SLURM for tests: slurmctld and one slurmd a host, with munge, on the hosts of `hosts.Cluster`.

Needs Debian's slurmctld, slurmd, slurm-client and munge. Its timers are short: a node is down after some seconds, and a
requeued job starts again at once (SLURM waits as long as a credential lives, two minutes by default).
"""

import os
import pwd
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hosts import CONTROLLER, Cluster
from machines import PATH

LIMIT_S = 60.0
GRACE_S = 20
"""What a job of the partition `low` has between the signal and the end when one of `high` preempts it."""
GPUS = 4
"""Of each node, for SLURM to count and hand out; their devices are as /dev/null."""
PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
CONF = """\
ClusterName=sim
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout=6
MessageTimeout=5
KillWait=3
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> str | None:
    """Why there can be no SLURM here, or None."""
    absent = sorted({package for tool, package in PACKAGES.items() if shutil.which(tool, path=PATH) is None})
    return f"these tests need: apt-get install {' '.join(absent)}" if absent else None


class Slurm:
    """SLURM on the hosts of a cluster, with the controller as login node; a context manager.

    Args:
        hosts: nodes h1, h2 …; they see the files of this machine.
        home: HOME of all jobs and of the login node, as on a real cluster.
    """

    def __init__(self, hosts: Cluster, home: Path) -> None:
        self.hosts = hosts
        self._folder = hosts.folder / "slurm"
        self.environ = {
            "SLURM_CONF": str(self._folder / "slurm.conf"),
            "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        for name in ("state", "munge", *(f"spool-{host}" for host in self.hosts.names)):
            (self._folder / name).mkdir(parents=True)
        nodes = (
            f"NodeName={name} NodeAddr={self.hosts.address(name)} CPUs=4 RealMemory=1000 Gres=gpu:{GPUS}"
            for name in self.hosts.names
        )
        conf = CONF.format(
            controller=CONTROLLER,
            address=self.hosts.address(CONTROLLER),
            folder=self._folder,
            nodes="\n".join(nodes),
            grace=GRACE_S,
        )
        (self._folder / "slurm.conf").write_text(conf)
        for number in range(GPUS):
            os.mknod(self._folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (self._folder / "gres.conf").write_text(
            f"Name=gpu Flags=nvidia_gpu_env File={self._folder}/gpu[0-{GPUS - 1}]\n"
        )
        self._start_munge()
        self._daemon("slurmctld", CONTROLLER, "slurmctld", "-D")
        for host in self.hosts.names:
            self.start_node(host)
        self._until(lambda: set(self.run("sinfo", "-h", "-o", "%T").stdout.split()) == {"idle"}, "the nodes")

    def _start_munge(self) -> None:
        """munged will not run as root."""
        self.hosts.folder.chmod(0o755)
        folder, user = self._folder / "munge", pwd.getpwnam("munge")
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        for path in (folder, folder / "key"):
            os.chown(path, user.pw_uid, user.pw_gid)
        folder.chmod(0o755)
        files = (f"--{name}-file={folder / name}" for name in ("key", "log", "pid", "seed"))
        drop = ("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups")
        self._daemon("munged", CONTROLLER, *drop, "munged", "--foreground", f"--socket={folder / 'socket'}", *files)
        self._until((folder / "socket").exists, "munged")

    def _daemon(self, name: str, on: str, *words: object) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = self.hosts.popen(
                ("setpriv", "--pdeathsig", "KILL", *words),
                on=on,
                cwd="/",
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def start_node(self, host: str) -> None:
        """Start the slurmd of a host, or start it again."""
        self._daemon(host, host, "slurmd", "-D")

    def kill_node(self, host: str) -> None:
        """kill -9 of its slurmd; what it has started lives on, as SLURM has it."""
        self._daemons[host].kill()
        self._daemons[host].wait()

    def run(
        self, *words: object, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login node."""
        return self.hosts.run(words, env={**self.environ, **(env or {})}, **more)

    def popen(self, *words: object, **more: Any) -> "subprocess.Popen[bytes]":
        """The same, started."""
        return self.hosts.popen(words, env=self.environ, **more)

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of a job: JobState, ExitCode, Restarts, NodeList …"""
        told = self.run("scontrol", "show", "job", "-o", number).stdout
        return dict(re.findall(r"(\w+)=(\S*)", told))

    def wait(self, number: str, *states: str, limit: float = LIMIT_S) -> dict[str, str]:
        """Wait until a job is in one of these states, and return what SLURM says of it then."""
        self._until(lambda: self.job(number)["JobState"] in states, f"job {number} to be {states}", limit)
        return self.job(number)

    def _until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT_S) -> None:
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, f"waited {limit} s for {what}: {self._logs()}"
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self._folder.glob("*.out")))

    def close(self) -> None:
        """Cancel what runs, and end the daemons."""
        if "slurmctld" in self._daemons and self._daemons["slurmctld"].poll() is None:
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
        for name in (*self.hosts.names, "slurmctld", "munged"):
            if name in self._daemons:
                self._daemons[name].terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:  # a slurmd waits for its children
                daemon.kill()
                daemon.wait()
