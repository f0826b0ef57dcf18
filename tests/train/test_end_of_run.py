"""What a run leaves when what comes after its last step fails, and how soon a failure is known."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from runs import make, module, saved, told

from roxxel_dist import Phase
from roxxel_dist.checkpoint import store as checkpoint
from roxxel_dist.checkpoint.metadata import read_cursor
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.train.step import state as model_state
from roxxel_dist.train.step.bad_steps import BadStep

PHASES = [Phase(2, 8, 17)]
SOON_S = 60.0


def test_what_fails_after_the_last_step_leaves_a_finished_run(corpus, tmp_path):
    def fail():
        assert read_cursor(tmp_path)["finished"]
        raise RuntimeError("no room for the sample")

    made = make(corpus, tmp_path, PHASES)
    made.run(fail)
    made.close()
    assert read_cursor(tmp_path) == {"step": 2, "last_step": 2, "finished": True}
    assert "a task after its last step failed: RuntimeError('no room for the sample')" in told(tmp_path)


def test_the_whole_model_is_gathered_where_it_fits(corpus, tmp_path, monkeypatch):
    made = make(corpus, tmp_path, PHASES, model=module(dim=144), fsdp=True)
    try:
        cut = [name for name, leaf in made.state.params.items() if not leaf.is_fully_replicated]
        assert len(cut) > 1
        whole = made.state.local_model()
        assert len(whole.embedding.embedding[...].devices()) == 1
        assert np.array_equal(whole.embedding.embedding[...], made.state.params["embedding.embedding"])
        monkeypatch.setattr(model_state, "free_device_bytes", lambda: 1000.0)
        with pytest.raises(MemoryError, match=r"the whole model on one device: 0\.. GB do not fit in the 0\.0 GB free"):
            made.state.local_model()
    finally:
        made.close()


def within_limit(act):
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.mark.usefixtures("fresh")
def test_a_failed_run_does_not_wait_for_the_next_phase_to_be_compiled(corpus, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def loss_fn(net, batch):
        if batch.shape[1] == 33:
            begun.set()
            go_on.wait(10 * SOON_S)
        return next_token_loss(net, batch) * jnp.nan

    made = make(corpus, tmp_path, [*PHASES, Phase(2, 8, 33)], loss_fn=loss_fn, val_fraction=0)
    try:
        with pytest.raises(BadStep):
            made.run()
        assert begun.wait(SOON_S)
        within_limit(made.close)
    finally:
        go_on.set()


def test_a_failed_run_does_not_wait_for_a_save_that_hangs(corpus, tmp_path, monkeypatch):
    go_on, collect, saves = threading.Event(), checkpoint.gather_to_primary, []

    def hang(*words):
        saves.append(words)
        if len(saves) > 1:  # the second one: as where another rank does not say how its part went
            go_on.wait(10 * SOON_S)
        return collect(*words)

    def fail(state):
        if int(state.step) == 3:
            raise RuntimeError("the user's own")

    made = make(corpus, tmp_path, [Phase(4, 8, 17)], eval_fn=fail, eval_every=3, checkpoint_every=2)
    monkeypatch.setattr(checkpoint, "gather_to_primary", hang)
    try:
        with pytest.raises(RuntimeError, match="the user's own"):
            made.run()
        within_limit(made.close)
        assert len(saves) == 2
    finally:
        go_on.set()
    made.store.close()
    assert saved(tmp_path) == [1, 2]
