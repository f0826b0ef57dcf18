"""The lock of libtpu: real files, and real locks of other processes."""

import os
import pwd
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.host import probe
from roxxel_dist.launcher.host.probe import tpu_lock
from roxxel_dist.launcher.host.worker import is_tpu_in_use
from roxxel_dist.launcher.preflight.checks import CheckResult, Requirements, tpu_lock_findings
from roxxel_dist.launcher.preflight.run import check_hosts

# As libtpu does it.
HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def judged(
    path: Path, wanted: Requirements | None = None, platforms: str | None = None, tpus: int = 4
) -> list[CheckResult]:
    info = {"tpu_lock": tpu_lock(path), "platforms": platforms, "tpus": tpus}
    return list(tpu_lock_findings(wanted or Requirements(), {"h": info}))


def test_no_lock_is_no_matter(tmp_path: Path) -> None:
    assert tpu_lock(tmp_path / "lock") is None
    assert judged(tmp_path / "lock") == []
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_held_names_its_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    (found,) = judged(tmp_path / "lock")
    assert (found.level, found.check) == ("error", "tpu lock")
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f"is held by process {holder.pid} (python" in found.text
    assert f" of user {user}), which uses the TPU" in found.text
    assert judged(tmp_path / "lock", tpus=0) == [], "a machine without TPUs, where somebody compiles for them"
    assert len(judged(tmp_path / "lock", platforms="tpu", tpus=0)) == 1
    assert judged(tmp_path / "lock", platforms="cpu") == []
    assert judged(tmp_path / "lock", Requirements(platforms="cuda,cpu"), platforms="tpu") == []
    assert len(judged(tmp_path / "lock", platforms="tpu,cpu")) == 1
    holder.kill()
    holder.wait()
    assert judged(tmp_path / "lock") == []


def test_to_look_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("kept")
    assert tpu_lock(tmp_path / "lock") is None
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    held = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (held.stdout, held.returncode) == ("locked\n", 0)
    assert (tmp_path / "lock").read_text() == "kept"


def test_a_lock_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    (found,) = judged(tmp_path / "lock")
    assert found.level == "error"
    assert "cannot be opened (Is a directory)" in found.text
    assert f"sudo rm {tmp_path / 'lock'}" in found.text


# Root may open everything, so it drops its rights first.
AS_NOBODY = """
import os, sys
from pathlib import Path
from roxxel_dist.launcher.host.probe import tpu_lock
if os.geteuid() == 0:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
print(tpu_lock(Path(sys.argv[1])))
"""


def test_a_lock_of_another_user() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        lock = Path(folder, "lock")
        lock.touch(mode=0o600 if os.geteuid() == 0 else 0)
        told = subprocess.run([sys.executable, "-c", AS_NOBODY, lock], capture_output=True, text=True)
    assert told.stdout.startswith("cannot be opened (Permission denied), and nothing can use the TPU"), told.stderr


def test_doctor_looks_at_it(tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LOCK", tmp_path / "lock")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    seen = check_hosts(Requirements(run_dir=str(tmp_path)), LocalBackend(), ["here"])
    (found,) = [one for one in seen.findings if one.check == "tpu lock"]
    assert (found.level, str(holder.pid) in found.text, seen.passed) == ("error", True, False)


BACKEND = "Unable to initialize backend 'tpu': "
IN_USE = [  # as libtpu and jax say it
    f"{BACKEND}ABORTED: The TPU is already in use by another process probably owned by another user. "
    'Run "$ sudo lsof -w /dev/accel0" to figure out which process is using the TPU.',
    f"{BACKEND}UNKNOWN: TPU initialization failed: The TPU is already in use by process with pid 7. "
    "Not attempting to load libtpu.so in this process.",
    'Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".',
]


@pytest.mark.parametrize("text", IN_USE)
def test_a_tpu_in_use_is_recognised(text: str) -> None:
    assert is_tpu_in_use(RuntimeError(text))
    assert not is_tpu_in_use(ValueError(text))
    assert not is_tpu_in_use(RuntimeError("shapes differ"))
    wrapped = KeyError("device")
    wrapped.__cause__ = RuntimeError(text)
    assert is_tpu_in_use(wrapped)


@pytest.mark.long  # as test_restart.py::test_an_exception_of_the_runtime_is_infrastructure
def test_a_start_that_fails_because_the_tpu_is_in_use_is_tried_again(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(
        f"import os\nif os.environ['ROXXEL_ATTEMPT'] == '0':\n    raise RuntimeError({IN_USE[0]!r})\n"
    )
    code, _, err = launch("python", "program.py", nprocs=1, max_restarts=3).wait()
    assert code == 0, err
    assert "rank 0 failed first: exit code 77" in err
    assert f"another process has the TPU of {socket.gethostname()}" in err
    assert "restart 1 of 3, immediately" in err
