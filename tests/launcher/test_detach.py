"""A controller on the first of several hosts, and the user's machine, which gets a record of where it is."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import Cluster

from roxxel_dist.launcher.jobs.detach import StartError, detach
from roxxel_dist.launcher.jobs.record import JobRecord, Process
from roxxel_dist.launcher.spec import JobSpec

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


def words_on(hosts: Cluster, name: str) -> list[str]:
    found = []
    for pid in hosts.processes(name):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def test_a_job_on_hosts_is_left_to_the_first_one(
    cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    hosts = cluster(2)
    desk = Desk(hosts, tmp_path)
    launched = desk.launch("--hosts", "h1,h2")
    assert launched.returncode == 0, launched.stderr
    run = launched.stdout.strip()
    assert hosts.processes("controller") == [], "nothing stays where the user sits"
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2, "the ranks")
    assert sum("roxxel_dist.launcher.jobs.detach" in words for words in words_on(hosts, "h1")) == 1
    assert not any("s3cr3t" in words for name in ("h1", "h2") for words in words_on(hosts, name))
    entries = [*tmp_path.glob("state/**/*.json"), *hosts.home("h1").glob(".local/state/**/*.json")]
    assert len(entries) == 2
    assert not any("s3cr3t" in path.read_text() for path in (*entries, *tmp_path.glob("runs/**/*.log")))

    head, line = desk.run("ps").stdout.splitlines()
    assert (head.split()[2], line.split()[:2]) == ("HOST", [run, "running"])
    assert " h1 +1 " in line
    assert desk.job()["state"] == "unknown"
    refused = desk.run("attach", run)
    assert refused.returncode == 2
    assert " ssh -F " in launched.stderr.replace("`", " ")
    lines = [text.split("`")[-2] for text in (launched.stderr, refused.stderr)]
    assert lines[0] == lines[1], "the line that leads there"
    assert lines[0].endswith(f" h1 {sys.executable} -m roxxel_dist attach {run}")
    there = lines[0].replace(" attach ", " stop ").split()
    stopped = hosts.run(there, env={"PYTHONPATH": ""})
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stderr.endswith("with 42 (stopped, every rank saved)\n")
    assert hosts.run(lines[0].split(), env={"PYTHONPATH": ""}).returncode == 42
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


class Liar:
    """A backend whose host answers with this entry."""

    hosts = ("h1",)

    def __init__(self, entry: dict[str, Any]) -> None:
        self._answer = json.dumps({"entry": entry})

    def describe(self) -> dict[str, str]:
        return {"kind": "ssh"}

    def start(self, host: str, module: str) -> subprocess.Popen[bytes]:
        del host, module
        words = [sys.executable, "-S", "-c", f"print({self._answer!r})"]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("run_id", "host"), [("r", "h1"), ("../../x", "h1"), ("/tmp/x", "h1"), ("r", "../h1")])
def test_what_a_host_answers_names_no_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str, host: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = JobSpec(run_id="r", command=("true",), nprocs=1, log_dir=tmp_path)
    times = {"begun": 0.0, "updated": 0.0, "grace": 1.0}
    entry = JobRecord(
        run_id=run_id, controller=Process(host=host, boot="", pid=1, start=1), hosts=("h1",), nprocs=1, command="true",
        log_dir="/w", run_dir="/w", directory="/w", **times,
    )  # fmt: skip
    liar: Any = Liar(dataclasses.asdict(entry))
    if (run_id, host) == ("r", "h1"):
        assert detach(job, liar) == entry
        assert [path.name for path in tmp_path.rglob("*.json")] == ["r.h1.1.json"]
        return
    with pytest.raises(StartError, match="h1 started run 'r', but its answer is no record of a job: "):
        detach(job, liar)
    assert not list(tmp_path.rglob("*.json"))
