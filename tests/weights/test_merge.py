"""`roxxel-dist merge`: the mean of kept checkpoints, and all that reads it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from corpora import write_corpus

from roxxel_dist import Config, Experiment
from roxxel_dist.checkpoint.metadata import CheckpointRange
from roxxel_dist.cli import main
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.evaluate import evaluate
from roxxel_dist.weights.export import mean, merge_run, shares_of
from roxxel_dist.weights.load import weights_of

SMALL = {
    "model": "runs:build", "dim": 16, "max_context": 16, "batch_size": 8, "max_steps": 8, "lr": 1e-2,
    "log_every": 1, "eval_every": 2, "eval_iters": 1, "checkpoint_every": 2, "memory_checkpoint_every": 0,
    "max_to_keep": None, "n_devices": 1, "wandb": "off",
}  # fmt: skip
BUILT_IN = {"model": None, "num_blocks": 1, "n_heads": 2}
KEPT = [1, 2, 4, 6, 8]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


def fit(data, path, **fields):
    fit_only = {name: fields.pop(name) for name in ("fork", "resume") if name in fields}
    Experiment(Config(**{**SMALL, **fields})).fit(data, path, **fit_only)
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run of 8 steps with dropout, whose random streams are in its checkpoints."""
    return fit(data, tmp_path_factory.mktemp("merge") / "run", dropout_rate=0.1)


def by_hand(run, shares):
    """The mean, made in a different way: all checkpoints in memory, summed by NumPy."""
    models = [weights_of(run, step=step).params for step in shares]
    return {
        name: sum(
            np.float64(share) * np.float64(model[name]) for share, model in zip(shares.values(), models, strict=True)
        )
        for name in models[0]
    }


def digest_of(folder):
    params = weights_of(folder).params
    return hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).hexdigest()


@pytest.mark.parametrize(
    ("steps", "weights", "shares"),
    [
        pytest.param([4, 8], "uniform", [0.5, 0.5], id="a mean of two"),
        pytest.param([1, 2, 9], "uniform", [1 / 3] * 3, id="a mean does not look at the steps"),
        pytest.param([10, 20], "1-sqrt", [2 / 3, 1 / 3], id="the mean of 1 - sqrt(t) is 1/3"),
        pytest.param([0, 25, 100], "1-sqrt", [1 / 3, 2 / 3 - 2 / 9, 2 / 9], id="steps of different lengths"),
    ],
)
def test_the_share_of_each_checkpoint(steps, weights, shares):
    assert shares_of(steps, weights) == pytest.approx(shares, abs=1e-15)


@pytest.mark.parametrize("steps", [[0, 1], [3, 4, 9, 11], [100 * k for k in range(50)]])
def test_shares_give_each_update_what_the_decay_would(steps):
    """Updates of 1 a step from a parameter 0: the mean is the sum of the rates of a decay."""
    shares = shares_of(steps, "1-sqrt")
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(1, abs=1e-14)
    first, last = steps[0], steps[-1]
    times = np.linspace(0, 1, 200_001)
    decayed = np.trapezoid(1 - np.sqrt(times), times) * (last - first)
    assert sum(share * (step - first) for share, step in zip(shares, steps, strict=True)) == pytest.approx(
        decayed, rel=1e-5
    )


@pytest.mark.parametrize(
    ("text", "steps"),
    [("r@2:6", [2, 4, 6]), ("r@3:7", [4, 6]), ("r@6,2", [2, 6]), ("a@1/r@0:1", [1]), ("r@8,8,1", [1, 8])],
)
def test_a_range_names_what_is_kept(text, steps):
    assert CheckpointRange.parse(text).among(KEPT) == steps
    assert str(CheckpointRange.parse(text)) == text


@pytest.mark.parametrize("text", ["r", "r@4", "r@", "r@:4", "r@4:", "r@1:2:3", "r@1,", "@1:2", "r@a:b", "r@1:2,3"])
def test_what_is_no_range(text):
    assert CheckpointRange.parse(text) is None


