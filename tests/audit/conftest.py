"""One finished run for all tests of audits, which is only read."""

import numpy as np
import pytest
from kept_steps import draw_nothing, fresh, keep, kept, no_curve  # noqa: F401  (of the tests here)

from roxxel_dist import Config, Experiment, Roxxel

SMALL = {
    "dim": 16, "num_blocks": 1, "n_heads": 2, "max_context": 32, "n_devices": 2, "dropout_rate": 0.1, "lr": 0.01,
    "log_every": 4, "eval_every": 8, "eval_iters": 1, "checkpoint_every": 6, "max_to_keep": 50, "export_weights": False,
    "ema": 0.99,
    "phases": [{"steps": 14, "batch_size": 4, "seq_len": 17}, {"steps": 8, "batch_size": 4, "seq_len": 17}],
}  # fmt: skip
MODEL = "runs:build"
"""A model that compiles soon, with dropout too."""


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(1)
    with Roxxel(folder / "data.rox") as data:
        data.write([rng.integers(1, 60, 400).astype(np.uint8) for _ in range(40)], vocab_size=60)
    return folder / "data.rox"


@pytest.fixture(scope="session")
def trained(tokens, tmp_path_factory):
    """Trains a run of SMALL, with other fields where given."""

    def train(run=None, *, resume=False, **fields):
        run = run or tmp_path_factory.mktemp("runs") / "run"
        if resume:
            Experiment(Config(**fields)).fit(run_dir=run, resume=True)
        else:
            Experiment(Config(**SMALL | fields)).fit(tokens, run)
        return run

    return train


@pytest.fixture(scope="session")
def clean(trained):
    with pytest.MonkeyPatch.context() as patch:  # it is made before the fixtures of a module are there
        keep(patch)
        draw_nothing(patch)
        return trained(model=MODEL)
