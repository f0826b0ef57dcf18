"""The command `sweep` on two Ray nodes that share nothing but a bucket: study, runs and corpus are in it."""

import subprocess
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from commands import make_corpus
from machines import missing
from objects.servers import S3Server
from ray_nodes import ray_nodes
from sweep_desk import write_base, write_sweep

from roxxel_dist.objects.store import ObjectStore

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]
SWEEP = {"method": "random", "metric": {"name": "val_loss"}, "parameters": {"lr": {"min": 0.001, "max": 0.01}}}
PORT = 9000
OPEN = f"for i in $(seq 300); do echo 2>/dev/null >/dev/tcp/127.0.0.1/{PORT} && exit; sleep 0.1; done; exit 1"
LIMIT_S = 400.0


@contextmanager
def on_controller(server, nodes):
    """The server, on the machine of the cluster that has no Ray."""
    process = nodes.hosts.popen(server.command(), env=server.process_environ())
    try:
        assert nodes.hosts.run(["bash", "-c", OPEN]).returncode == 0
        yield
    finally:
        process.kill()
        process.wait()


def test_a_trial_of_a_node_that_dies_goes_on_elsewhere_and_no_disk_is_shared(tmp_path):
    if why := missing():
        pytest.skip(why)
    (tmp_path / "desk").mkdir()
    make_corpus(tmp_path / "desk")
    write_base(tmp_path / "desk", 6000, 500, checkpoint_every=500)
    write_sweep(tmp_path / "desk", SWEEP)
    server = S3Server(tmp_path / "server", host="0.0.0.0", port=PORT)
    with S3Server(tmp_path / "server") as here, here.environment():
        for path in (tmp_path / "desk" / "data").iterdir():
            ObjectStore.open(here.url("corpus")).upload(path, path.name)
    known = server.environ_at(f"http://10.77.0.254:{PORT}")
    with patch.dict("os.environ", {**known, "JAX_PLATFORMS": "cpu"}), ray_nodes(2) as nodes:
        with on_controller(server, nodes):
            flags = {"sweep_config": "sweep.yaml", "config": "base.yaml", "ray_address": "auto", "wandb": "off"}
            flags |= {"study": server.url("studies/x"), "data_path": server.url("corpus"), "cpus_per_trial": "2"}
            words = [sys.executable, "-m", "roxxel_dist", "sweep", "--count", "3", "--workers", "2"]
            words += [word for name, value in flags.items() for word in (f"--{name}", value)]
            with (tmp_path / "log").open("wb") as log:
                driver = nodes.hosts.popen(
                    words, on="h1", cwd=tmp_path / "desk", env=nodes.environment, stdout=log, stderr=log
                )
            saved, end = nodes.hosts.home("h2") / ".cache" / "roxxel-dist" / "studies", time.monotonic() + LIMIT_S
            while not list(saved.glob("*/s3/bucket/studies/x/trials/*/checkpoints/1000")):
                assert time.monotonic() < end
                assert driver.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
            nodes.kill("h2")
            try:
                assert driver.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
            except subprocess.TimeoutExpired:
                raise AssertionError((tmp_path / "log").read_text()) from None
            report = [sys.executable, "-m", "roxxel_dist", "report", server.url("studies/x"), "--best_config", "b.yaml"]
            said = nodes.hosts.run(report, cwd=tmp_path, env={"HOME": str(nodes.hosts.home("controller"))})
            assert said.returncode == 0, said.stderr
            assert "3 trial(s): 3 done" in said.stdout
            assert (tmp_path / "b.yaml").is_file()
        first = nodes.hosts.home("h1") / ".cache" / "roxxel-dist" / "studies"
        assert len(list(first.glob("*/s3/bucket/studies/x/trials/*/metrics.jsonl"))) == 3
    text = (tmp_path / "log").read_text()
    assert "was lost (" in text
    assert "resumed" in text or "again (attempt 2)" in text
