import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.checkpoint import reader as reading
from roxxel_dist.checkpoint.metadata import steps_to_keep
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cluster.mesh import make_mesh


@pytest.fixture
def state():
    return {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "key": jax.random.key(5), "step": jnp.int32(3)}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("name", ["c", "lr[1]", "a*", "a?", "a{x}", "100%20", "a#b", "a b", "ü", "[!a]"])
def test_what_is_saved_comes_back(tmp_path, state, name):
    """In a folder of any name, of such too that are patterns or parts of an address elsewhere."""
    saver = CheckpointStore(tmp_path / name)
    assert (saver.latest_step(), saver.best_step(), saver.steps(), saver.poll()) == (None, None, [], None)
    saver.save(3, state, {"corpus": "abc"})
    saver.wait()
    assert saver.latest_step() == 3
    assert saver.meta(3) == {"corpus": "abc"}
    ended = saver.poll()
    assert (ended.step, ended.problem) == (3, "")
    assert saver.poll() is None
    saver.close()
    reader = CheckpointStore(tmp_path / name)
    like = jax.tree.map(jnp.zeros_like, {k: v for k, v in state.items() if k != "key"}) | {"key": jax.random.key(0)}
    back = reader.restore(3, like)
    reader.close()
    assert np.array_equal(back["params"]["w"], state["params"]["w"])
    assert int(back["step"]) == 3
    assert float(jax.random.uniform(back["key"])) == float(jax.random.uniform(state["key"]))


def test_a_rank_that_missed_the_end_of_a_save_learns_of_it(tmp_path, state, monkeypatch):
    """Rank 0 has three checkpoints; this rank, whose question about the third was lost, believes in two."""
    saver = CheckpointStore(tmp_path / "c")
    saver.save(1, state, {})
    saver.save(2, state, {})
    saver.close()
    behind = CheckpointReader(tmp_path / "c")
    monkeypatch.setattr(reading, "broadcast_from_primary", lambda name, value: "[[1, null], [2, null], [3, 0.5]]")
    assert behind.latest_of_all() == 3
    assert (behind.steps(), behind.best_step()) == ([1, 2, 3], 3)


def test_orbax_itself_can_read_it(tmp_path, state):
    saver = CheckpointStore(tmp_path / "c")
    saver.save(3, state["params"], {})
    saver.close()
    with ocp.PyTreeCheckpointer() as plain:
        item, args = state["params"], ocp.checkpoint_utils.construct_restore_args(state["params"])
        back = plain.restore(tmp_path / "c" / "3" / "state", item=item, restore_args=args)
    assert np.array_equal(back["w"], state["params"]["w"])


def test_the_newest_ones_are_kept_and_dead_saves_swept(tmp_path, state):
    for dead in ("9.orbax-checkpoint-tmp-1", "1.orbax-checkpoint-tmp"):
        (tmp_path / "c" / dead / "state").mkdir(parents=True)
    CheckpointReader(tmp_path / "c").close()
    assert len(names(tmp_path / "c")) == 2
    saver = CheckpointStore(tmp_path / "c", max_to_keep=2)
    assert names(tmp_path / "c") == []
    for step in (1, 2, 3):
        saver.save(step, state, {})
        saver.save(step, state, {})  # again: nothing happens
    saver.close()
    assert names(tmp_path / "c") == ["2", "3"]
    assert saver.steps() == [2, 3]


def test_the_best_and_the_chosen_are_kept_apart_from_the_newest(tmp_path):
    """The loss rises after step 4, which is what makes Orbax's own best-of-n forget the newest ones."""
    tiny = {"w": jnp.ones(3)}
    options = {"max_to_keep": 2, "keep_every": 5, "keep_steps": [3]}
    saver = CheckpointStore(tmp_path / "c", **options)
    for step in range(1, 9):
        saver.save(step, tiny, {}, val_loss=abs(step - 4) if step != 6 else float("nan"))
    saver.settle()
    assert (saver.steps(), saver.best_step(), saver.latest_step()) == ([3, 4, 5, 7, 8], 4, 8)
    saver.close()
    again = CheckpointStore(tmp_path / "c", **options)
    assert (again.steps(), again.best_step()) == ([3, 4, 5, 7, 8], 4)
    for step in (9, 10, 11):
        again.save(step, tiny, {}, val_loss=-1 if step == 9 else None)
    again.close()
    assert (again.steps(), again.best_step()) == ([3, 5, 9, 10, 11], 9)
    assert names(tmp_path / "c") == sorted(map(str, again.steps()))


