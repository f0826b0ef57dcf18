"""The meaning of obstore errors: whether to retry, how long, and the message for the user.

Of the error's own text only the server's error code is shown, because the rest may quote signed data.
"""

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from roxxel_dist.objects.connect import ENDPOINT_NAME, endpoint_of, proxy_variable
from roxxel_dist.objects.errors import (
    StoreDeniedError,
    StoreError,
    StoreNotFoundError,
    StorePreconditionError,
    StoreTimeoutError,
)
from roxxel_dist.objects.url import ObjectUrl

STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
REGION = re.compile(r"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
NO_TOKEN = re.compile(r"token request|[Cc]redentials")
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


@dataclass(frozen=True)
class ErrorRule:
    """The meaning of one kind of errors. The texts have fields: {bucket}, {at}, {named}, {credentials}, {endpoint},
    {proxy}."""

    kind: type[StoreError] | None
    """The class to raise; None for a temporary error, which is retried."""
    cause: str
    fix: str


@dataclass(frozen=True)
class Failure(ErrorRule):
    """The meaning of an error, with the fields of its texts filled in."""

    is_vague: bool
    """Whether a request with a response body may give more details."""
    is_of_bucket: bool
    """Whether it applies to all objects of the bucket."""


BUSY = ErrorRule(None, "the server answers that it is busy{named}", "look at the state of the server{at}")
CONDITION = ErrorRule(StorePreconditionError, "the object exists already, or was replaced", "read it again")
NO_BUCKET = ErrorRule(
    StoreNotFoundError,
    "there is no bucket '{bucket}'{at}",
    "make it, or correct its name, the region (AWS_REGION) or the endpoint ({endpoint})",
)
NO_OBJECT = ErrorRule(StoreNotFoundError, "there is no such object", "correct the path")
NO_KEYS = ErrorRule(
    StoreDeniedError, "this machine has no credentials, and no metadata server gives any", "set {credentials}"
)
CLOCK = ErrorRule(
    StoreDeniedError,
    "the clock of this host differs from that of the server{named}",
    "set the clock (timedatectl set-ntp true)",
)
KEY_UNKNOWN = ErrorRule(StoreDeniedError, "the server{at} does not know the access key{named}", "correct {credentials}")
KEY_WRONG = ErrorRule(
    StoreDeniedError, "the secret key does not belong to the access key{named}", "correct {credentials}"
)
EXPIRED = ErrorRule(
    StoreDeniedError, "the session token is out of date{named}", "sign in again, or take new credentials"
)
OTHER_REGION = ErrorRule(StoreDeniedError, "the bucket is in another region{named}", "set AWS_REGION to {region}")
NO_RIGHTS = ErrorRule(
    StoreDeniedError,
    "the credentials do not allow it{named}",
    "give them the rights to read, write, list and delete in the bucket, or use others ({credentials})",
)
SHORT = ErrorRule(StoreError, "the object ends before these bytes", "it was replaced or cut: write it again")
NO_ADDRESS = ErrorRule(
    StoreError, "the endpoint{at} is not an address", "set {endpoint} to http://HOST:PORT or https://HOST:PORT"
)
NO_STORE = ErrorRule(
    StoreError, "the server{at} does not support that{named}", "check that {endpoint} is the address of an object store"
)
LOST = "check the network{proxy} and {endpoint}; a larger store_timeout waits longer"


BY_CODE = {
    code: rule
    for rule, codes in (
        (BUSY, "RequestTimeout SlowDown InternalError ServiceUnavailable OperationAborted ServerBusy OperationTimedOut "
               "ConditionalRequestConflict Throttling ThrottlingException NoSuchUpload RequestThrottled "
               "TooManyRequests InvalidBlockList"),
        (NO_BUCKET, "NoSuchBucket ContainerNotFound InvalidBucketName"),
        (NO_OBJECT, "NoSuchKey BlobNotFound"),
        (CLOCK, "RequestTimeTooSkewed RequestExpired"),
        (KEY_UNKNOWN, "InvalidAccessKeyId"),
        (KEY_WRONG, "SignatureDoesNotMatch AuthenticationFailed InvalidAuthenticationInfo"),
        (EXPIRED, "ExpiredToken TokenRefreshRequired InvalidToken"),
        (OTHER_REGION, "AuthorizationHeaderMalformed PermanentRedirect TemporaryRedirect IncorrectEndpoint "
                       "IllegalLocationConstraintException"),
        (NO_RIGHTS, "AccessDenied AllAccessDisabled AuthorizationFailure AuthorizationPermissionMismatch"),
    )
    for code in codes.split()
}  # fmt: skip
BY_STATUS = {
    301: OTHER_REGION, 307: OTHER_REGION, 401: NO_RIGHTS, 403: NO_RIGHTS, 404: NO_OBJECT, 412: CONDITION, 416: SHORT,
    429: BUSY, 501: NO_STORE,
}  # fmt: skip
BY_NAME = {
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError", "NotModifiedError"), CONDITION),
    **dict.fromkeys(("PermissionDeniedError", "UnauthenticatedError"), NO_RIGHTS),
    "FileNotFoundError": NO_OBJECT,
    "NotSupportedError": NO_STORE,
}
BY_TEXT = {
    "without LOCATION": OTHER_REGION,
    "builder error": NO_ADDRESS,
    "dns error": ErrorRule(None, "no host has the name of the endpoint{at}", LOST),
    "Connection refused": ErrorRule(None, "the endpoint{at} refuses connections", LOST),
    "ConnectionRefused": ErrorRule(None, "the endpoint{at} refuses connections", LOST),
    "certificate": ErrorRule(None, "the certificate of the endpoint{at} is not trusted", LOST),
    "TimedOut": ErrorRule(None, "no whole answer came from the endpoint{at} within the limit of a request", LOST),
    "kind: Connect": ErrorRule(None, "the endpoint{at} cannot be reached", LOST),
    "": ErrorRule(None, "the connection to the endpoint{at} broke", LOST),
}


def failure_of(error: Exception, url: ObjectUrl) -> Failure:
    """The meaning of an obstore error in an operation on an object of this bucket."""
    text = str(error)
    code = match[1] if (match := CODE.search(text)) else ""
    status = int(match[1]) if (match := STATUS.search(text)) else 0
    rule = _rule(text, type(error).__name__, code, status)
    region = next(filter(None, match.groups())) if (match := REGION.search(text)) else "the bucket's"
    endpoint, proxy = endpoint_of(url), proxy_variable(url)
    at = f" at {endpoint}" if endpoint else ""
    fields = {
        "at": f"{at}, through the proxy of {proxy}," if proxy else at,
        "proxy": f", {proxy}, NO_PROXY" if proxy else "",
        "named": f" ({code or status})" if code or status else "",
        "bucket": url.bucket,
        "credentials": CREDENTIALS[url.scheme],
        "endpoint": ENDPOINT_NAME[url.scheme],
        "region": region,
    }
    return Failure(
        kind=rule.kind,
        cause=rule.cause.format(**fields),
        fix=rule.fix.format(**fields),
        is_vague=not code and status in (301, 307, 400, 403, 404),
        is_of_bucket=rule not in (NO_OBJECT, NO_RIGHTS, SHORT, CONDITION),
    )


def _rule(text: str, name: str, code: str, status: int) -> ErrorRule:
    if "169.254.169.254" in text or (not status and NO_TOKEN.search(text)):
        return NO_KEYS
    rule = BY_CODE.get(code) or BY_NAME.get(name) or BY_STATUS.get(status)
    if rule is not None:
        return rule
    if status:
        return BUSY if status >= 500 else NO_STORE
    return next(rule for mark, rule in BY_TEXT.items() if mark in text)


FIRST_WAIT_S = 0.1
MOST_WAIT_S = 5.0
SILENT_S = 30.0
"""Seconds of failures before a line is logged; log lines are at least twice that time apart."""
SILENT_AT_FIRST_S = 3.0
"""The same for a store that has not answered yet, because its address may be wrong."""

log: logging.Logger = logging.getLogger("roxxel_dist.objects")
T = TypeVar("T")


class Retries:
    """The retries of one store, for `timeout_s` after the first try of an operation. Thread-safe."""

    def __init__(self, timeout_s: float, meaning: Callable[[Exception, ObjectUrl], Failure]) -> None:
        self.timeout_s = timeout_s
        self.has_answered: bool = False
        """Whether an operation of the store has succeeded yet."""
        self._meaning = meaning
        self._lock = threading.Lock()
        self._logged = -float("inf")

    def run(self, operation: str, url: ObjectUrl, call: Callable[[int], T], span: tuple[int, int] | None = None) -> T:
        """The result of `call`, which gets the number of earlier tries, and raises obstore's errors or ShortBodyError.

        It must be safe to repeat. `operation`, a verb, and `span`, the bytes of the object, from and to (exclusive),
        are for messages. Raises StoreError of the class for the failure, StoreTimeoutError at the time limit.
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
