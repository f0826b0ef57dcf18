"""What lies in the folder of a run is what the page of files says."""

import json
import re
import sysconfig
from pathlib import Path

import pytest
from commands import TINY, run

from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.weights_file import read_weights

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "files.md"


def documented():
    """Every name in the first column of the page's table."""
    section = PAGE.read_text().split("\n## A run\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on text, with all that leaves something, in bfloat16."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(TINY)
    text = Path(sysconfig.get_paths()["stdlib"]) / "json"
    more = ["--max_steps", 8, "--profile_steps", 3, 4, "--wandb", "offline", "--use_bf16", "True", "--vocab_size", 512]
    words = ["train", "--config", "tiny.yaml", "--data_path", text, "--run_dir", "mine", *more]
    result = run(*words, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "mine"


def test_the_folder_is_as_documented(finished):
    names = {f"{path.name}/" if path.is_dir() else path.name for path in finished.iterdir()}
    assert {name for name in names if not name.startswith(".")} == set(documented())
    assert {name for name in names if name.startswith(".")} == {".lock"}
    for inner in ("logs/rank-0.log", "plots/loss.png", "checkpoints/8/meta.json"):
        assert (finished / inner).stat().st_size > 0


def test_the_weights_are_those_of_the_checkpoints(finished):
    store = CheckpointStore(finished / "checkpoints", read_only=True)
    newest, best = store.latest_step(), store.best_step()
    store.close()
    _, steps = zip(*(read_weights(finished / f"{which}model_weights.msgpack") for which in ("", "best_")), strict=True)
    assert steps == (newest, best) == (8, best)


def test_the_summary_counts_by_part(finished):
    summary = json.loads((finished / "model_summary.json").read_text())
    params, _ = read_weights(finished / "model_weights.msgpack")
    assert summary["parameters"] == sum(array.size for array in params.values())
    assert set(summary["parameters_by_part"]) == {"embedding", "blocks", "norm"}
    assert sum(summary["parameters_by_part"].values()) == summary["parameters"]
    assert summary["parameters_by_part"]["embedding"] == params["embedding.embedding"].size
    assert summary["dtype"] == "bfloat16"
    assert summary["weights_mem_MB"] == 2 * summary["parameters"] / 1e6
    moments = summary["optimizer_mem_MB"] - 2 * summary["weights_mem_MB"]
    assert 0 <= moments < 0.001  # besides two moments a few counts
