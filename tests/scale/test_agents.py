"""Real agents of many hosts, which are one machine under many names: a start, a killed rank, a restart, the end."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from commands import command

VIA = "sh -c 'exec \"$@\"' {host}"
RANK = "touch up.$ROXXEL_PROCESS_ID.$ROXXEL_ATTEMPT; [ $ROXXEL_ATTEMPT = 1 ] || exec sleep 1000"
STEADY_S = 10.0


@pytest.mark.long
@pytest.mark.parametrize("count", [32, 64, 128])
def test_many_agents_start_lose_a_rank_start_again_and_end(count: int, tmp_path: Path) -> None:
    """It prints what the launcher needs; who runs it compares the numbers of hosts."""
    hosts = ",".join(f"n{number:03}" for number in range(count))
    words = ["--same-machine", "--hosts", hosts, "--via", VIA, "--run-id", f"many{count}", "--warm-spares", "off"]
    argv = command("launch", "exec", *words, "--", "bash", "-c", RANK)
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen(argv, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        launcher = psutil.Process(job.pid)
        cpu = lambda: sum(launcher.cpu_times()[:2])  # noqa: E731 (its own, not its children's)
        begun = time.monotonic()
        while len(list(tmp_path.glob("up.*.0"))) < count:
            assert job.poll() is None, job.communicate()[0].decode()
            time.sleep(0.2)
        start_s, started = time.monotonic() - begun, cpu()
        time.sleep(STEADY_S)
        steady, before = cpu() - started, cpu()
        (record,) = tmp_path.glob("runs/*/logs/launcher.json")
        ranks = json.loads(record.read_text())["ranks"]
        assert len(ranks) == count
        killed = time.monotonic()
        os.kill(ranks[count // 2]["pid"], signal.SIGKILL)
        while len(list(tmp_path.glob("up.*.1"))) < count:
            assert time.monotonic() < killed + 300
            time.sleep(0.05)
        again_s, again = time.monotonic() - killed, cpu() - before
        said = job.communicate(timeout=120)[0].decode()
    assert job.returncode == 0, said
    assert "restart 1 of 5, immediately" in said
    assert f"rank {count // 2} failed first" in said
    print(
        f"{count} hosts: start {start_s:.1f} s, {1000 * started / count:.1f} ms of CPU a host; steady "
        f"{1000 * steady / STEADY_S / count:.2f} ms of CPU a second and host; restart {again_s:.2f} s, "
        f"{1000 * again / count:.1f} ms of CPU a host"
    )
