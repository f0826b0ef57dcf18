"""What clients, shells and pagers say instead of an agent, as far as it is understood."""

import re
from collections.abc import Iterable

MOST = 240
"""Characters of a line that a message quotes."""
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
COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
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
    """Of the lines of a client that did not connect, those that say why; they may be those of a ProxyCommand."""
    said = [line.strip() for line in lines if not ASIDE.search(line) and not line.startswith("@")]
    found = [line for line in said if line and not CLOSED.search(line)]
    return found or [line for line in said if line == HOST_KEY or re.search(DENIED, line)]


def question_in(data: bytes) -> str:
    """The question to a person with which this piece of output ends, or ""."""
    line = data[-200:].rpartition(b"\n")[2].decode(errors="replace").strip()
    return line if QUESTION.search(line) else ""


def shortened(line: str) -> str:
    """A line for a message, without colours: its beginning and its end, where it is long."""
    line = COLOUR.sub("", line)
    return line if len(line) <= MOST else f"{line[: MOST // 2]} … {line[-MOST // 2 :]}"
