import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import one_test

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.cluster.parameter_sharding import fsdp_spec, parameter_sharding


@one_test(
    ("shape", "spec"),
    [
        ((256, 256), P("data")),
        ((256, 512), P(None, "data")),
        ((50_257, 768), P(None, "data")),  # the larger one does not divide by 8
        ((4, 1024, 512), P(None, "data")),
        ((255, 257), P()),
        ((1 << 16,), P("data")),
        ((65_535,), P()),
        ((255, 256), P()),
        ((), P()),
        ((0, 1 << 20), P()),
    ],
)
def test_the_largest_dimension_that_divides_is_cut(shape, spec):
    mesh = make_mesh(8)
    assert fsdp_spec(shape, mesh) == spec
    assert NamedSharding(mesh, spec).shard_shape(shape) is not None


def test_what_is_asked_for_wins_over_the_rule():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    assert parameter_sharding("w", (512, 512), mesh, None, fsdp=True).spec == P("data")
    assert parameter_sharding("w", (512, 512), mesh, None, fsdp=False).spec == P()
    for asked in (P(None, "model"), P(("data", "model")), P(None, None)):
        assert parameter_sharding("w", (512, 512), mesh, asked, fsdp=True).spec == asked


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (P("data", "tensor"), r"w is partitioned over 'tensor', .* \(data, model\): .*\(\[\('tensor', None\)\]\)"),
        (P(None, "data"), r"w of shape \(8, 6\) cannot be partitioned as .* over the mesh {'data': 4, 'model': 2}"),
        (P("model", "model"), "each axis must divide its dimension and be there once"),
        (P(None, None, "model"), "cannot be partitioned"),
        (P(None, ("model", "data")), "cannot be partitioned"),
    ],
)
def test_what_the_mesh_cannot_give_is_refused(asked, message):
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    with pytest.raises(ValueError, match=message):
        parameter_sharding("w", (8, 6), mesh, asked, fsdp=True)
