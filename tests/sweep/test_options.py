import pytest
from tables import one_test
from trials import program, task

from roxxel_dist import Config
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.driver import run, sweep_run
from roxxel_dist.sweep.driver.options import SweepOptions
from roxxel_dist.sweep.trial import trial
from roxxel_dist.sweep.trial.process import launch_command


def share(rules, **given):
    found = SweepOptions(ray_address="auto", **given).trial_resources(rules)
    return found.cpus_per_host, found.gpus_per_host, found.task


def test_what_a_trial_of_one_host_takes():
    assert share({}) == (1, None, {"CPU": 1})
    assert share({}, procs_per_host=4) == (4, None, {"CPU": 4})
    assert share({"CPU": 2, "GPU": 0.5, "rack7": 1}) == (2, None, {"CPU": 2, "GPU": 0.5, "rack7": 1})
    assert share({"CPU": 2}, cpus_per_trial=3) == (3, None, {"CPU": 3})
    assert share({"GPU": 4}, procs_per_host=2) == (2, 4, {"CPU": 2, "GPU": 4})
    assert share({"GPU": 4}, gpus_per_trial=1) == (1, 1, {"CPU": 1, "GPU": 1})


def test_the_task_of_a_trial_of_several_hosts_takes_nothing_and_its_launcher_all():
    assert share({}, hosts_per_trial=2, procs_per_host=3) == (3, None, {"CPU": 0})
    assert share({"CPU": 5, "GPU": 8}, hosts_per_trial=2, procs_per_host=2) == (5, 4, {"CPU": 0, "GPU": 0})
    assert share({"CPU": 5}, hosts_per_trial=2, cpus_per_trial=6, gpus_per_trial=2) == (6, 1, {"CPU": 0})
    options = SweepOptions(ray_address="auto", hosts_per_trial=2, procs_per_host=2)
    words = launch_command(options.trial_resources({"GPU": 4}), ["train"])
    assert words[words.index("--hosts") + 1] == words[words.index("--procs-per-host") + 1] == "2"
    assert words[words.index("--cpus-per-host") + 1] == "2"
    assert words[words.index("--gpus-per-host") + 1] == "2"


@pytest.mark.parametrize(
    ("rules", "given", "said"),
    [
        ({"rack7": 1, "CPU": 1}, {"hosts_per_trial": 2}, "resources: rack7: a trial of --hosts_per_trial 2"),
        ({"GPU": 3}, {"hosts_per_trial": 2}, r"resources\.GPU: 3 is not a multiple of the 2 processes"),
        ({"GPU": 0.5}, {"procs_per_host": 2}, r"resources\.GPU: 0\.5 is not a multiple of the 2 processes"),
    ],
)
def test_what_cannot_be_dealt_is_refused(rules, given, said):
    with pytest.raises(ValueError, match=said):
        share(rules, **given)


@one_test(
    ("name", "value", "said"),
    [
        ("cpus_per_trial", float("nan"), "--cpus_per_trial nan: must be more than 0, and finite"),
        ("cpus_per_trial", float("inf"), "--cpus_per_trial inf: must be more than 0, and finite"),
        ("workers", 10**9, "--workers 1000000000: must be at most 10,000"),
        ("procs_per_host", 10**20, "must be at most 10,000"),
        ("gpus_per_trial", 10**9, "must be at most 1,000,000"),
        ("max_trial_time", "1e20", "--max_trial_time 1e20: write seconds"),
        ("max_trial_time", "", "--max_trial_time has no value"),
        ("max_trial_time", "3651d", "up to 3650d"),
    ],
)
def test_numbers_that_no_machine_takes_are_refused(name, value, said):
    with pytest.raises(UserError, match=said):
        SweepOptions(**{name: value})


KILLED = "import os, signal; open('starts', 'a').write('x'); os.kill(os.getpid(), signal.SIGKILL)"


def test_a_trial_whose_rank_the_kernel_kills_is_started_again_by_the_sweep_alone(tmp_path):
    """As the kernel does where the host has no memory left: with restarts of the launcher too there would be 16."""
    asked = task(tmp_path / "study", program=program(KILLED), procs_per_host=2, directory=str(tmp_path))
    *_, last = trial.run(asked)
    assert last == {"lost": {"reason": "its process was killed by SIGKILL"}}
    assert len((tmp_path / "starts").read_text()) <= 2  # of two ranks


def test_parameters_become_a_config_once(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text("{method: grid, metric: {name: val_loss}, parameters: {lr: {values: [1, 2]}}}")
    (tmp_path / "c.txt").write_text("a text")
    made = []
    monkeypatch.setattr(sweep_run, "config_of", lambda *given: made.append(given[1]) or trial.config_of(*given))
    options = SweepOptions(sweep_config=str(tmp_path / "s.yaml"), study=str(tmp_path / "st"), data_path=str(tmp_path))
    opened = run.open_sweep(options, options.sweep_config, Config(dim=32), None)
    made.clear()
    opened.sampler()
    params = {"lr": 2.0}
    opened.trial_config(params)
    sent = opened.task_of(0, params, 0)
    opened.task_of(0, params, 1)
    assert made == [params]
    assert sent["config"]["lr"] == 2.0
    assert sent["config"]["dim"] == 32
    assert not sent["params"]
