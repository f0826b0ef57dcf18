import copy
import dataclasses
import pickle
from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest
import yaml
from tables import one_test

from roxxel_dist import Config
from roxxel_dist.cli.arguments import ConfigArgs, parse_config, parse_train
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.process.durable import FormatError
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import COMPONENTS, FIELD_TYPES
from roxxel_dist.settings.training import ExperimentConfig
from roxxel_dist.utils.component import field_docs


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


def test_it_knows_which_fields_were_given(tmp_path):
    config = Config(dim=64, lr=3e-4)
    config.kv_heads = 1
    (tmp_path / "c.yaml").write_text("optimizer: {lr: 5e-4}\n")
    assert config.given == {"dim", "lr", "kv_heads"}
    assert Config.from_yaml(tmp_path / "c.yaml").given == {"lr"}
    full = config.with_defaults({"lr": 1.0, "epochs": 7, "record": {}})
    assert (full.lr, full.epochs, full.given) == (3e-4, 7, config.given)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("wsd", 30)),
        ({"lr_schedule": "wsd"}, ("wsd", 30)),
        ({"lr_schedule": "constant"}, ("constant", None)),
        ({"lr_schedule": "wsd", "decay_steps": 5}, ("wsd", 5)),
        ({"decay_steps": 5}, ("wsd", 5)),
    ],
)
def test_another_schedule_does_not_take_the_decay_of_wsd(tmp_path, fields, expected):
    run = {"lr_schedule": "wsd", "decay_steps": 30}
    of_file = Config(**fields).with_defaults(run)
    of_file.validate()
    assert (of_file.lr_schedule, of_file.decay_steps) == expected
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run))
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    config = parse_train(["--fork", f"{tmp_path}@4", *words])[1].with_defaults(run)  # as `fit` has it
    assert (config.lr_schedule, config.decay_steps) == expected


COPIES = {
    "replace": dataclasses.replace,
    "replace by the same": lambda config: dataclasses.replace(config, max_steps=config.max_steps, lr=config.lr),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "paths": lambda config: config.with_absolute_paths(),
    "defaults": lambda config: config.with_defaults({}),
    "asdict": lambda config: Config(**dataclasses.asdict(config)),
    "replace, pickle and copy": lambda config: copy.copy(pickle.loads(pickle.dumps(dataclasses.replace(config)))),
}
if hasattr(copy, "replace"):  # from Python 3.13 on
    COPIES["copy.replace"] = copy.replace
GIVEN = {
    "nothing": (Config(), set()),
    "a value": (Config(dim=64), {"dim"}),
    "a value that is the default": (Config(lr=3e-4), {"lr"}),
    "other defaults": (Config(dim=64).with_defaults({"dim": 1, "lr": 1.0, "phases": [{"steps": 1}]}), {"dim"}),
    "from a file": (Config.from_dict({"model": {"dim": 64}, "seed": 0}), {"dim", "seed"}),
    "words": (
        parse_train(["--lr", "3e-4", "--model", "net:build", "--model_args.width", "3"])[1],
        {"lr", "model", "model_args"},
    ),
}


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(("config", "given"), GIVEN.values(), ids=GIVEN)
def test_a_copy_knows_which_fields_were_given(made, config, given):
    config = copy.copy(config)
    config.of_run = ("run", None, False)
    copied = made(config)
    assert type(copied) is Config
    assert copied.given == given == config.given
    assert (copied, copied.of_run, repr(copied)) == (config, config.of_run, repr(config))
    changed = dataclasses.replace(copied, max_steps=3)
    assert (changed.given, changed.max_steps, changed.of_run) == (given | {"max_steps"}, 3, config.of_run)
    copied.kv_heads = 1
    assert (copied.given, config.given) == (given | {"kv_heads"}, given)
    assert dataclasses.replace(changed, max_steps=None).given == given | {"max_steps"}, "it was given once"


SWITCHES = {  # as YAML 1.1 reads them, which knows on and off as true and false
    "on": ["on", "On", "ON", "yes", "true", "True", '"on"', "'on'"],
    "off": ["off", "Off", "OFF", "no", "No", "false", '"off"', "'off'"],
    "none": ["none", '"none"', "null", "~", ""],
}
CHOICES = [
    (name, choice, written)
    for name, kind in FIELD_TYPES.items()
    if get_origin(kind) is Literal
    for choice in get_args(kind)
    for written in SWITCHES.get(choice, [choice, f'"{choice}"'])
]
TEXTS = [name for name, kind in FIELD_TYPES.items() if kind in (str, str | None)]


