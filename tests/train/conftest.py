"""One data set, and one finished run on it, for all tests of training."""

import shutil

import pytest
from corpora import write_corpus
from kept_steps import fresh, kept, no_curve  # noqa: F401  (of the tests here)
from runs import train

from roxxel_dist import Roxxel


@pytest.fixture(scope="session")
def corpus_pattern(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def corpus(corpus_pattern):
    """Of all tests: one that writes to its data has data of its own."""
    with Roxxel(corpus_pattern) as opened:
        yield opened


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, corpus_pattern):
    """A run of `runs.train` with all of its checkpoints, which is only read."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with Roxxel(corpus_pattern) as corpus:
        train(corpus, folder, checkpoint_every=4, max_to_keep=None)
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    """A copy of it, to go on with."""
    return shutil.copytree(finished_run, tmp_path / "run")
