"""Runs in a bucket, on hosts that share nothing: what is killed goes on elsewhere with the same bits."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from commands import command, environment, launched, losses, make_corpus, rows, run, wait_for
from servers import BUCKET

from roxxel_dist.cli import main
from roxxel_dist.objects.store import ObjectStore

RANK = """
import os, sys
rank = os.environ["ROXXEL_PROCESS_ID"]
os.environ["XDG_CACHE_HOME"] = f"{sys.argv[1]}/cache{rank}"
sys.argv = ["roxxel-dist", *sys.argv[2:], "--local_dir", f"{sys.argv[1]}/{rank}"]
from roxxel_dist.__main__ import main
main()
"""
"""A rank of a host that has its own disk: its folders are below the first argument."""
TWELVE = ("--max_steps", 12, "--eval_every", 12)
"""Saved are the steps 1, 5, 10 and 12."""
TOGETHER = ("--fsdp", "True", "--dim", 128, "--num_blocks", 1)
"""Each of two ranks has half of every large array, so that both write, and read, parts of a checkpoint."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a corpus."""
    folder = tmp_path_factory.mktemp("bucket")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def work(desk):
    """With the runs that nothing happened to, in local folders: of one process, and of two."""
    folder = desk
    (folder / "rank.py").write_text(RANK)
    train = ["train", "--config", "tiny.yaml", "--data_path", "data", *TWELVE]
    assert run(*train, "--run_dir", "whole", cwd=folder).returncode == 0
    assert run(*launched(2, 1, "together", *TWELVE, *TOGETHER), cwd=folder).returncode == 0
    return folder


@pytest.fixture
def link(server):
    with server.link() as link:
        yield link


@pytest.fixture
def store(server, desk, request):
    with server.environment(XDG_CACHE_HOME=str(desk / "cache")):
        yield ObjectStore.open(server.url(request.node.name))


def words(store, disk, *more):
    """Train in the bucket in one process."""
    train = ["train", "--config", "tiny.yaml", "--data_path", "data", *TWELVE]
    return [*train, "--run_dir", store.url, "--local_dir", disk, *more]


def on_hosts(store, disks, *more):
    """Train in the bucket in two processes with disks of their own."""
    train = ["train", "--config", "tiny.yaml", "--data_path", "data", *TWELVE, *TOGETHER]
    launch = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 1, "--max-restarts", 0, "--"]
    return [*launch, sys.executable, "rank.py", disks, *train, "--run_dir", store.url, *more]


def digests(text):
    """What a checkpoint holds, array by array."""
    blocks = json.loads(text)["blocks"]
    return {name: sorted([bounds, digest] for bounds, digest, *_ in of_name) for name, of_name in blocks.items()}


def in_bucket(store, name):
    """Rows of the run in the bucket, as of a run in a folder."""
    folder = name / "rows"
    folder.mkdir()
    store.download("metrics.jsonl", folder / "metrics.jsonl")
    return folder


def steps(store):
    """The checkpoints that count, and those of which there is anything."""
    keys = [info.key.split("/") for info in store.list("checkpoints")]
    return {int(key[1]) for key in keys if key[-1] == "digests.json"}, {int(key[1]) for key in keys}


