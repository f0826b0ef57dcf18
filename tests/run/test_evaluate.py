"""`roxxel-dist eval`: the numbers of the log come out again, from the command line, and nothing of the run changes."""

import csv
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from runs import rows, saved

from roxxel_dist import Config, Roxxel
from roxxel_dist.cli import main
from roxxel_dist.cli.models import evaluations_table
from roxxel_dist.run.components import build_components
from roxxel_dist.run.evaluate import Evaluation, evaluation_mesh, perplexity

BUILT_IN = {"model": None, "num_blocks": 1}
SMALL = {
    "model": "runs:build",
    "dim": 16,
    "max_context": 32,
    "n_devices": 1,
    "optimizer": "sgd",
    "lr": 0.1,
    "eval_iters": 3,
    "log_every": 1,
    "eval_every": 2,
    "checkpoint_every": 2,
    "keep_steps": [3],
    "max_to_keep": 20,
    "phases": [{"steps": 4, "batch_size": 8, "seq_len": 17}, {"steps": 3, "batch_size": 16, "seq_len": 33}],
}
KEPT = [1, 2, 3, 4, 6, 7]
GRU = {"model": "own_model:build", "loss": "own_model:loss", "model_args": {"width": 16}}
VARIANTS = {
    "named sets, a blend, bf16 parameters, cut up": {
        **BUILT_IN,
        "datasets": {"code": "third_*.rox"},
        "dim": 128,
        "fsdp": True,
        "n_devices": 2,
        "validation": {"first": "other_*.rox", "second": "third_*.rox"},
        "use_bf16": True,
        "phases": [{**SMALL["phases"][0], "packing": "documents", "weights": {"self": 0.5, "code": 0.5}}],
    },
    "a model of one's own": {
        **GRU,
        "bf16_compute": True,
        "phases": [{"steps": 4, "batch_size": 8, "seq_len": 9}],
    },
}


def write(path, seed, *, append=False, tokenizer="0123456789abcdef"):
    """30 documents of random tokens below 60, in several shards."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 60, rng.integers(100, 600)).astype(np.uint8) for _ in range(30)]
    with Roxxel(path) as data:
        data.write(documents, vocab_size=60, max_shard_bytes=4000, append=append, tokenizer_fingerprint=tokenizer)


def train(*words, **fields):
    with open("small.yaml", "w") as file:
        yaml.safe_dump({**SMALL, **fields}, file)
    assert main(["train", "--config", "small.yaml", *map(str, words)]) == 0


def evaluated(capsys, *words):
    """What `eval WORDS --json` prints."""
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *map(str, words)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def validations(run):
    """Of each step with a validation, what metrics.jsonl and training_log.csv say of it; they say the same."""
    found = {}
    with (run / "training_log.csv").open() as file:
        table = {int(row["step"]): row for row in csv.DictReader(file)}
    for row in rows(run):
        names = [name for name in row if of_validation(name)]
        if names:
            found[row["step"]] = {name: row[name] for name in names}
            assert found[row["step"]] == {name: float(table[row["step"]][name]) for name in names}
    return found


def losses(result):
    return {name: value for name, value in result.items() if of_validation(name)}


def of_validation(name):
    return name.startswith(("val_loss", "val_bpb")) or name in ("train_eval_loss", "val_bal")


def contents(folder):
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with data and a run of two phases of different shapes, in `run`."""
    folder = tmp_path_factory.mktemp("eval")
    before = os.getcwd()
    os.chdir(folder)
    try:
        for number, name in enumerate(("data", "other", "third")):
            write(f"{name}_*.rox", number)
        train("--data_path", "data_*.rox", "--run_dir", "run")
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def work(made, tmp_path, monkeypatch):
    """A copy of that folder, as working directory."""
    shutil.copytree(made, tmp_path / "work")
    config = tmp_path / "work" / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(made), str(tmp_path / "work")))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_every_checkpoint_gives_the_losses_of_its_row(made, capsys):
    run = made / "run"
    before, wanted = contents(run), validations(run)
    assert saved(run) == KEPT
    assert sorted(wanted) == [step for step in KEPT if step != 3]
    for step in (1, 3, 7):
        result = evaluated(capsys, f"{run}@{step}")
        if step == 3:  # between two validations
            assert (result["logged_val_loss"], result["difference"]) == (None, None)
            assert min(result["val_loss"], result["train_eval_loss"]) > 0
            continue
        assert losses(result) == wanted[step]
        assert (result["logged_val_loss"], result["difference"]) == (wanted[step]["val_loss"], 0)
        held_out, training = result["data"]
        assert (held_out["name"], held_out["loss"]) == ("held out", result["val_loss"])
        assert held_out["perplexity"] == perplexity(result["val_loss"])
        assert training["tokens"] == 3 * (8 * 17 if step <= 4 else 16 * 33)
    assert contents(run) == before
    assert len({loss["val_loss"] for loss in wanted.values()}) == len(wanted)


