"""The pictures of `top` in the documentation, of trainings that are made for them: `make pictures`.

Three finished runs, and a job of two ranks that trains while the pictures are taken; one rank was killed once.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sysconfig
import tempfile
import threading
from pathlib import Path

from browser import Browser
from commands import command, environment, wait_for
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from roxxel_dist.view.frame import Look, frame
from roxxel_dist.view.items import all_items, items_of, read
from roxxel_dist.view.web.server import Feed, PageServer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = """
datasets: {self: data/code, prose: data/prose}
dim: 64
num_blocks: 2
kv_heads: 1
head_size: 16
max_context: 128
phases:
  - {steps: 150, batch_size: 16, seq_len: 65, weights: {self: 0.8, prose: 0.2}}
  - {steps: 450, batch_size: 16, seq_len: 65, weights: {self: 0.5, prose: 0.5}}
  - {steps: 200, batch_size: 8, seq_len: 129, weights: {self: 0.3, prose: 0.7}}
warmup_steps: 20
log_every: 2
eval_every: 25
eval_iters: 4
checkpoint_every: 50
"""
KILLED_AT, SHOWN_AT = 200, 420
"""Steps of the job: when a rank is killed, and when the pictures are taken."""
LIMIT_S = 600.0
FONT = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
"""What a picture would fetch from elsewhere."""


def texts(folder: Path) -> None:
    """Two corpora: sources of the standard library, and these pages."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name, files in (
        ("code", [file for part in ("json", "email", "asyncio") for file in sorted((library / part).glob("*.py"))]),
        ("prose", sorted(DOCS.rglob("*.md"))),
    ):
        (folder / name).mkdir()
        (folder / name / "text.txt").write_text("\n".join(file.read_text(encoding="utf-8") for file in files))


def run(*words: object) -> None:
    """Run a command of ours to its end."""
    subprocess.run(command(*words), check=True, env=environment(), stdout=subprocess.DEVNULL)


def job() -> dict:
    """The record of the job."""
    with contextlib.suppress(ValueError):
        (path,) = filter(Path.is_symlink, Path(os.environ["XDG_STATE_HOME"]).rglob("jobs/*"))
        return json.loads(path.read_text())
    return {"step": 0, "ranks": []}


def terminal(path: Path) -> None:
    """A frame of `top` as an SVG file."""
    (item,) = items_of(["runs/wide"])
    read(item)
    wait_for(lambda: any(rank.ms_per_step for rank in read(item).ranks), LIMIT_S, "the rates of the ranks")
    console = Console(
        file=io.StringIO(), record=True, width=100, height=32, force_terminal=True, color_system="truecolor"
    )
    for line in frame([read(item)], Look(width=100, height=32), "q quit  z last quarter"):
        console.print(line)
    path.write_text(console.export_svg(title="roxxel-dist top runs/wide", code_format=FONT.sub("", CONSOLE_SVG_FORMAT)))


def pages(folder: Path) -> None:
    """The page of the job's run, and the list on a phone, as PNG files."""
    with PageServer(Feed(all_items)) as server, Browser(folder) as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(server.link)
        browser.wait(lambda: browser.find("table a"), "the list")
        (link,) = (a.get_attribute("href") for a in browser.find("table a") if a.text == "runs/wide")
        for name, address, size, scheme in (
            ("page.png", link, (1280, 1120), "light"),
            ("page-dark.png", link, (1280, 1120), "dark"),
            ("page-phone.png", link, (390, 844), "light"),
            ("page-list.png", server.link, (1280, 900), "light"),
        ):
            browser.open(address, size, scheme)
            browser.wait(lambda: browser.find(".uplot canvas"), "the curves")
            browser.wait(lambda: "list" in name or "ms per step" in browser.text(), "the ranks")  # noqa: B023
            browser.picture(DOCS / name, whole=False)
        server.ended.set()
        server.shutdown()


def main() -> None:
    """Train, and take the pictures."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.chdir(folder)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        texts(folder)
        Path("run.yaml").write_text(CONFIG)
        run("data", "build", "code", "--out", "data/code", "--tokenizer", "byte")
        run("data", "build", "prose", "--out", "data/prose", "--tokenizer", "data/code/tokenizer.json")
        for lr in ("0.001", "0.003", "0.01"):
            run("train", "--config", "run.yaml", "--lr", lr, "--run_dir", f"runs/lr-{lr}", "--sample", "off")
        words = command(
            "launch", "local", "--nprocs", 2, "--max-restarts", 2, "--", "train", "--config", "run.yaml", "--dim", 96,
            "--lr", "0.005", "--run_dir", "runs/wide", "--resume",
        )  # fmt: skip
        with (
            Path("job.log").open("w") as log,
            subprocess.Popen(words, env=environment(), stdout=log, stderr=log) as training,
        ):
            try:
                wait_for(lambda: job()["step"] >= KILLED_AT, LIMIT_S, f"step {KILLED_AT}")
                os.kill(job()["ranks"][1]["pid"], signal.SIGKILL)
                wait_for(lambda: job()["step"] >= SHOWN_AT, LIMIT_S, f"step {SHOWN_AT}")
                terminal(DOCS / "top.svg")
                pages(folder)
            finally:
                training.send_signal(signal.SIGQUIT)
    print(f"made: {DOCS / 'top.svg'}, {DOCS / 'page.png'} and its kind")


if __name__ == "__main__":
    main()
