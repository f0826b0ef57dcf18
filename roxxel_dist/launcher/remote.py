"""Jobs whose controller runs on another host: their entries are brought from there, and commands go on there."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from typing import IO

from roxxel_dist.launcher import registry
from roxxel_dist.launcher.backends import make
from roxxel_dist.launcher.registry import Entry
from roxxel_dist.launcher.slurm_job import GOES_ON, job_state

PROGRAM = "roxxel_dist"
HERE = "--here"
"""Tells the command there that it is at its place, whatever its machine calls itself by now."""
ASK_S = 20.0
ALIVE = (*GOES_ON, "SUSPENDED", "STOPPED", "COMPLETING")
"""States of a SLURM job whose launcher may live."""
NO_WAY = 255
"""How ssh ends when it cannot reach the host, or is cut off from it."""


def relay(entry: Entry, command: str, *options: str) -> int:
    """Run `COMMAND RUN OPTIONS` on the host of the controller, show what it says here, and return its exit code."""
    assert entry.via is not None
    assert entry.controller_host is not None
    words = (command, registry.path_of(entry).stem, *options, HERE)
    argv = make(entry.via).argv(entry.controller_host, PROGRAM, *words)
    # In this process group: a terminal that is closed ends both.
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    errors = threading.Thread(target=_pump, args=(process.stderr, sys.stderr.buffer), daemon=True)
    errors.start()
    try:
        _pump(process.stdout, sys.stdout.buffer)
        errors.join()
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        errors.join()
        process.stdout.close()
        process.stderr.close()
    if code == NO_WAY:
        where = f"cannot ask {entry.controller_host}, where its launcher is: the job may well go on"
        print(f"roxxel-dist: run {entry.run_id}: {where}", file=sys.stderr, flush=True)
    return code


def _start(entry: Entry, *words: str) -> subprocess.Popen[bytes]:
    assert entry.via is not None
    assert entry.controller_host is not None
    process = make(entry.via).start(entry.controller_host, PROGRAM, *words)
    assert isinstance(process, subprocess.Popen)  # a backend that can be described starts programs of this machine
    if process.stdin is not None:
        process.stdin.close()
        process.stdin = None  # or `communicate` flushes it
    return process


def _pump(source: IO[bytes], target: IO[bytes]) -> None:
    while data := source.read1(1 << 16):  # pyright: ignore[reportAttributeAccessIssue]
        target.write(data)
        target.flush()


def refresh(entries: list[Entry]) -> list[str]:
    """Bring the entries of living jobs from their hosts, all at once; what went wrong, a line a host."""
    jobs: dict[str, list[Entry]] = {}
    for entry in entries:
        jobs.setdefault(json.dumps([entry.controller_host, entry.via], sort_keys=True), []).append(entry)
    asked: list[tuple[list[Entry], subprocess.Popen[bytes]]] = []
    problems = []
    for group in jobs.values():
        via = group[0].via
        if via is not None and via["kind"] == "slurm" and job_state(via["job_id"]) not in ALIVE:
            _keep(group, [])
            continue
        try:
            asked.append((group, _start(group[0], "ps", "--all", "--json", HERE)))
        except (ValueError, OSError) as error:  # its ssh configuration is gone, for instance
            problems.append(_problem(group, str(error)))
    for group, process in asked:
        told, reason = _answer(process)
        if told is None:
            problems.append(_problem(group, reason))
        else:
            _keep(group, told)
    return problems


def _keep(group: list[Entry], told: list[Entry]) -> None:
    """Write what a host told of these jobs. One that it does not know any more was over long ago."""
    news = {registry.path_of(entry): entry for entry in told}
    for entry in group:
        with contextlib.suppress(OSError):
            registry.write(news.get(registry.path_of(entry)) or dataclasses.replace(entry, state="lost"))


def _problem(group: list[Entry], reason: str) -> str:
    return f"cannot ask {group[0].controller_host} ({reason}): its jobs are shown as they were last known"


def _answer(process: subprocess.Popen[bytes]) -> tuple[list[Entry] | None, str]:
    """What the host told, or why it did not."""
    try:
        out, err = process.communicate(timeout=ASK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, f"no answer within {ASK_S:g} s"
    try:
        return [registry.from_values(values) for values in json.loads(out)], ""
    except (ValueError, TypeError, KeyError):
        said = err.decode(errors="backslashreplace").strip().splitlines()
        return None, said[-1] if said else f"exit code {process.returncode}"
