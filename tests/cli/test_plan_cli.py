"""`plan` on the command line: what it prints, what it leaves, and that it refuses what `train` refuses."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from commands import command, environment, run
from kept_steps import kept, no_curve  # noqa: F401  (of the tests here)

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main
from roxxel_dist.corpus.build import build

SMALL = """
dim: 16
num_blocks: 1
max_context: 32
eval_iters: 1
phases: [{steps: 4, batch_size: 8, seq_len: 17}]
"""
BIG = [
    "--dim", 16384, "--kv_heads", 16, "--num_blocks", 8, "--vocab_size", 32000, "--fsdp", "True", "--use_bf16", "True",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a text, shards of it, other shards, a short text, a run, and a config."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    (folder / "short.txt").write_text("A very short text.\n")
    build([folder / "text.txt"], folder / "data", tokenizer="byte").close()
    build([folder / "text.txt"], folder / "chars", tokenizer="char").close()
    (folder / "small.yaml").write_text(SMALL)
    (folder / "short").mkdir()
    for number in range(20):  # each shorter than a row of 17 tokens
        np.save(folder / "short" / f"{number:02d}.npy", np.full(12, 7, np.uint16))
    np.save(folder / "empty.npy", np.zeros(0, np.uint16))
    np.save(folder / "one.npy", np.ones(17, np.uint16))
    np.save(folder / "floats.npy", np.ones(5000, np.float32))
    config = Config.from_yaml(folder / "small.yaml")
    config.phases, config.n_devices, config.sample = [{"steps": 1, "batch_size": 8, "seq_len": 17}], 1, "off"
    Experiment(config).fit(folder / "data", folder / "run")
    return folder


@pytest.fixture
def work(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)
    before = tree(made)
    yield made
    assert tree(made) == before, "something was left"


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


WORDS = ["--config", "small.yaml", "--data_path", "data"]
FOUR = ["--n_devices", "4"]
LAYERS = ["--no_rope_layer_interval", "2", "--num_blocks", "2"]
OWN = ["--model", "own_model:build"]
EXPERTS = [*WORDS, "--use_moe", "True"]
SHARDED = [*WORDS, "--virtual_shards"]
BLEND = [*WORDS, "--datasets", "{other: short}", "--phases", "["]
W = "weights: {self: 1, other: 1}, batch_size: 8, seq_len"
PHASE = "[{{steps: 2, batch_size: {}, seq_len: {}}}]"
MISTAKES = [
    ([*WORDS, "--config", "none.yaml"], "none.yaml: cannot be read"),
    ([*WORDS, "--data_path", "nowhere"], "nowhere"),
    (["--config", "small.yaml"], "no data: name a text file, a folder or shards with --data_path"),
    ([*WORDS, "--data_path", "short.txt", "--tokenizer_type", "byte"], "does not fit in the data 'self'"),
    ([*WORDS, "--phases", PHASE.format(4096, 33)], "a batch of 4096 rows of 33 tokens does not fit"),
    ([*WORDS, "--phases", "[{epochs: 0.0001, batch_size: 8, seq_len: 17}]"], "These epochs are less than one step"),
    ([*WORDS, "--phases", PHASE.format(8, 17), "--grad_accum", "3"], "is not a multiple of grad_accum (3)"),
    ([*WORDS, "--phases", PHASE.format(8, 65)], "phase 1: seq_len is 65, and the model reads at most"),
    ([*WORDS, "--phases", "[{steps: 1, batch_size: 8}]"], "batch_size and seq_len must be given"),
    ([*WORDS, "--val_fraction", "0.00005"], "tokens are held out, too few for a batch of 8 rows"),
    ([*WORDS, "--validation", "{other: nowhere}"], "validation 'other' is"),
    ([*WORDS, "--validation", "{other: chars}"], "validation 'other' was made with tokenizer"),
    ([*WORDS, "--datasets", "{code: chars}"], "datasets 'code' was made with tokenizer"),
    ([*WORDS, "--phases", "[{steps: 1, batch_size: 8, seq_len: 17, weights: {code: 1}}]"], "code"),
    ([*WORDS, "--vocab_size", "100"], "vocab_size is 100, but the data has 257 tokens"),
    ([*WORDS, "--n_devices", "9"], "n_devices is 9, but 8 device(s) are here"),
    ([*WORDS, "--warmup_steps", "4"], "warmup_steps is 4: it must be below"),
    ([*WORDS, "--use_lora", "True"], "use_lora is True, and init_from names no run"),
    ([*WORDS, "--init_from", "nowhere"], "nowhere has no checkpoint; name the folder of a run that has"),
    ([*WORDS, "--init_from", "run@9"], "run has no checkpoint of step 9; nearest is 1, kept are 1"),
    ([*WORDS, "--init_from", "run", "--dim", "32"], "run@1: the checkpoint of step 1"),
    ([*WORDS, "--init_from", "run", "--data_path", "chars"], "run, whose tokenizer is"),
    ([*WORDS, "--model", "own_model:missing"], "has no 'missing'"),
    ([*WORDS, "--model", "own_model:build", "--model_args.depth", "0"], "model_args.depth is 0: it must be at least 1"),
    ([*WORDS, "--data_path", "chars", "--sample_prompt", "π"], "π"),
    ([*SHARDED, "8", "--phases", PHASE.format(16, 17), "--grad_accum", "4", *FOUR], "of virtual_shards (8) x"),
    ([*SHARDED, "16"], "virtual_shards is 16 and needs a thread pool of 32 in XLA"),
    ([*SHARDED, "2"], "virtual_shards is 2, and there are 8 devices"),
    ([*SHARDED, "8", "--phases", PHASE.format(12, 17), *FOUR], "not a multiple of virtual_shards (8): use"),
    ([*SHARDED, "8", "--tensor_devices", "2"], "virtual_shards is 8, and the mesh is"),
    ([*WORDS, "--expert_devices", "2"], "expert_devices does nothing here, because use_moe is False"),
    ([*EXPERTS, "--n_experts", "6", "--expert_devices", "4"], "must divide n_experts, which is 6, as 3 does"),
    ([*EXPERTS, "--n_experts", "3", "--expert_devices", "3"], "it must divide 8 device(s), as 2 does"),
    ([*EXPERTS, "--expert_devices", "4", "--phases", PHASE.format(6, 17)], "divide the rows too: use 8, or 2 expert"),
    ([*EXPERTS, "--expert_devices", "4", "--virtual_shards", "8"], "virtual_shards is 8, and expert_devices is 4"),
    ([*SHARDED, "6"], "virtual_shards is 6: it must be a power of two"),
    ([*SHARDED, "8", "--phases", PHASE.format(6, 17)], "into 8 / 6 shards, which is no whole number: use a power of"),
    ([*SHARDED, "8", "--phases", PHASE.format(1, 9)], "of two pieces, and it has 8 tokens to predict: use rows of at"),
    ([*SHARDED, "8", "--phases", PHASE.format(2, 33), "--grad_accum", "2"], "are computed at once, and grad_"),
    ([*SHARDED, "8", "--phases", PHASE.format(1, 33), *OWN], "That needs the built-in model and its loss, without"),
    ([*SHARDED, "8", *LAYERS, "--phases", PHASE.format(1, 33)], "without sliding_window_pattern and no_rope_layer_"),
    ([*SHARDED, "8", "--fsdp", "True", "--fsdp_devices", "5"], "fsdp_devices is 5: it must divide 8 device(s)"),
    ([*SHARDED, "8", "--model", "own_model:build_stateful"], "virtual_shards: each call of the model changes"),
    ([*WORDS, "--phases", "[{steps: 5000000000, batch_size: 8, seq_len: 17}]"], "must be at most 2,147,483,647"),
    ([*WORDS, "--phases", "[{epochs: 900000000, batch_size: 8, seq_len: 17}]"], "must be at most 2,147,483,647"),
    ([*WORDS, "--phases", "[{steps: 2, epochs: 1, batch_size: 8, seq_len: 17}]"], "steps is 2 and epochs is 1"),
    ([*BLEND, "{steps: 2, " + W + ": 17}]"], "and the data 'other' does not"),
    ([*BLEND, "{steps: 2, weights: {other: 1}, batch_size: 8, seq_len: 17}]"], "does not hold one such row"),
    ([*BLEND, "{steps: 2, " + W + ": 17, packing: documents}]"], "'other'"),
    ([*BLEND, "{steps: 2, " + W + ": 17, blend: row}]"], "one such row"),
    (
        [*BLEND, "{steps: 2, " + W + ": 5}, "
         "{steps: 1, " + W + ": 17}]"],
        "phase 2: seq_len is 17, and the data 'other' does not hold one such row",
    ),
    ([*BLEND, "{steps: 2, weights: {self: 1, other: 1}, batch_size: 800, seq_len: 9}]"], "which holds 20 such"),
    ([*BLEND, "{epochs: 1, weights: {self: 0, other: 1}, batch_size: 8, seq_len: 9}]"], "give steps instead of epochs"),
    ([*BLEND, "{steps: 1, weights: {self: 1, other: .nan}, batch_size: 8, seq_len: 9}]"], "of 'other' is nan"),
    ([*BLEND, "{steps: 1, weights: {self: 1, other: 1e-4}, batch_size: 8, seq_len: 9}]"], "is 9.999e-05 of the sum"),
    ([*WORDS, "--phases", "[]"], "phases is an empty list"),
    ([*WORDS, "--phases", "[3]"], "phases"),
    ([*WORDS, "--seed", "-1"], "seed is -1: it must be at least 0 and below 2^31"),
    ([*WORDS, "--max_steps", "0"], "max_steps is 0: it must be at least 1"),
    ([*WORDS, "--data_path", "empty.npy", "--vocab_size", "300"], "empty.npy"),
    ([*WORDS, "--data_path", "one.npy", "--vocab_size", "300"], "'self' does not hold one such row"),
    ([*WORDS, "--data_path", "floats.npy", "--vocab_size", "300"], "float32"),
    ([*WORDS, "--attention", "cudnn"], "attention"),
    ([*WORDS, "--optimizer", "sgdd"], "optimizer"),
    ([*WORDS, "--n_heads", "3"], "heads"),
    ([*WORDS, "--use_bf16", "True", "--bf16_compute", "True"], "choose one"),
]  # fmt: skip


def refusal(capsys, *words):
    """(exit code, what stands on stdout, the messages)."""
    code, output = main(list(words)), capsys.readouterr()
    return code, output.out.splitlines(), [line for line in output.err.splitlines() if line.startswith("roxxel-dist: ")]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2))])
def test_plan_refuses_what_train_refuses(work, capsys, monkeypatch, part):
    """In three parts, of which each has mistakes of every kind."""
    wrong = []
    for given, message in MISTAKES[part::3]:
        words = [*given[:-2], given[-2] + given[-1]] if given[-2] == "[" else given
        # Of 16 threads: what 8 virtual shards ask for before jax starts.
        monkeypatch.setenv("PJRT_NPROC", "8" if "thread pool" in message else "16")
        planned, trained = refusal(capsys, "plan", *words), refusal(capsys, "train", *words, "--run_dir", "new")
        if planned != trained or planned[:2] != (2, []) or message not in planned[2][0]:
            wrong.append((words, message, planned, trained))
    assert wrong == []


def test_a_plan_as_text_and_as_json(work, capsys):
    words = ["plan", *WORDS, "--devices", "8", "--tokens_per_s", "1000", "--arrays"]
    assert main(words) == 0
    text = capsys.readouterr().out
    for line in (
        "1  1 to 4           8 x 17     544",
        "8 cpu device(s), simulated",
        "0.5 s for 512 computed tokens at 1,000 tokens/s",
    ):
        assert line in text
    for name in ("embedding.embedding", "blocks.attention.qkv.kernel", "norm.scale"):
        assert re.search(rf"^{re.escape(name)}  .*replicated", text, re.MULTILINE)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 180
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = json.loads((work / "run" / "model_summary.json").read_text())
    assert (found["parameters"], found["steps"], found["tokens"]) == (summary["parameters"], 4, 4 * 8 * 17)
    assert found["seconds"] == 0.512
    assert len(found["arrays"]) == text.count("  float32  ")


def test_what_does_not_fit_is_told_and_refused(work, capsys):
    assert main(["plan", *WORDS, "--devices", "8", "--device_memory_gb", "1e-4"]) == 2
    told = capsys.readouterr()
    assert "a device has 100.00 kB" in told.out
    assert re.search(r"roxxel-dist: phase 1: 8 rows x 17 tokens: its step needs [\d.]+ kB of each device", told.err)
    assert "use a smaller batch_size" in told.err


def test_a_run_is_planned_by_its_name(work, capsys):
    assert main(["plan", "run", "--devices", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 8 * 17
    assert main(["plan", "run"]) == 0
    assert "passes" in capsys.readouterr().out
    assert main(["plan"]) == 2
    assert "no data: name a text file" in capsys.readouterr().err
    assert main(["plan", "rum"]) == 2
    assert "there is no rum: did you mean run?" in capsys.readouterr().err
    assert main(["plan", "run", "--devices", "0"]) == 2
    assert "devices is 0: it must be at least 1" in capsys.readouterr().err


@pytest.mark.long
def test_a_text_is_planned_for_other_devices_and_leaves_nothing(made, tmp_path):
    shutil.copy(made / "text.txt", tmp_path)
    words = ["--data_path", "text.txt", "--dim", 16, "--num_blocks", 1, "--max_context", 16, "--batch_size", 12]
    more = ["--devices", 6, "--processes", 3, "--tokenizer_type", "byte", "--json"]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PJRT_NPROC": ""}
    result = run("plan", *words, *more, cwd=tmp_path, **flags)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["devices"], found["processes"], found["simulated"]) == (6, 3, True)
    assert found["phases"][0]["rows_a_process"] == 4
    assert "text.txt is text" in found["notes"][0]
    assert tree(tmp_path) == ["text.txt"]


@pytest.mark.long
def test_launched_processes_tell_it_once(made):
    plan = ["plan", *WORDS, "--fsdp", "True"]
    result = run("launch", "local", "--nprocs", 2, "--devices-per-proc", 2, "--", *plan, cwd=made)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("4 cpu device(s) in 2 processes") == 1
    wrong = run("launch", "local", "--nprocs", 2, "--devices-per-proc", 2, "--", *plan, "--devices", 8, cwd=made)
    assert wrong.returncode == 2
    assert "devices is 8, and the processes of this job have 4" in wrong.stdout + wrong.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_twenty_billion_parameters_are_planned_in_little_memory(made):
    words = ["plan", *WORDS, *BIG, "--devices", 8, "--json"]
    child = subprocess.Popen(
        command(*words), cwd=made, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    found = json.loads(child.stdout.read())
    child.stdout.close()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert found["parameters"] > 20e9
    exact = found["state"]["parameters"] * 8 / 2 / found["parameters"]  # norms alone are whole on each device
    assert 1 <= exact < 1.001
    assert found["phases"][0]["memory"]["arguments"] > 3 * 2 * 20e9 / 8
    assert used.ru_maxrss * 1024 < 4e9