def killed_in_an_upload(words, store, link, server, cwd, victim):
    """Train through a link that becomes slow when step 5 is there, and kill `victim(process)` in the next upload."""
    env = environment(**server.environ_at(link.endpoint))
    with (cwd / "killed.log").open("w") as log:
        process = subprocess.Popen(command(*words), cwd=cwd, env=env, stdout=log, stderr=log)
    try:
        wait_for(lambda: 5 in steps(store)[0], what="step 5")
        link.rate = 100_000
        wait_for(lambda: 10 in steps(store)[1], what="a part of step 10")
        os.kill(victim(process), signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
    link.down = True  # what is under way is lost with it
    link.down, link.rate = False, 0
    whole, begun = steps(store)
    assert 10 in begun - whole  # half of it is there


@pytest.mark.cluster
def test_a_run_killed_in_an_upload_goes_on_from_the_bucket_alone(work, server, link, store, tmp_path, capsys):
    killed_in_an_upload(words(store, tmp_path / "first"), store, link, server, work, lambda process: process.pid)
    resumed = run(*words(store, tmp_path / "other", "--resume", "--max_to_keep", 1), cwd=work, **server.environ)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 5" in resumed.stdout
    assert losses(in_bucket(store, tmp_path)) == losses(work / "whole")
    newest = digests((work / "whole" / "checkpoints" / "12" / "digests.json").read_bytes())
    assert digests(store.read("checkpoints/12/digests.json")) == newest
    # Nothing else than what a run keeps locally, and all of it.
    folder = next((tmp_path / "other").glob("s3/*/*"))
    local = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}
    assert {info.key for info in store.list()} == {*local, "run.lease"}
    assert [name for name, path in local.items() if store.read(name) != path.read_bytes()] == []
    assert steps(store)[1] <= {1, 12}  # the newest, and the best

    result = run("eval", store.url, cwd=work, **server.environ)
    assert "val_loss is the same as in the log, to the last bit" in result.stdout, result.stderr
    for reads, shown in (
        (["verify", store.url], "step 12: complete"),
        (["top", "--once", store.url], "step 12 of 12"),
        (["batch", store.url, "--step", 12], "step 12 of"),
        (["report", store.url, "--out", tmp_path / "pictures"], "train_loss"),
        (["generate", f"{store.url}@12", "--max_new_tokens", 3], ""),
        (["export", store.url, "--format", "msgpack", "--out", tmp_path / "weights"], "step 12"),
    ):
        assert main([str(word) for word in reads]) == 0
        assert shown in capsys.readouterr().out
    exported = tmp_path / "weights" / "model_weights.msgpack"
    assert exported.read_bytes() == (work / "whole" / "model_weights.msgpack").read_bytes()


def deleted(folder):
    """As by `rm -rf`, while the run goes on and writes there."""
    shutil.rmtree(folder, ignore_errors=True)


def emptied(folder):
    """Its files and folders are deleted, and the folder itself stays."""
    for path in folder.iterdir():
        deleted(path) if path.is_dir() else path.unlink()


def without_old_files(folder):
    """As tmpreaper does it: files that have not changed since step 1 was saved, and folders that are empty then."""
    limit = (folder / "checkpoints" / "1" / "digests.json").stat().st_mtime_ns
    for path in sorted(folder.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):  # it changes meanwhile
            if path.is_dir():
                path.rmdir()
            elif path.stat().st_mtime_ns <= limit:
                path.unlink()


PURGES = {"the folder is deleted": deleted, "it is emptied": emptied, "old files are deleted": without_old_files}


@pytest.mark.cluster
@pytest.mark.parametrize("when", ["in mid-run", "between stop and resume"])
@pytest.mark.parametrize("purge", PURGES)
def test_a_purge_of_the_local_copy_loses_nothing(work, server, link, store, tmp_path, purge, when):
    env = environment(**server.environ_at(link.endpoint))
    link.rate = 100_000  # a checkpoint takes seconds to be sent, so that the run is in its middle
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command(*words(store, tmp_path / "disk")), cwd=work, env=env, stdout=log, stderr=log)
    try:
        wait_for(lambda: 1 in steps(store)[0], what="step 1")
        (folder,) = (tmp_path / "disk").glob("s3/*/*")
        before = {info.key for info in store.list()}
        if when == "in mid-run":
            PURGES[purge](folder)
        else:
            process.send_signal(signal.SIGTERM)
        link.rate = 0
        code = process.wait(120)
    finally:
        process.kill()
    text = (tmp_path / "log").read_text()
    assert code == (0 if when == "in mid-run" else 42), text
    if when != "in mid-run":
        before |= {info.key for info in store.list()}
        PURGES[purge](folder)
        resumed = run(*words(store, tmp_path / "disk", "--resume"), cwd=work, **server.environ)
        assert resumed.returncode == 0, resumed.stderr
    whole = {str(path.relative_to(work / "whole")) for path in (work / "whole").rglob("*") if path.is_file()}
    files = {name for name in whole if not name.startswith((".", "checkpoints/"))}
    kept = {info.key for info in store.list()}
    assert before | files <= kept, (text, before - kept, files - kept)
    assert steps(store)[0] == steps(store)[1] >= {1, 5, 10, 12}
    assert losses(in_bucket(store, tmp_path)) == losses(work / "whole")
    newest = digests((work / "whole" / "checkpoints" / "12" / "digests.json").read_bytes())
    assert digests(store.read("checkpoints/12/digests.json")) == newest
    log = store.read("logs/rank-0.log").decode()
    assert {int(step) for step in re.findall(r"\| Step +(\d+)/12", log)} == set(range(1, 13))
    timed = [json.loads(row).get("steps") for row in store.read("timeline.jsonl").splitlines()]
    assert {step for first, last in filter(None, timed) for step in range(first, last + 1)} == set(range(1, 13))
    assert run("verify", store.url, cwd=work, **server.environ).returncode == 0


