"""What a message advises can be followed, and helps: each is provoked, followed to the letter, and the command goes on.

The messages of the data room have a test of their own (tests/data/test_advice.py).
"""

import shlex
import shutil

import numpy as np
import pytest

from roxxel_dist.cli import main

T = "train --data_path d --config tiny.yaml --max_steps 1"
"""The smallest training: one step."""
P = "plan --config tiny.yaml"
D = f"{P} --data_path d"
SWEEP = "sweep --config tiny.yaml --data_path d --dry_run --sweep_config"
NINE = "--phases '[{steps: 9, batch_size: 8, seq_len: 17}]'"
PHASES = "--phases '[{steps: 4, batch_size: 8, seq_len: 17}, {steps: 1, batch_size: 8, seq_len: 9}]' --max_steps 4"
EXPORT = "export r --format safetensors"
TINY = (
    "{dim: 16, num_blocks: 1, head_size: 8, kv_heads: 1, max_context: 16, sample: 'off', batch_size: 8, eval_iters: 1}"
)
GRID = "{method: grid, metric: {name: val_loss, goal: minimize}, parameters: {lr: {values: [0.001]}}}"
OWN = """
from flax import nnx
def build(): ...
def right(config, rngs): return Net(config.vocab_size, rngs)
class Net(nnx.Module):
    def __init__(self, size, rngs):
        self.table = nnx.Embed(size, size, rngs=rngs)
    def __call__(self, x):
        return self.table(x)
"""
"""A model of the user's own, and a function that is none."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A data set, another, a run of two steps and its fork, and files of a sweep."""
    folder = tmp_path_factory.mktemp("advice")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, text in {
            "tiny.yaml": TINY, "own.py": OWN, "c.txt": "the cat sat on a mat and the dog ran over a hill \n\n" * 200,
            "other.txt": "quite other letters, zżxw QUICK \n" * 200, "logs/a.log": "the dog sat on a hill " * 99,
            "grid.yaml": GRID,
        }.items():  # fmt: skip
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        for line in (
            "data build c.txt --out d --tokenizer char",
            "data build other.txt --out other --tokenizer char",
            f"{T} --run_dir r --max_steps 3 --checkpoint_every 1 --eval_every 1",
        ):
            assert main(line.split()) == 0
        np.save(folder / "raw.npy", np.arange(900, dtype="<u2") % 30)
    return folder


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """A copy of it, where a command may change what it likes."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")


def follow(line, capfd):
    """(code, what a command says to its terminal)."""
    try:
        code = main(shlex.split(line))
    except SystemExit as end:
        code = end.code
    return code, capfd.readouterr().err


CASES = [
    # of the data
    (f"{P} --data_path raw.npy", "give --vocab_size N", f"{P} --data_path raw.npy --vocab_size 30"),
    (f"{D} --vocab_size 5", "use at least 18", f"{D} --vocab_size 18"),
    (P, "name a text file, a folder or shards with --data_path PATH", f"{P} --data_path c.txt"),
    (
        f"{D} --datasets '{{o: none}}' --validation '{{o: none}}'",
        "text becomes shards with `roxxel-dist data build",
        "data build c.txt --out none --tokenizer d/tokenizer.json",
        f"{D} --validation '{{o: none}}'",
    ),
    (
        f"{D} --datasets '{{o: other}}' --validation '{{v: other}}'",
        "`roxxel-dist data build … --tokenizer PATH/tokenizer.json`",
        "data build logs/a.log --out again --tokenizer d/tokenizer.json",
        f"{D} --validation '{{v: again}}'",
    ),
    (
        "data build other.txt --out d --tokenizer char",
        "choose another folder, or replace it with --overwrite",
        "data build other.txt --out d --tokenizer char --overwrite",
    ),
    ("data build logs --out l", "--include '*.log'", "data build logs --out l --tokenizer char --include '*.log'"),
    (
        "data append c.txt --out raw",
        "make a data set there with `roxxel-dist data build` first",
        "data build c.txt --out raw --tokenizer char",
        "data append logs/a.log --out raw",
    ),
    (
        "data build c.txt --out n --tokenizer d --vocab_size 9",
        "leave vocab_size out",
        "data build c.txt --out n --tokenizer d",
    ),
    (
        "data build c.txt --out n --tokenizer char --vocab_size 9",
        "Leave vocab_size out, or use tokenizer 'bpe'",
        "data build c.txt --out n --tokenizer char",
    ),
    ("data build c.txt --out n --vocab_size 9", "at least 257 ids", "data build c.txt --out n --vocab_size 257"),
    # of the config
    (f"{D} --n_devices 99", "use 0 for all", f"{D} --n_devices 0"),
    (f"{D} --model own:build", "write it as `def build(config, rngs)`", f"{D} --model own:right"),
    (f"{D} --parametrization mup", "set base_dim to the dim", f"{D} --parametrization mup --base_dim 16"),
    (
        f"{D} --base_dim 16",
        "leave base_dim out, or set parametrization to mup",
        f"{D} --base_dim 16 --parametrization mup",
    ),
    (
        f"{D} --n_devices 1 --grad_accum 3 --phases '[{{steps: 9, batch_size: 8, seq_len: 17}}]'",
        "use a multiple of 3",
        f"{D} --n_devices 1 --grad_accum 3 --phases '[{{steps: 9, batch_size: 9, seq_len: 17}}]'",
    ),
    (
        f"{D} --max_steps 9 --decay_steps 3",
        "leave decay_steps out, or use lr_schedule wsd",
        f"{D} --max_steps 9 --decay_steps 3 --lr_schedule wsd",
    ),
    (
        f"{D} {NINE} --warmup_steps 8 --lr_schedule wsd",
        "give the length of the decay with decay_steps",
        f"{D} {NINE} --warmup_steps 4 --lr_schedule wsd --decay_steps 2",
    ),
    (
        f"{D} {NINE} --warmup_steps 5 --decay_steps 6 --lr_schedule wsd",
        "use at most 4",
        f"{D} {NINE} --warmup_steps 5 --decay_steps 4 --lr_schedule wsd",
    ),
    (
        f"{D} --dim 17",
        "leave n_heads and head_size out to have them derived from dim",
        "plan --data_path d --dim 16 --kv_heads 1 --max_context 16",
    ),
    (
        "plan --data_path d --dim 17 --max_context 16",
        "use a multiple of 2",
        "plan --data_path d --dim 18 --kv_heads 1 --max_context 16",
    ),
    (f"{D} --use_lora true", "add --init_from RUN", f"{D} --use_lora true --init_from r"),
    (f"{D} --init_from r@9", "kept are 1, 2, 3", f"{D} --init_from r@2"),
    (
        f"{D} --phases '[{{steps: 1, batch_size: 8, seq_len: 99}}]'",
        "use a larger max_context or a smaller seq_len",
        f"{D} --phases '[{{steps: 1, batch_size: 8, seq_len: 99}}]' --max_context 98",
    ),
    (
        f"{D} --phases '[{{epochs: 0.001, batch_size: 8, seq_len: 17}}]'",
        "use a smaller batch_size",
        f"{D} --phases '[{{epochs: 0.01, batch_size: 2, seq_len: 17}}]'",
    ),
    # of runs
    ("train --amend --run_dir r", "add --resume and --run_dir", "train --amend --resume --run_dir r"),
    ("train --resume", "name its folder with --run_dir", "train --resume --run_dir r"),
    (
        "train --run_dir r --resume --from_step 1",
        "begin a new run with --fork RUN@STEP",
        "train --run_dir f --fork r@1 --max_steps 2",
    ),
    (
        "train --run_dir f --fork r@1 --max_steps 2 --skip_steps 2",
        "such as 120:128",
        "train --run_dir f --fork r@1 --max_steps 2 --skip_steps 2:2",
    ),
    (
        "train --run_dir r --resume --skip_steps 2:2",
        "add --fork RUN@STEP",
        "train --run_dir f --fork r@1 --skip_steps 2:2 --max_steps 2",
    ),
    (
        "train --run_dir f --fork r@2 --skip_steps 2:2",
        "both above 2",
        "train --run_dir f --fork r@2 --skip_steps 3:3 --max_steps 3",
    ),
    (f"{T} --run_dir r", "continue it with --resume, or name another run_dir", "train --resume --run_dir r"),
    (f"{T} --run_dir r", "continue it with --resume, or name another run_dir", f"{T} --run_dir n"),
    ("train --run_dir gone --resume", "a new one needs --data_path PATH", f"{T} --run_dir gone --resume"),
    ("train --run_dir r --resume --data_path other.txt", "leave it out", "train --run_dir r --resume"),
    ("train --run_dir r --resume --lr 0.5", "give a larger max_steps", "train --run_dir r --resume --max_steps 4"),
    (
        "train --run_dir r --resume --lr 0.5",
        "with --fork RUN@STEP",
        "train --run_dir f --fork r@2 --lr 0.5 --max_steps 3",
    ),
    (
        f"train --run_dir r --resume {PHASES}",
        "or change it from here on with --amend",
        f"train --run_dir r --resume {PHASES} --amend",
    ),
    (
        "train --run_dir f --fork r@3",
        "give it longer phases, or a larger max_steps",
        "train --run_dir f --fork r@3 --max_steps 4",
    ),
    ("train --run_dir f --fork r@9", "nearest is 3, kept are 1, 2, 3", "train --run_dir f --fork r@2 --max_steps 3"),
    ("train --run_dir f --fork r", "as in r@1000", "train --run_dir f --fork r@2 --max_steps 3"),
    (f"{D} --fsdp maybe", "must be True or False", f"{D} --fsdp true"),
    (f"{D} --fsdp=2", "must be True or False", f"{D} --fsdp=FALSE"),
    ("train --resume=2 --run_dir r", "must be True or False", "train --resume=true --run_dir r"),
    # of commands that read runs
    ("eval r@2 --best", "use one of the two", "eval r --best"),
    ("eval r --validation x", "such as '{code: data/code}'", "eval r --validation '{code: d}'"),
    ("generate r --num_samples 0", "at least 1", "generate r --num_samples 1 --max_new_tokens 2"),
    ("generate r --best --step 1", "use one of the two", "generate r --step 1 --max_new_tokens 2"),
    (f"{EXPORT} --out x --best --step 1", "use one of the two", f"{EXPORT} --out x --step 1"),
    (f"{EXPORT} --out x --merge_lora", "leave it out", f"{EXPORT} --out x"),
    (f"{EXPORT} --out c.txt", "name a folder", f"{EXPORT} --out x"),
    (f"{EXPORT} --out r", "name another folder", f"{EXPORT} --out x"),
    (f"{EXPORT} --out logs", "name another folder", f"{EXPORT} --out logs/x"),
    ("audit r --every 0", "at least 1", "audit r --every 1"),
    ("audit r --steps 5", "as in 101:200", "audit r --steps 1:2"),
    ("audit r --steps 2:9", "has rows of the steps 1 to 3", "audit r --steps 1:3"),
    ("verify d --deep", "all arrays are compared always", "verify d"),
    ("batch d --step 1", "it has no config.yaml: . has r", "batch r --step 1"),
    ("report r --best_config b.yaml", "name the folder of a sweep", "report r"),
    ("top r --web --once", "leave --web out", "top r --once"),
    ("launch local --nprocs 1", "write it after `--`", "launch local --nprocs 1 --dry-run -- true"),
    (
        "launch local --nprocs 1 --json -- true",
        "give it with --dry-run",
        "launch local --nprocs 1 --json --dry-run -- true",
    ),
    (
        "launch local --run-id a/b --dry-run -- true",
        "use letters, digits and . _ -",
        "launch local --run-id a.b --dry-run -- true",
    ),
    ("launch loca -- true", "did you mean 'local'?", "launch local --dry-run -- true"),
    # of sweeps
    ("sweep --dry_run", "name a file with --sweep_config", f"{SWEEP} grid.yaml"),
    ("sweep --sweep_config grid.yaml --config tiny.yaml --dry_run", "with --data_path", f"{SWEEP} grid.yaml"),
    (f"{SWEEP} grid.yaml --hosts_per_trial 2", "name a cluster with --ray_address", f"{SWEEP} grid.yaml"),
    (
        f"{SWEEP} grid.yaml --gpus_per_trial 3 --procs_per_host 2",
        "use a multiple",
        f"{SWEEP} grid.yaml --procs_per_host 2",
    ),
    (f"{SWEEP} grid.yaml --max_trial_time soon", "such as 90m", f"{SWEEP} grid.yaml --max_trial_time 90m"),
    (f"{SWEEP} tiny.yaml", "give it with --config", f"{SWEEP} grid.yaml"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].replace(T, 'train')[-70:]} -> {case[1][:30]}")
@pytest.mark.long
def test_advice(case, here, capfd):
    provoke, advice, *ways = case
    code, said = follow(provoke, capfd)
    assert code == 2, said
    assert advice in said
    for way in ways:
        code, said = follow(way, capfd)
        assert code == 0, said
