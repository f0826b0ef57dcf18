"""`sweep --confirm`: the best mixture of a study and its baselines, for longer; killed, and taken up."""

import json
import subprocess

import pytest
from commands import command, environment, run, wait_for
from made_mixtures import PHASES, made_mixtures
from sweep_desk import SMALL, text_sets

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.report.confirmation import confirmation
from roxxel_dist.sweep.study.confirm import Expected
from roxxel_dist.sweep.study.folder import read_study

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
WORDS = ("sweep", "--study", "study", "--confirm", "2", "--workers", "2")


@pytest.fixture
def desk(tmp_path):
    """Two data sets in shards, and a study over their shares whose journal is made up: trials take a while."""
    sets = text_sets(tmp_path)
    base = Config(**{**SMALL, "phases": PHASES}, datasets=sets, validation=sets, eval_every=40)
    made_mixtures(tmp_path, 2, 12, weighted=False, base=base).rename(tmp_path / "study")
    return tmp_path


def ended(study):
    lines = (study / "journal.jsonl").read_text().splitlines() if (study / "journal.jsonl").exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "result"]


def test_a_confirmation_that_is_killed_goes_on(desk):
    study = desk / "study"
    with subprocess.Popen(command(*WORDS), cwd=desk, env=environment(), stdout=subprocess.DEVNULL) as first:
        wait_for(lambda: len(ended(study / "confirm")) >= 2, what="two results")
        before = Expected.read(study)
        first.kill()
    told = run(*WORDS, cwd=desk)
    assert told.returncode == 0, told.stderr
    read = read_study(study)
    found = confirmation(read)
    assert found is not None
    assert found.expected == before
    assert "confirmation of trial " in told.stdout
    assert {name: len(values) for name, values in found.values.items()} == dict.fromkeys(found.expected.phases, 3)
    assert len(ended(study / "confirm")) == 3 * len(found.expected.phases)  # none was trained twice
    for one in found.gains:
        assert one.is_inside is not None
        assert one.noise is not None
        verdict = "inside" if one.is_inside else "OUTSIDE"
        assert f"best less {one.against}: predicted" in told.stdout
        assert f"{verdict} the interval" in told.stdout
    steps = {trial.step for trial in read_study(study / "confirm").history.trials.values()}
    assert steps == {80}
    other = run("sweep", "--study", "study", "--confirm", "3", cwd=desk)
    assert other.returncode == 2
    assert "was begun with --confirm 2" in other.stderr
    shown = run("report", "study", "--json", cwd=desk)
    assert json.loads(shown.stdout)["mixture"]["confirm"]["factor"] == 2
    assert json.loads(shown.stdout)["mixture"]["passes"].keys() == {"self", "code"}
