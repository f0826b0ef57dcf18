"""`launch exec`: any command that runs programs on a host; what it must not do, and the message where it does.

The faults of `test_ssh.py`, `test_lost_hosts.py` and `test_failure_table.py` run by this backend too.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from machines import missing

from roxxel_dist.launcher.backends.exec import ExecBackend, restarts_of
from roxxel_dist.launcher.preflight.checks import Requirements
from roxxel_dist.launcher.preflight.run import check_hosts

Until = Callable[[Callable[[], Any], str], None]
HERE = "env NAME={host}"
"""The hosts of most tests are this machine: a command that takes the words of a program."""
TRY = ("launch", "exec", "--same-machine")


CLOSED = ("kex_exchange_identification: Connection closed by remote host", "Connection closed by UNKNOWN port 65535")
"""What ssh says at last, whatever has ended its ProxyCommand."""


def ends(*lines: str) -> str:
    """A client that counts its tries, and ends with these lines on stderr."""
    return script(f"echo >> tries; printf '%s\\n' {shlex.join(lines)} >&2; exit 255")


def script(text: str) -> str:
    """A `--via` that is a script of a shell; `"$@"` are the words of the program, without the host's name."""
    return f"sh -c {shlex.quote(text)} {{host}}"


CAME_BACK: dict[str, tuple[str, str | None]] = {
    # a command, and its message; None where the job runs
    "words": (HERE, None),
    "a text for a shell": ("sh -c {command} {host}", None),
    "a text in an option": ("env --split-string='-u X{host}' sh -c {command}", None),
    "a banner": (script('echo Welcome; "$@"'), None),
    "a banner without an end": (script('printf "Welcome "; "$@"'), None),
    "a banner on stderr": (script('echo Welcome >&2; "$@"'), None),
    "a script that asks for no password": (script('echo "password: see the wiki"; "$@"'), None),
    "stderr where stdout is": (script('"$@" 2>&1'), None),
    "a slow one": (script('sleep 2; "$@"'), None),
    "exits at once": ("true {host}", r"nothing was said: does --via end before its program, or leave stdin out"),
    "exits with a word": (script("echo not today >&2; exit 3"), r"not today \(code 3\)"),
    "exits with a word on stdout": (script("echo no such pod; exit 1"), r"no such pod \(code 1\)"),
    "no stdin": (script('"$@" </dev/null'), r"leave stdin out \(kubectl, docker and podman exec need -i\)"),
    "a plugin for credentials": (
        ends(
            "Error when retrieving token from sso: Token has expired and refresh failed",
            "E0501 10:00:00.000000   12345 memcache.go:265] couldn't get the list: getting credentials: exec: code 255",
            "Unable to connect to the server: getting credentials: exec: executable aws failed with exit code 255",
        ),
        r"(?<=used: )Error when retrieving token from sso: .* refresh failed; who runs --via has to log in again",
    ),
    "a plugin that is not there": (
        ends(
            "Unable to connect to the server: getting credentials: exec: executable aws not found",
            "It looks like you are trying to use a client-go credential plugin that is not installed.",
            *("To learn more about this feature, consult the documentation available at:", "      https://k.io/x#y"),
        ),
        r"(?<=used: )Unable to connect to the server: getting credentials: exec: executable aws not found",
    ),
    "a certificate of the server": (
        ends("Unable to connect to the server: x509: certificate has expired or is not yet valid: current time 2024"),
        r"is the clock of this machine right\? Or else the server needs a new certificate",
    ),
    "killed without a word": (
        script("echo command terminated with exit code 137 >&2; exit 137"),
        r"nothing was said: it was killed there: is memory short, or a limit of the container too low\? \(code 137",
    ),
    "a client that is killed here": (
        script("kill -9 $$"), r"nothing was said: its client was ended \(signal SIGKILL\): is memory short on this"
    ),
    "in colour": (ends("\033[31mERROR:\033[0m not logged in"), r"(?<=used: )ERROR: not logged in"),
    "a key that ssh does not take": (
        ends(
            *("This key will be ignored.", 'Load key "/k": bad permissions', "Permission denied, please try again."),
            "a@b: Permission denied (publickey,password).",
        ),
        r'(?<=used: )This key will be ignored. \| Load key "/k": bad permissions; `ssh b` shows it too \(code',
    ),
    "no key is taken": (ends("a@b: Permission denied (publickey)."), r"(?<=used: )a@b: Perm.*an ssh-agent"),
    "usage": (
        script('echo "error: unknown flag: --foo" >&2; echo "See \'kubectl exec --help\' for usage." >&2; exit 1'),
        r"error: unknown flag: --foo \(code 1\)",
    ),
    "kubectl's last word": (
        script('echo "sh: 1: exec: /x: not found" >&2; echo "command terminated with exit code 127" >&2; exit 127'),
        r"exec: /x: not found; install roxxel-dist there, or name the Python that has it with --python \(code 127\)",
    ),
    "what kubectl says in any case": (
        script("echo 'Defaulted container \"a\" out of: a, b' >&2; exit 1"), r"nothing was said",
    ),
    "a reason before it": (
        script("echo 'error: container not found (\"b\")' >&2; echo 'W1127 08:00:00.1 7 x.go:1] old' >&2; exit 1"),
        r"container not found \(\"b\"\); it starts, or has ended: `kubectl describe pod` says why",
    ),
    "what gcloud says of ssh's end": (
        script(
            "echo 'u@b: Permission denied (publickey).' >&2; echo 'Recommendation: To check for possible causes' >&2;"
            "echo 'gcloud compute ssh b --zone=z --troubleshoot' >&2; exit 255"
        ),
        r"Permission denied \(publickey\)\.; nobody answers a question here",
    ),
    "a container that has ended": (
        script("echo 'Error response from daemon: container 7f is not running' >&2; exit 1"),
        r"is not running; start it",
    ),
    "two programs": (script("\"$@\" | sed -u 's/.*/&\\n&/'"), r"more than one program answers"),
    "a client that stays": (script('"$@"; exec sleep 60'), None),
    "no such pod": (
        script("echo 'Error from server (NotFound): pods \"x\" not found' >&2; exit 1"),
        r"\(NotFound\): pods \"x\" not found; name pods that are there",
    ),
    "a server that knows no exec": (
        script("echo 'error: unable to upgrade connection: 404 page not found' >&2; exit 1"),
        r"connection: 404 page not found \(code 1\)",
    ),
    "a login that is over": (
        script("echo 'error: You must be logged in to the server (Unauthorized)' >&2; exit 1"),
        r"\(Unauthorized\); who runs --via has to log in again",
    ),
    "a ProxyCommand whose login is over": (
        ends("Error: the SSO session has expired; run aws sso login", *CLOSED),
        r"run aws sso login; who runs --via has",
    ),
    "a ProxyCommand that is not there": (
        ends("sh: 1: exec: nc: not found", *CLOSED),
        r"exec: nc: not found; a ProxyCommand or a bastion .*`ssh b` shows it",
    ),
    "a ProxyCommand of several lines": (
        ends("", "An error occurred (TargetNotConnected) when calling StartSession:", "i-1 is not connected.", *CLOSED),
        r"\(TargetNotConnected\) .*: \| i-1 is not connected",
    ),
    "a bastion that is away": (
        ends("ssh: connect to host jump port 22: No route to host", *CLOSED),
        r"jump port 22: No route to host; a ProxyC",
    ),
    "a bastion that takes no key": (
        ends("me@jump: Permission denied (publickey).", *CLOSED), r"\(publickey\)\.; nobody",
    ),
    "a key that is new": (
        ends("No ED25519 host key is known for b and you have requested strict checking.",
             "Host key verification failed."),
        r"No ED25519 host key is known for b .*; log in once by hand",
    ),
    "a key that has changed": (
        ends("@@@@@@", "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "Offending key in /r/known_hosts:3",
             "  remove with:", "  ssh-keygen -f '/r/known_hosts' -R 'b'", "Host key verification failed."),
        r"it HAS CHANGED; if a new machine has its name or address: ssh-keygen -f '/r/known_hosts' -R 'b'",
    ),
    "a key that has changed, by another ssh": (
        ends("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "Host key verification failed."),
        r"ssh-keygen -R b",
    ),
    "a proxy that wants a password": (
        ends("Via proxy:3128 -> b:22", "HTTP return code: 407 Proxy Authentication Required", *CLOSED),
        r"Via proxy:3128 .* \| HTTP return code: 407 Proxy Authentication Required; a ProxyCommand",
    ),
    "a key that a bastion does not know": (
        ends("Host key verification failed.", *CLOSED), r"failed\.; log in once by hand",
    ),
    "advice of a new ssh": (
        ends("** WARNING: connection is not using a post-quantum key exchange algorithm.", "no luck"), r"no luck",
    ),
    "no room": (ends("mktemp: failed to create file: No space left on device"), r"; make room on that host"),
    "no memory": (ends("bash: fork: Cannot allocate memory"), r"; that host has no memory left"),
    "killed there": (
        script("echo 'command terminated with exit code 137' >&2; exit 137"),
        r"is memory short, or a limit .*\(code 137\)",
    ),
    "no rights": (
        script("echo 'Error from server (Forbidden): pods \"x\" is forbidden' >&2; exit 1"),
        r"is forbidden; who runs --via needs the rights",
    ),
    "a password": (script('printf "[sudo] password for me: " >&2; sleep 99'), r"\(\[sudo\] password for me:\)"),
    "a password after a banner": (
        script('echo Hello; sleep 0.5; printf "Password:"; cat >/dev/null'), r"nobody gives here \(Password:\)",
    ),
    "a yes": (
        script('printf "Are you sure you want to continue connecting (yes/no/[fingerprint])? "; cat >/dev/null'),
        r"nobody gives here \(Are you sure",
    ),
    "a pager": (script('echo line; printf "\\033[7m--More--\\033[m"; cat >/dev/null'), r"gives here \(.*--More--"),
    "the end of a pager": (script('printf "line\\n(END)"; cat >/dev/null'), r"nobody gives here \(\(END\)\)"),
    "a terminal": (script("exec script -qefc 'exec cat >/dev/null' /dev/null"), r"a terminal is in between"),
    "a terminal that does not echo": (script('"$@" | sed -u "s/$/\\r/"'), r"a terminal is in between"),
    "an echo": (script("exec cat"), r"it sends back what it is sent"),
    "a shell that reads stdin": (script("exec bash --norc"), r"ask:facts"),
    "words joined by spaces": (script('exec sh -c "$*"'), r"words came through a shell; .* write \{command\} in --via"),
    "a text where words are due": ("env NAME={host} {command}", r"this command takes words, and no text"),
    "no folder": (script('cd /; unset OLDPWD; set -- "$@"; "$1" "$2" "cd /no/where"'), r"/no/where; name a work"),
    "words before each line": (script('"$@" | sed -u "s/^/b: /"'), None),  # as clush has it
    "words behind each line": (script('"$@" | sed -u "s/$/ [ok]/"'), None),
    "lines between": (script("\"$@\" | sed -u 's/^/hello\\n/; s/$/\\n{\"id\":9,\"type\":\"done\",\"code\":1}/'"), None),
    "JSON of a cloud's client": (script("echo '{\"code\":401,\"message\":\"expired\"}'; \"$@\""), None),
    "JSON with our keys": (script("echo '{\"id\":1,\"type\":\"gone\",\"entry\":1,\"code\":0}'; \"$@\""), None),
    "JSON alone": (script("echo '{\"code\":401,\"message\":\"expired\"}'; exit 1"), r'\{"code":401.*\(code 1\)'),
    "garbage in its middle": (script('"$@" | sed -u "2s/,/garbage/"'), r"'.* is no message of roxxel-dist"),
    "what is not text": (script("head -c 300 /dev/zero; echo; exit 1"), r"code 1"),
    "megabytes first": (script('seq 300000; "$@"'), None),
}  # fmt: skip


RUNS = [case for case, (_, said) in CAME_BACK.items() if said is None]
CARRIED = ("words behind each line", "JSON with our keys")
"""Where what ranks print goes through what others print."""
AGENTS = ("words", "a text for a shell", "a banner without an end", "a client that stays", *CARRIED)
"""Of those where an agent answers; it is a Python that starts, and each of the others is a few words of a shell."""


def looked_at(via: str, tries: Path) -> str:
    """Why the host b cannot be used by a command; empty where its agent answers. Its tries are counted in a file."""
    backend = ExecBackend(["b"], via.replace(">> tries", f">> {shlex.quote(str(tries))}"))
    return check_hosts(Requirements(compare=False), backend, ["b"], port=None).unreachable.get("b", "")


@pytest.mark.parametrize(
    "cases",
    [[case for case in CAME_BACK if case not in RUNS or case in AGENTS], pytest.param(RUNS, marks=pytest.mark.long)],
    ids=["few agents", "all agents"],
)
def test_what_comes_back_is_said_in_one_line(cases: list[str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        tries = [tmp_path / str(number) for number in range(len(cases))]
        found = list(threads.map(looked_at, [CAME_BACK[case][0] for case in cases], tries))
    wrong = {
        case: why
        for case, (_, said), why in zip(cases, map(CAME_BACK.__getitem__, cases), found, strict=True)
        if (why if said is None else "\n" in why or len(why) > 1000 or not re.search(said, f"used: {why}"))
    }
    assert wrong == {}
    assert [path for path in tries if path.exists() and path.stat().st_size != 1] == [], "a repeat mends nothing"


@pytest.mark.parametrize(
    "case", [case if case in CARRIED else pytest.param(case, marks=pytest.mark.long) for case in RUNS]
)
def test_a_job_runs_beside_what_comes_back(case: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    done = cli(*TRY, "--hosts", "b", "--via", CAME_BACK[case][0], "--", "bash", "-c", "echo fine", cwd=tmp_path)
    assert (done.returncode, done.stdout.split(" | ")[-1]) == (0, "fine\n"), done.stderr


def test_a_host_that_cannot_be_used_ends_the_start(tmp_path: Path, cli: Callable[..., Any]) -> None:
    via = CAME_BACK["exits with a word"][0]
    done = cli(*TRY, "--hosts", "b", "--via", via, "--host-timeout", "0", "--", "touch", "x", cwd=tmp_path)
    *_, line, more = done.stderr.splitlines()
    assert (done.returncode, line) == (69, "roxxel-dist: host b cannot be used: not today (code 3)"), done.stderr
    assert "not started: correct what is above" in more


REFUSED = {
    "quota": "Error from server (TooManyRequests): the server has received too many requests",
    "link": "Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout",
    "kubelet": "Error from server: error dialing backend: dial tcp 10.0.0.2:10250: connect: connection refused",
    "proxy": "error: unable to upgrade connection: unexpected EOF",
    "balancer": "Error from server (ServiceUnavailable): the server is currently unable to handle the request",
}
"""What kubectl says of a server that is there again a moment later."""


def test_a_server_that_has_no_room_is_asked_again(tmp_path: Path, cli: Callable[..., Any]) -> None:
    assert [host for host, words in REFUSED.items() if not ExecBackend(["a"], HERE).is_refusal([words])] == []
    hosts = ("quota", "proxy")
    for host in hosts:
        (tmp_path / host).write_text(REFUSED[host])
    client = 'host=$1; shift; [ ! -e $host ] || { cat $host >&2; mv $host $host.said; exit 1; }; exec "$@"'
    words = [*TRY, "--hosts", ",".join(hosts), "--via", f"sh -c '{client}' sh {{host}}"]
    done = cli(*words, "--all-ranks", "--", "bash", "-c", "echo fine", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("fine")) == (0, len(hosts)), done.stderr
    assert len(list(tmp_path.glob("*.said"))) == len(hosts)


STARTS = {
    "pending": "Error from server (BadRequest): pod pending does not have a host assigned",
    "kubelet": "error: unable to upgrade connection: pod does not exist",
    "creating": 'error: unable to upgrade connection: container not found ("main")',
    "socket": 'error: Internal error occurred: unable to upgrade connection: container not found ("main")',
    "containerd": "error: Internal error occurred: container is in CONTAINER_CREATED state",
    "docker": "Error response from daemon: container 7f3a is not running",
    "restarts": "Error response from daemon: Container 7f3a is restarting, wait until the container is running",
    "podman": "Error: can only create exec sessions on running containers: container state improper",
    "boots": '"System is booting up. Unprivileged users are not permitted to log in yet. See pam_nologin(8)."',
}
"""The name of a host that still starts, and the words for it."""
STARTS_NOT = {
    "no pod": 'Error from server (NotFound): pods "x" not found',
    "no container of the pod": "Error from server (BadRequest): container x is not valid for pod y",
    "a pod that has ended": "error: cannot exec into a container in a completed pod; current phase is Failed",
    "no such container": "Error response from daemon: No such container: x",
    "podman's name": 'Error: no container with name or ID "x" found: no such container',
    "no engine": "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    "no desktop": "error during connect: the docker daemon is not running",
    "no sh": 'OCI runtime exec failed: exec failed: exec: "sh": executable file not found in $PATH: unknown',
}
STARTING = 'host=$1; shift; [ ! -s $host ] || { head -n 1 $host >&2; sed -i 1d $host; exit 1; }; exec "$@"'
"""A client that says the lines of a host's file, one a time, and reaches it after that."""


def test_a_host_that_starts_is_told_from_one_that_is_not_there() -> None:
    backend = ExecBackend(["a"], HERE)
    assert [name for name, words in STARTS.items() if not backend.is_starting(["Unable to use a TTY", words])] == []
    assert [name for name, words in STARTS_NOT.items() if backend.is_starting([words])] == []


def test_a_job_waits_for_hosts_that_start_and_says_it_once(tmp_path: Path, cli: Callable[..., Any]) -> None:
    hosts = ("pending", "docker")
    for host in hosts:
        (tmp_path / host).write_text(f"{STARTS[host]}\n" * 2)
    words = [*TRY, "--hosts", f"{','.join(hosts)},there", "--via", f"sh -c '{STARTING}' sh {{host}}"]
    done = cli(*words, "--all-ranks", "--", "bash", "-c", "echo fine", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("fine")) == (0, len(hosts) + 1), done.stderr
    said = re.findall(r"waiting up to 60 s for hosts pending, .* to start \(--host-timeout\): (.*)", done.stderr)
    why = f"{STARTS['pending']}; its pod waits for a node: `kubectl describe pod` says why (code 1)"
    assert (said, "cannot be used" in done.stderr) == ([why], False), done.stderr


@pytest.mark.parametrize(
    ("b", "limit_s", "waits"),
    [
        ([STARTS["pending"], *[STARTS["creating"]] * 998], 1, True),  # never starts; other words are no other line
        ([STARTS["pending"], *[STARTS_NOT["a pod that has ended"]] * 998], 1000, True),
        ([STARTS_NOT["no pod"]] * 999, 1000, False),
    ],
)
def test_a_host_that_does_not_start_ends_the_wait(
    b: list[str], limit_s: int, waits: bool, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """At the limit, or at once where waiting does not help."""
    (tmp_path / "b").write_text("\n".join(b))
    words = [*TRY, "--hosts", "a,b", "--via", f"sh -c '{STARTING}' sh {{host}}", "--host-timeout", limit_s]
    done = cli(*map(str, words), "--", "touch", "x", cwd=tmp_path)
    assert done.returncode == 69, done.stderr
    *before, line, more = done.stderr.splitlines()
    assert [f"waiting up to {limit_s} s for host b to start (--host-timeout): {b[0]}" in said for said in before] == (
        [True] * waits
    ), done.stderr
    assert f"host b cannot be used: {b[-1]}" in line
    assert "not started: correct what is above" in more


def test_nobody_waits_for_a_host_that_starts_beside_one_that_is_not_there(
    tmp_path: Path, cli: Callable[..., Any]
) -> None:
    (tmp_path / "a").write_text(f"{STARTS['creating']}\n" * 99)
    (tmp_path / "b").write_text(f"{STARTS_NOT['no pod']}\n" * 99)
    words = [*TRY, "--hosts", "a,b", "--via", f"sh -c '{STARTING}' sh {{host}}", "--host-timeout", "1000"]
    done = cli(*words, "--", "touch", "x", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("cannot be used"), "waiting" in done.stderr) == (69, 2, False)


SLIPS: list[tuple[list[str], str]] = [
    (["--via", "kubectl exec -i pod --"], "has no {host}: write where the name of the host goes"),
    (["--via", ""], "has no {host}"),
    (["--via", "sh -c '{host}"], "cannot be read as words of a shell: No closing quotation"),
    (["--via", "no-such-client {host}"], "there is no `no-such-client` on this machine"),
    (["--via", "/no/such/client {host}"], "there is no `/no/such/client` on this machine"),
    (["--via", "ssh {host}"], "ssh hands its words to a shell: write {command}"),
    (["--via", "env {host}", "--hosts", "a,a"], "host a is given twice"),
    (["--via", "env {host}", "--hosts", "a;id"], "'a;id' cannot be a host"),
    (["--via", "env {host}", "--hosts", "-it"], "'-it' cannot be a host"),
    (["--via", "env {host}", "--attempt", "-1"], "--attempt -1: must be 0"),
    (["--via", "env {host}", "--hosts", "pod//a"], "as --via takes it (letters, digits, . - _ : @ /)"),
    (["--via", "env {host}", "--hosts", "a:2"], "write a with --procs-per-host 2\n"),
    (["--via", "env {host}", "--max-hosts", "0"], "--max-hosts 0: must be at least 1"),
    (["--via", "gcloud tpu-vm ssh {host} --worker=all --command {command}"], "reaches all workers at once"),
    ([], "--via"),
]


def test_slips_are_named(cli: Callable[..., Any], tmp_path: Path) -> None:
    wrong = []
    for words, said in SLIPS:
        hosts = [] if "--hosts" in words else ["--hosts", "a"]
        done = cli("launch", "exec", *hosts, *words, "--", "touch", "x", cwd=tmp_path)
        wrong += [] if done.returncode == 2 and said in done.stderr else [(words, done.returncode, done.stderr)]
    assert wrong == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("via", "start", "count"),
    [
        ("kubectl exec -i {host} -c main --", ["kubectl", "exec", "-i", "pod-1", "-c", "main", "--", "sh", "-c"], 11),
        ("gcloud ssh {host} --command={command}", ["gcloud", "ssh", "pod-1"], 4),
        ("'a b' x{host}y '' {command} {host}", ["a b", "xpod-1y", ""], 5),
        ("kubectl get -o {.items} {host}", ["kubectl", "get", "-o", "{.items}", "pod-1", "sh", "-c"], 9),
    ],
)
def test_where_the_host_and_the_program_go(via: str, start: list[str], count: int, tmp_path: Path) -> None:
    clients = tmp_path / "bin"
    clients.mkdir()
    for name in ("kubectl", "gcloud", "a b"):
        (clients / name).touch(mode=0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(clients), prepend=os.pathsep)
        backend = ExecBackend(["pod-1"], via, python="/my py/python", directory="/it's {host} {command}")
    words = backend.argv("pod-1", "roxxel_dist.launcher.agent.agent", "10")
    assert (words[: len(start)], len(words)) == (start, count)
    (text,) = [word for word in words if "roxxel_dist.launcher.agent.agent" in word]
    program = text.removeprefix("--command=").partition("exit 64; }; ")[2] or text.removeprefix("--command=")
    folder, _, python = program.partition(" && exec ")
    assert shlex.split(folder) == ["cd", "/it's {host} {command}"]
    assert shlex.split(python)[0] == "/my py/python"


@pytest.mark.parametrize(
    ("directory", "python", "text"),
    [
        ("~", "~/v/bin/python", "cd ~ && exec ~/v/bin/python -u"),
        ("~/my work", "python3", "cd ~/'my work' && exec python3 -u"),
        ("/a/~b", "/x y", "cd '/a/~b' && exec '/x y' -u"),
        ("~/$(x)", "python3", "cd ~/'$(x)' && exec"),
    ],
)
def test_the_home_of_a_host_is_that_there(directory: str, python: str, text: str) -> None:
    backend = ExecBackend(["a"], "sh -c {command} {host}", python=python, directory=directory)
    assert text in backend.argv("a", "module")[2]


def test_a_value_that_only_a_shell_would_expand_is_warned_of(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "e").write_text("export PATH=/opt/x:$PATH\nMY_TOKEN=a$b\nPRICE=5$\n")
    done = cli(
        "launch", "exec", "--hosts", "a", "--via", HERE, "--env-from", "e", "--dry-run", "--", "true", cwd=tmp_path
    )
    assert "warning: --env-from e: PATH=/opt/x:$PATH stays as it stands" in done.stderr
    assert done.stderr.count("warning") == 1


def test_how_often_the_job_was_started(cli: Callable[..., Any], tmp_path: Path) -> None:
    """As in a JobSet, which starts the whole launcher again: its ranks resume."""
    assert restarts_of(None, {}) == 0
    assert restarts_of(None, {"ROXXEL_RESTARTS": "3"}) == 3
    assert restarts_of(1, {"ROXXEL_RESTARTS": "3"}) == 1
    words = [*TRY, "--hosts", "a", "--via", HERE, "--attempt", "2", "--", "bash", "-c"]
    done = cli(*words, "echo attempt $ROXXEL_ATTEMPT", cwd=tmp_path)
    assert done.stdout.endswith(" | attempt 2\n"), done.stderr
    done = cli(*words[:7], "--", "true", cwd=tmp_path, environ={**os.environ, "ROXXEL_RESTARTS": "x"})
    assert (done.returncode, "ROXXEL_RESTARTS is 'x': must be a number" in done.stderr) == (2, True)


NAME = socket.gethostname()
CONTAINER = "unshare --mount --uts --propagation private --"
ONE_INSIDE = f'sh -c \'[ $0 = a ] || set -- {CONTAINER} "$@"; exec "$@"\' {{host}}'
PLACES: dict[str, tuple[list[str], str, list[str]]] = {
    # hosts, a command, and the hosts that are refused, each by a line of its own
    "each leads to the launcher": (["a", "b"], HERE, ["a, b are one machine", "a: the machine", "b: the machine"]),
    "one leads to the launcher": (["a"], HERE, ["a: the machine of the launcher answers for it"]),
    "a name of the launcher": ([NAME], HERE, []),
    "its name with a domain, a user and a kind": ([f"pod/{NAME}", f"me@{NAME}.local"], HERE, [f"pod/{NAME}, me@"]),
    "its address": (["127.0.0.1"], HERE, []),
    "its address and its name": (["localhost", NAME], HERE, [f"localhost, {NAME} are one machine"]),
    "containers that share a network": (["a", "b"], f"{CONTAINER} env NAME={{host}}", []),
    "a container, and the launcher": (["a", "b"], ONE_INSIDE, ["a: the machine"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if number else ()) for number, case in enumerate(PLACES)]
)
def test_an_answer_of_the_wrong_machine_is_refused(case: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    hosts, via, refused = PLACES[case]
    if "unshare" in via and (why := missing()):
        pytest.skip(why)
    words = ["--hosts", ",".join(hosts), "--via", via]
    done = cli("doctor", *words, "--check-devices", "off", "--json", cwd=tmp_path)
    found = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "machine"]
    assert len(found) == len(refused), found
    assert not [one for one, said in zip(found, refused, strict=True) if not one["text"].startswith(said)], found
    assert all("say --same-machine" in one["text"] for one in found)
    done = cli("launch", "exec", *words, "--host-timeout", "0", "--", "touch", "x", cwd=tmp_path)
    assert (done.returncode, (tmp_path / "x").exists()) == ((69, False) if refused else (0, True)), done.stderr
    if refused:
        done = cli("launch", "exec", *words, "--same-machine", "--", "touch", "x", cwd=tmp_path)
        assert (done.returncode, (tmp_path / "x").exists()) == (0, True), done.stderr


def test_doctor_looks_at_hosts_that_a_command_reaches(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = cli("doctor", "--same-machine", "--hosts", "a", "--via", HERE, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (done.returncode, found["fit"], found["unreachable"]) == (0, True, {}), done.stdout
    done = cli("doctor", "--hosts", "a,b", "--via", script("exit 1"), "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (done.returncode, sorted(found["unreachable"]), found["starting"]) == (69, ["a", "b"], [])
    starts = script(f"echo {shlex.quote(STARTS['docker'])} >&2; exit 1")
    done = cli("doctor", "--hosts", "a", "--via", starts, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (done.returncode, [*found["unreachable"]], found["starting"]) == (69, ["a"], ["a"])
    for words, said in (
        (["--via", HERE], f"--via {HERE} is for other hosts"),
        (["--same-machine"], "--same-machine is for other hosts"),
        (["--hosts", "a", "--via", HERE, "--ssh-config", "x"], "--ssh-config x is for ssh, and --via is given"),
    ):
        done = cli("doctor", *words, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


# A server that runs programs and holds their pipes, as the runtime of a container does; its client may be killed.
SERVER = """
import os, socket, subprocess, sys, threading
server = socket.socket(socket.AF_UNIX)
server.bind("server")
server.listen()
def serve(client):
    words, _, _ = client.makefile("rb", 0).readline().decode().rstrip("\\n").partition("\\r")
    program = subprocess.Popen(words.split("\\t"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    def down():
        while data := client.recv(65536):
            program.stdin.write(data)
            program.stdin.flush()
        if sys.argv[1] == "closes":
            program.stdin.close()
    threading.Thread(target=down, daemon=True).start()
    while data := os.read(program.stdout.fileno(), 65536):
        try:
            client.sendall(data)
        except OSError:
            pass
    client.shutdown(socket.SHUT_RDWR)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
CLIENT = """
import os, socket, sys, threading
link = socket.socket(socket.AF_UNIX)
link.connect("server")
link.sendall("\\t".join(sys.argv[2:]).encode() + b"\\n")
def up():
    while data := os.read(0, 65536):
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := link.recv(65536):
    os.write(1, data)
"""


@pytest.fixture(params=[pytest.param("closes"), pytest.param("keeps", marks=pytest.mark.cluster)])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A `--via` whose program lives on when its client is killed; the server closes its stdin then, or keeps it."""
    (tmp_path / "client.py").write_text(CLIENT)
    server = subprocess.Popen([sys.executable, "-c", SERVER, request.param], cwd=tmp_path, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    yield f"sh -c '{sys.executable} client.py \"$@\"; exit $?' sh {{host}}"
    for process in [*psutil.Process(server.pid).children(recursive=True), server]:
        process.kill()
    server.wait()
    server.stdout.close()


def test_what_a_killed_client_leaves_ends_by_itself(away: str, tmp_path: Path, until: Until) -> None:
    """As of `kubectl exec` and `docker exec`: the program there is no child of theirs, and gets no signal."""
    words = [sys.executable, "-m", "roxxel_dist", *TRY, "--hosts", "a,b", "--via", away]
    stay = "echo $$ > tmp.$ROXXEL_PROCESS_ID; mv tmp.$ROXXEL_PROCESS_ID up.$ROXXEL_ATTEMPT.$ROXXEL_PROCESS_ID; "
    stay += "[ $ROXXEL_ATTEMPT = 1 ] || sleep 1000; true"
    with (tmp_path / "said").open("wb") as said:
        launch = subprocess.Popen(
            [*words, "--", "bash", "-c", stay], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    until(lambda: len(list(tmp_path.glob("up.0.*"))) == 2 or launch.poll() is not None, "the ranks")
    clients = [child for child in psutil.Process(launch.pid).children(recursive=True) if "client.py" in child.cmdline()]
    assert len(clients) == 2, (tmp_path / "said").read_text()
    next(child for child in clients if "b" in child.cmdline()).kill()
    assert launch.wait(120) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert re.search(r"the connection to host b broke \(.*; the agent there kills its ranks", said), said
    for path in tmp_path.glob("up.0.*"):
        assert not psutil.pid_exists(int(path.read_text()))


def test_an_agent_that_ends_before_its_client_is_named(cli: Callable[..., Any], tmp_path: Path) -> None:
    """A client may wait for its own stdin, and have any code: the guard says how the agent ended."""
    kill = "kill -9 $(ps -o ppid= -p $PPID); sleep 60"
    words = [*TRY, "--hosts", "pod/a", "--via", script('"$@"; exec sleep 60'), "--max-restarts", "0"]
    done = cli(*words, "--", "bash", "-c", kill, cwd=tmp_path)
    said = "the agent on host pod/a ended before its ranks (signal SIGKILL); they were killed"
    assert (done.returncode, said in done.stderr) == (137, True), done.stderr


def test_a_dry_run_shows_no_secret_of_the_command(cli: Callable[..., Any], tmp_path: Path) -> None:
    words = [*TRY, "--hosts", "a", "--via", "env --token=sekrit A_TOKEN=sekrit N={host}", "--dry-run"]
    for more in ([], ["--json"]):
        done = cli(*words, *more, "--", "true", cwd=tmp_path)
        assert (done.returncode, "sekrit" in done.stdout, "N=a" in done.stdout) == (0, False, True), done.stdout


def test_a_launcher_that_is_killed_leaves_no_client_and_no_rank(away: str, tmp_path: Path, until: Until) -> None:
    words = [sys.executable, "-m", "roxxel_dist", *TRY, "--hosts", "a", "--via", away, "--host-lease", "10"]
    launch = subprocess.Popen(
        [*words, "--", "bash", "-c", "echo $$ > tmp; mv tmp up; sleep 1000; true"], cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: (tmp_path / "up").exists() or launch.poll() is not None, "the rank")
    rank = psutil.Process(int((tmp_path / "up").read_text()))
    clients = psutil.Process(launch.pid).children(recursive=True)
    assert any("client.py" in client.cmdline() for client in clients)
    os.kill(launch.pid, signal.SIGKILL)
    launch.wait()
    until(lambda: not rank.is_running(), "the rank to be gone")
    until(lambda: not any(client.is_running() for client in clients), "the clients to be gone")


def test_a_launcher_that_is_killed_leaves_no_command_of_its_list(tmp_path: Path, until: Until) -> None:
    words = [sys.executable, "-m", "roxxel_dist", *TRY, "--via", HERE]
    listed = "echo $$ > tmp; mv tmp up; exec sleep 1000"
    launch = subprocess.Popen([*words, "--hosts-from", listed, "--", "true"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    until(lambda: (tmp_path / "up").exists() or launch.poll() is not None, "the command")
    command = psutil.Process(int((tmp_path / "up").read_text()))
    launch.kill()
    launch.wait()
    until(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE, "the command to be gone")


@pytest.mark.parametrize("away", ["keeps"], indirect=True)
def test_an_agent_behind_a_terminal_is_told_to_leave(away: str, tmp_path: Path, until: Until) -> None:
    """Its stdin stays open where it runs, and it would wait for ten minutes."""
    client = away.replace('"$@"; exit $?', '"$@" | sed -u "s/$/\\r/"')
    words = [sys.executable, "-m", "roxxel_dist", *TRY, "--hosts", "a", "--via", client, "--", "true"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, "a terminal is in between" in done.stderr) == (69, True), done.stderr

    def agents() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline", "cwd"])
        mine = [one for one in found if one.info["cwd"] == str(tmp_path) and one.info["cmdline"]]
        return [one for one in mine if "roxxel_dist.launcher.agent.agent" in " ".join(one.info["cmdline"])]

    until(lambda: not agents(), "the agent to be gone")
