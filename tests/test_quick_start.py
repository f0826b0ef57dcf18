"""Command lines and programs as users of DantinoX know them, with the name alone changed; the model is smaller."""

import json
import re
import shutil
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import rows, run

from roxxel_dist import Config, Generator, Trainer, Transformer
from roxxel_dist.lora import LoRALinear
from roxxel_dist.sharding import make_mesh, num_devices, replicate, shard_batch
from roxxel_dist.train.weights_file import read_weights

pytestmark = pytest.mark.xdist_group("quick start")
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


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with `configs/default_config.yaml` and `data/corpus.txt`."""
    folder = tmp_path_factory.mktemp("quick_start")
    (folder / "configs").mkdir()
    (folder / "configs" / "default_config.yaml").write_text(SMALL)
    (folder / "data").mkdir()
    shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / "json" / "decoder.py", folder / "data" / "corpus.txt")
    return folder


@pytest.fixture
def here(work, monkeypatch):
    monkeypatch.chdir(work)
    return work


@pytest.fixture(scope="module")
def trained(work):
    """The run directory of the first line of all, which chooses its name by itself."""
    result = run("train", *CONFIG, cwd=work, JAX_NUM_CPU_DEVICES="1")
    assert result.returncode == 0, result.stdout + result.stderr
    (run_dir,) = (work / "runs").iterdir()
    return run_dir


def summary(run_dir):
    return json.loads((Path(run_dir) / "model_summary.json").read_text())


def test_a_run_has_a_folder_of_its_own(trained):
    assert re.fullmatch(r"run_\d{8}_\d{6}", trained.name)
    names = {"config.yaml", "tokenizer.json", "training_cursor.json", "model_summary.json", "training_log.csv"}
    assert names <= {path.name for path in trained.iterdir()}
    header = (trained / "training_log.csv").read_text().splitlines()[0].split(",")
    assert header[:6] == ["step", "train_loss", "val_loss", "train_bal", "val_bal", "ms_per_step"]


def test_bfloat16_halves_the_memory(work, trained):
    words = ["--use_bf16", "True", "--grad_clip", "1.0", "--run_dir", "half", "--max_steps", 1]
    result = run("train", *CONFIG, *words, cwd=work)
    assert result.returncode == 0, result.stdout + result.stderr
    whole, half = summary(trained), summary(work / "half")
    assert (whole["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert half["parameters"] == whole["parameters"]
    assert half["weights_mem_MB"] == whole["weights_mem_MB"] / 2
    assert half["optimizer_mem_MB"] == pytest.approx(whole["optimizer_mem_MB"] / 2, rel=0.001)


def test_an_interrupted_run_is_resumed(work, trained):
    shutil.copytree(trained, work / "runs" / "run_20260101_120000")
    cut = work / "runs" / "run_20260101_120000"
    (cut / "training_cursor.json").unlink()
    last = max(rows(cut))
    result = run(
        "train", *CONFIG, "--run_dir", "runs/run_20260101_120000", "--resume", "--epochs", 1.5, "--amend", cwd=work
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"resuming after step {last}" in result.stdout
    assert max(rows(cut)) > last
    assert [row["train_loss"] for row in rows(trained).values()] == [
        rows(cut)[step]["train_loss"] for step in rows(trained)
    ]


def test_the_python_api(here, capsys):
    config = Config.from_yaml("configs/default_config.yaml")
    config.max_steps = 3
    run_dir = Trainer(config).fit("data/corpus.txt", run_dir="runs/run_20260102_120000")
    config.max_steps = 5
    run_dir = Trainer(config).fit("data/corpus.txt", run_dir="runs/run_20260102_120000", resume=True)
    print(f"Saved to: {run_dir}")
    assert capsys.readouterr().out.endswith("Saved to: runs/run_20260102_120000\n")
    assert list(rows(run_dir)) == [1, 2, 3, 4, 5]


def test_a_schedule_by_name_and_early_stopping(here, capsys):
    small = {
        "dim": 32,
        "num_blocks": 1,
        "kv_heads": 1,
        "max_context": 32,
        "batch_size": 8,
        "eval_every": 1,
        "epochs": 20,
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


def test_the_learning_rate_finder(here, capsys):
    words = ["--min_lr", "1e-6", "--max_lr", "1e-2", "--num_steps", "100", "--plot"]
    result = run("find-lr", *CONFIG, *words, cwd=here, JAX_NUM_CPU_DEVICES="1")
    assert result.returncode == 0, result.stdout + result.stderr
    told = re.fullmatch(r"Suggested LR: (\d\.\d\de-\d\d)", result.stdout.splitlines()[-1])
    assert told
    assert (here / "lr_finder.png").read_bytes().startswith(b"\x89PNG")
    config = Config.from_yaml("configs/default_config.yaml")
    config.n_devices = 1
    suggested_lr, lr_history, loss_history = Trainer(config).find_lr(
        "data/corpus.txt",
        min_lr=1e-6,
        max_lr=1e-2,
        num_steps=100,
    )
    print(f"Suggested LR: {suggested_lr:.2e}")
    assert suggested_lr == pytest.approx(float(told[1]), rel=0.01)
    assert len(lr_history) == len(loss_history)


def test_on_several_devices(here):
    config = Config(
        dim=32, n_heads=2, head_size=16, num_blocks=1, max_context=32, kv_heads=1, tokenizer_type="char",
        batch_size=16, # split evenly: 4 a device
        n_devices=4, max_steps=2,
    )  # fmt: skip
    run_dir = Trainer(config).fit("data/corpus.txt", run_dir="four")
    words = ["--n_devices", "4", "--batch_size", "16", "--max_steps", 2, "--run_dir", "four_more", "--epochs", 2]
    result = run("train", *CONFIG, *words, cwd=here, JAX_NUM_CPU_DEVICES="8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(rows(run_dir)) == list(rows("four_more")) == [1, 2]
    assert "4 device(s)" in result.stdout


@pytest.mark.slow
def test_a_fine_tune_with_adapters(here, trained):
    base = f"runs/{trained.name}"
    Path("data/finetune_corpus.txt").write_text(Path("data/corpus.txt").read_text()[:8000])
    ft_config = Config.from_yaml(f"{base}/config.yaml")
    ft_config.use_lora = True
    ft_config.lora_rank = 8
    ft_config.lora_alpha = 16.0
    ft_config.lora_targets = "attention"  # only Q/K/V/O projections
    ft_config.max_steps = 2
    run_dir = Trainer(ft_config).fit("data/finetune_corpus.txt", run_dir="adapted")
    words = ["--use_lora", "True", "--lora_rank", 8, "--lora_targets", "attention", "--max_steps", 2]
    more = ["--config", f"{base}/config.yaml", "--data_path", "data/finetune_corpus.txt", "--run_dir", "adapted_too"]
    result = run("train", *more, *words, cwd=here)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"init_from is {base}" in result.stdout
    assert rows(run_dir)[2]["train_loss"] == pytest.approx(rows("adapted_too")[2]["train_loss"], abs=1e-4)
    model = Transformer.from_pretrained(run_dir)
    kernels = []
    for module in model.modules():
        if isinstance(module, LoRALinear):
            merged_kernel = module.merge_weights()
            kernels.append(merged_kernel.shape)
    assert sorted(kernels) == [(32, 32), (32, 96)]


def test_the_sharding_helpers():
    mesh = make_mesh(n_devices=4)
    assert f"Training on {num_devices(mesh)} GPUs" == "Training on 4 GPUs"
    state = replicate({"w": np.ones((3, 5), np.float32)}, mesh)
    x = shard_batch(np.arange(32).reshape(8, 4), mesh)
    assert state["w"].sharding.is_fully_replicated
    assert [shard.data.shape for shard in x.addressable_shards] == [(2, 4)] * 4
    assert np.array_equal(np.asarray(jax.device_get(x)), np.arange(32).reshape(8, 4))
