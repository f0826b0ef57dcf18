"""No process and no mount outlives the tests, however they end: by Ctrl-C, by SIGTERM, by kill -9.

A plugin of pytest. All processes below it have its mark in their environment, also those that left its session and
those of Ray, and all mounts of the tests have it in their name. A process of its own waits for the end of pytest, and
ends both. Where that process was killed too, the next run of pytest unmounts: it could not remove the old folders.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "TESTS_OF"
"""The environment variable. Its value is the id of the process of pytest and the time of its start."""
MOUNT = "tests-of-"
"""The name of a mount, before the mark."""
LIMIT_S = 20.0


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # a worker of xdist is a process of the one that has started it
        unmount()
        os.environ[MARK] = mark_of(os.getpid())
        words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[MARK]]
        others = {name: value for name, value in os.environ.items() if name != MARK}
        # It outlives this call, and pytest does not wait for it.
        subprocess.Popen(words, env=others, stdin=subprocess.DEVNULL, start_new_session=True).returncode = 0


def mark_of(pid):
    """The mark of a process of pytest, and of all below it; of one that is gone, another one than it had."""
    with suppress(OSError):
        return f"{pid}-{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    return f"{pid}-gone"


def unmount(ended=""):
    """Takes away the mounts of tests none of whose processes is left; the run with the mark `ended` is over."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        name, folder, *_ = line.split()
        mark = name.removeprefix(MOUNT)
        # A process that sets its mark itself, as pytest without workers, does not have it in /proc/…/environ.
        is_over = mark == ended or mark_of(mark.partition("-")[0]) != mark
        if name.startswith(MOUNT) and is_over and not marked(mark):
            subprocess.run(["umount", "--lazy", folder], check=False)


def marked(mark):
    """Process ids with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def main(pid, mark):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    time.sleep(0.5)  # what ends by itself may do so
    end = time.monotonic() + LIMIT_S
    while (left := marked(mark)) and time.monotonic() < end:
        for process in left:
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                os.kill(process, signal.SIGKILL)
                print(f"left behind by the tests, and killed: {process} {words[:200]}", file=sys.stderr)
        time.sleep(0.1)
    unmount(ended=mark)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
