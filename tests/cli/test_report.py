"""Runs side by side, from what real runs left on disk: finished, living, killed, and without this or that."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from matplotlib.legend import Legend
from runs import make
from runs import rows as logged

from roxxel_dist import Phase
from roxxel_dist.cli import main
from roxxel_dist.cli.report import report_table
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.process.exit_codes import pip_install
from roxxel_dist.run.report import differences, read_runs
from roxxel_dist.train.log.timeline import SPENT

PNG = b"\x89PNG\r\n"


@pytest.fixture
def here(pair, tmp_path, monkeypatch):
    """A copy of the runs, in the working directory."""
    shutil.copytree(pair / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(text):
    """The first column to the others."""
    parts = [[part for part in line.split("  ") if part.strip()] for line in text.splitlines()]
    return {part[0].strip(): [cell.strip() for cell in part[1:]] for part in parts if part}


def test_two_runs_side_by_side(here, capsys):
    assert main(["report", "runs/one", "runs/two"]) == 0
    text = capsys.readouterr().out
    found, rows = lines(text), [logged(here / "runs" / name) for name in ("one", "two")]
    assert found["one"] == ["two"]  # the heading
    assert found["steps"] == ["8", "8"]
    assert found["tokens"] == [f"{8 * 8 * 17:,}"] * 2
    assert found["train_loss"] == [f"{one[-1]['train_loss']:.4f}" for one in rows]
    assert found["val_loss"] == [f"{one[-1]['val_loss']:.4f}" for one in rows]
    assert found["val_bpb"] == [f"{one[-1]['val_bpb']:.4f}" for one in rows]
    best = [min((row for row in one if "val_loss" in row), key=lambda row: row["val_loss"]) for one in rows]
    assert found["best val_loss"] == [f"{row['val_loss']:.4f} (step {row['step']})" for row in best]
    parameters = json.loads((here / "runs" / "one" / "model_summary.json").read_text())["parameters"]
    assert found["parameters"] == [f"{parameters:,}"] * 2
    assert found["lr"] == ["0.0003", "0.01"]
    assert found["warmup_steps"][1] == "2"
    assert not {"dim", "phases", "seed", "record", "data_path"} & set(found)
    shares = [sum(float(found[kind][i * 2].rstrip("%")) for kind in SPENT) for i in (0, 1)]
    assert shares == pytest.approx([100, 100], abs=0.5)
    for name in ("loss.png", "goodput.png"):
        assert (here / "report" / name).read_bytes().startswith(PNG)
        assert f"report/{name}" in text


def test_json_has_what_the_table_rounds(here, capsys):
    assert main(["report", "runs/one", "runs/two", "--json", "--out", "pictures/of both"]) == 0
    told = json.loads(capsys.readouterr().out)
    one, rows = told["runs"][0], logged(here / "runs" / "one")
    assert one["name"] == "one"
    assert one["train_loss"] == rows[-1]["train_loss"]
    assert set(one["spent"]) == set(SPENT)
    assert one["goodput"] == one["spent"]["training"] / sum(one["spent"].values())
    assert set(told["differences"]) == {"lr", "warmup_steps"}
    assert told["pictures"] == ["pictures/of both/loss.png", "pictures/of both/goodput.png"]


def test_the_name_of_a_run_is_no_formula(here, monkeypatch, capfd):
    names, shown = ["runs/$\\frac$ 中", "runs/_two"], []
    os.rename("runs/one", names[0])
    os.rename("runs/two", names[1])
    monkeypatch.setattr(Legend, "draw", lambda legend, _: shown.extend(text.get_text() for text in legend.get_texts()))
    assert main(["report", *names]) == 0
    assert "Glyph" not in capfd.readouterr().err
    assert {text.strip().partition(",")[0].replace(r"\$", "$") for text in shown} >= {r"$\frac$ 中", "_two"}


def test_phases_end_where_the_log_says_so(here):
    (run,) = read_runs(["runs/one"])
    assert run.phase_ends == [4 * 8 * 17]
    assert [tokens for tokens, _ in run.points("val_loss")] == [row["tokens"] for row in run.rows if "val_loss" in row]


def test_a_living_run(corpus, tmp_path, capsys):
    """Of a bare Trainer, too: no config, no summary, no validation."""
    seen = []

    class Look:
        durable = True

        def row(self, row):
            (run,) = read_runs([tmp_path / "run"])
            seen.append((row["step"], run.numbers(), report_table([run])))

        def close(self):
            pass

    made = make(corpus, tmp_path / "run", [Phase(6, 8, 17)], val_fraction=0.0, trackers=[Look()], mesh=make_mesh(1))
    made.run()
    made.close()
    assert [step for step, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert [numbers["steps"] for _, numbers, _ in seen] == [1, 2, 3, 4, 5, 6]
    numbers, text = seen[1][1:]
    assert numbers["parameters"] is numbers["val_loss"] is numbers["best_step"] is None
    assert numbers["spent"]["starting"] > 0
    assert lines(text)["best val_loss"] == lines(text)["parameters"] == ["-"]


def test_torn_lines_and_missing_files(here, capsys):
    run = here / "runs" / "two"
    for name in ("metrics.jsonl", "timeline.jsonl"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[:-7])
    (here / "runs" / "one" / "timeline.jsonl").unlink()
    (here / "runs" / "one" / "model_summary.json").write_text("{")
    assert main(["report", "runs/one", "runs/two"]) == 0
    found = lines(capsys.readouterr().out)
    assert found["steps"] == ["8", str(logged_before_last(run))]
    assert found["goodput"][0] == "-"
    assert found["parameters"][0] == "-"
    assert (here / "report" / "goodput.png").exists()


def logged_before_last(run):
    complete = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    return json.loads(complete[-1])["step"]


def test_a_run_that_logged_nothing_yet(here, capsys):
    for name in ("metrics.jsonl", "timeline.jsonl"):
        (here / "runs" / "one" / name).unlink()
    assert main(["report", "runs/one", "--out", "none"]) == 0
    found = lines(capsys.readouterr().out)
    assert found["steps"] == found["val_loss"] == found["goodput"] == found["training"] == ["-"]
    assert [path.name for path in (here / "none").iterdir()] == ["report.html"]


def test_a_run_without_validation(here, capsys):
    path = here / "runs" / "one" / "metrics.jsonl"
    kept = [{k: v for k, v in row.items() if "val" not in k} for row in logged(path.parent)]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert main(["report", "runs/one", "runs/two"]) == 0
    found = lines(capsys.readouterr().out)
    assert found["val_loss"][0] == found["best val_loss"][0] == "-"
    assert found["val_loss"][1] != "-"


def test_runs_of_one_name_and_fields_that_one_lacks(here):
    shutil.copytree("runs/two", "other/one")
    config = Path("other/one/config.yaml")
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("seed:")))
    runs = read_runs(["runs/one", "other/one", "runs/one"])  # named twice, told once
    assert [run.name for run in runs] == ["runs/one", "other/one"]
    assert differences(runs)["seed"] == [42, "-"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/on"], "there is no runs/on: did you mean runs/one?"),
        (["runs"], "runs is a folder of runs: name runs in it, such as runs/one and runs/two"),
        (["runs/one", "runs/one/data"], "runs/one/data is not a run directory: it has no config.yaml"),
        (["runs/xyzxyz"], "there is no runs/xyzxyz: runs has one, two"),
        (["runs/begun"], "runs/begun/config.yaml is empty: copy it again"),
        (["sweeps"], "sweeps is a folder of studies: name one of them, such as sweeps/a"),
        (["nowhere/at/all"], "there is no nowhere/at/all: name the folder of a run"),
        ([], "`report` needs RUNS (Run directories, or one study)"),
    ],
)
def test_what_is_no_run_is_one_message_and_exit_2(here, words, message, capsys):
    for name in ("runs/begun/config.yaml", "sweeps/a/config.yaml", "sweeps/a/journal.jsonl", "sweeps/a/study.yaml"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("dim: 32\n" if "sweeps" in name else "")
    try:
        code = main(["report", *words])
    except SystemExit as left:  # the parser of the words speaks for itself
        code = left.code
    assert code == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert not (here / "report").exists()


def test_without_matplotlib_there_is_the_table_and_jax_is_never_imported(here):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from roxxel_dist.cli import main\n"
        "code = main(['report', 'runs/one', 'runs/two'])\n"
        "print('jax' in sys.modules); sys.exit(code)"
    )
    path = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=environment(PYTHONPATH=path), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout)["steps"] == ["8", "8"]
    assert result.stdout.endswith("False\n")
    assert result.stderr == f"roxxel-dist: no pictures: they need matplotlib: {pip_install('plot')}\n"
    assert [path.name for path in (here / "report").iterdir()] == ["report.html"]
