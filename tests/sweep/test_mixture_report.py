"""The report of a study with mixtures: shares, the surface of the law, what sets do together, and its confirmation."""

import dataclasses
import json
import math
from functools import cache

import numpy as np
import pytest
import yaml
from made_mixtures import NAMES, PHASES, losses, made_mixtures

from roxxel_dist.cli import main
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.report.confirmation import Confirmation, Confirmed, confirmation
from roxxel_dist.sweep.report.mixture import LawOfStudy, expected_confirmation, mixtures_of
from roxxel_dist.sweep.report.surface import Estimate
from roxxel_dist.sweep.report.text import best_config
from roxxel_dist.sweep.study.confirm import BEST, NATURAL, Expected, lengthen_phases
from roxxel_dist.sweep.study.folder import read_study


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A study over the shares of so many data sets, made when it is asked for; nothing writes there."""
    return cache(lambda *size: made_mixtures(tmp_path_factory.mktemp("mixtures"), *size))


@pytest.mark.parametrize("sets", [3, *(pytest.param(sets, marks=pytest.mark.long) for sets in (2, 4))])
def test_the_text_has_shares_surface_effects_and_what_sets_do_together(place, sets, tmp_path, capsys):
    assert main(["report", str(place(sets)), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "mixture of phases 1, 2" in out
    for name in NAMES[:sets]:
        assert f"\n{name} " in out
    assert ("share of self" in out, "self: a row each" in out) == (sets == 2, sets == 3)
    assert "self and code" in out
    assert "best less natural, by the law: " in out


def test_effects_are_those_of_the_law(place):
    """Each data set helps the validation text of its own, and the law's best mixture is near the best."""
    found = mixtures_of(read_study(place(3)))
    assert found is not None
    (entry,) = found.entries
    names = entry.space.names
    assert set(entry.crossed) == set(names)
    for number, name in enumerate(names):
        assert entry.crossed[name][number].high < 0, name
    base = np.array(entry.shares["best"])
    for number in range(len(names)):
        moved = 0.9 * base + 0.1 * np.eye(len(names))[number]
        exact = np.mean(list(losses(moved.tolist()).values())) - np.mean(list(losses(base).values()))
        assert entry.effects[number].value == pytest.approx(exact, abs=0.006)
    assert sum(losses(entry.shares["law"]).values()) <= sum(losses(entry.shares["best"]).values()) + 0.01


def test_a_law_that_the_trials_contradict_has_no_level(place):
    found = mixtures_of(read_study(place(2)))
    assert found is not None
    right, wrong = ("\n".join(dataclasses.replace(found, chance=chance).text()) for chance in (0.3, 0.001))
    assert "by the law, 90% interval if the law holds" in right
    assert "of such intervals held where the losses follow the law" in right
    assert "contradict" not in right
    assert "90% interval" not in wrong
    assert "such intervals held" not in wrong
    assert [dataclasses.replace(found, chance=chance).as_json()["level"] for chance in (0.3, 0.001)] == [0.9, None]
    assert "by the law, interval too narrow" in wrong
    assert "its errors hang on the shares (in 0.001 of studies by chance), so its intervals hold the truth in" in wrong


def test_a_trial_that_diverged_is_in_no_law(place):
    study = read_study(place(3))
    right, trial = LawOfStudy.fit(study), study.history.trials[5]
    assert trial.losses
    trial.losses[trial.step] = dict.fromkeys(trial.losses[trial.step], 1e300)
    trial.report(trial.step, 1e300)
    found = LawOfStudy.fit(study)
    assert found is not None
    assert right is not None
    assert (found.trials, right.trials) == (23, 24)
    spaces = study.sweep.space.mixtures
    assert np.abs(found.best(spaces) - right.best(spaces)).max() < 0.1


