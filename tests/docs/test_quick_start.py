"""Command lines and programs as users of DantinoX know them: `examples/training_and_sweeps.md`, on a smaller model."""

import contextlib
import io
import json
import re
import shlex
import shutil
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import rows
from reader import ROOT, Block, Reader, blocks

from roxxel_dist import Config, Generator, Trainer, Transformer
from roxxel_dist.cli import main
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.sharding import make_mesh, replicate, shard_batch
from roxxel_dist.weights.files import read_weights

pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("quick start"), pytest.mark.timeout(900)]
PAGE = ROOT / "examples" / "training_and_sweeps.md"
SMALL = """
tokenizer_type: char
dim: 32
num_blocks: 1
kv_heads: 1
max_context: 32
batch_size: 8
grad_accum: 2
dropout_rate: 0.1
lr: 3.0e-3
lr_schedule: "cosine"
warmup_steps: 4
eval_iters: 2
log_every: 1
"""
CONFIG = ["--config", "configs/default_config.yaml", "--data_path", "data/corpus.txt"]
CUT = "runs/run_20260101_120000"


def desk(folder, config=SMALL):
    """A folder with `configs/default_config.yaml` and `data/corpus.txt`."""
    (folder / "configs").mkdir()
    (folder / "configs" / "default_config.yaml").write_text(config)
    (folder / "data").mkdir()
    shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / "json" / "decoder.py", folder / "data" / "corpus.txt")
    return folder


def follow(block: Block) -> str:
    """Run a block in this process; returns its output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
        for line in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
            if words := shlex.split(line, comments=True):
                assert words[0] == "roxxel-dist", block.where
                assert main(words[1:]) == 0, f"{block.where}: {line}"
    return said.getvalue()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder of a person who has followed the page; the output is in `said.txt`."""
    folder = desk(tmp_path_factory.mktemp("quick_start"), f"{SMALL}n_devices: 1\n")
    with contextlib.chdir(folder):
        said = [follow(block) for block in blocks(PAGE) if not block.note]
    (folder / "said.txt").write_text("\n".join(said))
    return folder


@pytest.fixture
def here(work, monkeypatch):
    monkeypatch.chdir(work)
    return work


@pytest.fixture(scope="module")
def trained(work):
    """The run directory of the first line of all, which chose its name by itself."""
    return min(
        path for path in (work / "runs").iterdir() if path.name.startswith("run_") and path.name != Path(CUT).name
    )


def summary(run_dir):
    return json.loads((Path(run_dir) / "model_summary.json").read_text())


@pytest.mark.long
def test_every_block_as_a_command_on_two_processes(tmp_path):
    reader = Reader(desk(tmp_path), processes=2, JAX_NUM_CPU_DEVICES="8")
    for block in blocks(PAGE):
        if not block.note:
            reader.follow(block)
    assert list(rows(tmp_path / CUT))[-1] > 8


def test_what_is_not_run_here_says_who_runs_it():
    for block in blocks(PAGE):
        assert not block.note or (ROOT / re.match(r"run by ([\w/.]+)", block.note)[1]).is_file(), block.where


def test_a_run_has_a_folder_of_its_own(trained):
    assert re.fullmatch(r"run_\d{8}_\d{6}", trained.name)
    names = {"config.yaml", "tokenizer.json", "training_cursor.json", "model_summary.json", "training_log.csv"}
    assert names <= {path.name for path in trained.iterdir()}
    header = (trained / "training_log.csv").read_text().splitlines()[0].split(",")
    assert header[:6] == ["step", "train_loss", "val_loss", "train_bal", "val_bal", "ms_per_step"]


