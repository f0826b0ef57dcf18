"""The picture at the top of the page: this project, its peers and the limit of the machine, on one axis of speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure import Result
from pictures import REACHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEER, LIMIT = "#d9730d", "black"
WIDEST = 60.0
"""Speeds beyond this factor are drawn at the edge; the number beside them is the true one."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row of the picture."""

    title: str
    table: str
    what: str
    """How the results in the table begin; empty: each result has a text of its own, which is the key of `peers`."""
    peers: Mapping[str, str]
    """Names by the results' `against`."""
    limit: Mapping[str, str]
    """The same, of what cannot be faster: the bare operation without this project."""

    def speeds(self, results: Sequence[Result], names: Mapping[str, str]) -> dict[str, float]:
        """The speed of each name in `names` over that of this project, as far as it was measured."""
        found = {}
        for result in results:
            key = result.against if self.what else result.what
            if key in names and result.what.startswith(self.what) and result.measured:
                # What has an upper bound is a time over the peer's, else it is a speed over the peer's.
                found.setdefault(names[key], result.measured if result.at_most else 1 / result.measured)
        return found


KILL = "kill -9 of a rank, 2 hosts of 2 ranks"
COMPARISONS = (
    Comparison(
        title="shuffled batches to numpy", table="data_read", what="16x1025 to numpy",
        peers={"x torch DataLoader": "torch DataLoader", "x grain": "grain"},
        limit={"x sequential copy": "copy of the same bytes in order"},
    ),
    Comparison(
        title="batches to 8 devices", table="data_read", what="16x1025 to 8 devices",
        peers={"x roxxel": "roxxel", "x grain + the same put": "grain"},
        limit={"x raw slice + the same put": "bare put"},
    ),
    Comparison(
        title="rows from a bucket", table="remote_data", what="the same rows as fast as it goes, same link",
        peers={f"x grain over fsspec, {threads} threads": f"grain, {threads} threads" for threads in (64, 16)},
        limit={},
    ),
    Comparison(
        title="data build", table="data_build", what="data build of ", peers={},
        limit={"x bare encode_batch, wall time": "bare tokenizer"},
    ),
    Comparison(
        title="training step", table="train_loop", what="wall clock, logging and checkpointing", peers={},
        limit={"x the bare step": "bare compiled step"},
    ),
    Comparison(
        title="end of a job after kill -9", table="launch", what="",
        peers={f"{KILL}: over torchrun, static": "torchrun, static", f"{KILL}: over torchrun, c10d": "torchrun, c10d"},
        limit={},
    ),
    Comparison(
        title="driver of a sweep", table="sweep_driver", what="driver, a no-op trial",
        peers={"x Ray Tune": "Ray Tune"}, limit={},
    ),
)  # fmt: skip


def draw_overview(found: Mapping[str, Sequence[Result]], path: Path) -> bool:
    """Write the picture of the comparisons that were measured; False, and no file, where there is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = []
    for one in COMPARISONS:
        results = found.get(one.table, ())
        peers, limit = one.speeds(results, one.peers), one.speeds(results, one.limit)
        if peers or limit:
            shown.append((one.title, peers, limit))
    if not shown:
        path.unlink(missing_ok=True)
        return False
    figure = Figure(figsize=(8.0, 0.9 + 0.5 * len(shown)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axvline(1.0, color=REACHED, linewidth=2.5, zorder=1)
    for place, (_, peers, limit) in enumerate(reversed(shown)):
        for number, (name, speed) in enumerate(peers.items()):
            _mark(axes, place, name, speed, below=bool(number % 2))
        for name, speed in limit.items():
            _mark(axes, place, name, speed, below=True, is_limit=True)
    axes.set_xscale("log")
    axes.set_xlim(1 / WIDEST / 1.5, 8)
    axes.set_yticks(range(len(shown)), [title for title, *_ in reversed(shown)], fontsize=8)
    axes.set_ylim(-0.6, len(shown) - 0.3)
    axes.set_xticks(
        [1 / 50, 1 / 20, 1 / 10, 1 / 5, 1 / 2, 1, 2, 5], ["1/50", "1/20", "1/10", "1/5", "1/2", "1", "2", "5"]
    )
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("speed over that of roxxel-dist (line at 1): further left is slower; logarithmic", fontsize=7)
    axes.set_title("roxxel-dist (blue line), peers (orange), the machine's limit (black)", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
    return True


def _mark(axes: "Axes", place: int, name: str, speed: float, *, below: bool, is_limit: bool = False) -> None:
    """A mark and its name; beyond the edge an arrow."""
    at, colour = max(speed, 1 / WIDEST), LIMIT if is_limit else PEER
    marker = "|" if is_limit else "o" if at == speed else "<"
    axes.plot([at], [place], marker=marker, color=colour, markersize=9 if is_limit else 6)
    times = f"1/{1 / speed:,.{0 if speed < 0.1 else 1}f}" if speed < 0.95 else f"{speed:.2f}"
    axes.annotate(
        f"{name} {times}", (at, place), xytext=(0, -11 if below else 6), textcoords="offset points", fontsize=6.5,
        ha="center" if at == speed else "left", color=colour,
    )  # fmt: skip
