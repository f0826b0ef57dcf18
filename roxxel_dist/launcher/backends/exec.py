"""Ranks on hosts that a command reaches: one that runs a program there, with its stdin and stdout.

`kubectl exec -i {host} --`, `docker exec -i {host}` and `nsenter --target {host} …` take the words of a program: these
are put behind them. `ssh {host}` and `gcloud … --command` hand a text to a shell: `{command}` says where it goes.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from roxxel_dist.launcher.backends.kubernetes.node import VARIABLES, flags_from_environment
from roxxel_dist.launcher.backends.ssh import BOOTING, REFUSAL, NamedBackend, NamedHosts, check_hosts
from roxxel_dist.launcher.backends.ssh import HINTS as SSH_HINTS
from roxxel_dist.launcher.control.new_job import BackendOptions, job_of
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import python_words, shell_text
from roxxel_dist.launcher.transport.connection import causes, start_near
from roxxel_dist.process.exit_codes import UserError

PLACE, TEXT = "{host}", "{command}"
NOT_WORDS = "its words came through a shell"
CHECK = f'[ "$0" = words ] || {{ echo {NOT_WORDS} >&2; exit 64; }}'
"""A check before the program, where words follow the command: a shell that reads them again has another name."""
JOINS = re.compile(r"ssh|mosh|rsh|sshpass|gcloud")
"""Programs that are known to hand their words to a shell."""
ALL_WORKERS = re.compile(r"-{2}worker[= ]all\b")
"""How gcloud reaches all hosts of a TPU slice at once."""
BUSY = re.compile(
    r"\(?TooManyRequests\)?|Too Many Requests|TLS handshake timeout|error dialing backend|rate limit|i/o timeout|"
    r"unable to upgrade connection: unexpected EOF|\(ServiceUnavailable\)|Bad Gateway|etcdserver: ",
    re.I,
)
"""What an API server says that has no room for a connection now, or is being replaced."""
STARTING = re.compile(
    r"does not have a host assigned|unable to upgrade connection: pod does not exist|container not found \(\""
    r"|container \S+ is (not running|restarting, wait)|container state improper|is in CONTAINER_(CREATED|EXITED) state"
    r"|container is not created or running|no running task found",
    re.I,
)
"""Words of an API server, a kubelet or an engine for a pod or container that it knows, and that does not run."""
HINTS: base.Hints = (
    (NOT_WORDS, f"this command hands them to a shell: write {TEXT} in --via where the text of the program goes"),
    (" && exec ", f"this command takes words, and no text: leave {TEXT} out of --via, or write sh -c {TEXT}"),
    ("(NotFound)", "name pods that are there with --hosts, and their namespace in --via (-n NAME)"),
    ("No such container", "name containers that run with --hosts"),
    ("no container with name or ID", "name containers that run with --hosts"),
    ("is not running", "start it, or name containers that run with --hosts"),
    ("container state improper", "start it, or name containers that run with --hosts"),
    ("container not found", "it starts, or has ended: `kubectl describe pod` says why"),
    ("pod does not exist", "it starts, or has ended: `kubectl describe pod` says why"),
    ("does not have a host assigned", "its pod waits for a node: `kubectl describe pod` says why"),
    ("is not valid for pod", "name a container of the pod in --via (-c NAME)"),
    ("x509: certificate has expired", "is the clock of this machine right? Or else the server needs a new certificate"),
    ("expired", "who runs --via has to log in again"),
    ("Reauthentication", "who runs --via has to log in again (gcloud auth login)"),
    ("OCI runtime exec failed", "the container runs, and cannot start the program: its words are in the line"),
    ("(Unauthorized)", "who runs --via has to log in again"),
    ("(Forbidden)", "who runs --via needs the rights to do it (pods/exec)"),
    ("not a TTY", "leave -t out of --via"),
    ('exec: "sh"', "the image needs sh"),
)


@dataclass(eq=False)
class ExecBackend(NamedBackend):
    """One agent a host, each at the other end of a command that runs it there, whose pipes are the channel.

    Raises:
        ValueError: a name that cannot be a host's, or one given twice; a command that cannot be one for each host.
    """

    is_remote: ClassVar[bool] = True
    hints: ClassVar[base.Hints] = HINTS + SSH_HINTS + base.HINTS
    login: ClassVar[str] = (
        "does --via end before its program, or leave stdin out (kubectl, docker and podman exec need -i)?"
    )
    hosts: Sequence[str]
    """Names for the command, in the order of the ranks."""
    via: str
    """The command as a shell would read it: `{host}` is the host's name, `{command}` the program as a shell's text."""
    _: KW_ONLY
    python: str = ""
    """The interpreter on the hosts; empty: the path of this one."""
    directory: str = ""
    """The working directory on the hosts; empty: that of this process."""

    def __post_init__(self) -> None:
        self.hosts = check_hosts(self.hosts, by_ssh=False)
        self._words = via_words(self.via)
        self.cluster: str = f"{zlib.crc32(self.via.encode(errors='surrogateescape')):08x}"
        self.python = self.python or sys.executable
        self.directory = self.directory or os.getcwd()

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The command that `start` runs here."""
        program = shell_text(self.directory, python_words(self.python, module, *words))
        client = [word.replace(PLACE, host) for word in self._words]
        if TEXT in self.via:
            return [word.replace(TEXT, program) for word in client]
        return [*client, "sh", "-c", f"{CHECK}; {program}", "words"]

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on a host. Call it from the main thread: the command ends with the thread."""
        return start_near(self.argv(host, module, *words))

    def is_broken_link(self, code: int) -> bool:
        """True of every end: a client that was killed may have the code of a program that was."""
        return True

    def is_refusal(self, stderr: Sequence[str]) -> bool:
        """Whether a server, or a bastion before it, had no room for the connection."""
        return any(REFUSAL.search(line) or BUSY.search(line) for line in causes(stderr) or stderr)

    def is_starting(self, stderr: Sequence[str]) -> bool:
        """Whether a server or an engine knows the pod or container, which does not run; or a machine is booting."""
        return any(STARTING.search(line) or BOOTING in line for line in stderr)


def via_words(via: str) -> list[str]:
    """The words of a command for each host. Raises ValueError where it cannot be one, or is not on this machine."""
    try:
        words = shlex.split(via)
    except ValueError as error:
        raise UserError(f"--via {via!r} cannot be read as words of a shell: {error}") from None
    if ALL_WORKERS.search(via):
        raise UserError(
            f"--via {via!r} reaches all workers at once, and starts a program on each: write {PLACE} for `all`, and "
            "their numbers in --hosts 0,1"
        )
    if PLACE not in via:
        raise UserError(
            f"--via {via!r} has no {PLACE}: write where the name of the host goes, as in 'kubectl exec -i {PLACE} --'"
        )
    if shutil.which(words[0]) is None and PLACE not in words[0]:
        raise UserError(f"--via {via!r}: there is no `{words[0]}` on this machine: install it, or give its path")
    if JOINS.fullmatch(os.path.basename(words[0])) and TEXT not in via:
        raise UserError(
            f"--via {via!r}: {words[0]} hands its words to a shell: write {TEXT} where the text of the program goes, "
            f"as in 'ssh {PLACE} {TEXT}'"
        )
    return words


def restarts_of(attempt: int | None, environment: Mapping[str, str]) -> int:
    """The number of earlier starts of the job: by the flag, or by ROXXEL_RESTARTS. Raises ValueError for no number."""
    given = {name: value for name, value in environment.items() if name in VARIABLES["attempt"]}
    restarts = int(flags_from_environment({"attempt": attempt}, given)["attempt"] or 0)
    if restarts < 0:
        raise UserError(f"--attempt {restarts}: must be 0, or how often the job was started before")
    return restarts


@dataclass(frozen=True, kw_only=True)
class Options(BackendOptions, NamedHosts):
    """Start a program on many hosts, by any command that runs programs there: `launch exec --hosts a,b --via 'COMMAND
    {host}' [options] -- CMD…`.

    The command must ask nothing, and have no terminal. Each host needs sh, this Python environment, the working
    directory and the data at the same paths (--python, --directory).
    """

    example: ClassVar[str] = "--hosts a,b --via 'kubectl exec -i {host} --'"
    via: str
    """The command that runs a program on a host with stdin and stdout, such as 'kubectl exec -i {host} --'. {host} is
    replaced by the name of each host. A command that hands a text to a shell there has {command} where the text goes:
    'ssh {host} {command}'."""
    attempt: int | None = None
    """How often the job was started before; ranks resume where it is not 0. Not given: ROXXEL_RESTARTS, or 0."""

    def backend(self) -> tuple[ExecBackend, int]:
        """The hosts, and how many processes on those that work at a time. Raises ValueError for a slip."""
        python, directory = self.python or "", self.directory or ""
        return self.named(
            lambda hosts: ExecBackend(hosts, self.via, python=python, directory=directory),
            0.0 if self.dry_run else self.host_timeout,
        )

    def launch(self, request: base.LaunchRequest) -> int:
        """Start the ranks, which resume where the job was started before."""
        with request.usage_errors():
            restarts = restarts_of(self.attempt, os.environ)
            backend, nprocs = self.backend()
            job = replace(job_of(self, request, nprocs, backend), first_attempt=restarts)
        return request.start(self, job, backend)
