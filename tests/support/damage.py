"""Damage to checkpoints, as disks, copies and people do it, and what an undisturbed run and a resumed one share."""

import json
import random
import shutil

from roxxel_dist.checkpoint.digests import DigestTable, files_below

KINDS = ("flip", "truncation", "zeroed page", "missing file", "swapped file", "old meta")
PAGE = 4096
CLOCKED = ("ms_per_step", "per_s", "time", "ram", "memory", "mfu", "hfu")


def damage(checkpoints, step, kind, seed):
    """Damage the checkpoint of a step; another one is where swapped files come from. Returns the file's name."""
    rng, folder = random.Random(f"{kind} {seed}"), checkpoints / str(step)
    others = sorted(
        int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal() and path.name != str(step)
    )
    paths = sorted(files_below(folder))
    if kind == "old meta":
        paths = [folder / "meta.json"]
    for _ in range(100):
        path, other = rng.choice(paths), checkpoints / str(rng.choice(others))
        before = path.read_bytes()
        data = bytearray(before)
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "truncation":
            del data[rng.randrange(len(data)) :]
        elif kind == "zeroed page":
            first = rng.randrange(-(-len(data) // PAGE)) * PAGE
            data[first : first + PAGE] = bytes(len(data[first : first + PAGE]))
        elif kind == "missing file":
            path.unlink()
            return path.name
        else:
            theirs = other / path.relative_to(folder)
            if not theirs.exists():  # files of data have names of their own
                theirs = rng.choice(sorted(files_below(other / "state")))
            data = theirs.read_bytes()
        if data != before:
            path.write_bytes(data)
            return path.name
    raise AssertionError(f"no file of {folder} can be damaged so: {kind}")


def copy_damaged(run, folder, kind, seed, newest=1):
    """Copy a run and damage its newest checkpoints; returns (the copy, the step to resume from)."""
    copy = shutil.copytree(run, folder)
    steps = sorted(int(path.name) for path in (copy / "checkpoints").iterdir())
    for step in steps[-newest:]:
        damage(copy / "checkpoints", step, kind, seed)
    return copy, steps[-newest - 1]


def rows_of(run):
    """The rows of a run's log, but for what a clock has measured."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not any(word in k for word in CLOCKED)} for row in lines]


def state_of(run, step):
    """A digest of every array of a checkpoint: with the same one its state is the same, to the bit."""
    return DigestTable.read(run / "checkpoints" / str(step) / "digests.json").fingerprint("")
