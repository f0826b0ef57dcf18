"""`roxxel-dist compare`: up to which step two runs are equal; and the running digest through what happens to a run."""

import json
import shutil

import pytest

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main

pytestmark = pytest.mark.xdist_group("audit")  # one run for all of them


def compare(capsys, *runs):
    capsys.readouterr()
    code = main(["compare", *map(str, runs), "--json"])
    return code, json.loads(capsys.readouterr().out)


def digests(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["digest"] for row in rows}


@pytest.fixture(scope="module")
def cut(trained):
    """A run that was ended after 12 steps."""
    return trained(model="runs:build", max_steps=12)


def test_a_run_that_was_ended_and_resumed_has_the_digests_of_one_that_was_not(cut, clean, trained, tmp_path, capsys):
    assert compare(capsys, cut, clean)[0] == 0
    resumed = shutil.copytree(cut, tmp_path / "resumed")
    trained(resumed, resume=True)
    assert digests(resumed) == digests(clean)
    code, found = compare(capsys, resumed, clean)
    assert (code, found["equal_to"], found["differs_at"], found["config"]) == (0, 22, None, [])
    assert main(["audit", str(resumed), "--steps", "7:18"]) == 0


def test_runs_that_part_are_told_apart_at_the_first_logged_step(cut, clean, trained, tmp_path, capsys):
    other = shutil.copytree(cut, tmp_path / "other")
    trained(other, resume=True, lr=0.02)
    code, found = compare(capsys, clean, other)
    assert (code, found["equal_to"], found["differs_at"]) == (1, 12, 16)
    assert any(line.startswith("digest") for line in found["row"])
    assert found["config"] == ["lr: 0.01, 0.02"]
    # It was done with two configs: each part is audited with its own.
    assert main(["audit", str(other)]) == 2
    assert "audit them separately, with steps=1:12 and steps=13:22" in capsys.readouterr().err.replace(
        "--steps ", "steps="
    )
    assert main(["audit", str(other), "--steps", "7:12"]) == 0
    assert main(["audit", str(other), "--steps", "13:18"]) == 0


@pytest.mark.long
def test_forks_carry_the_chain_on(cut, clean, tokens, tmp_path):
    fork, without = tmp_path / "fork", tmp_path / "without"
    Experiment(Config(max_steps=None)).fit(tokens, fork, fork=f"{cut}@6")
    assert digests(fork) == {step: digest for step, digest in digests(clean).items() if step > 6}
    Experiment(Config(max_steps=None)).fit(run_dir=without, fork=f"{clean}@6", skip_steps=(9, 10))
    same = {step for step, digest in digests(clean).items() if digests(without).get(step) == digest}
    assert same == {8}
    assert main(["audit", str(fork)]) == 0
    assert main(["audit", str(without)]) == 0


@pytest.mark.long
def test_a_checkpoint_without_a_digest_begins_the_chain_anew_and_the_audit_says_so(cut, tmp_path, capsys):
    from roxxel_dist.audit.record import RunRecord
    from roxxel_dist.checkpoint.store import CheckpointStore

    run = shutil.copytree(cut, tmp_path / "run")
    store = CheckpointStore(run / "checkpoints")
    metadata = store.meta(12)
    assert metadata.pop("digest") == RunRecord.read(run).rows[12]["digest"]
    store.delete_later(12, metadata)
    store.close()
    Experiment(Config()).fit(run_dir=run, resume=True)
    assert "the checkpoint of step 12 has no running digest: a new one begins" in (run / "logs/rank-0.log").read_text()
    capsys.readouterr()
    assert main(["audit", str(run), "--steps", "13:22"]) == 0
    assert "no chain of digests covers them" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(clean, tmp_path, capsys):
    run = shutil.copytree(clean, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**row, "digest": None}) + "\n" for row in lines[:0]))
    config = (run / "config.yaml").read_text()

    def refused(*words):
        capsys.readouterr()
        assert main(list(map(str, words))) == 2
        return capsys.readouterr().err

    assert "has no rows yet" in refused("audit", run)
    assert "cannot be compared" in refused("compare", clean, run)
    shutil.copy(clean / "metrics.jsonl", run / "metrics.jsonl")
    assert "steps is 3:99" in refused("audit", run, "--steps", "3:99")
    assert "write S:S" in refused("audit", run, "--steps", "3:4", "--dump", tmp_path / "dump")
    assert "leave it out" in refused("audit", run, "--devices", "3")
    (run / "config.yaml").write_text(config.replace("jaxlib: 0.", "jaxlib: 9."))
    assert "jaxlib: '9." in refused("audit", run)