@pytest.mark.parametrize("weights", [pytest.param("uniform", marks=pytest.mark.long), "1-sqrt"])
def test_it_is_the_mean_of_the_parameters(run, tmp_path, weights):
    said = merge_run(f"{run}@2:8", tmp_path / "merged", weights=weights)
    steps = [2, 4, 6, 8]
    wanted = by_hand(run, dict(zip(steps, shares_of(steps, weights), strict=True)))
    merged = weights_of(tmp_path / "merged")
    assert merged.step == 8
    assert merged.params.keys() == wanted.keys()
    for name, array in merged.params.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, wanted[name].astype(np.float32))
    assert said.startswith(f"steps 2, 4, 6, 8 of {run} ({weights}): ")
    record = yaml.safe_load((tmp_path / "merged" / "config.yaml").read_text())["record"]["merged_from"]
    assert record == {"run": str(run), "steps": steps, "weights": weights, "shares": shares_of(steps, weights)}


def test_what_reads_it(run, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["merge", f"{run}@4:8", "--out", "merged"]) == 0
    assert main(["verify", "merged", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1])["parts"][0]["state"] == "complete"
    losses = evaluate("merged").losses
    of_run = evaluate(f"{run}@8").losses
    assert losses.keys() == of_run.keys()
    assert losses["val_loss"] != of_run["val_loss"]
    assert main(["export", "merged", "--format", "safetensors", "--out", "exported"]) == 0
    assert digest_of("exported") == digest_of("merged")
    fit(data, tmp_path / "begun", init_from="merged", lr=1e-30, weight_decay=0.0, max_steps=1)
    begun, merged = weights_of("begun").params, weights_of("merged").params
    assert all(np.allclose(begun[name], merged[name], atol=1e-7) for name in merged)