def test_each_choice_of_a_field_is_read_from_yaml_and_words(tmp_path):
    path, kept, typed = tmp_path / "c.yaml", set(), set()
    for name, choice, written in CHOICES:
        case = f"{name}: {written}"
        for text in (f"{case}\n", f"train:\n  {case}\n"):
            path.write_text(text)
            config = Config.from_yaml(path)
            assert (getattr(config, name), config.given) == (choice, {name}), case
        is_first = (name, choice) not in kept
        if is_first:
            kept.add((name, choice))
            config.save_yaml(tmp_path / "saved.yaml")
            assert Config.from_yaml(tmp_path / "saved.yaml").to_dict() == config.to_dict(), case
        word, more = written.strip("\"'"), ["--base_dim", "64"] if choice == "mup" else []
        more += ["--phases", "[{steps: 4, batch_size: 2, seq_len: 9}]"] if name == "lr_scaling" else []
        more += ["--use_lora", "True", "--init_from", "base"] if name == "lora_targets" else []  # else it does nothing
        if word not in ("null", "~", ""):
            flag = f"--{name.replace('_', '-')}={word}"
            forms = [["--config", str(path), flag], [f"--{name}", word], [f"--{name}={word}"]]
            for words in forms[1:2] if name in typed else forms:
                _, config = parse_train(words + more)
                assert getattr(config, name) == choice, words
                assert name in config.given, words
            typed.add(name)


def test_the_choices_have_on_off_and_none():
    """So that the table above has them."""
    assert {choice for _, choice, _ in CHOICES} >= set(SWITCHES)
    assert {name for name, choice, _ in CHOICES if choice == "off"} == {"verify_data", "wandb", "sample"}


@pytest.mark.parametrize("word", ["no", "off", "On", "yes", "2024", "1.5", "2024-01-01", "007"])
def test_a_word_is_text_where_the_field_is_text(tmp_path, word):
    path, expected = tmp_path / "c.yaml", dict.fromkeys(TEXTS, word)
    for text in (yaml_of(word, "\n"), f"loop: {{{yaml_of(word, ', ')}}}\n"):
        path.write_text(text)
        config = Config.from_yaml(path)
        assert {name: getattr(config, name) for name in TEXTS} == expected
    config.save_yaml(tmp_path / "saved.yaml")
    again = Config.from_yaml(tmp_path / "saved.yaml")
    assert {name: getattr(again, name) for name in TEXTS} == expected


def yaml_of(word, between):
    """Every field of text with the word as its value, without quotes."""
    return between.join(f"{name}: {word}" for name in TEXTS)


