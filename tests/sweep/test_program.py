"""Programs of the user's own: W&B's command macros, and an objective that is read from what the real client writes."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import environment
from trials import program, split, task

from roxxel_dist.sweep.trial import trial as trial_module
from roxxel_dist.sweep.trial.program import command_of, expand
from roxxel_dist.sweep.trial.tail import BLOCK, PIECE, WandbFile, WandbTail
from roxxel_dist.sweep.trial.trial import run

pytestmark = pytest.mark.xdist_group("agent")  # the modules of W&B's agent are imported once

PARAMS = {"lr": 0.001, "deep": True, "wide": False, "name": "a b", "nested": {"a": 1}}
LOGS = """
import json, os, signal, sys, time
import wandb
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
run = wandb.init()
steps, what, then = int(sys.argv[1]), sys.argv[2], sys.argv[3]
for step in range(steps):
    value = abs(step - 2) + run.config["lr"]
    nested = {"score": {"val": value}, "train_loss": 1.0 / (step + 1), "bad": float("nan") if step == 1 else 1.0}
    run.log(nested if what == "nested" else {what: value})
run.summary["only"] = 7.5
run.summary["args"] = " ".join(sys.argv)
if then == "raise":
    raise RuntimeError("a bad day")
if then == "wait":
    open(os.path.join(os.environ["HOME"], "logged"), "w").close()
    time.sleep(600)
