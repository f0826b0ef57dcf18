"""The value of a parameter is what the file says: in the journal, in the words and the W&B config of a program, in
reports; what cannot be kept is refused with file, line and key."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tables import one_test

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.report.text import as_json, table, varied_parameters
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.space.distributions import distribution
from roxxel_dist.sweep.space.sweep_file import read_sweep, sweep_of
from roxxel_dist.sweep.space.values import as_text, from_json, to_json
from roxxel_dist.sweep.study.folder import Study, StudyDir
from roxxel_dist.sweep.study.journal import Journal, read_history
from roxxel_dist.sweep.trial.process import TrialTask
from roxxel_dist.sweep.trial.program import PARAMETERS, prepare
from roxxel_dist.utils.display import plain
from roxxel_dist.view.web.sections import _params

STUDY = {"event": "study", "metric": "loss", "goal": "minimize", "method": "grid", "seed": 0, "driver": {}}
KEPT: dict[str, Any] = {
    ".inf": math.inf, "-.inf": -math.inf, "-0.0": -0.0, "0.0": 0.0, "1.0e-310": 1e-310,
    "1.7976931348623157e308": 1.7976931348623157e308, "0.30000000000000004": 0.30000000000000004, "1e-3": 0.001,
    "'1e-3'": "1e-3", "'null'": "null", "null": None, "~": None, "'true'": "true", "true": True, "1": 1, "1.0": 1.0,
    "'1'": "1", "9007199254740993": 2**53 + 1, "9223372036854775808": 2**63, f"{10**400}": 10**400, "0x10": 16,
    "1_000": 1000, "[1, .inf, [null]]": [1, math.inf, [None]], "{a: {b: -.inf}}": {"a": {"b": -math.inf}}, "''": "",
    "'ünï x=y'": "ünï x=y", "[]": [], "{}": {}, "'2024-01-01'": "2024-01-01", "'010'": "010", "{no: 1, 1e5: 2}":
    {"no": 1, "1e5": 2},
}  # fmt: skip
"""As YAML has them, and what they are."""
REFUSED = {
    "2024-01-01": "2024-01-01 is a date: write it in quotes",
    "2001-12-14t21:59:43.10-05:00": "is a date",
    "!!binary aGk=": "b'hi' is bytes",
    "!!set {a}": "{'a'} is a set: write a list",
    "!!omap [a: 1]": "is a tuple: write a list",
    "{1: 2}": "the key 1 of {1: 2} is no text: write it in quotes",
    "{2024-01-01: 2}": "is no text",
    "[a, {b: 2024-01-01}]": "2024-01-01 is a date",
    "010": "in YAML 010 is 8, for it begins with 0 (octal): write the number, or quotes around it",
    "-017": "is 15, for it begins with 0",
    "1:30": "in YAML 1:30 is a number in units of 60",
    "1:30.5": "in units of 60",
    "1e999": "1e999 is inf as a float",
    "-1.0e+999": "is -inf as a float",
    "1e-999": "1e-999 is 0 as a float",
    '"a\\0b"': "has a null character",
    '"\\ud800"': "half of a surrogate pair",
    "&a [*a]": "lists and mappings in each other",
    "{$float: inf}": "$float",
    ".nan": "nan cannot be a value, because W&B's client makes null of it: write null, or a text",
    "[1, {a: .NaN}]": "nan cannot be a value",
}


def exact(value: Any) -> str:
    return f"{type(value).__name__} {as_text(value)}"


def read_one(folder: Path, text: str, key: str = "values") -> Any:
    value = f"[{text}]" if key == "values" else text
    (folder / "s.yaml").write_text(f"method: grid\nprogram: p.py\nparameters:\n  x:\n    {key}: {value}\n")
    return read_sweep(folder / "s.yaml").space.parameters[0].distribution.choices


@pytest.mark.parametrize("text", KEPT)
def test_a_value_goes_its_whole_way(tmp_path: Path, text: str) -> None:
    wanted, (value,) = exact(KEPT[text]), read_one(tmp_path, text)
    assert exact(value) == wanted
    assert exact(read_one(tmp_path, text, "value")[0]) == wanted
    with Journal(tmp_path / "study", print) as journal:
        journal.append(STUDY, {"event": "ask", "trial": 0, "params": {"x": value}, "point": [0.5]})
        assert exact(journal.history.trials[0].params["x"]) == wanted
        journal.append(
            {
                "event": "result",
                "trial": 0,
                "params": {"x": value},
                "value": 1.0,
                "seconds": 1,
                "stopped": None,
                "more": {},
            }
        )
    lines = (tmp_path / "study" / "journal.jsonl").read_text().splitlines()
    [json.loads(line, parse_constant=pytest.fail) for line in lines]  # as every reader of JSON takes them
    history = read_history(tmp_path / "study")
    assert exact(history.trials[0].params["x"]) == wanted
    sweep = sweep_of({"program": "p.py", "parameters": {"x": {"values": [value]}}})
    study = Study(path=tmp_path, sweep=sweep, history=history)
    printed = json.dumps(plain(as_json(study)), allow_nan=False)
    assert exact(from_json(json.loads(printed)["trials"][0]["params"]["x"])) == wanted
    assert "trial 0" in table(study)
    json.dumps(plain(_params(history.trials[0])), allow_nan=False)
    task = TrialTask(
        trial=0, params={"x": value}, attempt=0, run_dir=str(tmp_path / "run"), log=str(tmp_path / "0.log"),
        metric="loss", goal="minimize", config={}, data_path=None, program=["p", "${args}", "${args_json}"],
        max_time_s=None,
    )  # fmt: skip
    words, _ = prepare(task, tmp_path / "run")
    assert words[1] == f"--x={value}"
    assert exact(json.loads(words[2])["x"]) == wanted
    for_client = yaml.safe_load((tmp_path / "run" / PARAMETERS).read_text())
    assert exact(for_client["x"]["value"]) == wanted


def test_what_cannot_be_kept_is_refused_with_its_line(tmp_path: Path) -> None:
    for text, said in REFUSED.items():
        with pytest.raises(UserError, match=re.escape(said)) as caught:
            read_one(tmp_path, text)
        assert str(caught.value).startswith(f"{tmp_path}/s.yaml, line 5: parameters.x.values: "), text
        with pytest.raises(UserError, match=re.escape(said)):
            read_one(tmp_path, text, "value")


def test_the_line_is_that_of_the_item(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("parameters:\n  x:\n    values:\n      - 1\n      - 2024-01-01\n")
    with pytest.raises(UserError, match=r"line 5: parameters\.x\.values: 2024-01-01 is a date"):
        read_sweep(tmp_path / "s.yaml")


def test_values_of_python_too() -> None:
    x = {"values": [np.float32(0.5), np.int64(3), np.bool_(True)]}
    values = make({"method": "grid", "parameters": {"x": x}}).ask()[1]["x"]
    assert type(values) is float
    for value in ((1, 2), {1}, b"a", object(), {1: 2}):
        with pytest.raises(UserError, match=r"parameters\.x"):
            sweep_of({"parameters": {"x": {"values": [value, 1]}}})


def test_equal_numbers_of_other_types_are_other_configurations() -> None:
    values = [1, 1.0, True, "1", 0, 0.0, -0.0, False, None, math.inf, -math.inf, [1], [1.0], {"a": 1}, {"a": True}]
    search = make({"method": "grid", "parameters": {"x": {"values": [*values, *values]}}})
    found = [search.ask()[1]["x"] for _ in values]
    assert [exact(value) for value in found] == [exact(value) for value in values]
    with pytest.raises(Exception, match="all 15 configurations were run"):
        search.ask()


def test_a_study_whose_values_are_others_is_another_one(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    study = StudyDir(tmp_path / "study")
    for begun, now in (("1", "1.0"), ("1", "true"), ("0.0", "-0.0"), (".nan", ".inf")):
        file.write_text(f"parameters: {{x: {{values: [{begun}, 5]}}}}\n")
        study.path.mkdir(exist_ok=True)
        (study.path / "sweep.yaml").write_bytes(file.read_bytes())
        study._compare("--sweep_config", str(file), study.path / "sweep.yaml")
        file.write_text(f"parameters: {{x: {{values: [{now}, 5]}}}}\n")
        with pytest.raises(UserError, match="differs from the file"):
            study._compare("--sweep_config", str(file), study.path / "sweep.yaml")
    file.write_text("# no key\n")
    with pytest.raises(UserError, match=r"--sweep_config .*s\.yaml is empty, and .*study has its own: leave"):
        study._compare("--sweep_config", str(file), study.path / "sweep.yaml")
    with pytest.raises(UserError, match=r"s\.yaml is empty"):
        read_sweep(file)


def test_a_report_shows_a_parameter_that_differs_by_its_type_alone(tmp_path: Path) -> None:
    with Journal(tmp_path, print) as journal:
        journal.append(STUDY)
        for number, value in enumerate((1, True)):
            journal.append({"event": "ask", "trial": number, "params": {"x": value, "y": math.nan}, "point": []})
    sweep = sweep_of({"parameters": {"z": {"values": [1, 2]}}})
    assert "x" in varied_parameters(Study(path=tmp_path, sweep=sweep, history=read_history(tmp_path)))
    assert "y" not in varied_parameters(Study(path=tmp_path, sweep=sweep, history=read_history(tmp_path)))


def test_two_parameters_of_one_name() -> None:
    nested = {"parameters": {"b": {"values": [1, 2]}}}
    with pytest.raises(UserError, match=re.escape("there are two parameters a.b: rename one of them")):
        sweep_of({"parameters": {"a.b": {"values": [1, 2]}, "a": nested}})


def test_json_gives_back_what_it_got() -> None:
    value = {"a": [math.inf, -math.inf, 0.0, "inf", None, True, 2**64], "b": {"c": [[]]}}
    assert from_json(json.loads(json.dumps(to_json(value), allow_nan=False))) == value


@pytest.mark.parametrize("low", [0, -(2**63), 2**53, 10**400])
def test_large_integers_are_drawn_as_integers(low: int) -> None:
    for count in (2**53 + 1, 2**54 + 12345, 2**63, 3**200):
        kind = distribution({"min": low, "max": low + count - 1})
        found = [kind.quantile(u) for u in np.random.default_rng(0).random(600).tolist()]
        assert all(type(value) is int and low <= value < low + count for value in found)
        assert (kind.quantile(0.0), kind.quantile(1.0)) == (low, low + count - 1)
        assert sorted(found) == [kind.quantile(u) for u in sorted(np.random.default_rng(0).random(600).tolist())]
        assert 200 < sum(value % 2 for value in found) < 400  # a float would leave even numbers alone
    assert (
        len(
            {
                make({"parameters": {"x": {"min": low, "max": low + 2**70}}}, seed, "random").ask()[1]["x"]
                for seed in range(50)
            }
        )
        == 50
    )


@pytest.mark.parametrize(
    ("q", "low", "high"), [(0.1, 0, 1), (0.01, 0, 1), (0.7, 0, 70), (1e-5, 0, 0.01), (2.5, -10, 10)]
)
def test_steps_are_written_as_people_do(q: float, low: float, high: float) -> None:
    kind = distribution({"distribution": "q_uniform", "min": low, "max": high, "q": q})
    digits = len(repr(float(f"{q:g}"))) + 4
    for u in np.linspace(0, 1, 1001):
        value = kind.quantile(float(u))
        assert float(f"{value:.10g}") == value, (value, digits)
    points = [kind.quantile(kind.grid_point(number)) for number in range(kind.count or 0)]
    assert len(set(points)) == len(points) == kind.count


@one_test(
    "spec",
    [
        {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-5},
        {"distribution": "log_uniform_values", "min": 1e-320, "max": 3e-310},
        {"distribution": "inv_log_uniform_values", "min": 0.1, "max": 0.3},
        {"min": 0.1, "max": 0.1},
        {"min": -1.7e308, "max": 1.7e308},
        {"min": 1e16, "max": 1.0000000000000002e16},
    ],
)
def test_no_value_is_outside_of_its_bounds(spec: dict[str, Any]) -> None:
    kind = distribution(spec)
    found = [kind.quantile(float(u)) for u in np.linspace(0, 1, 2001)]
    assert found == sorted(found)
    assert spec["min"] == found[0] <= found[-1] == spec["max"]


@one_test(
    ("spec", "said"),
    [
        ({"distribution": "log_uniform", "min": 0.0001, "max": 1000}, "e^1000 is no float: for values use log"),
        ({"distribution": "inv_log_uniform", "min": 1, "max": 800}, "for values use inv_log_uniform_values"),
        ({"distribution": "q_log_uniform", "min": 1, "max": 800}, "for values use q_log_uniform_values"),
        ({"distribution": "log_uniform", "min": -1000, "max": 0}, "e^-1000 is no float"),
        ({"distribution": "log_normal", "mu": 0, "sigma": 1000}, "are of the logarithm"),
        ({"distribution": "log_normal", "mu": 700, "sigma": 5}, "are of the logarithm"),  # a far draw alone overflows
        ({"distribution": "q_log_normal", "mu": 700, "sigma": 5}, "are of the logarithm"),
        ({"distribution": "normal", "mu": 1e308, "sigma": 1e308}, "no floats"),
        ({"distribution": "q_uniform", "min": 0, "max": 1e308, "q": 1e-300}, "the multiples of 1e-300"),
        ({"distribution": "uniform", "min": 0, "max": 10**400}, "must be a number, and finite"),
        ({"min": 0.0, "max": math.inf}, "max: inf must be a number, and finite"),
        ({"distribution": "uniform", "min": 2**53 + 1, "max": 2**60}, "min: 9007199254740993 is no float"),
        ({"values": [1, 2], "probabilities": [10**400, 0]}, "probabilities"),
    ],
)  # fmt: skip
def test_ranges_that_no_float_has_are_explained(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        distribution(spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"distribution": "q_uniform", "min": 1, "max": 10, "q": 100}, "so 0 can be drawn, outside of 1 to 10"),
        ({"distribution": "q_log_uniform_values", "min": 1, "max": 100, "q": 10}, "so 0 can be drawn"),
        ({"distribution": "log_uniform", "min": 0.1, "max": 600}, "log_uniform takes exponents"),
        ({"distribution": "q_uniform", "min": 0, "max": 10, "q": 2}, None),
    ],
)
def test_values_outside_of_the_bounds_are_said(spec: dict[str, Any], said: str | None) -> None:
    note = distribution(spec).note
    assert note is None if said is None else said in (note or "")


def test_a_value_that_is_no_number_is_told() -> None:
    search = make({"parameters": {"x": {"min": 0.0, "max": 1.0}}})
    for bad in ("0.5", b"1", [1.0], {}):
        trial, _ = search.ask()
        with pytest.raises(UserError, match=f"trial {trial}: its value is .*: it must be a number"):
            search.tell(trial, bad)  # pyright: ignore[reportArgumentType]
        search.tell(trial, None)
    for endless in (10**400, math.inf, math.nan):
        trial, _ = search.ask()
        search.tell(trial, endless)  # it failed
    trial, _ = search.ask()
    search.tell(trial, np.float32(0.5))  # pyright: ignore[reportArgumentType]


def test_a_derived_value_is_kept_too() -> None:
    extras = {"derived": {"pair": "(x, x / 2)", "far": "x * 1e308 * 10"}}
    params = make(sweep_of({"parameters": {"x": {"values": [1, 2]}}}, extras)).ask()[1]
    assert params["pair"] == [params["x"], params["x"] / 2]
    assert params["far"] == math.inf
    nothing = make(sweep_of({"parameters": {"x": {"values": [1, 2]}}}, {"derived": {"y": "x * 1e308 * 10 * 0"}}))
    with pytest.raises(Exception, match="nan cannot be a value"):
        nothing.ask()
