"""What people write at their first launch on several hosts is understood, or the message has the words that work."""

import json

import pytest
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.cli.launch import without_program_name

TRAIN = ("--", "train", "--data_path", "data")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", "node1", "node2"), "hosts are separated by commas, as in --hosts a,node2"),
        (("--hosts", "node1,", "node2"), "hosts are separated by commas, as in --hosts a,node2"),
        (("--hosts", "node1:2,node2:2"), "for 2 processes on each host write node1 with --procs-per-host 2"),
        (("--hosts", "root@node1:2222"), "for port 2222 set it in ssh's configuration (--ssh-config)"),
        (("--hosts", "node[1-2]"), "ranges are not expanded; write each host, as in --hosts a1,a2"),
    ],
)
def test_a_refusal_has_the_words_that_work(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "ssh", *words, *TRAIN]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("host", ["node1", "root@node1", "::1", "[fe80::1]", "fd00::2"])
def test_names_and_addresses_are_hosts(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "ssh", "--hosts", host, "--dry-run", "--json", "--", "true"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["host"] == host


@one_test(
    ("command", "is_read_as"),
    [
        (["roxxel-dist", "train", "--lr", "1"], ["train", "--lr", "1"]),
        (["/opt/venv/bin/roxxel-dist", "train"], ["train"]),
        (["python", "-m", "roxxel_dist", "train"], ["train"]),
        (["python3", "-m", "roxxel_dist", "eval", "run"], ["eval", "run"]),
        (["roxxel-dist", "--version"], ["roxxel-dist", "--version"]),
        (["roxxel-dist"], ["roxxel-dist"]),
        (["python", "-m", "roxxel_dist.other"], ["python", "-m", "roxxel_dist.other"]),
        (["echo", "roxxel-dist", "train"], ["echo", "roxxel-dist", "train"]),
        ([], []),
    ],
)
def test_the_name_of_this_program_before_a_sub_command_is_left_out(command: list[str], is_read_as: list[str]) -> None:
    assert without_program_name(command) == is_read_as
