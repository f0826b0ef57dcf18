"""configs/*.yaml as a person uses them: planned as they stand, and trained in a small form."""

import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from commands import rows, run
from reader import ROOT
from tables import one_test

from roxxel_dist import Config, Roxxel
from roxxel_dist.cli import main
from roxxel_dist.curriculum.segments import check_batches
from roxxel_dist.run.components import build_components, open_corpus, temporary_folder
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.weights.base import add_base

pytestmark = [pytest.mark.xdist_group("configs"), pytest.mark.timeout(900)]
DEMO = ROOT / "roxxel_dist" / "demo.yaml"
FILES = {path.stem: path for path in (*(ROOT / "configs").glob("*.yaml"), DEMO) if "parameters" not in load_yaml(path)}
CONFIGS = sorted(FILES)
LARGE_VOCABULARY = 32768
SHARDS = {"corpus": 1000} | {f"{name}/{part}": 250 for name in ("web", "code", "books") for part in ("train", "val")}
"""Documents of 4,000 tokens: the largest batch of `multi_host` has 512 rows of 4,097."""
TINY = ["--dim", "32", "--num_blocks", "1", "--n_heads", "2", "--head_size", "16"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with everything that the first lines of the configs make: texts, shards, a base for adapters."""
    folder = tmp_path_factory.mktemp("configs")
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copy(DEMO, folder / "configs")
    (folder / "data").mkdir()
    source = Path(sysconfig.get_paths()["stdlib"])
    text = [path.read_text() for name in ("json", "email", "logging") for path in sorted((source / name).glob("*.py"))]
    (folder / "data" / "corpus.txt").write_text("\n".join(text))
    (folder / "texts").mkdir()
    (folder / "texts" / "text.txt").write_text(text[0])
    rng = np.random.default_rng(0)
    for name, count in SHARDS.items():
        documents = (rng.integers(1, LARGE_VOCABULARY, 4000, dtype=np.uint16) for _ in range(count))
        (folder / "data" / name).mkdir(parents=True)
        Roxxel(folder / "data" / name / "made_*.rox").write(documents, separator=0, vocab_size=LARGE_VOCABULARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (
            ["data", "build", "data/corpus.txt", "--out", "data/base", "--vocab_size", "512"],
            ["train", "--data_path", "data/base", *TINY, "--max_context", "1024", "--batch_size", "8",
             "--eval_iters", "1", "--max_steps", "1", "--n_devices", "1", "--run_dir", "runs/base"],
            ["export", "runs/base", "--format", "hf", "--out", "models/base"],
            ["data", "build", "data/corpus.txt", "--out", "data/finetune", "--tokenizer", "models/base"],
        ):  # fmt: skip
            assert main(words) == 0, words
    return folder


@pytest.fixture
def here(desk, monkeypatch):
    monkeypatch.chdir(desk)
    return desk


def data_words(name):
    """demo.yaml leaves its data to the command."""
    return [] if load_yaml(f"configs/{name}.yaml").get("datasets") else ["--data_path", "data/corpus"]


def small(name):
    """Flags for a tiny form: as many phases with the same shares, each of a step; the rest is the config's."""
    config = load_yaml(f"configs/{name}.yaml")
    words = ["--max_context", "32", "--eval_iters", "1", "--log_every", "1", "--loss_chunk", "0"]
    if not config.get("init_from"):
        words += ["--warmup_steps", "0", *TINY, *([] if config.get("mla") else ["--kv_heads", "1"])]
    words += ["--down_dim_q", "16", "--down_dim_kv", "16", "--rope_dim", "8"] if config.get("mla") else []
    if "phases" not in config:
        return [*words, "--batch_size", "8", "--max_steps", "2", "--grad_accum", "2"]
    phases = [one | {"steps": 1, "batch_size": 32, "seq_len": 17} for one in config["phases"]]
    phases[-1] |= {"steps": 2, "batch_size": 16, "seq_len": 33}
    words += ["--decay_steps", "1"] if "decay_steps" in config else []
    return [*words, "--phases", json.dumps(phases), "--grad_accum", "2"]


def test_there_is_one_of_each_capability():
    assert set(CONFIGS) == {
        "blend", "curriculum", "default_config", "demo", "fsdp", "lora", "mla", "moe", "multi_host",
    }  # fmt: skip


@one_test("name", CONFIGS)
def test_it_is_a_config(name):
    """Its fields and their values, without the data, the run and the model that its first lines make."""
    config = Config.from_yaml(FILES[name])
    config.validate()


@pytest.mark.docs
@pytest.mark.parametrize("name", CONFIGS)
def test_it_fits_together_as_it_stands(here, name):
    """All that `plan` looks at before it compiles a step, which for the large ones takes a minute."""
    config, _ = add_base(Config.from_yaml(f"configs/{name}.yaml"))
    config = config.with_absolute_paths()
    path = config.primary_path("data/corpus" if name == "demo" else None)
    with temporary_folder(path, "plan") as folder, open_corpus(config, path, folder) as data:
        made = build_components(config, data)
        plan = made.curriculum.plan(config.seed)
        check_batches(made.curriculum.shapes, made.grad_accum)
        state = made.steps(made.mesh(), plan.total_steps).state
    known = [phase.get("steps") for phase in config.phases or [{}]]
    assert plan.total_steps == sum(known) if all(known) else plan.total_steps > 0
    assert state.params


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_it_can_be_planned_as_it_stands(here, name, capsys):
    assert main(["plan", "--config", f"configs/{name}.yaml", *data_words(name), "--devices", "8", "--json"]) == 0
    found, config = json.loads(capsys.readouterr().out), load_yaml(f"configs/{name}.yaml")
    known = [phase.get("steps") for phase in config.get("phases", [{}])]
    assert found["steps"] == sum(known) if all(known) else found["steps"] > 0
    assert (found["trainable_parameters"] < found["parameters"] / 2) == bool(config.get("use_lora"))
    assert found["fsdp"] == bool(config.get("fsdp"))


@pytest.mark.docs
@pytest.mark.parametrize("name", CONFIGS)
def test_it_trains_in_a_small_form(here, name):
    devices = "8" if name == "multi_host" else "2"  # as it says: `fsdp_devices`
    words = ["--config", f"configs/{name}.yaml", *data_words(name), *small(name), "--n_devices", devices]
    words += ["--run_dir", f"runs/{name}"]
    assert main(["train", *words]) == 0
    found, config = rows(f"runs/{name}"), load_yaml(f"configs/{name}.yaml")
    assert len(found) >= 2
    assert {row["phase"] for row in found.values()} == set(range(1, len(config.get("phases", [0])) + 1))
    assert all(np.isfinite(row["train_loss"]) for row in found.values())
    assert (found[2]["train_bal"] > 0) == bool(config.get("use_moe"))
    assert {key for key in found[max(found)] if key.startswith("val_loss/")} == {
        f"val_loss/{name}" for name in config.get("validation", ())
    }


@pytest.mark.docs
@pytest.mark.long
def test_the_one_for_many_hosts_trains_on_two_processes(here):
    words = [
        "--nprocs",
        2,
        "--devices-per-proc",
        4,
        "--max-restarts",
        0,
        "--",
        "train",
        "--config",
        "configs/multi_host.yaml",
    ]
    result = run("launch", "local", *words, *small("multi_host"), "--run_dir", "runs/two", cwd=here)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(rows(here / "runs" / "two")) == [1, 2]
    assert "rank 0 of 2: 4 of 8 cpu devices" in result.stdout
