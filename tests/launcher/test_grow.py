"""`launch slurm --grow-jobs`: jobs whose nodes join another one while they run."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from slurm_desk import OVER, Desk
from tables import one_test

from roxxel_dist.launcher.backends.slurm.backend import SlurmBackend
from roxxel_dist.launcher.backends.slurm.grow import GrowJobs, nodes_of, options_from, options_of
from roxxel_dist.process.exit_codes import UserError

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

PROGRAM = """
trap 'exit 42' TERM
touch up.$ROXXEL_ATTEMPT.$ROXXEL_NUM_PROCESSES.$(hostname)
until [ -e end ]; do sleep 0.1; done
"""


@one_test(
    ("told", "nodes"),
    [
        ("", {}),
        ("12|n1|2026-01-01T10:01:01\n", {"n1": "12"}),
        ("12|n1|2026-01-01T10:01:00\n", {}),  # its time is nearly over
        ("12|n1|Unknown\n13|n2|N/A\n", {"n1": "12", "n2": "13"}),
        ("100|n1|Unknown\n99|n1|Unknown\n", {"n1": "99"}),  # both on one node: always the same of them
        ("12||N/A\n\n|n1|N/A\nslurm: a warning\n", {}),
    ],
)
def test_which_nodes_are_there(told: str, nodes: dict[str, str]) -> None:
    assert nodes_of(told, datetime(2026, 1, 1, 10, 1, 0)) == nodes


def test_which_jobs_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, and none that was nearly over when it came: its successor would be so too."""
    for name, text in (("sbatch", f"echo $* >> {tmp_path}/asked; echo 1${{#*}}"), ("squeue", f"cat {tmp_path}/told")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    jobs = grow_jobs(tmp_path)
    jobs.submit(tmp_path / "grow.log")
    for told, asked in (
        ("9|n3|2036-01-01T10:00:00\n8|n4|2016-01-01T10:00:00\n", ["1-2"]),
        ("9|n3|2016-01-01T10:00:00\n8|n4|2016-01-01T10:00:00\n", ["1-2", "1-1"]),
        ("9|n3|2016-01-01T10:00:00\n10|n4|Unknown\n", ["1-2", "1-1"]),
        ("10|n4|2016-01-01T10:00:00\n11|n3|2016-01-01T10:00:00\n", ["1-2", "1-1", "1-1"]),
    ):
        (tmp_path / "told").write_text(told)
        jobs.read()
        assert re.findall(r"--array=(\S+)", (tmp_path / "asked").read_text()) == asked
    assert "takes the place of 9: their time is over soon" in capsys.readouterr().err


def grow_jobs(folder: Path, gpus: int | None = None, options: str = "") -> GrowJobs:
    return GrowJobs(
        "7",
        2,
        options=options_of(options),
        procs_per_host=4,
        gpus_per_host=gpus,
        exclude=["n1", "n2"],
        leave_s=60,
        environ={"PATH": f"{folder}:{os.environ['PATH']}"},
    )


def test_what_slurm_is_asked_for(tmp_path: Path) -> None:
    words = grow_jobs(tmp_path, options="partition=spare --time=1:00:00 comment='a b' requeue").words(Path("/a%b"), 2)
    assert words[:2] == ["sbatch", "--parsable"]
    assert {"--partition=spare", "--time=1:00:00", "--comment=a b", "--requeue", "--array=1-2"} < set(words)
    assert {"--exclusive", "--nodes=1", "--ntasks-per-node=4", "--exclude=n1,n2", "--output=/a%%b"} < set(words)
    assert "--exclusive=user" in grow_jobs(tmp_path, options="exclusive=user").words(tmp_path, 2)
    assert "--exclude=n1,n2,n[7-9]" in grow_jobs(tmp_path, options="exclude=n[7-9]").words(tmp_path, 2)
    assert "--gres=gpu:8" in grow_jobs(tmp_path, 8).words(tmp_path, 2)
    assert not [word for word in grow_jobs(tmp_path, 8, "gpus-per-node=h100:8").words(tmp_path, 2) if "gres" in word]


def test_options_are_those_of_the_job_without_those_that_are_its_own() -> None:
    passed = {"partition": "gpu", "exclusive": None, "comment": "it's", "dependency": "afterok:3", "signal": "B:USR1@9"}
    assert options_of(options_from(passed)) == ["partition=gpu", "exclusive", "comment=it's"]


@pytest.mark.parametrize(
    ("given", "said"),
    [("-p gpu", "'-p': write KEY=VALUE"), ("time=1 'a", "No closing quotation"), ("dependency=a", "is for one job")],
)
def test_options_that_cannot_be(given: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        options_of(given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grow-jobs", "-1"], "--grow-jobs -1: must be at least 0"),
        (["--grow-options", "time=1"], "--grow-options is for the jobs of --grow-jobs N"),
        (["--grow-jobs", "1", "--max-restarts", "0"], "leave --max-restarts 0 out"),
    ],
)
def test_slips(words: list[str], said: str, cli: Cli, tmp_path: Path) -> None:
    told = cli("launch", "slurm", "--print", *words, "--", "true", cwd=tmp_path, environ={"PATH": "/nowhere"})
    assert told.returncode == 2
    assert said in told.stderr


def test_the_script_hands_the_options_on(cli: Cli, tmp_path: Path) -> None:
    words = ["--print", "--grow-jobs", "2", "--slurm-partition", "gpu", "--slurm-comment", "a b", "--slurm-hold"]
    told = cli("launch", "slurm", *words, "--", "true", cwd=tmp_path, environ={"PATH": "/nowhere"})
    assert told.returncode == 0, told.stderr
    assert "--grow-options 'partition=gpu '\"'\"'comment=a b'\"'\"''" in told.stdout


def test_without_sbatch_the_job_runs_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = replace(grow_jobs(tmp_path), environ={"PATH": "/nowhere"})
    jobs.submit(tmp_path / "grow.log")
    assert jobs.read() == ([], None)
    jobs.cancel()
    assert "--grow-jobs 2: not submitted, and no node joins: " in capsys.readouterr().err


def test_hosts_are_nodes_of_these_jobs_alone() -> None:
    backend = SlurmBackend("7", ["n1", "n2"], grow=replace(grow_jobs(Path("/")), jobs={"n3": "9"}))
    assert [backend.argv(host, "agent")[1] for host in ("n2", "n3")] == ["--jobid=7", "--jobid=9"]
    backend.check_joining(["n1", "n3"])
    with pytest.raises(UserError, match="n4 is no node of this SLURM job, and of none of its --grow-jobs"):
        backend.check_joining(["n3", "n4"])


@pytest.mark.cluster
def test_nodes_join_when_their_jobs_start_and_leave_with_them(desk: Callable[[int], Desk]) -> None:
    four = desk(4)
    slurm = four.slurm
    first = slurm.run("sbatch", "--parsable", "-wh4", "--exclusive", "--wrap", "sleep 1000", cwd=four.folder)
    slurm.wait(first.stdout.strip(), "RUNNING")
    options = ["--nodes", 2, "--run-id", "first", "--grow-jobs", 2, "--grace", 90]
    number = four.launch(*options, "--", "bash", "-c", PROGRAM)

    def up(attempt: int, *hosts: str) -> None:
        names = {f"up.{attempt}.{len(hosts)}.{host}" for host in hosts}
        four.until(lambda: names <= {path.name for path in four.folder.glob("up.*")}, str(names))

    four.until(lambda: any(four.folder.glob("up.*.3.h3")), "the third node")
    attempt = int(next(four.folder.glob("up.*.3.h3")).name.split(".")[1])  # it may have come before the first start
    up(attempt, "h1", "h2", "h3")
    slurm.run("scancel", first.stdout.strip())
    up(attempt + 1, "h1", "h2", "h3", "h4")
    left = four.look("leave", "first", "--hosts", "h4")
    assert (left.returncode, "continues without h4" in left.stderr) == (0, True), left.stderr
    up(attempt + 2, "h1", "h2", "h3")
    job, minutes = slurm.run(
        "squeue", "--noheader", "--states=RUNNING", "--nodelist=h3", "--format=%A %M"
    ).stdout.split()
    limit = int(minutes.split(":")[-2]) + 2  # so it has more than a minute
    told = slurm.run("scontrol", "update", f"jobid={job}", f"timelimit={limit}")
    assert told.returncode == 0, told.stderr
    up(attempt + 3, "h1", "h2")
    up(attempt + 4, "h1", "h2", "h3")  # by the job that takes its place
    (four.folder / "end").touch()
    ended = slurm.wait(number, *OVER)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), four.log()
    assert "h3 can join the job" in four.log() or attempt == 0
    assert "h3 shall leave the job" in four.log()
    assert "lost" not in four.log()
    four.until(lambda: not slurm.run("squeue", "--noheader").stdout, "the other jobs to end")
    assert not four.left()


@pytest.mark.cluster
def test_they_end_with_a_launcher_that_is_killed(desk: Callable[[int], Desk]) -> None:
    three = desk(3)
    slurm = three.slurm
    number = three.launch("--nodes", 2, "--max-requeues", 0, "--grow-jobs", 1, "--", "bash", "-c", PROGRAM)
    three.until(lambda: any(three.folder.glob("up.*.3.h3")), "the third node")
    os.kill(three.pid("h1", "launch slurm"), signal.SIGKILL)
    assert slurm.wait(number, *OVER)["JobState"] == "FAILED"
    three.until(lambda: not slurm.run("squeue", "--noheader").stdout, "the other job to end")
    three.until(lambda: not three.left(), "everything to be gone")
