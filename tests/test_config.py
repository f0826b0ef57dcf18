from dataclasses import fields

import pytest

from roxxel_dist import Config
from roxxel_dist.config import PARTS, field_docs, field_types
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.train.config import LoopConfig


def test_it_is_flat_and_mutable_and_parts_are_frozen():
    config = Config(dim=64, lr=1e-3)
    config.kv_heads = 1
    model = config.part(ModelConfig)
    assert (model.dim, model.kv_heads) == (64, 1)
    with pytest.raises(AttributeError):
        model.dim = 3


def test_yaml_there_and_back(tmp_path):
    config = Config(dim=64, phases=[{"steps": 3, "batch_size": 2, "seq_len": 17}], tokenizer_type="char", lr=1e-5)
    config.save_yaml(tmp_path / "c.yaml", {"git_commit": "abc"})
    assert Config.from_yaml(tmp_path / "c.yaml").to_dict() == config.to_dict()


def test_numbers_as_people_write_them(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 5e-4\nepochs: 2\n")
    config = Config.from_yaml(tmp_path / "c.yaml")
    config.validate()
    assert config.lr == 5e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lern: 1", "there is no field 'lern'"),
        ("batchsize: 3", "did you mean 'batch_size'"),
        ("- a\n- b", "expected `field: value` lines, found a list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Config.from_yaml(tmp_path / "c.yaml")
    assert "c.yaml" in str(caught.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(
        ValueError, match=r"cannot be read .No such file or directory.: check the path given to --config"
    ):
        Config.from_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": "large"}, "dim is 'large': it must be a whole number"),
        ({"dim": 2.5}, "dim is 2.5: it must be a whole number"),
        ({"weight_tying": 1}, "weight_tying is 1: it must be True or False"),
        ({"tokenizer_type": "word"}, "tokenizer_type is 'word': it must be one of char, byte, bpe"),
        ({"lr": 0}, "lr is 0: it must be above 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0: it must be at least 0 and below 1"),
        ({"log_every": 0}, "log_every is 0: it must be at least 1"),
        ({"phases": []}, "phases is an empty list"),
    ],
)
def test_errors_name_the_field_the_value_and_the_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields).validate()


def test_every_field_has_a_home_and_a_docstring():
    for part in PARTS:
        assert set(field_docs(part)) == {field.name for field in fields(part)}, part
    assert set(field_types()) == set(Config().to_dict())
    assert "global" in field_docs(LoopConfig)["phases"]
