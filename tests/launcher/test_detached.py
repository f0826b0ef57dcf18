"""A controller on the first of several hosts, and the machine of its user, from which it is looked after by ssh."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import Cluster

Until = Callable[[Callable[[], Any], str], None]
SCRIPT = """
trap 'echo saved; exit 42' TERM
echo $ROXXEL_PROCESS_ID on $(hostname) has ${#MY_API_KEY}
touch up.$ROXXEL_PROCESS_ID
while :; do sleep 0.05; done
"""


class Desk:
    """The user's machine: `run` and `open` are commands there, in `folder`."""

    def __init__(self, hosts: Cluster, folder: Path) -> None:
        self._hosts = hosts
        self._where = {
            "cwd": folder,
            "env": {"XDG_STATE_HOME": str(folder / "state"), "MY_API_KEY": "s3cr3t-of-a-test"},
        }

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self._hosts.run([sys.executable, "-m", "roxxel_dist", *words], **self._where)

    def open(self, *words: object) -> subprocess.Popen[bytes]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self._hosts.popen([sys.executable, "-m", "roxxel_dist", *words], **self._where, **pipes)

    def launch(self, *options: object) -> subprocess.CompletedProcess[str]:
        words = ["--ssh-config", self._hosts.ssh_config, "--env", "MY_API_KEY", *options]
        return self.run("launch", "ssh", "--detach", *words, "--", "bash", "-c", SCRIPT)

    def job(self) -> dict[str, Any]:
        (job,) = json.loads(self.run("ps", "--all", "--json").stdout)
        return job


def words_on(hosts: Cluster, name: str) -> list[str]:
    found = []
    for pid in hosts.processes(name):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def test_a_job_on_hosts_is_looked_after_from_elsewhere(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    hosts = cluster(2)
    desk = Desk(hosts, tmp_path)
    launched = desk.launch("--hosts", "h1,h2")
    assert launched.returncode == 0, launched.stderr
    run = launched.stdout.strip()
    assert hosts.processes("controller") == [], "nothing stays where the user sits"
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2, "the ranks")
    assert sum("roxxel_dist.launcher.detached" in words for words in words_on(hosts, "h1")) == 1
    assert not any("s3cr3t" in words for name in ("h1", "h2") for words in words_on(hosts, name))
    entries = [*tmp_path.glob("state/**/*.json"), *hosts.home("h1").glob(".local/state/**/*.json")]
    assert len(entries) == 2
    assert not any("s3cr3t" in path.read_text() for path in (*entries, *tmp_path.glob("runs/**/*.log")))

    until(lambda: desk.job()["state"] == "running", "the news")
    head, line = desk.run("ps").stdout.splitlines()
    assert (head.split()[2], line.split()[:3]) == ("HOST", [run, "running", "h1"])
    assert desk.run("logs", run, "--rank", 1).stdout.endswith(" h2 1 | 1 on h2 has 16\n")
    wrong = desk.run("logs", run, "--rank", 2)
    assert (wrong.returncode, "has the ranks 0 to 1" in wrong.stderr) == (2, True)

    attached = desk.open("attach", run)
    assert attached.stdout is not None
    while b"0 on h1 has 16" not in attached.stdout.readline():
        assert attached.poll() is None
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=60)
    assert (attached.returncode, f"run {run} goes on" in err.decode()) == (130, True)
    until(lambda: not any(" attach " in words for words in words_on(hosts, "h1")), "the end of what was attached")

    (copy,) = tmp_path.glob("state/**/*.json")
    before = copy.read_text()
    stopped = desk.run("stop", run)
    assert stopped.returncode == 0
    assert stopped.stderr.endswith("with 42 (stopped, every rank saved)\n")
    assert desk.run("attach", run).returncode == 42
    assert (desk.job()["state"], desk.job()["code"]) == ("ended", 42)
    (entry,) = hosts.home("h1").glob(".local/state/**/*.json")
    entry.unlink()
    assert desk.job()["state"] == "ended", "who is over is not asked about any more"
    copy.write_text(before)
    assert desk.job()["state"] == "lost", "it is not known there any more"
    hosts.ssh_config.rename(tmp_path / "moved")
    copy.write_text(before)
    listed = desk.run("ps")
    assert (listed.returncode, run in listed.stdout, "no such file" in listed.stderr) == (0, True, True)
    until(lambda: not hosts.processes("h1") and not hosts.processes("h2"), "the end of all")


def test_hosts_that_are_not_there(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    desk = Desk(cluster(1), tmp_path)
    missing = desk.launch("--hosts", "h1,h9")
    assert (missing.returncode, missing.stdout) == (69, "")
    assert "host h9 cannot be used" in missing.stderr
    assert missing.stderr.endswith("asked from h1: with --detach it must reach every host, itself too, by ssh\n")
    missing = desk.launch("--hosts", "h9,h1")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "the job could not be started on h9: ssh: Could not resolve hostname h9" in missing.stderr
    assert not list(tmp_path.glob("up.*"))


def test_a_launcher_out_of_reach_is_said(cluster: Callable[[int], Cluster], tmp_path: Path, until: Until) -> None:
    hosts = cluster(1)
    desk = Desk(hosts, tmp_path)
    run = desk.launch("--hosts", "h1").stdout.strip()
    until(lambda: list(tmp_path.glob("up.*")), "the rank")
    attached = desk.open("attach", run)
    assert attached.stdout is not None
    while b"has 16" not in attached.stdout.readline():
        assert attached.poll() is None
    hosts.drop("h1")
    stops = desk.open("stop", run)
    listed = desk.run("ps")
    assert (listed.returncode, listed.stdout.splitlines()[1].split()[0]) == (0, run)
    assert "cannot ask h1 (ssh: connect to host" in listed.stderr
    _, err = stops.communicate(timeout=60)
    assert stops.returncode == 255
    last = f"run {run}: cannot ask h1, where its launcher is: the job may well go on\n"
    assert err.decode().endswith(last)
    _, err = attached.communicate(timeout=60)
    assert (attached.returncode, err.decode().endswith(last)) == (255, True), "it does not wait for ever"
