"""What the tests of sweeps share: a Ray of each module's own, and a study on it."""

import pytest
from sweep_runs import Study, shared_ray


@pytest.fixture(scope="module")
def address():
    """Of a Ray with room for four trials."""
    with shared_ray(4) as address:
        yield address


@pytest.fixture
def study(address, tmp_path):
    """A study that is not begun."""
    return Study(tmp_path, address)
