"""What the pods of `launch k8s` run: two machines stand for pods, and a program that enters them for `kubectl exec`.

The manifest is that of `test_jobset.py`. No cluster is here: the scheduler, the JobSet controller and RBAC are not run.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hosts import ROOT, Cluster

from roxxel_dist.cli import main
from roxxel_dist.launcher.backends.kubernetes.forms import WAIT

Until = Callable[[Callable[[], Any], str], None]
NAMES = ("m-controller-0", "m-hosts-0")
KUBECTL = """\
#!/bin/sh
if [ "$1 $2 $4 $5 $6" != "exec -i -c host --" ]; then echo "error: unknown command \\"$*\\"" >&2; exit 1; fi
name=${{3#job/}}
if [ ! -e "{pods}/$name" ]; then echo "Error from server (NotFound): jobs.batch \\"$name\\" not found" >&2; exit 1; fi
shift 6
exec "{enter}" "$name" "$@"
"""
PROGRAM = """
import os, signal, sys, time
rank, attempt = os.environ["ROXXEL_PROCESS_ID"], os.environ["ROXXEL_ATTEMPT"]
def leave(*_):
    print("saved", flush=True)
    sys.exit(42)
signal.signal(signal.SIGTERM, leave)
with open(f"tmp.{rank}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"tmp.{rank}", f"up.{attempt}.{rank}")
while not os.path.exists("end"):
    time.sleep(0.1)
"""


@dataclass
class Pods:
    """A JobSet of two pods."""

    hosts: Cluster
    folder: Path
    container: dict[str, Any]
    """That of the pod with the launcher, by the manifest."""

    def start(self, attempt: int = 0) -> subprocess.Popen[bytes]:
        """The launcher, as the first pod has it; what it says goes to `said`."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": str(ROOT), "ROXXEL_RESTARTS": str(attempt)}
        with (self.folder / "said").open("ab") as said:
            return self.hosts.popen(
                self.container["command"], on=NAMES[0], cwd=self.folder, env=env, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said,
            )  # fmt: skip

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def up(self, attempt: int) -> list[Path]:
        return sorted(self.folder.glob(f"up.{attempt}.?"))


@pytest.fixture
def pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    from machines import missing

    if why := missing():
        pytest.skip(why)
    with Cluster(2, NAMES) as hosts:
        (tmp_path / "bin").mkdir()
        (tmp_path / "pods").mkdir()
        for name in NAMES:
            (tmp_path / "pods" / name).touch()
        (tmp_path / "program.py").write_text(PROGRAM)
        kubectl = tmp_path / "bin" / "kubectl"
        kubectl.write_text(KUBECTL.format(pods=tmp_path / "pods", enter=hosts.enter))
        kubectl.chmod(0o755)
        words = ["--hosts", "2", "--image", "i", "--name", "m", "--host-timeout", "20", "--all-ranks", "--grace", "10"]
        assert main(["launch", "k8s", *words, "--", "python", "program.py"]) == 0
        *_, told = yaml.safe_load_all(capsys.readouterr().out)
        pod = told["spec"]["replicatedJobs"][-1]["template"]["spec"]["template"]["spec"]
        yield Pods(hosts=hosts, folder=tmp_path, container=pod["containers"][0])


@pytest.mark.cluster
def test_a_killed_rank_is_named_and_started_again(pods: Pods, until: Until) -> None:
    launch = pods.start()
    until(lambda: len(pods.up(0)) == 2 or launch.poll() is not None, "the ranks")
    os.kill(int(pods.up(0)[1].read_text()), signal.SIGKILL)
    until(lambda: len(pods.up(1)) == 2 or launch.poll() is not None, "the ranks again")
    (pods.folder / "end").touch()
    assert launch.wait(60) == 0, pods.said()
    assert f"rank 1 failed first: signal SIGKILL (host {NAMES[1]}" in pods.said()
    assert not pods.hosts.processes(NAMES[1])


@pytest.mark.cluster
def test_a_pod_that_is_lost_is_used_again_when_it_is_made_anew(pods: Pods, until: Until) -> None:
    launch = pods.start()
    until(lambda: len(pods.up(0)) == 2 or launch.poll() is not None, "the ranks")
    (pods.folder / "pods" / NAMES[1]).unlink()
    for pid in pods.hosts.processes(NAMES[1]):
        pods.hosts.signal(NAMES[1], pid, signal.SIGKILL)
    until(lambda: "cannot be used" in pods.said() or launch.poll() is not None, "the launcher to wait for the pod")
    (pods.folder / "pods" / NAMES[1]).touch()
    until(lambda: len(pods.up(1)) == 2 or launch.poll() is not None, "the ranks again")
    (pods.folder / "end").touch()
    assert launch.wait(60) == 0, pods.said()
    assert re.search(rf"the connection to host {NAMES[1]} broke \(signal SIGKILL\)", pods.said()), pods.said()
    assert re.search(rf'host {NAMES[1]} cannot be used: .*\(NotFound\): .*"{NAMES[1]}" not found', pods.said())


@pytest.mark.cluster
def test_a_launcher_that_is_asked_to_end_saves_and_one_that_is_lost_resumes(pods: Pods, until: Until) -> None:
    """As of a drained node, and of a node that is gone: the JobSet starts all pods again."""
    launch = pods.start()
    until(lambda: len(pods.up(0)) == 2 or launch.poll() is not None, "the ranks")
    launch.terminate()
    assert launch.wait(60) == 42, pods.said()
    assert pods.said().count("| saved") == 2
    launch = pods.start(attempt=1)
    until(lambda: len(pods.up(1)) == 2 or launch.poll() is not None, "the ranks again")
    launch.kill()
    launch.wait()
    until(lambda: not any(pods.hosts.processes(name) for name in NAMES), "everything to be gone")
    launch = pods.start(attempt=2)
    until(lambda: len(pods.up(2)) == 2 or launch.poll() is not None, "the ranks again")
    (pods.folder / "end").touch()
    assert launch.wait(60) == 0, pods.said()


AGENT = "trap 'sleep 1; touch saved; exit' TERM; touch up; while :; do sleep .1; done"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_pod_that_is_to_end_tells_its_agents_and_waits_for_them(tmp_path: Path) -> None:
    """Its first process alone gets SIGTERM, once it has set its trap: without one the kernel drops what it is sent."""
    (tmp_path / "agent").write_text(AGENT)
    is_set = "grep -q 'SigCgt:.*[4-7c-f]...$' /proc/1/status"  # the 15th bit is SIGTERM's
    (tmp_path / "begin").write_text(
        f"sh agent roxxel_dist.launcher.agent.agent &\n(until [ -e up ] && {is_set}; do sleep .1; done; kill 1) &\n"
    )
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", f". ./begin; {WAIT[2]}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, (tmp_path / "saved").exists()) == (143, True), done.stderr


def test_a_pod_that_waits_ends_by_sigterm_and_not_with_the_code_of_success() -> None:
    """0 would be the end of its Job, after which no pod is made anew."""
    waits = subprocess.Popen(WAIT, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while not psutil.Process(waits.pid).children():
            assert time.monotonic() < end
        time.sleep(0.05)
        waits.send_signal(signal.SIGTERM)
        assert waits.wait(20) == 143
    finally:
        os.killpg(waits.pid, signal.SIGKILL)
