"""Opens a bucket with obstore, with credentials, region and endpoint as in the clouds' own tools."""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from roxxel_dist.objects.errors import MissingLibraryError, StoreDeniedError
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.process.exit_codes import UserError, pip_install

CONNECT_S = 10.0
ENDPOINT = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+(/[\w./-]*)?")
ENDPOINT_NAME = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_ENDPOINT"}
CLOUDS = {
    "s3": "https://s3.amazonaws.com",
    "gs": "https://storage.googleapis.com",
    "az": "https://blob.core.windows.net",
}
"""Where a bucket is that has no endpoint of its own."""
NO_KEYS = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"


def connect(url: ObjectUrl, *, request_s: float, retry_s: float) -> Any:
    """An obstore store of the whole bucket of an address; no request is made.

    A request, its body included, takes at most `request_s`, and obstore itself retries it for `retry_s` (0: never).
    Raises ValueError: the endpoint in the environment is not an address. MissingLibraryError: obstore is not installed.
    StoreDeniedError: the credential settings are not usable.
    """
    try:
        import obstore.store
    except ImportError as error:
        raise MissingLibraryError(f"{url}: a path in a bucket needs a package: {pip_install('cloud')}") from error
    options: dict[str, Any] = {"timeout": timedelta(seconds=request_s)}
    options["connect_timeout"] = timedelta(seconds=min(CONNECT_S, request_s))
    if path := os.environ.get("AWS_CA_BUNDLE") if url.scheme == "s3" else None:
        options["root_certificate"] = Path(path).read_bytes()
    retries = {
        "max_retries": 1000 if retry_s else 0,
        "retry_timeout": timedelta(seconds=retry_s or 1),
        "backoff": BACKOFF,
    }
    make = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore, "az": obstore.store.AzureStore}[url.scheme]
    settings = {"s3": _s3, "gs": _gs, "az": _az}[url.scheme]()
    endpoint = settings.get("base_url" if url.scheme == "gs" else "endpoint") or ""
    if endpoint and not ENDPOINT.fullmatch(endpoint):
        raise UserError(
            f"{url}: {endpoint!r} is not an endpoint: set {ENDPOINT_NAME[url.scheme]} to https://HOST or http://HOST:PORT"
        )
    if endpoint.startswith("http://"):  # explicit http is intended, because all clouds use https
        options["allow_http"] = True
    return make(url.bucket, **settings, client_options=options, retry_config=retries)  # pyright: ignore[reportArgumentType]


BACKOFF: Any = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}


def endpoint_of(url: ObjectUrl) -> str:
    """The endpoint from the environment, for messages; "" if there is none."""
    settings = {"s3": _s3_endpoint, "gs": _gs_endpoint, "az": lambda: os.environ.get("AZURE_STORAGE_ENDPOINT")}
    return settings[url.scheme]() or ""


def proxy_variable(url: ObjectUrl) -> str:
    """The environment variable that names the proxy on the way to the endpoint, for messages; "" if there is none."""
    from urllib.request import proxy_bypass

    endpoint = endpoint_of(url) or CLOUDS[url.scheme]
    scheme, _, rest = endpoint.partition("://")
    if proxy_bypass(rest.partition("/")[0]):
        return ""
    # obstore looks at the name in capitals first, also where it is empty.
    found = [
        next((name for name in (f"{what}_proxy".upper(), f"{what}_proxy") if name in os.environ), "")
        for what in (scheme, "all")
    ]
    return next((name for name in found if os.environ.get(name)), "")


def _s3_endpoint() -> str | None:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _gs_endpoint() -> str | None:
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    return host if not host or "://" in host else f"http://{host}"


def _s3() -> dict[str, Any]:
    settings: dict[str, Any] = {"disable_bulk_delete": True}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = _s3_endpoint()
    container = "AWS_CONTAINER_CREDENTIALS"
    elsewhere = ("AWS_WEB_IDENTITY_TOKEN_FILE", f"{container}_RELATIVE_URI", f"{container}_FULL_URI")
    has_keys = bool(os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"))
    is_elsewhere = has_keys or any(map(os.environ.get, elsewhere))
    is_public = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    if not is_elsewhere or os.environ.get("AWS_PROFILE"):
        if (session := _aws_session()) is not None:
            region = region or session.get_config_variable("region")
            endpoint = endpoint or session.get_scoped_config().get("endpoint_url")
            if not has_keys and not is_public:
                settings["credential_provider"] = _aws_credentials(session)
        elif not is_elsewhere and not is_public and os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise StoreDeniedError(NO_KEYS)
    return settings | {"region": region or "us-east-1"} | ({"endpoint": endpoint} if endpoint else {})


def _aws_session() -> Any | None:
    """The session of the AWS profile that is named, or is the default one; None where no file has profiles. Raises
    StoreDeniedError where there is no such profile, where a file cannot be parsed, and where boto3, which reads them,
    is not installed."""
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    found = [path for key, usual in files.items() if (path := Path(os.environ.get(key) or usual).expanduser()).exists()]
    if not (name or found):
        return None
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        if not (name or found[0].name == "credentials"):  # the region alone, of a machine that has a role
            return None
        what = f"AWS_PROFILE is {name!r}" if name else f"{found[0]} has the credentials"
        raise StoreDeniedError(
            f"{what}, and boto3, which reads profiles, is not installed: {pip_install('aws')}; or set "
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    session = botocore.session.Session(profile=name)
    try:
        session.get_scoped_config()
    except botocore.exceptions.ProfileNotFound:
        raise StoreDeniedError(f"AWS_PROFILE is {session.profile!r}, and ~/.aws has no profile of that name") from None
    except botocore.exceptions.BotoCoreError as error:  # its text may quote a line of the file
        kind = type(error).__name__
        raise StoreDeniedError(f"{found[0]} is not a file of AWS profiles ({kind}): repair it") from None
    return session


def _aws_credentials(session: Any) -> Any:
    """What obstore asks for credentials, again when they expire. Raises StoreDeniedError where the profile has none."""
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(session)
    except (BotoCoreError, ValueError) as error:  # its text may have what a program of the profile printed
        name, kind = session.profile or "default", type(error).__name__
        raise StoreDeniedError(
            f"the AWS profile {name!r} gives no credentials ({kind}): `aws sts get-caller-identity` says why; "
            f"{NO_KEYS.partition(': ')[2]}"
        ) from None


def _gs() -> dict[str, Any]:
    endpoint = _gs_endpoint()
    if not endpoint:
        return {}
    # An emulator needs no credentials, but without a token obstore would request one from Google.
    names = ("APPLICATION_CREDENTIALS", "SERVICE_ACCOUNT", "SERVICE_ACCOUNT_PATH", "BEARER_TOKEN")
    token = {} if any(os.environ.get(f"GOOGLE_{name}") for name in names) else {"bearer_token": "emulator"}
    return {"base_url": endpoint, **token}


def _az() -> dict[str, Any]:
    parts = [part.partition("=") for part in os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")]
    pairs = {name: value for name, _, value in parts}
    settings = {
        "account_name": os.environ.get("AZURE_STORAGE_ACCOUNT") or pairs.get("AccountName"),
        "account_key": os.environ.get("AZURE_STORAGE_KEY") or pairs.get("AccountKey"),
        "sas_key": os.environ.get("AZURE_STORAGE_SAS_TOKEN") or pairs.get("SharedAccessSignature"),
        "endpoint": os.environ.get("AZURE_STORAGE_ENDPOINT") or pairs.get("BlobEndpoint"),
    }
    return {name: value for name, value in settings.items() if value}
