"""Requests to a job that hosts join or leave it: a mailbox beside its logs, from which its controller answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.process.mailbox import Mailbox


@dataclass(frozen=True, kw_only=True)
class Request:
    """Hosts that shall join a job, or leave it."""

    name: str
    """In the mailbox."""
    joins: bool
    """Join; or else leave."""
    hosts: tuple[str, ...]


def mailbox(logs: str | Path) -> Mailbox:
    """The requests to the job with these logs; an answer is {"done": whether it was followed, "text": words}."""
    return Mailbox(Path(logs, "members"))


def read(box: Mailbox) -> Iterator[Request]:
    """Take the requests that are there."""
    for name, content in box.take_requests():
        if isinstance(content.get("hosts"), list):
            yield Request(name=name, joins=bool(content.get("joins")), hosts=tuple(map(str, content["hosts"])))
