"""Run by every rank, as `train` is: names what it compiles, and rank 1 kills itself once in attempt 0."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax

from roxxel_dist.cli.train import train
from roxxel_dist.cluster.distributed import process_index
from roxxel_dist.process.exit_codes import attempt_number

folder, words = Path(sys.argv[1]), sys.argv[2:]
run = folder / "run"
found = threading.local()
log = (folder / f"events-{attempt_number()}-{process_index()}").open("a", buffering=1)


def listen(event: str, **_: str | int) -> None:
    found.value = event == "/jax/compilation_cache/cache_hits" or getattr(found, "value", False)


def listen_to_the_end(event: str, duration_secs: float, **more: str | int) -> None:
    """An event of a compilation ends it, also of one that was found in the cache."""
    if event == "/jax/core/compile/backend_compile_duration":
        if not getattr(found, "value", False):
            log.write(f"{more.get('fun_name')}\n")
        found.value = False


def kill_once(step):
    rows = run / "metrics.jsonl"
    saved = run / "checkpoints" / "8"
    while not (saved.exists() and rows.exists() and f'"step": {step},' in rows.read_text()):
        time.sleep(0.01)
    (folder / "before.jsonl").write_text(rows.read_text())
    os.kill(os.getpid(), signal.SIGKILL)


jax.monitoring.register_event_listener(listen)
jax.monitoring.register_event_duration_secs_listener(listen_to_the_end)
if attempt_number() == 0 and process_index() == 1:
    threading.Thread(target=kill_once, args=(json.loads(os.environ["KILL_AT"]),), daemon=True).start()
sys.exit(train(words))
