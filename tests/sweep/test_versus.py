"""`versus`: pairs as trials of a study; the verdict is the same however many run at once, and wherever it is killed."""

import dataclasses
import json
import math
import random
import signal
import subprocess
import sys
import time
from statistics import variance

import numpy as np
import pytest
import trial_bodies
import yaml
from commands import environment
from killed_drivers import ended, until
from made_study import made_versus
from servers import S3Server
from sweep_desk import text_sets, write_base

from roxxel_dist.cli import main
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.run.report import read_runs
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver import controller, run
from roxxel_dist.sweep.driver.controller import Ending
from roxxel_dist.sweep.report.versus import pair_of_runs, versus_json, versus_text
from roxxel_dist.sweep.samplers.pairs import outcome, pairs_of
from roxxel_dist.sweep.space.extras import Versus
from roxxel_dist.sweep.space.sweep_file import sweep_of
from roxxel_dist.sweep.study.folder import Study
from roxxel_dist.sweep.study.journal import replay
from roxxel_dist.sweep.study.stored_journal import read_journal

SWEEP = {"method": "grid", "parameters": Versus.parameters(7)}
VERSUS = Versus(changes={"lr": 0.002}, names={"A": "a.yaml", "B": "b.yaml"})


@pytest.fixture
def compared(study):
    study.extras = {"versus": dataclasses.asdict(VERSUS)}

    def run(count=40, **options):
        return study.run(trial_bodies.paired, SWEEP, count=count, **options)

    study.compare = run
    return study


def found(study):
    return outcome(study.history, VERSUS)


def test_the_verdict_is_that_of_the_first_pairs_however_many_run_at_once(compared, tmp_path):
    ending = compared.compare(workers=1)
    first = found(compared)
    assert ending.code == 0
    assert ending.reason == first.text() == first.ending
    assert first.text().startswith("B is better by 0.")
    assert f"; 90 %, {first.pairs} pairs)" in first.text()
    trials = compared.history.trials.values()
    assert len(trials) == 2 * first.pairs
    assert [(one.params["seed"], one.params["side"]) for one in trials][:3] == [(7, "A"), (7, "B"), (8, "A")]
    journal = compared.path / "journal.jsonl"
    journal.unlink()
    compared.more["task"] = {"sleep": 0.02}  # they end in another order
    asked_to_end = []

    def changed(history, number):
        """Ctrl-C once the verdict is there, while others still run."""
        if not asked_to_end and history.trials and outcome(history, VERSUS).ending:
            asked_to_end.append(number)
            signal.raise_signal(signal.SIGINT)

    compared.changed = changed
    assert compared.compare(workers=4) == ending
    assert len(asked_to_end) == 1
    assert found(compared) == first
    paused = [event for event in compared.of("pause") if event["rule"] == "versus"]
    assert {event["trial"] for event in paused} <= compared.history.trials.keys()
    asked = len(compared.of("ask"))  # how many, beyond those pairs, is of how late the last one of them ended
    assert compared.compare(workers=4).reason == ending.reason
    assert len(compared.of("ask")) == asked, "the same command again trains nothing"


