"""Ctrl-C at any moment of a command, on a terminal of its own."""

import contextlib
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import warm
from commands import TERMINAL, command, environment, make_corpus, wait_for

from roxxel_dist.cluster.preemption import watching_for_stop

CTRL_C = b"\x03"
SUPPORT = str(Path(__file__).parents[1] / "support")  # where the model is
TRAIN = (
    "train", "--config", "tiny.yaml", "--data_path", "data", "--phases", "[{steps: 9000, batch_size: 8, seq_len: 33}]",
    "--log_every", 50, "--eval_every", 9000, "--checkpoint_every", 1000, "--model", "runs:build", "--sample", "off",
    "--run_dir",
)  # fmt: skip


LEADS = """
import fcntl, os, runpy, sys, termios
os.setsid()
fcntl.ioctl(1, termios.TIOCSCTTY)
os.dup2(1, 0)
sys.path.append(SUPPORT)
runpy.run_module("roxxel_dist", run_name="__main__", alter_sys=True)
""".replace("SUPPORT", repr(SUPPORT))
"""A command in a fork whose imports are done. The folder is that of the model."""


class OnTerminal:
    """A command that leads a session on a terminal, as one that a person has typed."""

    def __init__(self, *words, cwd, is_fork=False, ignores=()):
        self._ours, theirs = pty.openpty()
        env = environment(**TERMINAL)
        if is_fork:
            with open(theirs, "wb", closefd=False, buffering=0) as stream:
                self.process = warm.start(LEADS, words, cwd, env, (stream, stream))
        else:
            # By programs, and not by a function that is called in a fork: jax, in this process, has threads.
            lead = ["setsid", "--ctty", "env", *(f"--ignore-signal={number.name[3:]}" for number in ignores)]
            streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
            more = {"PYTHONPATH": SUPPORT}
            self.process = subprocess.Popen(lead + command(*words), cwd=cwd, env=env | more, **streams)
        os.close(theirs)
        self._data = b""
        self._hung_up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # how a terminal says that its last writer is gone
            while not self._hung_up.is_set():
                if select.select([self._ours], [], [], 0.05)[0]:
                    self._data += os.read(self._ours, 4096)

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._data.decode(errors="replace"))

    def type(self, keys):
        os.write(self._ours, keys)

    def hang_up(self):
        """Close the terminal, as a lost connection does."""
        self._hung_up.set()
        self._reader.join()
        os.close(self._ours)

    def end(self, limit_s=120):
        """Its exit code; it is killed when the limit is over."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "too late"
        finally:
            if not self._hung_up.is_set():
                self._reader.join(10)
                os.close(self._ours)


def after(seconds, *words, cwd):
    """(exit code, text) of a command that gets a Ctrl-C so long after its start."""
    shown = OnTerminal(*words, cwd=cwd)
    time.sleep(seconds)
    with contextlib.suppress(OSError):
        shown.type(CTRL_C)
    return shown.end(60), shown.text


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupt")
    make_corpus(folder)
    return folder


FIND_LR = ("find-lr", "--config", "tiny.yaml", "--data_path", "data", "--num_steps", 5000)


def one_line(text):
    """Whether a command says one thing when it is ended, beside the progress of find-lr."""
    lines = [line for line in text.replace("^C", "").splitlines() if line]
    said = [line for line in lines if not line.startswith(("compiling; then 5000 steps", "steps "))]
    return said == ["roxxel-dist: ended by SIGINT"]


def has_mapped(shown, library):
    """Whether the process of a command has come to the import of a compiled library."""
    with contextlib.suppress(OSError):
        return library in Path("/proc", str(shown.process.pid), "maps").read_text()
    return False


@pytest.mark.parametrize(
    ("words", "moment"),
    [
        pytest.param(TRAIN, "_multiarray_umath", marks=pytest.mark.long),
        pytest.param(TRAIN, "jaxlib", marks=pytest.mark.long),
        (FIND_LR, "compiling"),
    ],
)
def test_ctrl_c_while_a_command_starts(work, tmp_path, words, moment):
    """While it imports a library, and while it compiles."""
    words = (*words, tmp_path / "runs" / "x") if words is TRAIN else words
    shown = OnTerminal(*words, cwd=work, is_fork=moment == "compiling")
    wait_for(lambda: moment in shown.text or has_mapped(shown, moment), what=moment)
    shown.type(CTRL_C)
    assert shown.end() == 130, shown.text
    assert one_line(shown.text)
    assert not (tmp_path / "runs").exists()
    assert sorted(path.name for path in work.iterdir()) == ["data", "tiny.yaml"]


@pytest.mark.long
def test_ctrl_c_at_any_moment(work, tmp_path):
    """From the interpreter's start to the middle of the loop, which says 42."""
    draw, codes = random.Random(11), []
    shown = OnTerminal(*TRAIN, tmp_path / "whole", cwd=work)
    begun = time.monotonic()
    wait_for(lambda: "Step" in shown.text, what="the first row")
    span = 1.2 * (time.monotonic() - begun)
    shown.type(CTRL_C)
    assert shown.end() == 42
    for number in range(60):
        words = (*TRAIN, tmp_path / str(number)) if number % 3 else FIND_LR
        code, text = after(draw.uniform(0.2, span), *words, cwd=work)
        codes.append(code)
        assert code in (42, 130, -signal.SIGINT), text  # the last one while Python itself starts
        assert "Traceback" not in text
    assert codes.count(130) > 20


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.long)])
def test_other_signals_while_a_command_starts(work, tmp_path, name):
    """Text is made into shards for so long, in a folder of its own."""
    words = ["find-lr", "--config", "tiny.yaml", "--data_path", Path(sysconfig.get_paths()["stdlib"], "email")]
    with (tmp_path / "said").open("w") as said:
        started = warm.begin({"words": [*map(str, words)]}, work, environment(), (said, said))
    wait_for(lambda: any(work.glob(".find-lr-*")), what="the folder for shards")
    os.kill(started.pid, signal.Signals[name])
    assert started.wait(60) == 128 + signal.Signals[name]
    assert (tmp_path / "said").read_text().splitlines()[-1] == f"roxxel-dist: ended by {name}"
    assert not any(work.glob(".find-lr-*"))


