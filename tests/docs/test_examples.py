"""The examples as a person starts them, and a program written for Roxxel with its import changed."""

import json
import re
import shlex
import shutil
import sysconfig
from pathlib import Path

import pytest
from commands import environment, rows, run
from reader import ROOT, Reader, blocks, here

from roxxel_dist.settings.config import load_yaml
from roxxel_dist.sweep.study.folder import read_study

pytestmark = pytest.mark.docs
TUTORIAL, BLEND, OWN = (ROOT / "examples" / name for name in ("curriculum_tutorial.py", "blend.py", "own_model"))
SMALL = ["--documents", "128", "--vocab", "200", "--dim", "16", "--short-len", "33", "--every", "15"]
PHASES = [(1, 31), (32, 37)]
"""First and last step: 16,512 tokens in rows of 33, 16 at a time, and a fifth of them in rows of 513."""
STEPS = PHASES[-1][1]

ROXXEL_PROGRAM = """
import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from roxxel_dist import Roxxel, Phase, Curriculum, Trainer


class Xenron(nnx.Module):
    def __init__(self, num_layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(300, 16, rngs=rngs)
        self.linear = nnx.Linear(16, 300, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.embed(x))


def token_generator():
    for i in range(150):
        yield np.random.randint(0, 300, size=(128,), dtype=np.int32)


DATASET_PATTERN = "./wiki_*.rox"
rox = Roxxel(DATASET_PATTERN)
rox.write(token_generator(), separator=b"\\x00", block_size=4096, max_shard_bytes=1024**3)


def sample_now(state) -> str:
    return f"[decoded after step {int(state.step[...])}]"


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def main():
    model = Xenron(4, nnx.Rngs(42))
    devices = jax.devices()
    mesh = Mesh(mesh_utils.create_device_mesh((len(devices),)), axis_names=('data',))
    data_sharding = NamedSharding(mesh, P('data', None))
    with Roxxel(filepath=DATASET_PATTERN) as init_ds:
        phase1_steps = init_ds.estimate_steps(seq_len=65, batch_size=16)
        phase2_steps = int(init_ds.estimate_steps(seq_len=513, batch_size=1) * 0.20)
    phases = [
        Phase(steps=phase1_steps, batch_size=16, seq_len=65),
        Phase(steps=phase2_steps, batch_size=1, seq_len=513),
    ]
    curriculum = Curriculum(primary_streamer=Roxxel(DATASET_PATTERN), phases=phases)
    total_train_steps = sum(p.steps for p in phases)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.nadamw(
            learning_rate=optax.warmup_cosine_decay_schedule(
                init_value=1e-7,
                peak_value=3e-4,
                warmup_steps=int(total_train_steps * 0.05),
                decay_steps=total_train_steps,
                end_value=3e-6,
            ),
            weight_decay=0.01,
        ),
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        curriculum=curriculum,
        loss_fn=loss_fn,
        save_path="run_delta",
        eval_fn=sample_now,
        eval_every=500,
        checkpoint_every=100,
        log_every=100,
        seed=42,
        mesh=mesh,
        data_sharding=data_sharding,
    )
    trainer.run()


if __name__ == "__main__":
    main()
"""


def python(*words, cwd, code=0, devices=8):
    """Run a program on one process with simulated devices."""
    script = shlex.join(["python", *map(str, words)])
    result = here(["bash", "-c", script], cwd=cwd, env=environment(JAX_NUM_CPU_DEVICES=str(devices)), timeout=240)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def check_run(folder, said):
    """Both phases ran, samples came, and the last step is saved."""
    found = rows(folder / "run")
    assert list(found) == [1, 15, 30, STEPS]
    assert [row["phase"] for row in found.values()] == [1, 1, 1, 2]
    for number, (first, _) in enumerate(PHASES, 1):
        assert f"phase {number}/2 from step {first}:" in said
    for step in found:
        assert said.count(f"[sample after step {step}]") == 1
    assert (folder / "run" / "checkpoints" / str(STEPS) / "meta.json").exists()
    cursor = json.loads((folder / "run" / "training_cursor.json").read_text())
    assert cursor == {"step": STEPS, "last_step": STEPS, "finished": True}


def test_the_tutorial_on_one_process(tmp_path):
    first = python(TUTORIAL, "--folder", "here", *SMALL, cwd=tmp_path)
    check_run(tmp_path / "here", first.stdout)
    logged = (tmp_path / "here" / "run" / "metrics.jsonl").read_bytes()
    second = python(TUTORIAL, "--folder", "here", *SMALL, cwd=tmp_path)
    assert f"this run is finished: step {STEPS} is restored, nothing to do" in second.stdout
    assert "phase 1/2" not in second.stdout
    assert (tmp_path / "here" / "run" / "metrics.jsonl").read_bytes() == logged


