from pathlib import Path

import pytest
import trial_bodies
from commands import wait_for
from sweep_runs import ONE, Study

from roxxel_dist.sweep.driver.options import SweepOptions
from roxxel_dist.sweep.ray_executor import _options, check_room


def test_trials_are_run_reported_and_kept(study):
    ending = study.run(trial_bodies.square, count=4, workers=2)
    assert (ending.code, ending.reason) == (0, "all 4 trials have ended")
    assert study.ends() == [0, 1, 2, 3]
    history = study.history
    assert len({trial.params["x"] for trial in history.trials.values()}) == 4
    for trial in history.trials.values():
        value = (trial.params["x"] - 0.3) ** 2
        assert (trial.state, trial.value, trial.attempts) == ("done", value, 1)
        assert trial.reports == [(1, value + 1), (2, value + 0.5)]
        assert trial.more["nan"] is None
        assert trial.pid is not None
    assert len({trial.pid for trial in history.trials.values()}) == 4, "one process a trial"
    assert history.best.value == min(trial.value for trial in history.trials.values())
    assert study.changes == len(study.events)
    for trial in range(4):
        kinds = [event["event"] for event in study.events if event.get("trial") == trial]
        assert kinds == ["ask", "start", "report", "report", "result"]
    # It has all it was to have; more are run when more are asked for.
    assert study.run(trial_bodies.square, count=4).code == 0
    assert study.ends() == [0, 1, 2, 3]
    assert study.run(trial_bodies.square, count=5).code == 0
    assert study.ends() == [0, 1, 2, 3, 4]
    assert len({trial.params["x"] for trial in study.history.trials.values()}) == 5


@pytest.mark.parametrize(("given", "value"), [(None, 0.0), ("3", 3.0)])
def test_a_trial_has_the_threads_of_its_driver_and_not_those_of_a_worker_of_ray(study, monkeypatch, given, value):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert study.run(trial_bodies.threads, count=1).code == 0
    assert study.history.trials[0].value == value


@pytest.mark.parametrize("study", ["processes", "ray"], indirect=True)
def test_a_lost_worker_is_retried_and_counted_once(study):
    """On a real Ray too, which says itself what has become of a trial."""
    assert study.run(trial_bodies.killed, count=3, workers=3).code == 0
    assert study.ends() == [0, 1, 2]
    assert [trial.value for trial in study.history.trials.values()] == [0.0, 1.0, 1.0]
    assert [trial.attempts for trial in study.history.trials.values()] == [1, 2, 2]
    assert sorted(event["trial"] for event in study.of("report")) == [0, 1, 2], "what is told again is written once"
    assert any("trial 1 was lost (WorkerCrashedError" in line for line in study.said)
    assert any("trial 2 was lost (its node rebooted)" in line for line in study.said)


def test_a_trial_that_is_always_lost_fails(study):
    ending = study.run(trial_bodies.always_killed, count=1, max_retries=1)
    assert ending.code == 1
    [failed] = study.of("fail")
    assert failed["kind"] == "lost"
    assert "lost 2 times; at last" in failed["reason"]
    assert study.history.trials[0].attempts == 2


def test_failures_of_every_kind_are_kept(study):
    ending = study.run(trial_bodies.mixed, count=7, workers=4, max_failures=6)
    assert ending.code == 0
    assert study.ends() == list(range(7))
    failed = {event["trial"]: (event["kind"], event["reason"], event["log"]) for event in study.of("fail")}
    log = str(study.path / "logs" / "1.log")
    assert failed == {
        0: ("nan", "val_loss was nan at step 2", None),
        1: ("error", "ValueError: dim 17 is not a multiple of 4 heads", log),
        2: ("oom", "RESOURCE_EXHAUSTED", "logs/2.log"),
        3: ("error", "its body ended without a result", None),
        4: ("nan", "val_loss was inf", None),
    }
    assert "Traceback" in Path(log).read_text()
    assert study.history.trials[0].reports == [(1, 1.5)]
    assert (study.history.trials[5].value, study.history.trials[6].value) == (5.0, 6.0)


def test_failures_in_a_row_end_the_sweep_with_the_reason(study):
    ending = study.run(trial_bodies.mixed, count=50, max_failures=3)
    assert ending.code == 1
    assert ending.reason == "3 trials in a row failed (--max_failures); the last: RESOURCE_EXHAUSTED"
    assert study.ends() == [0, 1, 2]
    # Somebody has mended it, and starts it again.
    assert study.run(trial_bodies.square, count=4, max_failures=3).code == 0
    assert study.ends() == [0, 1, 2, 3]


def test_poor_trials_are_stopped_early(study, tmp_path):
    sweep = {**ONE, "early_terminate": {"type": "hyperband", "min_iter": 2, "eta": 3}}
    assert study.run(trial_bodies.curve, sweep, count=3, workers=3).code == 0
    assert study.ends() == [0, 1, 2]
    assert {event["trial"]: event["stopped"] for event in study.of("result")} == {
        0: None,
        1: "hyperband",
        2: "hyperband",
    }
    assert [trial.state for trial in study.history.trials.values()] == ["done", "stopped", "stopped"]
    assert [trial.value for trial in study.history.trials.values()] == [0.0, 1.0, 2.0]
    for event in study.of("stop"):
        assert event["rule"] == "hyperband"
        assert event["reason"].startswith(f"{event['trial']} after ")
    # The driver does not wait for a body that was asked to end.
    wait_for(lambda: len(list(tmp_path.glob("ended.*"))) == 2, what="the end of both")
    assert sorted(path.name for path in tmp_path.glob("ended.*")) == ["ended.1", "ended.2"]


