"""`train --anneal`: decay branches of a run, one alone, and several as the trials of a study."""

import json
import re
import shutil

import pytest
import yaml
from commands import run
from corpora import write_corpus
from tables import one_test

from roxxel_dist import Config, Experiment
from roxxel_dist.checkpoint.metadata import CheckpointRef
from roxxel_dist.cli import main
from roxxel_dist.cli.arguments import parse_train
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.past import branches_of, make_decay_branch
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.sweep.study.folder import read_study

SMALL = {
    "model": "runs:build", "dim": 16, "max_context": 16, "lr": 1e-2, "log_every": 1, "eval_every": 2,
    "eval_iters": 1, "checkpoint_every": 2, "memory_checkpoint_every": 0, "max_to_keep": None, "n_devices": 1,
    "wandb": "off", "lr_schedule": "constant", "warmup_steps": 3, "max_steps": 8,
    "phases": [{"steps": 5, "batch_size": 8, "seq_len": 17}, {"steps": 7, "batch_size": 4, "seq_len": 9}],
}  # fmt: skip
SHAPES = [{**phase, "blend": "step", "packing": "contiguous", "weights": {"self": 1.0}} for phase in SMALL["phases"]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, and a run `trunk` of 8 of its 12 steps at a constant rate."""
    folder = tmp_path_factory.mktemp("anneal")
    Experiment(Config(**SMALL)).fit(write_corpus(folder), folder / "trunk")
    return folder


@pytest.fixture
def work(place, tmp_path, monkeypatch):
    """A working directory beside it."""
    (tmp_path / "trunk").symlink_to(place / "trunk")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(run):
    return {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.parametrize(
    ("step", "decay", "lengths"),
    [
        pytest.param(4, 1, [5], id="to the end of a phase"),
        pytest.param(4, 3, [5, 2], id="into the next phase"),
        pytest.param(8, 2, [5, 5], id="within the last phase"),
        pytest.param(8, 50, [5, 53], id="longer than the run"),
    ],
)
def test_a_branch_has_the_phases_of_the_run(work, step, decay, lengths):
    config = Config(**SMALL | {"lr_schedule": "wsd", "decay_steps": decay})
    make_decay_branch(config, CheckpointRef.parse(f"trunk@{step}"))
    assert config.phases == [{**SHAPES[i], "steps": steps} for i, steps in enumerate(lengths)]
    assert (config.lr_schedule, config.max_steps, config.warmup_steps) == ("wsd", None, 3)
    make_decay_branch(config, CheckpointRef.parse(f"trunk@{step}"))  # as a resume of it does
    assert sum(phase["steps"] for phase in config.phases) == step + decay


def test_the_rate_falls_and_the_branch_ends(work):
    words = ["train", "--anneal", "trunk@4", "--decay_steps", "4", "--run_dir", "end"]
    assert main(words) == 0
    found, trunk = rows(work / "end"), rows(work / "trunk")
    assert sorted(found) == [5, 6, 7, 8]
    rates = [found[step]["lr"] for step in sorted(found)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == trunk[5]["lr"] == pytest.approx(1e-2)
    assert rates[-1] < 2e-3
    assert [found[step]["tokens"] for step in found] == [trunk[step]["tokens"] for step in found]
    record = load_yaml(work / "end" / "config.yaml")["record"]
    assert record["forked_from"]["step"] == 4
    assert main([*words, "--resume"]) == 0  # it is finished
    assert sorted(rows(work / "end")) == [5, 6, 7, 8]


REFUSED = {
    "trunk@4": "anneal is trunk@4, and decay_steps is not given: write how many steps the rate falls for",
    "trunk --decay_steps 4": "--anneal is trunk: name kept checkpoints, as RUN@1000 or RUN@1000,2000",
    "trunk@5 --decay_steps 4": "anneal is trunk@5: trunk has no checkpoint of step 5 (a run keeps more with keep_every",
    "trunk@4,5 --decay_steps 4": "trunk has no checkpoint of step 5; kept are 1, 2, 4, 6, 8",
    "trunk@2 --decay_steps 4": "lr_schedule constant) is not at its peak after step 2. Name a step after",
    "trunk@2:6 --decay_steps 4": "anneal is trunk@2: the rate of that run (lr_schedule constant) is not at its peak",
    "nowhere@2 --decay_steps 4": "anneal is nowhere@2: nowhere has no checkpoint of step 2",
    "trunk@4 --decay_steps 4 --max_steps 9": "begins a fork that ends after --decay_steps: leave --max_steps",
    "trunk@4 --decay_steps 4 --fork trunk@4": "leave --fork out",
    "trunk@4 --decay_steps 4 --lr_schedule linear": "--lr_schedule is linear, and the rate of --anneal falls as wsd",
    "trunk@4 --decay_steps 0": "decay_steps is 0: it must be at least 1",
    "trunk@4,6 --decay_steps 4 --wandb online": "the branches of --anneal write offline: use --wandb offline",
}


@one_test("words", REFUSED)
def test_what_is_no_branch(work, words, capsys):
    assert main(["train", "--run_dir", "end", "--anneal", *words.split()]) == 2
    assert REFUSED[words] in capsys.readouterr().err
    assert sorted(path.name for path in work.iterdir()) == ["trunk"]


def test_a_branch_has_no_phases_of_its_own(work):
    config = Config(**SMALL | {"lr_schedule": "wsd", "decay_steps": 2, "phases": [{**SMALL["phases"][0], "steps": 9}]})
    with pytest.raises(UserError, match="phases is given, and a branch from trunk@4 goes on with those of trunk"):
        make_decay_branch(config, CheckpointRef.parse("trunk@4"))


@pytest.fixture
def amended(work):
    """A run whose lr and lr_scaling were changed after the checkpoints of the trunk."""
    (work / "amended").mkdir()
    (work / "amended" / "checkpoints").symlink_to(work / "trunk" / "checkpoints")
    config = load_yaml(work / "trunk" / "config.yaml")
    config["lr"], config["lr_scaling"] = 0.5, "linear"
    (work / "amended" / "config.yaml").write_text(yaml.safe_dump(config))
    return work


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("", (1e-2, "none"), id="that of the checkpoint"),
        pytest.param("--lr 0.02", (0.02, "linear"), id="as given"),
        pytest.param("--lr 0.5", (0.5, "linear"), id="given as it is now"),
        pytest.param("--lr_scaling sqrt", (0.5, "sqrt"), id="another scaling"),
        pytest.param("--run_dir end --resume", (0.03, "none"), id="of a branch that is resumed"),
    ],
)
def test_a_branch_begins_at_the_rate_of_its_checkpoint(amended, words, expected):
    branch = ["--anneal", "amended@4", "--decay_steps", "4"]
    if "--resume" in words:
        (amended / "end" / "checkpoints").mkdir(parents=True)
        config = parse_train([*branch, "--lr", "0.03", "--lr_scaling", "none"])[1]
        make_decay_branch(config, CheckpointRef.parse("amended@4"))
        config.save_yaml(amended / "end" / "config.yaml")
    config = parse_train([*branch, *words.split()])[1]
    make_decay_branch(config, CheckpointRef.parse("amended@4"))
    assert (config.lr, config.lr_scaling) == expected


def test_several_branches_have_one_rate(amended):
    config = parse_train(["--anneal", "amended@4,6", "--decay_steps", "4"])[1]
    assert len(branches_of(config, "amended@4,6")) == 2
    assert (config.lr, config.lr_scaling) == (1e-2, "none")
    shutil.copytree(amended / "trunk" / "checkpoints", amended / "changed" / "checkpoints", symlinks=True)
    shutil.copy(amended / "amended" / "config.yaml", amended / "changed")
    meta = next((amended / "changed" / "checkpoints" / "6").rglob("meta*.json"))
    meta.write_text(re.sub(r'"lr": ?0\.01\b', '"lr": 0.5', meta.read_text()))
    config = parse_train(["--anneal", "changed@4,6", "--decay_steps", "4"])[1]
    with pytest.raises(UserError, match="changed@4,6: lr was changed between these steps"):
        branches_of(config, "changed@4,6")


@pytest.mark.long
def test_a_rate_that_decays_already_does_not_fall_again(place, tmp_path):
    fields = {**SMALL, "lr_schedule": "wsd", "decay_steps": 5, "max_steps": None}
    other = Experiment(Config(**fields)).fit(str(place / "corpus_*.rox"), tmp_path / "run")
    make_decay_branch(Config(**fields | {"decay_steps": 2}), CheckpointRef(other, 6))
    with pytest.raises(UserError, match="lr_schedule wsd\\) is not at its peak after step 8"):
        make_decay_branch(Config(**fields | {"decay_steps": 2}), CheckpointRef(other, 8))


def test_a_study_is_not_launched_and_has_a_folder(work, monkeypatch, capsys):
    assert main(["train", "--anneal", "trunk@4,6", "--decay_steps", "2"]) == 2
    assert "--anneal trunk@4,6 is a study: name its folder with --run_dir" in capsys.readouterr().err
    monkeypatch.setenv("ROXXEL_RUN_ID", "job")
    assert main(["train", "--anneal", "trunk@4,6", "--decay_steps", "2", "--run_dir", "ends"]) == 2
    assert "is a study, which starts its own processes: leave the launcher out" in capsys.readouterr().err


@pytest.mark.timeout(600)
@pytest.mark.cluster
def test_several_branches_are_the_trials_of_a_study(work, capsys):
    """With a Ray of their own. The same command again does nothing, and one branch alone has the same bits."""
    words = ["train", "--anneal", "trunk@4,6", "--decay_steps", "2", "--run_dir", "ends"]
    done = run(*words, cwd=work)
    assert done.returncode == 0, done.stderr
    assert "the run of the best branch: ends/trials/" in done.stdout
    trials = read_study("ends").history.trials
    assert [trial.params["anneal"].rpartition("/")[2] for trial in trials.values()] == ["trunk@4", "trunk@6"]
    assert sorted(rows(work / "ends" / "trials" / "0")) == [5, 6]
    assert sorted(rows(work / "ends" / "trials" / "1")) == [7, 8]
    assert run(*words, cwd=work).returncode == 0
    assert [trial.attempts for trial in read_study("ends").history.trials.values()] == [1, 1]
    assert run("train", "--anneal", "trunk@6", "--decay_steps", "2", "--run_dir", "alone", cwd=work).returncode == 0
    assert rows(work / "alone")[8]["val_loss"] == rows(work / "ends" / "trials" / "1")[8]["val_loss"]
    capsys.readouterr()
    assert main(["report", "ends", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["trials"]) == 2