# In the process itself, and in one of its own.
@pytest.mark.parametrize("size", [3, pytest.param(9, marks=pytest.mark.long)])
def test_ctrl_c_while_a_tokenizer_is_trained(tmp_path, size):
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 12))) for _ in range(150_000)]
    text = " ".join(draw.choices(words, k=size * 110_000))
    (tmp_path / "text.txt").write_text(text)
    shown = OnTerminal("data", "build", "text.txt", "--out", "out", "--vocab_size", 60000, cwd=tmp_path)
    wait_for(lambda: "reading" in shown.text, what="the bar of the training")
    shown.type(CTRL_C)
    assert shown.end() == 130
    # The tokenizer's own thread may draw its bar once more.
    assert "roxxel-dist: ended by SIGINT" in shown.text.splitlines()
    assert os.listdir(tmp_path) == ["text.txt"]


def test_a_terminal_that_is_closed_asks_training_to_stop(work, tmp_path):
    shown = OnTerminal(*TRAIN, tmp_path / "run", cwd=work, is_fork=True)
    wait_for(lambda: "Step" in shown.text, what="the first row")
    shown.hang_up()
    assert shown.end() == 42
    cursor = json.loads((tmp_path / "run" / "training_cursor.json").read_text())
    assert cursor["step"] in {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"asked to stop: step {cursor['step']} is saved" in log
    assert "failed" not in log


def test_training_leaves_a_hangup_ignored_that_nohup_ignores():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watching_for_stop():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.long
def test_nohup_trains_on_without_its_terminal(work, tmp_path):
    words = (*TRAIN, tmp_path / "run", "--max_steps", 600)
    shown = OnTerminal(*words, cwd=work, ignores=[signal.SIGHUP])
    wait_for(lambda: "Step" in shown.text, what="the first row")
    shown.hang_up()
    assert shown.end() == 0
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "Step 600/600" in log
    assert "failed" not in log
