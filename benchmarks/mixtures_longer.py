"""A real sweep over the mixtures of `mixtures.py`, and its winner for ten times the steps, beside natural and uniform
shares.

    JAX_PLATFORMS=cpu python benchmarks/mixtures_longer.py FOLDER [--build] [--quick] [--json FILE]

First `roxxel-dist sweep` with 30 trials of `bayes`, then `roxxel-dist sweep --confirm 10`: what its law predicted, and
what three seeds measured. Then the winner and both baselines are trained with ten more seeds, all three with the same
ones. The same command again goes on where it was. The metric is that of a coding assistant (`sweep_mixtures.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import yaml
from measure import Lines, Result, flags
from mixtures import NAMES, PHASES, SOURCES, Recorder, build, phases, settings
from scipy.stats import t as student
from sweep_mixtures import WEIGHTS

from roxxel_dist.sweep.report.confirmation import confirmation
from roxxel_dist.sweep.study.confirm import BEST, NATURAL, UNIFORM, baselines, shares_of
from roxxel_dist.sweep.study.folder import Study, read_study

ROOT = Path(__file__).parent.parent
PROXIES, TIMES, SEEDS, WINS = 30, 10, 10, 9
QUICK_PROXIES, QUICK_TIMES, QUICK_SEEDS = 4, 2, 2
FIRST_SEED = 101
"""Of the ten: no trial had one of them."""
COUNTS = WEIGHTS["a coding assistant"]


def roxxel(*words: object) -> None:
    command = [sys.executable, "-m", "roxxel_dist", *map(str, words)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=sys.stderr)


def sweep(folder: Path, count: int) -> None:
    """The study, with so many trials."""
    base = settings(folder) | {
        "phases": phases(), "eval_every": sum(PHASES), "log_every": 50, "checkpoint_every": 100_000
    }  # fmt: skip
    metric = {"name": "mean_loss", "goal": "minimize", "weights": dict(COUNTS)}
    files = {
        "base": base,
        "sweep": {"method": "bayes", "metric": metric, "parameters": {}},
        "extras": {"mixtures": [{"phases": [phase], "datasets": {name: {} for name in NAMES}} for phase in (1, 2)]},
    }
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    roxxel("sweep", "--sweep_config", folder / "sweep.yaml", "--extras", folder / "extras.yaml", "--config",
           folder / "base.yaml", "--study", folder / "study", "--count", count, "--workers", 2)  # fmt: skip


def trials(folder: Path, count: int) -> Iterable[Result]:
    """The sweep."""
    sweep(folder, count)
    study = read_study(folder / "study")
    best = study.done[0]
    for name, trial in baselines(study).items():
        yield Result(
            what=f"a sweep of {count} proxies: the best", against=f"% below {name} shares",
            measured=100 * (1 - (best.value or 0) / (trial.value or 1)),
            note=f"trial {best.number}, {best.value:.4f} against {trial.value:.4f}",
        )  # fmt: skip


def confirmed(folder: Path, times: int) -> Iterable[Result]:
    """What the law of the study predicted, and what was measured."""
    roxxel("sweep", "--study", folder / "study", "--confirm", times, "--workers", 2)
    found = confirmation(read_study(folder / "study"))
    assert found is not None
    for one in found.gains:
        verdict = {True: "inside", False: "OUTSIDE", None: "no interval to compare"}[one.is_inside]
        yield Result(
            what=f"--confirm {times}: the best less {one.against}", against="mean_loss, mean of 3 seeds",
            measured=one.measured and one.measured.value,
            note=f"measured {one.measured}, predicted {one.predicted}: {verdict}",
        )  # fmt: skip


def mixtures_of(study: Study) -> dict[str, list[list[float]]]:
    """The winner and the baselines: shares float[2, 5] of each."""
    return {
        name: [[shares_of(trial)[phase, data] for data in NAMES] for phase in (1, 2)]
        for name, trial in {BEST: study.done[0], **baselines(study)}.items()
    }


def values(folder: Path, times: int, seeds: int) -> dict[str, list[float]]:
    """The metric of each mixture with each seed; what was trained before is read."""
    file, made = folder / f"longer{times}.jsonl", mixtures_of(read_study(folder / "study"))
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
    known = {(json.dumps(line["shares"]), line["seed"]): line["losses"] for line in lines}
    recorder = Recorder(folder, times, "apart")
    found: dict[str, list[float]] = {name: [] for name in made}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name, shares in made.items():
            losses = known.get((json.dumps(shares), seed))
            if losses is None:
                losses = {source: curve[-1] for source, curve in recorder.train(shares, seed).items()}
                with file.open("a", encoding="utf-8") as opened:
                    opened.write(json.dumps({"shares": shares, "seed": seed, "losses": losses}) + "\n")
            found[name].append(sum(weight * losses[source] for source, weight in COUNTS.items()))
        print(f"  seed {seed}: " + ", ".join(f"{name} {row[-1]:.4f}" for name, row in found.items()), file=sys.stderr)
    return found


def longer(folder: Path, times: int, seeds: int) -> Iterator[Result]:
    """The winner against both baselines, seed by seed."""
    found = values(folder, times, seeds)
    what = f"the best, {times} x the steps, {seeds} seeds"
    for name in (NATURAL, UNIFORM):
        less = np.subtract(found[BEST], found[name])
        half = float(student.ppf(0.95, seeds - 1)) * stdev(less) / seeds**0.5
        yield Result(
            what=f"{what}: less {name}", against="mean_loss, mean", measured=fmean(less),
            note=f"90 % interval {fmean(less) - half:+.4f} to {fmean(less) + half:+.4f}; "
            f"{fmean(found[BEST]):.4f} against {fmean(found[name]):.4f}; better in {(less < 0).sum()} of {seeds}",
        )  # fmt: skip
    both = np.minimum(found[NATURAL], found[UNIFORM])
    yield Result(what=f"{what}: better than both", against="seeds", measured=int((np.array(found[BEST]) < both).sum()),
                 target=WINS if seeds == SEEDS else None)  # fmt: skip


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path, help="where mixtures.py has its sources")
    parser.add_argument("--build", action="store_true", help="make the sources first")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    if asked.build:
        build(folder)
    assert set(COUNTS) <= set(SOURCES)
    count, times, seeds = (QUICK_PROXIES, QUICK_TIMES, QUICK_SEEDS) if asked.quick else (PROXIES, TIMES, SEEDS)
    report = Lines(asked.json)
    report.add("the sweep", lambda: trials(folder, count))
    report.add("its confirmation", lambda: confirmed(folder, times))
    report.add("ten seeds", lambda: longer(folder, times, seeds))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
