"""`batch_size` is the rows of the global batch, in a config of today and in a run or a study of an earlier version."""

import json

import pytest
import yaml
from commands import run as command

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main
from roxxel_dist.curriculum.segments import check_batches
from roxxel_dist.run.curriculum import build_curriculum
from roxxel_dist.settings.config import RECORD, load_yaml
from roxxel_dist.settings.global_batch import MEANING, predates, with_global_batch

PHASES = [{"steps": 2, "batch_size": 6, "seq_len": 17}]
SMALL = {
    "dim": 16, "num_blocks": 1, "n_heads": 2, "max_context": 16, "batch_size": 8, "grad_accum": 2, "max_steps": 6,
    "eval_iters": 1, "log_every": 1, "checkpoint_every": 3, "n_devices": 1, "tokenizer_type": "byte",
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    return path


def as_before(run):
    """Rewrite the config of a run as an earlier version wrote it."""
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["batch_size"] //= saved["grad_accum"]
    assert saved[RECORD].pop(MEANING) == "global batch"
    (run / "config.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))
    return saved["batch_size"]


def losses(run):
    return [json.loads(line)["train_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("fields", "rows", "divides"),
    [
        ({"batch_size": 8, "grad_accum": 2}, 8, True),
        ({"batch_size": 8, "grad_accum": 1}, 8, True),
        ({"batch_size": 2, "grad_accum": 4}, 2, True),  # fewer rows than micro-batches: single rows, as in a phase
        ({"batch_size": 8, "grad_accum": 3}, 8, False),
        ({"batch_size": 5, "grad_accum": 3, "phases": PHASES}, 6, True),
        ({"grad_accum": 4, "phases": PHASES}, 6, False),
    ],
)
def test_grad_accum_divides_the_batch_with_and_without_phases(corpus, fields, rows, divides):
    curriculum, _ = build_curriculum(Config(max_context=16, **fields), corpus)
    assert [shape.batch_size for shape in curriculum.shapes] == [rows]
    if divides:
        check_batches(curriculum.shapes, fields["grad_accum"])
        return
    with pytest.raises(ValueError, match=rf"batch_size is {rows}, which is not a multiple of grad_accum"):
        check_batches(curriculum.shapes, fields["grad_accum"])


def resumed(*changes):
    return {"resumes": [{"step": 3 * i, "changed_from": change} for i, change in enumerate(changes, 1)]}


@pytest.mark.parametrize(
    ("fields", "record", "rows", "changes"),
    [
        ({"batch_size": 4, "grad_accum": 2}, {}, 8, []),
        ({"batch_size": 4, "grad_accum": 1}, {}, 4, []),
        ({"batch_size": 4}, {}, 4, []),
        ({"batch_size": 4, "grad_accum": 2, "phases": PHASES}, {}, 4, []),
        ({"batch_size": 4, "grad_accum": 2}, {MEANING: "global batch"}, 4, []),
        ({"batch_size": 4, "grad_accum": 2}, resumed({"lr": 1.0}), 8, [{"lr": 1.0}]),
        ({"batch_size": 4, "grad_accum": 2}, resumed({"batch_size": 2}, {}), 8, [{"batch_size": 4}, {}]),
        (
            {"batch_size": 4, "grad_accum": 4},
            resumed({"grad_accum": 1}, {"grad_accum": 2}),
            16,
            [{"grad_accum": 1, "batch_size": 4}, {"grad_accum": 2, "batch_size": 8}],
        ),
        ({"batch_size": 4, "grad_accum": 2}, resumed({"batch_size": 8, "grad_accum": 1}), 8, [{"grad_accum": 1}]),
    ],
)
def test_a_config_that_an_earlier_version_saved_is_read_as_it_trained(fields, record, rows, changes):
    found, kept = with_global_batch(fields, record)
    assert found == {**fields, "batch_size": rows}
    assert [resume["changed_from"] for resume in kept.get("resumes", [])] == changes
    assert predates(kept) == (MEANING not in record)


@pytest.mark.long
def test_a_run_of_an_earlier_version_goes_on_with_the_same_batches(text, tmp_path):
    whole = Experiment(Config(**SMALL)).fit(text, tmp_path / "whole")
    note = "an earlier version trained on 8 x 2 rows in a step: for that, use batch_size 16"
    assert note in (whole / "logs" / "rank-0.log").read_text()
    before = Experiment(Config(**SMALL | {"max_steps": 3})).fit(text, tmp_path / "before")
    assert as_before(before) == 4
    with pytest.raises(ValueError, match=r"batch_size x grad_accum = 8 rows in a step: .* so use 8"):
        Experiment(Config(**SMALL | {"batch_size": 4})).fit(text, before, resume=True)
    done = command("train", "--run_dir", before, "--resume", "--max_steps", 6, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert note not in done.stdout + done.stderr
    assert losses(before) == losses(whole)
    assert load_yaml(before / "config.yaml")["batch_size"] == 8
    assert load_yaml(before / "config.yaml")[RECORD][MEANING] == "global batch"


@pytest.mark.parametrize(
    ("searched", "message"),
    [
        ("batch_size: {values: [4, 8]}", "searches batch_size, and an earlier version began it"),
        ("lr: {values: [1, 2]}", ""),
    ],
)
def test_a_study_of_an_earlier_version_is_not_continued_with_other_batches(
    tmp_path, monkeypatch, capsys, searched, message
):
    from roxxel_dist.sweep.study.folder import StudyDir
    from roxxel_dist.sweep.study.journal import Journal

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words\n" * 1000)
    (tmp_path / "sweep.yaml").write_text(f"parameters: {{{searched}}}")
    study = StudyDir(tmp_path / "st")
    study.create("sweep.yaml", None, Config(tokenizer_type="byte", grad_accum=2), {"data_path": "text.txt"})
    with Journal(study.path, print) as journal:
        journal.append({"event": "study", "metric": "val_loss", "goal": "minimize", "method": "bayes", "seed": 1})
        journal.append({"event": "ask", "trial": 0, "params": {searched.partition(":")[0]: 4}, "point": [0.0]})
    words = ["sweep", "--study", "st", "--count", "2", "--dry_run"]
    assert main(words) == 0
    file = study.path / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    del saved[RECORD][MEANING]
    file.write_text(yaml.safe_dump(saved))
    capsys.readouterr()
    assert main(words) == (2 if message else 0)
    assert message in capsys.readouterr().err
