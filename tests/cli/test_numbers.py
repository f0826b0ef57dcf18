"""Every number of every command, far outside of what anything can do: one line at once, and nothing is made."""

import dataclasses
import math
import os
import typing
from pathlib import Path

import pytest
from tables import one_test

from roxxel_dist.cli import BACKENDS, COMMANDS, DATA, main
from roxxel_dist.cli.flags import flags_of
from roxxel_dist.cli.parser import LONGEST_S, parse
from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import FIELD_TYPES, Config
from roxxel_dist.utils.component import MOST_WHOLE

HUGE = ("1000000000000", "100000000000000000000", "nan", "inf", "-1e400")
TRAIN = ["--", "train", "--data_path", "text.txt"]
LAUNCHES = {
    "local": [],
    "ssh": ["--hosts", "a,b"],
    "exec": ["--hosts", "a,b", "--via", "true {host} {command}"],
    "ray": ["--hosts", "2", "--address", "auto"],
}


def numbers(kind: object) -> list[str]:
    """The options of a command that take a number and nothing else."""
    return [flag.name for flag in flags_of(kind) if {*flag.kinds} <= {int, float}]


def seconds(kind: object) -> list[str]:
    return [
        flag.name
        for flag in flags_of(kind)
        if {*flag.kinds} <= {int, float} and not flag.is_of_config and "econds" in flag.doc
    ]


def launch_options() -> list[tuple[str, str]]:
    from importlib import import_module

    kinds = {name: import_module(BACKENDS[name]).Options for name in LAUNCHES}
    return [(name, option) for name, kind in kinds.items() for option in numbers(kind)]


@one_test(("backend", "option"), launch_options())
def test_a_number_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], backend: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    flag = f"--{option.replace('_', '-')}"
    for value in HUGE:
        words = ["launch", backend, *LAUNCHES[backend], "--dry-run", f"{flag}={value}", *TRAIN]
        assert main(words) == 2, (value, capfd.readouterr())
        said = capfd.readouterr().err
        assert said.count("\n") == 1, said
        assert flag in said, said
    assert os.listdir(tmp_path) == ["text.txt"]


SMALL = ["--data_path", "text.txt"]
MISTAKES = [
    *[(["plan", *SMALL, "--devices", value], "devices is") for value in ("0", "1025", "100000", "1000000000")],
    *[(["check-layouts", *SMALL, "--devices", value], "devices is") for value in ("1", "65", "1000000000")],
    *[(["check-layouts", *SMALL, "--seq_len", value], "--seq_len is") for value in ("1", str(10**10), str(10**20))],
    *[(["generate", "nowhere", "--num_samples", value], "--num_samples is") for value in ("0", "1000000", str(10**20))],
    *[(["find-lr", *SMALL, "--num_steps", value], "num_steps is") for value in ("0", "10000001", str(10**20))],
    *[(["doctor", "--port", value], "--port") for value in ("0", "65536", str(10**20))],
    *[(["launch", "local", "--nprocs", value, *TRAIN], "--nprocs") for value in ("0", "4097", "1000000")],
    (["launch", "ssh", "--hosts", "a", "--procs-per-host", "4097", *TRAIN], "--procs-per-host 4097: must be at"),
    (["launch", "local", "--max-restarts", "100000", "--port", "29500", *TRAIN], "each restart takes the next port"),
    (
        ["launch", "local", "--max-restarts", "60000", "--port", "29500", *TRAIN],
        "--port 29500: must be within 1",
    ),
    *[(["stop", "run", "--timeout", value], "ten years") for value in ("1e20", "100000000000d", "11000d")],
    (["save", "run", "--timeout", "4e8"], "--timeout 4e8: must be at most"),
]


@one_test(("words", "message"), MISTAKES)
def test_a_number_without_a_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n" * 300)
    assert main(words) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    assert message in said
    assert os.listdir(tmp_path) == ["text.txt"]


def test_every_time_limit_has_an_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Of all commands, by the parser alone."""
    from importlib import import_module
    from pkgutil import resolve_name

    tried = 0
    for place in {*COMMANDS.values(), *DATA.values()}:
        module = import_module(place.partition(":")[0])
        for kind in vars(module).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__name__.endswith("Args"):
                required = [flag for flag in flags_of(kind) if flag.default is dataclasses.MISSING]
                placed = ["a" if flag.is_positional else f"--{flag.name}=1" for flag in required]
                for name in seconds(kind):
                    with pytest.raises(UserError, match="ten years"):
                        parse(kind, [*placed, f"--{name}={LONGEST_S * 2:.0f}"], resolve_name(place).__name__)
                    tried += 1
    assert tried > 4


WHOLE = [name for name, hint in FIELD_TYPES.items() if set(typing.get_args(hint) or (hint,)) <= {int, type(None)}]


@one_test("name", WHOLE)
def test_a_whole_number_of_a_config(name: str) -> None:
    for value in (MOST_WHOLE + 1, 10**20, -(10**20)):
        with pytest.raises(UserError, match=str(value)):  # by a rule of its own, or by the ceiling of all
            Config.from_dict({name: value}).validate()


@pytest.mark.parametrize("name", ["steps", "batch_size", "seq_len"])
def test_a_number_of_a_phase(name: str) -> None:
    for value in (MOST_WHOLE + 1, 10**20):
        with pytest.raises(UserError, match=f"{name} is {value}, and must be at most"):
            Phase(**{"steps": 1, "batch_size": 1, "seq_len": 2, name: value})
    for epochs in (math.inf, math.nan, 1e20):
        with pytest.raises(UserError, match="epochs is"):
            Phase(epochs=epochs, batch_size=1, seq_len=2)
