"""Values that no trial can run with, and metrics that do not compare trials: refused with their lines."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from reader import ROOT
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep import make, replay
from roxxel_dist.sweep.space.distributions import distribution

Dry = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dry:
    """The dry run of a sweep with these lines: (exit code, what it printed, what it said)."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words\n" * 1000)

    def run(text: str, *words: str, extras: str = "") -> tuple[int, str, str]:
        Path("s.yaml").write_text(text)
        Path("extras.yaml").write_text(extras)
        given = ["--extras", "extras.yaml"] if extras else []
        code = main(["sweep", "--sweep_config", "s.yaml", "--data_path", "text.txt", "--dry_run", *given, *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


WRONG = {
    "norm_type: {values: [rmsnorm, layernrm]}": "s: norm_type is 'layernrm': it must be one of rmsnorm, layernorm",
    "model: {parameters: {norm_type: {values: [rmsnorm, layernrm]}}}": "'layernrm': it must be one of rmsnorm",
    "warmup_steps: {min: 0.0, max: 4.0}": "must be a whole number or nothing: write min and max without a point",
    "warmup_steps: {distribution: normal, mu: 4}": "use int_uniform, or a q_ one with q: 1",
    "dropout_rate: {values: [0.0, 0.1, 1.0]}": ".values: dropout_rate is 1.0: it must be at least 0 and below 1",
    "dropout_rate: {min: 0.0, max: 1.5}": "dropout_rate is 1.47: it must be",
    "lr: {values: [.inf, 0.1]}": ".values: lr is inf: it must be above 0, and finite",
    "lr: {values: ['fast', 0.1]}": "lr is 'fast': it must be a number",
    "lr: {value: .nan}": ": nan cannot be a value",
    "seed: {values: [1, 4294967296]}": "seed is 4294967296: it must be at least 0 and below 2^31",
    "use_moe: {values: [true, 'maybe']}": "use_moe is 'maybe': it must be True or False",
    "eval_every: {min: 1, max: 100}\n  virtual_shards: {values: [4, 3]}": "virtual_shards is 3: it must be",
    "patience: {value: null}": "patience is None: it must be a whole number",
    "activation: {values: [silu, sillu]}": "activation is 'sillu'",
    "betas: {values: [1, 2]}": "s.yaml, line 3: parameters.betas: there is no field 'betas'",
    "phases.0.steps: {values: [1, 2]}": "'phases.0.steps': it would be a part of 'phases', which is given whole",
}


@one_test("text", WRONG)
def test_a_value_that_no_trial_can_run_with(dry: Dry, text: str) -> None:
    code, _, said = dry(f"method: random\nparameters:\n  {text}\n", "--count", "2")
    assert code == 2
    assert WRONG[text] in said
    if "betas" not in text:
        line = 3 + text.count("\n")
        assert f"s.yaml, line {line}: parameters." in said


def test_a_grid_without_end_of_a_value_that_cannot_run_is_found_at_once(dry: Dry) -> None:
    wide = "seed: {min: 0, max: 2000000000}\n  eval_every: {min: 1, max: 1000000}\n  norm_type: {values: [x, rmsnorm]}"
    code, _, said = dry(f"method: grid\nparameters:\n  {wide}\n")
    assert (code, "line 5: parameters.norm_type.values: norm_type is 'x'" in said) == (2, True)


RIGHT = {
    "dim: {values: [48, 64]}\n  kv_heads: {values: [1, 3, 4]}": "",  # 3 goes with 48 alone
    "n_experts: {values: [2, 4]}\n  top_k_mlp: {values: [1, 4]}\n  use_moe: {value: true}": "",
    "dim: {values: [15, 16, 32]}\n  n_heads: {value: 4}": "",  # another parameter is to blame
    "lr: {values: [1e-3, '1e-4']}": "",
    "warmup_steps: {values: [null, 4]}": "",
    "lr: {min: 0.0, max: 0.1}": "",  # an end need not be drawn
    "context_window: {value: 8}\n  sliding_window: {values: [true, false]}": "when: {context_window: sliding_window}",
}


@one_test("text", RIGHT)
def test_what_some_trials_can_run_with_is_left_to_the_search(dry: Dry, text: str) -> None:
    code, _, said = dry(f"method: random\nparameters:\n  {text}\n", "--count", "2", extras=RIGHT[text])
    assert code == 0, said


PER_TOKEN = [
    ("metric: {name: val_loss}", "tokenizer_type: {values: [char, bpe]}", "name: val_bpb, goal"),
    ("", "tokenizer_type: {values: [char, bpe]}", "name: val_bpb, goal"),
    ("metric: {name: train_loss}", "vocab_size: {values: [300, 400]}", "name: val_bpb, goal"),
    ("metric: {name: val_loss}", "vocab_size: {min: 300, max: 400}", "name: val_bpb, goal"),
    ("metric: {name: val_loss}", "data: {parameters: {tokenizer_type: {values: [char, bpe]}}}", "name: val_bpb, goal"),
]


@pytest.mark.parametrize(("metric", "text", "fix"), PER_TOKEN)
def test_a_metric_per_token_does_not_rank_tokenizers(dry: Dry, metric: str, text: str, fix: str) -> None:
    code, _, said = dry(f"method: random\n{metric}\nparameters:\n  {text}\n", "--count", "1")
    assert code == 2
    assert "is per token, and" in said
    assert fix in said
    assert ("s.yaml, line 2: metric.name" in said) == bool(metric)
    code, _, said = dry(f"method: random\nmetric: {{name: val_bpb}}\nparameters:\n  {text}\n", "--count", "1")
    assert code == 0, said


def test_where_the_tokens_stay_the_same_it_does(dry: Dry) -> None:
    for text in ("tokenizer_type: {value: char}", "tokenizer_type: {values: [char]}\n  lr: {values: [0.1, 0.2]}"):
        assert dry(f"method: random\nparameters:\n  {text}\n", "--count", "1")[0] == 0
    derived = 'derived: {tokenizer_type: \'"char" if dim > 32 else "byte"\'}'
    code, _, said = dry("parameters: {dim: {values: [32, 64]}}\n", "--count", "1", extras=derived)
    assert (code, "tokenizer_type changes what a token is" in said) == (2, True)


def test_a_metric_on_other_text_in_each_trial(dry: Dry) -> None:
    code, _, said = dry("metric: {name: val_bpb}\nparameters: {val_fraction: {min: 0.1, max: 0.2}}\n", "--count", "1")
    assert (code, "val_bpb is measured on other text in each trial, because val_fraction changes it" in said) == (
        2,
        True,
    )


def test_an_own_loss_may_have_no_bits_per_byte(dry: Dry) -> None:
    Path("own.py").write_text("def loss(logits, targets):\n    return 0.0\n")
    text = "parameters: {tokenizer_type: {values: [char, bpe]}, loss: {value: 'own:loss'}}\n"
    code, out, said = dry(text, "--count", "1")
    assert code == 0, said
    assert "tokenizer_type changes what a token is: trials with other tokens cannot be compared by it" in out


SHORT = ["--max_steps", "600", "--eval_every", "100"]


@one_test(
    ("text", "words", "said"),
    [
        (
            "early_terminate: {type: hyperband, min_iter: 300}",
            SHORT,
            "a trial has 6",
        ),
        (
            "early_terminate: {type: asha, min_iter: 7}",
            SHORT,
            "from validation 7 on",
        ),
        ("early_terminate: {type: hyperband, min_iter: 10000000000}", SHORT, "validation 1,000,000,000 or later on"),
        ("early_terminate: {type: hyperband, max_iter: 1.0e300, s: 1000000000}", SHORT, "1,000,000,000 or later on"),
        ("early_terminate: {type: hyperband, min_iter: 6}", SHORT, "from validation 6 on, and a trial has 6"),
        ("early_terminate: {type: hyperband, min_iter: 5}", SHORT, None),
        ("early_terminate: {type: hyperband, min_iter: 300}", [], None),
        ("metric: {name: val_loss, goal: maximize}", [], "the worst model wins: write goal: minimize"),
        ("metric: {name: tokens_per_s, goal: maximize}", [], None),
    ],
)
def test_what_cannot_be_meant_is_said(dry: Dry, text: str, words: list[str], said: str | None) -> None:
    code, out, err = dry(f"{text}\nparameters: {{dim: {{values: [32, 64]}}}}\n", "--count", "1", *words)
    assert code == 0, err
    if said is None:
        assert "early_terminate ends" not in out
        assert "wins" not in out
    else:
        assert said in out


def test_a_command_that_names_no_program(dry: Dry) -> None:
    code, _, said = dry('program: p.py\ncommand: ["${args_no_boolean_flags}"]\nparameters: {x: {values: [1, 2]}}\n')
    assert code == 2
    assert "command: its first word is ${args_no_boolean_flags}, a parameter, and no program: begin with" in said
    text = (
        'program: p.py\ncommand: [python, other.py, "${args}"]\nmetric: {name: m}\nparameters: {x: {values: [1, 2]}}\n'
    )
    code, out, said = dry(text, "--count", "1")
    assert code == 0, said
    assert "program: p.py is not used, because no word of `command` is ${program}" in out


@pytest.mark.parametrize("name", ["sweeps/sweep.yaml", "sweeps/demo.yaml", "configs/sweep.yaml"])
def test_shipped_searches_rank_by_what_compares(dry: Dry, name: str) -> None:
    text = (ROOT / name).read_text()
    tokens = {"tokenizer_type", "vocab_size"} & {
        key for key, spec in yaml.safe_load(text)["parameters"].items() if not distribution(spec).is_constant
    }
    assert (yaml.safe_load(text)["metric"]["name"] == "val_bpb") == bool(tokens)
    code, _, said = dry(text, "--count", "2")
    assert code == 0, said
    code, _, said = dry(re.sub("name: val_bpb", "name: val_loss", text), "--count", "2")
    assert code == (2 if tokens else 0), said


def test_a_search_of_python_too() -> None:
    tokenizers = {"tokenizer_type": {"values": ["char", "bpe"]}, "dim": {"values": [32, 64]}}
    named = {"metric": {"name": "val_loss"}, "parameters": tokenizers}
    for search in (make, lambda sweep: replay(sweep, lambda params: [1.0], seed=1, budget_steps=5)):
        with pytest.raises(UserError, match=r"metric\.name: val_loss is per token, and tokenizer_type changes what"):
            search(named)
    make({**named, "metric": {"name": "val_bpb"}})
    make({**named, "program": "own.py"})  # it may mean anything by the name
    make({"parameters": tokenizers})  # it may tell anything
