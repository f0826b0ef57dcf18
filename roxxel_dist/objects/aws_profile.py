"""Profiles of the AWS command line, from ~/.aws/credentials and ~/.aws/config, which obstore does not read."""

import configparser
import json
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from roxxel_dist.objects.errors import StoreDeniedError

PROCESS_S = 60.0


@dataclass(frozen=True, kw_only=True)
class AwsProfile:
    """Settings of a profile.

    Attributes:
        keys: aws_access_key_id, aws_secret_access_key and optionally aws_session_token; empty if it has none.
        provider: makes credentials, again whenever they expire; None if the profile has `keys` or nothing.
        region, endpoint: None if the profile has none.
    """

    keys: Mapping[str, str]
    provider: Callable[[], dict[str, Any]] | None
    region: str | None
    endpoint: str | None


def read_aws_profile(environ: Mapping[str, str]) -> AwsProfile:
    """The profile named by AWS_PROFILE (default: "default").

    Raises:
        StoreDeniedError: the profile does not exist, a file cannot be parsed, or the profile needs boto3 (SSO, roles),
            which is not installed.
    """
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    home = Path(environ.get("HOME") or Path.home())
    credentials_path = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials").expanduser()
    config_path = Path(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config").expanduser()
    config, credentials = _parsed(config_path), _parsed(credentials_path)
    section = name if name == "default" else f"profile {name}"
    values = {**config.get(section, {}), **credentials.get(name, {})}
    if not values and name != "default":
        raise StoreDeniedError(f"AWS_PROFILE is {name!r}, and neither {credentials_path} nor {config_path} has it")
    keys = {key: values[key] for key in KEYS if values.get(key)}
    if not {"aws_access_key_id", "aws_secret_access_key"} <= keys.keys() or "role_arn" in values:
        keys = {}
    provider = None
    if not keys and (command := values.get("credential_process")):
        provider = lambda: _from_process(command, name)  # noqa: E731
    elif not keys and ({"role_arn", "sso_session", "sso_start_url"} & values.keys()):
        provider = _by_boto3(name)
    return AwsProfile(keys=keys, provider=provider, region=values.get("region"), endpoint=values.get("endpoint_url"))


KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


def _parsed(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(default_section="\0")  # "default" is a normal profile
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (configparser.Error, UnicodeDecodeError) as error:  # the parser's error quotes the line
        raise StoreDeniedError(f"{path} is not a file of AWS profiles ({type(error).__name__}): repair it") from None
    return {section: dict(parser.items(section)) for section in parser.sections()}


def _from_process(command: str, profile: str) -> dict[str, Any]:
    """The credentials that `credential_process` prints."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, timeout=PROCESS_S, check=True)
        values = json.loads(done.stdout)
        expires = values.get("Expiration")
        return {
            "access_key_id": values["AccessKeyId"],
            "secret_access_key": values["SecretAccessKey"],
            "token": values.get("SessionToken"),
            "expires_at": datetime.fromisoformat(expires) if expires else None,
        }
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        what = f"credential_process of the AWS profile {profile!r} gave no credentials ({type(error).__name__})"
        raise StoreDeniedError(f"{what}: run the command of ~/.aws/config by hand to see why") from None


def _by_boto3(profile: str) -> Callable[[], dict[str, Any]]:
    try:
        import boto3  # pyright: ignore[reportMissingImports]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        what = f"the AWS profile {profile!r} takes its credentials from a role or from SSO, which needs boto3"
        raise StoreDeniedError(
            f"{what}: pip install boto3, or `aws configure export-credentials --format env`"
        ) from error
    return Boto3CredentialProvider(session=boto3.Session(profile_name=profile))  # pyright: ignore
