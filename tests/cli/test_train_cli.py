"""`train` on the command line: what a run can be changed to, what it leaves, and what disks do to it.

One run is trained by a process; what goes on with it, or is refused, is called here.
"""

import csv
import json
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import TINY, make_corpus, rows, run, start, wait_for
from small_disks import mounted_disk

from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.cli import main
from roxxel_dist.weights.files import read_weights

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "files.md"

TRAIN = ["train", "--config", "tiny.yaml", "--data_path", "data", "--n_devices", 1, "--run_dir"]
LONGER = "[{steps: 12, batch_size: 8, seq_len: 33}, {steps: 14, batch_size: 8, seq_len: 33}]"
CUT = 8


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a corpus, and the first eight steps of a run, with everything on, in `cut`."""
    folder = tmp_path_factory.mktemp("train")
    make_corpus(folder)
    same = TINY.replace("batch_size: 4, seq_len: 65", "batch_size: 8, seq_len: 33")  # one program for both phases
    (folder / "tiny.yaml").write_text(same)
    more = ["--max_steps", CUT, "--profile_steps", 3, 4, "--validation", "{same: data}", "--wandb", "offline"]
    result = run(*TRAIN, "cut", *more, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    (folder / "said").write_text(result.stdout)
    return folder


@pytest.fixture
def call(work, monkeypatch, capfd):
    """(exit code, stdout, stderr) of a command, run here in the folder of `work`."""
    monkeypatch.chdir(work)

    def call(*words):
        capfd.readouterr()
        code = main([str(word) for word in words])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def cut(work, tmp_path):
    """A copy of that run, and the words that go on with it."""
    shutil.copytree(work / "cut", tmp_path / "cut")
    return [
        "train", "--config", tmp_path / "cut" / "config.yaml", "--run_dir", tmp_path / "cut", "--resume",
        "--max_steps", 22, "--wandb", "off",
    ]  # fmt: skip


def refused(said, *messages):
    code, *text = said
    text = "".join(text)
    assert code == 2, text
    assert "Traceback" not in text
    for message in messages:
        assert message in text, text


def documented():
    """Every name in the first column of the table of the page of files."""
    section = PAGE.read_text().split("\n## A run\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_folder_is_as_documented(work):
    folder = work / "cut"
    names = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    assert names == (documented() - {"data/", "tensorboard/"}) | {".lock"}  # data/ is made of text
    for inner in ("logs/rank-0.log", "plots/loss.png", f"checkpoints/{CUT}/meta.json"):
        assert (folder / inner).stat().st_size > 0


def test_the_weights_are_those_of_the_checkpoints(work):
    store = CheckpointReader(work / "cut" / "checkpoints")
    newest, best = store.latest_step(), store.best_step()
    store.close()
    _, steps = zip(
        *(read_weights(work / "cut" / f"{which}model_weights.msgpack") for which in ("", "best_")), strict=True
    )
    assert steps == (newest, best) == (CUT, best)


def test_the_summary_counts_by_part(work):
    summary = json.loads((work / "cut" / "model_summary.json").read_text())
    params, _ = read_weights(work / "cut" / "model_weights.msgpack")
    assert summary["parameters"] == sum(array.size for array in params.values())
    assert set(summary["parameters_by_part"]) == {"embedding", "blocks", "norm"}
    assert sum(summary["parameters_by_part"].values()) == summary["parameters"]
    assert summary["parameters_by_part"]["embedding"] == params["embedding.embedding"].size
    assert summary["dtype"] == "float32"
    assert summary["weights_mem_MB"] == 4 * summary["parameters"] / 1e6
    moments = summary["optimizer_mem_MB"] - 2 * summary["weights_mem_MB"]
    assert 0 <= moments < 0.001  # besides two moments a few counts


def test_what_the_options_leave(work):
    folder = work / "cut"
    assert list((folder / "profile").rglob("*.xplane.pb"))
    assert "profile of steps 3 to 4" in (work / "said").read_text()
    assert list((folder / "wandb").rglob("*.wandb"))
    found = rows(folder)
    assert [step for step, row in found.items() if "val_loss/same" in row] == [1, 6, 8]
    assert found[6]["val_loss/same"] == found[6]["val_loss"]
    assert "0 held out" in (work / "said").read_text()


def test_an_edited_curriculum_needs_amend(call, cut):
    before = sorted(cut[4].rglob("*"))
    said = call(*cut, "--phases", LONGER)
    refused(said, "phases is", "leave it as it was, or start a new run (or change it from here on with --amend)")
    assert sorted(cut[4].rglob("*")) == before


def test_amend_goes_with_resume(work, call):
    refused(call(*TRAIN, "new", "--amend", "--phases", LONGER), "--amend changes a run that is resumed: add")
    refused(call("train", "--data_path", "data", "--resume"), "--resume does not say which run")
    assert not (work / "new").exists()


@pytest.mark.long
def test_an_amended_run(work, call, cut):
    """Both plans and the learning rate are shown first; later steps, and `batch`, keep to the new plan."""
    words = [*cut[:-4], "--max_steps", 26, "--wandb", "off", "--amend", "--phases", LONGER]
    code, said, err = call(*words)
    assert code == 0, said + err
    until, now = said.index("the plan until now:"), said.index(f"the plan from step {CUT + 1} on:")
    rate = said.index(f"learning rate of step {CUT + 1}: ")
    assert until < now < rate < said.index("Step  9/26")
    assert "learning rate of the last step" in said
    assert "changed since the run began: phases" in said
    found = rows(cut[4])
    assert list(found) == list(range(1, 27))
    assert {step: found[step]["train_loss"] for step in range(1, CUT + 1)} == {
        step: row["train_loss"] for step, row in rows(work / "cut").items()
    }
    code, last, err = call("batch", cut[4], "--step", 26)
    assert code == 0, err
    assert last.startswith("step 26 of 26, phase 2 of 2: 8 rows x 33 tokens")
    old, new = (call("batch", folder, "--step", CUT)[1].splitlines()[1:] for folder in ("cut", cut[4]))
    assert old == new
    assert len(old) == 8
    code, again, err = call(*cut[:-4], "--max_steps", 26, "--wandb", "off")
    assert code == 0, err
    assert "this run is finished: its last step, 26" in again


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use_bf16", "True"], "use_bf16 is True, and the run to resume has False"),
        (["--optimizer", "lion"], "optimizer is lion, and the run to resume has adamw"),
        (["--dim", 64], "dim is 64, and the run to resume has 32"),
        (["--seed", 7], "seed is 7, and the run to resume has 42"),
        (["--warmup_steps", 30], "warmup_steps is 30: it must be below the run's 22 steps"),
    ],
)
def test_what_a_resumed_run_cannot_change_is_named(call, cut, flags, message):
    refused(call(*cut, *flags), message)


@pytest.mark.long
def test_what_it_may_change_is_told(call, cut):
    code, said, err = call(*cut, "--lr", "1e-3", "--dropout_rate", 0.2, "--max_steps", 10)
    assert code == 0, said + err
    assert "changed since the run began: lr 0.003 -> 0.001" in said
    assert "changed since the run began: dropout_rate 0.1 -> 0.2" in said
    assert "resuming after step 8 of 10" in said


@pytest.mark.long
def test_checkpoints_of_another_model_are_named(call, cut):
    """A saved config that was edited by hand passes the comparison of configs."""
    saved = cut[4] / "config.yaml"
    saved.write_text(saved.read_text().replace("num_blocks: 2", "num_blocks: 3"))
    refused(call(*cut), "is of another model or optimizer (params/blocks.", "use the config")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--warmup_steps", 22], "warmup_steps is 22: it must be below the run's 22 steps"),
        (["--validation", "{a: nowhere}"], "nowhere"),
        (["--validation", "{a: 3}"], "validation"),
        (["--validation", "data"], "validation is 'data': it must be a mapping or nothing"),
        (["--profile_steps", 4, 3], "profile_steps is [4, 3]: it must be two steps"),
        (["--wandb", "maybe"], "wandb"),
    ],
)
def test_what_cannot_be(work, call, flags, message):
    refused(call(*TRAIN, "new", *flags), message)
    assert not (work / "new").exists()


@pytest.mark.long
def test_a_running_job_saves_when_it_is_asked(work):
    job = start(*TRAIN, "asked", "--phases", "[{steps: 100000, batch_size: 8, seq_len: 33}]",
                "--checkpoint_every", 100000, "--eval_every", 100000, cwd=work)  # fmt: skip
    try:
        wait_for(lambda: len(rows(work / "asked")) > 3, what="a step")
        said = run("save", "asked", cwd=work)
        assert said.returncode == 0, said.stderr
        step = int(said.stdout.removeprefix("saved: step "))
        assert (work / "asked" / "checkpoints" / str(step) / "meta.json").exists()
        assert step > 3
        assert job.poll() is None
        job.terminate()
        assert job.wait(60) == 42
    finally:
        job.kill()
        job.wait()
    store = CheckpointReader(work / "asked" / "checkpoints")
    assert step in store.steps()
    assert store.latest_step() > step
    store.close()


@pytest.fixture
def disk(tmp_path):
    """Mounts a file system of so many kilobytes."""
    with ExitStack() as mounts:
        yield lambda kilobytes: mounts.enter_context(mounted_disk(tmp_path / "disk", f"{kilobytes}k"))


@pytest.mark.long
def test_a_disk_with_room_for_one_checkpoint(work, call, disk):
    """The first save fits, the others do not: training goes on to its end, and the end says what is missing."""
    weights = json.loads((work / "cut" / "model_summary.json").read_text())
    one = (weights["weights_mem_MB"] + weights["optimizer_mem_MB"]) * 1000
    folder = disk(int(1.5 * one + 150))
    told_of_disk(folder, *call(*TRAIN, folder / "run"))
    again = call("generate", folder / "run", "--prompt", "import", "--max_new_tokens", 3)
    assert again[0] == 0, again


@pytest.mark.long
def test_a_disk_with_room_for_one_checkpoint_of_a_launched_run(work, disk):
    weights = json.loads((work / "cut" / "model_summary.json").read_text())
    one = (weights["weights_mem_MB"] + weights["optimizer_mem_MB"]) * 1000
    folder = disk(int(1.5 * one + 150))
    result = run("launch", "local", "--nprocs", 1, "--", *TRAIN, folder / "run", cwd=work)
    told_of_disk(folder, result.returncode, result.stdout, result.stderr)


def told_of_disk(folder, code, out, err):
    assert code == 1, out + err
    assert "Traceback" not in out + err
    lost = "the checkpoint of step 5 could not be saved in"
    assert lost in out
    assert "Training continues, and the next save is tried" in out
    assert "the checkpoint of step 22 could not be saved in" in err
    assert "No space left on device); the newest complete one is of step 1" in err
    assert lost in (folder / "run" / "logs" / "rank-0.log").read_text()
    with (folder / "run" / "training_log.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 23))
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["1"]


@pytest.mark.long
def test_a_disk_that_is_full_from_the_start(call, disk):
    folder = disk(64)
    (folder / "filler").write_bytes(bytes(60 << 10))
    refused(call(*TRAIN, folder / "run"), "No space left on device")


def test_a_run_directory_that_can_only_be_read(work, call, disk):
    folder = disk(20_000)
    shutil.copytree(work / "cut", folder / "run")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    words = ["train", "--config", "tiny.yaml", "--run_dir", folder / "run", "--resume", "--max_steps", 10]
    refused(call(*words), "cannot be written (Read-only file system): choose another folder")
    refused(call(*TRAIN, folder / "new"), "cannot be written (Read-only file system): choose another folder")


@pytest.mark.long
def test_a_loss_that_is_no_number_is_one_message(call, tmp_path):
    """A learning rate that no model survives."""
    words = ["--lr", "1e38", "--grad_clip", 0, "--warmup_steps", 0]
    code, out, err = call(*TRAIN, tmp_path / "wild", *words)
    assert code == 1, out + err
    assert re.search("step 2 went wrong: its (loss|gradient) is", err)
    assert "Its rows begin at self token" in err
    assert "Traceback" not in out + err
    assert "Traceback" in (tmp_path / "wild" / "logs" / "rank-0.log").read_text()