@pytest.mark.long
def test_text_comes_out_of_it(tmp_path, monkeypatch, capsys):
    """A run that has made its data of text: the merged one reads that, and has its tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("all the small words of a text that is read again and again\n" * 300)
    fit("text.txt", tmp_path / "run", tokenizer_type="bpe", vocab_size=300, max_steps=4, **BUILT_IN)
    assert main(["merge", "run@2,4", "--out", "deep/merged", "--weights", "1-sqrt"]) == 0
    assert evaluate("deep/merged").losses["val_loss"] > 0
    capsys.readouterr()
    assert main(["generate", "deep/merged", "--prompt", "the", "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the")


@pytest.mark.long
@pytest.mark.parametrize("fields", [{"ema": 0.9}, {"use_bf16": True}])
def test_an_average_is_merged_and_the_type_of_the_parameters_stays(data, tmp_path, fields):
    trained = fit(data, tmp_path / "run", max_steps=4, **BUILT_IN, **fields)
    merge_run(f"{trained}@2,4", tmp_path / "merged")
    wanted, kept = by_hand(trained, {2: 0.5, 4: 0.5}), weights_of(trained, step=2).params
    for name, array in weights_of(tmp_path / "merged").params.items():
        assert array.dtype == kept[name].dtype
        np.testing.assert_array_equal(array, wanted[name].astype(array.dtype))


@pytest.mark.long
def test_of_adapters_the_plain_models_are_merged(data, tmp_path):
    base = fit(data, tmp_path / "base", max_steps=2, **BUILT_IN)
    adapted = fit(data, tmp_path / "run", init_from=str(base), use_lora=True, lora_rank=2, dropout_rate=0.1, **BUILT_IN)
    merge_run(f"{adapted}@1,8", tmp_path / "merged")
    models = [weights_of(adapted, step=step).merge_adapters().params for step in (1, 8)]
    merged = weights_of(tmp_path / "merged")
    assert merged.scales == {}
    for name, array in merged.params.items():
        wanted = 0.5 * np.float64(models[0][name]) + 0.5 * np.float64(models[1][name])
        np.testing.assert_array_equal(array, wanted.astype(np.float32))


@pytest.mark.long
def test_the_bits_depend_on_no_device(run, tmp_path):
    """With the eight of this process, and with one in a process of its own."""
    words = ["merge", f"{run}@1:8", "--weights", "1-sqrt", "--out"]
    assert main([*words, str(tmp_path / "8")]) == 0
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    subprocess.run([sys.executable, "-m", "roxxel_dist", *words, str(tmp_path / "1")], env=env, check=True)
    assert digest_of(tmp_path / "1") == digest_of(tmp_path / "8")


def test_a_mean_is_summed_in_float64_and_has_the_types_of_the_first():
    whole, half = np.float32([1, 2**-24]), np.asarray([1, 3], jnp.bfloat16)
    found = mean([{"a": whole, "b": half}, {"a": whole[::-1], "b": half}, {"a": whole, "b": half}], [0.5, 0.25, 0.25])
    np.testing.assert_array_equal(found["a"], np.float32(0.75 * np.float64(whole) + 0.25 * np.float64(whole[::-1])))
    np.testing.assert_array_equal(found["b"], half)
    assert [found[name].dtype for name in "ab"] == [np.float32, jnp.bfloat16]


def test_models_of_other_names_or_shapes_are_no_mean():
    with pytest.raises(UserError, match=r"different models \(it has no b\): merge those of one model"):
        mean([{"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2)}], [0.5, 0.5])
    with pytest.raises(UserError, match=r"a is float64\(3,\) in it and float64\(2,\) here"):
        mean([{"a": np.ones(2)}, {"a": np.ones(3)}], [0.5, 0.5])


REFUSED = {
    "run": "RUN is run: it must name at least two checkpoints, as RUN@1000:2000",
    "run@4": "RUN is run@4: it must name at least two checkpoints",
    "run@3,4": "run has no checkpoint of step 3; kept are 1, 2, 4, 6, 8 (a run keeps more with",
    "run@4:5": "RUN is run@4:5: it names one kept checkpoint, 4, and a mean needs two; kept are 1, 2, 4, 6, 8",
    "run@50:60": "run has no checkpoint of step from 50 to 60; kept are",
    "run@8:4": "RUN is run@8:4: the first step is above the last; write it as 4:8",
    "nowhere@1:2": "RUN is nowhere: nowhere has no checkpoint; name the folder of a run that has",
}


@pytest.fixture
def work(run, tmp_path, monkeypatch):
    """A copy of the run, in the working directory."""
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_merged(work, named, capsys):
    assert main(["merge", named, "--out", "merged"]) == 2
    assert REFUSED[named] in capsys.readouterr().err
    assert sorted(path.name for path in work.iterdir()) == ["run"]


def test_nothing_is_replaced_and_nothing_half_is_left(work, capsys):
    assert main(["merge", "run@2:8", "--out", "run"]) == 2
    assert "out is run, which is there already: name a new folder" in capsys.readouterr().err
    meta = work / "run" / "checkpoints" / "6" / "meta.json"
    meta.write_text(meta.read_text()[:100])
    assert main(["merge", "run@2:8", "--out", "merged"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert sorted(path.name for path in work.iterdir()) == ["run"]
    assert main(["merge", "run@2,4,8", "--out", "merged"]) == 0


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_named_and_no_library_speaks(work, how, capsys):
    """Where text is generated too: every file with values, one of which is named in a line that people read.

    Which of them has the parameters, and where in it, is chance: the optimizer's state is not read.
    """
    files = list((work / "run" / "checkpoints" / "8" / "state").glob("*/d/*"))
    for path in files:
        data = path.read_bytes()
        data = bytes(255 - one for one in data) if how == "flipped" else data[:50]
        path.unlink() if how == "gone" else path.write_bytes(data)
    assert main(["generate", "run", "--prompt", "x"]) == 2
    said = capsys.readouterr().err.strip()
    assert any(path.name in said for path in files), said
    assert said.count("\n") == 0
    assert len(said.replace(str(work), "")) < 500
    assert not [word for word in ("zarr", "OCDBT", "ocdbt.", "source") if word in said.replace("ocdbt.process", "")]


def test_it_is_no_run_to_go_on_with(work, data, capsys):
    assert main(["merge", "run@2:8", "--out", "merged"]) == 0
    for path, fields in {"new": {"fork": "merged@8"}, "merged": {"resume": True, "max_steps": 9}}.items():
        with pytest.raises(UserError, match="merged is merged from checkpoints of ") as told:
            fit(data, path, **fields)
        assert "has no moments to go on with: begin a new run with its weights (init_from=merged)" in str(told.value)
    assert main(["compare", "run", "merged"]) == 2
    assert "merged is merged from checkpoints, and no step made it; compare losses with" in capsys.readouterr().err
