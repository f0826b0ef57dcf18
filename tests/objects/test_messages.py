"""What a person reads who names the wrong bucket, key, region or endpoint, and where credentials come from."""

import json
import re
import sys

import pytest
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.objects.errors import StoreDeniedError, StoreError, StoreNotFoundError, StoreTimeoutError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.url import ObjectUrl, is_url
from roxxel_dist.process.exit_codes import pip_install

CALLS = {
    "read": lambda store: store.read("k"),
    "look at": lambda store: store.head("k"),
    "list": lambda store: store.list(),
    "write": lambda store: store.write("k", b"1"),
    "delete": lambda store: store.delete(["k"]),
}
BOTH = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"


ALONE = {name: "" for what in ("http", "https", "all", "no") for name in (f"{what}_proxy", f"{what}_proxy".upper())}
"""No proxy, whatever this machine has."""


def message(call, url, kind, timeout_s=None):
    """What a call raises; where a server answers, it may take long on a busy machine."""
    limit_s = timeout_s or (0.3 if kind is StoreTimeoutError else 60)
    with pytest.raises(kind) as caught:
        CALLS[call](ObjectStore.open(url, timeout_s=limit_s))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("variables", "kind", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, StoreDeniedError,
         f"the secret key does not belong to the access key (SignatureDoesNotMatch): correct {BOTH}"),
        ({"AWS_ACCESS_KEY_ID": "wrong"}, StoreDeniedError,
         f"does not know the access key (InvalidAccessKeyId): correct {BOTH}"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, StoreTimeoutError,
         "the endpoint at http://127.0.0.1:1 refuses connections, "),
        (ALONE | {"HTTP_PROXY": "http://me:secret@127.0.0.1:1"}, StoreTimeoutError,
         ", through the proxy of HTTP_PROXY, refuses connections, "),
        (ALONE | {"ALL_PROXY": "http://127.0.0.1:1"}, StoreTimeoutError,
         "check the network, ALL_PROXY, NO_PROXY and AWS_ENDPOINT_URL"),
        (ALONE | {"AWS_ENDPOINT_URL": "http://nohost.invalid"}, StoreTimeoutError,
         "no host has the name of the endpoint at http://nohost.invalid, "),
    ],
    ids=["secret", "access-key", "port", "proxy", "any proxy", "host"],
)  # fmt: skip
def test_wrong_settings(server, call, variables, kind, words):
    with server.environment(**variables):
        text = message(call, server.url("x"), kind)
    assert text.startswith(f"{call} s3://bucket/x")
    assert words in text
    assert server.secret_key not in text
    assert "me:secret" not in text


@pytest.mark.parametrize("call", [call for call in CALLS if call != "delete"])
def test_no_such_bucket(server, call):
    with server.environment():
        text = message(call, "s3://another/x", StoreNotFoundError)
    assert f"there is no bucket 'another' at {server.endpoint}: make it, or correct its name, the region" in text


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (403, "<Code>AccessDenied</Code>", StoreDeniedError,
         f"the credentials do not allow it (AccessDenied): give them the rights to read, write, list and delete in the "
         f"bucket, or use others ({BOTH})"),
        (403, "<Code>RequestTimeTooSkewed</Code>", StoreDeniedError,
         "the clock of this host differs from that of the server (RequestTimeTooSkewed): set the clock (timedatectl "
         "set-ntp true)"),
        (400, "<Code>ExpiredToken</Code>", StoreDeniedError,
         "the session token is out of date (ExpiredToken): sign in again, or take new credentials"),
        (400, "<Code>AuthorizationHeaderMalformed</Code><Message>the region 'us-east-1' is wrong; expecting 'eu-west-1'"
         "</Message><Region>eu-west-1</Region>", StoreDeniedError,
         "the bucket is in another region (AuthorizationHeaderMalformed): set AWS_REGION to eu-west-1"),
        (301, "<Code>PermanentRedirect</Code>", StoreDeniedError,
         "the bucket is in another region: set AWS_REGION to the bucket's"),
        (400, "<html>", StoreError, "does not support that (400): check that AWS_ENDPOINT_URL is the address of"),
    ],
    ids=["rights", "clock", "token", "region", "redirect", "no-store"],
)  # fmt: skip
def test_refusals(server, status, body, kind, words):
    """A HEAD has no body to tell the reason; it is found out by another request."""
    with server.link() as link, server.environment(link):
        link.status, link.body = status, body.encode()
        for call in CALLS:
            link.requests.clear()
            assert words in message(call, server.url("x"), kind), call
            assert len(link.requests) <= 2, call