@pytest.mark.cluster
def test_hosts_that_share_nothing(work, server, link, store, tmp_path):
    def rank_1(process):
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [c.pid for c in children if "rank.py" in c.cmdline() and c.environ().get("ROXXEL_PROCESS_ID") == "1"]
        return ranks[-1]

    killed_in_an_upload(on_hosts(store, tmp_path / "first"), store, link, server, work, rank_1)
    resumed = run(*on_hosts(store, tmp_path / "other", "--resume"), cwd=work, **server.environ)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after step 5" in resumed.stdout
    assert losses(in_bucket(store, tmp_path)) == losses(work / "together")
    whole = digests((work / "together" / "checkpoints" / "12" / "digests.json").read_bytes())
    assert digests(store.read("checkpoints/12/digests.json")) == whole
    for rank in (0, 1):  # each fetched what it reads alone: of the other rank's part no halves of its own arrays
        state = next((tmp_path / "other" / str(rank)).glob("s3/*/*")) / "checkpoints" / "5" / "state"
        theirs = [path.stat() for path in (state / f"ocdbt.process_{1 - rank}").rglob("*") if path.is_file()]
        assert sum(each.st_blocks * 512 for each in theirs) < 0.6 * sum(each.st_size for each in theirs)
    assert run("verify", store.url, cwd=work, **server.environ).returncode == 0


@pytest.mark.cluster
def test_a_store_that_stays_away_ends_the_job_with_74(work, server, link, store, tmp_path):
    env = environment(**server.environ_at(link.endpoint))
    more = ["--store_timeout", 2, "--max_steps", 22]
    process = subprocess.Popen(
        command(*words(store, tmp_path / "first", *more)), cwd=work, env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: 5 in steps(store)[0], what="step 5")
        link.down = True
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 74, said
    assert f"s3://{BUCKET}/" in said.splitlines()[-1]
    assert len(rows(next((tmp_path / "first").glob("s3/*/*")))) >= 5


def test_an_address_of_something_else(server, store, desk, tmp_path, monkeypatch, capsys):
    """A data set is not taken for a run, nor is a prefix of runs fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for path in (desk / "data").iterdir():
        store.upload(path, path.name)
    assert main(["report", str(store.url)]) == 2
    assert main(["train", "--data_path", str(store.url), "--run_dir", str(store.url)]) == 2
    error = capsys.readouterr().err
    assert error.count(f"{store.url} holds a data set (shard_00000.rox), and no run: name the address of a run") == 2
    assert all(key.startswith("shard") or "." in key for key in (info.key for info in store.list()))
    above = ObjectStore.open(server.url("above"))
    above.write("one/config.yaml", b"dim: 32")
    above.write("one/checkpoints/1/large", bytes(1 << 20))
    assert main(["report", str(above.url)]) == 2
    assert f"{above.url} is not a run: there is no {above.url}/config.yaml" in capsys.readouterr().err
    assert not list(tmp_path.rglob("large"))