def test_the_newest_and_the_best(made, capsys):
    run, wanted = made / "run", validations(made / "run")
    assert evaluated(capsys, run)["step"] == 7
    best = min(wanted, key=lambda step: wanted[step]["val_loss"])
    assert evaluated(capsys, run, "--best")["step"] == best
    assert main(["eval", f"{run}@4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}, step 4"
    assert lines[1].split() == ["data", "loss", "perplexity", "bits", "per", "byte", "batches", "tokens"]
    assert lines[2].split()[:3] == ["held", "out", f"{wanted[4]['val_loss']:.6f}"]
    assert lines[-2] == "val_loss is the same as in the log, to the last bit"
    assert lines[-1] == "the held-out data: 408 of 1,523 tokens are read (eval_iters is 3)"
    assert main(["eval", f"{run}@3"]) == 0
    assert "\nthe log has no val_loss of step 3\n" in capsys.readouterr().out


def test_a_row_for_each_checkpoint_of_a_range(made, capsys):
    run, wanted = made / "run", validations(made / "run")
    several = evaluated(capsys, f"{run}@3:6")
    assert [one["step"] for one in several] == [3, 4, 6]
    assert several[2] == evaluated(capsys, f"{run}@6")
    capsys.readouterr()
    assert main(["eval", f"{run}@3:4"]) == 0
    head, titles, third, fourth, note = capsys.readouterr().out.splitlines()
    assert "tokens are read (eval_iters is 3)" in note
    assert head == str(run)
    assert titles.split("  ")[-1].strip() == "minus the log"
    assert titles.split()[:4] == ["step", "val_loss", "perplexity", "train_eval_loss"]
    assert third.split()[0] == "3"
    assert third.split()[-1] == "-"
    assert fourth.split()[:2] == ["4", f"{wanted[4]['val_loss']:.6f}"]
    assert fourth.split()[-1] == "0"


def test_what_is_no_range_to_evaluate(made, capsys):
    run = made / "run"
    assert f"RUN is {run}@2:6, and --best takes the step" in refused(capsys, f"{run}@2:6", "--best")
    assert "has no checkpoint of step from 8 to 9; kept are 1, 2, 3, 4, 6, 7" in refused(capsys, f"{run}@8:9")
    assert "has no checkpoint of step 5; kept are" in refused(capsys, f"{run}@4,5")
    assert "the first step is above the last; write it as 2:6" in refused(capsys, f"{run}@6:2")


OWN = pytest.param("a model of one's own", marks=pytest.mark.long)


@pytest.mark.long
@pytest.mark.parametrize("variant", ["named sets, a blend, bf16 parameters, cut up", OWN])
def test_the_same_for_other_runs(work, variant, capsys):
    train("--data_path", "data_*.rox", "--run_dir", "mine", **VARIANTS[variant])
    os.chdir("/")  # the paths of a run hold wherever one is
    wanted = validations(work / "mine")
    result = evaluated(capsys, f"{work / 'mine'}@4")
    assert losses(result) == wanted[4]
    assert result["difference"] == 0
    if "named" in variant:
        summary = json.loads((work / "mine" / "model_summary.json").read_text())
        assert (summary["dtype"], summary["weights_mem_MB"]) == ("bfloat16", 2 * summary["parameters"] / 1e6)
        assert [row["name"] for row in result["data"]] == ["first", "second", "all of them", "training data"]
        names = {"val_loss", "val_loss/first", "val_loss/second", "val_bal", "train_eval_loss"}
        assert losses(result).keys() == names


@pytest.mark.parametrize(
    ("model", "phase"),
    [
        pytest.param({}, {"steps": 1, "batch_size": 8, "seq_len": 17}, id="whole rows"),
        pytest.param(
            BUILT_IN | {"dim": 64}, {"steps": 1, "batch_size": 1, "seq_len": 33}, id="rows that the shards cut",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_virtual_shards_give_the_bits_of_the_log_on_another_number_of_devices(work, capsys, monkeypatch, model, phase):
    monkeypatch.setenv("PJRT_NPROC", "16")  # that of the run; this process has another one all the while
    fields = model | {"phases": [phase], "eval_iters": 2, "use_bf16": False}
    train("--data_path", "data_*.rox", "--run_dir", "exact", **fields, virtual_shards=2, n_devices=1)
    config = work / "exact" / "config.yaml"
    config.write_text(config.read_text().replace("n_devices: 1", "n_devices: 2"))
    assert losses(evaluated(capsys, "exact@1")) == validations(work / "exact")[1]


def test_the_config_and_the_data_are_those_that_the_run_has_now(work, capsys):
    """After a resume with longer phases, more shards and other settings."""
    before = validations(work / "run")
    write("data_*.rox", 9, append=True)
    longer = [*SMALL["phases"], {"steps": 3, "batch_size": 8, "seq_len": 17}]
    train("--run_dir", "run", "--resume", "--amend", "--data_path", "data_*.rox", phases=longer, eval_iters=2)
    new = evaluated(capsys, "run@10")
    assert losses(new) == validations(work / "run")[10]
    old = evaluated(capsys, "run@6")
    assert (old["logged_val_loss"], old["data"][0]["batches"]) == (before[6]["val_loss"], 2)
    assert old["data"][0]["tokens"] == 2 * 16 * 33  # in the shape of the phase of that step
    train("--fork", "run@8", "--run_dir", "fork", phases=longer, eval_iters=2)
    assert evaluated(capsys, "fork@8")["logged_val_loss"] is None
    assert losses(evaluated(capsys, "fork@10")) == validations(work / "fork")[10]


def test_other_data_and_batches(work, capsys):
    own = evaluated(capsys, "run@4")
    fewer = evaluated(capsys, "run@4", "--eval_iters", 1)
    assert fewer["val_loss"] != own["val_loss"]
    assert fewer["difference"] == fewer["val_loss"] - own["val_loss"]
    assert fewer["data"][0]["batches"] == 1
    there = fewer["notes"][0].split()[5]
    read = f"{fewer['data'][0]['tokens']:,}"
    assert fewer["notes"] == [f"the held-out data: {read} of {there} tokens are read (eval_iters is 1)"]
    many = evaluated(capsys, "run@4", "--eval_iters", 1000)
    rest = int(there.replace(",", "")) - many["data"][0]["tokens"]
    assert 0 < rest < 16 * 33 + 33
    assert many["notes"] == [
        f"the held-out data: {many['data'][0]['tokens']:,} of {there} tokens are read (the rest fills no batch)"
    ]
    other = evaluated(capsys, "run@4", "--validation", "{third: third_*.rox, data: data_*.rox}")
    assert [row["name"] for row in other["data"]] == ["third", "data", "all of them", "training data"]
    assert other["train_eval_loss"] == own["train_eval_loss"]
    elsewhere = evaluated(capsys, "run@4", "--data_path", "other_*.rox")
    assert elsewhere["val_loss"] != own["val_loss"]
    for path in work.glob("data_*.rox"):
        path.rename(path.with_name(path.name.replace("data", "moved")))
    moved = evaluated(capsys, "run@4", "--data_path", "moved_*.rox", "--eval_iters", 3)
    assert losses(moved) == losses(own)
    assert moved["difference"] == 0


def test_a_checkpoint_that_does_not_give_its_loss_is_told(work, capsys):
    log = work / "run" / "metrics.jsonl"
    row = rows(work / "run")[3]
    wrong = float(np.nextafter(row["val_loss"], 9))
    log.write_text(log.read_text().replace(repr(row["val_loss"]), repr(wrong)))
    assert main(["eval", "run@4"]) == 0
    assert f"val_loss is {row['val_loss']!r}, and {wrong!r} in the log: -" in capsys.readouterr().out


def test_what_cannot_be_evaluated(work, capsys):
    assert "there is no nowhere: " in refused(capsys, "nowhere")
    assert "run has no checkpoint of step 5; nearest is 4 or 6, kept are 1, 2, 3, 4, 6, 7" in refused(capsys, "run@5")
    assert "RUN is run@4, and --best takes the step" in refused(capsys, "run@4", "--best")
    assert "--validation is 'x': write names and paths" in refused(capsys, "run", "--validation", "x")
    assert "validation: 'x' is 3: write names" in refused(capsys, "run", "--validation", "{x: 3}")
    assert "validation 'x' is none: there are no shards" in refused(capsys, "run", "--validation", "{x: none}")
    assert "eval_iters is 0: it must be at least 1" in refused(capsys, "run", "--eval_iters", "0")
    (work / "text.txt").write_text("words")
    assert "data_path is text.txt: there are no shards" in refused(capsys, "run", "--data_path", "text.txt")
    meta = work / "run" / "checkpoints" / "7" / "meta.json"
    meta.write_text(meta.read_text()[:100])
    said = refused(capsys, "run")
    assert "the checkpoint of step 7 in" in said
    assert "is damaged: meta.json does not agree with its digest, written by rank 0; the next older complete" in said
    for path in work.glob("data_*.rox"):
        path.unlink()
    assert "Put the data of run back, or name it with --data_path" in refused(capsys, "run@6")


@pytest.mark.long
def test_a_run_that_validates_on_nothing(work, capsys):
    train("--data_path", "data_*.rox", "--run_dir", "mine", "--max_steps", 1, val_fraction=0.0)
    assert "mine has nothing to validate on (val_fraction is 0.0" in refused(capsys, "mine")
    assert "no checkpoint of mine was saved with a val_loss; kept are 1, name one as mine@1" in refused(
        capsys, "mine", "--best"
    )
    assert evaluated(capsys, "mine", "--validation", "{other: other_*.rox}")["val_loss"] > 3


@pytest.mark.parametrize("names", [["held out"], ["code"], ["code", "books"]])
def test_a_table_of_checkpoints_has_the_perplexity_of_val_loss(names):
    """One set with a name has no row of all sets."""
    metrics = ["val_loss"] if names == ["held out"] else [f"val_loss/{name}" for name in names]
    metrics += ["val_loss"] if len(names) > 1 else []
    losses = dict.fromkeys([*metrics, "val_loss", "train_eval_loss"], 2.0)
    data = tuple(
        {"metric": name, "perplexity": 7.5 if "val" in name else 9.0} for name in [*metrics, "train_eval_loss"]
    )
    one = Evaluation(run=Path("r"), step=4, losses=losses, data=data, tasks={}, notes=(), logged_val_loss=2.0)
    _, titles, line = evaluations_table([one]).splitlines()
    cells = dict(zip(titles.replace("minus the log", "difference").split(), line.split(), strict=True))
    assert (cells["perplexity"], cells["difference"]) == ("7.50", "0")
    assert titles.split()[1:3] == ["val_loss/code" if names == ["code"] else "val_loss", "perplexity"]


def test_the_perplexity_of_a_large_loss():
    assert perplexity(1e9) == float("inf")


def sources(path, *, shuffled=False, one_file=True, count=60):
    """Four sources, one behind the other: documents of random tokens below 2, 8, 32 and 128."""
    rng = np.random.default_rng(7)
    documents = [rng.integers(1, 2 * 4**k + 1, 700).astype(np.uint8) for k in range(4) for _ in range(count)]
    if shuffled:
        rng.shuffle(documents)
    with Roxxel(path) as data:
        data.write(documents, separator=None, vocab_size=256, max_shard_bytes=1 << 30 if one_file else 9000)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"validation": {"v": "val.rox"}}, id="one shard", marks=pytest.mark.long),
        pytest.param({"validation": {"v": "val_*.rox"}}, id="many shards", marks=pytest.mark.long),
        pytest.param({"validation": {"v": "val.rox"}, "packing": "documents"}, id="packed", marks=pytest.mark.long),
        pytest.param(
            {"validation": {"v": "val.rox"}, "datasets": {"more": "train.rox"}, "weights": {"self": 0.5, "more": 0.5}},
            id="a blend",
            marks=pytest.mark.long,
        ),
        pytest.param({"data": "val.rox", "val_fraction": 0.5}, id="the training data", marks=pytest.mark.long),
    ],
)
def test_a_few_batches_give_the_losses_of_the_whole_set(tmp_path, monkeypatch, capsys, fields):
    """Whatever lies where in a set: 10 batches of 16 rows are within 4 standard errors of all of its rows."""
    monkeypatch.chdir(tmp_path)
    sources("train.rox", shuffled=True)
    sources("val.rox")
    sources("val_*.rox", one_file=False)
    fields = dict(fields)
    phase = {name: fields.pop(name) for name in ("packing", "weights") if name in fields}
    train(
        "--data_path", fields.pop("data", "train.rox"), "--run_dir", "run", "--sample", "off",
        **BUILT_IN | {"lr": 1e-2, "optimizer": "adamw", "max_steps": 30, "eval_every": 30, "eval_iters": 10} | fields,
        phases=[{"steps": 30, "batch_size": 16, "seq_len": 33, **phase}], checkpoint_every=30, keep_steps=[],
    )  # fmt: skip
    whole = evaluated(capsys, "run", "--eval_iters", 10_000)
    read = whole["data"][0]["tokens"]
    for iters in (5, 10, 50):
        few = evaluated(capsys, "run", "--eval_iters", iters)
        assert few["data"][0]["tokens"] < read or iters == 50
        # The rows of a source deviate by less than 0.3, those of a shuffled set by less than 1.5; stretches take the
        # differences between sources away.
        for name, deviation in (("val_loss", 0.3), ("train_eval_loss", 1.5)):
            assert few[name] == pytest.approx(whole[name], abs=4 * deviation / np.sqrt(iters * 16)), (iters, name)
        if iters == 10:
            assert few["val_loss"] == validations(tmp_path / "run")[30]["val_loss"]


@pytest.mark.parametrize(
    ("devices", "fields", "shape"),
    [
        (16, {"expert_devices": 16}, {"data": 1, "fsdp": 1, "expert": 8, "tensor": 1}),
        (12, {"expert_devices": 4, "tensor_devices": 3}, {"data": 2, "fsdp": 1, "expert": 4, "tensor": 1}),
        (4, {"expert_devices": 2, "tensor_devices": 2}, {"data": 1, "fsdp": 1, "expert": 2, "tensor": 2}),
        (16, {}, {"data": 8, "fsdp": 1, "expert": 1, "tensor": 1}),
    ],
)
def test_eight_devices_share_what_those_of_the_run_shared(tmp_path, devices, fields, shape):
    """Of 16, 12 or 4: as far as their number divides."""
    write(tmp_path / "data_*.rox", 1)
    config = Config(use_moe=True, n_experts=16, max_context=8, batch_size=16, n_devices=devices, **fields)
    assert evaluation_mesh(build_components(config, Roxxel(tmp_path / "data_*.rox"))).shape == shape