@pytest.mark.long
def test_the_tutorial_on_two_processes(tmp_path):
    words = [
        "--all-ranks",
        "--nprocs",
        2,
        "--devices-per-proc",
        2,
        "--",
        "python",
        TUTORIAL,
        "--folder",
        "here",
        *SMALL,
    ]
    first = run("launch", "local", *words, cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    check_run(tmp_path / "here", first.stdout)
    assert "rank 0 of 2: 2 of 4 cpu devices" in first.stdout
    assert all(line.split(" | ")[0].endswith(" 0") for line in first.stdout.splitlines() if "[sample" in line)
    second = run("launch", "local", *words, cwd=tmp_path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"this run is finished: step {STEPS} is restored, nothing to do" in second.stdout


def test_a_program_for_roxxel_with_another_import(tmp_path):
    """The same calls with the same arguments; the sizes alone are smaller."""
    (tmp_path / "program.py").write_text(ROXXEL_PROGRAM)
    result = python("program.py", cwd=tmp_path)
    found = rows(tmp_path / "run_delta")
    last = max(found)
    assert list(found) == [1, last]
    assert [row["phase"] for row in found.values()] == [1, 2]
    assert f"[decoded after step {last}]" in result.stdout
    assert (tmp_path / "run_delta" / "checkpoints" / str(last)).is_dir()
    assert "Traceback" not in result.stderr


def check_blend(folder, said):
    """What the plan says is what the stream gave: shares, and the step at which the smaller data set has run out."""
    left = int(re.search(r"step (\d+): 'domain_specific' is used up and leaves the blend", said)[1])
    assert 51 < left <= 70
    assert "phase 1: 45 steps of self, 5 of domain_specific" in said
    assert re.search(r"phase 2: 16 steps of self, 4 of domain_specific", said)
    found = rows(folder / "run")
    assert list(found) == [1, 10, 20, 30, 40, 50, 60, 70]
    assert found[50]["train_loss"] < found[1]["train_loss"]


def test_a_blend_on_one_process(tmp_path):
    check_blend(tmp_path / "blend", python(BLEND, cwd=tmp_path).stdout)


@pytest.mark.long
def test_a_blend_on_two_processes(tmp_path):
    words = ["--nprocs", 2, "--devices-per-proc", 2, "--", "python", BLEND]
    result = run("launch", "local", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    check_blend(tmp_path / "blend", result.stdout)


@pytest.mark.timeout(900)  # eight commands, one of them a sweep
def test_a_model_of_ones_own_from_text_to_a_sweep(tmp_path):
    """Every command of its page; one training is on two processes."""
    here = tmp_path / "own_model"
    shutil.copytree(OWN, here, ignore=shutil.ignore_patterns("__pycache__"))
    source = Path(sysconfig.get_paths()["stdlib"])
    (here / "texts").mkdir()
    for path in sorted((source / "email").glob("*.py")):
        shutil.copy(path, here / "texts")
    reader = Reader(here, timeout=500)
    for block in blocks(here / "README.md"):
        reader.follow(block)
    first, best = rows(here / "runs" / "first"), rows(here / "runs" / "best")
    assert first[40]["train_loss"] < first[1]["train_loss"] - 0.5
    assert 0 < first[40]["accuracy"] < 1
    assert load_yaml(here / "runs" / "first" / "config.yaml")["model"] == "own:build"
    history = read_study(here / "studies" / "sweep").history
    assert [trial.state for trial in history.trials.values()] == ["done"] * 3
    assert {key for trial in history.trials.values() for key in trial.params} == {"model_args", "lr"}
    chosen = load_yaml(here / "best.yaml")
    assert chosen["model_args"] == history.best.params["model_args"]
    assert min(row["val_loss"] for row in best.values() if "val_loss" in row) == history.best.value  # the trial again


TRAIN = [ROOT / "examples" / "train.py", "--config", ROOT / "configs" / "default_config.yaml"]
SMALL_TRAIN = ["--vocab_size=300", "--dim=16", "--num_blocks=1", "--max_context=32", "--max_steps=2", "--batch_size=8"]


def write_corpus(folder):
    """The text that the default config names."""
    (folder / "data").mkdir()
    text = "".join(f"{i} and {i} are {2 * i}. " for i in range(6000))
    (folder / "data" / "corpus.txt").write_text(text)


def test_train_py_on_two_processes(tmp_path):
    write_corpus(tmp_path)
    launched = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 1, "--", "python", *TRAIN, *SMALL_TRAIN]
    result = run(*launched, "--eval_iters=1", "--run_dir", "two", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rank 0 of 2: " in result.stdout
    assert result.stdout.endswith("Saved to: two\n")
    assert list(rows(tmp_path / "two")) == [1, 2]


def test_train_py_takes_a_config_and_flags_as_the_seeds_do(tmp_path):
    """On the data that the config names; the same run from `Trainer(config)`, to the bit; refuses bad flags."""
    write_corpus(tmp_path)
    result = python(*TRAIN, *SMALL_TRAIN, "--lr", "5e-4", "--run_dir", "a", cwd=tmp_path, devices=1)
    assert result.stdout.endswith("Saved to: a\n")
    (tmp_path / "again.py").write_text(
        "from roxxel_dist import Config, Trainer\n"
        "config = Config.from_yaml('a/config.yaml')\n"
        "run_dir = Trainer(config).fit('data/corpus.txt', run_dir='b', resume=True)\n"
        "print(f'Saved to: {run_dir}')\n"
    )
    again = python("again.py", cwd=tmp_path, devices=1)
    assert again.stdout.endswith("Saved to: b\n")
    losses = [[row["train_loss"] for row in rows(tmp_path / run_dir).values()] for run_dir in ("a", "b")]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    bare = [TRAIN[0], "--batch_size", "64", "--lr", "5e-4", "--use_moe", "True"]
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "default_config.yaml", tmp_path / "configs")
    python(*bare, *SMALL_TRAIN[:-1], "--eval_iters=1", "--run_dir", "c", cwd=tmp_path, devices=1)
    saved = load_yaml(tmp_path / "c" / "config.yaml")
    assert (saved["use_moe"], saved["batch_size"], saved["grad_accum"], saved["dropout_rate"]) == (True, 64, 2, 0.1)
    refused = python(*TRAIN, "--use_lora", "True", cwd=tmp_path, code=2, devices=1)
    assert "use_lora is True, and init_from names no run" in refused.stderr
    assert "Traceback" not in refused.stderr
