"""A study as its reports tell it: table, pictures, page, JSON, the winner's config; and what a person sees live."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from browser import data_of
from made_study import EVERY_KIND, SWEEP, every_kind, loss, made_study
from tables import one_test

import roxxel_dist
from roxxel_dist.cli import main
from roxxel_dist.process.file_lock import hold_folder
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.live_view import LiveView
from roxxel_dist.sweep.report.plots import draw, importances, limits, median_curve
from roxxel_dist.sweep.report.text import (
    as_json,
    parameter_columns,
    short_names,
    table,
    varied_parameters,
    write_best_config,
)
from roxxel_dist.sweep.samplers import gp, make
from roxxel_dist.sweep.space.sweep_file import sweep_of
from roxxel_dist.sweep.study.folder import Study, StudyDir, flat, read_study, short
from roxxel_dist.sweep.study.journal import History, Trial
from roxxel_dist.view.frame import Look, frame
from roxxel_dist.view.items import StudyReader, state_of
from roxxel_dist.view.web.metrics_server import exposition
from roxxel_dist.view.web.page import write_study

NAMES = ["dim", "use_moe", "optimizer", "lr"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return read_study(made_study(tmp_path_factory.mktemp("made")))


def test_the_table_has_the_best_first_and_every_failure(study):
    text = table(study)
    values = [float(found) for found in re.findall(r"^\d+ +(\d\.\d+)", text, re.MULTILINE)]
    assert values == sorted(values)
    assert len(values) == 20  # of 21: 24 without two that failed and one that runs
    assert "24 trial(s): 18 done, 3 stopped early, 2 failed, 1 interrupted; random, minimize val_loss" in text
    assert text.count("failed: <no> number") == 2
    assert f"best val_loss: {values[0]:.6g}, trial {study.done[0].number}: dim " in text


def test_more_is_better_where_the_goal_says_so(tmp_path):
    study = read_study(made_study(tmp_path, 6, metric={"name": "val_loss", "goal": "maximize"}))
    values = [one.value for one in study.done]
    assert values == sorted(values, reverse=True)
    assert study.history.best == study.done[0]


def test_what_matters_is_found(study):
    shares = importances(study)
    assert set(shares) == set(NAMES)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares, key=shares.__getitem__) == "optimizer"


@pytest.mark.parametrize("diverged", [False, True])
def test_shares_are_those_of_the_space_where_most_trials_are_near_the_best(tmp_path, diverged):
    """A search is where the metric hardly changes, and most of its spread lies elsewhere: with far values cut off as in
    the search, the largest share was 0.52 to 0.86."""
    rng, best, steep = np.random.default_rng(0), np.array([0.3, 0.6, 0.5]), np.array([3.0, 1.0, 0.3])
    points = np.concatenate([rng.random((10, 3)), np.clip(best + rng.normal(0, 0.15, (20, 3)), 0, 1)])
    values = (points - best) ** 2 @ steep
    values[4] = 1e300 if diverged else values[4]
    spread = (steep * (rng.random((100_000, 3)) - best) ** 2).var(axis=0)
    space = sweep_of({"metric": {"name": "val_loss"}, "parameters": {name: {"min": 0.0, "max": 1.0} for name in "abc"}})
    trials = {
        number: Trial(
            number=number, params=dict(zip("abc", point, strict=True)), point=point, state="done", value=value
        )
        for number, (point, value) in enumerate(zip(points.tolist(), values.tolist(), strict=True))
    }
    shares = importances(Study(path=tmp_path, sweep=space, history=History(trials=trials)))
    # A diverged trial counts as the worst of the others, which it need not be.
    assert shares == pytest.approx(dict(zip("abc", spread / spread.sum(), strict=True)), abs=0.15 if diverged else 0.01)


def test_what_matters_is_found_soon_in_a_large_study(tmp_path, monkeypatch):
    sizes = {"fit_hyperparameters": 0, "condition": 0}

    def counted(name, work):
        def call(points, *more):
            sizes[name] = max(sizes[name], len(points))
            return work(points, *more)

        monkeypatch.setattr(gp, name, call)

    counted("fit_hyperparameters", gp.fit_hyperparameters)
    counted("condition", gp.condition)
    sweep, trials = sweep_of(SWEEP), {}
    engine = make(sweep, seed=1)
    for _ in range(1500):
        number, params = engine.ask()
        point, value = engine.point(number), loss(params, 6)
        trials[number] = Trial(number=number, params=params, point=point, state="done", value=value)
    shares = importances(Study(path=tmp_path, sweep=sweep, history=History(trials=trials)))
    assert min(shares, key=shares.__getitem__) == "optimizer"
    assert sizes == {"fit_hyperparameters": 80, "condition": 500}  # the cost of both grows with the cube


def test_few_trials_show_no_importance(tmp_path):
    assert importances(read_study(made_study(tmp_path, 5))) == {}


@pytest.fixture(scope="module")
def report(study, tmp_path_factory):
    """(the page, what could not be drawn, the labels of the pictures' legends)."""
    with pytest.MonkeyPatch.context() as patch:
        labels = noted_labels(patch)
        page, missing = write_study(study, tmp_path_factory.mktemp("drawn") / "report", print)
    return page, missing, labels


def noted_labels(patch):
    """What the legends of pictures say, from now on."""
    from matplotlib.axes import Axes

    found, legend = [], Axes.legend

    def noted(axes, *words, **more):
        found.extend(axes.get_legend_handles_labels()[1])
        return legend(axes, *words, **more)

    patch.setattr(Axes, "legend", noted)
    return found


def test_pictures_and_a_page_that_needs_no_other_file(report):
    page, missing, _ = report
    assert not missing
    pictures = {path.name for path in page.parent.glob("*.png")}
    assert pictures == {"by_dim.png", "by_use_moe.png", "by_optimizer.png", "memory.png"}
    text = page.read_text()
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "<no> number" not in text  # a reason that would be markup
    assert text.count("<script") == 2
    (item,) = data_of(text)["items"].values()
    trials = [part for name, part in item.items() if name.startswith("trial/")]
    assert len(trials) == 24
    assert sum(trial["why"] == "<no> number" for trial in trials) == 2
    assert sum(item["importance"].values()) == pytest.approx(1)


def test_the_best_trial_is_marked(study, report):
    page, *_ = report
    (item,) = data_of(page.read_text())["items"].values()
    assert (item["head"]["best_trial"], item["head"]["best"]) == (study.done[0].number, study.done[0].value)


def test_dense_against_experts_only_where_there_are_both(report, tmp_path, monkeypatch):
    *_, labels = report
    assert any(label.startswith("dense: median") for label in labels)
    assert any(label.startswith("mixture of experts: median") for label in labels)
    alone = read_study(made_study(tmp_path, 6, parameters={**SWEEP["parameters"], "use_moe": {"value": False}}))
    labels = noted_labels(monkeypatch)
    draw(alone, tmp_path)
    assert labels
    assert not any("dense" in label or "experts" in label for label in labels)


def test_a_study_in_which_nothing_ended_yet(tmp_path):
    study = read_study(made_study(tmp_path, 1))
    page, _ = write_study(study, tmp_path / "report", print)
    (item,) = data_of(page.read_text())["items"].values()
    assert item["head"]["counts"] == {"interrupted": 1}
    assert "1 interrupted" in table(study)
    with pytest.raises(ValueError, match=r"no trial of .* has given a val_loss yet"):
        write_best_config(study, tmp_path / "best.yaml")


def test_the_best_config_is_one_that_train_reads(study, tmp_path):
    best = write_best_config(study, tmp_path / "best.yaml")
    config = Config.from_yaml(tmp_path / "best.yaml")
    assert {name: getattr(config, name) for name in NAMES} == {name: best.params[name] for name in NAMES}
    assert "record" not in (tmp_path / "best.yaml").read_text()
    used = Config.from_yaml(study.run_dir(best) / "config.yaml")
    assert config.to_dict() == used.to_dict(), "it trains the same"
    lines = (tmp_path / "best.yaml").read_text().splitlines()
    assert lines[0].startswith(f"# trial {best.number} of ")
    assert [line.partition(":")[0] for line in lines[1:]] == [*NAMES, "tokenizer_type"], "nothing else is set"


def test_a_study_knows_whether_its_trials_run(tmp_path, capsys):
    """Of a driver that was killed, trials are interrupted: in the table, the page, `top`, JSON, Python and metrics."""
    path = made_study(tmp_path, 6)

    def words():
        assert main(["report", str(path)]) == 0
        assert main(["top", "--once", str(path)]) == 0
        text = capsys.readouterr().out
        assert main(["top", "--json", str(path)]) == 0
        (values,), state = json.loads(capsys.readouterr().out), StudyReader(path).read()
        (item,) = data_of((path / "report" / "report.html").read_text())["items"].values()
        metrics = exposition([state])
        found = {values["trials"][5]["state"], item["trial/5"]["state"], *item["head"]["counts"]} - {"done"}
        found |= {roxxel_dist.read_study(path).trials["state"][5]}
        found |= {word for word in ("running", "interrupted") if word in text or f'state="{word}"' in metrics}
        return found, state.workers

    assert words() == ({"interrupted"}, 0)
    release = hold_folder(path, "searching in")
    try:
        assert words() == ({"running"}, 1)
        assert "1 interrupted" in table(read_study(path, is_searched=False)), "the last words of its own driver"
    finally:
        release()


def test_a_definition_is_read_again_only_where_it_has_changed(tmp_path, monkeypatch):
    """`top` and the page look for studies every few seconds."""
    path, reads = made_study(tmp_path, 3), []
    sweep = StudyDir.sweep
    monkeypatch.setattr(StudyDir, "sweep", lambda self: reads.append(self.path) or sweep(self))
    for _ in range(3):
        assert StudyReader(path).read().study.sweep.metric == "val_loss"
    assert reads == [path]
    changed = yaml.safe_load((path / "study.yaml").read_text()) | {"run_cap": 20}
    (path / "study.yaml").write_text(yaml.safe_dump(changed))
    assert StudyReader(path).read().study.sweep.run_cap == 20


def test_the_best_config_does_not_follow_a_run_where_the_user_did_not(study, tmp_path):
    """A sweep has its trials write W&B's files offline, to read them; a run of its best config is the user's."""
    used = study.run_dir(study.done[0]) / "config.yaml"
    used.write_text(re.sub(r"(?m)^wandb: .*", "wandb: offline", used.read_text()))
    write_best_config(study, tmp_path / "best.yaml")
    assert Config.from_yaml(tmp_path / "best.yaml").wandb == "off"


def test_a_program_of_ones_own_has_no_config(tmp_path):
    study = read_study(made_study(tmp_path, 3))
    (study.run_dir(study.done[0]) / "config.yaml").unlink()
    with pytest.raises(ValueError, match="its parameters are"):
        write_best_config(study, tmp_path / "best.yaml")


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("roxxel_dist.view.web.page.LARGE", 3)
    path = made_study(tmp_path, 4)
    best = read_study(path).done[0]
    out, config = tmp_path / "out", tmp_path / "best.yaml"
    assert main(["report", str(path), "--json", "--out", str(out), "--best_config", str(config)]) == 0
    assert (out / "report.html").is_file()
    assert config.is_file()
    output = capsys.readouterr()
    assert "roxxel-dist: writing the page of 3 trials …" in output.err
    told = json.loads(output.out)
    assert told["best"] == best.number
    assert len(told["trials"]) == 4
    assert main(["report", str(path), str(path / "trials" / "0")]) == 2
    assert "is a study: give its name alone" in capsys.readouterr().err
    assert main(["report", str(path / "trials" / "0"), "--best_config", "x"]) == 2


def test_parameters_that_all_share_are_not_shown(tmp_path):
    params = {"lr": {"min": 1e-4, "max": 1e-2}, "dim": {"value": 32}, "use_moe": {"value": True}}
    study = read_study(made_study(tmp_path, 4, parameters=params))
    assert varied_parameters(study) == ["lr"]


def test_json_has_every_report(study):
    first = as_json(study)["trials"][0]
    assert [step for step, _ in first["reports"]] == list(range(6))


@one_test(
    ("values", "ends"),
    [
        ([2.0, 2.1, 2.2, 1e30], (2.0, 2.2)),
        ([-1e30, 2.0, 2.1, 2.2, 2.3], (2.0, 2.3)),
        ([2.0, 2.1, 2.2, 2.5, 6.0], (2.0, 6.0)),  # a poor one is none
        ([1.0, 1.0, 1.0, 2.0], (1.0, 2.0)),
        ([1.0, 1.0], (1.0, 1.0)),
        ([1.0, 9.0], (1.0, 9.0)),
        ([5.0], (5.0, 5.0)),
    ],
)
def test_one_value_far_away_does_not_flatten_an_axis(values, ends):
    assert limits(values) == ends


def test_a_study_whose_trials_have_all_ended_is_finished(tmp_path):
    path = every_kind(tmp_path / "study")
    assert state_of(read_study(path)).state == "finished"
    with (path / "journal.jsonl").open("a") as journal:
        asked = {"event": "ask", "time": 1.0, "trial": 12, "params": {}, "point": []}
        journal.write(json.dumps(asked) + "\n")
    assert state_of(read_study(path)).state == "stopped"  # one is to go on
    capped = yaml.safe_load((path / "study.yaml").read_text()) | {"run_cap": 20}
    (tmp_path / "capped").mkdir()
    every = every_kind(tmp_path / "capped" / "study")
    (every / "study.yaml").write_text(yaml.safe_dump(capped))
    assert state_of(read_study(every)).state == "stopped"  # more are to come
    nothing = every_kind(tmp_path / "nothing", 0)
    assert state_of(read_study(nothing)).state == "stopped"


@pytest.mark.filterwarnings("error")  # of matplotlib, where a label leaves no room for the curves
def test_pictures_of_values_of_every_kind(tmp_path):
    """Null, texts, truth values, lists and nested names have curves as numbers have."""
    values, path = EVERY_KIND, every_kind(tmp_path / "study")
    study = read_study(path)
    assert {*varied_parameters(study)} == {*values, "lr"}
    with pytest.MonkeyPatch.context() as patch:
        labels = noted_labels(patch)
        pictures = draw(study, tmp_path / "report")
    for name, given in values.items():
        for value in given:
            assert any(label.startswith(f"{name} {short(value)}: median of ") for label in labels), (name, value)
    assert sum(label.startswith("long [0, 1, 2") for label in labels) == 2  # cut off, and not taken for one
    assert all(len(line) < 400 for line in table(study).splitlines())
    assert {"by_warmup_steps.png", "by_deep.png"} <= {picture.name for picture in pictures}


def test_the_middle_of_lines_that_end_early():
    line = median_curve([[(0, 4.0), (10, 2.0)], [(0, 4.0), (5, 3.0)], [(0, 4.0), (10, 2.0)]])
    assert line[0] == (0, 4.0)
    assert line[-1] == (10, 2.0)
    assert median_curve([[(0, 1.0), (4, 1.0)], [(2, 3.0), (4, 3.0)]])[0] == (2, 2.0)


def test_nested_parameters_have_points_between():
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_lines_where_there_is_no_terminal(study, capsys):
    end = max(one.began or 0.0 for one in study.history.trials.values())
    last = study.history.trials[23]
    with LiveView(30, 2, NAMES, now=lambda: end + 10) as screen:
        screen.show(study.history)  # what was before this start is no news
        screen.show(replace(study.history, trials={**study.history.trials, 23: replace(last, attempts=2)}))
        screen.show(replace(study.history, trials={**study.history.trials, 23: replace(last, state="done", value=9.0)}))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("roxxel-dist: trial 23 runs again (attempt 2): dim ")
    assert second.startswith("roxxel-dist: trial 23 done: val_loss 9; best 2.")
    screen.show(study.history)
    counted = screen.counts(study.history)
    assert counted.startswith("23 of 30 trials: 1 running, 18 done, 2 failed, 3 stopped early; 0:00 so far, ")
    assert counted.endswith(" left")


@pytest.mark.parametrize("deep", [("model", "attention"), ("optimizer",)])
def test_parallel_trials_are_told_apart_in_a_narrow_terminal(deep):
    """With many parameters whose long names begin alike, of which one differs."""
    names = [".".join((*deep, f"a_rather_long_name_{number}")) for number in range(9)]
    params = [{name: 0.001 * (i + 1) for i, name in enumerate(names)} for _ in range(4)]
    for number, row in enumerate(params):
        row[names[7]] = 0.125 * number
    trials = [Trial(number=number, params=row, state="running") for number, row in enumerate(params)]
    (head, *_), *rows = parameter_columns(trials, names)
    assert head.endswith("_long_name_7")
    assert [row[0] for row in rows] == ["0", "0.125", "0.25", "0.375"]
    history = History()
    history.trials = history.running = dict(enumerate(trials))
    sweep = sweep_of({"method": "random", "parameters": {name: {"min": 0.0, "max": 9.0} for name in names}})
    state = state_of(Study(path=Path("study"), sweep=sweep, history=history))
    lines = [line.plain for line in frame([state], Look(width=100, height=20))]
    assert [value for value in ("0.125", "0.25", "0.375") if any(value in line for line in lines)] == [
        "0.125",
        "0.25",
        "0.375",
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["lr", "dim"], ["lr", "dim"]),
        (["a.lr", "a.dim"], ["lr", "dim"]),
        (["a.lr", "b.lr", "b.dim"], ["a.lr", "b.lr", "dim"]),
        (["lr", "a.lr"], ["lr", "a.lr"]),
        (["x.a.lr", "y.a.lr"], ["x.a.lr", "y.a.lr"]),
    ],
)
def test_names_are_as_short_as_they_can_be_told_apart(names, shown):
    assert list(short_names(names).values()) == shown


def test_the_live_table(study):
    from rich.console import Console

    screen = LiveView(30, 2, NAMES)
    screen.show(study.history)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen.render())
    text = console.export_text()
    console.file.close()
    assert "23 of 30 trials" in text
    assert f"best val_loss {study.done[0].value:.6g}: trial {study.done[0].number}" in text
    assert re.search(r"^23 .* 5 ", text, re.MULTILINE)  # the running one, at its last step
