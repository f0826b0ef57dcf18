"""What becomes of the parameters that W&B's agent hands over, in words and in a file."""

import json

import pytest
import yaml

from roxxel_dist.sweep.train_sweep import _command

pytestmark = pytest.mark.xdist_group("agent")  # the modules of W&B's agent are imported once

CLIENTS = {"_wandb": {"cli_version": "0.31.0", "python_version": "3.11", "m": [], "t": {"1": [1, 5], "3": None}}}
GIVEN = {"lr": 0.002, "vocab_size": None, "use_moe": True, "data_path": "text = raw", "model_args": {"a": [1, 2]}}
MACROS = ["args", "args_no_equals", "args_no_hyphens", "args_json", "args_append_hydra", "args_override_hydra"]


@pytest.mark.parametrize("in_words", [True, False])
def test_data_and_config_among_the_parameters_of_the_agents_file(tmp_path, in_words):
    (tmp_path / "base.yaml").write_text("dim: 32\nkv_heads: 1\n")
    params = {"data_path": str(tmp_path / "text"), "config": str(tmp_path / "base.yaml"), "lr": 0.002}
    told = {"wandb_version": 1, "_wandb": {"value": {}}, **{name: {"value": value} for name, value in params.items()}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(told))
    words = [f"--{name}={value}" for name, value in params.items()] if in_words else []
    run = tmp_path / "run"
    env = {"WANDB_SWEEP_PARAM_PATH": str(tmp_path / "params.yaml"), "ROXXEL_SWEEP_RUN_DIR": str(run)}
    command = _command(words, env)
    assert command[command.index("--data_path") + 1] == params["data_path"]
    config = yaml.safe_load((run / "trial.yaml").read_text())
    assert (config["dim"], config["lr"]) == (32, 0.002)


@pytest.mark.parametrize("macro", [*MACROS, "args_json_file"])
@pytest.mark.parametrize("with_file", [False, True])
def test_what_the_client_adds_to_the_words_is_no_parameter(tmp_path, macro, with_file):
    """As W&B's own agent makes the words of a run that it is to resume."""
    from wandb.sdk.launch.sweeps import utils

    given = {name: {"value": value} for name, value in {**GIVEN, **CLIENTS}.items()}
    words = utils.create_sweep_command_args({"args": given}).get(macro) or []
    env = {"ROXXEL_SWEEP_RUN_DIR": str(tmp_path / "run")}
    if macro == "args_json_file":
        (tmp_path / "config-x.json").write_text(json.dumps({**GIVEN, **CLIENTS}))
        words = [str(tmp_path / "config-x.json")]
    if with_file:
        (tmp_path / "params.yaml").write_text(yaml.safe_dump({"wandb_version": 1, **given}))
        env["WANDB_SWEEP_PARAM_PATH"] = str(tmp_path / "params.yaml")
    command = _command(words, env)
    assert command[command.index("--data_path") + 1] == "text = raw"
    config = yaml.safe_load((tmp_path / "run" / "trial.yaml").read_text())
    assert [config[name] for name in ("lr", "vocab_size", "use_moe", "model_args")] == [
        0.002,
        None,
        True,
        {"a": [1, 2]},
    ]


@pytest.mark.parametrize(
    ("word", "said"), [("--lr={0.1", "--lr={0.1: this is no value in YAML"), ("{lr", "no JSON object")]
)
def test_a_word_that_cannot_be_read_is_named(tmp_path, word, said):
    with pytest.raises(ValueError, match=said):
        _command([word], {"ROXXEL_SWEEP_RUN_DIR": str(tmp_path / "run")})
