"""Parameters as a Config: every sweep of the seeds and of this repository, heads that fit, and errors with names."""

import random
from pathlib import Path

import pytest
from tables import one_test

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.sweep.space.sweep_file import read_sweep
from roxxel_dist.sweep.train_sweep import _command
from roxxel_dist.sweep.trial.trial import config_of

ROOT = Path(__file__).parent.parent.parent
DEFAULT = load_yaml(ROOT / "configs" / "default_config.yaml")


@pytest.mark.parametrize("name", ["sweeps/sweep.yaml", "sweeps/demo.yaml", "configs/sweep.yaml", "sweeps/extras.yaml"])
@pytest.mark.parametrize("base", [DEFAULT, {"dim": 384, "n_heads": 6, "head_size": 64, "kv_heads": 3}], ids=str)
def test_every_trial_of_a_sweep_is_a_config(name, base):
    extras = name == "sweeps/extras.yaml"
    sweep = read_sweep(ROOT / ("sweeps/sweep.yaml" if extras else name), ROOT / name if extras else None)
    chosen = random.Random(0)
    swept, found = {one.name for one in sweep.space.parameters}, 0
    for _ in range(200):
        try:
            params = sweep.rules.resolve(sweep.space.point([chosen.random() for _ in sweep.space.free]))
        except ValueError:  # against a constraint
            continue
        if base is not DEFAULT and "kv_heads" not in params:
            base = {**base, "kv_heads": 2}  # 3 divides no number of heads of 256
        config = config_of(base, params, swept)
        n_heads, kv_heads, head_size = config.part(ModelConfig).heads()
        assert n_heads * head_size == config.dim == params["dim"]
        assert n_heads % kv_heads == 0
        assert {name: getattr(config, name) for name in params} == params
        found += 1
    assert found > 50


def test_heads_of_the_base_stay_where_the_sweep_does_not_touch_them():
    base = {"dim": 64, "n_heads": 2, "head_size": 32}
    assert config_of(base, {"lr": 1e-3}).n_heads == 2
    assert config_of(base, {"dim": 128}).n_heads is None
    assert config_of(base, {"kv_heads": 4}).part(ModelConfig).heads()[0] % 4 == 0
    given = config_of(base, {"dim": 128, "n_heads": 8})
    assert given.part(ModelConfig).heads() == (8, 8, 16)
    # One whose condition left it out of this trial is swept all the same.
    assert config_of(base, {"lr": 1e-3}, {"lr", "dim"}).n_heads is None


def test_sections_and_arguments_of_a_model_of_ones_own():
    base = {"model": "mypkg:build", "model_args": {"width": 3, "depth": 2}, "optimizer": {"lr": 1e-4, "beta1": 0.8}}
    config = config_of(base, {"optimizer": {"lr": 1e-3}, "model_args": {"width": 5}})
    assert (config.lr, config.beta1, config.model_args) == (1e-3, 0.8, {"width": 5, "depth": 2})


def test_wandb_is_offline_unless_the_base_says_otherwise():
    assert config_of({}, {}).wandb == "offline"
    assert config_of({"wandb": "off"}, {}).wandb == "off"


