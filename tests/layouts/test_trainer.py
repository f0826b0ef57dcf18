"""A Trainer of parts is checked on its own mesh and data, with its own optimizer."""

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from layouts.planted import double_psum, one_copy, sound
from models import with_numbers

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer, UserError, check_layouts
from roxxel_dist.cluster.mesh import make_mesh


@pytest.fixture
def trainer(tokens, tmp_path, monkeypatch):
    """A trainer of parts, on a mesh with axes of its own or of `make_mesh`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = Roxxel(tokens)

    def make(loss=sound.loss, optimizer=None, **mesh):
        curriculum = Curriculum(data, [Phase(steps=4, batch_size=8, seq_len=17)])
        model = with_numbers(lambda: sound.Model(40, nnx.Rngs(0), width=16, depth=1))
        return Trainer(model, optimizer or optax.adamw(1e-3), curriculum, loss, tmp_path / "run", **mesh)

    with data:
        yield make


def own_mesh(devices):
    return Mesh(jax.devices()[:devices], ("replica",), axis_types=(AxisType.Auto,))


@pytest.mark.long
def test_a_mesh_with_axes_of_its_own(trainer):
    report = check_layouts(trainer(mesh=own_mesh(4)))
    assert report.agree, report.results
    statuses = {result.layout: result.status for result in report.results}
    assert (statuses["mesh"], statuses["accum"], statuses["fsdp"]) == ("agrees", "agrees", "left out")
    assert report.devices == 4


@pytest.mark.long
def test_a_difference_on_the_mesh_of_make_mesh(trainer):
    bad = trainer(loss=double_psum.loss, optimizer=one_copy.optimizer(None, 1e-2))
    (result,) = check_layouts(bad, layouts=["rows"]).results
    assert result.first_gradient.ratio == pytest.approx(8)
    assert "added up twice" in result.first_gradient.meaning
    assert [each.name for each in result.differences if each.kind == "update"] == ["head.bias"]


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        pytest.param(2, "2 virtual shards on 2 devices", marks=pytest.mark.long),
        pytest.param(3, "4 virtual shards on 3 devices", marks=pytest.mark.long),
        pytest.param(5, "8 virtual shards on 3 devices", marks=pytest.mark.long),
        pytest.param(6, "8 virtual shards on 3 devices", marks=pytest.mark.long),
        pytest.param(7, "8 virtual shards on 3 devices", marks=pytest.mark.long),
    ],
)
def test_virtual_shards_of_any_number_of_devices(trainer, devices, text):
    (result,) = check_layouts(trainer(mesh=make_mesh(devices=jax.devices()[:devices])), layouts=["virtual"]).results
    assert (result.status, result.text) == ("agrees", text)


def test_one_device_has_one_layout(trainer):
    with pytest.raises(UserError, match="one device has one layout alone"):
        check_layouts(trainer(mesh=own_mesh(1)))
