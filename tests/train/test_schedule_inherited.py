"""What a run that goes on keeps of its schedule, whatever its phases are now: a table, and a plain formula."""

import contextlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from corpora import write_corpus

from roxxel_dist import Config, Curriculum, Phase, Roxxel
from roxxel_dist.checkpoint.metadata import RESUME_LATEST, CheckpointMetadata, CheckpointRef, MetaFile, ResumeSpec
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.past import make_decay_branch
from roxxel_dist.settings.training import LoopOptions, OptimizerConfig
from roxxel_dist.train import resume
from roxxel_dist.train.step.optimizer import NamedOptimizer

LR, STEP = 0.02, 8
TRUNK = [(8, 2, 17), (8, 4, 17), (8, 8, 17)]
"""(steps, rows, tokens of a row): 34, 68 and 136 tokens in a batch."""
LARGER = [*TRUNK, (16, 32, 17)]
OTHER = [(8, 2, 17), (92, 4, 17)]
"""Of a fork: without the largest batch of its trunk, and with four times its steps."""
WARMUP = 1
"""A twentieth of the 24 steps of the trunk; of 100 it would be 5."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    with Roxxel(write_corpus(tmp_path_factory.mktemp("data"))) as corpus:
        yield corpus


def optimizer_of(**fields):
    return NamedOptimizer(OptimizerConfig(**{"lr": LR} | fields))


def curriculum(data, phases):
    return Curriculum(data, [Phase(*phase) for phase in phases])


def checkpoint_of(data, optimizer):
    """What the checkpoint of step 8 of the trunk says."""
    start = begin(data, optimizer, TRUNK)
    meta = replace(start.metadata, plan=start.plan.state(STEP)).to_dict()
    return CheckpointMetadata.from_dict(json.loads(json.dumps(meta)))


def store(saved):
    return SimpleNamespace(
        folder=Path("run") / "checkpoints",
        latest_step=lambda: None if saved is None else STEP,
        metadata=lambda step: saved,
        check_not_all_damaged=lambda: None,
    )


def begin(data, optimizer, phases, saved=None, *, amend=False, origin=RESUME_LATEST):
    return resume.begin(store(saved), curriculum(data, phases), optimizer, LoopOptions(), amend=amend, origin=origin)


def forked(data, optimizer, phases, saved, monkeypatch):
    @contextlib.contextmanager
    def opened(field, ref):
        yield store(saved), STEP

    monkeypatch.setattr(resume, "open_checkpoint", opened)
    origin = ResumeSpec(fork=CheckpointRef(Path("run"), STEP))
    return begin(data, optimizer, phases, origin=origin)


def branch_of(saved, folder, decay_steps):
    """The phases and the schedule of a decay branch of 6 steps."""
    checkpoint = folder / "run" / "checkpoints" / str(STEP)
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text(MetaFile({}, saved.to_dict(), None).to_json())
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump({"phases": None, "record": {"format": 1}}))
    config = Config(lr_schedule="wsd", decay_steps=decay_steps)
    make_decay_branch(config, CheckpointRef(folder / "run", STEP))
    assert config.warmup_steps is None
    return [tuple(phase[name] for name in ("steps", "batch_size", "seq_len")) for phase in config.phases]


def formula(kind, phases, scaling, reference, step, *, lr=LR, warmup=WARMUP, decay=None):
    """The rate of a step, counted from 0, written down from docs/training.md alone."""
    total, end = sum(steps for steps, *_ in phases), 0
    for steps, rows, tokens in phases:  # noqa: B007
        end += steps
        if step < end:
            break
    factor = {"none": 1.0, "linear": rows * tokens / reference, "sqrt": math.sqrt(rows * tokens / reference)}[scaling]
    if step < warmup:
        return lr * (step + 1) / (warmup + 1) * factor
    if kind == "constant":
        return lr * factor
    decay = decay or total - warmup - (int(0.4 * total) if kind == "wsd" else 0)
    left = min(1.0, (total - step) / decay)
    height = left if kind == "linear" else (1 + math.cos(math.pi * (1 - left))) / 2
    return lr * (0.99 * height + 0.01) * factor


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear"])
@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd", "linear"])
@pytest.mark.parametrize("way", ["resume", "fork", "anneal", "amend"])
def test_the_rate_of_each_step(data, tmp_path, monkeypatch, way, kind, scaling):
    """As well as the two lines that are printed: the rates are those that train."""
    optimizer = optimizer_of(lr_schedule=kind, lr_scaling=scaling)
    saved, now, decay = checkpoint_of(data, optimizer), kind, None
    match way:
        case "resume":
            phases, start = TRUNK, begin(data, optimizer, TRUNK, saved)
        case "fork":
            phases, start = OTHER, forked(data, optimizer, OTHER, saved, monkeypatch)
        case "amend":
            phases, start = LARGER, begin(data, optimizer, LARGER, saved, amend=True)
        case _:
            if kind in ("cosine", "linear"):
                with pytest.raises(UserError, match="is not at its peak after step 8"):
                    branch_of(saved, tmp_path, 6)
                return
            now, decay = "wsd", 6
            phases = branch_of(saved, tmp_path, 6)
            assert phases == [TRUNK[0], (6, *TRUNK[1][1:])]
            optimizer = optimizer_of(lr_schedule=now, lr_scaling=scaling, decay_steps=6)
            start = forked(data, optimizer, phases, saved, monkeypatch)
    assert start.step == STEP
    schedule = resume.LrSchedule.from_dict(start.metadata.schedule)
    total = start.plan.total_steps
    found = [schedule.rate(step, start.plan.shape_at(step)) for step in range(STEP, total)]
    expected = [formula(now, phases, scaling, 136, step, decay=decay) for step in range(STEP, total)]
    assert found == pytest.approx(expected, rel=1e-5)
    lines = re.findall(
        r"learning rate of step 9: (\S+) before, (\S+) now\n"
        r"learning rate of the last step: (\S+) at step 24 before, (\S+) at step (\d+) now",
        "\n".join(start.notes),
    )
    if way == "resume":
        assert lines == []
        return
    before = [formula(kind, TRUNK, scaling, 136, step) for step in (STEP, 23)]
    after = found[0], found[-1]
    want = (before[0], after[0], before[1], after[1])
    assert [tuple(map(float, line[:4])) for line in lines] == [pytest.approx(want, rel=6e-3)]
    assert int(lines[0][4]) == total
    assert "lr is the rate of" not in "\n".join(start.notes)


@pytest.mark.parametrize(
    ("fields", "reference", "line"),
    [
        ({"lr": 0.01}, 544, "lr is the rate of a batch of 136 tokens before, of a batch of 544 tokens now"),
        ({"lr_scaling": "linear"}, 544, "of a batch of 136 tokens before, of a batch of 544 tokens now"),
        ({"lr_scaling": "none"}, None, "lr is the rate of a batch of 136 tokens before, of any batch now"),
        ({"lr_schedule": "cosine"}, 136, ""),
        ({"weight_decay": 0.5}, 136, ""),
        ({"warmup_steps": 3}, 136, ""),
    ],
)
def test_lr_given_anew_is_that_of_the_largest_batch_now(data, fields, reference, line):
    saved = checkpoint_of(data, optimizer_of(lr_schedule="constant", lr_scaling="sqrt"))
    given = {"lr_schedule": "constant", "lr_scaling": "sqrt"} | fields
    start = begin(data, optimizer_of(**given), LARGER, saved, amend=True)
    assert start.metadata.schedule["settings"].get("batch_tokens") == reference
    assert start.metadata.schedule["settings"]["warmup_steps"] == fields.get("warmup_steps", WARMUP)
    assert start.metadata.schedule["settings"]["weight_decay"] == fields.get("weight_decay", 0.01)
    notes = "\n".join(start.notes)
    assert line in notes
    assert ("lr is the rate of" in notes) == bool(line)


def test_a_resume_says_what_another_lr_does(data):
    saved = checkpoint_of(data, optimizer_of(lr_schedule="constant", lr_scaling="sqrt"))
    start = begin(data, optimizer_of(lr_schedule="constant", lr_scaling="sqrt", lr=LR / 2), TRUNK, saved)
    assert "learning rate of step 9: 0.0141 before, 0.00707 now" in start.notes[-1]


def test_batch_tokens_that_a_program_gives_are_taken(data):
    fields = {"lr_schedule": "constant", "lr_scaling": "sqrt"}
    saved = checkpoint_of(data, optimizer_of(**fields))
    given = replace(optimizer_of(**fields), batch_tokens=272)
    start = begin(data, given, TRUNK, saved)
    assert start.metadata.schedule["settings"]["batch_tokens"] == 272
    assert "of a batch of 136 tokens before, of a batch of 272 tokens now" in start.notes[-1]


def test_a_warm_up_longer_than_the_phases_of_a_fork_is_explained(data, monkeypatch):
    saved = checkpoint_of(data, optimizer_of(warmup_steps=20))
    with pytest.raises(UserError, match=r"phases: they end after step 12, .*after step 20: .* or give warmup_steps"):
        forked(data, optimizer_of(), [(8, 2, 17), (4, 4, 17)], saved, monkeypatch)
    start = forked(data, optimizer_of(warmup_steps=2), [(8, 2, 17), (4, 4, 17)], saved, monkeypatch)
    assert start.metadata.schedule["settings"]["warmup_steps"] == 2


def test_a_finished_run_that_was_amended_is_still_the_same(data):
    """Its schedule is that of its checkpoint, not one that is derived from its phases again."""
    fields = {"lr_schedule": "constant", "lr_scaling": "sqrt"}
    amended = begin(data, optimizer_of(**fields), LARGER, checkpoint_of(data, optimizer_of(**fields)), amend=True)
    done = replace(amended.metadata, plan=amended.plan.state(amended.plan.total_steps))
    finished = store(done)
    finished.latest_step = lambda: amended.plan.total_steps
    options = {"amend": False, "origin": RESUME_LATEST}
    start = resume.begin(finished, curriculum(data, LARGER), optimizer_of(**fields), LoopOptions(), **options)
    assert start.is_finished(LoopOptions())
    with pytest.raises(
        UserError, match=r"is finished, and was made with another schedule \((\w+ [^,]+, now [^,]+(, )?)+\), which"
    ):
        resume.begin(finished, curriculum(data, LARGER), optimizer_of(lr=1.0, **fields), LoopOptions(), **options)
