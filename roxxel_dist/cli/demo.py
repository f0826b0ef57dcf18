"""The command `demo`: a corpus and a training that need neither files nor flags."""

import dataclasses
import os
import shlex
import sys
import sysconfig
from pathlib import Path

from roxxel_dist.cli.words.parser import parse
from roxxel_dist.launcher.output.console import info

CONFIG = Path(__file__).parent.parent / "demo.yaml"
EXCLUDED = ("test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data")
"""Folders of the standard library that are left out: tests, tables, and an editor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoArgs:
    """Train a small model here: a Transformer of a million parameters, on the sources of Python's standard library.

    It runs 2 processes with 2 simulated CPU devices each, for about three minutes on two cores. It prints the commands
    that it runs. Press Ctrl-C, or kill one of its processes, and start it again: it continues from its last checkpoint.
    """

    text: str | None = None
    """A folder of Python files to train on; the standard library where not given."""
    data_path: str = "demo_data"
    """The folder for the tokens."""
    run_dir: str = "runs/demo"
    """The folder for the run."""
    max_steps: int | None = None
    """Steps after which the run ends; all 400 where not given."""


def demo(words: list[str]) -> int:
    """Train a small model on this machine, with no files and no flags: about three minutes."""
    args = parse(DemoArgs, words, "demo")
    from roxxel_dist.cli.data import data_build

    build = corpus_words(args.data_path, args.text)
    train = ["train", "--config", str(CONFIG), "--data_path", args.data_path, "--run_dir", args.run_dir, "--resume"]
    train += ["--max_steps", str(args.max_steps)] if args.max_steps else []
    launch = ["launch", "local", "--nprocs", "2", "--devices-per-proc", "2", "--", *train]
    info(f"$ roxxel-dist data build {shlex.join(build)}")
    if code := data_build(build):
        return code
    info(f"$ JAX_PLATFORMS=cpu roxxel-dist {shlex.join(launch)}")
    sys.stdout.flush()
    os.environ["JAX_PLATFORMS"] = "cpu"
    # In place of this process: the launcher has signals, limits and an exit code of its own.
    os.execv(sys.executable, [sys.executable, "-m", "roxxel_dist", *launch])


def corpus_words(out: str, text: str | None = None) -> list[str]:
    """The words behind `data build` that make the corpus of the demo in the folder `out`."""
    options = ["--tokenizer", "bpe", "--vocab_size", "2048", "--include", "*.py", "--exclude", *EXCLUDED]
    return [text or sysconfig.get_paths()["stdlib"], "--out", out, *options]
