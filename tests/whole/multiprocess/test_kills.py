"""kill -9 at chosen kinds of moments: afterwards every loss is that of the run that never stopped, to the bit."""

import itertools
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from commands import environment, rows, wait_for

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("kills")]  # one worker: the undisturbed run is made once
SCRIPT = os.path.join(os.path.dirname(__file__), "blended_run.py")
BLENDED_RUN = runpy.run_path(SCRIPT)
BOUNDARIES, AMEND_AFTER, LAST = (BLENDED_RUN[name] for name in ("BOUNDARIES", "AMEND_AFTER", "LAST"))
SAVE_EVERY = BLENDED_RUN["SAVE_EVERY"]
TIMES = {"ms_per_step", "tokens_per_s", "ram_gb"}
"""Of a row: what may differ between two runs."""
SAVING = re.compile(r"(\d+)\.orbax-checkpoint-tmp-\d+")
MOMENTS = {
    "mid-save": [*range(SAVE_EVERY, LAST - 10, SAVE_EVERY)],
    "boundary": [*BOUNDARIES],
    "amendment": [*range(AMEND_AFTER, AMEND_AFTER + 6)],
    "blend": [*range(BOUNDARIES[0] + 3, AMEND_AFTER - 2), *range(AMEND_AFTER + 8, BOUNDARIES[2] - 2)],
    "mid-phase": [*range(3, BOUNDARIES[0] - 2), *range(BOUNDARIES[-1] + 3, LAST - 10)],
}
"""Steps at which each kind of kill may come: at those a save is under way, or their row has just been logged."""


def start(work, run, **more):
    words = [sys.executable, "-u", SCRIPT, work / "data", work / run, AMEND_AFTER]
    with (work / f"{run}.txt").open("a") as log:
        return subprocess.Popen(
            [*map(str, words)], env=environment(JAX_NUM_CPU_DEVICES="2", **more), stdout=log, stderr=subprocess.STDOUT
        )


def finish(work, run):
    process = start(work, run)
    try:
        code = process.wait(240)
    finally:
        process.kill()
        process.wait()
    assert code == 0, (work / f"{run}.txt").read_text()


def numbers(run):
    """What decides whether two runs are the same one, by step; `rows` sees to it that each step is there once."""
    return {step: {k: v for k, v in row.items() if k not in TIMES} for step, row in rows(run).items()}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the corpora in `data`, and the undisturbed run in `whole`."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "data").mkdir()
    BLENDED_RUN["make_corpora"](folder / "data")
    finish(folder, "whole")
    assert list(numbers(folder / "whole")) == list(range(1, LAST + 1))
    assert "step 56: amended" in (folder / "whole.txt").read_text()
    return folder


def choose(count, chance):
    """(step, kind) of so many kills, as many of each kind as there can be, in order of their steps."""
    left = {kind: chance.sample(steps, len(steps)) for kind, steps in MOMENTS.items()}
    chosen = {}
    for kind in itertools.cycle(MOMENTS):
        if len(chosen) == count:
            return sorted(chosen.items())
        far = [step for step in left[kind] if all(abs(step - other) > 1 for other in chosen)]
        if far:
            chosen[far[0]] = kind
            left[kind].remove(far[0])


def saving(run, since):
    """The newest save after step `since` that is under way, or 0."""
    folder = Path(run) / "checkpoints"
    names = os.listdir(folder) if folder.exists() else []
    steps = [int(found[1]) for name in names if (found := SAVING.fullmatch(name))]
    return max((step for step in steps if step > since), default=0)


def kill(process, run, kind, step, done):
    """End the process without a word at a moment of this kind, at `step` or soon after; returns the last step logged.

    Args:
        done: steps that were logged by the processes before: what is seen of them says nothing of this one.
    """

    def there():
        assert process.poll() is None, f"it ended before {kind} at {step}"
        if kind == "mid-save":
            return saving(run, max(step - 1, done))
        return max(rows(run), default=0) >= max(step, done + 1)

    while True:
        wait_for(there, what=f"{kind} at {step}")
        process.send_signal(signal.SIGSTOP)  # look again, while nothing moves
        if there():
            break
        process.send_signal(signal.SIGCONT)  # the save was over before
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    return max(rows(run))


