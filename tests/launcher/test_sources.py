"""All ranks of an attempt run the same sources: what was imported counts, not what lies on a disk."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts import ROOT, Cluster
from ranks import is_waiting_spare

from roxxel_dist.launcher.host import sources
from roxxel_dist.launcher.policy.outcome import (
    AttemptResult,
    Cause,
    CodeDiffers,
    RankExit,
    exit_code,
    next_action,
    summary,
)
from roxxel_dist.process.exit_codes import PIPE_ENV
from roxxel_dist.process.progress import MESSAGE_BYTES, AgentPipe

pytestmark = pytest.mark.xdist_group("launch")
Launch = Callable[..., Any]
Until = Callable[[Callable[[], Any], str], None]

LOOK = """
import sys
sys.path.insert(0, ".")
from roxxel_dist.launcher.host.sources import recorder
import early
recorder().install()
import package.late, json, numpy
for name in ("package/late.py", "early.py"):
    print(recorder().changed())
    open(name, "a").write("# changed")
    print(recorder().changed())
    open(name, "w").write("")
own = [name for name in recorder().sources if not name.startswith("roxxel_dist")]
print(*sorted(own), type(package.late.__spec__.loader).__mro__[1].__name__)
print("roxxel_dist.process.progress" in recorder().sources)
"""


def test_what_is_imported_is_noted_before_and_after_the_start_but_for_installed_packages(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("early.py", "package/__init__.py", "package/late.py"):
        (tmp_path / name).touch()
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    early, late = str(tmp_path / "early.py"), str(tmp_path / "package/late.py")
    assert done.stdout.splitlines() == [
        "", late, "", early, "early package package.late SourceFileLoader", "True",
    ]  # fmt: skip


FOLDERS = {
    "short": "a",
    "long": "projekt/" * 24 + "code",
    "of letters that JSON writes with six": "Документы/эксперименты/обучение/большие-модели",
    "longer than a message": "/".join(["x" * 250] * 17),
}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("folder", FOLDERS)
def test_each_source_is_told_however_long_its_path_is(
    folder: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = os.pipe()
    for fd in (reads, writes):
        os.set_blocking(fd, False)
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 1 << 20)
    monkeypatch.setenv(PIPE_ENV, f"{writes}:{os.fstat(writes).st_ino}")
    pipe, recorder = AgentPipe(), sources.SourceRecorder()
    monkeypatch.setattr(sources, "agent_pipe", lambda: pipe)
    monkeypatch.setattr(sources, "checksum_of", lambda path: "12345678")
    names = {f"mine.{number}": f"/{FOLDERS[folder]}/{number}.py" for number in range(40)} | {"last": "/last.py"}
    if not at_once:
        recorder.send()
    for name, path in names.items():
        recorder.add(name, path)
    recorder.send()
    told = [name for line in os.read(reads, 1 << 20).splitlines() for name, *_ in json.loads(line)["code"]]
    assert told == [name for name, path in names.items() if len(path) < MESSAGE_BYTES - 100]
    assert not recorder._untold
    os.close(reads)
    pipe._close()


# Each rank imports a module of the user; that of rank 1 is another one where `there` says so.
PROGRAM = """
import os, sys, time
sys.path.insert(0, "there." + os.environ["ROXXEL_PROCESS_ID"])
import mine
print("runs", mine.VALUE, flush=True)
open("runs." + os.environ["ROXXEL_ATTEMPT"] + "." + os.environ["ROXXEL_PROCESS_ID"], "w").close()
while not os.path.exists("end"):
    time.sleep(0.05)
