"""The process of a target's compiler: what it sees, how it ends, and its messages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import target_functions

from roxxel_dist.devices.targets import parse_target
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.estimate import target_process
from roxxel_dist.run.estimate.target_process import TargetError, call_for_target

TPU, GPU = parse_target("v5e:2x2"), parse_target("h100:1x8")


@pytest.mark.parametrize("target", [TPU, GPU], ids=str)
def test_it_sees_no_accelerator_of_this_machine(target):
    found = call_for_target(target, target_functions.environment)
    assert found == target.environment()
    assert found["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("refuse", UserError, "^dim is 3: it must be even$"),
        ("fail", TargetError, "^ZeroDivisionError: a bug$"),
        ("leave", TargetError, "compiles for v5e:2x2 ended with 3 while it compiled a program"),
        (
            "die",
            TargetError,
            "was ended by SIGKILL while it compiled a program: this machine may have too little",
        ),
    ],
)
def test_how_it_fails(function, error, message, capfd):
    with pytest.raises(error, match=message):
        call_for_target(TPU, getattr(target_functions, function))
    assert ("in fail" in capfd.readouterr().err) == (function == "fail"), "the traceback of a bug, and no other"


def test_a_long_compilation_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(target_process, "FIRST_WORD_S", 0.1)
    call_for_target(TPU, target_functions.take_long)
    assert "compiling a program for v5e:2x2: 0 s so far" in capsys.readouterr().err


def test_it_ends_with_its_caller(tmp_path):
    """A compilation cannot be broken off, so the process leaves."""
    program = (
        "import sys, target_functions; from roxxel_dist.devices.targets import parse_target\n"
        "from roxxel_dist.run.estimate.target_process import call_for_target\n"
        "call_for_target(parse_target('v5e:2x2'), target_functions.wait_for_ever, sys.argv[1])"
    )
    tests = str(Path(target_functions.__file__).parent)
    caller = subprocess.Popen([sys.executable, "-c", program, tmp_path / "pid"], env=os.environ | {"PYTHONPATH": tests})
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    other = int((tmp_path / "pid").read_text())
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait()
    wait_until(lambda: not Path(f"/proc/{other}").exists() or "zombie" in Path(f"/proc/{other}/status").read_text())


def wait_until(holds):
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
