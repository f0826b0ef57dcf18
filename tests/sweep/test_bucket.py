"""Studies in a bucket, on real servers: one without conditional writes (S3), and one that obeys them (Google's)."""

import json
import os
import random

import process_ray
import pytest
import trial_bodies
import yaml
from browser import data_of
from killed_drivers import ended, kill_and_go_on, until
from made_study import made_versus
from servers import AzureServer, GcsServer, S3Server
from sweep_runs import ONE, Study

from roxxel_dist.cli import main
from roxxel_dist.objects import lease
from roxxel_dist.objects.errors import StoreTimeoutError
from roxxel_dist.objects.lease import Lease, LeaseHeldError, LeaseLostError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.process.exit_codes import EXIT_FILES
from roxxel_dist.sweep.driver import bucket, controller
from roxxel_dist.sweep.samplers.pairs import outcome
from roxxel_dist.sweep.space.extras import Versus
from roxxel_dist.sweep.study import stored_journal
from roxxel_dist.sweep.study.journal import replay
from roxxel_dist.sweep.study.stored_journal import JournalWriter, read_journal

SERVERS = {"gs": GcsServer, "az": AzureServer}
METRIC = {"name": "val_loss", "goal": "minimize"}
TIMES = {"RENEW_S": 0.5, "STALE_S": 5.0, "POLL_S": 0.1, "SETTLE_S": 0.1}


@pytest.fixture(scope="module", params=["s3", "gs", pytest.param("az", marks=pytest.mark.long)])
def server(request, tmp_path_factory):
    if request.param == "s3":
        yield request.getfixturevalue("s3")
        return
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def _times(monkeypatch):
    for name, value in TIMES.items():
        monkeypatch.setattr(lease, name, value)


@pytest.fixture
def store(server, request):
    with server.environment():
        yield ObjectStore.open(server.url("journals", request.node.name), timeout_s=10)


class BucketStudy(Study):
    """A study in a bucket; `path` has what its trials leave, and every driver that is started a cache of its own."""

    def __init__(self, path, url, monkeypatch, timeout_s=20.0):
        super().__init__(path / "notes", process_ray.ADDRESS)
        self.url, self._patch, self._caches = url, monkeypatch, path / "caches"
        self.more = {"url": url, "timeout_s": timeout_s}
        self.starts = 0

    def on_another_host(self):
        """From now on nothing is there but the bucket."""
        self.starts += 1
        self._patch.setenv("XDG_CACHE_HOME", str(self._caches / str(self.starts)))

    def start(self, *arguments, **options):
        self.on_another_host()
        return super().start(*arguments, **options)

    @property
    def stored(self):
        return read_journal(ObjectStore.open(self.url, timeout_s=10))

    @property
    def events(self):
        return [json.loads(line) for line in self.stored.data.splitlines()]

    @property
    def history(self):
        return replay(self.path, self.stored.data)

    def run_here(self, body, **options):
        """In this process."""
        with trial_bodies.opened(self.url, self.more["timeout_s"]) as held:
            path, self.path = self.path, held
            try:
                self.task = lambda trial, params, attempt: {
                    "trial": trial, "params": params, "attempt": attempt, "folder": str(path), "log": None,
                }  # fmt: skip
                return self.run(body, **options)
            finally:
                self.path = path


@pytest.fixture
def study(s3, tmp_path, monkeypatch, request):
    monkeypatch.setattr(controller, "connected", process_ray.connected)
    with s3.environment():
        study = BucketStudy(tmp_path, s3.url("studies", request.node.name), monkeypatch)
        study.on_another_host()
        yield study


def test_lines_come_in_their_order_in_one_object(store):
    lines = [json.dumps({"n": n}).encode() + b"\n" for n in range(9)]
    assert read_journal(store).data == b""
    with Lease.take(store, "study.lease", "test") as held:
        for some in (lines[:5], lines[5:]):
            with JournalWriter(store, read_journal(store), held) as writer:
                writer.add(some[0], soon=False, wait=True)
                for line in some[1:]:
                    writer.add(line, soon=False, wait=False)
    assert read_journal(store).data == b"".join(lines)
    assert [info.key for info in store.list() if not info.key.startswith("study.lease")] == ["journal.jsonl"]
    store.write("journal.jsonl", lines[8] + b'{"n"')
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: damaged"):
        read_journal(store)


def test_what_is_sent_grows_with_the_lines_and_not_with_their_square(store, monkeypatch):
    """Each write once replaced the whole journal. Full parts never change, and another driver reads them too."""
    monkeypatch.setattr(stored_journal, "PART_BYTES", 2000)
    sent, real = [], store.write
    monkeypatch.setattr(store, "write", lambda key, data, **how: sent.append(len(data)) or real(key, data, **how))
    lines = [json.dumps({"n": n, "text": "x" * 480}).encode() + b"\n" for n in range(40)]
    amounts = []
    with Lease.take(store, "study.lease", "test", log=lambda _: None) as held:
        for some in (lines[:20], lines[20:]):
            sent.clear()
            with JournalWriter(store, read_journal(store), held) as writer:
                for line in some:
                    writer.add(line, soon=False, wait=True)
            amounts.append(sum(sent))
            assert read_journal(store).data == b"".join(lines[: lines.index(some[-1]) + 1])
    assert amounts[1] < 1.5 * amounts[0]
    keys = [info.key for info in store.list("journal")]
    assert len(keys) == len(read_journal(store).parts) > 5
    store.write(keys[0], b"{}")  # as nothing does
    with pytest.raises(ValueError, match=r"journal\.jsonl, line \d+: damaged"):
        read_journal(store)


