"""Whatever an option is given, a command ends with a line: never a traceback, and a wrong value is named."""

import fuzz
import pytest
from tables import one_test

import roxxel_dist.run.experiment  # noqa: F401  (a command would import it, which takes seconds)

CASES = list(fuzz.cases())
SURE = [case for case in CASES if fuzz.wrong(case[2], case[3])]


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def complaints(cases):
    return list(filter(None, (fuzz.complaint(*case) for case in cases)))


def test_the_list_is_long():
    assert len(CASES) > 4000
    without = {("demo",), ("attach",), ("completion",), ("data", "index")}  # options of which a value is surely wrong
    assert {case[0] for case in CASES} == set(fuzz.PATHS) - without


def test_a_value_of_another_type_is_named():
    """One value for each option, another one for each."""
    first = {}
    for case in SURE:
        first.setdefault(case[:2], []).append(case)
    for options in first.values():
        options.sort(key=lambda case: hash_of(case[3], case[1]))
    found = complaints(options[0] for options in first.values() if options[0][1] not in fuzz.FIELDS)
    assert not found, "\n".join(found)


def hash_of(*words):
    return sum(ord(letter) * (at + 1) for word in words for at, letter in enumerate(word)) % 97


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("path", fuzz.PATHS, ids=" ".join)
def test_every_option_with_every_value(path):
    found = complaints(case for case in CASES if case[0] == path)
    assert not found, "\n".join(found)


@one_test(
    ("words", "named"),
    [
        (["train", "--fsdp", "maybe"], "--fsdp maybe: must be True or False"),
        (["train", "--fsdp=2"], "--fsdp 2: must be True or False"),
        (["train", "--resume=no", "--run_dir", "r"], "--resume no: must be True or False"),
        (["logs", "none", "--follow=x"], "--follow x: must be True or False"),
        (["launch", "local", "--detach=maybe", "--", "true"], "--detach maybe: must be True or False"),
        (["launch", "slurm", "--print", "--nodes", "9" * 40, "--", "true"], "must be at most 1,000,000"),
        (["launch", "k8s", "--image", "i", "--hosts", "2", "--cpu", "inf", "--", "true"], "--cpu inf: write an amount"),
        (["find-lr", "--num_steps", "9" * 40], "a curve needs at least 10 steps, and at most 10,000"),
    ],
)  # fmt: skip
def test_slips_that_went_through(words, named, capfd):
    assert fuzz.main(words) == 2
    assert named in capfd.readouterr().err
