"""What the tests of views share: a run that was trained."""

import pytest
from corpora import write_corpus
from runs import train

from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.data.dataset import Roxxel


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory of a run of two phases, the second with fewer rows than devices; nothing writes there."""
    folder = tmp_path_factory.mktemp("view")
    with Roxxel(write_corpus(folder)) as corpus:
        train(corpus, folder / "one", [Phase(6, 8, 17), Phase(4, 1, 33)], checkpoint_every=4)
    return folder / "one"
