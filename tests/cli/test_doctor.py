"""`roxxel-dist doctor` as it is typed; other hosts than this machine are in tests/launcher/test_preflight.py."""

import json
import socket

import pytest
from commands import run
from tables import one_test

from roxxel_dist.cli import main


def test_this_machine(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    result = run("doctor", "--run_dir", "mine", "--", "train", "--data_path", "text.txt", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    *lines, last = result.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    checks = [line.split()[1] for line in lines]
    assert {"devices", "disk", "versions", "data", "port", "jax"} == set(checks)
    assert last.startswith("1 host: 0 errors, ")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.fixture
def doctor(tmp_path, monkeypatch, capfd):
    """What it says, called here: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: (main(["doctor", *map(str, words)]), *capfd.readouterr())


def test_what_is_wrong_is_69(doctor):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ["--port", port, "--data_path", "nowhere", "--check-devices", "off"]  # that check imports jax
        code, out, err = doctor(*words, "--json")
    assert (code, err) == (69, "")
    told = json.loads(out)
    assert not told["fit"]
    errors = {one["check"]: one["text"] for one in told["findings"] if one["level"] == "error"}
    assert set(errors) == {"port", "data"}
    assert f"--port {port}" in errors["port"]
    assert "nowhere" in errors["data"]
    code, out, _ = doctor("--gpus-per-host", 99)
    assert code == 69
    assert "error    devices" in out
    assert out.splitlines()[-1].startswith("1 host: 1 error, ")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("JAX_PLATFORMS", "cuda", "JAX_PLATFORMS is cuda, and this jax has cpu"),
        ("XLA_FLAGS", "--xla_unheard_of=1", "--xla_unheard_of=1 is no flag of it"),
        pytest.param(
            *("PJRT_NAMES_AND_LIBRARY_PATHS", "foo:/lib/no.so", "the check of its devices ended with code 1"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_devices_that_jax_cannot_make_are_an_error(doctor, monkeypatch, name, value, shown):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu" if name == "XLA_FLAGS" else "foo")
    monkeypatch.setenv(name, value)
    code, out, _ = doctor()
    assert code == 69, out
    assert "1 host: 1 error, " in out
    (line,) = [line for line in out.splitlines() if line.startswith("error")]
    assert shown in line


def test_a_host_that_is_not_there(tmp_path):
    words = ["--hosts", "no-such-host.invalid", "--ssh-config", "config"]
    (tmp_path / "config").write_text("")
    result = run("doctor", *words, cwd=tmp_path)
    assert result.returncode == 69
    assert result.stdout.startswith("error    host  no-such-host.invalid: ssh: Could not resolve hostname")
    assert result.stdout.splitlines()[-1] == "1 host: 1 error, 0 warnings"


MISTAKES = [
    (["--port", 0], "--port 0: must be within 1 and 65535"),
    (["--gpus-per-host", 0], "--gpus-per-host 0: must be at least 1"),
    (["--hosts", "a", "--hostfile", "b"], "give --hosts a,b,c or --hostfile FILE, not both"),
    (["--hosts", "a,-oProxyCommand=x"], "cannot be a host"),
    (["--hosts", ","], "no hosts"),
    (["--hostfile", "nowhere"], "--hostfile nowhere: cannot be read"),
    (["--hosts", "a", "--ssh-config", "nowhere"], "--ssh-config nowhere: no such file"),
    (["--python", "python3"], "--python python3 is for other hosts"),
    (["--ssh-config", "x"], "--ssh-config x is for other hosts"),
    (["--host", "a"], "--hosts"),
    (["--", "train", "--bath_size", "3"], "--batch_size"),
    (["--", "train", "--config", "nowhere"], "nowhere: cannot be read"),
]


@one_test(("words", "message"), MISTAKES)
def test_a_mistake_is_a_message_and_code_2(tmp_path, monkeypatch, capfd, words, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["doctor", *map(str, words)])
    except SystemExit as left:  # the parser of the words speaks for itself
        code = left.code
    said = "".join(capfd.readouterr())
    assert code == 2, said
    assert message in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
