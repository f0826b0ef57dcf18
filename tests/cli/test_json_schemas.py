"""`--json` of every command, as it is typed, against its schema."""

import contextlib
import json
import re
import shutil

import pytest
from command_lines import PATHS
from json_schemas import main as write
from json_schemas import schemas
from jsonschema import Draft202012Validator
from made_study import made_study, made_versus

from roxxel_dist import Config
from roxxel_dist.cli import main

# (command, exit code)
TYPED = [
    ("audit runs/one --steps 4:6", 0),
    ("check-layouts --config many.yaml --data_path text.txt --layouts rows", 0),
    ("compare runs/one runs/two", 1),
    ("compare runs/one runs/one", 0),
    ("doctor --data_path nowhere", 69),
    ("doctor --check-devices off --run_dir runs/new -- train --data_path text.txt", 0),
    ("eval runs/one", 0),
    ("eval runs/one@1:6", 0),
    ("launch local --nprocs 2 --dry-run -- train --config many.yaml --data_path text.txt", 0),
    ("launch local --nprocs 2 --step-timeout 9 --dry-run -- true", 0),
    ("plan runs/one", 0),
    ("plan --config many.yaml --data_path text.txt --devices 8 --arrays --tokens_per_s 10", 0),
    ("plan runs/one --mtbf 9 --hosts 3", 0),
    ("ps --all", 0),
    ("report runs/one runs/two", 0),
    ("report runs/empty", 0),
    ("report study", 0),
    ("top runs/one runs/empty study", 0),
    ("verify runs/one", 0),
    ("verify runs/one/data", 0),
    ("verify damaged", 1),
    ("versus --study compared --max_pairs 5", 0),
    ("report compared", 0),
]

LONG = {"audit", "check-layouts"}
"""Commands that train; the tests of their rooms read what they print as JSON."""


@pytest.fixture(scope="module")
def work(pair, tmp_path_factory):
    """Two runs that differ, one without a row, a damaged copy, and a study."""
    folder = tmp_path_factory.mktemp("schemas") / "work"
    shutil.copytree(pair, folder)
    config = Config.from_yaml(folder / "runs" / "one" / "config.yaml")
    config.n_devices = Config().n_devices
    config.save_yaml(folder / "many.yaml")
    shutil.copytree(folder / "runs" / "one", folder / "damaged")
    (large,) = sorted((folder / "damaged" / "checkpoints" / "6").rglob("*"), key=lambda path: path.stat().st_size)[-1:]
    large.write_bytes(large.read_bytes()[:-1])
    (folder / "runs" / "empty").mkdir()
    shutil.copy(folder / "runs" / "one" / "config.yaml", folder / "runs" / "empty")
    made_study(folder)
    made_versus(folder, [-0.2, -0.21, float("nan"), -0.19, -0.2])
    return folder


@pytest.mark.parametrize(
    ("typed", "code"),
    [pytest.param(*row, marks=pytest.mark.long if row[0].split()[0] in LONG else ()) for row in TYPED],
)
def test_what_is_printed_is_as_its_schema_says(work, typed, code, monkeypatch, capfd):
    monkeypatch.chdir(work)
    words = typed.split()
    cut = words.index("--") if "--" in words else len(words)
    assert main([*words[:cut], "--json", *words[cut:]]) == code
    printed = capfd.readouterr().out
    found = json.loads(printed, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    schema = next(schema for command, schema in schemas().items() if command.split()[0] == words[0])
    Draft202012Validator(schema).validate(found)


def test_every_command_with_json_has_a_schema_and_a_case(tmp_path, capsys):
    asked = set()
    for path in PATHS:
        with contextlib.suppress(SystemExit):
            main([*path, "--help"])
        if re.search(r"^\s+--json\b", capsys.readouterr().out, re.MULTILINE):
            asked.add(path[0])
    assert asked == {command.split()[0] for command in schemas()} == {typed.split()[0] for typed, _ in TYPED}
    write(tmp_path)
    for path in tmp_path.iterdir():
        Draft202012Validator.check_schema(json.loads(path.read_text()))
