"""`python -m roxxel_dist` and the console script `roxxel-dist`."""

import os
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    open_streams()
    from roxxel_dist.cli import main as run

    code = 0
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough: no reason to fail, and nothing may be left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def open_streams() -> None:
    """Give a process that was started with a closed stream (`>&-`, some daemons) the null device for it.

    Else the first file that is opened would have the number of that stream, here and in the processes that are started.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


if __name__ == "__main__":
    main()
