"""What users give to every rank, and what of it is shown."""

import re
from pathlib import Path

import pytest
from tables import one_test

from roxxel_dist.launcher.job.placement import (
    assignments,
    masked,
    masked_words,
    proxy_bypass,
    read_env_file,
    shell_line,
    suspects,
)


def test_variables_are_taken_as_they_stand_and_the_last_counts() -> None:
    words = ["A=1", "XLA_FLAGS=--x=1 --y", "EMPTY=", "A=2"]
    assert assignments(words, {}) == {"A": "2", "XLA_FLAGS": "--x=1 --y", "EMPTY": ""}


@pytest.mark.parametrize("word", ["NAME", "=x", "1A=x", "A B=x", ""])
def test_what_is_no_variable_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"--env: .*write NAME=VALUE"):
        assignments([word], {})


def test_a_mistake_does_not_show_a_value() -> None:
    with pytest.raises(ValueError, match="no variable") as caught:
        assignments(["API KEY=sekrit"], {})
    assert "sekrit" not in str(caught.value)
    with pytest.raises(ValueError, match="a word without =") as caught:
        assignments(["sekrit"], {})
    assert "sekrit" not in str(caught.value)


def test_a_file_of_variables(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("# a comment\n\nA=1\n export B='two words' \nC=\"x=y\"\nD=it's $HOME\nE=\"\nA=3\n")
    assert read_env_file(path) == {"A": "3", "B": "two words", "C": "x=y", "D": "it's $HOME", "E": '"'}
    path.write_text("A=1\nno variable\n")
    with pytest.raises(ValueError, match=re.escape(f"--env-from {path}, line 2: ")):
        read_env_file(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_env_file(tmp_path)


def test_secrets_are_not_shown() -> None:
    public = {"TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us", "XKB_KEYMAP": "us"}
    assert masked(public) == public, "a part of the name must end so"
    shown = masked({"WANDB_API_KEY": "s", "hf_token": "s", "MY_SECRET_1": "s", "A_PASSWORD": "s", "A": "INFO"})
    assert {name for name, value in shown.items() if value == "***"} == {
        "WANDB_API_KEY",
        "hf_token",
        "MY_SECRET_1",
        "A_PASSWORD",
    }
    assert shown["A"] == "INFO"


@one_test(
    ("words", "shown"),
    [
        ("train --lr 1 --tokenizer bpe", "train --lr 1 --tokenizer bpe"),
        ("x --api-key s --next 1", "x --api-key *** --next 1"),
        ("x --api_key=s", "x --api_key=***"),
        ("x --hf.token s", "x --hf.token ***"),
        ("x --apikey s", "x --apikey ***"),
        ("x --token --next 1", "x --token --next 1"),
        ("env WANDB_API_KEY=s A=1 x", "env WANDB_API_KEY=*** A=1 x"),
        ("x --tokenizer_type=bpe --keys 3", "x --tokenizer_type=bpe --keys 3"),
    ],
)
def test_secrets_in_a_command_are_not_shown(words: str, shown: str) -> None:
    assert masked_words(words.split()) == shown.split()


def test_secrets_within_the_text_of_a_word_and_in_other_spellings() -> None:
    words = [
        "bash",
        "-c",
        "export HF_TOKEN=geheim; A=1 b",
        "--authtoken=geheim",
        "--api-key",
        "-geheim",
        "--passwd",
        "x",
    ]
    shown = ["bash", "-c", "export HF_TOKEN=***; A=1 b", "--authtoken=***", "--api-key", "***", "--passwd", "***"]
    assert masked_words(words) == shown
    assert masked_words(["--tokenizer", "bpe", "--api-key", "--verbose"]) == [
        "--tokenizer",
        "bpe",
        "--api-key",
        "--verbose",
    ]


def test_a_line_for_a_shell() -> None:
    assert shell_line({"B": "x y", "A_KEY": "s"}, ["p", "a b", "$c"]) == "env 'A_KEY=***' 'B=x y' p 'a b' '$c'"


@one_test(
    ("given", "direct_to"),
    [
        ({}, None),
        ({"NO_PROXY": "x", "no_proxy": "y", "HTTP_PROXY": "http://p:1"}, None),  # gRPC reads small letters alone
        ({"http_proxy": "http://p:1"}, "10.0.0.1"),
        ({"https_proxy": "http://p:1"}, "10.0.0.1"),
        ({"grpc_proxy": "http://p:1"}, "10.0.0.1"),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://p:1", "no_proxy": "a,.b"}, "a,.b,10.0.0.1"),
        ({"http_proxy": "http://p:1", "no_proxy": "a", "no_grpc_proxy": "c"}, "c,10.0.0.1"),
        ({"http_proxy": "http://p:1", "no_grpc_proxy": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_the_coordinator_is_reached_without_a_proxy(given: dict[str, str], direct_to: str | None) -> None:
    found = proxy_bypass({"ROXXEL_COORDINATOR": "10.0.0.1:4321", **given})
    assert found == ({} if direct_to is None else {"no_grpc_proxy": direct_to})


def test_the_coordinator_with_an_ipv6_address_is_too() -> None:
    assert proxy_bypass({"ROXXEL_COORDINATOR": "[fd00::1]:4", "http_proxy": "p"}) == {"no_grpc_proxy": "fd00::1"}


def test_what_may_part_ranks_is_shown_without_secrets() -> None:
    given = {
        "http_proxy": "http://me:pw@p:1", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1", "HOME": "/root",
        "NCCL_AUTH_TOKEN": "hush", "GRPC_VERBOSITY": "", "HTTPS_PROXY": "http://q:2", "MY_NCCL_X": "1",
    }  # fmt: skip
    assert suspects(given) == {
        "GLOO_SOCKET_IFNAME": "eth1", "HTTPS_PROXY": "http://q:2", "NCCL_AUTH_TOKEN": "***",
        "NCCL_SOCKET_IFNAME": "eth0", "http_proxy": "http://***@p:1",
    }  # fmt: skip
