"""Two trained runs that the tests of this room look at."""

from pathlib import Path

import pytest
from kept_steps import KEPT

from roxxel_dist import Config, Experiment
from roxxel_dist.run import experiment

SMALL = {
    "dim": 16,
    "model": "runs:build",
    "max_context": 16,
    "n_devices": 1,
    "eval_iters": 1,
    "sample": "off",
    "eval_every": 3,
    "checkpoint_every": 3,
    "log_every": 2,
    "tokenizer_type": "byte",
    "phases": [{"steps": 4, "batch_size": 8, "seq_len": 17}, {"steps": 4, "batch_size": 8, "seq_len": 17}],
}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and the runs `one` and `two`, which differ in two fields; nobody writes there."""
    folder = tmp_path_factory.mktemp("pair")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "draw_curve", lambda run: "")
        for module, name, function in KEPT:  # the second run has all programs of the first one but that of its step
            patch.setattr(module, name, function)
        Experiment(Config(**SMALL)).fit(text, folder / "runs" / "one")
        Experiment(Config(**SMALL, lr=1e-2, warmup_steps=2)).fit(text, folder / "runs" / "two")
    return folder