def test_settings_that_no_request_is_made_with(server, monkeypatch):
    with (
        server.environment(AWS_ENDPOINT_URL="localhost"),
        pytest.raises(ValueError, match="'localhost' is not an endpoint: set AWS_E"),
    ):
        ObjectStore.open(server.url())
    with (
        server.environment(AWS_PROFILE="none"),
        pytest.raises(StoreDeniedError, match=r"AWS_PROFILE is 'none', and ~/\.aws has no profile"),
    ):
        ObjectStore.open(server.url())
    with monkeypatch.context() as without, server.environment(AWS_PROFILE="mine"):
        without.setitem(sys.modules, "botocore.session", None)
        needed = f"AWS_PROFILE is 'mine', and boto3, which reads profiles, is not installed: {pip_install('aws')}"
        with pytest.raises(StoreDeniedError, match=re.escape(needed)):
            ObjectStore.open(server.url())
    keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true", "HOME": "/none"}
    with server.environment(**keys), pytest.raises(StoreDeniedError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        ObjectStore.open(server.url())
    with pytest.raises(ValueError, match="store_timeout is 0: it must be a number of seconds above 0"):
        ObjectStore.open(server.url(), timeout_s=0)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ImportError, match=re.escape(f"a path in a bucket needs a package: {pip_install('cloud')}")):
        ObjectStore.open(server.url())


@pytest.mark.parametrize("how", ["credentials", "config", "process"])
def test_credentials_of_a_profile(server, tmp_path, how):
    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    folder = tmp_path / ".aws"
    folder.mkdir()
    lines = [f"{name} = {value}" for name, value in keys.items()]
    if how == "process":
        printed = {"Version": 1, "AccessKeyId": server.access_key, "SecretAccessKey": server.secret_key}
        (tmp_path / "keys.json").write_text(json.dumps(printed))
        lines = [f"credential_process = cat {tmp_path}/keys.json"]
    section, name = ("[mine]", "credentials") if how == "credentials" else ("[profile mine]", "config")
    (folder / name).write_text("\n".join([section, *lines, f"endpoint_url = {server.endpoint}", "region = eu-west-1"]))
    variables = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_ENDPOINT_URL": "", "AWS_REGION": ""}
    with server.environment(**variables, AWS_PROFILE="mine", HOME=str(tmp_path)):
        store = ObjectStore.open(server.url("profile"))
        store.write(how, b"1")
        assert store.read(how) == b"1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mine]\naws_access_key_id", r"credentials is not a file of AWS profiles \(ConfigParseError\): repair it"),
        ("[mine]\ncredential_process = false", r"AWS profile 'mine' gives no credentials \(CredentialRetrievalError\)"),
        (
            "[mine]\nregion = x",
            r"AWS profile 'mine' gives no credentials \(ValueError\): `aws sts get-caller-identity`",
        ),
    ],
)
def test_a_profile_without_credentials(server, tmp_path, text, said):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(text)
    variables = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    environment = server.environment(**variables, AWS_PROFILE="mine", HOME=str(tmp_path))
    with environment, pytest.raises(StoreDeniedError, match=said):
        ObjectStore.open(server.url("profile"))


def test_exit_codes_of_a_command(server, tmp_path, capsys):
    command = ["plan", "--data_path", server.url("code"), "--store_timeout", "0.2", "--cache_dir", str(tmp_path)]
    with server.environment(AWS_SECRET_ACCESS_KEY="wrong"):
        assert main(command) == 2
    assert "correct AWS_ACCESS_KEY_ID" in capsys.readouterr().err
    with server.environment(AWS_ENDPOINT_URL="http://127.0.0.1:1"):
        assert main(command) == 74
    error = capsys.readouterr().err
    assert "refuses connections" in error
    assert "Traceback" not in error


@one_test(
    ("text", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
        ("s3://b/a//c", "the key 'a//c' cannot be used"),
        ("gs://b/../c", r"the key '\.\./c' cannot be used"),
        ("s3://b/a\nb", "cannot be used"),
        ("http://b/c", r"is not an address in a bucket: write s3://BUCKET/KEY"),
        ("folder", "is not an address in a bucket"),
    ],
)
def test_addresses_that_are_none(text, words):
    with pytest.raises(ValueError, match=words):
        ObjectUrl.parse(text)


def test_addresses(tmp_path):
    url = ObjectUrl.parse("s3://bucket/a/b/")
    assert (str(url), url.name, str(url.parent)) == ("s3://bucket/a/b", "b", "s3://bucket/a")
    assert str(url.join("c/d", "e")) == "s3://bucket/a/b/c/d/e"
    assert str(ObjectUrl.parse("gs://bucket").join("x")) == "gs://bucket/x"
    path = tmp_path.__class__("az://container/k")  # a Path has eaten a slash
    assert is_url(path)
    assert str(ObjectUrl.parse(path)) == "az://container/k"
    assert not any(map(is_url, (tmp_path, "folder", "C:/x", "s3", 3, None, ["s3://b"])))
