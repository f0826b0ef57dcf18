import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from jax.sharding import PartitionSpec as P
from tables import one_test

from roxxel_dist.cluster import determinism, distributed, preemption
from roxxel_dist.cluster.mesh import make_mesh, num_devices, replicate, shard_batch
from roxxel_dist.process.exit_codes import LostRankError
from roxxel_dist.process.interrupt import FORWARD_S
from roxxel_dist.process.progress import Progress, create, read


def test_a_mesh_over_all_devices_or_some():
    assert num_devices(make_mesh()) == 8
    mesh = make_mesh(4, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "expert": 1, "tensor": 2}
    with pytest.raises(ValueError, match=r"n_devices is 9, but 8 device\(s\) are here"):
        make_mesh(9)


def test_batches_are_cut_and_states_copied():
    mesh = make_mesh()
    batch = shard_batch({"x": np.arange(32).reshape(16, 2)}, mesh)["x"]
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 2)}
    state = replicate(np.ones(3), mesh)
    assert state.sharding.spec == P()
    assert len(state.addressable_shards) == 8
    with pytest.raises(ValueError, match="a batch has 12 rows, which is not a multiple of the 8 devices"):
        shard_batch(np.ones((12, 2)), mesh)


def test_alone_everything_is_agreed_at_once():
    distributed.initialize()
    distributed.initialize()
    assert (distributed.process_index(), distributed.process_count(), distributed.is_primary()) == (0, 1, True)
    assert distributed.broadcast_from_primary("anything", "mine") == "mine"
    assert distributed.gather_to_primary("anything", "mine") == ["mine"]
    distributed.barrier("nobody else")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("DEADLINE_EXCEEDED: Barrier timed out. Id: roxxel/x/1", TimeoutError),
        ("INTERNAL: Barrier failed because: UNAVAILABLE: Task 1 heartbeat timeout.", LostRankError),
        ("UNAVAILABLE: failed to connect to all addresses", LostRankError),
    ],
)
def test_a_rank_that_is_lost_is_no_rank_that_is_late(text, kind):
    error = distributed.unanswered(jax.errors.JaxRuntimeError(f"{text}\nmore"), "waited 3 s at 'x'")
    assert type(error) is kind
    assert str(error).endswith(text)


IN_ORDER = """
import jax
from roxxel_dist import initialize
from roxxel_dist.cluster.determinism import enable_compilation_cache, make_deterministic, numerics_fingerprint
make_deterministic()
for _ in range(2):
    enable_compilation_cache()
print(jax.jit(lambda x: x + 1)(1), numerics_fingerprint()["xla_flags"])
for _ in range(2):
    initialize()
print("fine")
"""


def in_order(**environ):
    """A process that does all of this once, with these variables and no compilation cache of jax's own."""
    others = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return subprocess.run([sys.executable, "-c", IN_ORDER], env=others | environ, capture_output=True, text=True)


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """One of which several tests look at a part."""
    home = tmp_path_factory.mktemp("home") / "file"
    home.touch()
    return in_order(XLA_FLAGS="", XDG_CACHE_HOME=str(home))


def test_initialize_is_harmless_after_jax_was_used(ordered):
    assert ordered.returncode == 0, ordered.stderr
    assert ordered.stdout.splitlines()[1:] == ["fine"]


def test_a_request_to_stop_lasts_as_long_as_the_loop():
    before = signal.getsignal(signal.SIGTERM)
    with preemption.watching_for_stop():
        assert not preemption.stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.stop_requested()
    assert signal.getsignal(signal.SIGTERM) is before
    with preemption.watching_for_stop():
        assert not preemption.stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert preemption.stop_requested()
        signal.raise_signal(signal.SIGINT)  # at once: a wrapper passes on what the terminal has sent already
        time.sleep(2 * FORWARD_S)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_home_that_cannot_be_written_is_one_line(ordered):
    [line] = ordered.stderr.splitlines()
    assert "file/roxxel-dist/xla cannot be written (Not a directory)" in line
    assert "JAX_COMPILATION_CACHE_DIR" in line


