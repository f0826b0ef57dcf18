"""An optimizer of the user's own, through everything that one by name goes through."""

import importlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reader import ROOT

from roxxel_dist import Config, Experiment
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.estimate.estimate import estimate
from roxxel_dist.run.estimate.figures import EstimateRequest
from roxxel_dist.settings.effect import without_effect
from roxxel_dist.sweep.trial.trial import config_of

SMALL = {
    "model": "runs:build", "dim": 16, "max_context": 16, "batch_size": 8, "max_steps": 6, "lr": 1e-2,
    "log_every": 1, "val_fraction": 0.0, "checkpoint_every": 3, "memory_checkpoint_every": 0,
    "n_devices": 1, "wandb": "off", "sample": "off",
}  # fmt: skip


def numbers(run):
    names = ("step", "train_loss", "grad_norm", "update_norm", "lr", "digest")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row.get(name) for name in names] for row in rows]


@pytest.fixture
def fit(corpus, tmp_path):
    """Trains a small model with some fields, in a folder of that name; returns its numbers."""

    def run(name, resume=False, **fields):
        path = tmp_path / name
        Experiment(Config(**{**SMALL, **fields})).fit(corpus.filepath, path, resume=resume)
        return numbers(path)

    return run


def test_it_is_what_one_by_name_is_with_clipping_schedule_and_resume(fit, tmp_path):
    assert fit("own", optimizer="own_optimizer:adamw") == (named := fit("named"))
    assert len({row[4] for row in named}) == 6, "the rate is that of the step"
    shutil.rmtree(tmp_path / "own" / "checkpoints" / "6")
    (tmp_path / "own" / "training_cursor.json").unlink()
    assert fit("own", resume=True, optimizer="own_optimizer:adamw") == named
    with pytest.raises(UserError, match=r"optimizer is own_optimizer:drawing, and the run to resume has own"):
        fit("own", resume=True, optimizer="own_optimizer:drawing", max_steps=7)


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "drawing"])
def test_with_virtual_shards_it_has_the_same_bits_on_any_devices(fit, monkeypatch, name):
    """Each device has the whole state, and one program computes the update on each: so any transformation is exact."""
    jax.devices()  # which are there before a run would choose the size of a pool
    monkeypatch.setenv("PJRT_NPROC", "16")
    fields = {"optimizer": f"own_optimizer:{name}", "virtual_shards": 4, "max_steps": 4}
    assert fit("one", **fields) == fit("two", **fields, n_devices=2)


@pytest.mark.long
def test_a_plan_counts_its_state(corpus):
    own, named = (
        estimate(Config(**SMALL, optimizer=name), corpus.filepath, EstimateRequest())
        for name in ("own_optimizer:adamw", "adamw")
    )
    assert own.state == named.state


def test_a_sweep_varies_it_and_its_numbers():
    params = {"optimizer": "own_optimizer:slow_adamw", "model_args": {"scale": 0.5}}
    config = config_of(SMALL, params)
    assert (config.optimizer, config.model_args) == (params["optimizer"], {"scale": 0.5})
    values = {**Config().to_dict(), "optimizer": "own_optimizer:slow_adamw", "momentum": 0.5, "model_args": {"a": 1}}
    assert not {"momentum", "model_args"} & without_effect(values).keys()
    with pytest.raises(UserError, match=r"optimizer is 'own': it must be one of adamw, .*, or a function of your own"):
        config_of(SMALL, {"optimizer": "own"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adam': it must be one of adamw, nadamw, .* \"module:function\""),
        ({"optimizer": "own optimizer:adamw"}, "optimizer is 'own optimizer:adamw': it must be \"module:function\""),
        ({"optimizer": "own_optimizers:build"}, "optimizer is 'own_optimizers:build': there is no module 'own_opt"),
        ({"optimizer": "own_optimizer:sgd"}, "own_optimizer.py has no 'sgd'. Write the name of a function that it de"),
        ({"optimizer": "own_optimizer:NUMBER"}, "that is a int. Write the name of a function"),
        ({"optimizer": "own_optimizer:no_transformation"}, "and must return an optax.GradientTransformation"),
        ({"optimizer": "own_optimizer:one_argument"}, r"write it as `def build\(config, learning_rate\)`"),
        ({"optimizer": "own_optimizer:refusing"}, r"lr is 0.01: it must be below 1e-9 \(.*own_optimizer.py, line"),
        ({"optimizer": "own_optimizer:growing"}, r"its update gives state .*int32\[\], and is float32\[\]\): keep str"),
        ({"optimizer": "own_optimizer:line_search"}, "optimizer asks for .*'value_fn'.* in its update"),
        (
            {"optimizer": "own_optimizer:adamw", "parametrization": "mup", "base_dim": 8},
            "parametrization is mup, and optimizer is 'own_optimizer:adamw': how its updates grow .* not known",
        ),
    ],
    ids=lambda value: value["optimizer"] if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_named_before_files_are_written(corpus, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        Experiment(Config(**{**SMALL, **fields})).fit(corpus.filepath, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("name", "error"), [("broken", AttributeError), ("branching", Exception)])
def test_a_mistake_in_it_keeps_its_traceback(corpus, tmp_path, name, error):
    with pytest.raises(error) as caught:
        Experiment(Config(**SMALL, optimizer=f"own_optimizer:{name}")).fit(corpus.filepath, tmp_path / "new")
    assert not isinstance(caught.value, UserError)
    assert any(Path(entry.path).name == "own_optimizer.py" for entry in caught.traceback)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def soap(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_optimizer")
    return importlib.import_module("soap")


@pytest.mark.long
def test_the_example_trains(fit, soap):
    assert soap
    fields = {"model": None, "num_blocks": 1, "optimizer": "soap:build", "model_args": {"every": 2}}
    assert np.isfinite([row[1] for row in fit("soap", **fields)]).all()
    with pytest.raises(UserError, match=r"model_args.every is 0: it must be at least 1 \(.*soap.py, line"):
        fit("wrong", **fields | {"model_args": {"every": 0}})


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_example_is_adam_in_the_eigenbasis(soap, every):
    """Gradients U diag(d) V^T, whose eigenbasis stays the same, are stepped along by Adam on d."""
    rng, eps = np.random.default_rng(0), 0.1
    u, v = (np.linalg.qr(rng.standard_normal((4, 4)))[0] for _ in range(2))
    found, plain = soap.scale_by_soap(0.9, 0.95, 0.95, every, eps), optax.scale_by_adam(0.9, 0.95, eps)
    state, of_plain = found.init({"w": jnp.zeros((1, 4, 2, 2))}), plain.init(jnp.zeros(4))
    step, step_of_plain = jax.jit(found.update), jax.jit(plain.update)
    for _ in range(5):
        d = np.array([8.0, 4.0, 2.0, 1.0]) * rng.uniform(0.9, 1.1, 4)
        steps, state = step({"w": np.float32((u * d) @ v.T).reshape(1, 4, 2, 2)}, state)
        of_d, of_plain = step_of_plain(np.float32(d), of_plain)
        np.testing.assert_allclose(steps["w"].reshape(4, 4), (u * of_d) @ v.T, atol=1e-3)
