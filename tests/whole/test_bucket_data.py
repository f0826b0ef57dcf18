"""Commands that read data in a bucket: the real command line against a real server."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from buckets import put, replace_object
from commands import losses, rows, run, start, wait_for
from reader import ROOT, blocks

from roxxel_dist.cli import main
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.format import HEADER_BYTES
from roxxel_dist.run.curriculum import describe_batch

pytestmark = pytest.mark.xdist_group("bucket")
CONFIG = """
datasets: {{self: {self}, more: {more}}}
validation: {{more: {more}}}
phases:
  - {{steps: 12, batch_size: 4, seq_len: 65, weights: {{self: 0.5, more: 0.5}}, packing: documents}}
dim: 32
num_blocks: 1
head_size: 8
max_context: 64
log_every: 1
eval_every: 6
eval_iters: 1
checkpoint_every: 6
"""
SMALL = "model: runs:build\nn_devices: 1\n"
"""For who looks at the data: a model that compiles soon."""


@pytest.fixture(scope="module")
def server(server):
    with server.environment():
        yield server


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two data sets: of some hundred documents, and one of which 200 steps read a part alone."""
    base, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(2)
    for name, count in (("self", 300), ("more", 100)):
        documents = (rng.integers(1, 500, rng.integers(50, 500)).astype(np.uint16) for _ in range(count))
        Roxxel(base / name / "shard_*.rox").write(documents, vocab_size=500, separator=0, max_shard_bytes=50_000)
    return base


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "roxxel-dist"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`roxxel-dist WORDS` in this process, and in a folder of its own: its code, and both streams."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        return main([*map(str, words)]), *capsys.readouterr()

    return run


def test_a_run_of_data_in_a_bucket(server, folders, cache, tmp_path, command):
    """Its losses are those of the local copy, started again in the middle too; other commands read it as well."""
    urls = {name: put(server, folders / name, f"cli/{name}") for name in ("self", "more")}
    here = {name: str(folders / name) for name in urls}
    for name, paths in (("bucket", urls), ("local", here)):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(**paths) + SMALL)
        more = ["--max_steps", 6] if name == "bucket" else []
        code, _, error = command("train", "--config", f"{name}.yaml", "--run_dir", name, *more)
        assert code == 0, error
    code, _, error = command("train", "--run_dir", "bucket", "--resume", "--max_steps", 12)
    assert code == 0, error
    assert losses(tmp_path / "bucket") == losses(tmp_path / "local")
    assert list(cache.glob("chunks/*/*"))
    text = (tmp_path / "bucket" / "config.yaml").read_text()
    assert f"self: {urls['self']}" in text
    assert server.secret_key not in text
    told = [command("batch", name, "--step", 9)[1] for name in ("bucket", "local")]
    assert told[0] == told[1]
    assert "row 3: " in told[0]
    described = [command("data", "info", path)[1] for path in (urls["self"], here["self"])]
    assert re.findall("fingerprint.+", described[0]) == re.findall("fingerprint.+", described[1]) != []
    code, said, _ = command("data", "verify", urls["self"])
    assert (code, said.strip()[-8:]) == (0, "complete")
    assert command("data", "index", urls["self"])[1] == f"index: {urls['self']}/shards.index\n"


@pytest.mark.long
def test_four_processes_train_on_the_same_rows(server, folders, cache, tmp_path):
    urls = {name: put(server, folders / name, f"four/{name}") for name in ("self", "more")}
    for name, paths in (("bucket", urls), ("local", {name: str(folders / name) for name in urls})):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(**paths))
    words = ["--nprocs", 4, "--devices-per-proc", 1, "--", "train", "--config", "bucket.yaml", "--run_dir", "bucket"]
    assert run("launch", "local", *words, cwd=tmp_path).returncode == 0
    words = ["--nprocs", 1, "--devices-per-proc", 4, "--", "train", "--config", "local.yaml", "--run_dir", "local"]
    assert run("launch", "local", *words, cwd=tmp_path).returncode == 0
    assert losses(tmp_path / "bucket") == losses(tmp_path / "local")


