import resource
import subprocess
import sys
from itertools import pairwise

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import fit_sharding, make_mesh
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import Rows
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.packing import Packed
from roxxel_dist.input.stream import Stream


@pytest.fixture
def plan(corpus):
    return Curriculum(corpus, [Phase(6, 8, 33), Phase(4, 2, 65)]).plan(11)


def test_a_mesh_gets_the_same_tokens_as_numpy(corpus, plan):
    sharding = NamedSharding(make_mesh(), P("data", None))
    for host, placed in zip(
        Stream(plan, {"self": corpus}, None), Stream(plan, {"self": corpus}, sharding), strict=True
    ):
        assert placed.dtype == np.int32
        assert np.array_equal(host, np.asarray(placed))


def test_rows_are_the_windows_of_the_plan(corpus, plan):
    tokens = np.concatenate([shard.tokens for shard in corpus.shards])
    for step, batch in enumerate(Stream(plan, {"self": corpus}, None)):
        rows = plan.rows(step)
        expected = np.stack([tokens[o : o + rows.seq_len] for o in rows.offset])
        assert np.array_equal(batch, expected)


def test_batches_are_separate(corpus, plan):
    """What is done to one batch changes no other, and any step may follow any other."""
    stream = Stream(plan, corpus, None)
    expected = [stream.batch(step) for step in range(10)]
    read = []
    for batch in stream:
        assert np.array_equal(batch, expected[len(read)])
        batch[:] = -1
        read.append(batch)
    assert not any(np.shares_memory(a, b) for a, b in pairwise(read))
    for step in (8, 2, 3, 9):
        stream.step = step
        assert np.array_equal(next(stream), expected[step])


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    """A folder of 2,000 shards of two windows each, and the windows."""
    folder = tmp_path_factory.mktemp("many")
    tokens = np.random.default_rng(2).integers(0, 60_000, (2000, 66)).astype(np.uint16)
    Roxxel(folder).write(tokens, separator=None, max_shard_bytes=132)
    return folder, tokens.reshape(-1, 33)


def test_two_thousand_shards_need_few_file_descriptors(many_shards):
    folder, windows = many_shards
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with Roxxel(folder) as data:
            assert len(data.shards) == 2000
            steps = data.estimate_steps(33, 32)
            assert steps == 125
            rows = np.concatenate(list(data.stream(33, 32, seed=1, steps=steps)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert np.array_equal(np.unique(rows, axis=0), np.unique(windows, axis=0))


def test_its_state_is_a_number(corpus, plan):
    all_batches = list(Stream(plan, {"self": corpus}, None))
    assert len(all_batches) == len(Stream(plan, {"self": corpus}, None)) == 10
    stream = Stream(plan, {"self": corpus}, None, start_step=7)
    assert len(stream) == 3
    assert all(np.array_equal(a, b) for a, b in zip(stream, all_batches[7:], strict=True))
    assert stream.step == 10


def test_a_process_reads_only_what_its_devices_hold(corpus, plan, monkeypatch):
    """With rows over 8 devices each row is read once; a copy on every device is read once too, not 8 times."""
    counted = []
    read = type(corpus).read
    monkeypatch.setattr(type(corpus), "read", lambda self, o, *a: counted.append(len(o)) or read(self, o, *a))
    Stream(plan, corpus, NamedSharding(make_mesh(), P("data", None))).batch(0)
    assert counted == [8]
    counted.clear()
    Stream(plan, {"self": corpus}, NamedSharding(make_mesh(), P())).batch(0)
    assert counted == [8]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((16, 33), (8, 1)), ((1, 4096), (1, 8)), ((1, 4097), (1, 8)), ((6, 33), (2, 4)), ((12, 33), (4, 2))],
)
def test_rows_are_cut_first_and_then_tokens(shape, expected):
    mesh = make_mesh()
    fitted = fit_sharding(NamedSharding(mesh, P("data", None)), shape)
    assert (fitted.mesh.shape["data"], fitted.mesh.shape.get("tokens", 1)) == expected
    assert fitted.spec == P("data", None)
    assert list(fitted.mesh.devices.flat) == list(mesh.devices.flat), "one program takes arrays of both"


@pytest.mark.parametrize(
    ("shape", "expected"), [((16, 33), P("data", None)), ((1, 4096), P(None, ("data",))), ((1, 4097), P())]
)
def test_of_a_mesh_of_ones_own_no_other_is_made(shape, expected):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert fit_sharding(NamedSharding(mesh, P("data", None)), shape) == NamedSharding(mesh, expected)


