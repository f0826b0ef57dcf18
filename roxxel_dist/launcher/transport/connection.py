"""A program on a host: how its client, such as ssh, is started, what it says, and what is sent to it."""

import os
import re
import secrets
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from roxxel_dist.launcher.host.process_tree import die_with_parent
from roxxel_dist.launcher.host.protocol import LIMITS, NONCE, Decoder, Message, Outbox
from roxxel_dist.launcher.job.backend import RemoteProcess
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.launcher.output import LineSplitter, shorten
from roxxel_dist.process.exit_codes import UserError

CHUNK = 1 << 20
STDERR_LINES = 100
"""Lines of a program's stderr that are kept, to show why it ended."""
ASKED = re.compile(r"\bask:[a-z]")
"""What a shell that reads a question as a command names in its error, without quotes and perhaps without braces."""
ASIDE = re.compile(
    r": terminating, |^command terminated with exit code \d+|exited with return code \[\d+\]"
    r"|^(Try|See|Run) ['\"].*(-h|--help)\b|^env: use -\[v\]S"
    r"|^Default(ed|ing) container |^Use 'kubectl describe |^kubectl exec .* is DEPRECATED|^Unable to use a TTY"
    r"|^[IW]\d{4} \d\d:\d\d:\d\d\.\d+ |^Warning: Permanently added "
    r"|^Using ssh batch size of |^SSH: Attempting to connect |-{2}troubleshoot\b|^Recommendation: To check "
    r"|^Or, to investigate |^\*\* |^debug\d: "
    r"|^It looks like you are trying to use a client-go credential plugin|^To learn more about |^\s*https?://\S+$"
)
"""What ssh, kubectl, gcloud and others say beside what is wrong, or where nothing is."""
HOST_KEY = "Host key verification failed."
DENIED = r"^(\S+: )?Permission denied \([a-z,-]+\)\.$"
"""How ssh says that no key was taken; which one could not be used is in the lines before."""
PLUGIN = "getting credentials: exec: "
"""How kubectl says that the program failed that its configuration names for credentials."""
CLOSED = re.compile(
    r"^(kex|ssh)_exchange_identification: |^banner exchange: |^Connection (closed|reset) by |^Connection to \S+ closed"
    r"|^ssh_dispatch_run_fatal: |^client_loop: |^Disconnected from |^Received disconnect |^stdio forwarding failed"
    rf"|^{HOST_KEY}$|{DENIED}|^Permission denied, please try again\.$|{PLUGIN}"
)
"""What ssh, or kubectl, says at last, whatever has ended a connection that it could not make; the cause is above."""
KEY_COMMAND = re.compile(r"^\s*ssh-keygen -f .* -R .*")
"""How ssh says that an old key of a host is removed."""
MOST_CAUSES = 3
QUESTION = re.compile(
    r"(pass(word|phrase|code)\b[^:]*: *|\((yes/no|y/n)\b[^)]*\)\S* *|\[y/n\]:? *|-+ ?more ?-+.*|\(END\).*"
    r"|press .*\b(enter|return|any key)\b.*)$",
    re.IGNORECASE,
)
"""A line without an end that waits for a person: a password, a yes, a pager."""
ANOTHER_SHELL = "a start-up file (~/.bashrc) must not start another shell where the login has no terminal"


def causes(lines: Iterable[str]) -> list[str]:
    """The lines that say why a client did not connect; they may be those of a ProxyCommand."""
    said = [line.strip() for line in lines if not ASIDE.search(line) and not line.startswith("@")]
    found = [line for line in said if line and not CLOSED.search(line)]
    return found or [line for line in said if line == HOST_KEY or re.search(DENIED, line)]


def question_in(data: bytes) -> str:
    """The question to a person with which this piece of output ends, or ""."""
    line = data[-200:].rpartition(b"\n")[2].decode(errors="replace").strip()
    return line if QUESTION.search(line) else ""


STARTER = ThreadPoolExecutor(1, "start")
"""Its thread lives as long as this process: the job takes over clients that a thread of an attempt has asked for."""


class NearEnd(subprocess.Popen[bytes]):
    """A client with pipes, in a session of its own; what it has started there ends with it."""

    def kill(self) -> None:
        """End it now: a script around the client, and the client."""
        if self.poll() is None:  # so its number is still that of its group
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def start_near(argv: Sequence[str], env: Mapping[str, str] | None = None) -> NearEnd:
    """Start a client. It ends with this process, also if the thread that asks for it ends before.

    A launcher that is killed cannot close what is behind a cut link; the client would stay until TCP gives up.
    """
    if threading.current_thread() is threading.main_thread():
        return _start(argv, env)
    return STARTER.submit(_start, argv, env).result()


def _start(argv: Sequence[str], env: Mapping[str, str] | None) -> NearEnd:
    """It ends with the thread that calls this."""
    return NearEnd(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
        preexec_fn=die_with_parent,  # a system call, no lock
    )


