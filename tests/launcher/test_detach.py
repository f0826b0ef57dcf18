"""A controller without a terminal, of ranks on several hosts."""

import json
import shlex
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

    def launch(self, *options: object) -> subprocess.CompletedProcess[str]:
        words = ["--ssh-config", self._hosts.ssh_config, "--env", "MY_API_KEY", *options]
        return self.run("launch", "ssh", "--detach", *words, "--", "bash", "-c", SCRIPT)

    def job(self) -> dict[str, Any]:
        (job,) = json.loads(self.run("ps", "--all", "--json").stdout)
        return job


def test_a_job_on_hosts_is_detached_where_it_is_launched_also_over_ssh(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    hosts = cluster(2)
    desk = Desk(hosts, tmp_path)
    launched = desk.launch("--hosts", "h1,h2")
    assert launched.returncode == 0, launched.stderr
    run = launched.stdout.strip()
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2, "the ranks")
    (record,) = tmp_path.glob("runs/*/logs/launcher.json")
    assert not any("s3cr3t" in path.read_text() for path in (record, *tmp_path.glob("runs/**/*.log")))
    head, line = desk.run("ps").stdout.splitlines()
    assert (head.split()[2], line.split()[:2]) == ("HOST", [run, "running"])
    assert " +1 " in line
    stopped = desk.run("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stderr.endswith("with 42 (stopped, every rank saved)\n")
    assert desk.run("attach", run).returncode == 42
    until(lambda: not hosts.processes("h1") and not hosts.processes("h2"), "the end of all")

    words = [sys.executable, "-m", "roxxel_dist", "launch", "local", "--detach", "--", "bash", "-c", SCRIPT]
    away = hosts.run(["ssh", "-F", hosts.ssh_config, "h1", f"cd {tmp_path} && {shlex.join(words)}"])
    assert away.returncode == 0, away.stderr
    assert hosts.processes("h1"), "the launcher outlives its ssh session"
    run_dir = f"runs/run_{away.stdout.strip()}"
    assert json.loads((tmp_path / run_dir / "logs" / "launcher.json").read_text())["controller"]["host"] == "h1"
    words = ["ssh", "-F", hosts.ssh_config, "h1", f"cd {tmp_path} && {sys.executable} -m roxxel_dist stop {run_dir}"]
    assert hosts.run(words).returncode == 0


def test_hosts_that_are_not_there(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    desk = Desk(cluster(1), tmp_path)
    missing = desk.launch("--hosts", "h1,h9")
    assert (missing.returncode, missing.stdout) == (69, "")
    assert "host h9 cannot be used" in missing.stderr
    assert not list(tmp_path.glob("up.*"))
    assert not (tmp_path / "runs").exists()
