"""`--help` of every command: short sections, named positional arguments, words that a newcomer knows."""

import re

import pytest
from command_lines import PATHS
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.settings.config import FIELD_TYPES

MOST_FLAGS = 20


def helped(capsys, *words):
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@one_test("path", PATHS)
def test_it_is_readable(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, *path)
    assert text.startswith(f"usage: roxxel-dist {' '.join(path)} ")
    sections = re.split(r"^\S.*:$", text.partition("\nOptions:\n")[2], flags=re.MULTILINE)
    assert max(len(re.findall(r"^  --", section, re.MULTILINE)) for section in sections) <= MOST_FLAGS
    assert "{None}" not in text
    assert "STR" not in text
    assert len(text) < 500 or max(map(len, text.splitlines())) > 60
    assert all(len(line) <= 80 for line in text.splitlines() if not re.match("usage|  --|.*`", line))
    entries = re.split(r"^  (?=--|[A-Z\[])", text, flags=re.MULTILINE)[1:]
    assert not [entry for entry in entries if len(entry.split()) < 3], "an argument without a text"


def test_train_has_every_field_once_and_in_a_section(capsys):
    text = helped(capsys, "train")
    for name in FIELD_TYPES:
        assert len(re.findall(rf"^  --{name}\b", text, re.MULTILINE)) == 1, name


@one_test(
    ("words", "usage"),
    [
        (["compare"], "compare RUN RUN [OPTIONS]"),
        (["export"], "export RUN --format msgpack|safetensors|hf --out TEXT [OPTIONS]"),
        (["merge"], "merge RUN --out TEXT [OPTIONS]"),
        (["report"], "report [RUN ...] [OPTIONS]"),
        (["data", "build"], "data build [PATH ...] --out TEXT [OPTIONS]"),
        (["batch"], "batch SOURCE --step INT [OPTIONS]"),
    ],
)
def test_usage_names_what_is_given(words, usage, capsys):
    assert helped(capsys, *words).splitlines()[0] == f"usage: roxxel-dist {usage}"


def test_a_config_shows_its_own_values(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("lr: 0.5\n")
    text = helped(capsys, "train", "--config", str(tmp_path / "mine.yaml"))
    assert "Peak learning rate. (default: 0.5)" in text
