"""What every test shares: simulated devices, a compilation cache, and no silent skips in CI."""

import atexit
import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

from commands import FAST, PROXIES

ROOT = Path(__file__).parent.parent
# Before jax is imported, here and in every process that a test starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "8"
os.environ["XDG_STATE_HOME"] = str(ROOT / ".cache" / "state")  # what tests launch is no job of the user's
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("XLA_FLAGS", FAST)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads in HLO which test it came from
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads spin: beside busy workers they double the CPU time of sweeps

# Under nohup and in the background signals are ignored, which programs inherit: tests send them to those that they
# start. A handler is not inherited, and as little ends this process.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

os.umask(0o022)  # that another user may read a file is asserted here and there
# The servers of the tests are on this machine: a proxy is for what pip installs.
for name in ("no_proxy", "NO_PROXY") if any(name.lower() in PROXIES for name in os.environ) else ():
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost", "::1")))
# Else each of the many processes of the tests would compile the package, and each worker rewrite all assertions.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import jax
import psutil
import pytest
from corpora import write_corpus
from hypothesis import settings
from leftovers import pytest_configure  # noqa: F401  (pytest calls it)
from xdist.scheduler import LoadGroupScheduling

from roxxel_dist.data.dataset import Roxxel

gc.disable()  # nothing to find in what is imported and collected: it took a third of the time until the first test
gc.set_threshold(300_000, 10, 10)  # a trace of jax makes many objects: most stay, or go without a collection
jax.config.update("jax_num_cpu_devices", 8)
# Of each property `make test` tries a few examples, always the same, and `make test-long` many.
settings.register_profile("few", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=200, deadline=None)
settings.load_profile("few")
LARGE_BYTES, GROWTH_BYTES = 900 * 2**20, 200 * 2**20  # a worker of the tests stays below 1.5 GB
KEPT_BYTES = pytest.StashKey[int]()  # of the process behind the last time that it dropped them


def end_at_once(worker):
    """Ends a worker without taking its millions of objects apart, a second or two; a fork of it ends as it would."""
    if os.getpid() == worker:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# Handlers that were registered before this one are not called: coverage that began with the process saves by one.
if "PYTEST_XDIST_WORKER" in os.environ and "coverage" not in sys.modules:
    atexit.register(end_at_once, os.getpid())


class ByFile(LoadGroupScheduling):
    """A worker takes a whole file, or all files of an `xdist_group`: what a module shares is made and compiled once."""

    def _split_scope(self, nodeid):
        scope = super()._split_scope(nodeid)
        return nodeid.split("::")[0] if scope == nodeid else scope


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


class InTurn(pytest.Dir):
    """A folder of which each worker imports other files first.

    In a fresh clone, assertions are rewritten where a file is imported first: workers in step with one another would
    each do all of that.
    """

    def collect(self):
        found = list(super().collect())
        begin = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) * len(found)
        begin //= int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        return found[begin:] + found[:begin]


def pytest_collect_directory(path, parent):
    return InTurn.from_parent(parent, path=path) if "PYTEST_XDIST_WORKER" in os.environ else None


def pytest_collection_finish():
    gc.enable()
    gc.freeze()  # a million objects that stay


def pytest_collection_modifyitems(items):
    """Files that measure how costs grow come first, then those with tests that are given more time.

    The heap of a worker that has done much is in pieces: the objects of a large table lie on pages of their own, and a
    linear cost was seen to grow with the power 1.65. And no worker is left alone with a long test. Behind them the
    order is that of the names of files, the same for all workers: rooms whose tests wait, as the launcher's, and rooms
    whose tests compute are mixed, so that not all workers wait at once.
    """
    limits, measuring = {}, set()
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0), mark.args[0] if mark else 0)
        if hasattr(getattr(item, "module", None), "exponent"):
            measuring.add(item.path)
    items.sort(key=lambda item: (item.path not in measuring, -limits[item.path], item.path.name, item.path))


@pytest.fixture(scope="session", autouse=True)
def jax_devices():
    """Makes jax's devices: else the first run that a test begins in this process decides about their threads."""
    jax.devices()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Drops jax's traces and compiled programs where the process is large and has grown.

    They would stay as long as the process, 5 GB at its end. Tests that follow read the programs again from the
    compilation cache.
    """
    result = yield
    if resident_bytes() > max(LARGE_BYTES, item.config.stash.get(KEPT_BYTES, 0) + GROWTH_BYTES):
        if "kept_steps" in sys.modules:
            sys.modules["kept_steps"].forget()
        jax.clear_caches()
        gc.collect()
        gc.freeze()  # what stayed is not gone through again
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is free
        item.config.stash[KEPT_BYTES] = resident_bytes()
    return result


def pytest_sessionfinish():
    """Looks once for errors of what is garbage, among all that was frozen too: pytest shows them.

    Its own five collections behind this one go through what is new.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def resident_bytes():
    return psutil.Process().memory_info().rss


@pytest.fixture(autouse=True)
def xla_flags():
    """A run with `deterministic` adds to XLA_FLAGS, which would decide the kernel of the models of later tests."""
    before = os.environ["XLA_FLAGS"]
    yield
    os.environ["XLA_FLAGS"] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With ROXXEL_NO_SKIP=1, as in CI, a skipped test is a failed one."""
    report = yield
    if report.skipped and os.environ.get("ROXXEL_NO_SKIP") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"
    return report


@pytest.fixture
def corpus(tmp_path):
    with Roxxel(write_corpus(tmp_path)) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An S3 gateway: a process of its own, with one bucket. `server.environment()` makes this process its client."""
    from servers import S3Server

    with S3Server(tmp_path_factory.mktemp("s3")) as gateway:
        yield gateway
