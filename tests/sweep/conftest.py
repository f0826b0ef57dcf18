"""What the tests of sweeps share: a study whose trials are processes; in `make test-cluster`, tasks of a real Ray."""

import process_ray
import pytest
from sweep_runs import Study, shared_ray

from roxxel_dist.sweep.driver import controller


@pytest.fixture(scope="module")
def address():
    """Of a Ray with room for four trials."""
    with shared_ray(4) as address:
        yield address


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.cluster)])
def study(request, tmp_path, monkeypatch):
    """A study that is not begun."""
    if request.param == "ray":
        return Study(tmp_path, request.getfixturevalue("address"))
    monkeypatch.setattr(controller, "connected", process_ray.connected)
    return Study(tmp_path, process_ray.ADDRESS)
