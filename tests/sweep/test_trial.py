"""Trials as real processes: what they report, how they fail, and that nothing of them outlives who started them."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import gone, make_corpus, rows, wait_for
from trials import BASE, program, split, task

from roxxel_dist.checkpoint.metadata import read_cursor
from roxxel_dist.place.directory import is_held
from roxxel_dist.process.file_lock import take_lock
from roxxel_dist.sweep.trial import process as process_module
from roxxel_dist.sweep.trial import trial as trial_module
from roxxel_dist.sweep.trial.process import TrialProcess, environment
from roxxel_dist.sweep.trial.trial import run

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
RUNNER = """
import json, sys
from roxxel_dist.sweep.trial.trial import run
for event in run(json.loads(sys.argv[1])):
    print(json.dumps(event), flush=True)
"""
NO_SHAPES = """
import jax.numpy as jnp
def loss(model, batch):
    return (jnp.ones((3, 4)) @ jnp.ones((5, 6))).sum()
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study beside its data."""
    folder = tmp_path_factory.mktemp("sweep")
    make_corpus(folder)
    return folder / "study"


def endless(study, trial, **more):
    """A trial that has far to go."""
    long = {**BASE, "phases": [{"steps": 100_000, "batch_size": 8, "seq_len": 33}]}
    return task(study, trial, config=long, **more)


def children(pid):
    """What a process has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def done(study):
    """The events of a trial that went to its end; its warm-up is longer than its run."""
    return list(run(task(study, params={"lr": 1e-3, "warmup_steps": 200})))


@pytest.mark.parametrize("kept", [True, False])
def test_a_trial_that_goes_on_without_its_checkpoint_says_that_it_starts_again(study, kept):
    """As one that was paused, whose checkpoints were deleted by hand."""
    number = 40 + kept
    checkpoints = study / "trials" / str(number) / "checkpoints"
    checkpoints.mkdir(parents=True)
    if kept:
        (checkpoints / "6").mkdir()
    events = run(endless(study, number, attempt=1))
    first = next(events)
    events.close()
    note = {"note": {"text": f"it starts from step 1 again: there is no checkpoint in {checkpoints}"}}
    assert (first == note) == (not kept)


def test_a_trial_reports_every_validation_and_then_its_best(study, done):
    pid, reports, last = split(done)
    assert pid is not None
    logged = {step: row["val_loss"] for step, row in rows(study / "trials" / "0").items() if "val_loss" in row}
    assert dict(reports) == {6: logged[6], 12: logged[12]}
    assert list(logged) == [1, 6, 12]
    result = last["result"]
    assert result["value"] == min(logged[6], logged[12])
    assert "stopped" not in result
    more = result["more"]
    assert (more["steps"], more["tokens"], more["parameters"]) == (12, 12 * 8 * 33, 38_560)
    assert more["train_loss"] == rows(study / "trials" / "0")[12]["train_loss"]
    assert more["ram_gb"] > 0
    assert more["tokens_per_s"] > 0
    assert json.dumps(last)
    log = (study / "logs" / "0.log").read_text()
    assert log.startswith("--- trial 0, attempt 0, ")
    assert "Step 12/12" in log
    assert gone(pid)


def test_a_warm_up_longer_than_the_run_is_cut_to_half_of_it(study, done):
    assert "warmup_steps 200 -> 6: half of the trial's 12 steps" in (study / "logs" / "0.log").read_text()
    assert yaml.safe_load((study / "trials" / "0" / "config.yaml").read_text())["warmup_steps"] == 6


