"""Compiled programs on disk: found again, never a wrong one, and no harm from files that are damaged or another's."""

import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from roxxel_dist.cluster import executables
from roxxel_dist.cluster.executables import PROGRAM, ExecutableStore, compile_kept, program_key

X = jnp.arange(4.0)


def compiled():
    """The names of what XLA compiles from here on, or jax finds in its own cache."""
    names = []

    def listen(event: str, duration_secs: float, **more: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(more["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    return names


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    """jax's cache in an empty folder, and no listeners afterwards."""
    before = jax.config.values["jax_compilation_cache_dir"]  # pyright: ignore[reportAttributeAccessIssue]
    compilation_cache.set_cache_dir(str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    yield
    compilation_cache.set_cache_dir(before)
    compilation_cache.reset_cache()
    jax.monitoring.clear_event_listeners()
    executables._listen.cache_clear()


def double():
    """A new function each time: what jax has in its memory is not compiled."""

    def double(x):
        return x * 2

    return double


def make(store, function=None, **more):
    return compile_kept(store, jax.jit(function or double()), (X,), **more)


def only_file(store, kind=PROGRAM):
    (path,) = store.folder.glob(f"*{kind}")
    return path


def test_a_program_is_loaded_and_not_compiled(tmp_path):
    store = ExecutableStore(tmp_path / "kept")
    first = make(store)(X)
    names = compiled()
    np.testing.assert_array_equal(make(ExecutableStore(tmp_path / "kept"))(X), first)
    assert names == []
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert only_file(store).stat().st_mode & 0o777 == 0o600


def flip(place):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return damage


def foreign(path):
    """The program of another key, under this one's name."""
    other = ExecutableStore(path.parent.parent / "other")
    make(other, lambda x: x * 3)
    shutil.copy(only_file(other), path)


def pickle_of_another(path):
    """Whole, by its digest, and no program."""
    path.write_bytes(executables._sealed(path.name, b"\x80\x04N."))


DAMAGES = {
    **{f"a bit at {place}": flip(place) for place in (0, 0.01, 0.1, 0.5, 1)},
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "foreign": foreign,
    "no program": pickle_of_another,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")),
    "others may write": lambda path: path.chmod(0o622),
    "others may write the folder": lambda path: path.parent.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_and_ones_own_is_not_read(tmp_path, damage):
    store = ExecutableStore(tmp_path / "kept")
    make(store)
    DAMAGES[damage](only_file(store))
    key = only_file(store).stem
    assert store.load(key) is None
    assert (make(store)(X) == X * 2).all()
    # jax has it in its own cache: what comes from there is not written again (see `_compile`).
    for path in (tmp_path / "jax").iterdir():
        path.unlink()
    assert (make(store)(X) == X * 2).all()
    if "folder" not in damage:
        assert store.load(key)(X)[1] == 2  # written anew


def test_what_jax_read_from_its_own_cache_is_not_written_once_more(tmp_path):
    """Loaded from there it would fail as it runs."""
    make(ExecutableStore(tmp_path / "first"))
    store = ExecutableStore(tmp_path / "kept")
    assert (make(store)(X) == X * 2).all()
    assert not store.folder.exists()
    jax.monitoring.clear_event_listeners()  # ours too: then nothing is known of this one, and all of the next
    make(store, lambda x: x * 3)
    assert not store.folder.exists()
    make(store, lambda x: x * 4)
    assert only_file(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_the_file_of_another_user_is_not_read(tmp_path):
    store = ExecutableStore(tmp_path / "kept")
    make(store)
    os.chown(only_file(store), 12345, -1)
    assert store.load(only_file(store).stem) is None


def test_programs_of_the_same_text_are_told_apart():
    """jax leaves out of the text what a function does not use, and donation, layout and devices lie beside it."""
    lowered = [jax.jit(f).lower(X, X) for f in (lambda a, b: a * 2, lambda a, b: b * 2)]
    texts = {one.as_text().replace("_lambda_", "") for one in lowered}
    assert len(texts) == 1
    assert len({program_key(one) for one in lowered}) == 2
    one = jax.jit(double())
    on_another = one.lower(jax.device_put(X, jax.devices()[1]))
    donated = jax.jit(double(), donate_argnums=0).lower(X)
    keys = {program_key(one.lower(X)), program_key(on_another), program_key(donated)}
    keys.add(program_key(one.lower(X), {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}))
    assert len(keys) == 4


def test_what_calls_back_into_its_process_is_not_kept(tmp_path):
    def speak(x):
        jax.debug.callback(lambda y: None, x)
        return x

    store = ExecutableStore(tmp_path / "kept")
    make(store, speak)(X)
    jax.effects_barrier()
    assert not store.folder.exists()


def test_a_disk_that_takes_nothing_harms_nothing(tmp_path):
    (tmp_path / "kept").write_text("a file")
    assert (make(ExecutableStore(tmp_path / "kept"))(X) == X * 2).all()


def test_the_folder_stays_small(tmp_path):
    store = ExecutableStore(tmp_path / "kept")
    make(store)
    size, first = only_file(store).stat().st_size, only_file(store).name
    os.utime(only_file(store), (1, 1))
    store = ExecutableStore(store.folder, limit_bytes=int(2.5 * size))
    stale = store.folder / ".x.tmp"
    stale.touch()
    os.utime(stale, (1, 1))
    for number in range(3, 6):
        make(store, lambda x, number=number: x * number)
    names = [path.name for path in store.folder.iterdir()]
    assert len(names) == 2
    assert first not in names


WRITES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from roxxel_dist.cluster.executables import ExecutableStore, compile_kept
store, x = ExecutableStore(Path(sys.argv[1])), jnp.arange(4.0)
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    program = compile_kept(store, jax.jit(lambda x: x * (number % 2 + 2)), (x,))
    assert (program(x) == x * (number % 2 + 2)).all()
    for path in store.folder.glob("*.program"):
        if number % 3 == 0:
            path.unlink(missing_ok=True)
"""


def test_two_processes_write_at_once(tmp_path):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", WRITES, str(tmp_path / "kept")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
    for process in both:
        assert process.stdin
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in both:
        process.communicate(timeout=120)
    assert [process.returncode for process in both] == [0, 0]
    assert not list((tmp_path / "kept").glob(".*"))
