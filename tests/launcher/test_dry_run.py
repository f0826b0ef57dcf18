"""What `--dry-run` tells is what ranks get, and nothing is started by it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def cli(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("ROXXEL_", "CUDA_"))}
    program = [sys.executable, "-m", "roxxel_dist", "launch", "local", *words]
    return subprocess.run(program, cwd=cwd, env=outer, capture_output=True, text=True, timeout=60, check=False)


def test_what_is_told_is_what_runs(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("A=from file\nB=overridden\n")
    command = ["--", "env", sys.executable, "-c", SHOW, "a b", "--api-key", "sekrit2"]
    told = cli(*OPTIONS, "--dry-run", "--json", *command, cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    text = cli(*OPTIONS, "--dry-run", *command, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["env"], "something was started"
    assert "sekrit" not in told.stdout + text.stdout
    assert "restarts 5, step time-out adaptive; nothing was started" in text.stdout

    job = json.loads(told.stdout)
    assert cli(*OPTIONS, *command, cwd=tmp_path).returncode == 0
    for rank in (0, 1):
        plan: dict[str, Any] = job["ranks"][rank]
        env, argv = json.loads((tmp_path / f"f.{rank}").read_text())
        assert (env["A"], env["B"], env["MY_TOKEN"]) == ("from file", "two words", "sekrit")
        assert plan["env"] | {"MY_TOKEN": "sekrit"} == {
            name: env[name] if name not in ("ROXXEL_COORDINATOR", "ROXXEL_RUN_ID") else value
            for name, value in (plan["env"] | {"MY_TOKEN": "sekrit"}).items()
        }
        assert set(env) - set(os.environ) <= {*plan["env"], *job["set_by_the_agent"]}
        assert argv == ["-c", "a b", "--api-key", "sekrit2"]
        assert plan["argv"][-4:] == [SHOW, "a b", "--api-key", "***"]
        assert plan["argv"][:5] == [sys.executable, "-u", "-P", "-m", "roxxel_dist.launcher.host.worker"]
        start = "env 'A=from file' 'B=two words' 'MY_TOKEN=***' "
        assert f"{rank} on {plan['host']}: {start}" in text.stdout


def test_gpus_that_are_not_there_are_told_before_anything_starts(tmp_path: Path) -> None:
    options = ["--nprocs", "2", "--gpus-per-host", "64"]
    told = cli(*options, "--dry-run", "--json", "--", "touch", "x", cwd=tmp_path)
    devices = [rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in json.loads(told.stdout)["ranks"]]
    assert devices == [",".join(map(str, range(32))), ",".join(map(str, range(32, 64)))]
    result = cli(*options, "--", "touch", "x", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (69, "")
    assert "--gpus-per-host 64, and it has " in result.stderr
    assert list(tmp_path.iterdir()) == []
