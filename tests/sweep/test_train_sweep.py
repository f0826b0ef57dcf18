"""What becomes of the parameters that W&B's agent hands over, in words and in a file."""

import pytest
import yaml

from roxxel_dist.sweep.train_sweep import _command


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