@pytest.mark.parametrize("sets", [3, *(pytest.param(sets, marks=pytest.mark.long) for sets in (2, 4))])
def test_all_of_it_is_json_and_on_the_page(place, sets, tmp_path, capsys):
    assert main(["report", str(place(sets)), "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["mixture"]
    (entry,) = found["mixtures"]
    assert len(entry["surface"]) == {2: 11, 3: 21, 4: 0}[len(entry["names"])]
    for point in [*entry["surface"], *entry["effects"], *entry["interactions"], *found["gains"].values()]:
        assert point["low"] <= point["value"] <= point["high"]
    assert found["trials_of_law"] == 24
    assert not found["law_is_contradicted"]
    assert found["confirm"] is None
    assert found["seeds"] == 1
    assert '"mixture":{' in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_column_and_surface_agree_where_shares_change_nothing(tmp_path):
    read = read_study(made_mixtures(tmp_path, 2, flat=True))
    found, law = mixtures_of(read), LawOfStudy.fit(read)
    assert found is not None
    assert law is not None
    (entry,) = found.entries
    best = law.metric(np.array([entry.shares["law"]]))[0, 0]
    assert all(best <= point.metric.value + 1e-5 for point in entry.surface)  # far below the noise
    said = {line.partition(", by the law: ")[0]: line for line in found.text()}
    assert said["best less natural"].endswith(": too near to tell them apart")
    assert "best less what the law proposes" in said


def test_a_metric_that_is_no_mean_has_a_law_of_its_own(tmp_path):
    found = mixtures_of(read_study(made_mixtures(tmp_path, 2, 12, weighted=False)))
    assert found is not None
    assert found.trials == 12
    assert found.entries[0].crossed == {}


def test_few_trials_have_no_law(tmp_path, capsys):
    assert main(["report", str(made_mixtures(tmp_path, 3, 5))]) == 0
    out = capsys.readouterr().out
    assert "too few trials for the law of the losses" in out
    assert "5 trained to their end, and it needs 8" in out


@pytest.mark.long
def test_a_learning_rate_that_is_searched_too_is_no_effect_of_the_shares(tmp_path):
    """Its effect is as large as that of the shares, and the law is of the best value."""
    rates = {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1}
    found = mixtures_of(read_study(made_mixtures(tmp_path, 3, rates=rates)))
    assert found is not None
    (entry,) = found.entries
    base = np.array(entry.shares["best"])
    for number, effect in enumerate(entry.effects):
        moved = 0.9 * base + 0.1 * np.eye(3)[number]
        exact = np.mean(list(losses(moved.tolist()).values())) - np.mean(list(losses(base).values()))
        assert effect.value == pytest.approx(exact, abs=0.012)
        assert effect.high - effect.low < 0.03
    assert "the law is of the best trial's values of the other parameters: lr" in found.text()


@pytest.mark.long
def test_where_more_is_better_the_surface_marks_the_most(tmp_path):
    found = mixtures_of(read_study(made_mixtures(tmp_path, 2, weighted=False, goal="maximize")))
    assert found is not None
    (entry,) = found.entries
    most = max(entry.surface, key=lambda point: point.metric.value)
    (line,) = [line for line in found.text() if line.endswith(" best")]
    assert line.split()[0] == f"{most.shares[0]:.3f}"
    assert "(above 0: they help each other)" in "\n".join(found.text())


def test_a_confirmation_trains_longer_phases_with_new_seeds(tmp_path):
    read = read_study(made_mixtures(tmp_path, 2, 12))
    best, config = best_config(read, "--confirm 5")
    made = expected_confirmation(read, config, 5)
    names = read.sweep.space.mixtures[0].names
    assert list(made.phases) == [BEST, NATURAL]  # without data natural shares are uniform, and are trained once
    assert made.seeds == [config.seed + number for number in (1, 2, 3)]
    for phases in made.phases.values():
        assert [phase["steps"] for phase in phases] == [5 * phase["steps"] for phase in PHASES]
    assert made.phases[NATURAL][1]["weights"] == pytest.approx(dict.fromkeys(names, 1 / len(names)), abs=1e-6)
    assert made.phases[BEST][0]["weights"] == {name: best.params[f"mixture.1.{name}"] for name in names}
    made.write(read.path)
    assert Expected.read(read.path) == made
    said = confirmation(read)
    assert said is not None
    (gain,) = said.gains
    assert (gain.against, gain.measured, gain.is_inside) == (NATURAL, None, None)
    assert gain.predicted is not None
    assert gain.predicted.value < 0


@pytest.mark.parametrize(("factor", "of"), [(1, ""), (10, " of 1 x the steps")])
@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [
        (-0.2, 0.05, ": inside the interval"),
        (-0.09, 0.05, ": inside the interval"),  # within what both allow, and outside of what either does
        (-0.05, 0.05, ": OUTSIDE the interval"),
        (-0.35, 0.05, ": OUTSIDE the interval"),
        (0.5, math.inf, None),
        (None, 0.0, None),
    ],
)
def test_the_interval_of_a_prediction_is_that_of_a_trials_steps(factor, of, value, half, verdict):
    gain = [-0.2, -0.3, -0.1]
    made = Expected(factor=factor, trial=3, seeds=[1], phases={BEST: [], NATURAL: []}, gains={NATURAL: gain})
    measured = None if value is None else Estimate(value, value - half, value + half)
    seeds = 0 if value is None else 1 if math.isinf(half) else 3
    one = Confirmed(against=NATURAL, predicted=Estimate(*gain), measured=measured, seeds=seeds)
    text = Confirmation(expected=made, values={}, gains=[one], metric="val_loss").text()
    line = f"best less natural: predicted {Estimate(*gain)}, "
    line += "not measured yet" if value is None else f"measured {measured}{verdict + of if verdict else ''}"
    more = ["  one seed has no interval, and so no verdict"] if seeds == 1 else []
    assert text[-1 - len(more) :] == [line, *more]
    assert any("predictions are for the steps of a trial" in line for line in text) == (factor > 1)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--confirm", "0"], "--confirm 0: must be a whole number, 1 or more"),
        (["--confirm", "2.5"], "--confirm 2.5: must be a whole number"),
        (["--confirm"], "--confirm has no value: must be a whole number"),
        (["--confirm", "2", "--count", "3"], "leave --count out"),
        (["--confirm", "2", "--config", "base.yaml"], "leave --config out"),
    ],
)
def test_flags_that_a_confirmation_cannot_have(place, capsys, words, why):
    assert main(["sweep", "--study", str(place(2)), *words]) == 2
    assert why in capsys.readouterr().err


