"""Evaluation tasks of a run: during training, in `eval`, and against the model's own logits."""

import json
import math
import os

import numpy as np
import pytest
import yaml
from flax import nnx
from runs import rows

from roxxel_dist.cli import main
from roxxel_dist.weights.load import load_run

CONFIG = {
    "dim": 16,
    "num_blocks": 1,
    "max_context": 32,
    "n_devices": 1,
    "tokenizer_type": "byte",
    "eval_iters": 2,
    "log_every": 1,
    "eval_every": 2,
    "sample": "off",
    "ema": 0.5,
    "eval_tasks": ["tasks/*.jsonl"],
    "phases": [{"steps": 4, "batch_size": 4, "seq_len": 33}],
}
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
QUESTIONS = [
    {"context": f"{a} {b}", "choices": [f" {c}", f" {a}", " omega."], "answer": i % 3}
    for i, (a, b, c) in enumerate((a, b, c) for a in WORDS[:3] for b in WORDS[3:6] for c in WORDS[6:7])
]
TEXTS = ["alpha beta gamma " * 5, "zeta"]
NAMES = ["task/greek/acc", "task/greek/acc_norm", "task/prose/bits_per_byte"]

PAIRS = """
import own_model

class Pairs(own_model.Recurrent):
    def __call__(self, tokens):
        return super().__call__(tokens), 0

def build(config, rngs):
    return Pairs(config.vocab_size, 8, 1, 0.0, rngs)

def loss(model, batch):
    return own_model.loss(lambda tokens: model(tokens)[0], batch)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tasks").mkdir()
    (folder / "text.txt").write_text(" ".join(WORDS[i * i % 7] for i in range(2000)))
    for name, lines in (("greek", QUESTIONS), ("prose", [{"text": text} for text in TEXTS])):
        (folder / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["train", "--config", "small.yaml", "--data_path", "text.txt", "--run_dir", "run"]) == 0
    finally:
        os.chdir(before)
    return folder


def evaluated(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def of_tasks(found):
    return {f"task/{task}/{name}": value for task, scores in found["tasks"].items() for name, value in scores.items()}


def by_hand(run):
    """The scores from the logits of the model as it is loaded, which is the average, a row at a time."""
    made = load_run(run)
    model, tokenizer = made.model, made.tokenizer
    run_row = nnx.jit(lambda model, tokens: model(tokens))

    def log_likelihood(context, continuation):
        ids = [*(tokenizer.encode(context) or [tokenizer.eos_id]), *tokenizer.encode(continuation)]
        scored = len(tokenizer.encode(continuation))
        row = np.array([ids[:-1] + [0] * (33 - len(ids))], np.int32)  # what comes later is not seen
        logits = np.asarray(run_row(model, row), np.float64)[0]
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return sum(logits[i - 1, ids[i]] for i in range(len(ids) - scored, len(ids)))

    right, by_byte = 0, 0
    for question in QUESTIONS:
        found = [log_likelihood(question["context"], choice) for choice in question["choices"]]
        right += int(np.argmax(found)) == question["answer"]
        sizes = [len(choice.strip()) for choice in question["choices"]]
        by_byte += int(np.argmax(np.divide(found, sizes))) == question["answer"]
    text = TEXTS[0]  # 85 bytes in windows of 32, of which the last one has a whole context
    bits = (
        -log_likelihood("", text[:32]) - log_likelihood(text[31], text[32:64]) - log_likelihood(text[52:64], text[64:])
    )
    bits = (bits - log_likelihood("", TEXTS[1])) / math.log(2)
    return right / len(QUESTIONS), by_byte / len(QUESTIONS), bits / sum(map(len, TEXTS))


def test_the_log_has_the_scores_of_each_validation(made):
    logged = {row["step"]: row for row in rows(made / "run")}
    for step in (1, 2, 4):
        assert [name for name in logged[step] if name.startswith("task/")] == NAMES
    assert not [name for name in logged[3] if name.startswith("task/")]
    assert (made / "run" / "training_log.csv").read_text().splitlines()[0].count("task/") == 3


def test_eval_gives_the_same_and_they_are_those_of_the_logits(made, capsys):
    logged = rows(made / "run")[-1]
    found = evaluated(capsys, made / "run")
    assert of_tasks(found) == {name: logged[name] for name in NAMES}
    assert found["difference"] == 0
    acc, acc_norm, bits = by_hand(made / "run")
    assert found["tasks"]["greek"] == {"acc": acc, "acc_norm": acc_norm}
    assert found["tasks"]["prose"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_other_devices_give_the_same_up_to_rounding(made, capsys):
    wanted = rows(made / "run")[-1]
    config = made / "run" / "config.yaml"
    before = config.read_text()
    config.write_text(before.replace("n_devices: 1\n", "n_devices: 4\n"))
    try:
        found = of_tasks(evaluated(capsys, made / "run"))
    finally:
        config.write_text(before)
    *of_choices, of_text = NAMES
    assert [found[name] for name in of_choices] == [wanted[name] for name in of_choices]
    assert found[of_text] == pytest.approx(wanted[of_text], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"fsdp": True, "n_devices": 4, "tensor_devices": 2, "bf16_compute": True}, marks=pytest.mark.long),
        {"model": "own_model:build", "model_args": {"width": 16}, "n_devices": 2},
    ],
    ids=["fsdp and tensor", "a model of one's own"],
)
def test_cut_models_and_own_ones(made, capsys, monkeypatch, tmp_path, fields):
    monkeypatch.chdir(made)
    (tmp_path / "cut.yaml").write_text(yaml.safe_dump({**CONFIG, **fields}))
    words = ["--data_path", "text.txt", "--run_dir", str(tmp_path / "run"), "--max_steps", "1"]
    assert main(["train", "--config", str(tmp_path / "cut.yaml"), *words]) == 0
    [logged] = rows(tmp_path / "run")
    assert of_tasks(evaluated(capsys, tmp_path / "run")) == {name: logged[name] for name in NAMES}


def test_a_model_without_logits_is_refused(made, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(made)
    (tmp_path / "pairs.py").write_text(PAIRS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**CONFIG, "model": "pairs:build", "loss": "pairs:loss"}))
    words = ["--data_path", "text.txt", "--run_dir", str(tmp_path / "run"), "--max_steps", "1"]
    assert main(["train", "--config", str(tmp_path / "own.yaml"), *words]) == 2
    said = capsys.readouterr().err
    assert "eval_tasks needs a model that makes [B, L, vocabulary] logits of int32[B, L] tokens alone" in said
    assert "this one makes a tuple of tokens of shape" in said


def test_the_table_and_other_tasks(made, capsys, tmp_path):
    long = {"context": "alpha beta " * 10, "choices": ["gamma", "zeta"], "answer": 0}
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    capsys.readouterr()
    assert main(["eval", str(made / "run"), "--tasks", str(tmp_path / "long.jsonl")]) == 0
    *_, head, acc, acc_norm, unread, note = capsys.readouterr().out.splitlines()
    assert unread.startswith("the held-out data: ")
    assert head.split() == ["task", "score", "value"]
    assert (acc.split()[:2], acc_norm.split()[:2]) == (["long", "acc"], ["long", "acc_norm"])
    assert note == "task long: 2 of 2 choices are too long for max_context, and cut on the left"


@pytest.mark.long
def test_a_run_without_validation_data_has_tasks(made, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(made)
    words = ["--data_path", "text.txt", "--run_dir", str(tmp_path / "run"), "--val_fraction", "0", "--max_steps", "1"]
    assert main(["train", "--config", "small.yaml", *words]) == 0
    found = evaluated(capsys, tmp_path / "run")
    assert (found["data"], found["difference"], list(found["tasks"])) == ([], None, ["greek", "prose"])
    assert "val_loss" not in found


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("none.jsonl", "eval_tasks has '{folder}/none.jsonl': there is no such file"),
        ("s3://bucket/a.jsonl", "eval_tasks is s3://bucket/a.jsonl: it cannot be in a bucket"),
        ("bad.jsonl", "{folder}/bad.jsonl, line 1: answer is 7: it must be a whole number from 0 to 1"),
    ],
)
def test_mistakes_are_found_before_the_run_begins(made, capsys, monkeypatch, tmp_path, flag, message):
    monkeypatch.chdir(made)
    (made / "bad.jsonl").write_text(json.dumps({"context": "a", "choices": ["b", "c"], "answer": 7}))
    run = tmp_path / "run"
    words = ["train", "--config", "small.yaml", "--data_path", "text.txt", "--run_dir", str(run), "--eval_tasks", flag]
    assert main(words) == 2
    assert message.format(folder=made) in capsys.readouterr().err
    assert not run.exists()


def test_no_files_are_refused(made, capsys, monkeypatch):
    monkeypatch.chdir(made)
    assert main(["eval", "run", "--tasks"]) == 2
    assert "--tasks has no value: name one file at least" in capsys.readouterr().err
    words = ["--data_path", "text.txt", "--run_dir", "other"]
    (made / "none.yaml").write_text(yaml.safe_dump({**CONFIG, "eval_tasks": []}))
    assert main(["train", "--config", "none.yaml", *words]) == 2
    assert "eval_tasks is an empty list: name at least one file" in capsys.readouterr().err
