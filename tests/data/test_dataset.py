"""`Roxxel`: many files as one sequence; reading, splitting, writing and every way to name them."""

import os
import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.units import Units, unit_size


def token_documents(lengths, dtype=np.uint16, start=1):
    """Documents whose tokens count up, so that every token says where it is."""
    ends = np.cumsum([0, *lengths]) + start
    return [np.arange(a, b).astype(dtype) for a, b in pairwise(ends)]


@pytest.fixture
def three(tmp_path):
    """Three shards of 40 documents, with their documents."""
    documents = token_documents(np.random.default_rng(1).integers(1, 90, 40))
    ds = Roxxel(tmp_path / "wiki_*.rox")
    ds.write(documents, max_shard_bytes=1500)
    assert len(ds.shards) == 3
    return ds, documents


def flat(documents, separator=0):
    return np.concatenate([np.append(document, np.array(separator, document.dtype)) for document in documents])


def test_documents_come_back_in_order_without_separators(three):
    ds, documents = three
    assert len(ds) == ds.documents == 40
    assert all(np.array_equal(a, b) for a, b in zip(ds, documents, strict=True))
    assert all(np.array_equal(ds[i], documents[i]) for i in range(-40, 40))
    assert all(np.array_equal(a, b) for a, b in zip(ds[35:2:-3], documents[35:2:-3], strict=True))
    assert ds[np.int64(3)].tolist() == documents[3].tolist()
    for wrong in (40, -41):
        with pytest.raises(IndexError, match=f"document {wrong} of 40"):
            ds[wrong]
    assert ds.num_tokens == len(flat(documents))
    assert ds.dtype == np.uint16


def test_ranges_are_the_shards(three):
    ds, _ = three
    starts = np.cumsum([0, *(len(shard.tokens) for shard in ds.shards)])
    assert ds.ranges == tuple((int(start), len(shard.tokens)) for start, shard in zip(starts, ds.shards, strict=False))
    assert [shard.metadata.first_token for shard in ds.shards] == [start for start, _ in ds.ranges]
    assert [shard.metadata.index for shard in ds.shards] == [0, 1, 2]
    assert [shard.path.name for shard in ds.shards] == ["wiki_00000.rox", "wiki_00001.rox", "wiki_00002.rox"]
    assert all(shard.tokens.nbytes <= 1500 for shard in ds.shards)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    limit=st.integers(1, 200),
    separator=st.sampled_from([None, 0, 65535]),
)
def test_any_documents_in_any_shards_come_back(tmp_path_factory, lengths, limit, separator):
    documents = token_documents(lengths)
    with Roxxel(tmp_path_factory.mktemp("set")) as ds:
        ds.write(documents, separator=separator, max_shard_bytes=limit)
        assert [document.tolist() for document in ds] == [document.tolist() for document in documents]
        assert [ds[i].tolist() for i in range(len(ds))] == [document.tolist() for document in documents]
        ds.verify()


def test_read_is_slicing(three):
    ds, documents = three
    everything = flat(documents)
    rng = np.random.default_rng(0)
    for length in (1, 7, 100):
        for rows in (0, 1, 50):
            choices = [start + rng.integers(0, size - length + 1) for start, size in ds.ranges for _ in range(rows)]
            offsets = rng.permutation(np.array(choices, np.int64))[:rows]
            got = ds.read(offsets, length)
            assert got.shape == (rows, length)
            assert got.dtype == np.uint16
            assert got.flags.writeable
            assert not any(np.shares_memory(got, shard.tokens) for shard in ds.shards)
            assert np.array_equal(got, np.array([everything[o : o + length] for o in offsets]).reshape(rows, length))
    start, size = ds.ranges[1]
    assert np.array_equal(ds.read(np.array([start]), size)[0], everything[start : start + size])


def test_a_window_that_is_not_in_one_range_is_refused(three):
    ds, _ = three
    for number, (start, size) in enumerate(ds.ranges):
        for offset in (start + size - 9, start - 1 if number else -1):
            with pytest.raises(ValueError, match=f"10 tokens at token {offset} is not within one of the 3 ranges"):
                ds.read(np.array([start, offset]), 10)
    for offset, length in ((ds.num_tokens, 1), (0, 0), (0, 10**9), (0, 10**12), (2**62, 5), (-(2**62), 5)):
        with pytest.raises(ValueError, match="is not within one of the 3 ranges"):
            ds.read(np.array([offset]), length)