def test_its_wandb_run_is_offline_and_in_the_studys_group(study, done):
    (file,) = (study / "trials" / "0" / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert b"study" in data  # the group
    assert data.count(b"val_loss") >= 3


def test_a_finished_trial_gives_its_result_again_at_once(study, done):
    before = (study / "logs" / "0.log").read_text()
    pid, reports, last = split(run(task(study, attempt=1)))
    _, first_reports, first = split(done)
    assert pid is None
    assert reports == first_reports
    assert last["result"]["value"] == first["result"]["value"]
    assert (study / "logs" / "0.log").read_text() == before


def test_the_metric_is_named_where_it_was_never_logged(study, done):
    *reports, last = run(task(study, metric="val_los", attempt=1))
    assert reports == []
    assert last["fail"]["kind"] == "error"
    assert "never reported 'val_los': it logged grad_norm, lr, " in last["fail"]["reason"]


@pytest.mark.long  # test_outcome.py has its last words, and test_program.py a metric that is no number
def test_a_loss_that_is_no_number_fails_it(study):
    _, reports, last = split(run(task(study, 1, params={"lr": 1e30}, config=BASE | {"wandb": "off"})))
    assert [step for step, _ in reports] == [1]
    assert (last["fail"]["kind"], last["fail"]["log"]) == ("nan", str(study / "logs" / "1.log"))
    assert last["fail"]["reason"].startswith("step 2 went wrong: its ")


@pytest.mark.long  # test_verdict.py has its last words
def test_shapes_that_do_not_fit_fail_it(study, tmp_path):
    (tmp_path / "noshapes.py").write_text(NO_SHAPES)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    asked = task(study, 2, config={**BASE, "loss": "noshapes:loss"}, environment={"PYTHONPATH": path})
    _, reports, last = split(run(asked))
    assert reports == []
    assert last["fail"]["kind"] == "shape", last
    assert "\n" not in last["fail"]["reason"]
    assert "Traceback" in (study / "logs" / "2.log").read_text()


def test_what_is_wrong_with_its_parameters_is_told_without_a_process(study):
    (event,) = run(task(study, 3, params={"lrr": 1}))
    assert event["fail"]["reason"] == "parameters: there is no field 'lrr': did you mean 'lr'?"


@pytest.mark.long
def test_one_that_is_stopped_saves_and_goes_on(study):
    events = run(endless(study, 4))
    pid = next(events)["start"]["pid"]
    assert [next(events)["report"]["step"] for _ in range(2)] == [6, 12]
    (training,) = children(pid)
    events.close()
    assert gone(training)
    folder = study / "trials" / "4"
    saved = read_cursor(folder)["step"]
    assert saved >= 6
    assert not is_held(folder)
    events, steps = run(endless(study, 4, attempt=1)), []
    while not steps or steps[-1] <= saved:
        steps += [event["report"]["step"] for event in [next(events)] if "report" in event]
    events.close()
    assert steps == sorted(set(steps))
    assert steps[0] == 6
    log = (study / "logs" / "4.log").read_text()
    assert "attempt 1" in log
    assert f"resuming after step {saved} of 100000" in log.replace(",", "")


def test_too_little_time_to_report_anything(study):
    asked = task(study, 5, program=program(SLEEP), max_time_s=0.5)
    _, _, last = split(run(asked))
    assert last["fail"]["kind"] == "time"
    assert "it reported no 'val_loss' within its 0.5 s" in last["fail"]["reason"]


def test_one_that_does_not_want_to_stop_is_killed(study, monkeypatch):
    monkeypatch.setattr(process_module, "STOP_LIMIT_S", 1.0)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEP
    events = run(task(study, 6, program=program(stubborn)))
    pid = next(events)["start"]["pid"]
    wait_for(lambda: "\nup\n" in (study / "logs" / "6.log").read_text())
    (started,) = children(pid)
    began = time.monotonic()
    events.close()
    assert time.monotonic() - began < 60
    assert gone(started)


def test_a_full_disk_is_not_the_fault_of_its_parameters(study):
    full = "import sys; print('OSError: [Errno 28] No space left on device'); sys.exit('RuntimeError: loop is closed')"
    _, _, last = split(run(task(study, 61, program=program(full))))
    assert last == {
        "fatal": {"reason": "a trial could not write (No space left on device): make room, and start the sweep again"}
    }


def test_a_killed_one_is_lost_and_not_failed(study):
    events = run(task(study, 7, program=program(SLEEP)))
    pid = next(events)["start"]["pid"]
    wait_for(lambda: children(pid))
    os.kill(children(pid)[0], signal.SIGKILL)
    assert list(events) == [{"lost": {"reason": "its process was killed by SIGKILL"}}]


def test_nothing_of_it_outlives_a_killed_task(study):
    """Its shell, what that has started, and what has left its session: all go with the process that called `run`."""
    text = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True);"
    words = json.dumps(task(study, 8, program=["/bin/sh", "-c", 'exec "$0" "$@"', *program(text + SLEEP)]))
    with subprocess.Popen([sys.executable, "-c", RUNNER, words], stdout=subprocess.PIPE, text=True) as runner:
        pid = json.loads(runner.stdout.readline())["start"]["pid"]
        wait_for(lambda: (study / "logs" / "8.log").read_text().count("up\n") == 2)
        (first,) = children(pid)
        (second,) = children(first)
        runner.kill()
    wait_for(lambda: gone(pid) and gone(first) and gone(second), 30, "the end of all")


