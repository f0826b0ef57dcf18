"""The files that a step crosses, as `train/README.md` lists them."""

import gc
import re
import sys
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from models import transformer
from runs import make

import roxxel_dist
from roxxel_dist import Phase
from roxxel_dist.model.loss import token_losses
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train import metrics
from roxxel_dist.train.step.optimizer import NamedOptimizer
from roxxel_dist.train.step.step import make_step

PACKAGE = Path(roxxel_dist.__file__).parent
SHAPE = {"dim": 16, "num_blocks": 1, "max_context": 32, "vocab_size": 500}


def moves_of(way):
    """How often the file changes."""
    return sum(this != before for before, this in pairwise(way))


def crossed(act, *, returns=False):
    """What `act` does in this thread: (function, file of the package) of each call, and return, in order."""
    calls = []

    def note(frame, event, _):
        code = frame.f_code
        if (event == "call" or (returns and event == "return")) and code.co_filename.startswith(f"{PACKAGE}/"):
            calls.append((code.co_name, str(Path(code.co_filename).relative_to(PACKAGE))))

    gc.collect()  # what earlier tests left behind: the end of a generator counts as a call
    gc.disable()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def listed(title):
    """The files in the rows of a table of the README."""
    text = (PACKAGE / "train" / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE))


@pytest.mark.long
def test_the_readme_lists_the_files_that_a_step_crosses(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "SHOW_EVERY_S", 0)  # else the bar moves now and then
    seldom = {"log_every": 20, "eval_every": 100, "checkpoint_every": 100, "val_fraction": 0.0}
    optimizer = NamedOptimizer(OptimizerConfig())
    made = make(
        corpus, tmp_path, [Phase(21, 8, 17)], token_losses,
        model=transformer(**SHAPE), optimizer=optimizer, **seldom,
    )  # fmt: skip
    calls = crossed(made.run)
    made.close()
    steps = [i for i, call in enumerate(calls) if call == ("enter", "process/progress.py")]
    # Steps 3 to 19: nothing is due after them, nor after the one before, whose row would be logged in them.
    called = {file for _, file in calls[steps[2] : steps[19]]}
    assert called | {"train/loop.py"} == listed("On the host, every step")  # whose one function calls the others
    programs, position = made.loop.programs, made.loop.position
    steps = position.steps
    step = make_step(position.split, token_losses, optimizer, steps.state, steps.sharding, grad_accum=2)
    args = steps.state, position.hparams, programs.stream_from(0).abstract()
    with jax.set_mesh(made.mesh):
        traced = crossed(lambda: step.trace(*args))
    assert {file for _, file in traced} == listed("In the compiled program")


@pytest.mark.long
def test_virtual_shards_add_two_files_and_five_moves_to_a_step(corpus, tmp_path, monkeypatch):
    """Counted over calls and returns, so that a file that is entered and left again is two moves."""
    monkeypatch.setattr(metrics, "SHOW_EVERY_S", 0)
    jax.devices()
    monkeypatch.setenv("PJRT_NPROC", "16")  # as a run with virtual shards has it
    ways = {}
    for shards in (0, 4):
        seldom = {"log_every": 20, "eval_every": 100, "checkpoint_every": 100, "val_fraction": 0.0}
        made = make(
            corpus, tmp_path / str(shards), [Phase(21, 8, 17)], optimizer=NamedOptimizer(OptimizerConfig()),
            virtual_shards=shards, **seldom,
        )  # fmt: skip
        calls = crossed(made.run, returns=True)
        made.close()
        steps = [i for i, call in enumerate(calls) if call == ("wait_for_next", "train/step/throughput.py")]
        ways[shards] = [file for _, file in calls[steps[10] : steps[12]]]
    files, moves = ({n: count(way) for n, way in ways.items()} for count in (lambda way: len(set(way)), moves_of))
    assert (files[4] - files[0], moves[4] - moves[0]) == (2, 5), ways
