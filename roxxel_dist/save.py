"""Asking a running job for a checkpoint, from another process."""

import time
from pathlib import Path

from roxxel_dist.cluster.save_requests import post_request, take_answer, withdraw
from roxxel_dist.run_directory import CHECKPOINTS, CONFIG, is_held

POLL_S = 0.1


class NotSaved(Exception):
    """The job did not save what it was asked for."""


def ask_for_checkpoint(run: str | Path, timeout_s: float) -> int:
    """Have the job that trains in `run` save its next logged step, wait until that is on disk, and return the step.

    Raises:
        ValueError: `run` is no run directory, or nobody trains there.
        OSError: `run` cannot be written.
        NotSaved: the job failed to save, ended, or did not answer in time.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"{run} is not a run directory: there is no such folder")
    if not ((folder / CONFIG).exists() or (folder / CHECKPOINTS).is_dir()):
        raise ValueError(f"{run} is not a run directory: it has no {CONFIG}")
    if not is_held(folder):
        raise ValueError(f"nobody trains in {run} now: its checkpoints are in {folder / CHECKPOINTS}")
    request = post_request(folder)
    try:
        answer = _wait(folder, request, timeout_s)
    finally:
        withdraw(folder, request)
    if "error" in answer:
        raise NotSaved(answer["error"])
    return answer["step"]


def _wait(folder: Path, request: str, timeout_s: float) -> dict:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        held = is_held(folder)  # before the last look: the job may answer and end in between
        answer = take_answer(folder, request)
        if answer is not None:
            return answer
        if not held:
            raise NotSaved(f"the job in {folder} ended before it saved: what it has is in {folder / CHECKPOINTS}")
        time.sleep(POLL_S)
    raise NotSaved(f"the job in {folder} did not save within {timeout_s:g} s: see its log; wait longer with --timeout")
