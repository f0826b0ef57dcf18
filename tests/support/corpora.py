"""The data set of the tests."""

import numpy as np

from roxxel_dist.data.dataset import Roxxel


def write_corpus(folder):
    """Write 60 documents in several shards: 20,000-odd tokens below 500, 0 between documents. Returns their pattern."""
    rng = np.random.default_rng(7)
    documents = [rng.integers(1, 500, rng.integers(100, 600)).astype(np.uint16) for _ in range(60)]
    data = Roxxel(folder / "corpus_*.rox")
    data.write(iter(documents), vocab_size=500, max_shard_bytes=20_000)
    return folder / "corpus_*.rox"