def test_a_server_without_more_trials_ends_the_sweep(study):
    ending = study.run(trial_bodies.served, count=9, workers=1)
    assert (ending.code, ending.reason) == (0, "the server has no more")
    assert study.ends() == [0, 1, 2]
    assert [trial.params for trial in study.history.trials.values()][:3] == [{"x": 0.0}, {"x": 0.1}, {"x": 0.2}]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_is_away_ends_the_sweep_without_failed_trials(study, workers):
    ending = study.run(trial_bodies.unserved, count=4, workers=workers)
    assert (ending.code, ending.reason) == (
        69,
        "the server gave no trial. All results are kept: the same command goes on",
    )
    # Two workers ask for trials 2 and 3 at once: whichever is refused first ends the sweep.
    assert {f"trial {trial}: the server is away" for trial in range(2, workers + 2)} & set(study.said)
    assert (study.ends(), study.of("fail")) == ([0, 1], [])
    (study.path / "back").touch()
    ending = study.run(trial_bodies.unserved, count=4, workers=workers)
    assert (ending.code, study.ends(), study.of("fail")) == (0, [0, 1, 2, 3], [])


def test_a_space_that_is_used_up_ends_the_sweep(study):
    sweep = {"method": "grid", "parameters": {"x": {"values": [0.25, 0.5, 0.75]}}}
    ending = study.run(trial_bodies.square, sweep, count=9, workers=2)
    assert ending.code == 0
    assert "all 3 trials" not in ending.reason
    assert study.ends() == [0, 1, 2]
    assert study.run(trial_bodies.square, sweep, count=9, workers=2).code == 0
    assert study.ends() == [0, 1, 2]


def test_a_body_that_workers_cannot_import_ends_the_sweep(study, tmp_path, monkeypatch):
    def nowhere(task):
        yield {}

    nowhere.__module__, nowhere.__qualname__ = "not_installed_there", "run"
    ending = study.run(nowhere, count=3)
    assert ending.code == 1
    assert "cannot import not_installed_there:run" in ending.reason
    assert "install the same packages there" in ending.reason
    assert study.ends() == []
    assert study.run(trial_bodies.square, count=3).code == 0
    assert study.ends() == [0, 1, 2]
    with pytest.raises(ValueError, match="must be a function of a module"):
        study.run(lambda task: iter(()), count=3)


def test_what_no_node_has_is_an_error_before_anything_runs(study):
    with pytest.raises(ValueError, match=r"a trial needs 1 CPU and 4 GPU on one node .*: .* \(4 CPU and 0 GPU\)"):
        study.run(trial_bodies.square, count=1, resources={"GPU": 4})
    with pytest.raises(ValueError, match=r"needs 5 CPU .*"):
        study.run(trial_bodies.square, count=1, resources={"CPU": 5})
    with pytest.raises(ValueError, match=r"1 CPU and 2 rack7"):
        study.run(trial_bodies.square, count=1, resources={"rack7": 2})
    assert study.events == []


def test_another_metric_is_no_continuation(study):
    study.run(trial_bodies.square, count=1)
    with pytest.raises(ValueError, match="its goal was to minimize val_loss, and now it is to maximize acc"):
        study.run(
            trial_bodies.square,
            {"metric": {"name": "acc", "goal": "maximize"}, "parameters": {"x": {"min": 0.0, "max": 1.0}}},
        )


def test_a_cluster_that_does_not_answer_names_the_flag(tmp_path):
    with pytest.raises(ValueError, match=r"^--ray_address 'nowhere': write"):
        Study(tmp_path, "nowhere").run(trial_bodies.square, count=1)


def test_nodes_that_are_gone_do_not_count():
    nodes = [
        {"Alive": False, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 8.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 8.0, "GPU": 2.0}},
    ]
    check_room(nodes, {"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(ValueError, match=r"that: 10\.0\.0\.2 \(2 GPU\)\. Ask"):
        check_room(nodes, {"GPU": 4.0})


def test_resources_have_the_names_that_ray_has_for_them():
    wanted = {"CPU": 2.0, "GPU": 0.5, "memory": 1e9, "rack7": 1.0}
    assert _options(wanted) == {"num_cpus": 2.0, "num_gpus": 0.5, "memory": 1e9, "resources": {"rack7": 1.0}}
    assert _options({"CPU": 1.0}) == {"num_cpus": 1.0, "resources": {}}


@pytest.mark.parametrize(
    "wrong", [{"count": 0}, {"workers": 0}, {"max_steps_total": 0}, {"max_failures": 0}, {"max_retries": -1}]
)
def test_options_are_checked(wrong):
    [name] = wrong
    with pytest.raises(ValueError, match=f"--{name} .*: must be at least"):
        SweepOptions(**wrong)
