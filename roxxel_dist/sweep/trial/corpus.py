"""The corpus of a study: text is made into shards once a tokenizer, and all trials read them."""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.process.file_lock import release_lock, wait_for_lock
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.trial.outcome import last_words
from roxxel_dist.sweep.trial.process import POLL_S, TrialProcess, TrialTask, environment

SILENT_S = 2.0
LIMIT_S = 3600.0
"""Seconds that a process that makes the shards may write nothing: training a tokenizer takes minutes."""


def shards_of(config: Any, data_path: str | None, folder: Path) -> Path | None:
    """The place in `folder` of the shards of a trial's text; None where they are there, or its own run makes them."""
    path = config.primary_path(data_path)
    if path is None or is_tokens(path):
        return None
    if config.init_from is not None:  # the tokenizer is that of the weights
        return None
    size = "" if config.vocab_size is None else f"-{config.vocab_size}"
    return folder / (re.sub(r"[^\w.-]+", "_", str(config.tokenizer_type)) + size)


def make_shards(config: Any, data_path: str | None, folder: Path) -> str | None:
    """Make the shards unless they exist; waits for a process that is making them. Returns the path that the run reads.
    Raises ValueError where the text cannot be used, or another process makes the shards and makes no progress."""
    from roxxel_dist.corpus.build import build

    into, path = shards_of(config, data_path, folder), config.primary_path(data_path)
    if into is None or path is None or is_tokens(path):
        return data_path
    folder.mkdir(parents=True, exist_ok=True)
    lock = wait_for_lock(
        into.with_name(f"{into.name}.lock"),
        lambda holder: f"waiting for {holder}, which makes the shards {into}",
        lambda holder: (
            f"{into}: {holder} makes these shards, and has written nothing for {LIMIT_S:g} s: end it, and start again"
        ),
        limit_s=LIMIT_S,
        silent_s=SILENT_S,
        progress=lambda: _size(into),
    )
    try:
        if not is_tokens(into):
            build([path], into, tokenizer=config.tokenizer_type, vocab_size=config.vocab_size).close()
    finally:
        release_lock(lock)
    return str(into)


def _size(folder: Path) -> int:
    """Bytes in a folder that others write to."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone in the meantime
            total += path.stat().st_size
    return total


def wait_for_shards(task: TrialTask, config: Path) -> str | None:
    """Have the shards that a trial reads made, in a process that ends with this one; why that failed, if it did."""
    if task.corpus is None or task.data_path is None or is_tokens(task.data_path):
        return None
    words = [
        sys.executable,
        "-u",
        "-m",
        "roxxel_dist.sweep.trial.corpus",
        str(config),
        task.corpus["text"] or "",
        task.corpus["folder"],
    ]
    process = TrialProcess(words, environment({}), Path(task.log), "shards of the text", task.directory)
    try:
        while process.wait(POLL_S) is None:
            pass
    finally:
        code = process.end()
    return None if code == 0 else last_words(process.output()) or f"exit code {code}"


def main(config: str, data_path: str, folder: str) -> int:
    """`python -m roxxel_dist.sweep.trial.corpus CONFIG DATA FOLDER`: it may take much memory."""
    try:
        make_shards(Config.from_yaml(config), data_path or None, Path(folder))
    except (ValueError, OSError) as error:
        print(f"roxxel-dist: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
