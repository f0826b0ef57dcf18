"""Who only looks changes nothing: no file of a run, of a study or beside them, not even while a save is in progress."""

import hashlib
import shlex
import subprocess

import pytest
from commands import command, environment, start, wait_for
from made_study import made_study

from roxxel_dist import Config, Experiment, read_run
from roxxel_dist.cli import COMMANDS, main

TINY = {
    "dim": 16, "num_blocks": 1, "head_size": 8, "kv_heads": 1, "max_context": 16, "batch_size": 2, "max_steps": 2,
    "n_devices": 1, "checkpoint_every": 1, "log_every": 1, "tokenizer_type": "char", "sample": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, and the temporary folder of a save that is in progress."""
    folder = tmp_path_factory.mktemp("readers")
    (folder / "text.txt").write_text("the cat sat on a mat and the dog ran over a hill\n" * 40)
    Experiment(Config(**TINY)).fit(folder / "text.txt", folder / "run")
    (folder / "run" / "checkpoints" / "3.orbax-checkpoint-tmp-1" / "state").mkdir(parents=True)
    return folder / "run"


GRID = "{method: grid, metric: {name: val_loss, goal: minimize}, parameters: {lr: {values: [0.001]}}}"


@pytest.fixture(scope="module")
def place(run, tmp_path_factory):
    """Beside the run: a study, and two configs."""
    folder = run.parent
    made_study(folder, count=4)
    (folder / "tiny.yaml").write_text("".join(f"{name}: {value}\n" for name, value in TINY.items()))
    (folder / "grid.yaml").write_text(GRID)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield folder


def contents(folder, *, touched=False):
    """Of everything in a folder, and of itself: mode, size, the time of the last change, and a digest.

    `touched`: without the times of folders, in which a temporary file may have been made.
    """
    found = {}
    for path in (folder, *folder.rglob("*")):
        status, is_file = path.lstat(), path.is_file()
        data = path.read_bytes() if is_file else b""
        changed = 0 if touched and not is_file else status.st_mtime_ns
        found[path] = status.st_mode, status.st_size, changed, hashlib.sha256(data).hexdigest()
    return found


TRAIN = "train --config tiny.yaml"
LOOKS = {
    "eval run": 0,
    "generate run --prompt the --max_new_tokens 2": 0,
    "report run --out OUT": 0,
    "report study --out OUT": 0,
    "report study --out OUT --best_config OUT.yaml": 0,
    "top run --once": 0,
    "top study --once": 0,
    "top --once": 2,
    "verify run": 0,
    "verify run/data": 0,
    "audit run": 0,
    "compare run run": 0,
    "eval run@1:3": 0,
    "merge run@1:3 --out OUT": 0,
    "export run --format msgpack --out OUT": 0,
    "check-layouts --config tiny.yaml --data_path run/data --layouts tokens": 0,
    "batch run --step 1": 0,
    "batch tiny.yaml --step 1 --data_path run/data": 0,
    "data info run/data": 0,
    "data verify run/data": 0,
    "plan run": 0,
    "plan --config tiny.yaml --data_path run/data": 0,
    "find-lr --config tiny.yaml --data_path run/data --num_steps 60": 0,
    "sweep --config tiny.yaml --data_path text.txt --sweep_config grid.yaml --dry_run": 0,
    "sweep --study study --dry_run": 0,
    "launch local --nprocs 2 --dry-run -- train --config tiny.yaml --data_path text.txt --run_dir run": 0,
    "launch slurm --print --nodes 2 -- train --config tiny.yaml --data_path text.txt --run_dir new": 0,
    "ps": 0,
    "ps --all": 0,
    "logs run": 2,
    "stop run": 2,
    "join run --hosts a": 2,
    "leave run --hosts a": 2,
    "save run": 2,
    "attach run": 2,
    "completion bash": 0,
}
"""Command lines that look at what is there, and their exit codes; OUT is a path elsewhere."""
LONG = {
    *("audit run", "generate run --prompt the --max_new_tokens 2", "merge run@1:3 --out OUT", "eval run@1:3"),
    "check-layouts --config tiny.yaml --data_path run/data --layouts tokens",
    *(f"plan --config tiny.yaml --data_path {data}" for data in ("run/data", "text.txt")),
    *(f"find-lr --config tiny.yaml --data_path {data} --num_steps 60" for data in ("run/data", "text.txt")),
}
"""Commands that compile programs of their own to look: up to seconds each."""
TOUCHES = {
    "plan --config tiny.yaml --data_path text.txt": 0,
    "find-lr --config tiny.yaml --data_path text.txt --num_steps 60": 0,
    "doctor --check-devices off --run_dir run": 0,
    f"{TRAIN} --data_path text.txt --run_dir run": 2,
    f"{TRAIN} --data_path run/data --run_dir study": 2,
    f"{TRAIN} --data_path run/data --run_dir run/data": 2,
    f"{TRAIN} --run_dir run --resume": 0,  # it is finished
    f"{TRAIN} --run_dir run --resume --lr 0.1": 2,
    f"{TRAIN} --run_dir new --fork run@7": 2,
    f"{TRAIN} --run_dir new --data_path text.txt --batch_size 0": 2,
    "versus run --set lr=0.1 --study run": 2,
    "versus run --set lr=0.1 --study run/data": 2,
    "data build text.txt --out run/data": 2,
    "data build text.txt --out run": 2,
    "data append text.txt --out run/data --tokenizer byte": 2,
    "export run --format msgpack --out run": 2,
    "export run --format msgpack --out run/data --overwrite": 2,
    "copy run study": 2,
    "sweep --config tiny.yaml --data_path run/data --sweep_config grid.yaml --study study": 2,
}
"""The same of those that make a temporary file there, or would write, and refuse to or have nothing to do."""


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=pytest.mark.long if line in LONG else ()) for line in [*LOOKS, *TOUCHES]],
)
def test_who_only_looks_changes_nothing(place, tmp_path, line):
    """Neither the run, its data, a study, nor the folder that they are in."""
    before = contents(place, touched=line in TOUCHES)
    assert main([word.replace("OUT", str(tmp_path / "out")) for word in line.split()]) == (LOOKS | TOUCHES)[line]
    assert contents(place, touched=line in TOUCHES) == before


def test_every_command_that_looks_is_in_the_list():
    assert set(COMMANDS) - {line.split()[0] for line in LOOKS | TOUCHES} == {"demo"}


def test_read_run_changes_no_file_of_a_run(run):
    before = contents(run)
    assert read_run(run).metrics
    assert contents(run) == before


READERS = {
    "eval": "eval RUN",
    "generate": "generate RUN --prompt the --max_new_tokens 2",
    "report": "report RUN --out OUT",
    "plan": "plan RUN",
    "batch": "batch RUN --step 1",
    "export": "export RUN --format msgpack --out OUT",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "batch" else pytest.mark.long) for name in READERS]
)
def test_a_reader_works_where_it_may_not_write(run, tmp_path, name):
    """The run is on a mount that is read-only, in a namespace of its own."""
    words = READERS[name].replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")).split()
    mount = f"mount --bind {run} {run} && mount -o remount,bind,ro {run} && ! touch {run}/x 2>/dev/null"
    line = f"{mount} && exec {shlex.join(command(*words))}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", line], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_save_beside_readers_is_complete(run, tmp_path):
    """A real training that saves at each step, while commands read its run."""
    folder = tmp_path / "live"
    words = ["--data_path", run / "data", "--run_dir", folder, "--checkpoint_every", 1, "--max_to_keep", 2]
    shape = ["--dim", 16, "--num_blocks", 1, "--head_size", 8, "--kv_heads", 1, "--max_context", 16, "--batch_size", 2]
    training = start("train", *words, *shape, "--max_steps", 40, "--sample", "off", cwd=tmp_path)
    try:
        wait_for(lambda: len(list(folder.glob("checkpoints/[0-9]*"))) > 0)
        while training.poll() is None:
            assert main(["report", str(folder)]) == 0
            assert main(["verify", str(folder)]) in (0, 1)  # 1: what it looks at is deleted meanwhile
            assert main(["top", str(folder), "--once"]) == 0
    finally:
        training.kill()
    assert training.wait(60) == 0, (tmp_path / "started.log").read_text()[-2000:]
    assert main(["verify", str(folder)]) == 0
    assert sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*")) == ["39", "40"]
