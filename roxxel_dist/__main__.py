"""`python -m roxxel_dist` and the console script `roxxel-dist`."""

import os
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from roxxel_dist.cli import main as run

    code = 0
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough: no reason to fail, and nothing may be left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    main()
