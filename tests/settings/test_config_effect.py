"""Fields that do nothing because of another field: refused by the commands, from flags and from files alike."""

from pathlib import Path

import pytest
import yaml

from roxxel_dist.cli.arguments import parse_train
from roxxel_dist.settings.config import FIELD_TYPES, Config
from roxxel_dist.settings.effect import RULES, without_effect

PHASES = [{"steps": 4, "batch_size": 2, "seq_len": 9}]
IDLE = [
    ({"phases": PHASES, "batch_size": 64}, "batch_size", "phases are given: change it in each phase"),
    ({"phases": PHASES, "epochs": 7.0}, "epochs", "phases are given"),
    ({"top_k_mlp": 1}, "top_k_mlp", "use_moe is False"),
    ({"expert_capacity_factor": 1.25}, "expert_capacity_factor", "use_moe is False"),
    ({"lora_rank": 4}, "lora_rank", "use_lora is False"),
    ({"rope_dim": 16}, "rope_dim", "mla is False"),
    ({"context_window": 8}, "context_window", "sliding_window is False"),
    ({"sliding_window_pattern": 2}, "sliding_window_pattern", "sliding_window is False"),
    ({"sliding_window": True, "rope_local_theta": 9.0}, "rope_local_theta", "all layers are of one kind"),
    ({"pos_encoding": "none", "partial_rotary_factor": 0.5}, "partial_rotary_factor", "pos_encoding is not rotary"),
    ({"pos_encoding": "none", "rope_theta": 500.0}, "rope_theta", "pos_encoding is not rotary"),
    ({"hidden_dim": 64, "expansion": 2}, "expansion", "hidden_dim is given"),
    ({"momentum": 0.5}, "momentum", "only the optimizers sgd and muon have it"),
    ({"optimizer": "sgd", "beta2": 0.9}, "beta2", "sgd and adafactor do not have it"),
    ({"lr_scaling": "sqrt"}, "lr_scaling", "there are no phases"),
    ({"max_rewinds": 9}, "max_rewinds", "on_bad_step is not rewind"),
    ({"fsdp_devices": 1}, "fsdp_devices", "fsdp is False"),
    ({"model_args": {"depth": 2}}, "model_args", "neither model nor optimizer is a function"),
    ({"wandb_project": "mine"}, "wandb_project", "wandb is off"),
]


def words_of(fields):
    return [
        word
        for name, value in fields.items()
        for word in (f"--{name}", yaml.safe_dump(value, default_flow_style=True).split("\n")[0])
    ]


@pytest.mark.parametrize(("fields", "name", "why"), IDLE, ids=lambda part: part if isinstance(part, str) else "")
def test_a_field_that_does_nothing_is_refused(fields, name, why, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(ValueError, match=f"^{name} does nothing here, because .*{why}"):
        parse_train(["--config", str(path)])
    if name != "model_args":
        with pytest.raises(ValueError, match=f"^--{name} does nothing here, because .*{why}"):
            parse_train(words_of(fields))


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"use_moe": True, "n_experts": 8}, []),
        ({"n_experts": 8}, ["--use_moe", "True"]),
        ({"use_moe": True, "n_experts": 8}, ["--use_moe", "False"]),  # a flag turns off what the file turns on
        ({"top_k_mlp": 2}, []),  # the default
        ({"phases": PHASES, "max_steps": 2, "grad_accum": 2}, []),
        ({"optimizer": "muon", "momentum": 0.9}, []),
        ({"model": "mine:make", "n_experts": 8, "model_args": {"depth": 2}}, []),  # its code may read any field
    ],
)
def test_a_field_that_does_something_is_not(fields, flags, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(fields))
    parse_train(["--config", str(path), *flags])


def test_a_saved_config_has_every_field_and_is_not_refused(tmp_path):
    path = tmp_path / "best.yaml"
    Config(top_k_mlp=1, phases=PHASES, batch_size=64, wandb_project="mine").save_yaml(path)
    assert parse_train(["--config", str(path)])[1].batch_size == 64


def test_every_rule_names_fields_and_each_of_them_can_do_something():
    names = {name for rule in RULES for name in rule.fields}
    assert names <= FIELD_TYPES.keys()
    on = {
        "use_moe": True,
        "use_lora": True,
        "mla": True,
        "sliding_window": True,
        "sliding_window_pattern": 2,
        "rope_scale_factor": 2.0,
        "parametrization": "mup",
        "optimizer": "muon",
        "on_bad_step": "rewind",
        "fsdp": True,
        "wandb": "offline",
    }
    assert set(without_effect({**Config().to_dict(), **on})) == {"model_args", "lr_scaling"}
    assert set(without_effect({**Config().to_dict(), **on, "phases": PHASES})) == {"model_args", "batch_size", "epochs"}


def test_a_key_that_is_given_twice_is_refused_wherever_it_stands(tmp_path):
    path = Path(tmp_path, "run.yaml")
    for text, key in (
        ("dim: 32\ndim: 64\n", "dim"),
        ("phases:\n- {steps: 1, steps: 2, batch_size: 2, seq_len: 9}\n", "steps"),
        ("model_args: {1: 2, 1.0: 3}\n", "1.0"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"run.yaml: line [12]: '{key}' is given twice"):
            parse_train(["--config", str(path)])
    with pytest.raises(ValueError, match="--phases: line 1: 'steps' is given twice"):
        parse_train(["--phases", "[{steps: 1, steps: 2, batch_size: 2, seq_len: 9}]"])
    path.write_text("model_args: {c: {<<: &b {<<: &a {x: 1}, x: 2}, x: 3}, b: *b}\nmodel: mine:make\n")  # merged keys
    assert parse_train(["--config", str(path)])[1].model_args == {"c": {"x": 3}, "b": {"x": 2}}
