"""Flipped bytes in a bucket are reported, and no reader returns them."""

import random
import re

import numpy as np
import pytest
from buckets import opened, put, replace_object

from roxxel_dist.data.files.format import HEADER_BYTES
from roxxel_dist.data.files.shard import DamagedData
from roxxel_dist.data.remote.index import INDEX
from roxxel_dist.data.verify import verify_objects
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.utils.display import ProgressBars

pytestmark = pytest.mark.xdist_group("bucket")
FLIPS = 40


def flipped(data, at):
    changed = bytearray(data)
    changed[at] ^= 1 << (at % 8)
    return bytes(changed)


def test_forty_flipped_bytes_are_named_and_not_read(server, folder, local, cache):
    """Of each block with one, every window that touches it is refused; all others are what they were."""
    url, rng = put(server, folder, "flipped"), random.Random(5)
    chosen = [(number, rng.randrange(local.shards[number].tokens.nbytes)) for number in range(6)]
    chosen += [(rng.randrange(6), rng.randrange(390_000)) for _ in range(FLIPS - len(chosen))]
    damaged: set[tuple[int, int]] = set()
    for number, shard in enumerate(local.shards):
        data, wrong = shard.path.read_bytes(), [at for which, at in chosen if which == number]
        for at in wrong:
            data = flipped(data, HEADER_BYTES + at)
            damaged.add((number, at // 4096))
        replace_object(url, shard.path.name, data)
    assert len(damaged) > 35
    remote, length = opened(url, cache), 512
    named, firsts = set(), local.first_tokens.tolist()
    for number, shard in enumerate(local.shards):
        for start in range(0, len(shard.tokens) - length, length):
            low, high = start * 2 // 4096, ((start + length) * 2 - 1) // 4096
            offset = np.array([firsts[number] + start])
            if not {(number, block) for block in range(low, high + 1)} & damaged:
                assert np.array_equal(remote.read(offset, length), local.read(offset, length))
                continue
            with pytest.raises(DamagedData) as error:
                remote.read(offset, length)
            place = re.search(r"(s3:.*): block (\d+) \(tokens \d+ to \d+, documents? (\d+)", str(error.value))
            block = int(place[2])
            assert place[1] == f"{url}/{shard.path.name}"
            assert int(place[3]) == int(shard.document_ends.searchsorted(block * 2048, side="right"))
            named.add((number, block))
    assert named == damaged


@pytest.mark.long
def test_forty_flipped_bytes_of_all_parts(server, folder, local, cache):
    """One at a time, at any place in the objects: `data verify` names it, and no reader returns wrong tokens."""
    url, rng, store = put(server, folder, "parts"), random.Random(7), ObjectStore.open(server.url("parts"))
    index, whole = store.read(INDEX), list(local.stream(129, 8, seed=2))
    named, refusals = 0, []
    for number in range(FLIPS):
        if number % 8 == 7:
            store.write(INDEX, flipped(index, rng.randrange(len(index))))
            where = INDEX
        else:
            shard = local.shards[rng.randrange(6)]
            layout, data = shard.layout, shard.path.read_bytes()
            begin, end = [
                (0, HEADER_BYTES), (HEADER_BYTES, HEADER_BYTES + shard.tokens.nbytes),
                (layout.ends_offset, layout.sums_offset), (layout.sums_offset, layout.meta_offset),
                (layout.meta_offset, len(data)),
            ][number % 5]  # fmt: skip
            replace_object(url, where := shard.path.name, flipped(data, rng.randrange(begin, end)))
        lines, _ = verify_objects(url, ProgressBars(False))
        named += any(f"{url}/{where}" in line for line in lines)
        try:
            remote = opened(url, cache / str(number))
            for batch, expected in zip(remote.stream(129, 8, seed=2), whole, strict=True):
                assert np.array_equal(batch, expected)
        except ValueError as error:
            refusals.append((f"{url}/{where}", str(error)))
        if where == INDEX:
            store.write(INDEX, index)
        else:
            replace_object(url, where, data)
            index = store.read(INDEX)
    assert named == FLIPS
    assert all(name in message for name, message in refusals)
    assert len(refusals) >= 5 + 7 + 6  # of the index, tokens, and checksums; what else there is no batch needs


def test_damage_between_what_is_needed_is_nobodys_error(server, folder, local, cache):
    url, shard = put(server, folder, "between"), local.shards[0]
    replace_object(url, shard.path.name, flipped(shard.path.read_bytes(), HEADER_BYTES + 5 * 4096))
    around = np.array([4 * 2048, 6 * 2048])
    assert np.array_equal(opened(url, cache).read(around, 99), local.read(around, 99))


def test_damage_on_the_way_is_fetched_once_more(server, url, local, cache, monkeypatch):
    remote, wrong = opened(url, cache), []
    read_range = ObjectStore.read_range

    def damage_once(self, key, start, stop, **options):
        data = read_range(self, key, start, stop, **options)
        if (key, start) in wrong:
            return data
        wrong.append((key, start))
        return flipped(data, len(data) // 2)

    monkeypatch.setattr(ObjectStore, "read_range", damage_once)
    offsets = np.arange(60) * 9000
    assert np.array_equal(remote.read(offsets, 300), local.read(offsets, 300))
    assert wrong


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("part", ["table of checksums", "document ends", "footer", "header"])
def test_damage_outside_the_tokens(server, folder, local, cache, part, index):
    url, shard = put(server, folder, f"outside-{index}-{part.replace(' ', '-')}", index=index), local.shards[2]
    at = {
        "table of checksums": shard.layout.sums_offset + 9,
        "document ends": shard.layout.ends_offset + 9,
        "footer": shard.layout.meta_offset + 30,
        "header": 20,
    }[part]
    replace_object(url, shard.path.name, flipped(shard.path.read_bytes(), at), is_known=index)
    lines, _ = verify_objects(url, ProgressBars(False))
    assert any(f"{url}/{shard.path.name}" in line and part.split()[-1] in line for line in lines)
    if part == "header":  # never read: it follows from the footer
        return
    if part == "footer" and not index:
        with pytest.raises(ValueError, match=f"{shard.path.name}: the footer or the metadata is damaged"):
            opened(url, cache)
        return
    remote, offset = opened(url, cache), np.array([int(local.first_tokens[2])])
    if part == "footer":  # the index has another copy
        assert np.array_equal(remote.read(offset, 99), local.read(offset, 99))
        return
    with pytest.raises(DamagedData, match=f"{shard.path.name}: the table of {part.rpartition(' of ')[2]}"):
        remote.read(offset, 99) if "checksums" in part else remote.segments(offset, 9999)


def test_verify_reads_the_bucket_and_not_the_cache(server, folder, local, cache):
    url, shard = put(server, folder, "verified"), local.shards[1]
    assert verify_objects(url, ProgressBars(False)) == ([], f"6 shards, {local.num_tokens:,} tokens: complete")
    opened(url, cache).verify()
    replace_object(url, shard.path.name, flipped(shard.path.read_bytes(), HEADER_BYTES + 3 * 4096))
    (line,), _ = verify_objects(url, ProgressBars(False))
    assert re.fullmatch(
        rf"{url}/shard_00001.rox: block 3 \(tokens 6144 to 8191, documents? .*\) is damaged; 1 of \d+ blocks .*", line
    )


def test_a_data_set_that_is_replaced_while_it_is_open(server, folder, local, cache):
    url, shard = put(server, folder, "replaced"), local.shards[0]
    remote = opened(url, cache)
    replace_object(url, shard.path.name, flipped(shard.path.read_bytes(), 9000), is_known=False)
    with pytest.raises(DamagedData, match=r"shard_00000.rox was replaced in the bucket after .*data index`"):
        remote.read(np.array([0]), 99)
    ObjectStore.open(url).delete([shard.path.name])
    with pytest.raises(DamagedData, match=r"shard_00000.rox is gone from the bucket"):
        remote.read(np.array([0]), 99)


def test_a_damaged_index(server, folder, cache):
    url = put(server, folder, "index")
    store = ObjectStore.open(url)
    store.write(INDEX, flipped(store.read(INDEX), 99))
    with pytest.raises(ValueError, match=r"shards.index is damaged .* write it again: `roxxel-dist data index`"):
        opened(url, cache)
    store.write(INDEX, b"something else")
    with pytest.raises(ValueError, match=r"shards.index is no index of shards"):
        opened(url, cache)