def kill_again_and_again(work, run, count, seed):
    """After how many of the kills the run went on as if there had been none."""
    expected, done, equal, kills = numbers(work / "whole"), 0, 0, choose(count, random.Random(seed))
    for step, kind in [*kills, (LAST, "")]:
        process = start(work, run)
        try:
            if kind:
                begun, done = done, kill(process, work / run, kind, step, done)
            else:
                begun, done = done, LAST
                assert process.wait(240) == 0, (work / f"{run}.txt").read_text()
        finally:
            process.kill()
            process.wait()
        found = numbers(work / run)
        same = list(found) == list(range(1, done + 1)) and all(found[i] == expected[i] for i in found)
        equal += same and begun > 0
        print(f"ran to step {done:3d}, {'killed: ' + kind if kind else 'the end'}; {'equal' if same else 'DIFFERENT'}")
    print(f"losses after kill -9: {equal} of {len(kills)} equal")
    assert numbers(work / run) == expected
    return equal


def test_killed_and_started_again_it_is_the_same_run(work):
    assert kill_again_and_again(work, "few", 3, random.randrange(1 << 30)) == 3


@pytest.mark.timeout(900)
def test_killed_twenty_times_it_is_the_same_run(work):
    assert kill_again_and_again(work, "many", 20, random.randrange(1 << 30)) == 20


@pytest.fixture
def memory():
    """A job's folder in shared memory, which outlives each of its processes."""
    folder = Path(tempfile.mkdtemp(prefix="test-memory-", dir="/dev/shm"))
    (folder / "key").write_text("ab" * 32)
    yield folder
    shutil.rmtree(folder)


def kill_with_copies(work, memory, count, seed):
    """After how many kills, at random moments and in the middle of copies, the run went on as if without."""
    expected, chance, equal, run, done = numbers(work / "whole"), random.Random(seed), 0, 0, 0
    print(f"seed {seed}")
    for number in range(count):
        if done > LAST - 20:
            run, done = run + 1, 0
        name, more = f"copies-{run}", {"ROXXEL_MEMORY": str(memory), "MEMORY_EVERY": "2"}
        if in_copy := number % 3 == 0:
            more["DIE_IN_COPY"] = str(chance.randrange(20, 120))
        process = start(work, name, **more)
        try:
            if not in_copy:
                until = done + chance.randrange(3, 6)
                wait_for(
                    lambda until=until, name=name: max(rows(work / name), default=0) >= until, what=f"step {until}"
                )
                time.sleep(chance.uniform(0, 0.1))
                process.kill()
            assert process.wait(240) == -signal.SIGKILL, (work / f"{name}.txt").read_text()
        finally:
            process.kill()
            process.wait()
        found = numbers(work / name)
        done = max(found)
        same = list(found) == list(range(1, done + 1)) and all(found[i] == expected[i] for i in found)
        equal += same
        print(f"killed {'in a copy' if in_copy else 'at random'} at step {done}: {'equal' if same else 'DIFFERENT'}")
    process = start(work, name, ROXXEL_MEMORY=str(memory), MEMORY_EVERY="2")
    assert process.wait(240) == 0
    assert numbers(work / name) == expected
    text = "".join(path.read_text() for path in work.glob("copies-*.txt"))
    print(Counter(re.findall(r"resuming after step \d+ of \d+, from (.*)", text)))
    assert text.count("from the copy in shared memory") > count / 2
    shutil.rmtree(work / name)
    return equal


@pytest.mark.timeout(1800)
def test_killed_forty_times_with_copies_in_memory_it_is_the_same_run(work, memory):
    assert kill_with_copies(work, memory, 40, random.randrange(1 << 30)) == 40
