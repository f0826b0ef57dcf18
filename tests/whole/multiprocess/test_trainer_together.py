"""What one rank alone does or knows never keeps the others waiting."""

import hashlib
import json
import os

import pytest
from commands import rows, run, start, wait_for

from roxxel_dist.process.durable import save_mailbox
from roxxel_dist.weights.files import read_weights, step_of

SCRIPT = os.path.join(os.path.dirname(__file__), "trainer_together.py")
SLOW_COMPILE = os.path.join(os.path.dirname(__file__), "slow_compile.py")


@pytest.mark.cluster
def test_a_rewind_a_request_and_patience_on_two_processes(corpus, tmp_path):
    """The seventh batch is left out; a save is asked for while rank 0 is busy; three evaluations later it is over."""
    launcher = start("launch", "local", "--nprocs", 2, "--devices-per-proc", 2, "--", "python", SCRIPT, tmp_path,
                     cwd=tmp_path)  # fmt: skip
    answer = None
    try:
        wait_for(lambda: launcher.poll() is not None or max(rows(tmp_path / "run"), default=0) >= 19, what="step 19")
        assert launcher.poll() is None, (tmp_path / "started.log").read_text()
        request = save_mailbox(tmp_path / "run").post({})
        (tmp_path / "go").touch()
        assert launcher.wait(100) == 0, (tmp_path / "started.log").read_text()
        answer = save_mailbox(tmp_path / "run").take_answer(request)
    finally:
        launcher.kill()
        launcher.wait()
    log = (tmp_path / "started.log").read_text()
    first, second = (json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    step, kept, best, plans, cut, digests = first
    assert (step, best, plans) == (50, 20, 2)
    assert kept[-1] == 50
    assert "going back to step 5; the rows of step 7 are left out" in log
    assert "no lower val_loss in 3 validations: the run ends here" in log
    assert list(rows(tmp_path / "run")) == list(range(1, 51))
    assert answer is not None
    assert 20 <= answer["step"] <= 50
    # Rank 0 has read them back alone: whole arrays, of which it held a half.
    assert "embedding.embedding" in cut
    params, written = read_weights(tmp_path / "run" / "model_weights.msgpack")
    assert written == 50
    assert {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in params.items()} == digests
    assert params["embedding.embedding"].shape == (500, 144)
    assert step_of(tmp_path / "run" / "best_model_weights.msgpack") == 20


@pytest.mark.long
def test_a_rank_may_compile_for_longer_than_gloo_waits(corpus, tmp_path):
    """As after a restart: rank 0 finds its programs in the cache."""
    words = ["--nprocs", 2, "--devices-per-proc", 1, "--max-restarts", 0, "--", "python", SLOW_COMPILE, tmp_path]
    done = run("launch", "local", *words, cwd=tmp_path)
    assert (tmp_path / "slept").exists()
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(rows(tmp_path / "run")) == [1, 2, 3]
