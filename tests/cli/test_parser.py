"""The parser of the command line: words as typed arguments, and slips by name. Numbers name reports about others."""

import contextlib
import dataclasses
import json
import shlex
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.cli.arguments import ConfigArgs, TrainArgs, parse_config
from roxxel_dist.cli.flags import Positional, Short
from roxxel_dist.cli.parser import build, parse, read
from roxxel_dist.launcher.backends import options
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config

KINDS = options()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of every form."""

    paths: Positional[tuple[str, ...]] = ()
    """Paths."""
    count: int = 3
    """How many."""
    rate: float | None = None
    """A rate."""
    wait: float = 1.0
    """Seconds to wait."""
    many: tuple[str, ...] = ()
    """Many."""
    steps: list[int] | None = None
    """Steps."""
    chunk: int | str = "auto"
    """A size, or auto."""
    how: Literal["one", "two"] = "one"
    """How."""
    text: str | None = None
    """Text."""
    go: bool = False
    """Whether to go."""
    stay: bool = True
    """Whether to stay."""
    lines: "int" = 40
    """Lines."""


LINES = {
    "": {},
    "a --count 4 b": {"paths": ("a", "b"), "count": 4},
    "--count=-4 --rate -1e3": {"count": -4, "rate": -1000.0},  # pallets/click#555, vercel/arg#52
    "--text -x": {"text": "-x"},  # python/cpython#138950, eclipse-sumo/sumo#7589
    "--text=--count": {"text": "--count"},
    "--text 100%": {"text": "100%"},
    "--text None --rate None": {},
    "--text=": {"text": ""},
    "--text a=b": {"text": "a=b"},
    "--text=--": {"text": "--"},  # argparse of Python 3.12 takes it away
    "--text '-x y' --count -4": {"text": "-x y", "count": -4},  # argparse takes the first for a word
    "--steps 1 -2 --count 5": {"steps": [1, -2], "count": 5},
    "--many --text=x y": {"many": (), "text": "x", "paths": ("y",)},
    "--count 4 - b": {"count": 4, "paths": ("-", "b")},
    "--text @file": {"text": "@file"},  # no file of arguments
    "--many a b --many c": {"many": ("a", "b", "c")},
    "--many": {"many": ()},
    "--steps 1 2 --count 5": {"steps": [1, 2], "count": 5},
    "--chunk 7": {"chunk": 7},
    "--chunk 7k": {"chunk": "7k"},
    "--how two": {"how": "two"},
    "--go --no-stay": {"go": True, "stay": False},
    "--go False --stay false": {"stay": False},  # lebrice/SimpleParsing: a word that is not empty was True
    "--go=True": {"go": True},
    "--wait 5m": {"wait": 300.0},
    "--wait 1.5h": {"wait": 5400.0},
    "--count 1 --count 2": {"count": 2},
    "--count 1_000": {"count": 1000},
    "--count 1e3": {"count": 1000},
    "--count 0e0": {"count": 0},
}


@one_test("line", LINES)
def test_words_become_values(line: str) -> None:
    assert parse(Args, shlex.split(line), "x") == Args(**LINES[line])  # pyright: ignore[reportArgumentType]


WRONG = {
    "--paths a": "there is no option --paths: PATHS is given by its place: `roxxel-dist x --help` lists all",
    "--coun 4": "there is no option --coun: did you mean --count? `roxxel-dist x --help` lists all",
    "--no-count": "there is no option --no_count: ",  # brentyi/tyro#45, python/cpython#131175: nothing is abbreviated
    "--t x": "there is no option --t: ",
    "-count 4": "there is no option -count: options begin with two dashes: did you mean --count?",
    "--count x": "--count x: must be a whole number",
    "--count 1.5": "--count 1.5: must be a whole number",
    "--count": "--count has no value: must be a whole number",
    "--count=": "--count has no value: must be a whole number",
    "--rate ten": "--rate ten: must be a number",
    "--wait 5x": "--wait 5x: must be a number of seconds, or a time such as 5m",
    "--how three": "--how three: must be one of one, two",
    "--text": "--text has no value: write --text TEXT",
    "--text --count 4": "--text has no value: write --text TEXT",
    "--go maybe": "--go maybe: must be True or False",
    "--steps 1 x": "--steps x: must be a whole number",
    "--": "there is no option --",
}


@one_test("line", [line for line in WRONG if line != "--go maybe"])
def test_slips_are_named(line: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(Args, shlex.split(line), "x")
    assert str(refused.value).startswith(WRONG[line])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """Arguments by place."""

    one: Positional[str]
    """The first. A sentence more."""
    pair: Positional[tuple[str, str]] = ("a", "b")
    """Two."""
    must: int
    """A number."""
    tail: bool = False
    """Follow."""
    several: tuple[str, ...] = ()
    """Any number."""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "`y` needs ONE (The first); --must MUST (A number). `roxxel-dist y --help` lists all"),
        ("x --must 1 y", "`y` needs PAIR, 2 words, and has 1. "),
        ("--several x y --must 1", "`y` needs ONE, and --several has taken all of x y: write ONE before --several. "),
        ("x y z w --must 1", "`y` takes one ONE and PAIR, and 'w' is one more: "),
    ],
)
def test_what_is_missing_or_one_too_many_is_named(line: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(Placed, line.split(), "y")
    assert str(refused.value).startswith(message)


def test_options_may_stand_between_places() -> None:
    words = ["x", "--must", "1", "y", "--tail", "z"]
    assert parse(Placed, words, "y") == Placed(one="x", pair=("y", "z"), must=1, tail=True)


@pytest.mark.parametrize(("line", "lines"), [("-n 5", 5), ("-n 5 r", 5), ("r -f -n 7", 7), ("-f r", 40)])
def test_short_forms(line: str, lines: int) -> None:
    from roxxel_dist.cli.jobs import LogsArgs

    args = parse(LogsArgs, line.split(), "logs")
    assert (args.lines, args.follow, args.run) == (lines, "-f" in line, "r" if "r" in line else "")
    assert Short("-n") == Short("-n")


@pytest.mark.parametrize("line", ["-n", "-n -f", "-f -n --rank 1", "r -n"])
def test_a_short_form_without_a_value_is_named_by_its_long_form(line: str) -> None:
    from roxxel_dist.cli.jobs import LogsArgs

    with pytest.raises(UserError, match="--lines has no value: must be a whole number"):
        parse(LogsArgs, line.split(), "logs")


FIELDS = {
    "--fsdp": {"fsdp": True},
    "--fsdp false --lr 3e-4 --n_heads None": {"lr": 3e-4},
    "--wandb no": {"wandb": "off"},
    "--phases '[{steps: 5, batch_size: 4, seq_len: 9}]'": {"phases": [{"steps": 5, "batch_size": 4, "seq_len": 9}]},
    "--keep_steps 1 2": {"keep_steps": [1, 2]},
    "--model_args.a 1 --model_args.b.c x --model m:b": {"model_args": {"a": 1, "b": {"c": "x"}}, "model": "m:b"},
}


@one_test("line", FIELDS)
def test_fields_of_a_config(line: str) -> None:
    args, config = parse_config(TrainArgs, shlex.split(line), "train")
    assert args.data_path is None
    values = config.to_dict()
    assert {name: values[name] for name in FIELDS[line]} == FIELDS[line]
    assert config.given >= FIELDS[line].keys()


def test_a_mistake_in_yaml_names_the_option() -> None:
    with pytest.raises(UserError, match="--phases"):
        parse_config(TrainArgs, ["--phases", "[{"], "train")


VALUES = ["1", "-1", "0x10", "2.5", "nan", "", "None", "True", "a,b", "K=V=W", "-x", "--", "a b", "--port", "ü"]


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[type, list[str]]:
    """A command, and words that may be right."""
    kind = draw(st.sampled_from([*KINDS.values(), ConfigArgs]))
    names = [field.name for field in dataclasses.fields(kind) if field.name != "fields"]
    words: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        flag = "--" + draw(st.sampled_from(["", "", "", "no-"])) + draw(st.sampled_from([*names, "hosts", "dim"]))
        value = draw(st.sampled_from(VALUES))
        words += draw(st.sampled_from([[flag], [flag, value], [f"{flag}={value}"], [value]]))
    return kind, words


@given(command_lines())
def test_any_words_are_arguments_or_a_message(line: tuple[type, list[str]]) -> None:
    kind, words = line
    with contextlib.suppress(UserError):
        assert isinstance(parse(kind, words, "launch"), kind)


@one_test(
    ("name", "line"),
    [
        ("local", "--nprocs 2 --devices-per-proc 4 --grace 5 --all-ranks"),
        ("ssh", "--hosts a,b --procs-per-host=2 --env A=1 --env B=2 --max-restarts 0 --port 29500 --detach"),
        ("exec", "--hosts a,b --via 'docker exec -i {host}' --attempt 1"),
        ("slurm", "--nodes 2 --gpus_per_host 8 --print"),
        ("ray", "--address auto --hosts 2 --cpus-per-host 0.5"),
        ("k8s", "--hosts 2 --image i --volume a:/a --volume b:/b"),
        ("member", "--hosts 2 --index 1 --first a"),
    ],
)
def test_every_launch_has_its_options(name: str, line: str) -> None:
    made = parse(KINDS[name], shlex.split(line), f"launch {name}")
    assert dataclasses.replace(made) == made
    if name == "ssh":
        assert (made.env, made.detach) == (("A=1", "B=2"), True)


def test_the_defaults_of_a_config_file_hold() -> None:
    base = ConfigArgs(fields=Config(dim=96))
    assert build(ConfigArgs, read(ConfigArgs, ["--lr", "1e-3"], "train"), "train", base).fields.to_dict()["dim"] == 96


@pytest.mark.parametrize("flag", ["--nproc_per_node=2", "--nproc-per-node=2", "--nproc_per_node 2"])
@pytest.mark.parametrize(("backend", "ranks"), [("local", 2), ("ssh --hosts a,b", 4)])
def test_the_flag_of_torchrun_is_known(capsys, flag, backend, ranks):
    words = f"launch {backend} {flag} --dry-run --json -- true".split()
    assert main(words) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == ranks