def test_estimate_steps_is_what_one_pass_yields(three):
    ds, _ = three
    unit = unit_size(ds.ranges, 9)
    assert ds.estimate_steps(9, 4) == Units(ds.ranges, unit).count * (unit // 9) // 4 > 0
    assert ds.estimate_steps(10**6, 1) == 0
    with pytest.raises(ValueError, match="batch_size=0"):
        ds.estimate_steps(9, 0)


# -- split


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=25),
    fraction=st.floats(0.001, 0.99),
    limit=st.sampled_from([None, 100]),
)
def test_split_holds_out_the_end_of_every_shard(tmp_path_factory, lengths, fraction, limit):
    ds = Roxxel(tmp_path_factory.mktemp("set"))
    ds.write(token_documents(lengths), max_shard_bytes=limit)
    train, held_out = ds.split(fraction)
    assert train.num_tokens + held_out.num_tokens == ds.num_tokens
    for shard, (start, length), (a, a_length), (b, b_length) in zip(
        ds.shards, ds.ranges, train.ranges, held_out.ranges, strict=True
    ):
        assert (a, b, a_length + b_length) == (start, start + a_length, length)
        target = length - int(length * fraction)
        ends = [0, *shard.document_ends.tolist()]
        before = max(end for end in ends if end <= target)
        if target == length or 2 * before >= target:
            assert a_length == (length if target == length else before)
        else:
            assert a_length == target
    pieces = [view[i] for view in (train, held_out) for i in range(len(view))]
    assert sorted(np.concatenate(pieces).tolist()) == sorted(np.concatenate(list(ds)).tolist())
    cut = sum(
        length not in (0, *shard.document_ends.tolist())
        for shard, (_, length) in zip(ds.shards, train.ranges, strict=True)
    )
    assert len(train) + len(held_out) == len(ds) + cut
    assert len({ds.fingerprint, train.fingerprint, held_out.fingerprint}) >= 2


def test_split_cuts_at_a_document_end(three):
    ds, documents = three
    train, held_out = ds.split(0.2)
    both = [[view[i].tolist() for i in range(len(view))] for view in (train, held_out)]
    everything = [document.tolist() for document in documents]
    assert all(document in everything for side in both for document in side)
    assert len(both[0]) + len(both[1]) == 40
    assert 0.2 <= held_out.num_tokens / ds.num_tokens < 0.35
    assert train.shards == ds.shards
    assert len({ds.fingerprint, train.fingerprint, held_out.fingerprint}) == 3


def test_split_cuts_one_giant_document(tmp_path):
    ds = Roxxel(tmp_path)
    ds.write(token_documents([999]))
    train, held_out = ds.split(0.1)
    assert train.ranges == ((0, 900),)
    assert held_out.ranges == ((900, 100),)
    assert train[0].tolist() == list(range(1, 901))
    assert held_out[0].tolist() == list(range(901, 1000))


def test_a_view_reads_its_own_tokens_only(three):
    train, held_out = three[0].split(0.2)
    for view, other in ((train, held_out), (held_out, train)):
        for (start, length), (theirs, _) in zip(view.ranges, other.ranges, strict=True):
            assert view.read(np.array([start]), length).shape == (1, length)
            with pytest.raises(ValueError, match="is not within one"):
                view.read(np.array([theirs]), 1)
            with pytest.raises(ValueError, match="is not within one"):
                view.read(np.array([start]), length + 1)
    with pytest.raises(ValueError, match="part made by split"):
        train.write([b"x"])


def test_nothing_held_out(three):
    ds, _ = three
    train, held_out = ds.split(0)
    assert train is ds
    assert (held_out.num_tokens, len(held_out), list(held_out)) == (0, 0, [])
    for wrong in (1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="val_fraction"):
            ds.split(wrong)


# -- fingerprint


def test_the_fingerprint_follows_from_the_contents_alone(three, tmp_path):
    ds, documents = three
    other = Roxxel(tmp_path / "elsewhere" / "x_*.rox")
    other.write(documents, max_shard_bytes=1500)
    assert other.fingerprint == ds.fingerprint
    assert Roxxel(tmp_path / "wiki_*.rox").fingerprint == ds.fingerprint
    changed = [*documents[:-1], documents[-1] + 1]
    other.write(changed, max_shard_bytes=1500)
    assert other.fingerprint != ds.fingerprint
    other.write(documents, max_shard_bytes=1500, vocab_size=60000)
    assert other.fingerprint != ds.fingerprint


# -- naming files


def test_every_way_to_name_the_files_opens_them(three, tmp_path):
    ds, _ = three
    paths = [str(shard.path) for shard in ds.shards]
    ways = [
        tmp_path,
        str(tmp_path),
        f"{tmp_path}/",
        tmp_path / "wiki",
        f"{tmp_path}/wi",
        tmp_path / "*",
        paths,
        paths[::-1],
    ]
    for way in [*ways, [tmp_path, paths[0]], [paths[2], f"{tmp_path}/wiki_0000[01].rox"]]:
        with Roxxel(way) as again:
            assert again.fingerprint == ds.fingerprint, way


