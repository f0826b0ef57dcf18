"""The command that shows runs, studies and jobs while they live."""

import dataclasses
import sys

import tyro

from roxxel_dist.cli.arguments import parse
from roxxel_dist.config import usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopArgs:
    """Show runs, studies and jobs in the terminal, as they go; it only reads.

    Where standard output is no terminal, or one that cannot move its cursor, it prints one frame. NO_COLOR=1 leaves
    colours out.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run directories, folders of a `sweep`, run ids of jobs, or folders that hold runs; the newest that lives where
    none is given, else a list of what is in `runs` and `studies`."""
    once: bool = False
    """Print one frame and end."""
    json: bool = False
    """Print the numbers of a frame as JSON and end."""


def top(words: list[str]) -> int:
    """Show runs, studies and jobs in the terminal while they live."""
    args = parse(TopArgs, words, "top")
    with usage_errors():
        from roxxel_dist.view.items import Jobs, items_of, read

        items, jobs = items_of(args.names), Jobs()
        states = [read(item, jobs, brief=len(items) > 1 and not args.json) for item in items]
    if args.json:
        import json

        from roxxel_dist.view.values import values

        print(json.dumps([values(state) for state in states], indent=2))
        return 0
    from rich.console import Console

    from roxxel_dist.view import live

    console = Console(emoji=False, highlight=False, markup=False)
    if args.once or console.is_dumb_terminal or not (console.is_terminal and sys.stdin.isatty()):
        live.show(console, states)
    else:
        live.run(console, items)
    return 0
