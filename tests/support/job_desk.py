"""A folder to launch detached jobs from, and to look after them."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import command, environment, wait_for

from roxxel_dist.cli import main

LIMIT_S = 60
DETACH = """
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.detach import detach
from roxxel_dist.launcher.job.spec import JobSpec
detach("""
ABANDONED = """
import os, sys
from pathlib import Path
from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control import detach
from roxxel_dist.launcher.job.spec import JobSpec
reader, writer = os.pipe()
os.close(reader)
sys.exit(detach._control("""


@dataclass
class Desk:
    """A folder to work in, with a list of jobs of its own."""

    folder: Path
    started: list[subprocess.Popen[str]]

    def open(self, *words: object, **more: Any) -> subprocess.Popen[str]:
        """Start a command."""
        env = environment(XDG_STATE_HOME=str(self.folder / "state"), TMPDIR=str(self.folder / "tmp"))
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        process = subprocess.Popen(command(*words), cwd=self.folder, env=env, text=True, **pipes)
        self.started.append(process)
        return process

    def detach(self, run_id: str, *words: str, log_dir: str = "logs") -> None:
        """Detach a job of one rank whose logs are in a folder of choice."""
        job = f"JobSpec(command={words}, nprocs=1, run_id={run_id!r}, log_dir=Path({log_dir!r}), max_restarts=0)"
        env = environment(XDG_STATE_HOME=str(self.folder / "state"))
        subprocess.run([sys.executable, "-c", DETACH + job + ", LocalBackend())"], cwd=self.folder, env=env, check=True)

    def abandoned(self, run_id: str, *words: str) -> int:
        """Begin such a job for a command that has ended; the exit code of its launcher."""
        job = f"JobSpec(command={words}, nprocs=1, run_id={run_id!r}, log_dir=Path('logs'), max_restarts=0)"
        env = environment(XDG_STATE_HOME=str(self.folder / "state"))
        script = ABANDONED + job + ", LocalBackend(), writer))"
        return subprocess.run([sys.executable, "-c", script], cwd=self.folder, env=env, check=False).returncode

    def run(self, *words: object) -> tuple[int, str, str]:
        """Run a command to its end: its code, what it showed, and its messages."""
        if words[0] in ("attach", "logs", "ps", "stop"):
            return self._run_here([str(word) for word in words])
        process = self.open(*words)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    def _run_here(self, words: list[str]) -> tuple[int, str, str]:
        """Run a command in this process, which costs a fifth of a second less: jobs are polled with it."""
        err = io.StringIO()
        before = os.environ.get("XDG_STATE_HOME")
        os.environ["XDG_STATE_HOME"] = str(self.folder / "state")
        with tempfile.TemporaryFile("w+") as out:
            try:
                with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    code = main(words)
            finally:
                os.environ.pop("XDG_STATE_HOME")
                if before is not None:
                    os.environ["XDG_STATE_HOME"] = before
            out.seek(0)
            return code, out.read(), err.getvalue()

    def launch(self, script: str, *options: object, nprocs: int = 1) -> str:
        """Launch `bash -c SCRIPT` and leave it; the run id."""
        words = ["--max-restarts", 0, "--nprocs", nprocs, *options, "--", "bash", "-c", script]
        code, out, err = self.run("launch", "local", "--detach", *words)
        assert (code, out.count("\n")) == (0, 1), err
        return out.strip()

    def up(self, nprocs: int = 1) -> None:
        """Wait until the ranks have begun."""
        wait_for(lambda: len(list(self.folder.glob("up.*"))) == nprocs, LIMIT_S, "the start of the ranks")

    def jobs(self) -> list[dict[str, Any]]:
        return json.loads(self.run("ps", "--all", "--json")[1])

    def job(self) -> dict[str, Any]:
        (job,) = self.jobs()
        return job

    def pid(self) -> int:
        return self.job()["controller"]["pid"]

    def over(self) -> dict[str, Any]:
        wait_for(lambda: self.job()["state"] in ("ended", "lost"), LIMIT_S, "the end of the job")
        return self.job()


def words_of_all_processes() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)
