"""Names that one process has: no other user, no socket and no process of before keeps one from being taken."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from roxxel_dist.process.durable import state_dir
from roxxel_dist.process.file_lock import claim

CODE = "import sys; from roxxel_dist.process.file_lock import claim; print(claim(sys.argv[1]), flush=True); input()"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_name_is_free_again_when_its_process_has_ended(end: str) -> None:
    other = subprocess.Popen([sys.executable, "-c", CODE, "n"], stdin=-1, stdout=-1, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    assert not claim("n")
    assert claim("another")
    if end == "kill":
        other.send_signal(signal.SIGKILL)
    other.communicate("\n" if end == "exit" else None)
    assert claim("n")
    assert not claim("n"), "nor has this process a name twice"


def test_sockets_and_files_of_others_take_no_name(state: Path) -> None:
    """Any user of the machine can have an abstract socket of any name."""
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0roxxel-dist-{os.getuid()}-n")
        assert claim("n")
    target = state / "target"
    (state_dir() / "link.lock").symlink_to(target)
    assert claim("link")
    assert not target.exists()
    assert state_dir().stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("how", ["no home", "a file in the way"])
def test_where_nothing_can_be_kept_nobody_is_kept_from_anything(
    how: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "no home":
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setenv("HOME", "relative")
    else:
        (state / "roxxel-dist").touch()
    assert claim("n")
    assert claim("n")
