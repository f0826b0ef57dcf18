"""The meaning of obstore errors: whether to retry, and the message for the user.

Of the error's own text only the server's error code is shown, because the rest may quote signed data.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from roxxel_dist.objects.connect import ENDPOINT_NAME, endpoint_of, proxy_variable
from roxxel_dist.objects.errors import StoreDeniedError, StoreError, StoreNotFoundError, StorePreconditionError
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
    """The meaning of one kind of errors.

    The texts have fields: {bucket}, {at}, {named}, {credentials}, {endpoint}, {proxy}.
    """

    kind: type[StoreError] | None
    cause: str
    fix: str


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


def _rules(rule: ErrorRule, codes: str) -> Iterable[tuple[str, ErrorRule]]:
    return ((code, rule) for code in codes.split())


BY_CODE = dict(
    [
        *_rules(BUSY, "RequestTimeout SlowDown InternalError ServiceUnavailable OperationAborted ServerBusy"),
        *_rules(BUSY, "OperationTimedOut ConditionalRequestConflict Throttling ThrottlingException NoSuchUpload"),
        *_rules(BUSY, "RequestThrottled TooManyRequests InvalidBlockList"),
        *_rules(NO_BUCKET, "NoSuchBucket ContainerNotFound InvalidBucketName"),
        *_rules(NO_OBJECT, "NoSuchKey BlobNotFound"),
        *_rules(CLOCK, "RequestTimeTooSkewed RequestExpired"),
        *_rules(KEY_UNKNOWN, "InvalidAccessKeyId"),
        *_rules(KEY_WRONG, "SignatureDoesNotMatch AuthenticationFailed InvalidAuthenticationInfo"),
        *_rules(EXPIRED, "ExpiredToken TokenRefreshRequired InvalidToken"),
        *_rules(OTHER_REGION, "AuthorizationHeaderMalformed PermanentRedirect TemporaryRedirect IncorrectEndpoint"),
        *_rules(OTHER_REGION, "IllegalLocationConstraintException"),
        *_rules(NO_RIGHTS, "AccessDenied AllAccessDisabled AuthorizationFailure AuthorizationPermissionMismatch"),
    ]
)
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


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The meaning of an error.

    Attributes:
        kind: the class to raise; None for a temporary error, which is retried.
        cause, fix: for the message.
        is_vague: whether a request with a response body may give more details.
        is_of_bucket: whether it applies to all objects of the bucket.
    """

    kind: type[StoreError] | None
    cause: str
    fix: str
    is_vague: bool = False
    is_of_bucket: bool = False


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
