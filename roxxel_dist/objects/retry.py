"""Retries an operation on an object until it succeeds, fails permanently, or reaches a time limit."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from roxxel_dist.objects.errors import StoreError, StoreTimeoutError
from roxxel_dist.objects.failures import Failure
from roxxel_dist.objects.url import ObjectUrl

FIRST_WAIT_S = 0.1
MOST_WAIT_S = 5.0
SILENT_S = 30.0
"""Seconds of failures before a line is logged; log lines are at least twice that time apart."""
SILENT_AT_FIRST_S = 3.0
"""The same for a store that has not answered yet, because its address may be wrong."""

log: logging.Logger = logging.getLogger("roxxel_dist.objects")
T = TypeVar("T")


class Retries:
    """The retries of one store. Thread-safe.

    Attributes:
        timeout_s: seconds after the first try of an operation in which it is retried.
        has_answered: whether an operation of the store has succeeded yet.
    """

    def __init__(self, timeout_s: float, meaning: Callable[[Exception, ObjectUrl], Failure]) -> None:
        self.timeout_s = timeout_s
        self.has_answered: bool = False
        self._meaning = meaning
        self._lock = threading.Lock()
        self._logged = -float("inf")

    def run(self, operation: str, url: ObjectUrl, call: Callable[[int], T], span: tuple[int, int] | None = None) -> T:
        """The result of `call`, which gets the number of earlier tries, and raises obstore's errors or ShortBodyError.

        Args:
            operation: a verb, for messages.
            url: the address of the object.
            call: the operation, which must be safe to repeat.
            span: the requested bytes of the object, from and to (exclusive); None for all.

        Raises:
            StoreError: of the class for the failure; StoreTimeoutError at the time limit.
        """
        begin, tries = time.monotonic(), 0
        while True:
            try:
                done = call(tries)
            except StoreError:
                raise
            except Exception as error:
                failure = self._meaning(error, url)
                tries += 1
                age = time.monotonic() - begin
                where = f"{operation} {url}" + ("" if span is None else f" bytes {span[0]}-{span[1]}")
                if failure.kind is not None:
                    raise failure.kind(f"{where}: {failure.cause}: {failure.fix}") from None
                if age >= self.timeout_s:
                    times = f"{tries} tries" if tries > 1 else "1 try"
                    what = f"{where}: {failure.cause}, {times} in {age:.0f} s"
                    raise StoreTimeoutError(f"{what}: {failure.fix}") from None
                wait = random.uniform(0.5, 1) * min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** min(tries - 1, 16))
                self._log(
                    f"{where}: {failure.cause}, for {age:.0f} s; tried until {self.timeout_s:.0f} s are over", age
                )
                time.sleep(min(wait, self.timeout_s - age))
            else:
                self.has_answered = True
                return done

    def _log(self, line: str, age: float) -> None:
        with self._lock:
            now = time.monotonic()
            silent = SILENT_S if self.has_answered else SILENT_AT_FIRST_S
            if age < silent or now - self._logged < 2 * SILENT_S:
                return
            self._logged = now
        log.warning(line)


class ShortBodyError(Exception):
    """A body is shorter or longer than requested."""
