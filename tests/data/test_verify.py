import numpy as np
import pytest

from roxxel_dist.cli import main
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.verify import find_damage
from roxxel_dist.utils.display import ProgressBars


@pytest.fixture
def folder(tmp_path):
    """Five shards of documents of 1,000 tokens, of which the second and the last are damaged in known places."""
    rng = np.random.default_rng(5)
    documents = [rng.integers(1, 60_000, 1000).astype(np.uint16) for _ in range(50)]
    Roxxel(tmp_path).write(documents, max_shard_bytes=22_000)
    for number, byte in ((1, 4096 + 9000), (4, 4096 + 100)):
        path = tmp_path / f"shard_{number:05d}.rox"
        data = bytearray(path.read_bytes())
        data[byte] ^= 1
        path.write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("workers", [1, 2, pytest.param(None, marks=pytest.mark.long)])
def test_all_damage_is_found_and_named(folder, workers):
    with Roxxel(folder) as ds:
        assert len(ds.shards) == 5
        first, second = find_damage(ds.shards, ProgressBars(False), workers)
        assert first.startswith(f"{folder}/shard_00001.rox: block 2 (tokens 4096 to 6143, documents 4 to 6) is damaged")
        assert second.startswith(f"{folder}/shard_00004.rox: block 0 (tokens 0 to 2047, documents 0 to 2) is damaged")
        assert list(find_damage(ds.shards[2:4], ProgressBars(False), workers)) == []


def test_a_damaged_table_and_a_shrunk_file(folder):
    with Roxxel(folder) as ds:
        ends = ds.shards[2].layout.ends_offset
        with ds.shards[2].path.open("r+b") as file:
            file.seek(ends)
            file.write(b"\xff")
        with ds.shards[3].path.open("r+b") as file:
            file.truncate(10_000)
        messages = list(find_damage(ds.shards, ProgressBars(False)))
    assert len(messages) == 4
    assert any("shard_00002.rox: the document ends are damaged" in message for message in messages)
    assert any("shard_00003.rox: 10000 bytes now" in message for message in messages)


def test_the_command(folder, capsys):
    assert main(["data", "verify", str(folder)]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.split(": ")[0].rsplit("/")[-1] for line in lines] == ["shard_00001.rox", "shard_00004.rox"]
    assert "block 2" in lines[0]
    assert "verify: 100 %" in said.err
    assert main(["data", "verify", str(folder / "shard_00000.rox")]) == 0
    assert capsys.readouterr().out == "1 shards, 10,010 tokens: complete\n"
    (folder / "shard_00000.rox").write_bytes(b"short")
    assert main(["data", "verify", str(folder)]) == 1
    assert "shard_00000.rox" in capsys.readouterr().out
    assert main(["data", "verify", str(folder / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