def test_devices_that_share_a_long_row_have_all_of_it(corpus):
    plan = Curriculum(corpus, [Phase(2, 2, 64)]).plan(1)
    sharding = NamedSharding(make_mesh(), P("data", None))
    batch = Stream(plan, {"self": corpus}, sharding).batch(0)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(1, 64)}
    assert np.array_equal(np.asarray(batch), Stream(plan, {"self": corpus}, None).batch(0))


def test_a_two_axis_mesh(corpus, plan):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    batch = Stream(plan, {"self": corpus}, NamedSharding(mesh, P(("data", "fsdp"), None))).batch(0)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(1, 33)}
    assert np.array_equal(np.asarray(batch), Stream(plan, {"self": corpus}, None).batch(0))


def test_a_data_set_streams_without_end(corpus):
    stream = corpus.stream(seq_len=33, batch_size=8, seed=4, passes=None)
    one_pass = corpus.estimate_steps(33, 8)
    first = [next(stream) for _ in range(2 * one_pass + 5)]
    assert all(batch.shape == (8, 33) and batch.dtype == np.int32 for batch in first)
    seen = {row.tobytes() for batch in first[:one_pass] for row in batch}
    assert len(seen) == one_pass * 8
    assert not all(np.array_equal(a, b) for a, b in zip(first, first[one_pass:], strict=False))
    later = corpus.stream(seq_len=33, batch_size=8, seed=4, start_step=one_pass + 3, passes=None)
    assert np.array_equal(next(later), first[one_pass + 3])
    with pytest.raises(TypeError, match="no length"):
        len(stream)


def test_a_data_set_streams_to_a_mesh_with_others(corpus):
    mesh = make_mesh()
    options = {"mix_datasets": {"again": corpus}, "weights": {"self": 0.5, "again": 0.5}}
    stream = corpus.stream(33, 8, steps=4, mesh=mesh, **options)
    assert len(stream) == 4
    batch = next(stream)
    assert batch.sharding == NamedSharding(mesh, P("data", None))
    assert np.array_equal(np.asarray(batch), next(corpus.stream(33, 8, steps=4, **options)))


def test_several_data_sets(corpus, tmp_path):
    """Rows of a blend come from their own data sets, placed or not."""
    Roxxel(tmp_path / "other.rox").write([np.arange(5000, dtype=np.uint8) % 251])
    sharding = NamedSharding(make_mesh(), P("data", None))
    rng = np.random.default_rng(0)
    with Roxxel(tmp_path / "other.rox") as other, Roxxel(tmp_path / "corpus_*.rox") as again:
        plan = Curriculum(corpus, [Phase(6, 8, 33), Phase(4, 2, 65)], {"other": other}).plan(11)
        assert plan.datasets == ("self", "other")
        with pytest.raises(ValueError, match="give the data sets other too"):
            Stream(plan, corpus, None)
        for dataset in (np.zeros(8, np.int32), np.ones(8, np.int32), rng.integers(0, 2, 8).astype(np.int32)):
            rows = Rows(dataset, np.array([10 + 70 * number for number in range(8)]), 33)
            sources = {0: corpus, 1: other}
            expected = np.concatenate([sources[d].read(o[None], 33) for d, o in zip(dataset, rows.offset, strict=True)])
            for first in (corpus, again):
                named = {"self": first, "other": other}
                assert np.array_equal(Stream(plan, named, None).place(rows), expected)
                placed = Stream(plan, named, sharding).place(rows)
                assert placed.dtype == np.int32
                assert np.array_equal(np.asarray(placed), expected)