def test_what_is_kept():
    assert steps_to_keep({}, 3, None, ()) == set()
    assert steps_to_keep(dict.fromkeys(range(5)), 2, None, ()) == {3, 4}
    assert steps_to_keep(dict.fromkeys(range(5)), None, None, ()) == set(range(5))
    assert steps_to_keep({1: 2.0, 2: 2.0, 3: 3.0}, 1, None, ()) == {1, 3}  # the first of two that are equally good
    with pytest.raises(ValueError, match="keep_every is 0: it must be at least 1"):
        CheckpointStore("nowhere", keep_every=0)


def test_donated_right_after_the_save(tmp_path):
    """What is saved is the state as it was, however soon the next step overwrites it."""
    saver = CheckpointStore(tmp_path / "c")
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    state = {f"w{i}": jnp.full((300, 1000), float(i)) for i in range(10)}
    for done in range(1, 4):
        state = step(state)
        before = {name: np.array(leaf) for name, leaf in state.items()}
        saver.save(done, state, {})
        state = step(state)
        saver.settle()
        back = saver.restore(done, state)
        assert all(np.array_equal(back[name], before[name]) for name in before)
    saver.close()


def test_restored_on_other_devices(tmp_path):
    """Parameters cut over 8 devices, read by 4, by 1 x 2 x 2 and by one; bfloat16 among them."""

    def place(tree, mesh):
        specs = {"cut": P("data"), "half": P(None, "data"), "whole": P(), "key": P()}
        return {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in tree.items()}

    rng = np.random.default_rng(1)
    values = {
        "cut": rng.standard_normal((16, 8), np.float32),
        "half": jnp.asarray(rng.standard_normal((4, 8)), jnp.bfloat16),
        "whole": rng.standard_normal(5).astype(np.float32),
        "key": jax.random.key(7),
    }
    saver = CheckpointStore(tmp_path / "c")
    saver.save(1, place(values, make_mesh(8)), {})
    saver.wait()
    zeros = {name: jnp.zeros_like(leaf) for name, leaf in values.items() if name != "key"} | {"key": jax.random.key(0)}
    for mesh in (make_mesh(4), make_mesh(4, fsdp=2, tensor=2), make_mesh(1)):
        like = place(zeros, mesh)
        back = saver.restore(1, like)
        assert {name: leaf.sharding for name, leaf in back.items()} == {n: leaf.sharding for n, leaf in like.items()}
        assert back["half"].dtype == jnp.bfloat16
        for name in ("cut", "half", "whole"):
            assert np.array_equal(np.asarray(back[name]), np.asarray(values[name]))
        assert jnp.array_equal(jax.random.key_data(back["key"]), jax.random.key_data(values["key"]))
    saver.close()


def test_another_model_is_refused(tmp_path, state):
    saver = CheckpointStore(tmp_path / "c")
    saver.save(1, state, {})
    saver.wait()
    others = [
        ({"params": {"other": jnp.zeros(3)}}, "it has no params/other"),
        ({**state, "params": {"w": jnp.zeros((4, 3))}}, r"params/w is float32\(2, 3\) in it and float32\(4, 3\) here"),
        (
            {**state, "params": {"w": jnp.zeros((2, 3), jnp.bfloat16)}},
            r"params/w is float32\(2, 3\) in it and bfloat16\(2, 3\) here",
        ),
        ({k: v for k, v in state.items() if k != "step"}, "it has step, which is not here"),
    ]
    for other, message in others:
        with pytest.raises(ValueError, match=f"of another model or optimizer .{message}.: use the config"):
            saver.restore(1, other)
    saver.close()


def test_parameters_alone(tmp_path, state):
    saver = CheckpointStore(tmp_path / "c")
    saver.save(1, state, {})
    saver.close()
    reader = CheckpointReader(tmp_path / "c")
    assert np.array_equal(reader.restore_params(1, {"w": jnp.zeros((2, 3))})["w"], state["params"]["w"])
    with pytest.raises(ValueError, match="no checkpoint of step 7; those there are: 1"):
        reader.restore_params(7, {"w": jnp.zeros((2, 3))})
    reader.close()
