"""A store that is away, busy, slow, or cuts its answers short: no batch is lost, and none is wrong."""

import logging
import threading
import time

import numpy as np
import pytest
from buckets import opened

from roxxel_dist.objects.errors import StoreTimeoutError

pytestmark = pytest.mark.xdist_group("bucket")


@pytest.mark.parametrize("fault", ["down", "status", "cut"])
def test_a_store_that_fails_for_some_seconds(server, local, url, cache, fault):
    bad = {"down": True, "status": 503, "cut": 20_000}[fault]
    with server.link(rate=2e6) as link, server.environment(link):
        stream = opened(url, cache).stream(129, 8, seed=1, steps=300)
        expected = local.stream(129, 8, seed=1, steps=300)
        assert np.array_equal(next(stream), next(expected))
        good = getattr(link, fault)
        setattr(link, fault, bad)
        mend = threading.Timer(1.0, setattr, (link, fault, good))
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
