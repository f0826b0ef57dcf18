"""Frames on a terminal, updated repeatedly, and keyboard input."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live

from roxxel_dist.view.frame import Look, frame
from roxxel_dist.view.items import State, Watched, is_behind, read
from roxxel_dist.view.run import SLICE_S

REFRESH_S, LIST_S = 1.0, 2.0
"""Seconds between readings of one item, and of a list."""
POLL_S = 0.25
"""Seconds between checks for a key and a resized terminal."""
SHARE = 0.01
"""The largest share of a core for reading, if reading is slow; long logs are read first, `SLICE_S` a look."""
NEXT, BEFORE = (b"n", b"j", b"\x1b[B"), (b"p", b"k", b"\x1b[A")


def look_of(console: Console) -> Look:
    """The display options for a terminal."""
    return Look(width=console.width, height=console.height, ascii_only=not console.encoding.startswith("utf"))


def show(console: Console, states: list[State]) -> None:
    """Print one frame, without the keys."""
    look = look_of(console)
    lines = frame(states, look if console.is_terminal else replace(look, height=max(look.height, len(states) + 30)))
    for line in lines:
        console.print(line)


def run(console: Console, watched: Watched) -> None:
    """Show the items until the user quits or presses Ctrl-C. Standard input and output are a terminal."""
    opened, chosen, zoom = len(watched.items) == 1, watched.items[0], False
    states: list[State] = []
    items = shown = watched.items
    due, drawn = 0.0, (0, 0)
    with _keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if (now := time.monotonic()) >= due:
                before = time.thread_time()
                watched.look(states)
                items = watched.items
                if chosen not in items:
                    chosen = items[0]
                shown = [chosen] if opened or len(items) == 1 else items
                states = [
                    read(item, brief=len(shown) > 1 and item != chosen, deadline=before + SLICE_S) for item in shown
                ]
                pause, took = REFRESH_S if len(shown) == 1 else LIST_S, time.thread_time() - before
                pause = REFRESH_S if any(map(is_behind, states)) else max(pause, took / SHARE)
                due, drawn = now + min(pause, 60.0), (0, 0)
            if drawn != console.size:
                look = replace(look_of(console), zoom=zoom, chosen=shown.index(chosen))
                live.update(Group(*frame(states, look, _footer(len(items), len(shown) == 1, zoom))), refresh=True)
                drawn = console.size
            key = _key()
            if key in (b"q", b"\x03", b"\x04"):
                return
            if not key:
                continue
            if key in NEXT or key in BEFORE:
                chosen = items[(items.index(chosen) + (1 if key in NEXT else -1)) % len(items)]
            elif key in (b"\r", b"\n") and len(items) > 1:
                opened = not opened
            elif key == b"z":
                zoom = not zoom
            due = 0.0


def _footer(count: int, opened: bool, zoom: bool) -> str:
    keys = ["q quit", f"z {'whole curve' if zoom else 'last quarter'}"]
    if count > 1:
        keys += ["n next", "p previous", f"Enter {'list' if opened else 'open'}"]
    return "  ".join(keys)


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """A context in which keys are read as they are pressed, without echo."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key() -> bytes:
    """The key that is pressed within `POLL_S`; empty if none is. Raises EOFError if the terminal is gone."""
    if not select.select([sys.stdin], [], [], POLL_S)[0]:
        return b""
    key = os.read(sys.stdin.fileno(), 16)
    if not key:
        raise EOFError
    return key if key.startswith(b"\x1b") else key[:1]
