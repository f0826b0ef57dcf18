"""A run whose batch size rises, and the rule for its learning rate."""

import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
import yaml
from corpora import write_corpus

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.effect import without_effect
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.optimizer import NamedOptimizer
from roxxel_dist.train.step.schedule import learning_rate

RAMP = [{"steps": 6, "batch_size": [4, 8], "seq_len": 17}, {"steps": 2, "batch_size": 16, "seq_len": 9}]
BATCHES = [4, 4, 4, 4, 8, 8]
"""Rows of 17 tokens in the steps of the ramp. The last phase has 144 tokens a step, 8 rows of 17 have 136."""
SMALL = {
    "dim": 16, "num_blocks": 1, "n_heads": 2, "max_context": 16, "lr": 1e-2, "warmup_steps": 1, "log_every": 1,
    "eval_every": 100, "eval_iters": 1, "checkpoint_every": 4, "memory_checkpoint_every": 0, "n_devices": 1,
    "wandb": "off", "phases": RAMP,
}  # fmt: skip


SCALED = {"model": "runs:build", "lr_scaling": "sqrt", "val_fraction": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


def fit(data, path, resume=False, **fields):
    Experiment(Config(**{**SMALL, **fields})).fit(data, path, resume=resume)
    return read(path)


def read(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def scaled(data, tmp_path_factory):
    """A run whose rate is scaled by a square root, which is only read."""
    path = tmp_path_factory.mktemp("scaled") / "run"
    fit(data, path, **SCALED)
    return path


OTHERS = [pytest.param(*case, marks=pytest.mark.long) for case in (("none", 0), ("linear", 1))]


@pytest.mark.parametrize(("scaling", "power"), [("sqrt", 0.5), *OTHERS])
def test_the_rate_follows_the_tokens_of_the_batch(data, tmp_path, scaled, scaling, power):
    path = scaled if scaling == "sqrt" else tmp_path / "run"
    rows = read(path) if scaling == "sqrt" else fit(data, path, lr_scaling=scaling)
    settings = OptimizerConfig(lr=1e-2, warmup_steps=1).settings(8)
    shares = [*(batch * 17 / 144 for batch in BATCHES), 1, 1]
    rates = jax.jit(lambda steps: learning_rate("cosine", settings, steps))(np.arange(8))
    expected = [float(rate) * share**power for rate, share in zip(rates, shares, strict=True)]
    assert [row["lr"] for row in rows] == pytest.approx(expected, rel=1e-6)
    told = (path / "logs" / "rank-0.log").read_text()
    note = "in a batch, x 1 for 144): phase 1 x 0.687, phase 2 x 0.972, phase 3 x 1"
    assert (note in told) == (scaling == "sqrt")


def test_it_resumes_in_the_ramp(data, tmp_path, scaled):
    whole = read(scaled)
    shutil.copytree(scaled, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "8")
    (tmp_path / "cut" / "training_cursor.json").unlink()
    again = fit(data, tmp_path / "cut", resume=True, **SCALED)
    assert [(row["train_loss"], row["lr"]) for row in again] == [(row["train_loss"], row["lr"]) for row in whole]


def printed(path):
    """[[before, now] of the next step, [before, now] of the last] as the log has them."""
    log = (path / "logs" / "rank-0.log").read_text()
    lines = re.findall(r"learning rate of (?:step \d+|the last step): (\S+) (?:at .*)?before, (\S+) (?:at .*)?now", log)
    return [[float(number) if number != "none" else None for number in line] for line in lines]


@pytest.mark.long
def test_a_branch_and_an_amended_run_keep_the_rate_of_their_trunk(data, tmp_path, monkeypatch, capsys):
    """The rows of a validation too: `lr` is the rate of 144 tokens, whatever phases are cut off or added."""
    fields = {"lr_scaling": "sqrt", "lr_schedule": "constant", "eval_every": 1}
    rates = [1e-2 * (batch * 17 / 144) ** 0.5 for batch in BATCHES] + [1e-2] * 2
    rows = fit(data, tmp_path / "trunk", max_steps=4, **fields)
    assert [row["lr"] for row in rows][1:] == pytest.approx(rates[1:4], rel=1e-6)
    shutil.copytree(tmp_path / "trunk", tmp_path / "amended")

    monkeypatch.chdir(tmp_path)
    assert main(["train", "--anneal", "trunk@4", "--decay_steps", "4", "--run_dir", "branch"]) == 0
    branch = read(tmp_path / "branch")
    falls = [0.99 * (1 + math.cos(math.pi * i / 4)) / 2 + 0.01 for i in range(4)]
    assert [row["lr"] for row in branch] == pytest.approx(
        [rate * fall for rate, fall in zip(rates[4:], falls, strict=True)], rel=1e-5
    )
    assert printed(tmp_path / "branch") == [
        pytest.approx([rates[4], branch[0]["lr"]], rel=6e-3), pytest.approx([rates[7], branch[-1]["lr"]], rel=6e-3)
    ]  # fmt: skip

    phases = [*RAMP, {"steps": 2, "batch_size": 32, "seq_len": 17}]
    Experiment(Config(**{**SMALL, **fields, "phases": phases})).fit(data, tmp_path / "amended", resume=True, amend=True)
    amended = read(tmp_path / "amended")
    rates += [1e-2 * (32 * 17 / 144) ** 0.5] * 2
    assert [row["lr"] for row in amended][1:] == pytest.approx(rates[1:], rel=1e-6)
    assert printed(tmp_path / "amended") == [
        pytest.approx([rates[4]] * 2, rel=6e-3), pytest.approx([rates[7], rates[9]], rel=6e-3)
    ]  # fmt: skip
    factors = "x 1 for 144): phase 1 x 0.687"
    assert factors in (tmp_path / "amended" / "logs" / "rank-0.log").read_text()
    capsys.readouterr()
    assert main(["plan", "amended"]) == 0
    planned = capsys.readouterr().out
    assert factors in planned
    assert "batches of 4 x 17 tokens (phases 1, 2, 4), 16 x 9 tokens (phase 3); val_loss of other lengths" in planned
    assert yaml.safe_load((tmp_path / "amended" / "config.yaml").read_text())["phases"] == phases, "one line stays one"
    shapes = [{"batch_size": rows, "seq_len": tokens, "packing": "contiguous"} for rows, tokens in ((4, 17), (16, 9))]
    for run in ("trunk", "branch", "amended"):
        for meta in (tmp_path / run / "checkpoints").glob("*/meta.json"):
            assert json.loads(meta.read_text())["meta"]["validation"]["batches"] == shapes


@pytest.mark.long
def test_with_virtual_shards_it_has_the_same_bits_on_any_devices(data, tmp_path, monkeypatch):
    jax.devices()  # which are there before a run would choose the size of a pool
    monkeypatch.setenv("PJRT_NPROC", "16")
    phases = [{"steps": 3, "batch_size": [2, 4], "seq_len": 17}]  # rows that shards cut, and whole ones
    fields = {"virtual_shards": 4, "lr_scaling": "sqrt", "phases": phases}
    one, two = (fit(data, tmp_path / str(n), n_devices=n, **fields) for n in (1, 2))
    assert [(row["train_loss"], row["lr"], row["digest"]) for row in one] == [
        (row["train_loss"], row["lr"], row["digest"]) for row in two
    ]
    rates = [float(learning_rate("cosine", OptimizerConfig(lr=1e-2, warmup_steps=1).settings(3), i)) for i in range(3)]
    assert [row["lr"] / rate for row, rate in zip(one, rates, strict=True)] == pytest.approx([0.5**0.5, 0.5**0.5, 1])


def test_a_plan_shows_the_phases_and_the_rates(data, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SMALL, "lr_scaling": "linear", "phases": RAMP[:1]}))
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), "--data_path", str(data)]) == 0
    told = capsys.readouterr().out
    assert "5 to 6" in told
    assert re.search(r"adamw +[\d,]+ +yes +5 matrices in 5 arrays: blocks.attention.out.kernel, ", told)
    assert re.search(r"adamw +48 +no +3 arrays: blocks.attention_norm.scale, ", told)
    assert "learning rate (linear of the tokens in a batch, x 1 for 136): phase 1 x 0.5, phase 2 x 1" in told


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_scaling": "cubic"}, "lr_scaling is 'cubic': it must be one of none, sqrt, linear"),
        (
            {"phases": [{"steps": 3, "batch_size": [8, 4], "seq_len": 17}]},
            r"batch_size is \[8, 4\]: the sizes of a ramp",
        ),
    ],
)
def test_a_mistake_leaves_nothing_behind(data, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        fit(data, tmp_path / "new", **fields)
    assert not (tmp_path / "new").exists()


def test_what_has_no_effect_or_no_reference_is_refused():
    values = {**Config().to_dict(), "lr_scaling": "sqrt"}
    assert without_effect(values)["lr_scaling"].startswith("there are no phases")
    with pytest.raises(
        UserError, match="lr_scaling is sqrt, and batch_tokens is not given: give the tokens of the batch whose rate"
    ):
        NamedOptimizer(OptimizerConfig(lr_scaling="sqrt")).settings(10)
