"""`roxxel-dist audit`: a run that was done well is equal to the bit, and what flipped in one is named at its first."""

import hashlib
import json
import shutil
from collections import Counter

import numpy as np
import pytest
from flips import KINDS, Flip, audit, flipping, truth

from roxxel_dist.audit.record import RunRecord
from roxxel_dist.train.step.bad_steps import BadStep

pytestmark = pytest.mark.xdist_group("audit")  # one run for all of them


def contents(folder):
    """Every file below a folder, by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rewrite(run, change):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        change(row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_a_clean_run_is_equal_to_the_bit_and_nothing_of_it_changes(clean, capsys):
    before = contents(clean)
    assert audit(capsys, clean) == (0, "equal to the bit over 22 steps (7 rows, 5 checkpoints)")
    assert audit(capsys, clean, "--steps", "15:21") == (0, "equal to the bit over 7 steps (2 rows, 1 checkpoints)")
    code, text = audit(capsys, clean, "--every", "2", "--json")
    assert (code, json.loads(text)["equal"], json.loads(text)["steps"]) == (0, True, 1 + 6 + 4)
    assert contents(clean) == before


def test_a_checkpoint_that_the_run_deletes_meanwhile(clean, tmp_path):
    run = shutil.copytree(clean, tmp_path / "run")
    record = RunRecord.read(run)
    shutil.rmtree(run / "checkpoints" / str(record.steps[0]))
    with pytest.raises(ValueError, match=f"run has deleted its checkpoint of step {record.steps[0]} meanwhile, as it"):
        record.checkpoint(record.steps[0])
    assert record.checkpoint(record.steps[1])


def test_a_log_that_was_changed_is_named_with_its_step(clean, tmp_path, capsys):
    run = shutil.copytree(clean, tmp_path / "run")
    rewrite(run, lambda row: row.update(train_loss=row["train_loss"] + 1e-6 * (row["step"] == 12)))
    code, text = audit(capsys, run)
    assert code == 1
    assert text.startswith("step 12 differs (train_loss")
    assert "the log was changed after the step" in text
    rewrite(run, lambda row: row.update(digest="0" * 32 if row["step"] == 8 else row["digest"]))
    code, text = audit(capsys, run)
    assert code == 1
    assert text.startswith("step 8 differs (digest 0000")
    assert "its loss and its digest disagree" in text


def check(flip, trained, clean, capsys):
    """Whether the flip changed anything; the audit must say the same, and where it is seen first."""
    with flipping(flip):
        try:
            run = trained(model="runs:build")
        except BadStep:  # the loss is no number any more: the run itself has seen it
            return BadStep
    expected, (code, text) = truth(run, clean), audit(capsys, run)
    shutil.rmtree(run)
    assert code == (0 if expected is None else 1), (flip, text, expected)
    assert text.startswith(expected or "equal to the bit over 22 steps"), (flip, text, expected)
    return expected


FLIPS = [Flip(kind, step, step) for kind, step in zip(KINDS * 2, (3, 9, 16, 21, 17, 22), strict=False)]


@pytest.mark.parametrize(
    "flip",
    [
        pytest.param(flip, id=f"{flip.kind} in step {flip.step}", marks=() if not n else pytest.mark.long)
        for n, flip in enumerate(FLIPS)
    ],
)
def test_a_flipped_bit_is_found_and_named_at_the_first_that_it_changes(flip, trained, clean, capsys):
    check(flip, trained, clean, capsys)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_flips(trained, clean, capsys):
    rng = np.random.default_rng(26)
    flips = [Flip(KINDS[i % 4], int(rng.integers(1, 23)), 1000 + i) for i in range(100)]
    seen = {flip: check(flip, trained, clean, capsys) for flip in flips}
    counts = {kind: Counter() for kind in KINDS}
    for flip, expected in seen.items():
        named = "named by the audit at the first that it changes"
        what = {None: "rounded away, equal to the last digest", BadStep: "ended the run"}.get(expected, named)
        counts[flip.kind][what] += 1
    with capsys.disabled():
        print("\n" + "\n".join(f"{kind}: {dict(count)}" for kind, count in counts.items()))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_alarm_in_ten_thousand_clean_steps(trained, capsys):
    phases = [{"steps": 10_000, "batch_size": 2, "seq_len": 9}]
    run = trained(phases=phases, log_every=100, eval_every=2500, checkpoint_every=1000, n_devices=1)
    code, text = audit(capsys, run)
    with capsys.disabled():
        print(f"\n{text}")
    assert (code, text[:34]) == (0, "equal to the bit over 10,000 steps")
