"""The bar in a terminal of its own, and what it prints where there is none."""

import re
import subprocess
import sys

from commands import TERMINAL, environment, on_terminal

PROGRAM = """
import time
from roxxel_dist.launcher.output import Bar
with Bar() as bar:
    for step, left in ((900, 3725.0), (950, float("nan")), (1000, None)):
        record = {"step": step, "total": 1000, "start": 900, "phase": "long [/x]", "eta_s": left}
        bar.update(record | {"loss": 2.5, "tokens_per_s": 45678.0})
        bar.print(f"line [/x] :smile: {step}")
        time.sleep(0.3)  # it draws ten times a second
"""
LINES = [f"line [/x] :smile: {step}" for step in (900, 950, 1000)]


def test_a_bar_below_lines_that_stand_as_they_are() -> None:
    words = [sys.executable, "-c", PROGRAM]
    program, text = on_terminal(lambda theirs: subprocess.Popen(words, stdout=theirs, env=environment(**TERMINAL)))
    assert program.wait() == 0
    text = text.replace("\r", "\n")
    assert [line for line in text.split("\n") if line.startswith("line")] == LINES
    assert "long [/x]" in text
    assert "0/1 " not in text, "nothing is drawn before there is something to show"
    assert re.search(r"900/1000 loss 2\.5000 +45\.7k tok/s +1:02:05 left", text)
    assert re.search(r"1000/1000 loss 2\.5000 +45\.7k tok/s +0:00 left", text), "its own estimate, from the start"


def test_without_a_terminal_there_are_only_lines() -> None:
    out = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True)
    assert out.splitlines() == LINES
