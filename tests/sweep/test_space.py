"""Sweeps from files: W&B's YAML as it is, the rules of a second file, and errors that name file, line and key."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.sweep.space.sweep_file import InfeasibleError, read_sweep, sweep_of

SEED = """\
program: train_sweep.py
method: bayes
metric:
  name: val_loss
  goal: minimize
parameters:
  n_heads:
    values: [12, 16, 20, 24]
  optimizer:
    values: ["adamw", "adafactor", "lion"]
  use_moe:
    values: [true, false]
  dropout_rate:
    values: [0.0, 0.1, 0.15]
  lr:
    distribution: log_uniform_values
    min: 0.0001
    max: 0.005
  dim:
    value: 256
command:
  - ${env}
  - ${program}
  - ${args}
"""


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str, name: str = "sweep.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_a_sweep_of_wandb_is_read_as_it_is(file: Any) -> None:
    sweep = read_sweep(file(SEED))
    assert (sweep.method, sweep.metric, sweep.goal, sweep.sign) == ("bayes", "val_loss", "minimize", 1)
    assert (sweep.program, sweep.command) == ("train_sweep.py", ("${env}", "${program}", "${args}"))
    names = ["n_heads", "optimizer", "use_moe", "dropout_rate", "lr", "dim"]
    assert [one.name for one in sweep.space.parameters] == names
    assert [one.name for one in sweep.space.free] == names[:-1]
    assert sweep.space.size is None
    low, high = sweep.space.point([0.0] * 5), sweep.space.point([1.0] * 5)
    first = {"n_heads": 12, "optimizer": "adamw", "use_moe": True, "dropout_rate": 0.0, "lr": 0.0001, "dim": 256}
    last = {"n_heads": 24, "optimizer": "lion", "use_moe": False, "dropout_rate": 0.15, "lr": 0.005, "dim": 256}
    assert (low, high) == (first, last)
    assert math.isclose(sweep.space.point([0, 0, 0, 0, 0.5])["lr"], math.sqrt(0.0001 * 0.005))


def test_a_dictionary_is_a_sweep_too() -> None:
    sweep = sweep_of({"parameters": {"lr": {"min": 0.0, "max": 1.0}}, "metric": {"name": "acc", "goal": "maximize"}})
    assert (sweep.method, sweep.metric, sweep.sign) == ("bayes", "acc", -1)


def test_nested_parameters_stay_nested() -> None:
    inner = {"lr": {"values": [1, 2]}, "decay": {"value": 0}}
    sweep = sweep_of({"parameters": {"optimizer": {"parameters": inner}, "dim": {"values": [8, 16]}}})
    assert [one.name for one in sweep.space.parameters] == ["optimizer.lr", "optimizer.decay", "dim"]
    assert sweep.space.point([0.9, 0.1]) == {"optimizer": {"lr": 2, "decay": 0}, "dim": 8}


def test_a_grid_has_every_point_once_in_the_order_of_wandb() -> None:
    parameters = {"c": {"min": 0, "max": 2}, "b": {"value": "x"}, "a": {"values": [2, 1]}}
    space = sweep_of({"parameters": parameters}).space
    points = [space.point(u) for u in space.grid()]
    assert space.size == len(points) == 6
    assert points == [{"c": number, "b": "x", "a": first} for first in (2, 1) for number in range(3)]
    endless = sweep_of({"parameters": {"a": {"min": 0.0, "max": 1.0}}})
    with pytest.raises(ValueError, match=re.escape("parameters.a: a grid needs values")):
        next(endless.space.grid())


EXTRAS = """\
derived:
  head_size: dim // n_heads
constraints:
  - dim % n_heads == 0
  - head_size >= 8
when:
  optimizer: use_moe