def test_a_held_run_directory_names_who_holds_it(study, monkeypatch):
    monkeypatch.setattr(trial_module, "LOCK_LIMIT_S", 0.3)
    folder = study / "trials" / "9"
    folder.mkdir(parents=True)
    lock = take_lock(folder / ".lock")
    (event,) = run(task(study, 9))
    os.close(lock)
    assert (
        f"another process (pid {os.getpid()} on host {socket.gethostname()}) holds {folder}" in event["lost"]["reason"]
    )


@pytest.mark.long
def test_a_killed_rank_of_two_is_lost_once_and_its_trial_goes_on(study):
    config = {**BASE, "phases": [{"steps": 60, "batch_size": 8, "seq_len": 33}]}
    events = run(task(study, 10, procs_per_host=2, config=config))
    found = [next(events), next(events)]
    ranks = [int(line) for line in _ranks(study / "trials" / "10")]
    os.kill(ranks[1], signal.SIGKILL)
    *_, lost = [*found, *events]
    assert lost == {"lost": {"reason": "its process was killed by SIGKILL"}}
    _, reports, last = split(run(task(study, 10, attempt=1, procs_per_host=2, config=config)))
    steps = [step for step, _ in reports]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60
    assert last["result"]["value"] == min(value for _, value in reports)
    log = (study / "logs" / "10.log").read_text()
    assert log.count("--- trial 10") == 2
    assert log.count("rank 1 failed first") == 1


def _ranks(folder):
    """The pids of the ranks of a run, in their order."""
    found = {}
    for name in os.listdir("/proc"):
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes() if name.isdigit() else b""
            words = Path(f"/proc/{name}/cmdline").read_bytes() if environ else b""
        except OSError:
            continue
        if b"ROXXEL_PROCESS_ID=" in environ and str(folder).encode() in words and b"launcher.host.worker" in words:
            found[environ.split(b"ROXXEL_PROCESS_ID=")[1].split(b"\0")[0]] = name
    return [found[rank] for rank in sorted(found)]


def test_a_program_is_waited_for_where_many_files_are_open(tmp_path):
    """select() knows no descriptor from 1,024 on, and a worker of Ray may have more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        child = TrialProcess([sys.executable, "-c", "raise SystemExit(3)"], environment({}), tmp_path / "log", "title")
        while child.wait(1.0) is None:
            pass
        assert child.end() == 3
    finally:
        for file in many:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_hears_of_a_closed_terminal_where_its_worker_does_not(tmp_path):
    asks = "import signal; raise SystemExit(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        child = TrialProcess([sys.executable, "-c", asks], environment({}), tmp_path / "log", "title")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while child.wait(1.0) is None:
        pass
    assert child.end() == 0, child.output()


@pytest.mark.long
def test_a_warm_up_that_was_cut_stays_so_where_the_trial_goes_on(tmp_path):
    make_corpus(tmp_path)
    asked = task(tmp_path / "study", params={"warmup_steps": 200}, environment={"JAX_PLATFORMS": "cpu"})
    _, _, last = split(run(asked))
    (tmp_path / "study" / "trials" / "0" / "training_cursor.json").unlink()
    _, _, again = split(run(asked))
    assert again["result"]["value"] == last["result"]["value"]
