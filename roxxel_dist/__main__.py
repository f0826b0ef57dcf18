"""`python -m roxxel_dist` and the console script `roxxel-dist`."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from roxxel_dist.cli import main as run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