def test_bfloat16_halves_the_memory(work, trained):
    (half,) = (path.parent for path in work.glob("runs/*/config.yaml") if load_yaml(path)["use_bf16"])
    whole, half = summary(trained), summary(half)
    assert (whole["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert half["parameters"] == whole["parameters"]
    assert half["weights_mem_MB"] == whole["weights_mem_MB"] / 2
    assert half["optimizer_mem_MB"] == pytest.approx(whole["optimizer_mem_MB"] / 2, rel=0.001)


def test_an_interrupted_run_is_resumed_from_the_shell_and_from_python(work, trained):
    said, whole, cut = (work / "said.txt").read_text(), rows(trained), rows(work / CUT)
    assert "resuming after step 4 of" in said
    assert "resuming after step 8 of" in said
    assert said.count("Saved to: runs/run_") == 1
    assert list(whole) == list(cut)
    assert [row["train_loss"] for row in whole.values()] == [row["train_loss"] for row in cut.values()]


def test_the_learning_rate_finder(work):
    said = (work / "said.txt").read_text()
    told = re.findall(r"^Suggested LR: (\d\.\d\de-\d\d)$", said, re.MULTILINE)
    assert len(told) == 2
    assert told[0] == told[1]
    assert (work / "lr_finder.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_snippets_printed(work):
    said = (work / "said.txt").read_text()
    assert re.search(r"^step 3, loss \d\.\d{3}$", said, re.MULTILINE)
    assert sorted(re.findall(r"^merged (.*)$", said, re.MULTILINE)) == ["(1, 32, 1, 3, 32)", "(1, 32, 32)"]
    assert "Training on 4 GPUs" in said
    assert load_yaml(work / "runs" / "latent" / "config.yaml")["mla"] is True


def test_adapters_from_the_shell_and_from_python_are_the_same(work):
    assert f"init_from is {CUT}" in (work / "said.txt").read_text()
    one, other = rows(work / "runs" / "adapted"), rows(work / "runs" / "adapted_too")
    assert one[2]["train_loss"] == other[2]["train_loss"]


def test_a_schedule_by_name_and_early_stopping(here, capsys):
    small = {
        "dim": 32,
        "num_blocks": 1,
        "kv_heads": 1,
        "max_context": 32,
        "batch_size": 8,
        "eval_every": 1,
        "epochs": 20,
        "n_devices": 1,
    }
    config = Config(lr_schedule="wsd", warmup_steps=500, patience=2, lr=10.0, tokenizer_type="char", **small)
    run_dir = Trainer(config).fit("data/corpus.txt", run_dir="stopped")
    assert "no lower val_loss in 2 validations: the run ends here" in capsys.readouterr().out
    found = rows(run_dir)
    last = max(found)
    assert min(found, key=lambda step: found[step]["val_loss"]) == last - 2
    assert found[2]["lr"] == pytest.approx(2 * found[1]["lr"])  # still warming up


def test_loading_a_trained_model(here, trained):
    run_dir = str(trained.relative_to(here))
    # Loads config.yaml + best_model_weights.msgpack from the run directory
    model = Transformer.from_pretrained(run_dir)
    # Or load the latest checkpoint instead of the best one
    model = Transformer.from_pretrained(run_dir, best=False)
    newest = max(int(path.name) for path in (trained / "checkpoints").iterdir())
    params, step = read_weights(trained / "model_weights.msgpack")
    assert step == newest
    assert np.array_equal(model.embedding.embedding[...], params["embedding.embedding"])
    text = Generator(run_dir).generate("def ", max_new_tokens=20)
    assert text == Generator(f"{run_dir}").generate(["def "], 20)[0]
    with pytest.raises(ValueError, match=r"has no checkpoint of step 999; those there are: "):
        Generator(run_dir, step=999)


def test_on_several_devices(here, capsys):
    config = Config(
        dim=32, n_heads=2, head_size=16, num_blocks=1, max_context=32, kv_heads=1, tokenizer_type="char",
        batch_size=16,  # split evenly: 4 a device
        n_devices=4, max_steps=2,
    )  # fmt: skip
    run_dir = Trainer(config).fit("data/corpus.txt", run_dir="four")
    words = ["--n_devices", "4", "--batch_size", "16", "--max_steps", "2", "--run_dir", "four_more"]
    assert main(["train", *CONFIG, *words]) == 0
    assert list(rows(run_dir)) == list(rows("four_more")) == [1, 2]
    assert "4 device(s)" in capsys.readouterr().out


def test_the_sharding_helpers():
    mesh = make_mesh(n_devices=4)
    state = replicate({"w": np.ones((3, 5), np.float32)}, mesh)
    x = shard_batch(np.arange(32).reshape(8, 4), mesh)
    assert state["w"].sharding.is_fully_replicated
    assert [shard.data.shape for shard in x.addressable_shards] == [(2, 4)] * 4
    assert np.array_equal(np.asarray(jax.device_get(x)), np.arange(32).reshape(8, 4))