"""


def test_ranks_with_different_sources_do_not_go_on(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for rank in range(2):
        (tmp_path / f"there.{rank}").mkdir()
        (tmp_path / f"there.{rank}" / "mine.py").write_text(f"VALUE = {rank}\n")
    code, _, err = launch("python", "program.py", max_restarts=0).wait()
    assert code == 69, err
    assert "/mine.py than rank " in err
    assert "all ranks must run the same code" in err


def test_the_program_itself_counts(launch: Launch, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"there.{rank}").mkdir()
        (tmp_path / f"there.{rank}" / "program.py").write_text(f"import time\ntime.sleep(100)  # {rank}\n")
    chooses = 'cd there.$ROXXEL_PROCESS_ID && exec "$0" -u -P -m roxxel_dist.launcher.host.worker python program.py'
    code, _, err = launch("bash", "-c", chooses, sys.executable, max_restarts=0).wait()
    assert code == 69, err
    assert "/program.py than rank " in err


@pytest.mark.parametrize(
    ("attempts", "again"),
    [([1], True), ([1, 1], False), ([1, 2], True)],
)
def test_an_edit_during_a_start_is_tried_again(attempts: list[int], again: bool) -> None:
    ends = [RankExit(rank=0, host="h", pid=1, code=-9, killed_by_us=True, step=0)]
    told = [
        summary(AttemptResult(exits=ends, differs=CodeDiffers(rank=rank, host="h", text="")), seconds=1.0, counts=False)
        for rank in attempts
    ]
    assert exit_code(AttemptResult(exits=ends, differs=CodeDiffers(rank=1, host="h", text=""))) == 69
    assert {one.cause for one in told} == {Cause.INFRASTRUCTURE}
    decision = next_action(told, 3)
    assert ("in an earlier attempt too, so a restart would not help" in decision.why) is not again
    assert (decision.again, decision.code) == (again, 0 if again else 69)


STEPS = """
import os, sys, time
from roxxel_dist.process.progress import Progress
rank, attempt = int(os.environ["ROXXEL_PROCESS_ID"]), int(os.environ["ROXXEL_ATTEMPT"])
progress = Progress.from_env(rank)
from importlib import import_module
edited = [import_module("roxxel_dist.cluster." + name) for name in ("distributed", "step_parts")]
with open(f"tmp.{rank}", "w") as file:
    print(os.getpid(), *sorted(module.EDITED for module in edited if hasattr(module, "EDITED")), file=file)
os.rename(f"tmp.{rank}", f"runs.{attempt}.{rank}")
step = 0
while attempt == 0 or not os.path.exists("end"):
    step += 1
    progress.enter(step + 1000 * attempt)
    time.sleep(0.05)
"""


def spares(job: Any) -> list[int]:
    family = psutil.Process(job.process.pid).children(recursive=True)
    return [child.pid for child in family if is_waiting_spare(child.pid)]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param("distributed", marks=pytest.mark.long),
        *(pytest.param(edit, marks=pytest.mark.cluster) for edit in ("step_parts", "")),
    ],
)
def test_after_an_edit_all_ranks_run_the_new_code_and_spares_of_the_old_are_dropped(
    launch: Launch, until: Until, tmp_path: Path, edit: str
) -> None:
    """Rank 1 has no spare; that of rank 0 has imported `distributed` before the edit, and not `step_parts`."""
    cluster = tmp_path / "package" / "roxxel_dist" / "cluster"
    shutil.copytree(ROOT / "roxxel_dist", cluster.parent, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "steps.py").write_text(STEPS)
    options = {"max_restarts": 3, "warm_spares": "on", "devices_per_proc": 1}
    job = launch("python", "steps.py", environ={"PYTHONPATH": str(tmp_path / "package")}, **options)
    job.marks("runs.0.*", 2)
    until(lambda: len(spares(job)) == 2, "two spares")
    had = set(spares(job))
    if edit:
        with (cluster / f"{edit}.py").open("a") as file:
            file.write('\nEDITED = "after"\n')
    first = int((tmp_path / "runs.0.1").read_text())
    (of_rank_1,) = [pid for pid in had if psutil.Process(pid).environ()["ROXXEL_PROCESS_ID"] == "1"]
    os.kill(of_rank_1, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    job.marks("runs.1.*", 2)
    told = [(tmp_path / f"runs.1.{rank}").read_text().split() for rank in range(2)]
    (tmp_path / "end").touch()
    code, _, err = job.wait()
    assert code == 0, err
    assert bool({int(pid) for pid, *_ in told} & had) == (edit != "distributed")
    assert [edits for _, *edits in told] == [["after"] if edit else []] * 2
    assert err.count("has changed since warm spares imported it") == (edit == "distributed")


@pytest.mark.cluster
def test_hosts_whose_program_differs_do_not_start(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    hosts = cluster(2)
    (tmp_path / "program.py").write_text("import time\ntime.sleep(100)\n")
    (tmp_path / "other.py").write_text("import time\ntime.sleep(101)\n")
    hosts.bind("h2", tmp_path / "other.py", tmp_path / "program.py")
    words = ["launch", "ssh", "--hosts", "h1,h2", "--ssh-config", hosts.ssh_config, "--", "python", "program.py"]
    done = hosts.run([sys.executable, "-m", "roxxel_dist", *words], cwd=tmp_path, timeout=200)
    assert done.returncode == 69, done.stderr
    assert f"runs another {tmp_path}/program.py than rank" in done.stderr