"""


def wandb_task(tmp_path, *words, **more):
    clean = {name: "" for name in environment() if name.startswith("WANDB_")}
    home = {"HOME": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "cache"), **clean}
    return task(tmp_path / "study", program=program(LOGS, *words), environment=home, params={"lr": 0.25}, **more)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("${env}", ["/usr/bin/env"]),
        ("${interpreter}", [sys.executable]),
        ("${args}", ["--lr=0.001", "--deep=True", "--wide=False", "--name=a b", "--nested={'a': 1}"]),
        ("${args_no_hyphens}", ["lr=0.001", "deep=True", "wide=False", "name=a b", "nested={'a': 1}"]),
        ("${args_no_boolean_flags}", ["--lr=0.001", "--deep", "--name=a b", "--nested={'a': 1}"]),
        ("${args_no_equals}", [word for name, value in PARAMS.items() for word in (f"--{name}", str(value))]),
        ("${args_json}", [json.dumps(PARAMS)]),
        ("${args_json_file}", ["params.json"]),
        ("${args_append_hydra}", ["+lr=0.001", "+deep=True", "+wide=False", "+name=a b", "+nested={'a': 1}"]),
        ("--out=${envvar:A_PLACE}/x", ["--out=/there/x"]),
        ("${envvar:NO_SUCH}", ["NO_SUCH"]),
        ("plain", ["plain"]),
    ],
)  # fmt: skip
def test_macros_are_those_of_wandbs_agent(monkeypatch, word, words):
    monkeypatch.setenv("A_PLACE", "/there")
    assert expand([word], PARAMS, Path("params.json")) == words
    # The agent itself: the same words.
    from wandb.sdk.launch.sweeps import utils

    theirs = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in PARAMS.items()}})
    key = word.removeprefix("${").removesuffix("}")
    assert theirs.get(key, words) == words
    assert "envvar" not in word or utils.create_sweep_command([word]) == words


def test_an_unknown_macro_is_named():
    with pytest.raises(ValueError, match=r"there is no \$\{argz\}: there are \$\{program\}, \$\{env\}"):
        expand(["${argz}"], PARAMS, Path("x"))


def test_which_program_is_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("print(1)\n")
    assert command_of(None, None) is None
    assert command_of("train_sweep.py", ["${env}", "python", "${program}", "${args}"]) is None
    assert command_of("own.py", None) == ["${env}", "${interpreter}", "own.py", "${args}"]
    assert command_of(None, ["make", "${args_no_hyphens}"]) == ["make", "${args_no_hyphens}"]
    (tmp_path / "train_sweep.py").write_text("from roxxel_dist.sweep.train_sweep import main\n")
    assert command_of("train_sweep.py", None) is None
    (tmp_path / "train_sweep.py").write_text("import torch\n")
    assert command_of("train_sweep.py", None) == ["${env}", "${interpreter}", "train_sweep.py", "${args}"]
    with pytest.raises(ValueError, match=r"program: gone\.py is not there"):
        command_of("gone.py", None)
    monkeypatch.chdir("/")  # a study is taken up again from elsewhere
    assert command_of("own.py", None, tmp_path) == ["${env}", "${interpreter}", "own.py", "${args}"]


def test_the_objective_is_what_it_logs(tmp_path):
    asked = wandb_task(tmp_path, "4", "nested", "end", "${args}", metric="score.val")
    _, reports, last = split(run(asked))
    assert reports == [(0, 2.25), (1, 1.25), (2, 0.25), (3, 1.25)]
    assert last["result"]["value"] == 0.25
    assert (last["result"]["more"]["steps"], last["result"]["more"]["train_loss"]) == (3, 0.25)
    reader = WandbTail(tmp_path / "study" / "trials" / "0", "only", tmp_path)
    assert reader.read() == []
    assert reader.read(last=True) == [(3, 7.5)]
    assert {"only", "args", "score.val"} <= reader.names
    # Run again, it is known to have ended.
    pid, again, result = split(run(asked))
    assert (pid, again, result["result"]["value"]) == (None, reports, 0.25)
    # What it did not log is named; a value that is no number fails it.
    *reports, last = run({**asked, "metric": "val_loss"})
    assert reports == []
    assert "never reported 'val_loss': it logged " in last["fail"]["reason"]
    assert "train_loss" in last["fail"]["reason"]
    *_, last = run({**asked, "metric": "bad"})
    assert last["fail"]["kind"] == "nan"


@pytest.mark.long  # test_outcome.py has its last words
def test_one_that_raises_fails_with_its_last_line(tmp_path):
    _, reports, last = split(run(wandb_task(tmp_path, "2", "val_loss", "raise")))
    assert len(reports) == 2
    assert (last["fail"]["kind"], last["fail"]["reason"]) == ("error", "RuntimeError: a bad day")


def test_its_time_ends_it_and_what_it_had_logged_counts(tmp_path, monkeypatch):
    """The client writes every 15 s."""

    def clock():  # its time is over once it has logged, however long this machine took for it
        return time.monotonic() + (1000 if (tmp_path / "logged").exists() else 0)

    monkeypatch.setattr(trial_module, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    _, reports, last = split(run(wandb_task(tmp_path, "3", "val_loss", "wait", max_time_s=900)))
    assert len(reports) == 3
    assert last["result"] == {"value": 0.25, "stopped": "time", "more": last["result"]["more"]}


def test_records_longer_than_a_block_are_put_together(tmp_path):
    """As the client writes them: pieces in blocks, and an end that is not there yet."""
    import wandb

    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, x_disable_stats=True)) as made:
        for step in range(3):
            made.log({"text": "x" * (2 * BLOCK), "val_loss": step})
    wandb.teardown()  # until then the client may still write
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    assert len(data) > 3 * BLOCK
    whole = [(step, row["val_loss"]) for step, row in WandbFile(path).rows()]
    assert whole == [(0, 0), (1, 1), (2, 2)]
    grown, found = tmp_path / "grown.wandb", []
    grown.write_bytes(b"")
    reader = WandbFile(grown)
    for end in range(0, len(data) + 5000, 5000):
        grown.write_bytes(data[:end])
        found += [(step, row["val_loss"]) for step, row in reader.rows()]
    assert found == whole


def test_zeros_in_a_file_of_the_client_are_waited_for(tmp_path):
    """A file system may show that a file has grown before it shows what is in it."""
    path = tmp_path / "run-a.wandb"
    head, record = b":W&B" + bytes(3), PIECE.pack(0, 3, 1) + b"abc"
    path.write_bytes(head + record + bytes(40))
    reader = WandbFile(path)
    assert list(reader._records()) == [b"abc"]
    path.write_bytes(head + record + record + bytes(30))
    assert list(reader._records()) == [b"abc"]
    path.write_bytes(head + record + record + PIECE.pack(0, 3, 9) + b"abc")
    with pytest.raises(ValueError, match="damaged at byte 27"):
        list(reader._records())
