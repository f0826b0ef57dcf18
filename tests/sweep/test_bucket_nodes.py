"""The command `sweep` on two Ray nodes that share nothing but a bucket: study, runs and corpus are in it."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from commands import make_corpus
from machines import missing
from ray_nodes import ray_nodes
from servers import S3Server
from sweep_desk import write_base, write_sweep

from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.study.journal import replay

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]
SWEEP = {"method": "random", "metric": {"name": "val_loss"}, "parameters": {"lr": {"min": 0.001, "max": 0.01}}}
PORT = 9000
OPEN = f"for i in $(seq 300); do echo 2>/dev/null >/dev/tcp/127.0.0.1/{PORT} && exit; sleep 0.1; done; exit 1"
LIMIT_S = 400.0
FETCH = """
import sys
from pathlib import Path
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.sweep.study.stored_journal import read_journal
store, folder = ObjectStore.open(sys.argv[1]), Path(sys.argv[2])
folder.mkdir()
(folder / "journal").write_bytes(read_journal(store).data)
(folder / "transferred.yaml").write_bytes(store.read("transferred.yaml"))
"""


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


@contextmanager
def cluster(folder, sweep, steps, every):
    """Two Ray nodes, a bucket with a corpus, and a desk: (nodes, server, the words of a sweep in the bucket)."""
    if why := missing():
        pytest.skip(why)
    (folder / "desk").mkdir()
    make_corpus(folder / "desk")
    write_base(folder / "desk", steps, every, checkpoint_every=every)
    write_sweep(folder / "desk", sweep)
    server = S3Server(folder / "server", host="0.0.0.0", port=PORT)
    with S3Server(folder / "server") as here, here.environment():
        for path in (folder / "desk" / "data").iterdir():
            ObjectStore.open(here.url("corpus")).upload(path, path.name)
    known = server.environ_at(f"http://10.77.0.254:{PORT}")
    with (
        patch.dict("os.environ", {**known, "JAX_PLATFORMS": "cpu"}),
        ray_nodes(2) as nodes,
        on_controller(server, nodes),
    ):
        flags = {"sweep_config": "sweep.yaml", "config": "base.yaml", "ray_address": "auto", "wandb": "off"}
        flags |= {"study": server.url("studies/x"), "data_path": server.url("corpus"), "cpus_per_trial": "2"}
        words = [sys.executable, "-m", "roxxel_dist", "sweep", "--workers", "2"]
        yield nodes, server, [*words, *(word for name, value in flags.items() for word in (f"--{name}", value))]


def test_a_trial_of_a_node_that_dies_goes_on_elsewhere_and_no_disk_is_shared(tmp_path):
    with cluster(tmp_path, SWEEP, 6000, 500) as (nodes, server, words):
        words += ["--count", "3"]
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


def test_trials_pause_and_go_on_at_other_nodes_and_the_bucket_has_what_carries_over(tmp_path):
    rule = {"type": "asha", "min_iter": 2, "eta": 2}
    with cluster(tmp_path, {**SWEEP, "early_terminate": rule}, 400, 50) as (nodes, server, words):
        (tmp_path / "desk" / "wide.yaml").write_text("dim: 64\nhead_size: 16\ntokenizer_type: byte\n")
        words += ["--count", "5", "--transfer_to", "wide.yaml"]
        done = nodes.hosts.run(words, on="h1", cwd=tmp_path / "desk", env=nodes.environment, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        fetch = [sys.executable, "-c", FETCH, server.url("studies/x"), str(tmp_path / "fetched")]
        assert nodes.hosts.run(fetch, cwd=tmp_path).returncode == 0
    history = replay(tmp_path, (tmp_path / "fetched" / "journal").read_bytes())
    events = [json.loads(line) for line in (tmp_path / "fetched" / "journal").read_text().splitlines()]
    thawed = [event["trial"] for event in events if event["event"] == "thaw"]
    assert thawed
    assert {each.state for each in history.trials.values()} == {"done", "paused"}
    for each in history.trials.values():  # nothing is trained twice, nothing is left out
        assert [step for step, _ in each.reports] == [1, *range(50, 401, 50)][: len(each.reports)]
    assert f"that config is kept at {server.url('studies/x')}/transferred.yaml" in done.stdout
    carried = Config.from_yaml(tmp_path / "fetched" / "transferred.yaml")
    assert (carried.dim, carried.parametrization) == (64, "mup")
    assert carried.lr == pytest.approx(history.best.params["lr"])
