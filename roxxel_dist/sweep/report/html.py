"""A study as one HTML file that needs no other: plots and all trials in it."""

import base64
from html import escape
from pathlib import Path

from roxxel_dist.report import MISSING
from roxxel_dist.sweep.report.text import STATES, summary, varied
from roxxel_dist.sweep.study import Study, flat, short

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
pre { background: #f4f5f7; padding: .8rem; white-space: pre-wrap }
img { max-width: 100%; display: block; margin: .5rem 0 1.5rem }
div { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; white-space: nowrap }
td.reason { white-space: normal; min-width: 20rem }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd } pre { background: #22252b } th, td { border-color: #3a3d44 }
  img { background: white }
}
"""
LARGE = 200
"""Trials from which the page takes seconds, so that something is said meanwhile."""
TITLES = {
    "best_so_far": "Best so far",
    "parallel": "All trials over all parameters",
    "slices": "The metric over each parameter",
    "importance": "Which parameters matter",
    "memory": "Peak memory",
}


def write_report(study: Study, folder: Path) -> tuple[Path, str]:
    """Write plots and page into a folder: (the page, what to say where the plots could not be drawn)."""
    from roxxel_dist.sweep.report.plots import draw

    try:
        pictures, missing = draw(study, folder), ""
    except ImportError:
        pictures, missing = [], MISSING
    parts = [f"<h1>{escape(study.name)}</h1>", f"<pre>{escape(summary(study))}</pre>"]
    for picture in pictures:
        title = TITLES.get(picture.stem) or picture.stem.replace("by_", f"{study.sweep.metric} by ", 1)
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/png;base64,{data}">')
    parts += ["<h2>All trials</h2>", f"<div>{_table(study)}</div>"]
    head = f'<meta charset="utf-8"><title>{escape(study.name)}</title><style>{STYLE}</style>'
    page = folder / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n", encoding="utf-8")
    return page, missing


def _table(study: Study) -> str:
    names = varied(study)
    rank = {trial.number: rank for rank, trial in enumerate(study.done)}
    trials = sorted(study.history.trials.values(), key=lambda trial: (rank.get(trial.number, len(rank)), trial.number))
    rows = ["".join(f"<th>{escape(name)}</th>" for name in ("trial", study.sweep.metric, "", "minutes", *names, ""))]
    for trial in trials:
        params = flat(trial.params)
        cells = [
            f"{trial.number} ★ best" if rank.get(trial.number) == 0 else str(trial.number),
            "" if trial.value is None else f"{trial.value:.6g}",
            STATES[trial.state],
            "" if trial.seconds is None else f"{trial.seconds / 60:.1f}",
            *(short(params.get(name, "-")) for name in names),
        ]
        plain = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'{plain}<td class="reason">{escape(trial.reason or "")}</td>')
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
