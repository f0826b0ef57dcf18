"""`roxxel-dist verify`: checkpoints, exports and shards that prove themselves, and what it says where they do not."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from made_runs import make_run

from roxxel_dist.checkpoint.digests import DigestTable
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cli import main
from roxxel_dist.weights.export import export_run
from roxxel_dist.weights.files import NEWEST, read_weights
from roxxel_dist.weights.load import weights_of


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run directory with the checkpoints of three steps."""
    run = tmp_path_factory.mktemp("kept") / "run"
    store = CheckpointStore(run / "checkpoints")
    for step in (1, 2, 3):
        store.save(step, {"params": {"a": jnp.full((300, 70), step, jnp.bfloat16), "b": jnp.arange(9.0)}}, {"x": step})
    store.close()
    return run


@pytest.fixture
def run(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "run")


def data_of(run, step):
    """The largest file of a checkpoint, which holds the parameter a."""
    return max((run / "checkpoints" / str(step) / "state").rglob("*"), key=lambda path: path.stat().st_size)


def flip(path, at=-100):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_complete_run(run, capsys):
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    assert main(["verify", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [f"step {step}: complete" for step in (1, 2, 3)]
    assert main(["verify", f"{run}@2"]) == 0
    assert capsys.readouterr().out.startswith("step 2: complete (")
    assert main(["verify", str(run / "checkpoints"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["complete"], [part["name"] for part in report["parts"]]) == (True, ["step 1", "step 2", "step 3"])
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_run_is_named_by_a_relative_path(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    assert main(["verify", run.name]) == 0
    assert capsys.readouterr().out.count(": complete (") == 3


def test_what_is_damaged_is_named(run, capsys):
    flip(data_of(run, 2), at=2000)
    shutil.copy(run / "checkpoints" / "1" / "meta.json", run / "checkpoints" / "3" / "meta.json")
    (run / "checkpoints" / "1").rename(run / "checkpoints" / "1.damaged")
    assert main(["verify", str(run)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2: damaged (state/ocdbt.process_0/d/")
    assert "does not agree with its digest, written by rank 0" in first
    assert second == "step 3: damaged (meta.json does not agree with its digest, written by rank 0)"
    assert third.startswith("1.damaged: renamed (")
    assert main(["verify", f"{run}@2", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["complete"]


def test_what_was_written_wrong_is_found(run, capsys):
    """Files that are as they were written, and are not what was on the device: as from a bad copy to the host."""
    path = run / "checkpoints" / "2" / "digests.json"
    table = DigestTable.read(path)
    wrong = {name: tuple(block._replace(digest="0" * 32) for block in blocks) for name, blocks in table.blocks.items()}
    replace(table, blocks=wrong).write(path)
    assert main(["verify", f"{run}@2"]) == 1
    said = capsys.readouterr().out
    for name in ("params/a[0:300,0:70]", "params/b[0:9]"):
        assert f"{name} does not agree with its digest, written by rank 0" in said


def test_a_lost_table_is_damage(run, capsys):
    (run / "checkpoints" / "2" / "digests.json").unlink()
    assert main(["verify", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "step 2: damaged (digests.json is missing, written by rank 0)"


def test_what_is_not_there(run, tmp_path, capsys):
    assert main(["verify", f"{run}@7"]) == 2
    assert main(["verify", str(tmp_path / "nothing")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    assert "has no checkpoint of step 7; those there are: 1, 2, 3" in said
    assert "nothing" in said
    assert "empty" in said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.mark.parametrize("format", ["msgpack", "safetensors", "hf"])
def test_exports(made, tmp_path, format, capsys):
    out = tmp_path / "out"
    export_run(made, format, out)
    assert main(["verify", str(out)]) == 0
    assert "unverified" not in capsys.readouterr().out
    weights = next(path for path in out.iterdir() if path.suffix in (".msgpack", ".safetensors"))
    flip(weights, at=weights.stat().st_size // 2)
    assert main(["verify", str(out)]) == 1
    assert f"{weights.name} does not agree with its digest" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"\w+\.\w+ does not agree with its digest"):
        weights_of(out)
    (out / "digests.json").unlink()  # of the arrays it is known still
    assert main(["verify", str(out)]) == 1
    assert f"{weights.name}: damaged" in capsys.readouterr().out


def test_a_file_of_weights(made, tmp_path, capsys):
    params, step = read_weights(made / NEWEST)
    assert main(["verify", str(made / NEWEST)]) == 0
    (tmp_path / "old.msgpack").write_bytes(serialization.msgpack_serialize({"step": step, "params": params}))
    assert main(["verify", str(tmp_path / "old.msgpack")]) == 0
    assert "old.msgpack: unverified" in capsys.readouterr().out
    again, _ = read_weights(tmp_path / "old.msgpack")
    assert all(np.array_equal(again[name], params[name]) for name in params)
    data = (made / NEWEST).read_bytes()
    for at in (0, 3, 40, len(data) // 3, len(data) - 40, len(data) - 1):
        (tmp_path / "new.msgpack").write_bytes(data)
        flip(tmp_path / "new.msgpack", at)
        with pytest.raises(ValueError, match="put the right file back"):
            read_weights(tmp_path / "new.msgpack")


def test_shards(corpus, tmp_path, capsys):
    assert main(["verify", str(tmp_path / "corpus_*.rox")]) == 0
    assert capsys.readouterr().out.endswith("tokens: complete\n")
    shard = next(tmp_path.glob("corpus_*.rox"))
    flip(shard, at=shard.stat().st_size // 2)
    assert main(["verify", str(tmp_path)]) == 1
    assert shard.name in capsys.readouterr().out


def test_it_starts_without_jax(run):
    code = f"import sys; from roxxel_dist.cli import main; main(['verify', {str(run)!r}]); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n"), done.stdout


@pytest.mark.long
def test_train_ends_with_code_2_where_no_checkpoint_is_whole(corpus, tmp_path, capsys):
    words = ["train", "--data_path", str(tmp_path / "corpus_*.rox"), "--run_dir", str(tmp_path / "run"), "--dim", "16"]
    words += ["--num_blocks", "1", "--head_size", "8", "--batch_size", "8", "--max_context", "8", "--eval_iters", "1"]
    assert main([*words, "--max_steps", "4", "--checkpoint_every", "2"]) == 0
    for step in (1, 2, 4):  # the first is kept too
        flip(data_of(tmp_path / "run", step))
    capsys.readouterr()
    assert main([*words, "--max_steps", "6", "--checkpoint_every", "2", "--resume"]) == 2
    assert "every checkpoint in" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "2", "4"]
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().out.count(": damaged") == 3
