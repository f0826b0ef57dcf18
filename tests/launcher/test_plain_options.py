"""The flags of `launch` that are read without tyro: as tyro reads them, or not at all."""

import json
import shlex
from importlib import import_module

import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.cli import main
from roxxel_dist.cli.arguments import in_seconds, normalise_switches, parse
from roxxel_dist.cli.launch import plain_options
from roxxel_dist.launcher.backends import BACKENDS, options

KINDS = options()
VALUES = [
    "1", "2", "-1", "1_000", "0x10", " 3", "2.5", "1e3", "nan", "inf", "", "None", "True", "false", "a,b",
          "K=V=W", "-x", "--", "a b", "--port", "pyxis", "ü"]  # fmt: skip


def by_tyro(kind: type, words: list[str]) -> object:
    """What tyro makes of the words; None where it leaves."""
    marks = (tyro.conf.UseAppendAction,)
    try:
        return parse(kind, normalise_switches(words, kind), "launch", underscores=False, marks=marks)
    except (SystemExit, ValueError):
        return None


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A backend, and words that may be right."""
    name = draw(st.sampled_from(sorted(KINDS)))
    flags = [field for field in KINDS[name].__dataclass_fields__ if field not in ("example",)]
    required = {"ray": ["--address", "auto", "--hosts", "2"], "k8s": ["--hosts", "2", "--image", "i"]}
    words = list(required.get(name, [])) if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        flag = "--" + draw(st.sampled_from(["", "", "", "no-"])) + draw(st.sampled_from([*flags, "hosts", "stray"]))
        flag = flag if draw(st.booleans()) else flag.replace("_", "-")
        value = draw(st.sampled_from(VALUES))
        words += draw(st.sampled_from([[flag], [flag, value], [f"{flag}={value}"], [value]]))
    return name, words


@given(command_lines())
def test_what_is_read_without_tyro_is_what_tyro_reads(line: tuple[str, list[str]]) -> None:
    """Compared as text: nan is not itself."""
    name, words = line
    plain = plain_options(KINDS[name], words)
    assert plain is None or repr(plain) == repr(by_tyro(KINDS[name], words))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("local", ""),
        ("local", "--nprocs 2 --devices-per-proc 4 --grace 5 --all-ranks"),
        ("ssh", "--hosts a,b --procs-per-host=2 --env A=1 --env B=2 --max-restarts 0 --port 29500 --detach"),
        ("slurm", "--nodes 2 --gpus_per_host 8 --print"),
        ("ray", "--address auto --hosts 2 --cpus-per-host 0.5"),
        ("k8s", "--hosts 2 --image i --volume a:/a --volume b:/b"),
        ("member", "--hosts 2 --index 1 --first a"),
    ],
)
def test_usual_command_lines_are_read_without_tyro(name: str, line: str) -> None:
    """Else each launch would be slower by its import."""
    plain = plain_options(KINDS[name], shlex.split(line))
    assert plain is not None
    assert plain == by_tyro(KINDS[name], shlex.split(line))


@pytest.mark.parametrize(
    "line", ["--help", "-h", "--hosts", "--nprocs x", "--port None", "word", "--no-detach", "--x 1"]
)
def test_the_rest_is_left_to_tyro(line: str) -> None:
    """It has the messages."""
    assert plain_options(KINDS["ssh"], shlex.split(line)) is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", "300"), ("30s", "30"), ("2h", "7200"), ("1.5min", "90"), ("1d", "86400"), ("90", "90"), ("5x", "5x")],
)
@pytest.mark.parametrize("form", ["--step-timeout {}", "--step-timeout={}", "--grace {}"])
def test_a_time_may_have_a_unit(given, seconds, form):
    kind = import_module(BACKENDS["local"]).Options
    words = in_seconds(form.format(given).split(), kind)
    assert words[-1].rpartition("=")[2] == seconds
    assert in_seconds(["--nprocs", "5m"], kind) == ["--nprocs", "5m"], "it is no time"


@pytest.mark.parametrize("flag", ["--nproc_per_node=2", "--nproc-per-node=2", "--nproc_per_node 2"])
@pytest.mark.parametrize(("backend", "ranks"), [("local", 2), ("ssh --hosts a,b", 4)])
def test_the_flag_of_torchrun_is_known(capsys, flag, backend, ranks):
    words = f"launch {backend} {flag} --dry-run --json -- true".split()
    assert main(words) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == ranks