def blocks_read(config, step):
    """Blocks of the data set "self" that a step may read, as (shard, block), and that in which its first row begins."""
    begins = [int(at.replace(",", "")) for at in re.findall(r"self token ([\d,]+) ", describe_batch(config, step))]
    with Roxxel(config.parent / "self") as data:
        ends = np.append(data.first_tokens[1:], data.num_tokens)
        tokens = (token for at in begins for token in range(at, min(at + 65, int(data.num_tokens))))
        shards = [(int(np.searchsorted(ends, token, side="right")), token) for token in (*tokens, *begins[:1])]
        places = [(shard, (token - int(data.first_tokens[shard])) * 2 // 4096) for shard, token in shards]
    return set(places), places[-1] if begins else None


def test_damage_ends_the_run_with_1(server, folders, cache, tmp_path, command):
    """At the step that reads it, and no earlier: nothing of it is logged, nor of later ones."""
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    url, config = put(server, folders / "self", "damaged"), tmp_path / "local.yaml"
    config.write_text(CONFIG.format(self=tmp_path / "self", more=tmp_path / "more"))
    before = set()
    for step in range(1, 13):
        there, first = blocks_read(config, step)
        if step > 2 and first and first not in before:  # what earlier steps do not read
            break
        before |= there
    assert first
    assert first not in before
    path = sorted((folders / "self").glob("*.rox"))[first[0]]
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 4096 * first[1] + 77] ^= 1
    replace_object(url, path.name, bytes(data))
    (tmp_path / "c.yaml").write_text(CONFIG.format(self=url, more="more") + SMALL)
    code, _, error = command("train", "--config", "c.yaml", "--run_dir", "run")
    assert code == 1, error
    named = rf"roxxel-dist: .*{url}/{path.name}: block {first[1]} \(tokens .*document.*\) is damaged"
    assert re.search(named, error), error
    logged = list(rows(tmp_path / "run"))
    assert logged == list(range(1, len(logged) + 1))
    assert len(logged) in (step - 2, step - 1)  # the numbers of the step before it may be on the device still
    code, said, _ = command("verify", url)
    assert code == 1
    assert "1 of " in said


@pytest.mark.long
def test_a_store_that_stays_away_ends_the_run_with_74(server, folders, cache, tmp_path, monkeypatch):
    url = put(server, folders / "self", "away")
    (tmp_path / "c.yaml").write_text(CONFIG.format(self=url, more=folders / "more"))
    with server.link(delay_s=0.3) as link:
        for name, value in server.environ_at(link.endpoint).items():
            monkeypatch.setenv(name, value)
        words = ["--config", "c.yaml", "--run_dir", "run", "--store_timeout", 2, "--cache_dir", tmp_path / "cache"]
        train = start("train", *words, cwd=tmp_path)
        try:
            wait_for(lambda: any(request.range for request in link.requests))
            link.down = True
            assert train.wait(100) == 74
        finally:
            train.kill()
    log = (tmp_path / "started.log").read_text()
    assert re.search(rf"roxxel-dist: read {url}/shard_\d+.rox bytes \d+-\d+: .*, \d+ tries in \d+ s: ", log), log
    assert "Traceback" not in log.rpartition("roxxel-dist: read")[2]


@pytest.mark.docs
def test_the_page(server, cache, tmp_path):
    """docs/howto/bucket.md, its blocks of commands."""
    shutil.copytree(Path(json.__file__).parent, tmp_path / "texts")
    found = blocks(ROOT / "docs" / "howto" / "bucket.md")
    page = [block.text for block in found if block.note == f"run by tests/whole/{Path(__file__).name}"]
    assert page
    for line in "".join(page).splitlines():
        if line.startswith("roxxel-dist "):
            done = run(*line.split()[1:], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "runs" / "bucket")


@pytest.mark.parametrize(
    ("path", "what"),
    [("s3://bucket/nothing", "no .rox object there"), ("s3://other-bucket/x", "there is no bucket 'other-bucket'")],
)
def test_what_is_not_there_is_a_mistake(server, cache, command, path, what):
    code, _, error = command("data", "info", path)
    assert code == 2
    assert what in error
    assert len(error.splitlines()) == 1


def test_wrong_credentials(server, folders, cache, command, monkeypatch):
    url = put(server, folders / "more", "closed")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, _, error = command("data", "info", url)
    assert code == 2
    assert "secret key" in error
    assert len(error.splitlines()) == 1