resources: {CPU: 2}
"""


def test_rules_of_a_second_file(file: Any) -> None:
    rules = read_sweep(file(SEED), file(EXTRAS, "extras.yaml")).rules
    assert rules.resources == {"CPU": 2}
    given = {"dim": 256, "n_heads": 16, "use_moe": False, "optimizer": "lion"}
    assert rules.resolve(given) == {"dim": 256, "n_heads": 16, "use_moe": False, "head_size": 16}
    assert rules.resolve({**given, "use_moe": True})["optimizer"] == "lion"
    with pytest.raises(InfeasibleError, match=re.escape("'dim % n_heads == 0' does not hold for dim 256, n_heads 12")):
        rules.resolve({**given, "n_heads": 12})
    with pytest.raises(InfeasibleError, match="head_size 4"):
        rules.resolve({**given, "n_heads": 64})


def test_what_asks_for_a_parameter_that_is_left_out_is_left_out_with_it() -> None:
    parameters = {"use_moe": {"values": [True, False]}, "top_k": {"values": [1, 2]}, "expert_dim": {"values": [8, 16]}}
    extras = {
        "when": {"expert_dim": "top_k > 1", "top_k": "use_moe"},  # a condition on one that has a condition
        "derived": {
            "width": "size * 8",
            "size": "top_k if use_moe else 1",
            "active": "top_k * 2",
            "both": "active + 1",
        },
        "constraints": ["top_k * 8 < 16 or use_moe", "expert_dim > 8"],
    }
    rules = sweep_of({"parameters": parameters}, extras).rules
    assert rules.resolve({"use_moe": False, "top_k": 2, "expert_dim": 8}) == {"use_moe": False, "size": 1, "width": 8}
    whole = rules.resolve({"use_moe": True, "top_k": 2, "expert_dim": 16})
    assert whole == {
        "use_moe": True, "top_k": 2, "expert_dim": 16, "size": 2, "width": 16, "active": 4, "both": 5,
    }  # fmt: skip
    with pytest.raises(InfeasibleError, match="expert_dim > 8"):
        rules.resolve({"use_moe": True, "top_k": 2, "expert_dim": 8})


def test_a_formula_that_cannot_be_worked_out_makes_a_point_infeasible() -> None:
    rules = sweep_of(
        {"parameters": {"heads": {"min": 0, "max": 4}, "use": {"values": [1, 2]}}},
        {"when": {"use": "4 / heads > 1"}},
    ).rules
    with pytest.raises(InfeasibleError, match="cannot be worked out for heads 0"):
        rules.resolve({"heads": 0, "use": 1})


@one_test(
    ("old", "new", "said"),
    [
        ("method: bayes", "method: bays", "sweep.yaml, line 2: method: 'bays' is not a method: did you mean 'bayes'?"),
        ("goal: minimize", "goal: min", "sweep.yaml, line 5: metric.goal: 'min' is not a goal"),
        ("  name: val_loss", "  nam: val_loss", "line 3: metric: must have a `name`"),
        ("parameters:", "parameter:", "line 6: parameter: there is no such key: did you mean 'parameters'?"),
        ("min: 0.0001", "min: 0", "line 15: parameters.lr: min: 0 must be more than 0"),
        ("    value: 256", "    vale: 256", "line 19: parameters.dim: there is no key 'vale'"),
        ("command:", "run_cap: 0\ncommand:", "run_cap: 0 must be 1 or more"),
        ("command:", "early_terminate: {type: median}\ncommand:", "type 'median' does not exist"),
        ("command:", "early_terminate: {type: hyperband}\ncommand:", "needs `min_iter`"),
        ("command:", "early_terminate: {type: hyperband, min_itr: 3}\ncommand:", "did you mean 'min_iter'?"),
        ("  dim:\n    value: 256", "  dim: 256", "for one value write `dim: {value: 256}`"),
        ("  dim:\n    value: 256", "  dim: [64, 256]", "for a choice write `dim: {values: [64, 256]}`"),
        (
            "command:",
            "early_terminate: {type: hyperband, min_iter: 0}\ncommand:",
            "min_iter: 0 must be a number above 0",
        ),
        ("command:", "early_terminate: {type: hyperband, min_iter: x}\ncommand:", "min_iter: 'x' must be a number"),
        ("  dim:\n", "  1:\n", "the name of a parameter is read as 1, which is no text: write it in quotes"),
        ("  dim:\n", "  ~:\n", "the name of a parameter is read as None"),
        ("  dim:\n", "  '':\n", "the name of a parameter is empty"),
        ("program: train_sweep.py", "program: 5", "sweep.yaml, line 1: program: 5 must be a text"),
        (
            "command:\n  - ${env}\n  - ${program}\n  - ${args}",
            "command: python",
            "line 21: command: 'python' must be a list",
        ),
        ("metric:", "metric: [", "not valid YAML"),
    ],
)
def test_errors_name_file_line_and_key(old: str, new: str, said: str, file: Any) -> None:
    assert SEED.count(old) == 1
    with pytest.raises(ValueError, match=re.escape(said)):
        read_sweep(file(SEED.replace(old, new)))


@one_test(
    ("text", "said"),
    [
        ("when: {dimm: use_moe}", "extras.yaml, line 1: when.dimm: there is no such parameter: did you mean 'dim'?"),
        (
            "derived:\n  x: dimm // 2",
            "line 2: derived.x: 'dimm // 2': there is no parameter 'dimm': did you mean 'dim'?",
        ),
        ("constraints: [num_blocks < 3]", "line 1: constraints: 'num_blocks < 3': there is no parameter 'num_blocks'"),
        ("constraints: dim < 3", "constraints: 'dim < 3' must be a list of formulas"),
        ("derived: [a]", "derived: ['a'] must be a mapping"),
        ("derived: {a: b, b: a + dim}", "derived: each of these formulas needs the other: "),
        ("resources: {GPU: one}", "resources.GPU: 'one' must be a number, 0 or more"),
    ],
)
def test_slips_in_the_second_file(text: str, said: str, file: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_sweep(file(SEED), file(text, "extras.yaml"))


def test_errors_in_the_second_file(file: Any, tmp_path: Path) -> None:
    path = file(SEED)
    with pytest.raises(ValueError, match=re.escape("extras.yaml, line 2: derived.x: ")):
        read_sweep(path, file("derived:\n  x: dim.real\n", "extras.yaml"))
    with pytest.raises(ValueError, match=re.escape("did you mean 'constraints'?")):
        read_sweep(path, file("constrains: []\n", "extras.yaml"))
    with pytest.raises(ValueError, match=re.escape("none.yaml: cannot be read (No such file or directory)")):
        read_sweep(tmp_path / "none.yaml")
