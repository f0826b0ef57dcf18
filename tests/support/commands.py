"""Running the real command line with real processes, on a corpus of real text."""

import json
import os
import pty
import re
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import warm

from roxxel_dist.cluster.versions import number
from roxxel_dist.launcher.job.spec import SCALE_ENV

FLAGS = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_parallel_codegen_split_count": "1",
}
if number(version("jaxlib")) < (0, 11, 1):  # a later one has fusion emitters in any case
    FLAGS["xla_cpu_use_fusion_emitters"] = "false"
FAST = " ".join(f"--{name}={value}" for name, value in FLAGS.items())
"""For XLA, where programs take a few steps: to make them faster takes longer, three quarters of a test of the model."""
TINY = """
dim: 32
num_blocks: 2
kv_heads: 1
head_size: 8
max_context: 64
dropout_rate: 0.1
phases:
  - {steps: 12, batch_size: 8, seq_len: 33}
  - {steps: 10, batch_size: 4, seq_len: 65}
grad_accum: 1
lr: 3.0e-3
log_every: 1
eval_every: 6
eval_iters: 2
checkpoint_every: 5
max_to_keep: 20
"""
DEPRECATED = re.compile(r"^.*roxxel_dist/\S+\.py:\d+: (\w*Deprecation|Future)Warning.*", re.MULTILINE)
"""What Python prints where a line of this package calls something that jax, flax, optax, orbax or numpy will remove. In
the process of the tests every warning is an error already."""
KEPT = ("ROXXEL_NO_SKIP", SCALE_ENV)
"""What tests know, beside what an outer launcher leaves."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy")
TERMINAL = {"TERM": "xterm", "COLUMNS": "100"}


def environment(**more):
    """This process's environment without what an outer launcher may have left in it, and without the user's proxies."""
    dropped = {k for k in os.environ if k.lower() in PROXIES or (k.startswith("ROXXEL_") and k not in KEPT)}
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"PYTHONWARNINGS": "default"} | more


def command(*words):
    return [sys.executable, "-m", "roxxel_dist", *map(str, words)]


def run(*words, cwd, timeout=240, **more):
    """Run `roxxel-dist WORDS` to its end, without a warning that a call of this package will soon not work."""
    env = environment(**more)
    if warm.can_run(words) and "PYTHONUTF8" not in more:  # which decides how the words themselves are read
        done = warm.run([*map(str, words)], cwd, env, timeout)
    else:
        done = subprocess.run(command(*words), cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert (found := DEPRECATED.search(done.stdout + done.stderr)) is None, found
    return done


def start(*words, cwd):
    """Start `roxxel-dist WORDS`; the caller ends it."""
    with (Path(cwd) / "started.log").open("a") as log:
        return subprocess.Popen(command(*words), cwd=cwd, env=environment(), stdout=log, stderr=subprocess.STDOUT)


def on_terminal(start):
    """(what `start(theirs)` returns, the text that it wrote on the terminal `theirs`, without control sequences).

    It is read until the last one who writes there is gone.
    """
    ours, theirs = pty.openpty()
    started = start(theirs)
    os.close(theirs)
    data = b""
    try:
        while piece := os.read(ours, 4096):
            data += piece
    except OSError:  # how a terminal says that its last writer is gone
        pass
    os.close(ours)
    return started, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode())


def make_corpus(folder):
    """Shards of a few of the standard library's sources, in `folder/data`, and a small config beside them."""
    (folder / "tiny.yaml").write_text(TINY)
    source = Path(sysconfig.get_paths()["stdlib"])
    result = run(
        "data",
        "build",
        source / "json",
        source / "email",
        source / "logging",
        "--out",
        "data",
        "--vocab_size",
        512,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr


def launched(processes, devices, run_dir, *more, restarts=0):
    """Words that train the small config on so many processes and devices."""
    train = ["train", "--config", "tiny.yaml", "--data_path", "data", "--run_dir", run_dir, *more]
    options = ["--nprocs", processes, "--devices-per-proc", devices, "--max-restarts", restarts]
    return ["launch", "local", *options, "--", *train]


def rows(run_dir):
    """Every complete row of metrics.jsonl by step; two of one step are an error."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [json.loads(line) for line in lines]
    assert len({row["step"] for row in found}) == len(found)
    return {row["step"]: row for row in found}


def losses(run_dir):
    """Training and validation losses by step, to the bit."""
    return {step: (row["train_loss"], row.get("val_loss")) for step, row in rows(run_dir).items()}


def wait_for(condition, limit_s=120, what="it"):
    """Poll until `condition()` is true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {limit_s} s"
        time.sleep(0.02)


def gone(pid):
    """Whether no such process runs any more (a zombie does not run)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ranks_of(launcher):
    """{rank: pid} of the ranks below a launcher."""
    import psutil

    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        try:
            rank = process.environ().get("ROXXEL_PROCESS_ID")
            words = process.cmdline()
        except psutil.Error:
            continue
        if rank is not None and "roxxel_dist.launcher.host.worker" in words:
            found[int(rank)] = process.pid
    return found
