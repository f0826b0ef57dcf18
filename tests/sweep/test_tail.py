"""The value of a trial is that of its own W&B run on rank 0, wherever its program lets the client put it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from trials import split, task

from roxxel_dist.sweep.trial.process import FLUSH_ENV, client_environment
from roxxel_dist.sweep.trial.tail import WandbTail
from roxxel_dist.sweep.trial.trial import run

LOG = "run.log({'loss': float(run.config.lr)}); run.finish()"
CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "import wandb; run = wandb.init(); {LOG}"], check=True)
"""
BY_RANK = "[10.0, 1.0][int(os.environ['ROXXEL_PROCESS_ID'])]"
TWICE = "with wandb.init() as first: first.log({'x': 1.0})\nrun = wandb.init(); LOG"
IN_PIECES = """
run = wandb.init(id='a'); run.log({'loss': 9.0}); run.finish()
run = wandb.init(id='a', resume='allow'); run.log({'loss': 3.0}, step=1); run.finish()
"""
FOUND = {
    "its folder": "run = wandb.init(); LOG",
    "the working folder": "run = wandb.init(dir='.'); LOG",
    "a folder below it, made by the program": "os.mkdir('logs'); run = wandb.init(dir='logs'); LOG",
    "a hidden folder": "os.mkdir('.wandb'); run = wandb.init(dir='.'); LOG",
    "a group and a name": "run = wandb.init(dir='.', group='mine', job_type='x', name='y', id='mine0'); LOG",
    "a config of its own": "run = wandb.init(dir='.', config={'_roxxel': 1, 'depth': 2}); LOG",
    "a child process": CHILD,
    "another run that logs something else": TWICE,
    "one run in two pieces": IN_PIECES,
    "only its summary": "run = wandb.init(dir='.'); run.summary['loss'] = run.config.lr; run.finish()",
    "the parameters alone in its config": "run = wandb.init(); assert dict(run.config) == {'lr': 3}\nLOG",
}
FORKED = """
def child():
    run = wandb.init(dir='.'); run.log({'loss': 1.0})
import multiprocessing
process = multiprocessing.get_context('fork').Process(target=child); process.start(); process.join()
"""
AT_ONCE = """
run, other = wandb.init(id='a'), wandb.init(id='b', reinit='create_new')
other.log({'loss': 1.0}); LOG; other.finish()
"""
NO_RUN = r"no W&B run of it was found in .*: call wandb\.init without `dir` and without `mode`"
SEVERAL = r"2 W&B runs of the trial logged 'loss' \(\w+, \w+\), and a trial has the value of one: log 'loss' in one run"
NOT_FOUND = {
    "no run": ("print('done')", NO_RUN),
    "a run that is off": ("run = wandb.init(mode='disabled'); LOG", NO_RUN),
    "a child that does not finish it": (
        FORKED,
        r"wrote nothing there: call finish\(\) on the run before its process ends",
    ),
    "a folder far away": ("os.makedirs('a/b/c'); run = wandb.init(dir='a/b/c'); LOG", NO_RUN),
    "another name": ("run = wandb.init(dir='.'); run.log({'score': 1.0}); run.finish()", r"it logged score; name one"),
    "two runs in turn": ("run = wandb.init(id='a'); LOG\nrun = wandb.init(id='b', dir='.'); LOG", SEVERAL),
    "two runs at once": (AT_ONCE, SEVERAL),
    "a run of a child beside its own": (f"run = wandb.init(id='a'); LOG\n{CHILD}", SEVERAL),
}
RANK = "os.environ['ROXXEL_PROCESS_ID']"
RANKS = {
    "all log into their folder": (f"DIR, VALUE = None, {BY_RANK}", 10.0),
    "all log into the working folder, rank 1 first": (
        f"DIR, VALUE = '.', {BY_RANK}; time.sleep(2 * ({RANK} == '0'))",
        10.0,
    ),
    "only rank 1 logs": (
        f"DIR, VALUE = None, {BY_RANK}; {RANK} == '0' and sys.exit(0)",
        "only rank 1 called wandb.init",
    ),
}