def test_a_prefix_is_not_confused_by_a_longer_name(tmp_path):
    for name in ("wiki", "wiki_books"):
        Roxxel(tmp_path / name).write([name])
    assert sorted(os.listdir(tmp_path)) == ["wiki_00000.rox", "wiki_books_00000.rox"]
    assert [document.tobytes() for document in Roxxel(tmp_path / "wiki")] == [b"wiki"]
    with pytest.raises(ValueError, match=r"wiki_books_00000.rox.* are both shard 0"):
        Roxxel(tmp_path / "wiki*.rox")


def test_one_file_is_a_data_set_whatever_its_name_and_number(three, tmp_path):
    ds, _ = three
    alone = tmp_path / "renamed.bin"
    shutil.copy(ds.shards[1].path, alone)
    single = Roxxel(alone)
    assert single.ranges == ((0, ds.ranges[1][1]),)
    assert np.array_equal(single.read(np.array([5]), 10)[0], ds.read(np.array([ds.ranges[1][0] + 5]), 10)[0])


def test_names_with_brackets_are_files_too(tmp_path):
    folder = tmp_path / "a[1]"
    Roxxel(folder / "x.rox").write([b"abc"])
    ways = (folder / "x.rox", folder, folder / "*.rox", folder / "x")
    assert [Roxxel(way)[0].tobytes() for way in ways] == [b"abc"] * 4


def test_no_file_is_an_error_only_when_it_is_read(tmp_path):
    ds = Roxxel(tmp_path / "none_*.rox")
    assert "no file yet" in repr(ds)
    for use in (lambda: ds.num_tokens, lambda: len(ds), lambda: ds[0], lambda: ds.read(np.array([0]), 1), ds.verify):
        with pytest.raises(ValueError, match=r"none_\*\.rox: no \.rox file there.*data build"):
            use()
    (tmp_path / "words.txt").write_text("some text")
    with pytest.raises(ValueError, match=f"build a data set of text: `roxxel-dist data build {tmp_path} --out DIR`"):
        len(Roxxel(tmp_path))
    ds.write(["now"])
    assert ds[0].tobytes() == b"now"


def test_a_closed_data_set_says_so(three):
    ds, documents = three
    kept = ds[0]
    with ds:
        assert len(ds) == 40
    with pytest.raises(ValueError, match="was closed"):
        ds.read(np.array([0]), 1)
    assert np.array_equal(kept, documents[0])


# -- shards that do not belong together


def test_missing_and_swapped_shards_are_named(three, tmp_path):
    ds, _ = three
    paths = [shard.path for shard in ds.shards]
    away = tmp_path / "away"
    paths[1].rename(away)
    with pytest.raises(ValueError, match=r"shard 1 is missing: wiki_00002\.rox is shard 2"):
        Roxxel(tmp_path / "wiki_*.rox")
    away.rename(paths[1])
    paths[0].rename(away)
    with pytest.raises(ValueError, match=r"wiki_00001\.rox is shard 1, and shard 0 is missing"):
        Roxxel(tmp_path / "wiki_*.rox")
    away.rename(paths[0])
    shutil.copy(paths[1], tmp_path / "wiki_00007.rox")
    with pytest.raises(ValueError, match=r"are both shard 1"):
        Roxxel(tmp_path / "wiki_*.rox")
    (tmp_path / "wiki_00007.rox").unlink()
    paths[0].rename(away)
    paths[1].rename(paths[0])
    away.rename(paths[1])
    assert Roxxel(tmp_path).fingerprint == ds.fingerprint, "two files with each other's names are still in their order"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 2}, "was not written after"),
        ({"dtype": np.uint32}, "has dtype uint32"),
        ({"vocab_size": 60000}, "has vocab_size 60000"),
        ({"tokenizer_fingerprint": "b"}, "has tokenizer_fingerprint b"),
    ],
)
def test_a_shard_of_another_data_set_is_named(tmp_path, change, message):
    settings_ = {"dtype": np.uint16, "tokenizer_fingerprint": "a"}
    for name, start, options in (("a", 1, settings_), ("b", change.pop("start", 1), settings_ | change)):
        Roxxel(tmp_path / name).write(token_documents([40, 50, 60], start=start), max_shard_bytes=100, **options)
    with pytest.raises(ValueError, match=rf"b_00001\.rox {message}"):
        Roxxel([tmp_path / "a_00000.rox", tmp_path / "b_00001.rox"])


def test_verify_names_the_damaged_shard(three):
    ds, _ = three
    ds.verify()
    path = ds.shards[1].path
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"wiki_00001\.rox: block 0"):
        Roxxel(ds.filepath).verify()
