"""What the completion script of bash offers, in a real bash."""

import shlex
import subprocess

import pytest
from command_lines import PATHS, flags
from tables import one_test

from roxxel_dist.cli import COMMANDS, main
from roxxel_dist.launcher.backends import BACKENDS


@pytest.fixture
def script(tmp_path, capsys):
    (tmp_path / "script").write_text(completion("bash", capsys))
    return tmp_path / "script"


def completion(shell, capsys):
    """What the command prints for a shell."""
    assert main(["completion", shell]) == 0
    made = capsys.readouterr()
    assert made.err == ""
    return made.out


def offered(script, *words):
    array = " ".join(shlex.quote(word) for word in ("roxxel-dist", *words))
    program = f". {script}; COMP_WORDS=({array}); COMP_CWORD={len(words)}; _roxxel_dist; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_groups_flags_and_choices(script):
    assert set(offered(script, "")) == set(COMMANDS)
    assert offered(script, "tr") == ["train"]
    assert set(offered(script, "launch", "")) == set(BACKENDS)
    assert offered(script, "train", "--warm") == ["--warmup_steps"]
    assert offered(script, "train", "--lr", "3e-4", "--warm") == ["--warmup_steps"]
    assert offered(script, "launch", "local", "--max") == ["--max-restarts"]
    assert offered(script, "launch", "local", "--nprocs", "2", "--", "train", "--lr_sch") == ["--lr_schedule"]
    assert offered(script, "train", "--optimizer", "ad") == ["adamw", "adafactor"]
    for words in (["--optimizer", "=", "ad"], ["--optimizer", "="]):  # as bash cuts them (pallets/click#2847)
        assert offered(script, "train", *words)[0] == "adamw"
    assert offered(script, "train", "--optimizer=ad") == ["--optimizer=adamw", "--optimizer=adafactor"]
    assert offered(script, "train", "train") == []  # pallets/click#530


def test_files_and_folders(script, tmp_path, monkeypatch):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").touch()
    monkeypatch.chdir(tmp_path)
    for words in (["train", "--data_path"], ["train", "--data_path", "="], ["generate"], ["data", "info"]):
        assert offered(script, *words, "a f") == ["a", "file", "a", "folder"]
    assert offered(script, "train", "--dim", "") == []


@one_test("path", [path for path in PATHS if path[0] not in ("eval", "sweep", "find-lr")])
def test_every_choice_that_the_parser_takes_is_offered(script, path):
    found = {name: flag for name, flag in flags(path).items() if flag.choices and not flag.is_positional}
    dashes = path[0] in ("launch", "doctor")
    spelled = {"--" + name[2:].replace("_", "-") if dashes else name: flag.choices for name, flag in found.items()}
    for name, choices in [*spelled.items()][:3]:
        assert offered(script, *path, name, "") == [*choices]


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef roxxel-dist"), ("tcsh", "# AUTOMATICALLY GENERATED")])
def test_other_shells_have_every_command_and_choice(shell, begins, capsys):
    made = completion(shell, capsys)
    assert made.startswith(begins)
    assert all(name in made for name in (*COMMANDS, *BACKENDS, "1-sqrt", "warmup_steps", "max-restarts"))


def test_a_choice_with_a_dash_is_offered_whole(script):
    assert offered(script, "merge", "--weights", "") == ["uniform", "1-sqrt"]
    assert offered(script, "merge", "--weights", "1") == ["1-sqrt"]
