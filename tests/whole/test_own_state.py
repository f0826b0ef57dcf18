"""What a user's model has beside its parameters goes wherever its parameters go."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from own_model import KINDS, build_stateful
from safetensors import safe_open

from roxxel_dist import Checkpointer, Config, Curriculum, Experiment, Generator, Phase, Roxxel, Trainer
from roxxel_dist.cli import main
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.weights.export import export_run
from roxxel_dist.weights.files import BEST, NEWEST, read_model, write_weights
from roxxel_dist.weights.load import load_run

pytestmark = pytest.mark.xdist_group("own")
STEPS = 4
SHAPE = {
    "model": "own_model:build_stateful", "dim": 16, "max_context": 32, "batch_size": 4, "lr": 1e-2, "n_devices": 1,
    "max_steps": STEPS, "log_every": 1, "eval_every": 2, "checkpoint_every": 2, "eval_iters": 1, "sample": "off",
    "tokenizer_type": "char", "max_to_keep": None,
}  # fmt: skip
COUNTED = [f"kinds.{name.replace(' ', '_')}.seen" for name in KINDS] + [
    "number",
    "listed.0.seen", "listed.1.seen", "nested.a", "nested.b.0", "array",
]  # fmt: skip
STATISTICS = ["norm.mean", "norm.var", "key", "old_key", "factor", "flags"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of `STEPS` steps on text, with all its files, and one of exports beside it."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away\n" * 200)
    return Experiment(Config(**SHAPE)).fit(folder / "text.txt", folder / "run")


def state_of(model):
    """Everything beside the parameters, by name, in numpy; random keys as integers."""
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Not(nnx.Param))):
        name = jax.tree_util.keystr(path, simple=True, separator=".").replace(".value", "")
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaves[name] = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return leaves


def check_counts(state, steps):
    first = {"array": np.arange(3.0)}
    for name in COUNTED:
        np.testing.assert_array_equal(state[name].astype(float), first.get(name, 0) + np.full(state[name].shape, steps))


def same_state(found, wanted, names):
    for name in names:
        assert found[name].dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.fixture(scope="module")
def trained(run):
    """The state of the newest checkpoint."""
    state = state_of(load_run(run).model)
    check_counts(state, STEPS)
    assert state["norm.mean"].any()
    return state


def files_alone(run, folder, *names):
    """A copy of a run without checkpoints."""
    folder.mkdir()
    for name in ("config.yaml", "tokenizer.json", *names):
        shutil.copy(run / name, folder)
    return folder


def exported(run, folder, format, **options):
    export_run(run, format, folder, **options)
    return folder


FEW = ("load_run", "the newest file of weights", "several files", "an export of an export")
"""Ways that have each format and each kind of file among them."""
WAYS = {
    "load_run": lambda run, folder: load_run(run).model,
    "a step by name": lambda run, folder: load_run(f"{run}@{STEPS}").model,
    "a generator": lambda run, folder: Generator(run, best=False).model,
    "the newest file of weights": lambda run, folder: load_run(files_alone(run, folder / "w", NEWEST)).model,
    "an export as msgpack": lambda run, folder: load_run(exported(run, folder / "x", "msgpack")).model,
    "an export as safetensors": lambda run, folder: load_run(exported(run, folder / "x", "safetensors")).model,
    "several files": lambda run, folder: (
        load_run(exported(run, folder / "x", "safetensors", max_shard_size="1KB")).model
    ),
    "bfloat16 parameters": lambda run, folder: load_run(exported(run, folder / "x", "msgpack", dtype="bfloat16")).model,
    "an export of an export": lambda run, folder: (
        load_run(exported(exported(run, folder / "x", "msgpack"), folder / "y", "safetensors")).model
    ),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in FEW else pytest.mark.long) for way in WAYS])
def test_it_goes_with_the_parameters(run, trained, tmp_path, way):
    model = WAYS[way](run, tmp_path)
    assert model.shared is model.listed[0]
    same_state(state_of(model), trained, [*COUNTED, *STATISTICS, "dropout.rngs.count", "dropout.rngs.key"])


def test_it_is_that_of_the_best_checkpoint(run, tmp_path):
    _, _, step = read_model(run / BEST)
    for path in (
        files_alone(run, tmp_path / "w", BEST),
        f"{run}@{step}",
        exported(run, tmp_path / "x", "msgpack", best=True),
    ):
        check_counts(state_of(load_run(path, best=True).model), step)


@pytest.mark.long
def test_the_text_is_that_of_the_run(run, tmp_path):
    options = {"max_new_tokens": 20, "temperature": 0}
    text = Generator(run).generate("the quick", **options)
    for format in ("msgpack", "safetensors"):
        assert Generator(exported(run, tmp_path / format, format)).generate("the quick", **options) == text


def test_files_say_what_is_state(run, tmp_path):
    found = serialization.msgpack_restore((run / NEWEST).read_bytes())
    assert sorted(found) == ["digest", "digests", "params", "state", "step"]
    assert set(found["state"]) >= {*COUNTED, *STATISTICS}
    assert not any(name.startswith("norm.m") for name in found["params"])
    with safe_open(exported(run, tmp_path / "x", "safetensors") / "model.safetensors", "numpy") as file:
        assert {name.removeprefix("state:") for name in list(file.keys()) if name.startswith("state:")} == set(
            found["state"]
        )
    assert main(["verify", str(tmp_path / "x")]) == main(["verify", str(run)]) == 0


def continued(run, folder, model="own_model:build_stateful", data=None, **options):
    """A run of one more step, which changes nearly nothing, from the weights of another."""
    config = Config(**SHAPE | {"model": model, "init_from": str(run), "max_steps": 1, "lr": 1e-12} | options)
    return Experiment(config).fit(data or run / "data", folder)


@pytest.mark.long
def test_a_run_from_its_weights_begins_with_it(run, trained, tmp_path):
    state = state_of(load_run(continued(run, tmp_path / "next", seed=5)).model)
    check_counts(state, STEPS + 1)
    assert not np.allclose(state["norm.mean"], 0)
    np.testing.assert_array_equal(state["dropout.rngs.count"], 1, "random streams are new")
    assert (state["dropout.rngs.key"] != trained["dropout.rngs.key"]).any()


@pytest.mark.long
def test_adapters_stand_on_it(run, tmp_path):
    tuned = continued(run, tmp_path / "tuned", "own_model:build_adapted")
    check_counts(state_of(load_run(tuned).model), STEPS + 1)
    again = continued(
        tuned, tmp_path / "again", data=run / "data"
    )  # the merged weights, and the state of the adapters' run
    check_counts(state_of(load_run(again).model), STEPS + 2)
    out = exported(tuned, tmp_path / "x", "safetensors")
    check_counts(state_of(load_run(out).model), STEPS + 1)


@pytest.mark.long
def test_a_fork_and_a_resumed_run_go_on_with_it(run, tmp_path):
    fork = Experiment(Config(max_steps=3)).fit(run_dir=tmp_path / "fork", fork=f"{run}@2")
    check_counts(state_of(load_run(fork).model), 3)
    Experiment(Config(max_steps=4)).fit(run_dir=fork, resume=True)
    check_counts(state_of(load_run(fork).model), 4)


@pytest.mark.long
def test_a_sweep_of_rates_begins_with_it(run):
    config = Config(**SHAPE | {"init_from": str(run), "loss": "own_model:loss_of_state"})
    _, _, losses = Experiment(config).find_lr(run / "data", num_steps=20)
    assert losses == [100 - STEPS - step for step in range(1, 21)]


@pytest.mark.long
def test_a_module_and_a_checkpointer_have_it_after_a_run(run, tmp_path):
    config = Config(**SHAPE, vocab_size=40)
    with Roxxel(run / "data") as data:
        module = build_stateful(config, nnx.Rngs(0))
        trainer = Trainer(
            module, optax.sgd(1e-3), Curriculum(data, [Phase(3, 4, 17)]), next_token_loss, tmp_path / "run"
        )
        trainer.run()
        trainer.close()
    check_counts(state_of(module), 3)
    fresh = build_stateful(config, nnx.Rngs(1))
    with Checkpointer(tmp_path / "run" / "checkpoints", fresh) as checkpointer:
        assert checkpointer.restore() == 3
    same_state(state_of(fresh), state_of(module), [*COUNTED, *STATISTICS])
    with Checkpointer(tmp_path / "own", build_stateful(config, nnx.Rngs(1))) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        assert checkpointer.restore() == 1
    _, state, _ = read_model(tmp_path / "run" / NEWEST)
    check_counts(state, 3)


def spoiled(run, folder, change):
    """A folder whose file of weights has another state."""
    params, state, step = read_model(run / NEWEST)
    files_alone(run, folder)
    write_weights(folder / NEWEST, step, params, change(dict(state)))
    return folder


SPOILED = {
    "none": (lambda state: {}, r"lack .*array.* for another model.*export that again"),
    "one is missing": (
        lambda state: {name: array for name, array in state.items() if name != "norm.var"}, "lack norm.var, which"
    ),
    "another shape": (
        lambda state: state | {"norm.mean": np.zeros(3, np.float32)}, r"norm.mean is float32\(3,\) in it and .*\(16,\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_weights_without_it_are_refused(run, tmp_path, case):
    change, message = SPOILED[case]
    with pytest.raises(UserError, match=message):
        load_run(spoiled(run, tmp_path / "w", change))


def test_random_streams_may_be_missing(run, trained, tmp_path):
    folder = spoiled(run, tmp_path / "w", lambda state: {k: v for k, v in state.items() if "dropout" not in k})
    same_state(state_of(load_run(folder).model), trained, COUNTED)


def test_state_that_the_weights_do_not_have_is_new_with_a_line(run, tmp_path, capsys):
    wider = continued(run, tmp_path / "wider", "own_model:build_wider_state")
    line = f"{run}@{STEPS} has no kinds.a_cache.seen, more of this model's shape: what the model is made with is used"
    assert line in capsys.readouterr().out
    state = state_of(load_run(wider).model)
    np.testing.assert_array_equal(state["more"], [7, 7])
    np.testing.assert_array_equal(state["kinds.a_cache.seen"].astype(float), np.full((4, 1), 8))
    np.testing.assert_array_equal(state["listed.0.seen"], [STEPS + 1])


def test_advice_for_a_run_from_an_export_can_be_followed(run, tmp_path):
    """Its model is none that another program has a format for."""
    out = exported(run, tmp_path / "x", "safetensors")
    with pytest.raises(UserError, match=r"it has weights alone, as an export; name the run that it is from$"):
        continued(out, tmp_path / "next", data=run / "data")
