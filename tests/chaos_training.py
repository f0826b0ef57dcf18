"""The training that `chaos` disturbs: a small model on real hosts, by as many launches as it takes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from commands import FAST
from hosts import CONTROLLER, ROOT, Cluster

from roxxel_dist.cluster import progress
from roxxel_dist.data.dataset import Roxxel

STEP_LIMIT_S = 8.0
UNLIKE = {"ms_per_step", "tokens_per_s", "ram_gb"}
"""Of a row: what differs between two runs of the same."""
CONFIG = """
dim: 16
num_blocks: 1
kv_heads: 1
head_size: 8
max_context: 64
dropout_rate: 0.1
phases:
  - {{steps: {first}, batch_size: 12, seq_len: 33}}
  - {{steps: {second}, batch_size: 6, seq_len: 65}}
grad_accum: 1
lr: 3.0e-3
log_every: 1
eval_every: 9
eval_iters: 2
checkpoint_every: 5
max_to_keep: 3
"""
# In each rank, before anything else is imported.
SITE = """
import os, signal
def fail(number, frame):
    raise RuntimeError("chaos: an exception in a rank")
if "ROXXEL_PROCESS_ID" in os.environ:
    signal.signal(signal.SIGUSR2, fail)
"""


def prepare(work: Path, hosts: Cluster, steps: int) -> None:
    """A corpus, a config of so many steps in two phases, and folders for the temporary files of each machine."""
    tokens = np.random.default_rng(0).integers(0, 500, 1 << 18, np.uint16)
    (work / "data").mkdir()
    Roxxel(work / "data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
    (work / "config.yaml").write_text(CONFIG.format(first=steps // 2, second=steps - steps // 2))
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(SITE)
    for name in (*hosts.names, CONTROLLER):
        (work / "tmp" / name).mkdir(parents=True)
        if name != CONTROLLER:
            hosts.set_env(name, TMPDIR=str(work / "tmp" / name))


class Training:
    """One run on all hosts; see `prepare`. What its launchers say goes to `screen`."""

    def __init__(self, hosts: Cluster, work: Path, name: str) -> None:
        self._hosts, self._work = hosts, work
        self.folder = work / name
        self.screen = work / f"{name}.txt"
        self.launches = 0

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, or start it again."""
        variables = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": self._work / "cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": FAST,
            "PYTHONPATH": f"{self._work / 'site'}:{ROOT}",
        }
        words = ["launch", "ssh", "--hosts", ",".join(self._hosts.names), "--ssh-config", self._hosts.ssh_config]
        words += ["--min-hosts", len(self._hosts.names), "--devices-per-proc", 1, "--max-restarts", 99]
        words += ["--step-timeout", STEP_LIMIT_S]
        words += [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]
        words += ["--", "train", "--config", "config.yaml", "--data_path", "data", "--run_dir", self.folder, "--resume"]
        self.launches += 1
        with self.screen.open("ab") as screen:
            return self._hosts.popen(
                [sys.executable, "-m", "roxxel_dist", *words],
                cwd=self._work,
                env={"TMPDIR": str(self._work / "tmp" / CONTROLLER), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
            )

    def rows(self) -> dict[int, str]:
        """By step, all that must be the same in every run."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found: dict[int, str] = {}
        for line in lines:
            row = json.loads(line)
            assert row["step"] not in found, f"two rows of step {row['step']}"
            found[row["step"]] = json.dumps({key: value for key, value in row.items() if key not in UNLIKE})
        return found

    @property
    def step(self) -> int:
        """The last one that was logged."""
        with suppress(OSError, ValueError, IndexError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.stat(file.fileno()).st_size - 4096))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
        return 0

    def agents(self, host: str) -> list[int]:
        """The agent of a host, once it has a guard, which is its parent; its keepers look like it."""
        found = []
        for process in self._that_run(host, "roxxel_dist.launcher.host.agent"):
            with suppress(psutil.Error):  # it has ended, or its guard has
                if any("process_tree" in word for word in psutil.Process(process.ppid()).cmdline()):
                    found.append(process.pid)
        return found

    def ranks(self, host: str) -> list[int]:
        """The ranks of a host, without the spare processes that wait to be one."""
        workers = self._that_run(host, "roxxel_dist.launcher.host.worker")
        return [process.pid for process in workers if process.name() != "roxxel-spare"]

    def _that_run(self, host: str, module: str) -> Iterator[psutil.Process]:
        for pid in self._hosts.processes(host):
            with suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                if module in process.cmdline():
                    yield process


def activity(rank: int) -> str:
    """What a rank says that it does, by its pid."""
    with suppress(psutil.Error, FileNotFoundError):
        variables = psutil.Process(rank).environ()
        number = int(variables["ROXXEL_PROCESS_ID"])
        file = os.open(variables[progress.ENV], os.O_RDONLY)
        try:
            return progress.read(file, number + 1)[number].activity
        finally:
            os.close(file)
    return ""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
    return False


def last_state(folder: Path, step: int) -> dict[str, bytes]:
    """All that the checkpoint of a step holds, by name: parameters, optimizer, random numbers."""
    import jax
    import orbax.checkpoint as ocp

    path = folder / "checkpoints" / str(step) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = reader.restore(path, restore_args=args)
    return {jax.tree_util.keystr(key): np.asarray(leaf).tobytes() for key, leaf in jax.tree.leaves_with_path(state)}
