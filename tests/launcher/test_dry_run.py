"""What `--dry-run` tells is what ranks get, and nothing is started by it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHOW = (
    "import json, os, sys; json.dump([dict(os.environ), sys.argv], open('f.' + os.environ['ROXXEL_PROCESS_ID'], 'w'))"
)
OPTIONS = [
    "--nprocs",
    "2",
    "--env",
    "B=two words",
    "--env",
    "MY_TOKEN=sekrit",
    "--env-from",
    "env",
]


READLINE = {"LINES", "COLUMNS"}
"""Which it sets in the process of the tests, behind the back of `os.environ`."""


@pytest.fixture
def local(cli: Callable[..., Any], tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`launch local WORDS` in the folder."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("ROXXEL_", "CUDA_"))}
    return lambda *words: cli("launch", "local", *words, cwd=tmp_path, environ=outer)


def test_what_is_told_is_what_runs(tmp_path: Path, local: Callable[..., Any]) -> None:
    (tmp_path / "env").write_text("A=from file\nB=overridden\n")
    command = ["--", "env", sys.executable, "-c", SHOW, "a b", "--api-key", "sekrit2"]
    told = local(*OPTIONS, "--dry-run", "--json", *command)
    assert (told.returncode, told.stderr) == (0, "")
    text = local(*OPTIONS, "--dry-run", *command)
    assert [path.name for path in tmp_path.iterdir()] == ["env"], "something was started"
    assert "sekrit" not in told.stdout + text.stdout
    assert "restarts 5, step time-out adaptive; nothing was started" in text.stdout

    job = json.loads(told.stdout)
    assert local(*OPTIONS, *command).returncode == 0
    for rank in (0, 1):
        plan: dict[str, Any] = job["ranks"][rank]
        env, argv = json.loads((tmp_path / f"f.{rank}").read_text())
        assert (env["A"], env["B"], env["MY_TOKEN"]) == ("from file", "two words", "sekrit")
        assert plan["env"] | {"MY_TOKEN": "sekrit"} == {
            name: env[name] if name not in ("ROXXEL_COORDINATOR", "ROXXEL_RUN_ID") else value
            for name, value in (plan["env"] | {"MY_TOKEN": "sekrit"}).items()
        }
        assert set(env) - set(os.environ) - READLINE <= {*plan["env"], *job["set_by_the_agent"]}
        assert argv == ["-c", "a b", "--api-key", "sekrit2"]
        assert plan["argv"][-4:] == [SHOW, "a b", "--api-key", "***"]
        assert plan["argv"][:5] == [sys.executable, "-u", "-P", "-m", "roxxel_dist.launcher.host.worker"]
        start = "env 'A=from file' 'B=two words' 'MY_TOKEN=***' "
        assert f"{rank} on {plan['host']}: {start}" in text.stdout


def test_gpus_that_are_not_there_are_told_before_anything_starts(tmp_path: Path, local: Callable[..., Any]) -> None:
    options = ["--nprocs", "2", "--gpus-per-host", "64"]
    told = local(*options, "--dry-run", "--json", "--", "touch", "x")
    devices = [rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in json.loads(told.stdout)["ranks"]]
    assert devices == [",".join(map(str, range(32))), ",".join(map(str, range(32, 64)))]
    result = local(*options, "--", "touch", "x")
    assert (result.returncode, result.stdout) == (69, "")
    assert "--gpus-per-host 64, and it has " in result.stderr
    assert list(tmp_path.iterdir()) == []
