"""`sweep --confirm`: the best mixture and its baselines, for longer; killed and taken up, and in a bucket."""

import json
import subprocess
from pathlib import Path

import pytest
from commands import command, environment, run, wait_for
from made_mixtures import PHASES, made_mixtures
from servers import S3Server
from sweep_desk import SMALL, text_sets

from roxxel_dist.objects.store import ObjectStore
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


def test_a_study_in_a_bucket(tmp_path):
    """Its confirmation is in the bucket too, and another machine continues it and reports it."""
    with S3Server(tmp_path / "server") as server, server.environment():
        for name, folder in text_sets(tmp_path).items():
            upload(Path(folder), server.url("data", name))
        sets = {name: server.url("data", name) for name in ("self", "code")}
        base = Config(**{**SMALL, "phases": PHASES}, datasets=sets, validation=sets, eval_every=40)
        place = server.url("studies", "mixed")
        upload(made_mixtures(tmp_path, 2, 12, weighted=False, base=base), place)
        words = ("sweep", "--study", place, "--confirm", "2", "--workers", "2")
        shown = run(*words, "--dry_run", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert not [one.key for one in ObjectStore.open(place).list() if one.key.startswith("confirm")]
        told = run(*words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "one"))
        assert told.returncode == 0, told.stderr
        assert "best less natural: predicted" in told.stdout
        again = run(*words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "other"))
        assert again.returncode == 0, again.stderr
        assert again.stdout.splitlines()[-1] == told.stdout.splitlines()[-1]
        found = json.loads(run("report", place, "--json", cwd=tmp_path).stdout)["mixture"]["confirm"]
        assert {len(values) for values in found["values"].values()} == {3}


def upload(folder, url):
    for path in filter(Path.is_file, folder.rglob("*")):
        ObjectStore.open(url).upload(path, path.relative_to(folder).as_posix())
