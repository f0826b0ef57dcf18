"""Run directories whose rows come from a formula, in any number and length."""

import json
import math


def made_run(path, steps=20, **more):
    """A run directory with a config and `steps` rows; `more` are fields of its config."""
    path.mkdir(parents=True, exist_ok=True)
    fields = {"dim": 32, "lr": 0.001} | more
    lines = [f"{name}: {value}\n" for name, value in fields.items()]
    (path / "config.yaml").write_text("".join(lines) + "record: {format: 1, data_path: data/here}\n")
    add(path, range(1, steps + 1))
    return path


def add(run, steps, **more):
    """Log steps; `more` are values of their rows."""
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "train_loss": round(1 + 4 / math.sqrt(step), 6), "tokens": 64 * step}
            if step % 10 == 0:
                row["val_loss"] = round(1.1 + 4 / math.sqrt(step), 6)
            file.write(json.dumps(row | {"tokens_per_s": 1000.0, "lr": 0.001} | more) + "\n")
