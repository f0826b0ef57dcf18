"""The command that shows runs, studies and jobs while they live."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.usage_errors import usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopArgs:
    """Show runs, studies and jobs in the terminal or in a browser, while they run. It reads files only.

    If standard output is not a terminal, or one that cannot move its cursor, it prints one frame. NO_COLOR=1 switches
    colours off.
    """

    names: Positional[tuple[str, ...]] = ()
    """Run directories, folders of a `sweep`, run ids of jobs, or folders that hold runs. Default: the newest that is
    running; if none runs, a list of `runs` and `studies`."""
    once: bool = False
    """Print one frame and end."""
    json: bool = False
    """Print the numbers of a frame as JSON and end."""
    web: bool = False
    """Serve a page for a browser on this machine, until Ctrl-C. Without names it shows all of `runs` and `studies`. The
    link has a token: anyone who has the link can read the page."""
    host: str = "127.0.0.1"
    """With `--web`: the address to listen on. Traffic to other machines is not encrypted; use `ssh -L` for that."""
    port: int = 0
    """With `--web`: the port; 0 for a free one."""
    metrics: int | None = None
    """Serve the numbers for Prometheus (OpenMetrics) at this port of this machine, under /metrics, until Ctrl-C; 0 for
    a free port. Without names it serves the runs and jobs that are active. A request needs the token."""
    token_file: str | None = None
    """With `--metrics`: the file of the token, which Prometheus reads too (`credentials_file`). A missing file is made.
    Default: metrics-token in ~/.local/state/roxxel-dist."""


def top(words: list[str]) -> int:
    """Show runs, studies and jobs while they run, in the terminal or a browser."""
    args = parse(TopArgs, words, "top")
    with usage_errors():
        from roxxel_dist.view.items import Watched, read, values

        if args.web:
            return _web(args)
        if args.metrics is not None:
            return _metrics(args)
        if args.token_file is not None:
            raise UserError(f"--token_file {args.token_file} is for --metrics PORT: name the port, or leave it out")
        watched = Watched(args.names)
        if args.json:
            print(json.dumps([values(read(item)) for item in watched.items], indent=2))
            return 0
        from rich.console import Console

        from roxxel_dist.view import live

        class Screen(Console):
            def on_broken_pipe(self) -> None:  # rich would end with 1, without a word
                raise BrokenPipeError

        console = Screen(emoji=False, highlight=False, markup=False)
        is_once = args.once or console.is_dumb_terminal or not (console.is_terminal and sys.stdin.isatty())
        states = [read(item, brief=len(watched.items) > 1) for item in watched.items] if is_once else []
    if is_once:
        live.show(console, states)
    else:
        live.run(console, watched)
    return 0


def _web(args: TopArgs) -> int:
    """Serve the page until the person ends it. Raises ValueError where there is nothing to see, or no such port."""
    from roxxel_dist.view.items import finder
    from roxxel_dist.view.web.server import Feed, PageServer

    if args.once or args.json:
        raise UserError("--web stays until Ctrl-C: leave --once and --json out, or leave --web out")
    if args.metrics is not None:
        raise UserError(f"--metrics {args.metrics} and --web: each stays until Ctrl-C; use two commands")
    feed = Feed(finder(args.names))
    with PageServer(feed, args.host, args.port) as server:
        print(f"page: {server.link}")
        print(f"from another machine: {server.tunnel}\nthen open the same link there; Ctrl-C stops it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        server.ended.set()
    return 0


def _metrics(args: TopArgs) -> int:
    """Serve the numbers until the person ends it. Raises ValueError for an unknown name, or a port in use."""
    from roxxel_dist.view.items import finder
    from roxxel_dist.view.web.metrics_server import PATH, MetricsServer, Scrapes, default_token_file, token_of

    if args.once or args.json:
        raise UserError("--metrics stays until Ctrl-C: leave --once and --json out, or leave --metrics out")
    if args.host != TopArgs.host or args.port:
        raise UserError("--host and --port are for --web: --metrics PORT listens at this machine alone; use `ssh -L`")
    find = finder(args.names)
    if args.names:
        find()
    path = default_token_file() if args.token_file is None else Path(args.token_file)
    with MetricsServer(Scrapes(find, all_items=bool(args.names)), args.metrics or 0, token_of(path)) as server:
        print(f"metrics: {server.place}{PATH}\ntoken file: {path}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
