"""A folder as somebody has it who begins a sweep: a base, and a sweep's file."""

import sysconfig
from pathlib import Path

import yaml

from roxxel_dist.cli import main

SMALL = {"dim": 16, "num_blocks": 1, "max_context": 32, "dropout_rate": 0.0, "eval_iters": 1}


def write_base(folder, steps, every, **more):
    """Write `base.yaml`: a model that trains in a moment, evaluated every so many steps."""
    phases = [{"steps": steps, "batch_size": 8, "seq_len": 33}]
    base = {**SMALL, "phases": phases, "log_every": every, "eval_every": every, **more}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))


def write_sweep(folder, sweep, name="sweep.yaml"):
    """Write a sweep's file."""
    (folder / name).write_text(yaml.safe_dump(sweep))


def text_sets(folder):
    """{name: folder of shards} of two small data sets of real text, `self` and `code`."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name, file in {"self": "argparse.py", "code": "pydoc_data/topics.py"}.items():
        text, out = folder / f"{name}.txt", str(folder / name)
        text.write_text((stdlib / file).read_text()[:60_000])
        assert main(["data", "build", str(text), "--out", out, "--tokenizer", "byte"]) == 0
    return {name: str(folder / name) for name in ("self", "code")}
