"""What the completion script of bash offers, in a real bash."""

import shlex
import subprocess
from importlib import import_module
from typing import Literal, get_args, get_origin

import pytest
from commands import run

from roxxel_dist.cli import COMMANDS
from roxxel_dist.cli.argument_types import option_types, parts, plain
from roxxel_dist.cli.arguments import TrainArgs
from roxxel_dist.cli.doctor import DoctorArgs
from roxxel_dist.cli.models import ExportArgs, MergeArgs
from roxxel_dist.cli.train import FindLrArgs, PlanArgs
from roxxel_dist.launcher.backends import BACKENDS


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    made = run("completion", "bash", cwd=folder)
    assert (made.returncode, made.stderr) == (0, "")
    (folder / "script").write_text(made.stdout)
    return folder / "script"


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
    assert offered(script, "train", "--data_path", "") == []  # bash itself completes files


def test_zsh_runs_the_same_script(script, tmp_path):
    made = run("completion", "zsh", cwd=tmp_path).stdout
    assert "bashcompinit" in made
    assert made.endswith(script.read_text())


KINDS = {
    "train": TrainArgs,
    "plan": PlanArgs,
    "find-lr": FindLrArgs,
    "merge": MergeArgs,
    "export": ExportArgs,
    "doctor": DoctorArgs,
    **{f"launch {name}": import_module(place).Options for name, place in BACKENDS.items()},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_choice_that_the_parser_takes_is_offered(script, name):
    made, tried = script.read_text().splitlines(), 0
    for option, hint in option_types(KINDS[name]).items():
        held = parts(plain(hint))
        if len(held) == 1 and get_origin(held[0]) is Literal:
            flag = f"--{option.replace('_', '-') if name.startswith(('launch', 'doctor')) else option}"
            (line,) = [line for line in made if line.strip().startswith(f'"{name}:{flag}")')]
            assert line.split('words="')[1].split('"')[0].split() == [*get_args(held[0])]
            tried += 1
    assert tried or name == "find-lr"


def test_a_choice_with_a_dash_is_offered_whole(script):
    assert offered(script, "merge", "--weights", "") == ["uniform", "1-sqrt"]
    assert offered(script, "merge", "--weights", "1") == ["1-sqrt"]
