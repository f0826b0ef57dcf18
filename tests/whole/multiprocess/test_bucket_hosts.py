"""Three hosts with disks of their own and one bucket: one is lost in an upload, and others go on to the same bits."""

import json
import os
import re
import signal
import sys

import pytest
from commands import TINY, command, environment, losses, make_corpus
from hosts import CONTROLLER, Cluster
from machines import missing
from servers import S3Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
TRAIN = (
    "--config", "three.yaml", "--max_steps", 12, "--eval_every", 12, "--fsdp", "True", "--dim", 144, "--num_blocks", 1,
)  # fmt: skip
"""Saved are the steps 1, 5, 10 and 12; each of three ranks has a third of every large array."""
ON_HOSTS = ("--procs-per-host", 1, "--devices-per-proc", 1, "--max-restarts", 0)
WATCH = """
import sys, time
from roxxel_dist.objects.store import ObjectStore
store, end = ObjectStore.open(sys.argv[1]), time.monotonic() + 120
while len(keys := [info.key for info in store.list(sys.argv[2])]) < int(sys.argv[3]) and time.monotonic() < end:
    time.sleep(0.01)
print(*keys)
"""
"""Prints the objects below a prefix as soon as there are so many."""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A corpus, and a config of batches that three ranks can share."""
    folder = tmp_path_factory.mktemp("hosts")
    make_corpus(folder)
    (folder / "three.yaml").write_text(re.sub(r"batch_size: \d", "batch_size: 6", TINY))
    return folder


class Site:
    """Six hosts, and an S3 server on the machine of the controller, 50 ms away."""

    def __init__(self, cluster, folder, work):
        self.cluster, self.work, self.folder = cluster, work, folder
        self.server = S3Server(folder, host=cluster.address(CONTROLLER), port=9000)
        self.server.folder.mkdir()
        self.server.prepare()
        with (folder / "server.log").open("w") as log:
            cluster.popen(
                self.server.command(), on=CONTROLLER, env=self.server.process_environ(), stdout=log, stderr=log
            )
        for name in cluster.names:
            cluster.set_env(name, **self.server.environ)
        cluster.impair(CONTROLLER, delay_ms=25)

    def words(self, hosts, url, *more, data=None):
        ssh = ["launch", "ssh", "--hosts", ",".join(hosts), "--ssh-config", self.cluster.ssh_config, *ON_HOSTS, "--"]
        data = data or self.server.url("corpus")
        return command(*ssh, "train", *TRAIN, "--data_path", data, "--run_dir", url, *more)

    def run(self, words, **more):
        return self.cluster.run(words, cwd=self.work, env=environment(**self.server.environ), timeout=300, **more)

    def objects(self, url, prefix, count):
        return self.run([sys.executable, "-c", WATCH, url, prefix, count]).stdout.split()


@pytest.fixture(scope="module")
def site(work, tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    with Cluster(6) as cluster:
        made = Site(cluster, tmp_path_factory.mktemp("s3") / "server", work)
        copied = made.run(command("copy", "data", made.server.url("corpus")))
        assert copied.returncode == 0, copied.stderr
        # What nothing happens to, in folders that all hosts share.
        whole = made.run(made.words(["h1", "h2", "h3"], work / "whole", data=work / "data"))
        assert whole.returncode == 0, whole.stdout + whole.stderr
        yield made


def digests(text):
    """What a checkpoint holds, array by array."""
    blocks = json.loads(text)["blocks"]
    return {name: sorted([bounds, digest] for bounds, digest, *_ in of_name) for name, of_name in blocks.items()}


@pytest.mark.parametrize(("victim", "parts"), [("h2", 1), ("h1", 4), ("h3", 9)])
def test_a_host_is_lost_in_an_upload(site, work, tmp_path, victim, parts):
    cluster, url = site.cluster, site.server.url(f"runs/{victim}")
    with (tmp_path / "lost.log").open("w") as log:
        job = cluster.popen(
            site.words(["h1", "h2", "h3"], url), on=CONTROLLER, cwd=work, env=environment(**site.server.environ),
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            begun = site.objects(url, "checkpoints/10", parts)
            assert len(begun) >= parts, (tmp_path / "lost.log").read_text()
            for pid in cluster.processes(victim):
                os.kill(pid, signal.SIGKILL)
            assert job.wait(120) != 0
        finally:
            job.kill()
    left = site.objects(url, "checkpoints/10", 0)
    assert left
    assert "checkpoints/10/digests.json" not in left
    resumed = site.run(site.words(["h4", "h5", "h6"], url, "--resume"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after step 5" in resumed.stdout
    taken = site.run(command("copy", url, tmp_path / "run"))
    assert taken.returncode == 0, taken.stderr
    assert losses(tmp_path / "run") == losses(work / "whole")
    last = "checkpoints/12/digests.json"
    assert digests((tmp_path / "run" / last).read_bytes()) == digests((work / "whole" / last).read_bytes())
    assert site.run(command("verify", url)).returncode == 0