def test_of_which_study_and_how_often(tmp_path, capsys):
    assert main(["sweep", "--confirm", "2"]) == 2
    assert "--confirm 2 does not say of which study" in capsys.readouterr().err
    study = made_mixtures(tmp_path, 2, 9)
    made_mixtures(study, 2, 0).rename(study / "confirm")
    (study / "confirm.yaml").write_text(
        yaml.safe_dump({"factor": 3, "trial": 0, "seeds": [1], "phases": {"best": []}, "gains": {}})
    )
    assert main(["sweep", "--study", str(study), "--confirm", "2"]) == 2
    assert "was begun with --confirm 3" in capsys.readouterr().err


def test_a_start_that_is_refused_begins_no_confirmation(place, capsys):
    """Another number of times may follow."""
    study = place(2)
    for times, *words in (("3", "--workers", "x"), ("2", "--wandb", "on"), ("4", "--procs_per_host", "0")):
        assert main(["sweep", "--study", str(study), "--confirm", times, *words]) == 2, words
        assert "was begun" not in capsys.readouterr().err
        assert not (study / "confirm.yaml").exists()
        assert not (study / "confirm").exists()


def test_longer_phases_have_no_weights_of_0():
    """So that a baseline that is the best is known as one."""
    weights = {"self": 0.5, "code": 0.5}
    made = lengthen_phases(Config(phases=[{**PHASES[0], "weights": {**weights, "math": 0.0}}, PHASES[1]]), 10)
    assert made == [{**PHASES[0], "steps": 300, "weights": weights}, {**PHASES[1], "steps": 100}]


def test_parameters_that_are_weights_are_no_mixture(tmp_path):
    """As W&B's server can search them: none of the trials is a baseline."""
    study = made_mixtures(tmp_path, 2, 9)
    (study / "extras.yaml").write_text("{}\n")
    read = read_study(study)
    _, config = best_config(read, "--confirm 2")
    with pytest.raises(UserError, match="searches no mixtures"):
        expected_confirmation(read, config, 2)


def test_a_best_trial_that_is_a_baseline_has_nothing_to_confirm(tmp_path):
    read = read_study(made_mixtures(tmp_path, 2, 1))
    _, config = best_config(read, "--confirm 2")
    with pytest.raises(UserError, match="is a baseline itself"):
        expected_confirmation(read, config, 2)
