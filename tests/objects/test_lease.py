"""Leases on a real server: taken, renewed, given back, refused, taken over, and lost."""

import json
import multiprocessing
import os
import signal
import time

import pytest
from servers import AzureServer, GcsServer, S3Server, StrictS3Server

from roxxel_dist.objects import lease as lease_module
from roxxel_dist.objects.lease import Lease, LeaseHeldError, LeaseLostError
from roxxel_dist.objects.store import ObjectStore

CONTEXT = multiprocessing.get_context("spawn")
LIMIT_S = 60.0


SERVERS = {"s3": S3Server, "strict-s3": StrictS3Server, "gs": GcsServer, "az": AzureServer}


@pytest.fixture(
    scope="module", params=["s3", "strict-s3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gs", "az"))]
)
def server(request, tmp_path_factory):
    """One that does not look at conditions, and those that obey them."""
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def url(server, request, monkeypatch):
    short()
    with server.environment():
        yield server.url(request.node.name.partition("[")[0])
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def _times():
    before = {name: getattr(lease_module, name) for name in TIMES}
    yield
    for name, value in before.items():
        setattr(lease_module, name, value)


TIMES = {"RENEW_S": 0.4, "STALE_S": 4.0, "POLL_S": 0.1, "SETTLE_S": 0.1}


def short():
    """Seconds become tenths."""
    for name, value in TIMES.items():
        setattr(lease_module, name, value)


def take(url, said=None, **options):
    said = [] if said is None else said
    return Lease.take(ObjectStore.open(url, timeout_s=2), "it.lease", "test", log=said.append, **options)


def hold(url, ready, end):
    """Until it is to end, or has lost the lease: then it exits with 3."""
    short()
    lease = take(url)
    ready.set()
    try:
        while not end.wait(0.05):
            lease.check()
    except LeaseLostError:
        os._exit(3)
    lease.release()


@pytest.fixture
def holder(url):
    """A process that has the lease."""
    ready, end = CONTEXT.Event(), CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(url, ready, end))
    process.start()
    assert ready.wait(LIMIT_S)
    process.end = end
    yield process
    if process.is_alive():  # a killed one would be waited for as long as it sleeps
        end.set()
    process.join()


def test_a_second_owner_is_refused_until_the_first_gives_it_back(holder, url):
    said = []
    with pytest.raises(
        LeaseHeldError, match=rf"test \(pid {holder.pid} on host .*\) writes there, .* \d s ago: end that process"
    ):
        take(url, said)
    assert f"pid {holder.pid}" in said[-1]
    holder.end.set()
    with take(url, said, wait_s=LIMIT_S) as lease:
        lease.check()
        assert lease.lost is None
    assert [info.key for info in ObjectStore.open(url).list()] == ["it.lease"]
    take(url).discard()
    assert ObjectStore.open(url).list() == []


def test_a_dead_owner_of_this_host_is_not_waited_for(holder, url):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    said = []
    take(url, said).release()
    assert not [line for line in said if "waiting" in line]


def test_an_owner_of_another_host_is_waited_for_until_it_is_stale(url, monkeypatch):
    monkeypatch.setattr(lease_module, "STALE_S", 1.5)
    store = ObjectStore.open(url)
    take(url).release()
    record = json.loads(store.read("it.lease"))
    store.write("it.lease", json.dumps({**record, "released": False, "host": "elsewhere", "job": "j"}).encode())
    take(url, job="j").release()
    store.write("it.lease", json.dumps({**record, "released": False, "host": "elsewhere", "job": "j"}).encode())
    said = []
    take(url, said, job="another").release()
    assert "waiting for test (pid" in said[-1]
    assert "on host elsewhere), which renewed its lease" in said[-1]
    assert [info.key for info in store.list()] == ["it.lease"]


def test_a_process_that_was_stopped_for_too_long_notices_that_another_has_it(holder, url):
    os.kill(holder.pid, signal.SIGSTOP)
    with take(url, wait_s=LIMIT_S) as lease:
        os.kill(holder.pid, signal.SIGCONT)
        holder.join(LIMIT_S)
        assert holder.exitcode == 3
        lease.check()


@pytest.mark.parametrize("taken", [False, True])
def test_a_lease_that_was_not_renewed_in_time_is_asked_for_before_it_is_given_up(url, monkeypatch, taken):
    """The first thing that runs in a process that goes on after a stop may be a check, and not a renewal."""
    monkeypatch.setattr(lease_module, "RENEW_S", 600.0)
    monkeypatch.setattr(lease_module, "STALE_S", 0.5)
    with take(url) as lease:
        store = ObjectStore.open(url)
        record = json.loads(store.read("it.lease"))
        if taken:
            store.write("it.lease", json.dumps({**record, "id": "another", "host": "elsewhere"}).encode())
        wait_for(lambda: lease.age_s >= lease_module.STALE_S)
        if taken:
            with pytest.raises(LeaseLostError, match="was taken away"):
                lease.check()
        else:
            lease.check()
            assert json.loads(store.read("it.lease"))["renewals"] == record["renewals"] + 1


def test_whoever_has_lost_it_is_told(url):
    with take(url) as lease:
        store = ObjectStore.open(url)
        record = json.loads(store.read("it.lease"))
        store.write("it.lease", json.dumps({**record, "id": "another", "host": "elsewhere"}).encode())
        wait_for(lambda: lease.lost)
        with pytest.raises(LeaseLostError, match=r"was taken away: test \(pid \d+ on host elsewhere\) has it now"):
            lease.check()
    assert json.loads(store.read("it.lease"))["released"] is False


@pytest.mark.long
def test_a_store_that_is_away_is_not_the_end_until_the_lease_is_stale(server, url):
    with server.link() as link, server.environment(link), take(url) as lease:
        link.down = True
        time.sleep(1.5)
        lease.check()
        link.down = False
        wait_for(lambda: lease.age_s < 0.5)
        link.down = True
        wait_for(lambda: lease.age_s >= lease_module.STALE_S)
        assert lease.lost is None
        with pytest.raises(LeaseLostError, match=r"could not be renewed for 4 s \(.*another process may have it"):
            lease.check()
        link.down = False
        wait_for(lambda: lease.age_s < 1)
        lease.check()


def wait_for(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
