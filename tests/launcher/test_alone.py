"""The launcher without the rest of the package: in a bare Python, with no jax, no numpy and nothing from a registry."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Cluster
from layers import PACKAGE

PROGRAM = """
import sys
from pathlib import Path
from roxxel_dist.launcher import JobSpec, run
from roxxel_dist.launcher.backends.ssh import SshBackend
words = ("sh", "-c", 'echo rank $ROXXEL_PROCESS_ID of $ROXXEL_NUM_PROCESSES on $(hostname); exit $(cat code)')
job = JobSpec(command=words, nprocs=4, run_id="alone", log_dir=Path("logs"), all_ranks=True, max_restarts=0)
code = run(job, SshBackend(("h1", "h2"), config=sys.argv[1]))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"jax", "numpy", "rich", "yaml"}))
sys.exit(code)
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A Python with the launcher and `process/`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    files = [PACKAGE / "__init__.py", *(PACKAGE / "process").glob("*.py"), *(PACKAGE / "launcher").rglob("*.py")]
    for file in files:
        target = site / "roxxel_dist" / file.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.cluster
@pytest.mark.parametrize("code", [0, 7])
def test_it_runs_a_program_on_two_hosts(
    code: int, bare: Path, cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    hosts = cluster(2)
    for name in hosts.names:
        hosts.set_env(name, PYTHONPATH="")
    (tmp_path / "code").write_text(f"{code}\n")
    words = [bare, "-c", PROGRAM, hosts.ssh_config]
    done = hosts.run(words, cwd=tmp_path, env={"PYTHONPATH": "", "HOME": str(tmp_path)})
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    if code:
        assert "failed first: exit code 7 (host h" in done.stderr
    else:
        said = [line.partition(" | ")[2] for line in done.stdout.splitlines()[:-1]]
        assert sorted(said) == [f"rank {rank} of 4 on h{1 + rank // 2}" for rank in range(4)]
