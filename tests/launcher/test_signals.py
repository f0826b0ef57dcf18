"""Signals that the launcher takes for requests, and those that it leaves to the program that it is a part of."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from roxxel_dist.process.interrupt import SignalPipe


def test_a_signal_of_the_program_is_no_request_to_stop() -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    try:
        with SignalPipe(print) as signals:
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            assert signals.take() == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.wait(0.1) == []
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert caught == [signal.SIGUSR2] * 3


SUSPENDED = """
import os, signal
from roxxel_dist.process.interrupt import SignalPipe
with SignalPipe(print, stays=True) as signals:
    for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGCONT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        print(*signals.take())
"""


@pytest.mark.parametrize(
    ("terminal", "environ", "said"),
    [
        (False, {"SLURM_JOB_ID": "7"}, ["SLURM suspends the job", "`scontrol resume 7`", "resumed the job after 0 s"]),
        (True, {"SLURM_JOB_ID": "7"}, ["Ctrl-Z is not followed"]),  # salloc
        (True, {}, ["Ctrl-Z is not followed"]),
        (False, {}, ["Ctrl-Z is not followed"]),
    ],
)
def test_a_launcher_says_who_wants_it_to_stand_still(terminal: bool, environ: dict[str, str], said: list[str]) -> None:
    """It is no request, and neither is its end; SLURM sends SIGSTOP after it, which no process can refuse."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    ours, theirs = pty.openpty()
    words = ["setsid", *["--ctty"] * terminal, "--wait", sys.executable, "-c", SUSPENDED]
    done = subprocess.run(words, env={**outer, **environ}, stdin=theirs, capture_output=True, text=True, check=False)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in said), done.stdout
    assert ("SLURM" in done.stdout) == ("SLURM" in said[0])
    assert done.stdout.splitlines()[-1] == str(int(signal.SIGTERM))
    assert done.stdout.count("resumed") == sum("resumed" in words for words in said)
