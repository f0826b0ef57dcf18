"""The forms of CMD, and how a rank ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from commands import environment

from roxxel_dist.cli import COMMANDS
from roxxel_dist.launcher.host.worker import SUBCOMMANDS
from roxxel_dist.process import progress
from roxxel_dist.process.exit_codes import EXIT_HANG, EXIT_RUNTIME, EXIT_TIMEOUT_TEXT

pytestmark = pytest.mark.xdist_group("launch")
# Not `-m`: launches that are tested at the same time would take it for a rank that another one has left, and say so.
WORKER = [sys.executable, "-c", "import sys; from roxxel_dist.launcher.host.worker import main; main(sys.argv[1:])"]
WORDS = ["a b", "", "q'uo\"te", "é ☃", "--flag=x y", "$HOME", "back\\slash", "*", "-m"]
SHOW = "import json, sys; print(json.dumps([sys.argv, sys.path[0], __name__]))"


Worker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def worker() -> Worker:
    """Run a command in a rank: its code, and what it printed."""
    buffered = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}

    def run(*command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        return warm.run(command, cwd, buffered | environ, source=WORKER[-1])

    return run


def test_a_script_is_run_as_python_would(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text(SHOW)
    done = worker("python", "sub/show.py", *WORDS, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    plain = subprocess.check_output([sys.executable, "sub/show.py", *WORDS], cwd=tmp_path, text=True)
    assert json.loads(done.stdout) == json.loads(plain)
    assert json.loads(done.stdout)[0][1:] == WORDS


def test_a_module_with_options_of_the_interpreter(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "show.py").write_text(SHOW + "; assert False, 'never: -O leaves assertions out'")
    done = worker("python", "-u", "-O", "-W", "ignore", "-m", "show", *WORDS, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    argv, path, name = json.loads(done.stdout)
    assert argv == [str(tmp_path / "show.py"), *WORDS]
    assert (path, name) == (str(tmp_path), "__main__")


@pytest.mark.parametrize("option", ["-S", "-SE", "-uS"])
def test_a_python_without_its_packages_is_run_as_it_is_and_named(option: str, tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "show.py").write_text("import sys; print(sys.argv, sys.flags.no_site)")
    done = worker("python", option, "show.py", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['show.py', 'x'] 1\n"), done.stderr
    assert f"python {option} hides the installed packages: jax.distributed is not set up" in done.stderr


def test_every_path_of_this_python_is_this_python(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "show.py").write_text("import sys; print(__name__, 'roxxel_dist.cluster.distributed' in sys.modules)")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.99").symlink_to(sys.executable)
    own = os.path.realpath(sys.executable)
    relative = os.path.relpath(sys.executable, tmp_path)
    for word in ("python", sys.executable, own, relative, "bin/python3.99"):
        done = worker(word, "show.py", cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("__main__ True\n", ""), word


def test_another_python_is_run_as_it_is_and_told(tmp_path: Path, worker: Worker) -> None:
    """A virtual environment of the same interpreter has other packages."""
    (tmp_path / "show.py").write_text("import sys; print(sys.prefix, 'roxxel_dist.cluster.distributed' in sys.modules)")
    venv.create(tmp_path / "v", symlinks=True)
    done = worker("v/bin/python", "show.py", cwd=tmp_path)
    assert done.stdout == f"{tmp_path / 'v'} False\n"
    assert done.stderr.startswith("roxxel-dist: v/bin/python is not the launcher's Python (")
    assert done.stderr.count("\n") == 1
    assert worker("python4.5", "show.py", cwd=tmp_path).returncode == 127


@pytest.mark.parametrize(
    "command",
    [
        ["show.py"],
        pytest.param(["python", "-m", "show"], marks=pytest.mark.long),
        pytest.param(["train", "--run_dir", "r"], marks=pytest.mark.long),
    ],
)
def test_a_rank_tells_what_it_does_before_the_program_begins(
    command: list[str], tmp_path: Path, worker: Worker
) -> None:
    """It says that it joins the others (who are not there), and a program begins without a limit."""
    (tmp_path / "show.py").write_text("print('begun')")
    fd = progress.create(tmp_path / "progress", 2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        place = {"COORDINATOR": f"127.0.0.1:{nobody.getsockname()[1]}", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
        environ = {**os.environ, **{f"ROXXEL_{name}": value for name, value in place.items()}}
        environ["ROXXEL_PROGRESS"] = str(tmp_path / "progress")
        program = [*WORKER, *command]
        with subprocess.Popen(program, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as rank:
            end, said = time.monotonic() + 60, [""]
            while said[-1] != "join" and time.monotonic() < end:
                record = progress.read(fd, 1)
                said += [record.activity] if record.activity not in ("", said[-1]) else []  # between two it is ""
                assert record.pid in (0, rank.pid)
                assert rank.poll() is None
                time.sleep(0.001)  # each lasts longer
            rank.kill()
    assert said == ["", "start", "join"]
    worker(*command, cwd=tmp_path, ROXXEL_PROGRESS=str(tmp_path / "progress"))
    last = progress.read(fd, 0)
    assert (last.activity, last.pid > 0) == ("start" if command[0] == "train" else "exit", True)
    os.close(fd)


def test_any_other_program_gets_its_words(tmp_path: Path, worker: Worker) -> None:
    for command in (["env", sys.executable, "-c", SHOW], ["python", "-c", SHOW]):
        done = worker(*command, *WORDS, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)[0] == ["-c", *WORDS]


def test_a_program_finds_signals_as_a_shell_would_give_them(tmp_path: Path, worker: Worker) -> None:
    done = worker("bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}", cwd=tmp_path)
    assert done.stdout.split() == ["y", str(128 + signal.SIGPIPE)]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["no_such_program", "x"], 127, "program not found: 'no_such_program'"),
        (["./plain"], 126, "cannot run './plain': Permission denied; make it executable"),
        (["./folder"], 126, "cannot run './folder': it is a folder"),
        (["./dangling"], 126, "cannot run './dangling': it is a link to "),
        (["./windows"], 126, "cannot run './windows': its lines end as on Windows (CR LF)"),
        (["./gone"], 126, "cannot run './gone': its first line names '/no/such/bash', which is not there"),
        (["./refused"], 126, "cannot run './refused': Permission denied; its first line names './plain'"),
        (["./words"], 126, "cannot run './words': it is no program, and its first line names none"),
        (["./foreign"], 126, "cannot run './foreign': it is there, and the loader that it names is not"),
        (["./no/such"], 127, "program not found: './no/such'"),
        (["python", "no_such.py"], 2, "script not found: 'no_such.py'"),
        (["no_such.py"], 2, "script not found: 'no_such.py'"),
        (["python", "-m", "no.such.module"], 2, "module not found: 'no.such.module'"),
    ],
)
def test_what_is_not_there_is_one_clear_line(
    command: list[str], code: int, message: str, tmp_path: Path, worker: Worker
) -> None:
    (tmp_path / "plain").write_text("no program")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    loader = Path(os.path.realpath("/bin/true")).read_bytes().replace(b"/lib64/ld-linux", b"/lib64/xx-linux")
    scripts = {"windows": b"#!/bin/bash\r\ntrue\r\n", "gone": b"#!/no/such/bash -e\n", "refused": b"#! ./plain\n"}
    for name, content in (scripts | {"words": b"words\n", "foreign": loader}).items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    done = worker(*command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"roxxel-dist: {message}")
    assert done.stderr.count("\n") == 1


def test_a_failure_is_told_while_the_connections_are_open(tmp_path: Path) -> None:
    """The others fail with them, and might be seen first."""
    (tmp_path / "fails.py").write_text("raise ValueError('bug in the program')")
    reads, writes = os.pipe()
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "ROXXEL_PIPE": f"{writes}:{os.fstat(writes).st_ino}"},
        "pass_fds": (writes,),
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with open(reads, encoding="utf-8") as pipe, subprocess.Popen([*WORKER, "fails.py"], **options) as rank:
        os.close(writes)
        told = iter(lambda: json.loads(pipe.readline()), None)
        assert next(record for record in told if "code" not in record) == {"failed": 1}
        assert rank.poll() is None
        assert rank.stderr is not None
        assert rank.stderr.read().endswith("ValueError: bug in the program\n")
        assert pipe.read() == ""
    assert rank.returncode == 1


def test_a_coordinator_port_that_is_taken_has_a_code_of_its_own(tmp_path: Path, worker: Worker) -> None:
    """It was free when the launcher looked."""
    (tmp_path / "script.py").write_text("print('here')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        job = {"ROXXEL_COORDINATOR": address, "ROXXEL_NUM_PROCESSES": "1", "ROXXEL_PROCESS_ID": "0"}
        done = worker("script.py", cwd=tmp_path, **job)
    assert (done.returncode, done.stdout) == (71, "")
    assert done.stderr == f"roxxel-dist: another process listens at {address}, where rank 0 should\n"


# What leaves the usual way runs the handler of atexit (or hangs in the thread); nothing printed may be lost either way.
PRELUDE = "import atexit, os, signal, sys, threading, time\natexit.register(print, 'atexit')\nprint('out', end='')\n"


@pytest.mark.parametrize(
    ("end", "code", "out", "err"),
    [
        ("threading.Thread(target=time.sleep, args=(1000,)).start(); {}['key [/x]']", 1, "out", "KeyError: 'key [/x]'"),
        ("sys.exit(7)", 7, "out", ""),
        ("sys.exit('in words')", 1, "out", "in words"),
        ("import jax; raise jax.errors.JaxRuntimeError('INTERNAL: ECC')", EXIT_RUNTIME, "out", "Error: INTERNAL: ECC"),
        ("raise KeyboardInterrupt", 130, "out", ""),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 5); sys.exit(42)", 42, "outatexit\n", "most recent call first"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, "", "Fatal Python error: Segmentation fault"),
    ],
)
def test_how_a_script_ends(end: str, code: int, out: str, err: str, tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "end.py").write_text(PRELUDE + end)
    done = worker("end.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, out)
    assert err in done.stderr
    if "KeyError" in err:
        assert done.stderr.splitlines()[:2] == [
            "Traceback (most recent call last):",
            '  File "end.py", line 4, in <module>',
        ]
        assert "runpy" not in done.stderr


def test_a_rank_that_only_waits_for_the_others_leaves_when_the_limit_is_over(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "end.py").write_text("import atexit, time\natexit.register(time.sleep, 1000)\nprint('out')\n")
    done = worker("end.py", cwd=tmp_path, ROXXEL_EXIT_TIMEOUT="0.2")
    assert (done.returncode, done.stdout) == (EXIT_HANG, "out\n")
    assert done.stderr == f"roxxel-dist: {EXIT_TIMEOUT_TEXT}\n"


def test_the_commands_that_a_rank_can_run_are_those_of_the_command_line() -> None:
    """All but those for jobs that run already, and the demo, which launches; `ps` behind `--` is the system's."""
    assert COMMANDS.keys() - {"demo", "completion", "ps", "logs", "attach", "stop", "join", "leave"} == SUBCOMMANDS
