"""A store that is away, busy, slow, or cuts its answers short: no batch is lost, and none is wrong."""

import logging
import threading
import time

import numpy as np
import pytest
from buckets import opened

from roxxel_dist.objects.errors import StoreTimeoutError

pytestmark = pytest.mark.xdist_group("bucket")


FAULTS = {"down": True, "status": 503, "cut": 20_000, "trickle": 0.5, "rate": 2e4}
LONG = [pytest.param(fault, seconds, marks=[pytest.mark.long, pytest.mark.timeout(300)]) for fault, seconds in [
    ("down", 30), ("status", 60), ("cut", 30), ("trickle", 60), ("rate", 60),
]]  # fmt: skip


@pytest.mark.parametrize(("fault", "seconds"), [("down", 1), ("status", 1), ("cut", 1), *LONG])
def test_a_store_that_fails_for_some_seconds(server, local, url, cache, fault, seconds):
    bad = FAULTS[fault]
    with server.link(rate=2e6) as link, server.environment(link):
        stream = opened(url, cache, store_timeout=20 + 2 * seconds).stream(129, 8, seed=1, steps=300)
        expected = local.stream(129, 8, seed=1, steps=300)
        assert np.array_equal(next(stream), next(expected))
        good = getattr(link, fault)
        setattr(link, fault, bad)
        mend = threading.Timer(seconds, setattr, (link, fault, good))
        mend.start()
        assert all(np.array_equal(one, two) for one, two in zip(stream, expected, strict=True))
        mend.join()


def test_past_the_limit_the_object_and_the_age_are_named(server, url, cache, caplog):
    with server.link() as link, server.environment(link):
        remote = opened(url, cache, store_timeout=1)
        link.status = 503
        began = time.monotonic()
        with caplog.at_level(logging.ERROR), pytest.raises(StoreTimeoutError) as failure:
            remote.read(np.array([0]), 500)
        assert time.monotonic() - began < 10
        assert "s3://bucket/corpus/shard_00000.rox bytes" in str(failure.value)
        assert "tries in" in str(failure.value)
