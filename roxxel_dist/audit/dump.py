"""The inputs and outputs of one step of a run, on one device, for debugging."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.audit.record import RunRecord
from roxxel_dist.audit.replay import Interval, Watch, loop_of
from roxxel_dist.input.stream import Stream
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import aligned

SHOWN = 12
"""Token ids per row in the table."""


def dump(run: RunRecord, interval: Interval, folder: str | Path) -> str:
    """Write step `interval.last` of a run as `step-N.npz` and a table `step-N.txt` into a folder; returns the table.

    The state before the step equals that of the run bit for bit; the step itself is computed on one device, as one
    batch, without gradient accumulation. The arrays are "tokens" int32[B, L], "dataset" int32[B], "offset" int64[B],
    "loss" float32[], and "grad_norm/<parameter>" float32[].

    Raises ValueError as `loop_of`, and if the folder cannot be written.
    """
    step = interval.last
    with loop_of(run, interval, Watch(run, interval, lambda more: None), last=step) as (components, loop):
        if step - 1 > interval.start:
            loop.position.last_step = step - 1
            loop.run()
        steps, plan = loop.position.steps, loop.position.plan
        params, rest, hparams = loop.state.local_leaves(loop.state.params)
        rows = plan.rows(step - 1)
        batch = Stream(plan, components.curriculum.datasets, None, step - 1).batch(step - 1)
        loss, grads = steps.gradient(params, rest, hparams, batch)
    norms = {name: np.asarray(jnp.linalg.norm(jnp.float32(grad).reshape(-1))) for name, grad in grads.items()}
    tokens = np.asarray(jax.tree.leaves(batch)[0])
    arrays = {"tokens": tokens, "dataset": rows.dataset, "offset": rows.offset, "loss": np.asarray(loss)}
    logged = run.rows.get(step, {}).get("train_loss", "not logged")
    total = float(np.sqrt(sum(norm.astype(np.float64) ** 2 for norm in norms.values())))
    table = [["parameter", "gradient norm"], *([name, f"{norm:.6g}"] for name, norm in norms.items())]
    head = [f"step {step} of {run.name}: loss {float(loss)!r} (in the log {logged}), gradient norm {total:.6g}"]
    for row, (number, first) in enumerate(zip(rows.dataset.tolist(), rows.offset.tolist(), strict=True)):
        ids = " ".join(map(str, tokens[row, :SHOWN].tolist()))
        head.append(f"row {row}: {plan.datasets[number]} token {first:,}: {ids} …")
    text = "\n".join([*head, *aligned([*table, ["all", f"{total:.6g}"]])])
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {**arrays, **{f"grad_norm/{name}": norm for name, norm in norms.items()}}
        np.savez(Path(folder, f"step-{step}.npz"), **arrays)
        Path(folder, f"step-{step}.txt").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"dump is {folder}, which cannot be written ({error.strerror}): name another folder") from error
    return text
