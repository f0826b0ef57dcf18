"""What `top` shows of real runs, studies and jobs, as a frame and in a terminal."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from browser import data_of
from commands import command, environment, wait_for
from job_desk import LIMIT_S
from made_study import made_study
from ranks import RANK
from runs import rows

import roxxel_dist
from roxxel_dist.cli import main
from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.process.file_lock import hold_folder
from roxxel_dist.sweep.study.journal import Journal
from roxxel_dist.train.log.timeline import read_timeline
from roxxel_dist.view import items
from roxxel_dist.view.frame import Look, frame
from roxxel_dist.view.items import Watched, items_of, read
from roxxel_dist.view.read import Columns
from roxxel_dist.view.run import RunReader
from roxxel_dist.view.web.sections import sections


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a run."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "one"))


def text(state, width, height, **look):
    lines = frame([state], Look(width=width, height=height, **look), "q quit")
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_a_frame_has_the_numbers_of_the_run(run, size):
    state, last = RunReader(run).read(), rows(run)[-1]
    seen = text(state, *size)
    assert "step 10 of 10 (100.0%)" in seen
    assert f"loss {last['train_loss']:.4f}" in seen
    assert "phase 2 of 2" in seen
    assert "steps 7 to 10, 1 rows x 33 tokens" in seen
    assert "saved  step 10 on disk" in seen
    assert "goodput" in seen
    assert seen.endswith("q quit")
    assert text(state, *size, ascii_only=True).isascii()


def test_how_a_phase_is_cut_is_seen(trained):
    """In the timeline, in a frame and on the page: of whole rows nothing, of a cut row the line of the log."""
    layout = "1 row, cut along the tokens over 2 devices"
    steps = [row for row in read_timeline(trained) if row["activity"] == "step"]
    assert [row.get("layout") for row in steps if row["steps"][1] <= 6] == [None] * 6
    assert {row.get("layout") for row in steps if row["steps"][0] > 6} == {layout}
    state = RunReader(trained).read()
    assert layout in text(state, 80, 24)
    assert json.loads(sections(state)["phases"])["layout"] == layout


def test_a_phase_and_a_damaged_checkpoint_are_seen_by_the_same_reader(run):
    log = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(log[:6]) + log[6][:20])
    reader = RunReader(run)
    assert "phase 1 of 2" in text(reader.read(), 80, 24)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(log[6][20:])
    assert "phase 2 of 2" in text(reader.read(), 80, 24)
    (run / "checkpoints" / "10").rename(run / "checkpoints" / "10.damaged")
    seen = text(reader.read(), 80, 24)
    assert "damaged  10.damaged: renamed" in seen
    assert "saved  step 8 on disk" in seen


def test_the_realised_blend_is_what_the_steps_read(corpus, tmp_path):
    plan = roxxel_dist.Curriculum(corpus, [Phase(40, 8, 33), Phase(20, 4, 65)], {"b": corpus}).plan(0)
    assert plan.rows_read(3, 50) == {"self": 37 * 8 + 10 * 4, "b": 0}
    blend = Phase(300, 4, 65, weights={"self": 0.7, "b": 0.3}, blend="row")  # several passes, and one that leaves
    plan = roxxel_dist.Curriculum(corpus, [blend], {"b": corpus}).plan(0)
    counts = sum(np.bincount(plan.rows(step).dataset, minlength=2) for step in range(5, 290))
    assert list(plan.rows_read(5, 290).values()) == counts.tolist()


def top(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["top", *map(str, words)]) == 0
    return out.getvalue()


def test_json_and_a_list(run, monkeypatch):
    shutil.copytree(run, run.with_name("two"))
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent.parent))  # other tests have jobs that live
    (one,) = json.loads(top("--json", "runs/one"))
    assert (one["kind"], one["state"], one["step"], one["phase"]) == ("run", "finished", 10, 2)
    listed = top("--once")  # nothing lives
    assert "runs/one" in listed
    assert "runs/two" in listed
    assert "\x1b" not in listed


def test_a_study(tmp_path):
    study = made_study(tmp_path, 12)
    seen = top("--once", study)
    assert "12 trial(s)" in seen
    assert "trial 11" not in seen.splitlines()[0]
    assert re.search(r"^11 +interrupted", seen, re.MULTILINE)
    table = roxxel_dist.read_study(study)
    assert table.trials["trial"].tolist() == list(range(12))
    assert np.nanmin(table.trials["value"]) == table.trials["value"][table.best]
    (values,) = json.loads(top("--json", study))
    assert (values["kind"], values["workers"], len(values["trials"])) == ("study", 0, 12)
    assert table.run(0).metrics["val_loss"].shape == (6,)


def test_a_paused_trial_and_what_paused_it(tmp_path, capsys):
    study = made_study(tmp_path, 6, early_terminate={"type": "asha", "min_iter": 2})
    with Journal(study, print) as journal:
        pause = {"step": 5, "value": 3.5, "rule": "asha", "reason": "2 of 6 are better", "seconds": 1.0}
        journal.append({"event": "pause", "trial": 5, **pause})
    seen = top("--once", study)
    assert re.search(r"^5 +paused: asha +5 ", seen, re.MULTILINE)
    assert "1 paused" in seen
    assert "scheduler asha" in seen
    (values,) = json.loads(top("--json", study))
    assert values["trials"][5]["state"] == "paused"
    assert main(["report", str(study)]) == 0
    assert re.search(r"^ *5 +\S+ +paused ", capsys.readouterr().out, re.MULTILINE)
    (item,) = data_of((study / "report" / "report.html").read_text())["items"].values()
    assert (item["trial/5"]["state"], item["trial/5"]["why"]) == ("paused", "asha at step 5")
    with Journal(study, print) as journal:
        journal.append({"event": "thaw", "trial": 5, "step": 5, "value": 3.5, "rule": "asha", "reason": ""})
    assert re.search(r"^5 +interrupted +5 ", top("--once", study), re.MULTILINE)


def test_read_run(run):
    data, logged = roxxel_dist.read_run(run), rows(run)
    assert data.metrics["step"].tolist() == [row["step"] for row in logged]
    assert np.isnan(data.metrics["val_loss"][0]) == ("val_loss" not in logged[0])
    assert [(phase.first, phase.last) for phase in data.phases] == [(1, 6), (7, 10)]
    assert data.checkpoints[-1].step == 10
    with contextlib.nullcontext() if find_spec("pandas") else pytest.raises(ImportError, match="pandas"):
        assert data.metrics.to_pandas()["train_loss"].iloc[-1] == logged[-1]["train_loss"]
    assert len(repr(data)) < 400
    assert "0x" not in repr(data)
    assert repr(data.metrics).startswith(f"<Columns of {len(logged)} rows: step, ")
    with pytest.raises(ValueError, match="did you mean"):
        roxxel_dist.read_run(run.with_name("onee"))


def test_what_a_study_shows_at_a_prompt(tmp_path):
    shown = repr(roxxel_dist.read_study(made_study(tmp_path, 6)))
    assert re.fullmatch(r"<StudyData .*: minimize val_loss, <Columns of 6 rows: trial, .*>, the best is \d>", shown)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an empty list of jobs, in which `top` looks again at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(items, "LOOK_S", 0.0)
    return tmp_path


def begin_job(name):
    """A job that runs in runs/NAME, of this process as its launcher."""
    job = JobSpec(run_id=name, command=("train",), nprocs=1, log_dir=Path("runs", name, "logs"))
    recorder = JobRecorder(job, LocalBackend()).__enter__()
    recorder.update(state="running")
    return recorder


def begin_run(name, step=1):
    """A run that has logged a step; returns the function that ends its training."""
    release = hold_folder(Path("runs", name), "training in")
    with Path("runs", name, "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "train_loss": 2.5}}\n')
    return release


def names(watched):
    watched.look([read(item, brief=True) for item in watched.items])
    return [item.name for item in watched.items]


@pytest.mark.parametrize("words", [(), ("one",)])
def test_top_that_was_opened_before_the_first_row_shows_the_curve(place, words):
    job = begin_job("one")
    watched = Watched(words)
    assert names(watched) == ["one"], "the job, which has no run directory yet"
    end = begin_run("one")
    assert names(watched) == ["runs/one"]
    (state,) = [read(item) for item in watched.items]
    assert (state.losses, state.job) == ([(1, 2.5)], "one")
    reader = watched.items[0].reader
    end()
    job.end(0)
    job.__exit__()
    begin_run("one", step=2)
    begin_job("one")
    assert names(watched) == ["runs/one"], "the job is launched again"
    assert watched.items[0].reader is reader, "what was read is kept"
    assert read(watched.items[0]).step == 2


def test_top_goes_on_to_a_newer_run_when_its_own_has_ended(place):
    end = begin_run("one")
    watched = Watched(())
    assert names(watched) == ["runs/one"]
    begin_job("two")
    begin_run("two")
    assert names(watched) == ["runs/one"], "it lives"
    end()
    assert names(watched) == ["runs/two"]


def test_top_stays_at_a_run_that_has_ended_where_none_lives(place):
    begin_run("old")()
    end = begin_run("one")
    watched = Watched(())
    end()
    assert names(watched) == ["runs/one"]
    shutil.rmtree("runs")
    assert names(watched) == ["runs/one"]


@pytest.mark.parametrize("words", [("studies",), ()])
def test_a_study_that_cannot_be_read_hides_no_other(place, words):
    Path("studies").mkdir()
    made_study(Path(), 2).rename("studies/one")
    shutil.copytree("studies/one", "studies/damaged")
    Path("studies/damaged/study.yaml").write_text("method: guess\n")
    with Path("studies/one/journal.jsonl").open("a") as file:
        file.write('{"event": "ask", "trial": 9, "params": {"lr": {"$float": "x"}}, "point": []}\n')
    (item,) = items_of(words)
    assert (item.name, len(read(item).study.history.trials)) == ("studies/one", 2)
    shutil.rmtree("studies/one")
    with pytest.raises(ValueError, match=r"studies/damaged/study\.yaml, line 1: method: 'guess'"):
        items_of(words)


@pytest.mark.parametrize("words", [(), ("runs",)])
def test_a_list_has_the_runs_that_begin_while_it_is_open(place, words):
    for name in ("one", "two"):
        begin_run(name)()
    watched = Watched(words)
    assert sorted(names(watched)) == ["runs/one", "runs/two"]
    begin_run("three")
    assert sorted(names(watched)) == ["runs/one", "runs/three", "runs/two"]


@pytest.mark.parametrize(
    ("last_step", "phases", "rows", "saved", "seen"),
    [
        (20, 22, 20, 20, "stopped  step 20 of 20 (100.0%)"),  # max_steps ends it before its phases do
        (400, 400, 270, 279, "stopped  step 279 of 400 (69.8%)"),  # a step that was saved and not logged
        (0, 22, 5, 0, "stopped  step 5 of 22 (22.7%)"),  # no checkpoint yet
        (20, 30, 25, 20, "stopped  step 25 of 30 (83.3%)"),  # it was resumed with more steps
    ],
)
def test_the_step_and_the_last_step_of_a_run_are_those_of_its_training(place, last_step, phases, rows, saved, seen):
    begin_run("one", rows)()
    run = Path("runs/one")
    (run / "config.yaml").write_text(f"phases: [{{steps: {phases}, batch_size: 8, seq_len: 17}}]")
    if last_step:
        cursor = {"step": saved, "last_step": last_step, "finished": False}
        (run / "training_cursor.json").write_text(json.dumps(cursor))
    (run / "checkpoints" / str(saved)).mkdir(parents=True)
    assert f"runs/one  {seen}" in text(RunReader(run).read(), 100, 24)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_stopped_rank_and_a_restart_are_seen_in_a_terminal(tmp_path):
    (tmp_path / "rank.py").write_text(RANK.replace("rank == 1", "rank == 0"))
    env = environment(XDG_STATE_HOME=str(tmp_path / "state"), TMUX_TMPDIR=str(tmp_path), NO_COLOR="1")
    for name in ("TMUX", "COLUMNS", "LINES"):
        env.pop(name, None)
    words = command("launch", "local", "--nprocs", 1, "--max-restarts", 2, "--warm-spares", "off", "--", "rank.py")
    tmux = ["tmux", "-u", "-f", "/dev/null"]
    with (tmp_path / "launcher").open("w") as log:
        job = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=log)

    def screen():
        time.sleep(0.2)  # a look is a process
        return subprocess.run([*tmux, "capture-pane", "-p"], env=env, capture_output=True, text=True).stdout

    def record():
        (path,) = tmp_path.glob("runs/*/logs/launcher.json")
        return json.loads(path.read_text())

    def ready():
        with contextlib.suppress(ValueError):
            return len(record()["ranks"]) == 1 and all(rank["step"] for rank in record()["ranks"])
        return False

    try:
        wait_for(ready, LIMIT_S, "the ranks")
        subprocess.run(
            [*tmux, "new-session", "-d", "-x", "80", "-y", "24", *command("top")], cwd=tmp_path, env=env, check=True
        )
        wait_for(lambda: "in a step" in screen(), LIMIT_S, "the ranks on the screen")
        assert "q quit" in screen()
        stopped = record()["ranks"][0]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: re.search(r"^0 .*stopped", screen(), re.MULTILINE), LIMIT_S, "the stopped rank")
        os.kill(stopped, signal.SIGCONT)
        (tmp_path / "die").touch()
        wait_for(lambda: "restart " in screen() and "SIGKILL" in screen(), LIMIT_S, "the restart")
        subprocess.run([*tmux, "resize-window", "-x", "120", "-y", "40"], env=env, check=True)
        wait_for(
            lambda: "q quit" in screen().splitlines()[-1:][0] and len(screen().splitlines()) == 40, LIMIT_S, "40 lines"
        )
        subprocess.run([*tmux, "send-keys", "q"], env=env, check=True)
        wait_for(lambda: not screen(), LIMIT_S, "the end of top")
    finally:
        subprocess.run([*tmux, "kill-server"], env=env, capture_output=True)
        job.send_signal(signal.SIGQUIT)
        job.wait(LIMIT_S)


@pytest.mark.parametrize("values", [[2**64 + 1, 1, None], [10**30 + 1, 1.5], [2**53, 2**53 + 1]], ids=str)
def test_a_column_keeps_whole_numbers_that_no_float_is(values):
    column = Columns([{"n": value} for value in values])["n"]
    assert column.dtype == object
    assert column.tolist() == values
    assert Columns([{"n": 2**53}, {"n": None}])["n"].dtype == float


def test_what_has_no_number_yet_says_so(tmp_path, capsys):
    run, study = tmp_path / "run", made_study(tmp_path, count=1)
    run.mkdir()
    (run / "config.yaml").write_text("dim: 32\n")
    (run / "metrics.jsonl").write_text('{"step": 3, "accuracy": 0.5}\n')
    (study / "journal.jsonl").write_text((study / "journal.jsonl").read_text().split("\n")[0] + "\n")
    assert [main(["top", str(run), "--once"]), main(["report", str(study)])] == [0, 0]
    said = capsys.readouterr().out
    assert "no loss yet" in said
    assert "0 trial(s); random" in said