@dataclass(eq=False, kw_only=True)
class HostConnection:
    """The controller's end of one program on a host."""

    host: str
    process: RemoteProcess
    limits: Limits = field(default_factory=Limits)
    ranks: list[int] = field(default_factory=list)
    last_seen: float = field(default_factory=time.monotonic)
    """The time of the program's last message, by the launcher's clock."""
    echoed: float = 0.0
    """The time of the newest heartbeat that the program has acknowledged, by the launcher's clock."""
    leased: bool = False
    """Whether its ranks may have a lease: for some time no host is known to have received from the launcher."""
    ready: bool = False
    """Whether any message has come."""
    unfinished: set[int] = field(default_factory=set)
    """Its ranks that have not ended well. Without any, its end costs nothing, and ends no other rank."""
    done: bool = False
    """Whether nothing more is expected from it in this attempt: its work has ended, or it is lost."""
    lost: bool = False
    """Whether no message is expected from it any more."""
    started: bool = False
    """Whether it got the order to start ranks, or spares: from then on it ends if it receives nothing."""
    gone: int | None = None
    """The exit code of its guard, as that says when nothing is left there; its client may have another one."""
    question: int = 0
    """The number of the last question sent to it."""
    answered: int = 0
    """That of the last question that it has answered."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """The letters with which its messages begin."""
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))
    """The last lines of its stderr: those of ssh, or of a program that could not start."""

    def __post_init__(self) -> None:
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._streams = (stdin, stdout, stderr)
        self.order_fd: int = stdin.fileno()
        self.fd: int = stdout.fileno()
        self.error_fd: int = stderr.fileno()
        self._outbox = Outbox(self.order_fd)
        self.backlog: set[HostConnection] = set()
        """Of its pool: those with orders for which the pipe has had no room."""
        self._is_new = True
        self.decoder: Decoder = Decoder(self.nonce)
        self._lines = LineSplitter()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> bool:
        """Whether there are orders for which the pipe has had no room."""
        return len(self._outbox) > 0

    def send(self, *messages: Message) -> None:
        """Give orders, and go on with those that wait, without waiting for the program; one that is gone needs none."""
        with self._lock:
            if self._streams[0].closed:
                return
            for message in messages:
                self._outbox.send(
                    {**message, NONCE: self.nonce, LIMITS: asdict(self.limits)} if self._is_new else message
                )
                self._is_new = False
            self._outbox.flush()
            (self.backlog.add if self.waiting else self.backlog.discard)(self)

    @property
    def last_words(self) -> str:
        """The last line of a program that runs and does not answer, for a message."""
        line = self.last_error or self.decoder.noise
        return f" (its last line: {shorten(line)})" if line else ""

    @property
    def last_error(self) -> str:
        """The last line of its stderr, but for what clients say in any case; or ""."""
        return next((line.strip() for line in reversed(self.stderr) if not ASIDE.search(line)), "")

    @property
    def first_causes(self) -> str:
        """The reasons that its client gave before it closed the connection without having connected; or ""."""
        lines = [line for line in self.stderr if not ASIDE.search(line)]
        return " | ".join(causes(lines)[-MOST_CAUSES:]) if lines and CLOSED.search(lines[-1]) else ""

    def messages(self, data: bytes) -> Iterator[Message]:
        """The messages that this piece of its output completes. Raises ValueError for what no single agent sends."""
        for message in self.decoder.feed(data):
            if message.get("type") == "gone":
                self.gone = int(message["code"])
                return
            self.ready = True
            if "id" in message and message["id"] <= self.answered:  # one program answers in order
                raise UserError("more than one program answers: what reaches this host must reach no other one too")
            self.answered = message.get("id", self.answered)
            yield message

    def errors(self, data: bytes) -> list[str]:
        """The lines that this piece of its stderr completes (its end: `b""`)."""
        lines = [line for line in (self._lines.feed(data) if data else self._lines.close()) if line.strip()]
        self.stderr.extend(lines)
        return lines

    def wait(self, limit_s: float) -> int | None:
        """Wait for the exit code, and read stderr up to there; None where the limit is over, and the program killed."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = None
        os.set_blocking(self.error_fd, False)  # another process may hold the other end for long
        with suppress(BlockingIOError):
            while data := os.read(self.error_fd, CHUNK):
                self.errors(data)
        self.errors(b"")
        return code

    def hang_up(self) -> None:
        """Close the stream of orders: the program ends, an agent together with its ranks.

        The runtime of a container may keep the stream open there, so there is an order for it too.
        """
        self.send({"type": "leave"})
        with self._lock, suppress(BrokenPipeError):
            self._streams[0].close()

    def end(self, limit_s: float) -> int:
        """Wait for the exit code; at the limit the client is killed. One that a disk or a driver holds is left."""
        code = self.wait(limit_s)
        code = self.wait(self.limits.kill_s) if code is None else code
        return -signal.SIGKILL if code is None else code

    def close(self, limit_s: float) -> None:
        """Wait for the end of a program that was hung up on. Its client is killed at the limit."""
        self._streams[1].close()
        self.end(limit_s)
        self._streams[2].close()

    def read_to_end(self, end: float) -> None:
        """Wait until the guard of a program that was hung up on says that nothing is left, where it has one."""
        if not self.started:
            return
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        with suppress(ValueError):  # what comes is no message
            while self.gone is None and poll.poll(1000 * max(0.0, end - time.monotonic())):
                if not (data := os.read(self.fd, CHUNK)):
                    return
                deque(self.messages(data), maxlen=0)