def test_the_thread_pool_is_one_number(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "7")
    assert determinism.pin_threads() == 7
    assert determinism.pin_threads(5) == 5
    assert os.environ["PJRT_NPROC"] == "5"
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setenv("ROXXEL_LOCAL_DEVICES", "64")
    assert determinism.pin_threads() == max(64, os.cpu_count())


def test_the_users_own_flags_stay(monkeypatch, tmp_path):
    ours, theirs = "--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=2 --xla_dump_to='a folder'"
    (tmp_path / "flags").write_text(theirs + "\n")
    cases = {"": ours, theirs: f"{theirs} {ours}", str(tmp_path / "flags"): f"{theirs} {ours}", ours: ours}
    for given, expected in (cases | {"--xla_gpu_deterministic_ops": "--xla_gpu_deterministic_ops"}).items():
        monkeypatch.setenv("XLA_FLAGS", given)
        determinism.make_deterministic()
        determinism.make_deterministic()
        assert os.environ["XLA_FLAGS"] == expected


def test_xla_knows_the_flag_of_determinism(ordered, tmp_path):
    """XLA ends a process that has a flag which it does not know; and a jaxlib without GPU support must know it, too."""
    assert ordered.stdout.splitlines()[:1] == ["2 --xla_gpu_deterministic_ops=true"], ordered.stderr
    done = in_order(XLA_FLAGS="--xla_unheard_of=1", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout == "", done.stderr
    assert "Unknown flag" in done.stderr


def test_flags_that_forbid_determinism(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with pytest.raises(ValueError, match="XLA_FLAGS has --xla_gpu_deterministic_ops=false: take it out, or set"):
        determinism.make_deterministic()
    monkeypatch.setenv("XLA_FLAGS", "nowhere")
    with pytest.raises(ValueError, match="XLA_FLAGS is 'nowhere', a file that cannot be read"):
        determinism.make_deterministic()


def test_what_decides_bits_is_kept_and_compared(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    before = determinism.numerics_fingerprint()
    assert before["pjrt_nproc"] == 8
    assert before["processes"] == 1
    assert list(before["devices"].values()) == [8]
    path = tmp_path / "record.yaml"
    path.write_text(yaml.safe_dump(before))
    saved = yaml.safe_load(path.read_text())
    assert determinism.changed(saved, determinism.numerics_fingerprint()) == []
    monkeypatch.setenv("PJRT_NPROC", "4")
    with jax.default_matmul_precision("highest"):
        told = determinism.changed(saved, determinism.numerics_fingerprint())
    assert told == ["pjrt_nproc: 8 -> 4", "jax_default_matmul_precision: None -> 'highest'"]
    older = saved | {"programs": "roxxel-dist 0.1.0"}
    assert determinism.changed(older, before) == ["programs: 'roxxel-dist 0.1.0' -> 'roxxel-dist 0.2.0'"]


def test_progress_is_seen_by_others(tmp_path):
    path = tmp_path / "progress"
    fd = create(path, 2)
    writer = Progress(str(path), 1)
    writer.enter(5, phase=2)
    writer.finish(5)
    writer.enter(6, phase=2)
    first, second = read(fd, 0), read(fd, 1)
    assert (first.entered, first.done) == (0, 0)
    assert (second.entered, second.done, second.phase, second.activity) == (6, 5, 2, "step")
    assert (first.activity, first.pid, second.pid) == ("", 0, os.getpid())
    with writer.doing("save"):
        assert read(fd, 1).activity == "save"
    assert (read(fd, 1).activity, read(fd, 1).entered) == ("step", 6)
    writer.say("")
    assert read(fd, 1).activity == ""
    with pytest.raises(ValueError, match="activity 'sleep': must be one of '', 'start'"):
        writer.say("sleep")
    assert second.time > 0
    os.close(fd)
    Progress(None, 0).enter(1)  # no launcher started this process
    assert jax.process_count() == 1


def test_progress_outlives_its_file(tmp_path, monkeypatch):
    """Somebody empties the temporary folder."""
    path = tmp_path / "progress"
    fd = create(path, 2)
    writer = Progress(str(path), 1)
    monkeypatch.setenv("ROXXEL_PROGRESS", str(path))
    path.unlink()
    writer.enter(3)
    Progress.from_env(0).enter(7)
    assert [one.entered for one in (read(fd, 0), read(fd, 1))] == [0, 3]
    os.close(fd)
    for length in (0, 48):
        path.write_bytes(bytes(length))
        Progress.from_env(1).enter(7)
        with path.open("rb") as file:
            assert [one.entered for one in (read(file.fileno(), 0), read(file.fileno(), 1))] == [0, 0]


def test_what_the_user_keeps_in_jaxs_cache_is_left_to_them(monkeypatch, tmp_path):
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    try:
        for chosen, then in ((5.0, 5.0), (1.0, 0.0)):  # 1 s is jax's default
            jax.config.update(name, chosen)
            determinism.enable_compilation_cache(tmp_path)
            assert getattr(jax.config, name) == then
    finally:
        jax.config.update(name, before)


def test_what_decides_bits_with_virtual_shards_knows_the_kinds_of_devices_not_their_number():
    flags = "--xla_force_host_platform_device_count=4 --xla_gpu_deterministic_ops=true --xla_other=1"
    four = {
        "devices": {"cpu": 4},
        "processes": 2,
        "distributed": True,
        "platform": "cpu",
        "xla_flags": flags,
        "jax": "1",
    }
    one = {"devices": {"cpu": 1}, "processes": 1, "distributed": False, "platform": "cpu", "xla_flags": "--xla_other=1"}
    assert determinism.without_topology(four) == determinism.without_topology(one | {"jax": "1"})
    other = determinism.without_topology(one | {"jax": "2", "devices": {"other": 1}})
    lines = determinism.changed(determinism.without_topology(four), other)
    assert sorted(lines) == ["devices: ['cpu'] -> ['other']", "jax: '1' -> '2'"]
    on_gpu = determinism.without_topology(four | {"platform": "PJRT C API cuda"})
    assert on_gpu["xla_flags"] == "--xla_gpu_deterministic_ops=true --xla_other=1"


@one_test(
    ("platform", "flags", "threads", "told"),
    [
        ("cpu", "--xla_b=2 --xla_a=1", 16, []),  # in another order
        ("cpu", "--xla_a=0 --xla_a=1 --xla_b=2 --xla_dump_to=/tmp/x", 16, []),
        ("cpu", "--xla_a=1 --xla_b=2", 8, ["pjrt_nproc: 16 -> 8"]),
        ("cpu", "--xla_a=1", 16, ["xla_flags: '--xla_a=1 --xla_b=2' -> '--xla_a=1'"]),
        ("PJRT C API TFRT TPU v5 lite", "--xla_a=1 --xla_b=2 --xla_gpu_deterministic_ops=true", 8, []),
        ("PJRT C API cuda", "--xla_a=1 --xla_b=2", 8, []),
        (
            "PJRT C API cuda",
            "--xla_a=1 --xla_b=2 --xla_gpu_deterministic_ops=true",
            16,
            ["xla_flags: '--xla_a=1 --xla_b=2' -> '--xla_a=1 --xla_b=2 --xla_gpu_deterministic_ops=true'"],
        ),
    ],
)
def test_flags_and_threads_count_where_they_decide_bits(platform, flags, threads, told):
    was = {"platform": platform, "xla_flags": "--xla_a=1 --xla_b=2", "pjrt_nproc": 16, "devices": {"x": 1}}
    now = was | {"xla_flags": flags, "pjrt_nproc": threads}
    assert determinism.changed(*map(determinism.without_topology, (was, now))) == told