def asked(tmp_path, text, **more):
    """The task of a trial whose program is a file, and which runs in a folder of its own."""
    clean = {name: "" for name in environment() if name.startswith("WANDB_")}
    home = {"HOME": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_SILENT": "true", **clean}
    (tmp_path / "here").mkdir(exist_ok=True)
    (tmp_path / "here" / "p.py").write_text(f"import os, sys, time, wandb\n{text.replace('LOG', LOG)}\n")
    return task(
        tmp_path / "study",
        program=[sys.executable, "p.py"],
        environment=home,
        params={"lr": 3},
        metric="loss",
        directory=str(tmp_path / "here"),
        **more,
    )


def cases_of(table, often):
    """The cases of a table. Each is a real client, so those that are not in `often` are for `make test-cluster`."""
    marked = {name: () if name in often else pytest.mark.cluster for name in table}
    values = {name: case if isinstance(case, tuple) else (case,) for name, case in table.items()}
    return [pytest.param(*values[name], id=name, marks=marked[name]) for name in table]


@pytest.mark.parametrize("text", cases_of(FOUND, {"a child process"}))
def test_the_value_is_found_where_the_run_is(tmp_path, text):
    *_, last = split(run(asked(tmp_path, text)))
    assert last["result"]["value"] == 3.0, last


@pytest.mark.parametrize(("text", "reason"), cases_of(NOT_FOUND, ()))
def test_what_to_change_is_said_where_there_is_no_one_value(tmp_path, text, reason):
    *_, last = run(asked(tmp_path, text))
    assert re.search(reason, last["fail"]["reason"]), last


@pytest.mark.parametrize(("begin", "expected"), cases_of(RANKS, ()))
def test_the_value_is_that_of_rank_0(tmp_path, begin, expected):
    text = f"{begin}\nrun = wandb.init(dir=DIR); run.log({{'loss': VALUE}}); run.finish()"
    *_, last = split(run(asked(tmp_path, text, procs_per_host=2)))
    if isinstance(expected, float):
        assert last["result"]["value"] == expected, last
    else:
        assert expected in last["fail"]["reason"], last


@pytest.mark.cluster
def test_runs_of_others_in_the_same_folder_are_no_values(tmp_path):
    """An old run of the program, and trials of another study of the same name, which was deleted."""
    text = "run = wandb.init(dir='.'); LOG"
    other = asked(tmp_path, text)
    assert split(run({**other, "params": {"lr": 1}}))[2]["result"]["value"] == 1.0
    by_hand = {**os.environ, **other["environment"], "WANDB_MODE": "offline"}
    by_hand = {name: value for name, value in by_hand.items() if value}
    words = "import wandb; run = wandb.init(dir='.', config={'lr': 2}); run.log({'loss': 0.5}, step=9); run.finish()"
    subprocess.run([sys.executable, "-c", words], check=True, cwd=tmp_path / "here", env=by_hand)
    (tmp_path / "study").rename(tmp_path / "deleted")
    _, reports, last = split(run(asked(tmp_path, text)))
    assert (reports, last["result"]["value"]) == ([(0, 3.0)], 3.0)


def test_an_attempt_goes_on_behind_the_one_before_it_and_its_study_may_be_moved(tmp_path):
    first = "run = wandb.init(dir='.'); run.log({'loss': 1.0}); run.finish(); os.kill(os.getpid(), 9)"
    *_, last = run(asked(tmp_path, first))
    assert "SIGKILL" in last["lost"]["reason"]
    (tmp_path / "study").rename(tmp_path / "moved")
    second = "run = wandb.init(dir='.'); run.log({'loss': 5.0}); run.log({'loss': 7.0}); run.finish()"
    again = asked(tmp_path, second, attempt=1)
    again |= {"run_dir": str(tmp_path / "moved" / "trials" / "0"), "log": str(tmp_path / "moved" / "0.log")}
    _, reports, last = split(run(again))
    assert (reports, last["result"]["value"]) == ([(0, 1.0), (1, 7.0)], 1.0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.25", "it logged 'loss' as '0.25', a text: log a number"),
        (True, "it logged 'loss' as True, a truth value: log a number"),
        ([0.5], r"it logged 'loss' as \[0.5\], a list: log a number"),
        ({"a": 1.0}, "a mapping, whose numbers have names with points: log a number"),
    ],
)
def test_a_metric_that_is_no_number_is_called_what_it_is(tmp_path, value, said):
    tail = WandbTail(tmp_path, "loss", tmp_path)
    assert tail._value_in({"loss": value, "other": 1.0}) is None
    assert re.search(said, tail.missing_message())
    for huge in (10**400, float("inf"), "NaN"):
        assert str(tail._value_in({"loss": huge})) == "nan"


def test_the_client_writes_its_file_soon(monkeypatch):
    from wandb import Settings

    monkeypatch.delenv(FLUSH_ENV, raising=False)
    settings = Settings()
    settings.update_from_env_vars(client_environment(Path("kept")))
    assert settings.x_transaction_log_flush_interval == 1.0
    monkeypatch.setenv(FLUSH_ENV, "5")
    assert client_environment(Path("kept"))[FLUSH_ENV] == "5"
