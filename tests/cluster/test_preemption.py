"""A request to stop in a job of several processes: real ones, with jax's own way to agree."""

from commands import run

PROGRAM = """
import os, signal, time
from roxxel_dist.cluster.distributed import initialize, process_index
from roxxel_dist.cluster.preemption import stop_requested, watching_for_stop

initialize()
with watching_for_stop():
    if process_index() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)  # jax looks once a second, and the ranks agree then
    stopped = next((step for step in range(56, 66) if time.sleep(0.1) or stop_requested(step)), None)
print("stopped after", stopped, flush=True)
"""


def test_a_run_that_goes_on_hears_a_request_from_before_its_first_step(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("launch", "local", "--nprocs", 2, "--", "python", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split("| ")[1] for line in done.stdout.splitlines() if "stopped" in line) == ["stopped after 56"]