@pytest.mark.parametrize("is_begun", [False, True])
def test_of_two_drivers_that_believe_to_be_alone_one_ends(store, is_begun):
    if is_begun:
        store.write("journal.jsonl", b'{"zero": 0}\n')
    with Lease.take(store, "study.lease", "test") as held:
        stored = read_journal(store)
        with JournalWriter(store, stored, held) as first:
            first.add(b'{"first": 1}\n', soon=True, wait=True)
        second = JournalWriter(store, stored, held)
        second.__enter__()
        with pytest.raises(LeaseLostError, match=r"another driver has written journal\.jsonl"):
            second.add(b'{"second": 1}\n', soon=True, wait=True)
        assert read_journal(store).data == stored.data + b'{"first": 1}\n'


def test_a_driver_that_was_killed_goes_on_where_only_the_bucket_is(study):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    kill_and_go_on(study, random.Random(seed), 1, 6)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nothing_is_lost_or_repeated_when_drivers_are_killed_at_20_moments(study):
    assert kill_and_go_on(study, random.Random(12), 20, 300) == 20


@pytest.mark.cluster
def test_a_second_driver_is_refused_and_names_the_first(study, monkeypatch):
    first = study.start("stays", count=1)
    until(lambda: study.of("report"), "the first driver's trial")
    study.on_another_host()
    monkeypatch.setattr(bucket, "WAIT_S", 0.0)
    with pytest.raises(LeaseHeldError, match=rf"{study.url}: sweep \(pid {first.pid} on host .* writes there"):
        study.run_here(trial_bodies.stays, count=1)
    first.kill()
    first.communicate()
    assert study.run_here(trial_bodies.stays, count=1).code == 0
    assert study.ends() == [0]


@pytest.mark.cluster
def test_a_store_that_is_away_for_some_seconds_costs_nothing(study, s3):
    with s3.link() as link, s3.environment(link, XDG_CACHE_HOME=os.environ["XDG_CACHE_HOME"]):
        driver = study.start("kept", count=8, workers=2)
        with s3.environment():
            until(lambda: study.of("result"), "the first result")
            link.down = True
            before = len(study.ends())
            with pytest.raises(AssertionError):
                until(lambda: driver.poll() is not None, "the end of the driver", limit_s=3)
            assert len(study.ends()) <= before + 2
            link.down = False
        code, said = ended(driver)
        assert code == 0, said
        assert study.ends() == list(range(8))


def test_a_store_that_stays_away_ends_the_sweep_and_nothing_is_lost(study, s3, capsys):
    study.more["timeout_s"] = 1.0
    with s3.link() as link, s3.environment(link, XDG_CACHE_HOME=os.environ["XDG_CACHE_HOME"]):
        reported = []

        def changed(history, number):
            reported.append(number)
            link.down |= bool(history.count("done"))

        study.changed = changed
        with pytest.raises(StoreTimeoutError, match=r"journal\.jsonl: .* refuses connections"):
            study.run_here(trial_bodies.kept, count=4)
        assert main(["sweep", "--study", study.url, "--store_timeout", "1"]) == EXIT_FILES
        assert study.url in capsys.readouterr().err
    assert study.run_here(trial_bodies.kept, count=4).code == 0
    assert study.ends() == [0, 1, 2, 3]
    assert study.history.trials[0].attempts == 1  # its result was sent by the second start


def test_reports_of_a_study_in_a_bucket(study, monkeypatch, capsys, tmp_path):
    study.run_here(trial_bodies.square, count=3)
    study.on_another_host()
    monkeypatch.chdir(tmp_path)
    ObjectStore.open(study.url).write("study.yaml", json.dumps({**ONE, "metric": METRIC}).encode())
    assert main(["report", study.url]) == 0
    said = capsys.readouterr().out
    assert "3 trial(s): 3 done" in said
    assert f"page: {study.url}/report/report.html" in said
    (shown,) = data_of(ObjectStore.open(study.url).read("report/report.html").decode())["items"].values()
    assert (shown["head"]["path"], shown["head"]["counts"]["done"]) == (str(study.url), 3)
    assert main(["report", study.url, "--best_config", "best.yaml"]) == 2
    assert "trained on another machine" in capsys.readouterr().err
    assert main(["sweep", "--study", f"{study.url}/report", "--count", "1"]) == 2
    assert "and is not a study: name another place" in capsys.readouterr().err
    assert main(["sweep", "--study", "ftp://host/x", "--count", "1"]) == 2


def test_a_comparison_in_a_bucket(study, monkeypatch, capsys, tmp_path):
    """Taken up where nothing is but the bucket; its verdict, its report and its page are read from there."""
    made, store = made_versus(tmp_path, [0.5, 0.6]), ObjectStore.open(study.url, timeout_s=10)
    for name in ("config.yaml", "extras.yaml", "study.yaml", "journal.jsonl"):
        store.upload(made / name, name)
    monkeypatch.chdir(tmp_path)
    study.extras = yaml.safe_load((made / "extras.yaml").read_text())
    sweep = yaml.safe_load((made / "study.yaml").read_text())
    ending = study.run_here(trial_bodies.paired, sweep=sweep, count=40)
    assert ending.reason == outcome(study.history, Versus(**study.extras["versus"])).ending
    trained = len(study.of("ask"))
    assert trained > 4
    study.on_another_host()
    assert main(["versus", "--study", study.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == ending.reason
    assert main(["versus", "--study", study.url, "--level", "0.8"]) == 2
    assert f"{study.url} was begun with 0.9" in capsys.readouterr().err
    assert len(study.of("ask")) == trained
    assert main(["report", study.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versus"]["text"] == ending.reason
    assert ending.reason in store.read("report/report.html").decode()
