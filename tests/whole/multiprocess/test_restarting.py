"""The launcher starts a killed training again by itself, and it is the same run."""

import os
import re
import signal

import pytest
from commands import launched, losses, make_corpus, rows, run, start, wait_for

from roxxel_dist.launcher.control import index


@pytest.mark.long
def test_a_killed_rank_and_a_preemption_cost_nothing_but_time(tmp_path):
    make_corpus(tmp_path)
    whole = run(*launched(2, 2, "whole"), cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    launcher = start(*launched(2, 2, "torn", restarts=3), cwd=tmp_path)
    try:
        for step, number in ((7, signal.SIGKILL), (14, signal.SIGTERM)):
            wait_for(lambda step=step: max(rows(tmp_path / "torn"), default=0) >= step, what=f"step {step}")
            os.kill(_rank(launcher.pid, 1), number)
        assert launcher.wait(120) == 0, (tmp_path / "started.log").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    told = (tmp_path / "started.log").read_text()
    assert "rank 1 failed first: signal SIGKILL" in told
    assert "restart 1 of 3, immediately" in told
    assert "preempted; restart immediately" in told
    assert told.count("resuming after step") == 2
    assert losses(tmp_path / "torn") == losses(tmp_path / "whole")
    log = (tmp_path / "torn" / "logs" / "rank-1.log").read_text()
    assert re.findall(r"^# .* attempt (\d)", log, re.MULTILINE) == ["0", "1", "2"]


@pytest.mark.long
def test_a_run_whose_file_system_comes_back_goes_on(tmp_path):
    """A link stands for the place of a mount: in the second attempt it leads to an empty folder."""
    make_corpus(tmp_path)
    for name in ("disk", "bare"):
        (tmp_path / name).mkdir()

    def mount(name):
        (tmp_path / "next").symlink_to(name)
        (tmp_path / "next").rename(tmp_path / "mounted")

    def told(words):
        wait_for(lambda: words in (tmp_path / "started.log").read_text(), what=words)

    mount("disk")
    launcher = start(*launched(1, 1, "mounted/run", restarts=3), cwd=tmp_path)
    try:
        wait_for(lambda: max(rows(tmp_path / "disk" / "run"), default=0) >= 7, what="step 7")
        os.kill(_rank(launcher.pid, 0), signal.SIGKILL)
        mount("bare")
        told("mounted/run/config.yaml is not there, and this job has reached step")
        told("rank 0 failed first: exit code 74")
        told("restart 2 of 3, in 0.5 s")
        mount("disk")
        assert launcher.wait(120) == 0, (tmp_path / "started.log").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert list(rows(tmp_path / "disk" / "run")) == list(range(1, 23))
    assert "resuming after step" in (tmp_path / "started.log").read_text()
    assert sorted(path.name for path in (tmp_path / "bare" / "run").iterdir()) == ["logs"]  # the launcher's


def _rank(launcher, number):
    """The process of a rank, as the launcher's record tells it: a spare process looks much like its rank."""
    (job,) = (job for job in index.entries() if job.controller.pid == launcher)
    return next(rank.pid for rank in job.ranks if rank.rank == number)
