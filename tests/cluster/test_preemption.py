"""A request to stop in a job of several real processes."""

import pytest
from commands import run

PROGRAM = """
import os, signal, sys, time
from roxxel_dist.cluster.distributed import initialize, process_index
from roxxel_dist.cluster.preemption import watching_for_stop
from roxxel_dist.process.durable import SaveRequests
from roxxel_dist.train.saves import StepAgreement

initialize()
agreement = StepAgreement(SaveRequests("."), None)
with watching_for_stop():
    if process_index() == int(sys.argv[1]):
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    agreement.begin(55)
    stopped = next((step for step in range(56, 99) if time.sleep(0.1) or agreement.announcement(step).stop), None)
open(f"stopped-{process_index()}", "w").write(str(stopped))
"""


MORE = [pytest.param(*row, marks=pytest.mark.long) for row in ((0, "SIGINT"), (1, "SIGUSR1"))]


@pytest.mark.parametrize(("rank", "name"), [(1, "SIGTERM"), *MORE])
def test_one_rank_is_asked_to_stop_before_its_first_step_and_all_do_after_the_same_one(tmp_path, rank, name):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("launch", "local", "--nprocs", 2, "--", "python", "program.py", rank, name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"stopped-{number}").read_text() for number in (0, 1))
    assert first == second
    assert 56 <= int(first) <= 60