@one_test(
    ("params", "message"),
    [
        ({"learning_rat": 1}, "there is no field 'learning_rat': "),
        ({"dropout_rat": 0.1}, "there is no field 'dropout_rat': did you mean 'dropout_rate'?"),
        ({"dropout_rate": 1.5}, "dropout_rate is 1.5: it must be at least 0 and below 1"),
        ({"dim": 7}, "dim is 7: no multiple of kv_heads (1) cuts it into heads of an even size"),
        ({"dim": 64, "kv_heads": 3}, "dim is 64: no multiple of kv_heads (3) cuts it"),
        ({"dim": 64, "n_heads": 3}, "n_heads x head_size must be dim, and 3 x 21 is not 64"),
        ({"optimizer": "adam"}, "optimizer is 'adam': it must be one of adamw"),
        ({"num_blocks": 2.5}, "num_blocks is 2.5: it must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(params, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        config_of({}, params)
    assert message in str(caught.value)


def test_the_words_of_train_sweep(tmp_path, monkeypatch):
    """Values as their types; what the agent's file has wins; base, data and run directory from words or variables."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("dim: 64\nn_heads: 4\nwandb: 'off'\n")
    (tmp_path / "params.yaml").write_text("wandb_version: 1\nlr: {value: 0.25, desc: null}\n_wandb: {value: {}}\n")
    env = {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "r"}
    words = [
        "--dim=32",
        "--lr=1e-05",
        "--use_moe=True",
        "--warmup_steps=None",
        "--phases=[{'steps': 3, 'batch_size': 8, 'seq_len': 9}]",
        "--scan_layers",
    ]
    command = _command(["--config", "base.yaml", *words], env)
    assert command[-8:] == [
        "train", "--config", "runs/sweep_s/r/trial.yaml", "--run_dir", "runs/sweep_s/r", "--resume", "--data_path",
        "data/corpus.txt",
    ]  # fmt: skip
    written = load_yaml(tmp_path / "runs/sweep_s/r/trial.yaml")
    assert (written["dim"], written["n_heads"], written["lr"], written["use_moe"]) == (32, None, 1e-5, True)
    assert (written["warmup_steps"], written["phases"], written["scan_layers"]) == (
        None,
        [{"steps": 3, "batch_size": 8, "seq_len": 9}],
        True,
    )
    assert written["wandb"] == "online"
    env |= {"WANDB_MODE": "offline", "ROXXEL_SWEEP_CONFIG": "base.yaml", "ROXXEL_SWEEP_DATA": "there"}
    ranks = '{"hosts": 1, "procs_per_host": 2}'
    env |= {"ROXXEL_SWEEP_RUN_DIR": "own", "ROXXEL_SWEEP_RANKS": ranks, "WANDB_SWEEP_PARAM_PATH": "params.yaml"}
    command = _command(["lr=0.5", "--data_path=here"], env)
    assert command[command.index("launch") :][:4] == ["launch", "local", "--nprocs", "2"]
    assert command[-1] == "here"
    written = load_yaml(tmp_path / "own/trial.yaml")
    assert (written["lr"], written["n_heads"], written["wandb"]) == (0.25, 4, "offline")


PHASES = {"phases": [{"steps": 8, "batch_size": 8, "seq_len": 33}, {"steps": 2, "batch_size": 8, "seq_len": 33}]}


@pytest.mark.parametrize(
    "params",
    [
        {"mixture.1.self": 0.3, "mixture.1.code": 0.7, "phase_end.1": 0.5},
        {"mixture": {"1": {"self": 0.3, "code": 0.7}}, "phase_end": {"1": 0.5}},
        {"mixture.1": {"self": 0.3, "code": 0.7}, "phase_end": {1: 0.5}},
    ],
    ids=["points", "nested", "both"],
)
def test_shares_and_ends_may_be_nested_as_wandb_nests_parameters(params):
    first, second = config_of(PHASES, params).to_dict()["phases"]
    assert (first["weights"], first["steps"], second["steps"]) == ({"self": 0.3, "code": 0.7}, 5, 5)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"phase_end.1": float("nan")}, "phase_end.1: nan must be a share of all steps"),
        ({"phase_end.1": 1.5}, "phase_end.1: 1.5 must be a share of all steps"),
        ({"phase_end.1": "half"}, "phase_end.1: 'half' must be a share of all steps"),
        ({"phase_end.2": 0.9}, "phase_end.2: phase 2 is the last one, which ends with the training"),
    ],
)
def test_ends_that_a_server_may_send(params, why):
    with pytest.raises(ValueError, match=why):
        config_of(PHASES, params)
