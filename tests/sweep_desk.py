"""A folder as somebody has it who begins a sweep: a base, and a sweep's file."""

import yaml

SMALL = {"dim": 16, "num_blocks": 1, "max_context": 32, "dropout_rate": 0.0, "eval_iters": 1}


def write_base(folder, steps, every, **more):
    """Write `base.yaml`: a model that trains in a moment, evaluated every so many steps."""
    phases = [{"steps": steps, "batch_size": 8, "seq_len": 33}]
    base = {**SMALL, "phases": phases, "log_every": every, "eval_every": every, **more}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))


def write_sweep(folder, sweep, name="sweep.yaml"):
    """Write a sweep's file."""
    (folder / name).write_text(yaml.safe_dump(sweep))
