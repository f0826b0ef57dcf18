"""A real S3 server, and data sets that are in it as they are on the disk."""

from pathlib import Path

import numpy as np
import pytest
from buckets import put
from servers import S3Server

from roxxel_dist.data.dataset import Roxxel


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as server, server.environment():
        yield server


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Six shards of 1.2 million tokens in 700 documents, some without a token."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(3)
    sizes = [0 if number % 50 == 49 else int(rng.integers(1, 3500)) for number in range(700)]
    documents = (rng.integers(1, 60_000, size).astype(np.uint16) for size in sizes)
    Roxxel(folder).write(documents, separator=0, max_shard_bytes=400_000, vocab_size=60_001)
    return folder


@pytest.fixture(scope="session")
def local(folder):
    with Roxxel(folder) as data:
        yield data


@pytest.fixture(scope="session")
def url(server, folder):
    """The address of the same data set, with an index."""
    return put(server, folder, "corpus")


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"
