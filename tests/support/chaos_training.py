"""What `chaos` disturbs: a small training on real hosts, by as many launches as it takes; and one with data workers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from commands import FAST
from hosts import CONTROLLER, ROOT, Cluster

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.process import progress

STEP_LIMIT_S = 8.0
RUNTIME_SIGNAL = int(signal.SIGRTMIN) + 9
"""Raises an exception of jax's runtime in a rank."""
WORKERS_STEPS = 400
RANKS = 3
"""At most, of a job."""
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
virtual_shards: 2
lr: 3.0e-3
log_every: 1
eval_every: 9
eval_iters: 2
checkpoint_every: 5
max_to_keep: 3
"""
# In each rank, before anything else is imported.
SITE = f"""
import os, signal
def fail(number, frame):
    raise RuntimeError("chaos: an exception in a rank")
def fail_runtime(number, frame):
    import jax
    raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: chaos: an exception of the runtime")
if "ROXXEL_PROCESS_ID" in os.environ:
    signal.signal(signal.SIGUSR2, fail)
    signal.signal({RUNTIME_SIGNAL}, fail_runtime)
"""


def prepare(work: Path, hosts: Cluster, steps: int) -> None:
    """A corpus, a config of so many steps in two phases, and folders for the temporary files of each machine."""
    tokens = np.random.default_rng(0).integers(0, 500, 1 << 18, np.uint16)
    (work / "data").mkdir()
    Roxxel(work / "data" / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
    (work / "config.yaml").write_text(CONFIG.format(first=steps // 2, second=steps - steps // 2))
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(SITE)
    (work / "other" / "jax-0.0.1.dist-info").mkdir(parents=True)
    (work / "other" / "jax-0.0.1.dist-info" / "METADATA").write_text("Name: jax\nVersion: 0.0.1\n")
    (work / "state").mkdir()
    hosts.tmpfs(CONTROLLER, work / "state", "256k")
    for name in (*hosts.names, CONTROLLER):
        (work / "tmp" / name).mkdir(parents=True)
        hosts.tmpfs(name, "/dev/shm", "128m")
        if name != CONTROLLER:
            hosts.set_env(name, TMPDIR=str(work / "tmp" / name))


def left_behind(work: Path, hosts: Cluster) -> list[str]:
    """Files, sockets and memory that no job needs any more, on all machines; `work` is that of `prepare`."""
    left = [str(path) for path in (work / "tmp").rglob("*") if not path.is_dir() or path.parent != work / "tmp"]
    for name in (*hosts.names, CONTROLLER):
        left += [f"{name}: {path}" for path in hosts.run(["find", "/dev/shm", "-mindepth", 1], on=name).stdout.split()]
        listening = hosts.run(["ss", "-Htln", "not", "sport", "=", ":22"], on=name).stdout.splitlines()
        left += [f"{name} listens: {line}" for line in listening]
    return left


class Launches:
    """A job on all hosts of a cluster, by as many launches as it takes. What they say goes to `screen`."""

    def __init__(self, hosts: Cluster, work: Path, name: str, way: str = "ssh") -> None:
        """`way`: as of `Cluster.launch`."""
        self._hosts, self._work, self._way = hosts, work, way
        self.folder = work / name
        self.screen = work / f"{name}.txt"
        self.launches = 0

    def start(
        self, options: Sequence[object], command: Sequence[object], named: Sequence[object] = ()
    ) -> subprocess.Popen[bytes]:
        """A launch from the controller. `named`: which hosts, if not all."""
        variables = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": self._work / "cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": FAST,
            "PYTHONPATH": f"{self._work / 'site'}:{ROOT}",
        }
        words = [*self._hosts.reach(self._way), *(named or ("--hosts", ",".join(self._hosts.names)))]
        words += [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]
        self.launches += 1
        with self.screen.open("ab") as screen:
            return self._hosts.popen(
                [sys.executable, "-m", "roxxel_dist", *words, *options, "--", *command],
                cwd=self._work,
                env={
                    "TMPDIR": str(self._work / "tmp" / CONTROLLER),
                    "PYTHONPATH": f"{self._work / 'launcher-site'}:{ROOT}",
                    "XDG_STATE_HOME": str(self._work / "state"),
                },
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
            )


class Workers(Launches):
    """The program of `data_workers.py`, on two hosts."""

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, or start it again."""
        self.folder.mkdir(exist_ok=True)
        options = ["--spare-hosts", len(self._hosts.names) - 2, "--run-id", self.folder.name]
        return self.start(
            options, ["python", ROOT / "tests" / "support" / "data_workers.py", self.folder, WORKERS_STEPS]
        )

    @property
    def step(self) -> int:
        """The last one that is done."""
        with suppress(OSError, ValueError):
            return int((self.folder / "step").read_text())
        return 0

    def state(self) -> tuple[int, bytes]:
        """How many steps the saved state has, and its weights."""
        with np.load(self.folder / "state.npz") as saved:
            return int(saved["done"]), saved["weights"].tobytes()

    def processes(self) -> list[int]:
        """All that runs of it, on any host."""
        mark, found = f"ROXXEL_RUN_ID={self.folder.name}\0".encode(), []
        for host in self._hosts.names:
            for pid in self._hosts.processes(host):
                with suppress(OSError):
                    if mark in Path(f"/proc/{pid}/environ").read_bytes():
                        found.append(pid)
        return found


class Training(Launches):
    """One run on two hosts, with one to spare; see `prepare`. The bits do not depend on how many hosts are left."""

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, or start it again."""
        options = ["--spare-hosts", len(self._hosts.names) - 2, "--min-hosts", 1, "--host-timeout", 12]
        options += ["--devices-per-proc", 1, "--max-restarts", 99, "--step-timeout", STEP_LIMIT_S]
        train = ["train", "--config", "config.yaml", "--data_path", "data", "--run_dir", self.folder, "--resume"]
        return self.start(options, train)

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
        for process in self._that_run(host, "roxxel_dist.launcher.agent.agent"):
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


def record_of(rank: int) -> progress.Record:
    """What a rank says that it does, by its pid."""
    with suppress(psutil.Error, FileNotFoundError, KeyError):
        file = os.open(psutil.Process(rank).environ()[progress.ENV], os.O_RDONLY)
        try:  # not by its number: a spare became another rank than its variables say
            records = [progress.read(file, number) for number in range(RANKS)]
            found = [record for record in records if record.pid == rank]
        finally:
            os.close(file)
        if found:
            return found[0]
    return progress.Record()


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
