"""What `top` shows of a run in a bucket, on a real server."""

import json

import pytest
from servers import S3Server

from roxxel_dist.cli import main
from roxxel_dist.objects.lease import Lease
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.place.bucket_folder import LEASE
from roxxel_dist.view import bucket
from roxxel_dist.view.bucket import BucketRunReader, RunCopy
from roxxel_dist.view.items import finder
from roxxel_dist.view.run import RunReader
from roxxel_dist.view.web.server import Feed


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with S3Server(tmp_path / "s3") as server, server.environment():
        yield server


def test_a_run_in_a_bucket_is_what_the_local_one_is(server, trained, capsys, monkeypatch):
    """Its rows, checkpoints and who trains in it follow the bucket; while that is away the last state stays."""
    url = server.url("runs/one")
    store, here = ObjectStore.open(url), RunReader(trained).read()
    for path in trained.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            store.upload(path, path.relative_to(trained).as_posix())
    with server.link() as link, server.environment(link):
        reader = BucketRunReader(url)
        seen = reader.read()
        assert (seen.name, seen.state, seen.step) == (url, here.state, here.step)
        assert (seen.losses, seen.phases, seen.spent) == (here.losses, here.phases, here.spent)
        assert [(each.name, each.digests) for each in seen.checkpoints] == [(c.name, True) for c in here.checkpoints]
        files = RunCopy(url)
        files.pull()
        count = len(link.requests)
        files.pull()
        assert len(link.requests) == count + 1  # what has not changed is not fetched again, nor listed so soon
        monkeypatch.setattr(bucket, "CHECKPOINTS_S", 0.0)
        files.pull()
        # What lies deep in a checkpoint is never listed.
        assert len(link.requests) == count + 3 + min(3, len(here.checkpoints))
        deep = [path for path in trained.rglob("*") if len(path.relative_to(trained).parts) > 3]
        assert deep
        assert all(name.count("/") < 3 for name in files.objects)
        row = {"step": 11, "train_loss": 1.5}
        store.write("metrics.jsonl", store.read("metrics.jsonl") + json.dumps(row).encode() + b"\n")
        gone = here.checkpoints[0].name
        store.delete([f"checkpoints/{gone}/digests.json"])  # as a run takes it away: the rest follows
        with Lease.take(store, LEASE, "train", log=lambda _: None):
            files.pull()
            assert files.is_trained
            seen = reader.read()
            assert (seen.step, seen.losses[-1]) == (11, (11, 1.5))
            assert gone not in [each.name for each in seen.checkpoints]
        files.pull()
        assert not files.is_trained
        find = finder([url])
        page, (item,) = Feed(find), find()
        (shown,) = page.read(tuple(page.read()[0]))[1].values()
        assert json.loads(shown["head"])["step"] == 11
        assert json.loads(shown["checkpoints"])["tier"] == "bucket"
        link.down = True
        assert reader.read().step == 11
        assert find() == [item]  # the page does not ask the bucket again for what there is
    assert main(["top", "--once", url]) == 0
    assert "step 11" in capsys.readouterr().out
    store.write("study.yaml", b"")
    store.delete(["config.yaml", "metrics.jsonl"])
    for place, words in ((url, "a study in a bucket, and top shows runs there"), (server.url("x"), "is not a run")):
        assert main(["top", "--once", place]) == 2
        assert words in capsys.readouterr().err
