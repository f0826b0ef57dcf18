"""The first start of a sweep: what it refuses, alike with and without --dry_run, and that a study has one writer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.place.directory import is_study
from roxxel_dist.sweep.space.sweep_file import read_sweep, sweep_of

LR = "parameters: {lr: {values: [0.001, 0.01]}}\n"
PHASES = "phases: [{steps: 4, batch_size: 2, seq_len: 9}]\n"


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Starts a sweep of these files: (exit code, what it printed, the error)."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words\n" * 1000)

    def begin(sweep, base="", extras="", *words):
        Path("sweep.yaml").write_text(sweep)
        Path("base.yaml").write_text(f"tokenizer_type: byte\n{base}")
        Path("extras.yaml").write_text(extras or "{}\n")
        files = ("--sweep_config", "sweep.yaml", "--config", "base.yaml", "--extras", "extras.yaml")
        code = main(["sweep", *files, "--data_path", "text.txt", "--study", "st", *words])
        return code, *capsys.readouterr()

    return begin


@one_test(
    ("sweep", "base", "extras", "words"),
    [
        ("parameters: {batch_size: {values: [4, 16]}}", PHASES, "", "parameters.batch_size does nothing here"),
        ("parameters: {epochs: {value: 3}, lr: {values: [1, 2]}}", PHASES, "", "parameters.epochs does nothing here"),
        ("parameters: {top_k_mlp: {values: [1, 2]}}", "", "", "parameters.top_k_mlp does nothing here"),
        ("parameters: {moe: {parameters: {top_k_mlp: {values: [1, 2]}}}}", "", "", "top_k_mlp does nothing here"),
        (
            "parameters: {use_moe: {values: [true, false]}, top_k_mlp: {values: [1, 2]}}",
            "",
            "when: {top_k_mlp: not use_moe}",
            "parameters.top_k_mlp does nothing here",
        ),
        (LR, "", "derived: {n_experts: 8}", "parameters.n_experts does nothing here"),
        (LR, "top_k_mlp: 1", "", "top_k_mlp does nothing here"),
        (LR + "metric: {name: val_loss, target: 2}", "", "", "line 2: metric.target: only W&B's server reads this key"),
        (LR + "metric: {name: val_loss, impute: best}", "", "", "metric.impute: only W&B's server"),
        (LR + "metric: {name: val_loss, gaol: maximize}", "", "", "metric.gaol: there is no such key"),
        (
            LR + "metric: {name: val_loss, weights: {a: 1}}",
            "",
            "",
            "line 2: metric.weights: weights are of a mean",
        ),
        (LR + "metric: {name: mean_loss, weights: [a]}", "", "", "metric.weights: must be names of validation sets"),
        (LR + "metric: {name: mean_loss, weights: {a: -1}}", "", "", "metric.weights.a: -1 must be a number, 0 or"),
        (LR + "metric: {name: mean_loss, weights: {a: .nan}}", "", "", "metric.weights.a: nan must be a number"),
        (
            LR + "metric: {name: mean_loss, weights: {a: 0, b: 0}}",
            "",
            "",
            "they sum to 0: at least one must be",
        ),
        (LR + "metric: {name: mean_loss}", "", "", "mean_loss is a mean over sets of `validation`"),
        (LR + "metric: {name: mean_loss, weights: {a: 1}}", "", "", "data set 'a', and there is no `validation`: give"),
        (
            LR + "metric: {name: val_loss/a}",
            "validation: {code: data}",
            "",
            "metric: val_loss/a is the validation of the data set 'a', and `validation` names code",
        ),
        (LR + "controller: {type: cloud}", "", "", "controller: "),
        (LR + "early_terminate: {type: asha, min_iter: 1, steps: 3}", "", "", "early_terminate.steps: there is no"),
        (LR + "early_terminate: {type: asha, min_iter: 1, max_iter: 9, s: 2}", "", "", "min_iter and max_iter"),
        (LR + "early_terminate: {type: hyperband, min_iter: 1, eta: 1}", "", "", "early_terminate.eta: 1"),
        (LR + "early_terminate: {type: hyperband, min_iter: 1, eta: 0.5}", "", "", "early_terminate.eta: 0.5"),
        (LR + "early_terminate: {type: asha, min_iter: 1, strict: 3}", "", "", "strict: 3 must be true or false"),
        (LR + LR, "", "", "sweep.yaml: line 2: 'parameters' is given twice"),
        ("parameters: {lr: {values: [1], values: [2]}}", "", "", "'values' is given twice"),
        (LR, "", "derived: {n_heads: 4, n_heads: 8}", "extras.yaml: line 1: 'n_heads' is given twice"),
        (LR, "dim: 32\ndim: 64", "", "base.yaml: line 3: 'dim' is given twice"),
        (LR, "", "resources: {GPU: 1.5}", "resources.GPU: 1.5"),
        (LR, "", "resources: {CPU: 1.0e-5}", "resources.CPU: 1e-05 is too little"),
        (LR, "", "resources: {CPU: -1}", "resources.CPU: -1 must be a number"),
        (LR, "", "resources: {TPU: 1}", "resources.TPU: this machine has no such resource"),
        (LR, "", "resources: {CPU: 100000}", "a trial needs 100000 CPU"),
        (
            "parameters: {dim: {values: [32, 64]}, lr: {values: [1, 2]}}",
            "",
            "when: {dim: lr == 1, lr: dim == 32}",
            "when: each of these formulas needs the other",
        ),
        ("parameters: {weight_decay: {min: 0, max: 1}}", "", "", "weight_decay: between the integers 0 and 1 whole"),
        ("parameters: {lr: {min: 1, max: 3}}", "", "", "write min: 1.0 and max: 3.0, or distribution: int_uniform"),
        (LR + "program: train_sweep.py\ncommand: ['${program}', '--dim=32']", "", "", "command: --dim=32 does nothing"),
    ],
)
def test_what_a_sweep_does_not_do_is_refused_before_a_study_is_made(start, sweep, base, extras, words):
    for dry in (("--dry_run",), ()):
        code, _, err = start(sweep, base, extras, *dry)
        assert code == 2, err
        assert words in err
        assert not Path("st").exists()


@one_test(
    ("sweep", "base", "extras"),
    [
        ("parameters: {use_moe: {values: [true, false]}, top_k_mlp: {values: [1, 2]}}", "", ""),
        ("parameters: {use_moe: {values: [true, false]}}", "n_experts: 8", ""),
        (
            "parameters: {use_moe: {values: [true, false]}, top_k_mlp: {values: [1, 2]}}",
            "",
            "when: {top_k_mlp: use_moe}",
        ),
        ("parameters: {grad_accum: {values: [1, 2]}, max_steps: {values: [2, 4]}}", PHASES, ""),
        ("parameters: {warmup_steps: {min: 0, max: 9}, weight_decay: {min: 0.0, max: 1}}", PHASES, ""),
        ("parameters: {weight_decay: {distribution: int_uniform, min: 0, max: 1}}", PHASES, ""),
        (LR + "early_terminate: {type: hyperband, max_iter: 27, s: 2}", "", ""),
    ],
)
def test_what_does_something_in_one_configuration_is_searched(start, sweep, base, extras):
    code, _, err = start(sweep, base, extras, "--dry_run")
    assert code == 0, err


@pytest.mark.parametrize("seed", range(4))
def test_a_constraint_that_names_a_parameter_that_is_left_out_counts_as_true(start, seed):
    sweep = "method: random\nparameters: {use_moe: {values: [true, false]}, top_k_mlp: {values: [1, 2]}}"
    extras = 'when: {top_k_mlp: use_moe}\nconstraints: ["use_moe and top_k_mlp <= 1"]'
    code, _, err = start(sweep, "", extras, "--dry_run", "--count", "2", "--sweep_seed", str(seed))
    assert code == 0, err
    rules = sweep_of(
        {"parameters": {"use_moe": {"values": [True, False]}, "top_k_mlp": {"values": [1, 2]}}},
        {"when": {"top_k_mlp": "use_moe"}, "constraints": ["use_moe and top_k_mlp <= 1"]},
    ).rules
    assert rules.resolve({"use_moe": False, "top_k_mlp": 2}) == {"use_moe": False}


def test_numbers_with_an_exponent_are_numbers_wherever_they_stand(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "parameters:\n  lr: {values: [1e-3, 5e-4, 1e-4]}\n  weight_decay: {min: 1e-2, max: 3E-2}\n"
        "  beta1: {value: .9e0}\n  init_std: {distribution: q_uniform, min: 0, max: 1e0, q: 5e-1}\n"
    )
    (tmp_path / "e.yaml").write_text("constraints: [lr * 2 < 1e-2]\nderived: {grad_clip: 1e0}\nresources: {CPU: 1e0}\n")
    sweep = read_sweep(tmp_path / "s.yaml", tmp_path / "e.yaml")
    lr = sweep.space.parameters[0].distribution
    assert (lr.choices, lr.is_ordered) == ((1e-4, 5e-4, 1e-3), True)
    params = sweep.rules.resolve(sweep.space.point([0.0, 0.0, 1.0]))
    assert params == {"lr": 1e-4, "weight_decay": 0.01, "beta1": 0.9, "init_std": 1.0, "grad_clip": 1.0}
    assert sweep.rules.resources == {"CPU": 1.0}


def test_a_value_that_is_given_twice_is_one_point_and_twice_as_likely():
    space = sweep_of({"parameters": {"lr": {"values": [0.001, 0.001, 0.01]}, "x": {"values": [1, True, "1"]}}}).space
    assert space.size == 6
    lr = space.parameters[0].distribution
    assert [lr.quantile(u) for u in (0.0, 0.6, 0.7, 1.0)] == [0.001, 0.001, 0.01, 0.01]


def test_a_study_that_has_ignored_keys_can_still_be_read(tmp_path):
    (tmp_path / "s.yaml").write_text(LR + LR + "metric: {name: val_loss, target: 1}\n")
    assert read_sweep(tmp_path / "s.yaml", strict=False).metric == "val_loss"


BEGIN = """
import sys, time
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.study.journal import Journal
from roxxel_dist.sweep.study.folder import StudyDir
file, ends = sys.argv[1], sys.argv[2]
study = StudyDir(__import__("pathlib").Path("st"))
print("ready", flush=True)
sys.stdin.readline()
with study.hold(lambda line: None):
    sweep, _ = study.open(file, None, Config(), None)
    is_new = not study.is_there
    if is_new:
        study.create(file, None, Config(), {})
    with Journal(study.path, print) as journal:
        time.sleep(0.2)
        if ends == "refused":
            study.rollback()
        else:
            journal.append({"event": "study", "metric": sweep.metric, "goal": "minimize", "method": file, "seed": 0})
"""


@pytest.mark.parametrize(
    "ends",
    [pytest.param(("ends",) * 4, marks=pytest.mark.long), ("refused", "ends", "refused", "ends")],
    ids=["all", "two are refused"],
)
def test_of_first_starts_at_once_each_sees_the_whole_study_of_another_or_none(tmp_path, ends):
    """Real processes: two files for one study. Its definition and its journal are always of one of them."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(LR + f"metric: {{name: {name}}}\n")
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN, f"{name}.yaml", end], cwd=tmp_path, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name, end in zip(("one", "two", "one", "two"), ends, strict=True)
    ]  # fmt: skip
    for process in starts:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in starts:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    errors = [process.communicate()[1] for process in starts]
    assert is_study(tmp_path / "st"), errors
    begun = read_sweep(tmp_path / "st" / "study.yaml").metric
    lines = [json.loads(line) for line in (tmp_path / "st" / "journal.jsonl").read_text().splitlines()]
    assert {line["method"] for line in lines} == {f"{begun}.yaml"}
    others = [error for error in errors if error]
    assert all("differs from the file that st started with" in error for error in others), others
