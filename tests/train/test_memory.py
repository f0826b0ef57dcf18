"""Copies in shared memory: a run that resumes from one equals the run that never stopped; a bad copy is refused."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import make, rows, told, train
from small_disks import mounted_disk

from roxxel_dist import Phase, Roxxel
from roxxel_dist.checkpoint import blocks, memory
from roxxel_dist.checkpoint.blocks import MAGIC, PREAMBLE, BlockFile, DamagedFile, Header, read_blocks, read_header
from roxxel_dist.model.loss import next_token_loss

EVERY_STEP = {"memory_checkpoint_every": 1, "checkpoint_every": 4, "keep_best": True}
ONE_SHAPE = [Phase(13, 8, 17)]
TIMES = {"ms_per_step", "tokens_per_s", "ram_gb"}


def launch(patch, path):
    """What the launcher keeps for a job, and that each copy ends before the next is due: else it is left out."""
    (path / "key").write_text("ab" * 32)
    patch.setenv("ROXXEL_MEMORY", str(path))
    decide = memory.MemoryTier.decide

    def in_time(tier, step, done):
        tier.settle()
        return decide(tier, step, done)

    patch.setattr(memory.MemoryTier, "decide", in_time)


@pytest.fixture(scope="module")
def shared():
    path = Path(tempfile.mkdtemp(prefix="test-memory-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(shared, monkeypatch):
    for path in shared.iterdir():
        path.unlink()
    launch(monkeypatch, shared)
    return shared


@pytest.fixture(scope="module")
def begun(corpus_pattern, shared, tmp_path_factory):
    """The run directory of a run with copies in memory, and where what it left in both lies, which is only read."""
    path, kept = tmp_path_factory.mktemp("begun") / "killed", tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch, Roxxel(corpus_pattern) as corpus:
        launch(patch, shared)
        train(corpus, path, **EVERY_STEP)
    shutil.copytree(path, kept / "run")
    shutil.copytree(shared, kept / "memory")
    return path, kept


@pytest.fixture
def killed(begun, folder):
    """A run with copies of steps 11 and 12 in memory, and on disk until step 10: later ones are lost."""
    path, kept = begun
    shutil.rmtree(path)
    shutil.copytree(kept / "run", path)
    shutil.copytree(kept / "memory", folder, dirs_exist_ok=True)
    for step in (12, 13):
        shutil.rmtree(path / "checkpoints" / str(step))
    (path / "logs" / "rank-0.log").unlink()
    return path


def numbers(path):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows(path)]


def params(made):
    return {name: np.asarray(leaf).tobytes() for name, leaf in made.state.params.items()}


def flip(folder, slot):
    """One bit of the last block of a generation's file."""
    path = folder / f"{slot}-0.own"
    header = read_header(path)
    offset, size, _ = header.blocks[max(header.blocks)]
    with path.open("r+b") as file:
        file.seek(offset + size // 2)
        byte = file.read(1)[0]
        file.seek(offset + size // 2)
        file.write(bytes([byte ^ 4]))
    return header.step


def steps_in(folder):
    return sorted(header.step for path in folder.glob("*.own") if (header := read_header(path)))


def test_a_run_goes_on_from_the_copy_of_its_last_step(corpus, killed, folder, finished_run, monkeypatch):
    assert steps_in(folder) == [11, 12]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
    monkeypatch.setenv("ROXXEL_REACHED_STEP", "13")
    ended = train(corpus, killed, **EVERY_STEP)
    assert "resuming after step 12 of 13, from the copy in shared memory; 1 steps are done again" in told(killed)
    assert numbers(killed) == numbers(finished_run)
    assert ended.state.step == 13
    whole = make(corpus, finished_run, max_to_keep=None)
    assert params(ended) == params(whole)
    whole.close()


def test_a_damaged_copy_is_passed_over(corpus, killed, folder, finished_run):
    by_step = {read_header(path).step: path.name[0] for path in folder.glob("*.own")}
    assert flip(folder, by_step[12]) == 12
    train(corpus, killed, **EVERY_STEP)
    assert told(killed).count("the generation of step 12 in shared memory is damaged") == 1
    assert "resuming after step 11 of 13, from the copy in shared memory" in told(killed)
    assert numbers(killed) == numbers(finished_run)


def test_with_all_copies_damaged_the_checkpoint_on_disk_is_taken(corpus, killed, folder, finished_run):
    flip(folder, 0)
    with (folder / "1-0.own").open("r+b") as file:
        file.seek(17)  # in the preamble
        file.write(b"\xff")
    train(corpus, killed, **EVERY_STEP)
    assert "resuming after step 10 of 13, from its checkpoint" in told(killed)
    assert numbers(killed) == numbers(finished_run)


def test_a_copy_is_of_one_run_and_one_way_to_train(corpus, killed, folder, tmp_path):
    other = make(corpus, tmp_path / "other", **EVERY_STEP)
    assert other.start_step == 0
    other.close()
    seeded = make(corpus, killed, mesh=None)
    assert (seeded.start_step, seeded.start.copy) == (10, None)  # on eight devices
    seeded.close()
    same = make(corpus, killed)
    assert same.start_step == 12
    same.close()


@pytest.mark.long
def test_a_checkpoint_on_disk_of_the_same_step_is_taken_first(corpus, killed, folder, finished_run):
    shutil.copytree(finished_run / "checkpoints" / "12", killed / "checkpoints" / "12")
    made = make(corpus, killed)
    assert (made.start_step, made.start.copy) == (12, None)
    made.close()


def test_no_copy_hides_that_a_checkpoint_to_be_kept_was_lost(corpus, folder, tmp_path, monkeypatch):
    """It was being written when the process was killed: the run goes back, to write it."""
    path = tmp_path / "killed"
    seldom = {"checkpoint_every": 100, "keep_steps": [10]}
    made = make(corpus, path, ONE_SHAPE, **EVERY_STEP | seldom)
    # As on a slow disk: the copies that follow are of a state whose checkpoint is under way.
    monkeypatch.setattr(type(made.store), "pending_step", property(lambda self: 10 if made.step >= 9 else None))
    made.run()
    made.close()
    for step in (10, 13):
        shutil.rmtree(path / "checkpoints" / str(step))
    again = make(corpus, path, ONE_SHAPE, **EVERY_STEP | seldom)
    assert again.start_step == 5
    again.close()


def test_a_rewind_voids_the_copies(corpus, folder, tmp_path):
    poison = corpus.read(make_plan(corpus, tmp_path).rows(6).offset, 17, np.int32)

    def loss(model, batch):
        bad = batch.shape == poison.shape and (batch == poison).all()
        return next_token_loss(model, batch) * jnp.where(bad, jnp.nan, 1.0)

    path = tmp_path / "run"
    made = make(corpus, path, ONE_SHAPE, loss_fn=loss, on_bad_step="rewind", **EVERY_STEP)
    dropped = []
    drop = made.loop.held.memory.drop

    def note(step):
        drop(step)
        dropped.append((step, steps_in(folder)))

    made.loop.held.memory.drop = note
    made.run()
    made.close()
    assert dropped == [(5, [])]
    assert steps_in(folder) == [11, 12]
    assert [row["step"] for row in rows(path)] == list(range(1, 14))


def make_plan(corpus, tmp_path):
    made = make(corpus, tmp_path / "plan", ONE_SHAPE)
    made.close()
    return made.plan


def test_without_a_folder_there_are_no_copies_and_a_line_where_they_are_wanted(corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("ROXXEL_MEMORY", raising=False)
    train(corpus, tmp_path / "auto", ONE_SHAPE, max_steps=2)
    assert "memory" not in told(tmp_path / "auto")
    train(corpus, tmp_path / "five", ONE_SHAPE, max_steps=2, memory_checkpoint_every=5)
    assert (
        told(tmp_path / "five").count("memory_checkpoint_every is 5, and this job has no folder in shared memory") == 1
    )


@pytest.fixture
def small_memory(tmp_path, monkeypatch):
    """Shared memory of 1 MB."""
    with mounted_disk(tmp_path / "small", "1m") as path:
        monkeypatch.setenv("ROXXEL_MEMORY", str(path))
        yield path


@pytest.mark.long
def test_too_small_a_memory_is_left_alone(corpus, small_memory, tmp_path, finished_run):
    (small_memory / "other").write_bytes(bytes(900_000))
    train(corpus, tmp_path / "run", **EVERY_STEP)
    assert told(tmp_path / "run").count("no copies of the state in shared memory: on the host of rank 0") == 1
    assert numbers(tmp_path / "run") == numbers(finished_run)
    assert [path.name for path in small_memory.iterdir()] == ["other"]


def test_a_memory_that_is_full_drops_a_copy_and_not_the_training(
    corpus, small_memory, tmp_path, finished_run, monkeypatch
):
    monkeypatch.setattr(blocks, "HEADER_BYTES", 0)  # so that a header takes more than was kept for it
    made = make(corpus, tmp_path / "run", **EVERY_STEP)
    memory = made.loop.held.memory
    prepare, save = memory._prepare, memory.save

    def fill(kept):
        report = prepare(kept)
        with (small_memory / "other").open("wb") as file:
            file.write(bytes(os.statvfs(small_memory).f_bavail * os.statvfs(small_memory).f_frsize))
        return report

    memory._prepare = fill
    memory.save = lambda step, state, metadata, *more: save(step, state, metadata | {"x": "x" * 9000}, *more)
    made.run()
    made.close()
    lines = [line for line in told(tmp_path / "run").splitlines() if "in shared memory is dropped" in line]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]
    assert numbers(tmp_path / "run") == numbers(finished_run)


def header(**fields):
    known = {"generation": "a.1", "step": 3, "run": "", "table": "", "total": 2, "pending": None, "metadata": {}}
    known |= {"rank": 0, "needs": [0, 5]}
    return Header(**known | fields)


def test_a_file_is_whole_or_none(tmp_path):
    file = BlockFile(tmp_path / "0-0.own", [8, 100])
    assert read_header(file.path) is None  # nothing was written
    file.write(0, np.arange(8, dtype=np.uint8))
    file.write(1, np.ones(25, np.float32))
    file.finish(header(), [0, 5])
    assert json.loads(read_header(file.path).to_json())["step"] == 3
    assert bytes(read_blocks(file.path, read_header(file.path))[0]) == bytes(range(8))
    file.invalidate()  # as the next generation begins
    assert read_header(file.path) is None
    file.close()
    # Cut, and of a header so long that no memory could hold it.
    for data in (b"RXMEM001" + bytes(8), PREAMBLE.pack(MAGIC, 64, 1 << 50, bytes(32)) + bytes(64)):
        (tmp_path / "damaged").write_bytes(data)
        with pytest.raises(DamagedFile):
            read_header(tmp_path / "damaged")


def test_auto_takes_no_more_than_its_share(corpus, folder, tmp_path):
    """Rank 0 counts what a generation took of the loop, and chooses the steps to the next one by it."""
    made = make(corpus, tmp_path / "run")
    tier = made.loop.held.memory
    tier.begin(made.loop.position.state, 0, None)
    tier.settle()
    schedule, decide = tier.schedule, tier.decide
    assert decide(2, 2).generation  # its cost is not yet known
    schedule._costs.extend([0.5, 0.25, 9.0])  # one that others had the cores for counts for nothing
    schedule._clock = 2, schedule._clock[1] - 8.0  # eight steps of a second
    tier._job = None
    assert decide(10, 10) is None
    assert tier.next_step == 2 + 50
    schedule._clock = 2, schedule._clock[1] - 42.0
    assert decide(52, 52).generation
    made.close()


def test_blocks_are_dealt_among_the_ranks_of_a_host():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    cut, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["d"], []))
    state = {"a": jax.device_put(np.zeros(8, np.float32), cut), "b": jax.device_put(np.zeros(3, np.float32), whole)}
    table = blocks.BlockTable(state, [0])
    assert [block.nbytes for block in table.blocks] == [8, 8, 8, 8, 12]
    assert table.kept_by(0) == [4, 0, 1, 2, 3]
    assert table.pieces(state, [4, 0, 3]) == [(1, 0), (0, 0), (0, 3)]
    assert memory.layout([8, 8])[0] == [4096, 4160]
