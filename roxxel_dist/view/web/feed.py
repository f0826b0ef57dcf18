"""The data of the page: sections of items, read once for all viewers; only changed sections are sent."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roxxel_dist.view.items import Item, is_behind, read
from roxxel_dist.view.run import SLICE_S
from roxxel_dist.view.web.sections import Sections, item_id, message, sections

REFRESH_S, LIST_S, NEW_S = 1.0, 2.0, 5.0
"""Seconds between readings of open items, of a list, and searches for new items."""
SHARE = 0.02
"""The largest share of a core for reading, if reading is slow; long logs are read first, `SLICE_S` a look."""
LONGEST_S = 60.0


@dataclass
class _Reading:
    """The last reading of some items."""

    due: float = 0.0
    items: dict[str, Sections] = field(default_factory=dict)


class Feed:
    """The items of a page. Thread-safe: one thread reads, and the others get its result.

    Args:
        find: finds the items; called every `NEW_S` seconds to detect new runs. Raises ValueError if there are none.
    """

    def __init__(self, find: Callable[[], Sequence[Item]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._items: dict[str, Item] = {}
        self._looked = float("-inf")
        self._readings: dict[tuple[str, ...], _Reading] = {}
        self._look()

    def read(self, wanted: tuple[str, ...] = ()) -> tuple[list[str], dict[str, Sections]]:
        """(the ids of all items in order, the full sections of the wanted items, or brief sections of all)."""
        with self._lock:
            self._look()
            reading = self._readings.setdefault(wanted, _Reading())
            if (now := time.monotonic()) >= reading.due:
                before = time.thread_time()
                reading.items, behind = self._sections(wanted, before + SLICE_S)
                pause, took = REFRESH_S if wanted else LIST_S, time.thread_time() - before
                pause = REFRESH_S if behind else max(pause, took / SHARE)
                reading.due = now + min(pause, LONGEST_S)
                self._readings = {key: old for key, old in self._readings.items() if now < old.due + LONGEST_S}
            return list(self._items), reading.items

    def _sections(self, wanted: tuple[str, ...], deadline: float) -> tuple[dict[str, Sections], bool]:
        """(the sections of items, whether logs of them are not read to their ends yet)."""
        brief, items, behind = not wanted, dict[str, Sections](), False
        for name in wanted or self._items:
            if item := self._items.get(name):
                try:
                    state = read(item, brief=brief, deadline=deadline)
                    items[name], behind = sections(state, brief=brief), behind or is_behind(state)
                except (OSError, ValueError):  # it is being deleted or created
                    self._looked = float("-inf")
        return items, behind

    def _look(self) -> None:
        """Update the list of items. Existing readers stay, because they keep what they have read."""
        if time.monotonic() < self._looked + NEW_S:
            return
        try:
            found = self._find()
        except ValueError:
            if not self._items:
                raise
            found = []
        there = {item_id(type(item.reader).__name__, item.name): item for item in found}
        self._items = {name: self._items.get(name, item) for name, item in there.items()}
        self._looked = time.monotonic()


class Changes:
    """The changes that one viewer has not received yet."""

    def __init__(self, feed: Feed, wanted: tuple[str, ...] = ()) -> None:
        self._feed, self._wanted = feed, wanted
        self._ids: list[str] = []
        self._sent: dict[str, Sections] = {}

    def next(self) -> str:
        """The message with the changed sections; empty if there are no changes."""
        ids, items = self._feed.read(self._wanted)
        new = dict[str, Sections]()
        for name, now in items.items():
            before = self._sent.get(name, {})
            if parts := {part: text for part, text in now.items() if before.get(part) != text}:
                new[name] = parts
        if not new and ids == self._ids:
            return ""
        self._ids, self._sent = ids, dict(items)
        return message(ids, new)
