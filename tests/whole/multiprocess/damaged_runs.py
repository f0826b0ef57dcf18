"""Run by every rank: trains FOLDER/run, and then, again and again, a copy of it whose newest checkpoints are damaged.

Words: FOLDER, how many copies of each kind of damage, and the kinds. Rank 0 writes FOLDER/results.json: one text for
each copy, empty where it went on from the newest complete checkpoint and became what the undisturbed run is.
"""

import json
import shutil
import sys
from pathlib import Path

from damage import copy_damaged, rows_of, state_of
from runs import make, model

from roxxel_dist import Phase, Roxxel
from roxxel_dist.cluster.distributed import barrier, initialize, is_primary
from roxxel_dist.cluster.mesh import make_mesh

folder, count, kinds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
initialize()
data = Roxxel(folder / "corpus_*.rox")
LAST = 8


def train(run):
    """To the end; returns the step that it went on from."""
    trainer = make(
        data, run, [Phase(LAST, 4, 17)], model=lambda: model(dim=144), eval_every=4, checkpoint_every=2,
        max_to_keep=None, fsdp=True, mesh=make_mesh(fsdp=4), export_weights=False,
    )  # fmt: skip
    trainer.run()
    trainer.close()
    return trainer.start_step


def difference(run, step, begun):
    """In what a resumed run is not as it should be."""
    if begun != step:
        return f"it went on from step {begun} instead of {step}"
    if not (run / "checkpoints" / f"{LAST}.damaged").is_dir():
        return "the damaged one is not set aside"
    if rows_of(run) != rows_of(folder / "run"):
        return "its rows are others"
    return "" if state_of(run, LAST) == state_of(folder / "run", LAST) else "its last state is another one"


train(folder / "run")
results = {}
for seed in range(count):
    for kind in kinds:
        run, step = folder / "copy", 0
        if is_primary():
            shutil.rmtree(run, ignore_errors=True)
            run, step = copy_damaged(folder / "run", run, kind, seed, newest=1 + seed % 2)
        barrier("damaged", limit_s=60)
        begun = train(run)
        barrier("trained", limit_s=60)
        if is_primary():
            results[f"{kind} {seed}"] = difference(run, step, begun)
if is_primary():
    (folder / "results.json").write_text(json.dumps(results))
barrier("end", limit_s=60)
data.close()
