"""What programs, hosts and people have written cannot command the terminal of a reader."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from commands import command, environment
from made_study import made_study
from tables import one_test

from roxxel_dist.launcher.output import printable

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J\x9b5n\u202etxt"
PRINTS = r"printf '\033]0;owned\007\033[31mred\033[0m \033[2Jend\n'"
COMMAND = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]")


def on_terminal(folder: Path, *words: object) -> str:
    """What a command shows on a terminal, its colours taken away, up to its end."""
    near, far = pty.openpty()
    env = environment(XDG_STATE_HOME=str(folder / "state"), TERM="xterm", COLUMNS="200")
    process = subprocess.Popen(command(*words), cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=far, stderr=far)
    os.close(far)
    shown = b""
    try:
        while data := os.read(near, 1 << 16):
            shown += data
    except OSError:  # the last end of the terminal is closed
        pass
    os.close(near)
    process.wait(60)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())


def is_harmless(shown: str) -> bool:
    return COMMAND.search(shown) is None


@one_test(
    ("text", "plain", "coloured"),
    [
        ("a b\tc\nd é ☃ \u00a0 日本 👩\u200d🔬", None, None),
        (TITLE, r"\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("\x1b[2Jx", r"\x1b[2Jx", r"\x1b[2Jx"),
        ("\x1b[1;31mred", r"\x1b[1;31mred", "\x1b[1;31mred\x1b[0m"),
        ("\x1b[38:5:1mred\x1b[0m", r"\x1b[38:5:1mred\x1b[0m", "\x1b[38:5:1mred\x1b[0m"),
        ("\r\x08\x00\x7f\x9b5n", r"\r\x08\x00\x7f\x9b5n", r"\r\x08\x00\x7f\x9b5n"),
        ("user\u202etxt.exe\u2066\u2028", r"user\u202etxt.exe\u2066\u2028", r"user\u202etxt.exe\u2066\u2028"),
        ("\udcff", r"\udcff", r"\udcff"),
    ],
)
def test_what_is_escaped(text: str, plain: str | None, coloured: str | None) -> None:
    assert printable(text) == (text if plain is None else plain)
    assert printable(text, colours=True) == (text if coloured is None else coloured)


def test_a_program_and_those_who_look_at_its_log(tmp_path: Path) -> None:
    words = ["--run-id", "r", "--max-restarts", 0, "--", "bash", "-c", f"{PRINTS}; {PRINTS} >&2; exit 3"]
    shown = on_terminal(tmp_path, "launch", "local", *words)
    assert is_harmless(shown)
    assert shown.count(r"\x1b]0;owned\x07red \x1b[2Jend") == 4, "each line, and again in the report about the failure"
    (log,) = tmp_path.glob("runs/*/logs/rank-0.log")
    assert TITLE in log.read_text(), "a log is as it was written"
    for words in (["logs", "r"], ["attach", "r"], ["ps", "--all"], ["top", "r", "--once"]):
        shown = on_terminal(tmp_path, *words)
        assert is_harmless(shown), words
        assert "owned" in shown, words
    piped = subprocess.run(
        command("logs", "r"), cwd=tmp_path, env=environment(XDG_STATE_HOME=str(tmp_path / "state")), capture_output=True
    )
    assert TITLE.encode() in piped.stdout, "a program that reads a log gets its bytes"


def test_a_study(tmp_path: Path) -> None:
    study = made_study(tmp_path, count=10)
    journal = next(path for path in study.iterdir() if "journal" in path.name)
    text = journal.read_text()
    journal.write_text(text.replace("<no> number", json.dumps(TITLE + CLEAR)[1:-1]))
    assert journal.read_text() != text
    for words in (["top", study, "--once"], ["report", study]):
        shown = on_terminal(tmp_path, *words)
        assert is_harmless(shown), words
        assert r"\x1b]0;" in shown, words


@pytest.mark.parametrize("words", [["doctor"], ["launch", "ssh"]])
@pytest.mark.cluster
def test_what_a_host_says(words: list[str], tmp_path: Path) -> None:
    """The other end chooses the words of its error."""
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n  ProxyCommand {tmp_path}/proxy\n")
    (tmp_path / "proxy").write_text(f"#!/bin/sh\n{PRINTS} >&2\nexec sleep 0.1\n")
    (tmp_path / "proxy").chmod(0o755)
    command_words = ["--", "true"] if words[0] == "launch" else []
    shown = on_terminal(tmp_path, *words, "--hosts", "h1", "--ssh-config", config, *command_words)
    assert is_harmless(shown)
    assert "h1" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["train", TITLE],
        ["logs", TITLE],
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (["report", TITLE + CLEAR], ["data", "info", TITLE])
        ),
    ],
)
def test_names_that_people_give(words: list[str], tmp_path: Path) -> None:
    shown = on_terminal(tmp_path, *words)
    assert is_harmless(shown)
    assert "owned" in shown