def test_a_driver_killed_at_any_line_gives_the_same_pairs(compared):
    """The journal is cut where a killed driver would have left it, and the sweep goes on."""
    compared.compare(workers=2)
    whole, lines = found(compared), (compared.path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for cut in random.Random(0).sample(range(1, len(lines)), 3):
        (compared.path / "journal.jsonl").write_bytes(b"".join(lines[:cut]))
        assert compared.compare(workers=2).reason == whole.text()
        assert found(compared) == whole


@pytest.mark.long
def test_drivers_killed_six_times(compared):
    whole = compared.compare(workers=2).reason
    (compared.path / "journal.jsonl").unlink()
    compared.more["task"], chance, kills = {"sleep": 0.15}, random.Random(1), 0
    while kills < 6:
        driver, before = compared.start("paired", SWEEP, count=40, workers=2), len(compared.events)
        until(lambda: len(compared.events) > before or driver.poll() is not None, "the driver")  # noqa: B023
        time.sleep(chance.uniform(0, 1.5))
        kills += driver.poll() is None
        driver.kill()
        driver.communicate()
        if found(compared).ending:
            break
    code, said = ended(compared.start("paired", SWEEP, count=40, workers=2))
    assert code == 0, said
    assert said.splitlines()[-1] == whole


DRIVER = """
import sys
from roxxel_dist.cli import main
from roxxel_dist.objects import lease
lease.RENEW_S, lease.STALE_S, lease.POLL_S, lease.SETTLE_S = 0.5, 5.0, 0.1, 0.1
sys.exit(main(sys.argv[1:]))
"""
TRAINED = 3
"""Pairs."""


class RealVersus:
    """The command itself, with a Ray of its own and real trainings, of a study in a folder or in a bucket."""

    def __init__(self, folder, study):
        self.folder, self.study, self.starts = folder, study, 0

    def start(self):
        """On a host that has nothing but the bucket, where the study is in one."""
        self.starts += 1
        words = ["versus", "base.yaml", "--set", "lr=0.004", "--data_path", "self", "--study", self.study, "--json"]
        words += ["--max_pairs", str(TRAINED), "--workers", "2", "--cpus_per_trial", "1"]
        cache = {"XDG_CACHE_HOME": str(self.folder / f"cache{self.starts}")} if "://" in self.study else {}
        with (self.folder / f"log{self.starts}").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-c", DRIVER, *words], cwd=self.folder, env=environment(**cache),
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def journal(self):
        if "://" in self.study:
            return read_journal(ObjectStore.open(self.study, timeout_s=10)).data
        path = self.folder / self.study / "journal.jsonl"
        return path.read_bytes() if path.exists() else b""

    def outcome(self):
        """(what it prints, its pairs)."""
        code, said = ended(self.start(), limit_s=300)
        assert code == 0, (self.folder / f"log{self.starts}").read_text()
        return json.loads(said), pairs_of(replay(self.folder, self.journal()))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(the folder, what it says, its pairs) of a comparison whose driver nobody kills."""
    folder = tmp_path_factory.mktemp("real")
    text_sets(folder)
    write_base(folder, 60, 20, checkpoint_every=20, lr=0.001)
    return folder, *RealVersus(folder, "unbroken").outcome()


@pytest.mark.long
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_real_trainings_whose_driver_is_killed_six_times(unbroken, tmp_path, place):
    folder, told, pairs = unbroken
    assert len(pairs) == told["pairs"] == TRAINED
    assert all(one.difference for one in pairs)
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    with S3Server(tmp_path) as server, server.environment():
        versus = RealVersus(folder, server.url("studies", "killed") if place == "bucket" else "killed")
        for _ in range(6):
            driver, lines = versus.start(), versus.journal().count(b"\n") + chance.randint(1, 9)  # 3 are of the start
            until(lambda: versus.journal().count(b"\n") >= lines or driver.poll() is not None, "it", 300)  # noqa: B023
            time.sleep(chance.uniform(0, 1))
            assert driver.poll() is None, "it ended before it was killed"
            driver.kill()
            driver.communicate()
        assert versus.outcome() == (told, pairs)
        attempts = [one.attempts for one in replay(folder, versus.journal()).trials.values()]
    print("attempts", attempts)
    assert max(attempts) > 1, "a training was cut and went on"


def test_more_pairs_continue_what_ended_undecided(compared):
    assert compared.compare(count=4).code == 0
    before = found(compared)
    assert (before.verdict, before.pairs) == ("undecided", 2)
    compared.compare(count=40)
    assert found(compared).verdict == "B"
    assert compared.ends() == list(range(2 * found(compared).pairs))


def test_a_loss_that_is_no_number_loses_its_pair(compared):
    compared.more["task"] = {"nan": "B"}
    ending = compared.compare(workers=2)
    assert ending.reason == "A is better (90 %, 6 pairs); B gave no number in 6 pairs and lost it"
    assert ending.code == 0


def test_a_side_that_cannot_run_ends_it(compared):
    compared.more["task"] = {"oom": "B"}
    ending = compared.compare(workers=1)
    assert (ending.code, ending.reason) == (1, "1 pair of 1 cannot be compared: B: RESOURCE_EXHAUSTED")
    assert compared.compare(workers=1).code == 1, "and again"
    assert len(compared.of("ask")) == 2


def test_what_a_report_says(compared):
    compared.compare(workers=1)
    read = Study(path=compared.path, sweep=sweep_of(SWEEP, compared.extras), history=compared.history)
    told, shown = versus_json(read), versus_text(read).splitlines()
    assert told.keys() >= {"difference", "low", "high", "level", "pairs", "verdict", "needed", "metric", "changes"}
    assert [one["seed"] for one in told["each"]] == [7 + i for i in range(told["pairs"])]
    first, last = compared.history.trials[0], told["each"][-1]
    assert told["each"][0]["a"] == first.reports[-1][1] != first.value, "the last report, not the best"
    assert [one["low"] is None for one in told["each"][:3]] == [True, True, False]
    assert (last["low"], last["high"]) == (told["low"], told["high"])
    assert shown[-1] == found(compared).text()
    assert sum(line.split()[:1] == ["1"] for line in shown) == 1
    json.dumps(told)


BAD = [
    ("versus", "nothing to compare, and studies/versus is no study yet: name two configs"),
    ("versus base.yaml", "base.yaml is A, and there is no B"),
    ("versus base.yaml base.yaml", "base.yaml and base.yaml are the same configuration but for the seed"),
    ("versus base.yaml --set seed=7", "are the same configuration but for the seed"),
    ("versus base.yaml --set lr", "--set lr: write FIELD=VALUE, such as lr=0.002"),
    ("versus base.yaml --set lt=1", "--set: there is no field 'lt'"),
    ("versus base.yaml other.yaml --set lr=1", "base.yaml and other.yaml are A and B: leave --set lr=1 out"),
    (
        "versus base.yaml other.yaml --data_path t.txt --metric val_los",
        "--metric val_los: no training logs 'val_los': did you mean",
    ),
    ("versus base.yaml long.yaml --data_path t.txt", "A and B differ in length (phases)"),
    ("versus base.yaml data.yaml --data_path t.txt", "A and B differ in data (datasets)"),
    ("versus base.yaml other.yaml", "base.yaml: no data: name"),
    ("versus base.yaml --set eval_every=0 --data_path t.txt", "eval_every=0: eval_every is 0: it must be at least 1"),
    (
        "versus base.yaml --set wandb=online lr=0.1 --data_path t.txt",
        "wandb=online lr=0.1: wandb is online, and the trials of",
    ),
    ("versus base.yaml other.yaml --data_path t.txt --level 1", "--level 1: must be at least 0.5 and below 1"),
    ("versus base.yaml other.yaml --data_path t.txt --smallest 0", "--smallest 0: must be more than 0"),
    ("versus base.yaml other.yaml --data_path t.txt --max_pairs 0", "--max_pairs 0: must be at least 1"),
    ("versus --study made --metric val_bpb", "--metric val_bpb: made was begun with val_loss, and a verdict must not"),
    ("versus --study made --maximize", "--maximize: made was begun with False, and a verdict must not"),
    ("versus --study made --smallest 0.1", "--smallest 0.1: made was begun without it, and a verdict must not"),
    ("versus --study made --level 0.8", "--level 0.8: made was begun with 0.9, and a verdict must not depend"),
    ("versus base.yaml --set lr=0.003 --data_path t.txt --study made", "--study made compares other configurations"),
    ("versus --study search", "--study search is a search, and no comparison"),
    ("versus base.yaml --set lr=0.1 --data_path t.txt --study hdfs://a/b", "--study is hdfs://a/b: it cannot be in"),
    (
        "versus base.yaml --set lr=0.1 --data_path t.txt --study ftp://a/b",
        "in ftp://, which is no bucket that is known",
    ),
    ("versus base.yaml other.yaml --data_path t.txt --metric val_loss/x", "there is no `validation`"),
    ("versus none other.yaml", "none"),
    (
        "versus data.yaml ids.yaml --different_data --metric val_bpb",
        "ids has no tokenizer: put its tokenizer.json",
    ),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    write_base(folder, 4, 4)
    base = yaml.safe_load((folder / "base.yaml").read_text())
    for name, more in {
        "other": {"lr": 0.002},
        "long": {"phases": [{**base["phases"][0], "steps": 8}]},
        "data": {"datasets": {"self": "t.txt"}},
        "ids": {"datasets": {"self": "ids"}},
    }.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**base, **more}))
    (folder / "t.txt").write_text("some text\n" * 400)
    (folder / "ids").mkdir()
    with Roxxel(folder / "ids" / "ids_*.rox") as data:
        data.write([np.arange(4000, dtype=np.uint16) % 250], vocab_size=257)
    for name, extras in {"made": {"versus": dataclasses.asdict(VERSUS)}, "search": {}}.items():
        (folder / name).mkdir()
        Config.from_yaml(folder / "base.yaml").save_yaml(folder / name / "config.yaml")
        (folder / name / "study.yaml").write_text(yaml.safe_dump(SWEEP))
        (folder / name / "extras.yaml").write_text(yaml.safe_dump(extras))
    return folder


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line(desk, monkeypatch, capfd, line, message):
    monkeypatch.chdir(desk)
    assert main(line.split()) == 2
    said = capfd.readouterr()
    assert message in said.err
    assert (said.err.count("\n"), said.out) == (1, "")
    assert not (desk / "studies").exists()


def test_two_runs_are_one_pair_and_no_verdict(tmp_path):
    """The noise of the seed is that of the study which they are trials of, where it knows it."""
    alone = [made_run(tmp_path / name, loss) for name, loss in (("one", 2.5), ("two", 2.25))]
    found = pair_of_runs(read_runs(alone))
    assert found is not None
    assert (found.difference, found.noise) == (0.25, None)
    assert "One pair gives no verdict: how far the seed alone moves it is not known here" in found.text()
    assert pair_of_runs(read_runs(alone[:1])) is None
    assert pair_of_runs(read_runs([*alone[:1], made_run(tmp_path / "nan", math.nan)])) is None
    study = made_versus(tmp_path, [-0.1, -0.2, -0.3])
    trials = [made_run(study / "trials" / str(number), 2.0 + number) for number in (0, 1)]
    found = pair_of_runs(read_runs(trials))
    assert found is not None
    assert found.noise == pytest.approx(0.1)
    assert found.text().endswith("moves such a difference by 0.1 (deviation; 3 pairs of compared)")


def test_a_search_over_seeds_knows_their_noise(study):
    sweep = {"method": "grid", "parameters": {"seed": {"min": 0, "max": 3}, "side": {"values": ["A", "B"]}}}
    study.run(trial_bodies.paired, sweep, workers=2)
    (study.path / "study.yaml").write_text(yaml.safe_dump(sweep))
    runs = [made_run(study.path / "trials" / str(number), 2.0) for number in (0, 1)]
    found = pair_of_runs(read_runs(runs))
    assert found is not None
    assert found.noise is not None
    by_side = {}
    for one in study.history.trials.values():
        by_side.setdefault(one.params["side"], []).append(one.reports[-1][1])
    assert found.noise == pytest.approx(math.sqrt(sum(variance(values) for values in by_side.values())))
    assert "8 trials with other seeds of " in found.text()


def made_run(folder, loss):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 4, "val_loss": loss if math.isfinite(loss) else None}) + "\n"
    )
    Config().save_yaml(folder / "config.yaml")
    return folder


def test_a_comparison_that_is_over_starts_nothing_and_is_shown(tmp_path, monkeypatch, capfd):
    """Neither Ray nor a training: the verdict is in the journal; `top` and the page have it too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(controller, "run_sweep", None)
    made_versus(tmp_path, [-0.1, -0.11, -0.1])
    verdict = "A is better by 0.103 (0.0736 to 0.154; 90 %, 3 pairs)"
    assert main(["versus", "--study", "compared"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == verdict
    assert main(["versus", "--study", "compared", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "A"
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    Config(tokenizer_type="byte", lr=0.001).save_yaml(tmp_path / "base.yaml")
    assert main(["versus", "base.yaml", "--set", "lr=0.002", "--study", "compared"]) == 0  # which knows its data
    assert capfd.readouterr().out.splitlines()[-1] == verdict
    assert main(["top", "compared", "--once"]) == 0
    shown = capfd.readouterr().out
    assert verdict in shown
    assert "compared  finished" in shown
    assert main(["report", "compared"]) == 0
    assert verdict in capfd.readouterr().out
    assert verdict in (tmp_path / "compared" / "report" / "report.html").read_text()


def test_what_stops_a_comparison_before_its_verdict_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    made_versus(tmp_path, [-0.1, -0.11])
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    monkeypatch.setattr(run, "run_sweep", lambda *_, **__: Ending(code=42, reason="asked to end"))
    assert main(["versus", "--study", "compared"]) == 42
    *_, verdict, reason, _page = capfd.readouterr().out.splitlines()
    assert (verdict[:23], reason) == ("undecided after 2 pairs", "asked to end")
