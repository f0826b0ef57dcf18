"""What reads a run with virtual shards: a state in slices of several processes gives what a whole one gives."""

import hashlib
import json

import pytest
import yaml
from commands import TINY, launched, make_corpus, run

from roxxel_dist.checkpoint.digests import TABLE, DigestTable

CONFIG = yaml.safe_load(TINY) | {
    "dim": 96, "hidden_dim": 840, "virtual_shards": 8, "ema": 0.9, "wandb": "off", "eval_every": 4,
    "checkpoint_every": 4, "phases": [{"steps": 8, "batch_size": 16, "seq_len": 33}],
}  # fmt: skip
RUNS = {"slices": (2, 2, "--fsdp", True), "uneven": (3, 1, "--fsdp", True), "one": (1, 1)}
COMMANDS = {
    "validation": ("eval", "runs/{}", "--json"),
    "an earlier validation": ("eval", "runs/{}@4", "--json"),
    "weights": ("export", "runs/{}", "--format", "safetensors", "--out", "out/{}"),
    "weights of transformers": ("export", "runs/{}@4", "--format", "hf", "--out", "hf/{}"),
    "a mean of checkpoints": ("merge", "runs/{}@4:8", "--out", "mean/{}"),
    "digests": ("verify", "runs/{}", "--json"),
    "a text": ("generate", "runs/{}", "--prompt", "def ", "--max_new_tokens", 8, "--seed", 1),
}
OWN = ("run", "name", "seconds", "out", "path", "step_time", "tokens_per_s")
"""Of a run, or of the clock."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    make_corpus(folder)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    for name, (processes, devices, *more) in RUNS.items():
        done = run(*launched(processes, devices, f"runs/{name}", *more), cwd=folder, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def tensors(path):
    """The header of a safetensors file, whose entries have no order, and a hash of its arrays."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), hashlib.sha256(data[end:]).hexdigest()


def result(desk, name, words):
    """What a command says, without the name of the run; or the arrays that it writes."""
    done = run(*(str(word).format(name) for word in words), cwd=desk)
    assert done.returncode == 0, done.stdout + done.stderr
    if words[0] == "export":
        (path,) = (desk / words[-1].format(name)).rglob("*.safetensors")
        return tensors(path)
    if words[0] == "merge":
        return DigestTable.read(desk / words[-1].format(name) / "checkpoints" / "8" / TABLE).blocks
    if "--json" not in words:
        return done.stdout
    found = json.loads(done.stdout)
    if words[0] == "verify":
        return [(part["name"], part["state"], part["problems"]) for part in found["parts"]]
    return {key: value for key, value in found.items() if key not in OWN} if isinstance(found, dict) else found


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_says_the_same_of_each(desk, what):
    results = {name: result(desk, name, COMMANDS[what]) for name in RUNS}
    assert results["slices"] == results["one"]
    assert results["uneven"] == results["one"]