def test_a_data_set_may_be_called_no(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "datasets: {no: norwegian, on: b}\nphases: [{steps: 1, batch_size: 8, seq_len: 9, weights: {no: 1}}]\n"
    )
    config = Config.from_yaml(path)
    assert config.datasets == {"no": "norwegian", "on": "b"}
    assert config.phases is not None
    assert config.phases[0]["weights"] == {"no": 1}
    _, config = parse_train(["--datasets", "{no: norwegian}"])
    assert config.datasets == {"no": "norwegian"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wandb: on", "wandb is True: it must be one of off, offline, online"),
        ("sample: maybe", "sample is 'maybe': it must be one of auto, on, off"),
        ("sample: 1", "sample is 1: it must be one of"),
        ("fsdp: 'off'", "fsdp is 'off': it must be True or False"),
        ("memory_checkpoint_every: off", "memory_checkpoint_every is False"),
        ("sample: 2024-13-45", "not valid YAML: month must be in 1..12"),
    ],
)
def test_a_word_that_is_no_choice_is_refused(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        Config.from_yaml(tmp_path / "c.yaml").validate()


def test_a_resumed_run_keeps_what_neither_words_nor_a_file_give(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    Config(dim=64, lr=1e-3, epochs=3, warmup_steps=7).save_yaml(run / "config.yaml", {"commit": "abc"})
    (tmp_path / "c.yaml").write_text("lr: 5e-4\n")
    words = ["--resume", "--run_dir", str(run), "--config", str(tmp_path / "c.yaml"), "--epochs=2"]
    _, config = parse_train(words)
    assert (config.dim, config.warmup_steps, config.lr, config.epochs) == (64, 7, 5e-4, 2)
    assert config.given == {"lr", "epochs"}


def test_words_are_fields_by_type():
    _, config = parse_train(["--weight_tying", "False", "--fsdp", "True", "--dropout-rate", "0.1", "--lr=3e-4"])
    assert (config.weight_tying, config.fsdp, config.dropout_rate, config.lr) == (False, True, 0.1, 3e-4)
    assert config.given == {"weight_tying", "fsdp", "dropout_rate", "lr"}


def test_numbers_as_people_write_them(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 5e-4\nepochs: 2\nbatch_size: 1e3\nseed: 0e0\n")
    config = Config.from_yaml(tmp_path / "c.yaml")
    config.validate()
    assert (config.lr, config.batch_size, config.seed) == (5e-4, 1000, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lern: 1", "there is no field 'lern'"),
        ("learning_rate: 1", "did you mean 'lr'"),
        ("absolute_pos: True", "did you mean 'pos_encoding'"),
        ("batchsize: 3", "did you mean 'batch_size'"),
        ("- a\n- b", "expected `field: value` lines, found a list"),
        ("a: [", "not valid YAML"),
        ("lr: 1e-3\ndim: 8\nlr: 2e-3", "line 3: 'lr' is given twice"),
        ("model: {dim: 8, dim: 16}", "'dim' is given twice"),
        ("dim: 8\nmodel: {dim: 16}", "'dim' is given twice, in sections or outside"),
        ("model: {dim: 8}\nloop: {dim: 16}", "'dim' is given twice"),
        ("model: {dims: 8}", "did you mean 'dim'"),
        ("modell: {dim: 8}", "there is no field 'modell'"),
        ("data_path: text.txt", "there is no field 'data_path': give data_path=PATH beside the config"),
        ("output_dir: out", "there is no field 'output_dir': give run_dir=FOLDER beside the config"),
        ("resume: true", "give resume=True beside the config"),
        ("training: {steps: 3}", "there is no section 'training': write its fields at the top, or in model, attention"),
        ('dim: "64"', "dim is '64': it must be a whole number: write 64 without quotes"),
        ("lr:", "lr has no value: it must be a number"),
        ("lr: yes", "lr is True: it must be a number: on, off, yes and no are True and False in YAML"),
        ("batch_size: 15e-1", "batch_size is '15e-1': it must be a whole number"),
        ("dim: !!python/name:os.system x", "remove the tag"),
        ("xyz: 1", "there is no field 'xyz': the help of `roxxel-dist train` lists the fields"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Config.from_yaml(tmp_path / "c.yaml")
    assert "c.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("seed: -1", [], "c.yaml: seed is -1"),
        ("optimizer: adam", [], "c.yaml: optimizer is 'adam'"),
        ("phases: [{steps: ten, batch_size: 4, seq_len: 9}]", [], "c.yaml: phase 1: steps is 'ten', and"),
        ("seed: 3", ["--seed", "-1"], "seed is -1"),
        ("seed: -1", ["--seed", "-2"], "seed is -2"),
    ],
)
def test_a_rule_that_is_broken_in_a_file_names_it(tmp_path, text, words, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        parse_config(ConfigArgs, ["--config", str(tmp_path / "c.yaml"), *words], "plan")
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read .No such file or directory.: check the path"):
        Config.from_yaml(tmp_path / "none.yaml")


@one_test(
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
        ({"n_devices": -1}, "n_devices is -1: it must be at least 0"),
        ({"use_moe": True, "top_k_mlp": 5}, "top_k_mlp is 5: a token cannot go through more experts than n_experts"),
        ({"pos_encoding": "alibi"}, "pos_encoding is 'alibi': it must be one of rotary, absolute, learned, none"),
        ({"sliding_window": True, "context_window": 0}, "context_window is 0: it must be at least 1"),
        ({"activation": "swish"}, "activation is 'swish': it must be one of silu, gelu"),
        ({"use_lora": True, "lora_rank": 0}, "lora_rank is 0: it must be at least 1"),
        ({"use_lora": True, "lora_alpha": 0}, "lora_alpha is 0: it must be above 0"),
        ({"use_lora": True, "lora_dropout": 1}, "lora_dropout is 1: it must be at least 0 and below 1"),
        ({"use_lora": True, "lora_targets": "heads"}, "lora_targets is 'heads': it must be one of attention, mlp, all"),
        (
            {"use_lora": True, "lora_targets": "mlp", "use_moe": True, "lora_dropout": 0.1},
            r"lora_dropout is 0.1: adapters of experts \(use_moe, lora_targets mlp\) have none",
        ),
        (
            {"use_lora": True, "mla": True, "inference": True, "lora_dropout": 0.1, "dim": 64, "n_heads": 2},
            "lora_dropout is 0.1 with mla and inference: .* set inference to False to train",
        ),
        ({"dim": 1 << 40}, "dim is 1099511627776: it must be at most 1,048,576"),
        ({"n_experts": "four"}, "n_experts is 'four': it must be a whole number"),
    ],
)
def test_errors_name_the_field_the_value_and_the_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields).validate()


def test_every_field_has_a_home_and_a_docstring():
    for part in COMPONENTS:
        assert set(field_docs(part)) == {field.name for field in fields(part)}, part
    assert set(FIELD_TYPES) == set(Config().to_dict())
    assert "global" in field_docs(ExperimentConfig)["phases"]


def test_sections_are_flattened(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {dim: 64, dropout_rate: 0.1}\noptimizer: {optimizer: lion, lr: 5e-4}\nmla: {mla: false, rope_dim: 16}\n"
        "lora: {lora_rank: 4}\nmoe:\n  n_experts: 8\nloop: {phases: [{steps: 3, batch_size: 2, seq_len: 17}]}\n"
        "seed: 7\n"
    )
    config = Config.from_yaml(path)
    config.validate()
    found = (config.dim, config.optimizer, config.lr, config.rope_dim, config.lora_rank, config.n_experts, config.seed)
    assert found == (64, "lion", 5e-4, 16, 4, 8, 7)
    assert config.phases == [{"steps": 3, "batch_size": 2, "seq_len": 17}]
    config.save_yaml(tmp_path / "flat.yaml")
    assert Config.from_yaml(tmp_path / "flat.yaml").to_dict() == config.to_dict()


SEEDS = """
    epochs optimizer tokenizer_type max_context weight_tying dropout_rate lr batch_size grad_accum warmup_steps dim
    num_blocks kv_heads use_moe n_experts top_k_mlp expansion alpha_balance sliding_window context_window no_sink
    pos_encoding n_heads head_size vocab_size use_swiglu activation norm_type rope_scale_factor mla down_dim_q
    down_dim_kv rope_dim inference gradient_checkpointing use_bf16 grad_clip patience eval_iters lr_schedule use_lora
    lora_rank lora_alpha lora_dropout lora_targets n_devices wandb_project
"""


def test_the_fields_of_the_seeds_are_known_and_their_defaults_can_be_used():
    assert set(SEEDS.split()) <= set(FIELD_TYPES)
    config = Config()
    config.validate()
    lora = (config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_targets)
    assert (*lora, config.grad_clip, config.n_devices, config.patience) == (8, 16.0, 0.0, "attention", 1.0, 0, 0)
    assert (config.use_lora, config.use_moe, config.n_heads, config.head_size) == (False, False, None, None)


def test_numbers_of_what_is_off_are_accepted():
    Config(n_experts=16, top_k_mlp=1, alpha_balance=0.1, context_window=32, lora_rank=4, down_dim_q=8).validate()


def test_a_true_or_false_field_needs_no_value():
    _, config = parse_train(["--fsdp", "--bf16_compute", "False", "--no_sink", "--lr", "3e-4"])
    assert (config.fsdp, config.bf16_compute, config.no_sink, config.lr) == (True, False, True, 3e-4)
    assert config.given == {"fsdp", "bf16_compute", "no_sink", "lr"}


@pytest.mark.parametrize("written", [{}, {"format": 0}, {"format": 2}])
def test_the_config_of_a_run_of_another_format_is_refused(tmp_path, written):
    Config().save_yaml(tmp_path / "config.yaml", {"seed": 1})
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["record"] == {"format": 1, "seed": 1}
    Config.from_yaml(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**saved, "record": {"seed": 1, **written}}))
    with pytest.raises(FormatError, match=r"config\.yaml: (no )?format.*, and this version reads format 1: it was"):
        Config.from_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize("start", [b"", b"\xe2\x82"])
def test_a_file_that_is_no_config_is_not_read_whole(tmp_path, start):
    with (tmp_path / "data.bin").open("wb") as file:
        file.write(start)
        file.truncate(1 << 27)
    with pytest.raises(ValueError, match=r"data.bin: has more than 64 MiB, which no config has: check the path"):
        Config.from_yaml(tmp_path / "data.bin")
