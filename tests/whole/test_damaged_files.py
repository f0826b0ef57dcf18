"""A damaged file of a run, of a data set or of a study gives a message or is passed over: never a traceback."""

import shutil

import pytest
from made_study import made_study

from roxxel_dist.cli import main

SMALL = (
    "model: runs:build\ndim: 16\nmax_context: 16\nbatch_size: 8\nmax_steps: 2\neval_iters: 1\nn_devices: 1\n"
    "sample: 'off'\n"
)
DAMAGE = {
    "empty": b"", "list": b"[]", "object": b"{}", "binary": b"\xff\xfe\x00\x01",
    "types": b'{"step": "x", "last_step": [], "settings": 3, "event": "new", "format": "y", "shapes": 3, "meta": []}',
}  # fmt: skip
RUN = [
    ["report", "run"], ["batch", "run", "--step", "1"], ["verify", "run"], ["compare", "run", "run"],
    ["top", "--json", "run"], ["plan", "run"], ["logs", "run"], ["stop", "run"], ["save", "run"],
]  # fmt: skip
DATA = [
    ["data", "info", "kd"], ["data", "verify", "kd"], ["data", "append", "text.txt", "--out", "kd"],
    ["copy", "kd", "z"], ["data", "build", "text.txt", "--out", "kd", "--overwrite", "--tokenizer", "byte"],
    ["batch", "run", "--step", "1"],
]  # fmt: skip
STUDY = [["report", "study"], ["report", "study", "--json"], ["top", "--once", "study"], ["top", "--json", "study"]]
CASES = [
    *((f"run/{name}", RUN) for name in (
        "config.yaml", "metrics.jsonl", "training_cursor.json", "timeline.jsonl", "tokenizer.json",
        "model_summary.json", "checkpoints/2/meta.json", "checkpoints/2/digests.json", ".lock",
    )),
    *((f"kd/{name}", DATA) for name in ("build.json", "tokenizer.json", "shard_00000.rox")),
    *((f"study/{name}", STUDY) for name in ("study.yaml", "journal.jsonl")),
]  # fmt: skip

LONG = {
    "run/tokenizer.json",
    "run/.lock",
    "run/model_summary.json",
    "run/timeline.jsonl",
    "run/checkpoints/2/digests.json",
}
"""A run without any of these can be read; nine commands a file take a second."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(1000)))
    (folder / "run.yaml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["data", "build", "text.txt", "--out", "kd", "--tokenizer", "byte"]) == 0
        assert main(["train", "--config", "run.yaml", "--data_path", "kd", "--run_dir", "run"]) == 0
        made_study(folder, 3).rename(folder / "study")
    return folder


@pytest.mark.parametrize(
    ("name", "commands", "damage"),
    [
        pytest.param(
            name, commands, damage, marks=() if n % len(DAMAGE) == kind and name not in LONG else pytest.mark.long
        )
        for n, (name, commands) in enumerate(CASES)
        for kind, damage in enumerate(DAMAGE)
    ],
)
def test_a_damaged_file_is_a_message(made, tmp_path, monkeypatch, capfd, name, commands, damage):
    place = tmp_path / "place"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for command in commands:
        if commands is DATA or not place.exists():  # commands about data write
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(made, place)
            monkeypatch.chdir(place)
        (place / name).write_bytes(DAMAGE[damage])
        code = main(command)
        error = capfd.readouterr().err
        assert code in (0, 1, 2), (command, error)
        assert "Traceback" not in error, command
