"""The picture of the README, of runs that are made for it: `make pictures`.

One run trains alone, on one process. The same run on two processes loses a rank to `kill -9`, is stopped later, and
continues on four processes. The program draws both losses, and fails if one of them differs in one bit.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from commands import command, environment, wait_for
from matplotlib import pyplot

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = """
datasets: {self: data}
dim: 64
num_blocks: 2
kv_heads: 1
head_size: 16
max_context: 128
virtual_shards: 4
phases:
  - {steps: 200, batch_size: 16, seq_len: 65}
  - {steps: 100, batch_size: 8, seq_len: 129}
warmup_steps: 20
lr: 0.003
log_every: 1
eval_every: 100
eval_iters: 4
checkpoint_every: 20
sample: "off"
"""
KILLED_AT, CHANGED_AT, STEPS = 90, 200, 300
LIMIT_S = 600
COLOURS = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "alone": "#8c959f", "two": "#0969da", "four": "#bc4c00"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "alone": "#9198a1", "two": "#4493f8", "four": "#f0883e"},
}
"""Of each colour scheme: 4.5 to 1 or more against the background of a page."""


def launch(processes: int, *words: object) -> list[str]:
    """The words that continue the run on a number of processes."""
    train = ("train", "--config", "run.yaml", "--run_dir", "runs/hurt", "--resume", *words)
    return command("launch", "local", "--nprocs", processes, "--devices-per-proc", 1, "--", *train)


def step_of(run: str) -> int:
    """The newest logged step."""
    rows = Path(run, "metrics.jsonl")
    return json.loads(rows.read_text().splitlines()[-1])["step"] if rows.exists() and rows.stat().st_size else 0


def ranks() -> list[int]:
    """The process ids of the ranks of the one job."""
    (path,) = filter(Path.is_symlink, Path(os.environ["XDG_STATE_HOME"]).rglob("jobs/*"))
    return [rank["pid"] for rank in json.loads(path.read_text())["ranks"]]


def losses(run: str) -> list[float]:
    """The loss of each step, from the first."""
    rows = {
        row["step"]: row["train_loss"] for row in map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    }
    assert sorted(rows) == list(range(1, STEPS + 1)), f"{run}: {len(rows)} steps"
    return [rows[step] for step in sorted(rows)]


def train(folder: Path) -> dict[str, object]:
    """Make both runs in a folder; their losses, and the steps at which something happened to the second."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json", "email", "asyncio", "http"):
        shutil.copytree(library / name, folder / "text" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "run.yaml").write_text(CONFIG)
    quiet = {"check": True, "env": environment(), "stdout": subprocess.DEVNULL}
    subprocess.run(command("data", "build", "text", "--out", "data", "--tokenizer", "byte"), **quiet)
    subprocess.run(command("train", "--config", "run.yaml", "--run_dir", "runs/alone"), **quiet)
    with (
        Path("job.log").open("w") as log,
        subprocess.Popen(
            launch(2, "--max_steps", CHANGED_AT), env=environment(), stdout=log, stderr=subprocess.STDOUT
        ) as job,
    ):
        wait_for(lambda: step_of("runs/hurt") >= KILLED_AT, LIMIT_S, f"step {KILLED_AT}")
        killed_at = step_of("runs/hurt")
        os.kill(ranks()[1], signal.SIGKILL)
        assert job.wait(LIMIT_S) == 0, Path("job.log").read_text()
    (resumed,) = {int(step) for step in re.findall(r"resuming after step (\d+)", Path("job.log").read_text())}
    subprocess.run(launch(4), **quiet)
    alone, hurt = losses("runs/alone"), losses("runs/hurt")
    assert alone == hurt, "the losses differ"
    return {"alone": alone, "hurt": hurt, "killed_at": killed_at, "resumed": resumed}


def draw(told: dict, scheme: str, path: Path) -> None:
    """Draw the losses of both runs as an SVG file for one colour scheme."""
    colour = COLOURS[scheme]
    steps = range(1, STEPS + 1)
    style: Any = {"text.color": colour["text"], "axes.labelcolor": colour["text"], "xtick.color": colour["text"],
             "ytick.color": colour["text"], "axes.edgecolor": colour["grid"], "font.size": 11,
             "svg.fonttype": "none", "svg.hashsalt": "roxxel-dist"}  # fmt: skip
    with pyplot.rc_context(style):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(9, 4.2), sharex=True, height_ratios=(4, 1), layout="constrained"
        )
        above.plot(steps, told["alone"], color=colour["alone"], linewidth=6, alpha=0.45, label="undisturbed, 1 process")
        parts = (("two", 0, CHANGED_AT, "2 processes"), ("four", CHANGED_AT, STEPS, "continued on 4 processes"))
        for name, begin, end, label in parts:
            first = max(begin - 1, 0)
            above.plot(steps[first:end], told["hurt"][first:end], color=colour[name], linewidth=1.2, label=label)
        for axes in (above, below):
            axes.patch.set_alpha(0)
            axes.spines[["top", "right"]].set_visible(False)
            for step in (told["killed_at"], CHANGED_AT):
                axes.axvline(step, color=colour["text"], linestyle=":", linewidth=1)
        top = max(told["alone"])
        above.text(told["killed_at"] + 3, top, f"kill -9 of a process in step {told['killed_at']}:\n"
                   f"restart after step {told['resumed']}", va="top")  # fmt: skip
        above.text(CHANGED_AT + 3, top, "2 processes end,\n4 continue", va="top")
        above.set_ylabel("training loss")
        above.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.72), labelcolor=colour["text"])
        differences = [abs(one - other) for one, other in zip(told["alone"], told["hurt"], strict=True)]
        below.plot(steps, differences, color=colour["two"])
        below.set_ylim(-1, 1)
        below.set_yticks([0])
        below.set_ylabel("difference", rotation=0, ha="right", va="center")
        below.set_xlabel("step")
        figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Make the runs and draw them."""
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        os.environ["XDG_STATE_HOME"] = f"{place}/state"
        told = train(Path(place))
    for scheme in COLOURS:
        draw(told, scheme, DOCS / f"unbroken-{scheme}.svg")
    print(f"made: {DOCS / 'unbroken-light.svg'} and -dark.svg; {STEPS} losses are equal to the bit")


if __name__ == "__main__":
    main()
