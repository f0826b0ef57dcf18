"""One corpus for all checks of layouts."""

import numpy as np
import pytest

from roxxel_dist import Config, Roxxel, check_layouts


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(1)
    with Roxxel(folder / "data.rox") as data:
        # Documents of many lengths: rows of several of them, and token 1 more often in some rows than in others.
        lengths = rng.integers(5, 90, 300)
        data.write([(rng.integers(1, 40, n) ** rng.uniform(0.5, 1)).astype(np.uint8) for n in lengths], vocab_size=40)
    return folder / "data.rox"


@pytest.fixture(scope="session")
def checked(tokens):
    """The report on a config of these fields."""

    def check(*layouts, seq_len=33, done=lambda result: None, **fields):
        config = Config(**{"dim": 32, "num_blocks": 2, "n_heads": 2, "max_context": 64, "batch_size": 16} | fields)
        return check_layouts(config, tokens, layouts=layouts or None, seq_len=seq_len, done=done)

    return check