def test_looking_ahead_changes_nothing(corpus, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(Roxxel, "reads_ahead", True)  # as where the disk was waited for
    with Roxxel(tmp_path / "corpus_*.rox") as files:
        stream = Stream(plan, files, None)
        for step, batch in enumerate(stream):
            assert np.array_equal(batch, Stream(plan, corpus, None).batch(step))
        stream.step = 3
        assert np.array_equal(next(stream), Stream(plan, corpus, None).batch(3))


def test_a_packed_batch_says_which_document_each_token_is_of(corpus, tmp_path):
    """Against the data set, looked up token by token; the tokens are those of a phase that does not pack."""
    plain, packed = (Curriculum(corpus, [Phase(5, 8, 700, packing=p)]).plan(3) for p in ("contiguous", "documents"))
    ends = np.cumsum([0, *(len(document) + 1 for document in corpus)])
    with Roxxel(tmp_path / "corpus_*.rox") as data:
        stream = Stream(packed, data, None)
        assert len(stream) == 5
        for step, batch in enumerate(stream):
            assert isinstance(batch, Packed)
            assert np.array_equal(batch.tokens, Stream(plain, corpus, None).batch(step))
            assert all(array.dtype == np.int32 and array.shape == (8, 700) for array in batch)
            for row, offset in enumerate(packed.rows(step).offset.tolist()):
                documents = ends.searchsorted(np.arange(offset, offset + 700), side="right")
                assert np.array_equal(batch.segments[row], documents - documents[0])
                starts = np.maximum(offset, ends[documents - 1])
                assert np.array_equal(batch.positions[row], np.arange(offset, offset + 700) - starts)
            assert batch.segments.max() > 0


@pytest.mark.parametrize("shape", [(8, 33), (1, 64), (2, 65), (16, 600)])
def test_a_packed_batch_lies_as_its_tokens_do(corpus, shape):
    sharding = NamedSharding(make_mesh(), P("data", None))
    plan = Curriculum(corpus, [Phase(2, *shape, packing="documents")]).plan(1)
    for host, placed in zip(Stream(plan, corpus, None), Stream(plan, corpus, sharding), strict=True):
        for mine, there in zip(host, placed, strict=True):
            assert there.sharding == fit_sharding(sharding, shape)
            assert np.array_equal(mine, np.asarray(there))


def test_packed_rows_of_a_blend_have_the_documents_of_their_own_data_set(corpus, tmp_path):
    np.save(tmp_path / "one.npy", np.arange(50_000, dtype=np.uint16))
    with Roxxel(tmp_path / "one.npy") as one:
        weights = {"self": 0.5, "one": 0.5}
        phase = Phase(3, 8, 700, weights=weights, blend="row", packing="documents")
        plan = Curriculum(corpus, [phase], {"one": one}).plan(2)
        stream = Stream(plan, {"self": corpus, "one": one}, None)
        for step in range(3):
            batch, dataset = stream.batch(step), plan.rows(step).dataset
            assert set(dataset.tolist()) == {0, 1}
            assert (batch.segments[dataset == 0].max(1) > 0).all()
            assert not batch.segments[dataset == 1].any()
            assert (batch.positions[dataset == 1] == np.arange(700)).all()


def test_numpy_batches_need_no_jax(tmp_path):
    Roxxel(tmp_path).write([np.arange(9000, dtype=np.uint16)])
    code = (
        "import sys; from roxxel_dist import Roxxel\n"
        "print(next(Roxxel(sys.argv[1]).stream(33, 4)).shape, 'jax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert result.stdout == "(4, 33) False\n"


def test_a_data_set_streams_once_where_nothing_is_said(corpus):
    one_pass = corpus.estimate_steps(33, 8)
    stream = corpus.stream(seq_len=33, batch_size=8, seed=4)
    assert len(stream) == one_pass
    rows = [row.tobytes() for batch in stream for row in batch]
    assert len(rows) == len(set(rows)) == one_pass * 8
    endless = corpus.stream(33, 8, 4, passes=None)
    twice = corpus.stream(33, 8, 4, passes=2)
    assert len(twice) == 2 * one_pass
    assert all(np.array_equal(batch, next(endless)) for batch in twice)
    assert len(corpus.stream(33, 8, steps=3 * one_pass)) == 3 * one_pass, "steps, whatever the passes"
    for passes in (2, None):
        with pytest.raises(ValueError, match=rf"steps=5 and passes={passes}: give one of them"):
            corpus.stream(33, 8, steps=5, passes=passes)
    with pytest.raises(ValueError, match="passes=0: passes over the data set, at least 1"):
        corpus.stream(33, 8, passes=0)


def test_what_is_no_token_is_refused(tmp_path):
    Roxxel(tmp_path / "float.rox").write([np.arange(500, dtype=np.float32) / 500], separator=None)
    with Roxxel(tmp_path / "float.rox") as data, pytest.raises(ValueError, match="'self' holds elements of float32"):
        data.stream(9, 4)
    wide = np.arange(500, dtype=np.int64)
    wide[77] = 1 << 31
    Roxxel(tmp_path / "wide.rox").write([wide[:50], wide[50:]], separator=None)
    with Roxxel(tmp_path / "wide.rox") as data:
        with pytest.raises(ValueError, match=r"wide\.rox, document 1: the id 2147483648 is not below 2\^31"):
            list(data.stream(9, 4))
        assert next(data.split(0.5)[1].stream(9, 4)).dtype == np.int32


def test_the_rows_of_a_plan_cannot_be_changed(plan):
    for step in (0, 1, 2):
        rows = plan.rows(step)
        for array in (rows.offset, rows.dataset):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
