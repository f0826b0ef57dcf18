"""Searches of mixtures: on the recorded trainings of `mixtures.jsonl`, and on sources whose best mixture is known.

    python benchmarks/sweep_mixtures.py [--quick] [--seeds 20] [--json FILE]

Recorded: what a search proposes becomes the nearest mixture that was recorded and not tried yet, and the search gets
that one and its recorded losses. Half of the mixtures are kept apart, and the table is theirs. `bayes` has the loss of
each source, as in a sweep, and so it has laws; `bayes, no law` has the metric alone. With `asha` a trial is paused
where it is not among the best third, after 1 and 3 of its 4 reports, and only a trial that came to its end counts.
RegMix's recipe (Liu et al. 2024, arXiv 2407.01492) trains proxies of random mixtures, fits a regression of the loss on
the shares, and trains the mixture that it says is best; the better of a linear and a quadratic ridge regression counts.

Sources: Markov chains, and a bigram model that was trained on so much of each: its loss on a text of interest is known
in closed form, so the best shares are known too, and any shares can be tried.

Intervals: a law of some recorded trainings says what the others measured, each source for itself. The share of the
others that its intervals of 90 % hold, with the noise of a training: what is left of those that the law was fitted to.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import Lines, Result, flags
from numpy.typing import NDArray
from scipy.optimize import minimize

from roxxel_dist.sweep.driver.recorded import RecordedSearch
from roxxel_dist.sweep.samplers import Engine, make
from roxxel_dist.sweep.samplers.law import Law
from roxxel_dist.sweep.space.mixture import MixtureSpace, mixture_space
from roxxel_dist.sweep.space.sweep_file import Sweep, sweep_of

Array = NDArray[np.float64]
FILE = Path(__file__).parent / "mixtures.jsonl"
SEEDS, QUICK_SEEDS, PROXIES = 20, 4, 30
NEAR = 0.005
"""Of the best recorded loss: what a search is to come within."""
WEIGHTS = {
    "a coding assistant": {"python": 0.4, "docs": 0.3, "headers": 0.2, "man": 0.1},
    "all equal": {"python": 0.2, "headers": 0.2, "docs": 0.2, "man": 0.2, "licences": 0.2},
}
"""What the losses of the sources count in the metric."""
NO_LAW = "bayes, no law"
METHODS = ("bayes", NO_LAW, "tpe", "random")
ASHA = {"type": "asha", "min_iter": 1, "eta": 3}
REGMIX = tuple(range(10, 121, 10))
"""Proxies of RegMix's recipe."""
FITTED, CHOICES, QUICK_CHOICES = (40, 150), 20, 4
"""Trainings that a law is fitted to, and how often they are chosen."""


class Table:
    """Recorded mixtures and their losses.

    Args:
        weights: of the sources in the metric.
        apart: the half that is kept apart; False: the other one; None: both.
    """

    def __init__(self, weights: dict[str, float], *, apart: bool | None = True) -> None:
        head, *lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
        self.head: dict[str, Any] = head
        self.steps: int = sum(head["phases"])
        """Of a training."""
        runs = [line for line in lines if line["seed"] == 0]
        halves = (0, 1) if apart is None else (apart,)
        # Natural and uniform shares are in both halves.
        chosen = [
            0,
            1,
            *(2 + np.flatnonzero(np.isin(np.random.default_rng(1).permutation(len(runs) - 2) % 2, halves))).tolist(),
        ]
        self.names: list[str] = [name for name in head["sources"] if name in weights]
        """Of the t sources that count."""
        self.shares: Array = np.array([np.ravel(runs[i]["shares"]) for i in chosen])
        """float64[n, K]."""
        self.curves: Array = np.array([[runs[i]["losses"][name] for name in self.names] for i in chosen]).swapaxes(1, 2)
        """float64[n, reports, t]."""
        self.losses: Array = self.curves[:, -1]
        """float64[n, t]."""
        self.values: Array = self.losses @ np.array([weights[name] for name in self.names])
        """float64[n], the metric."""
        size = len(head["sources"])
        tokens = [float(count) for count in head["tokens"]]
        self.spaces: list[MixtureSpace] = [
            mixture_space((phase,), head["sources"], tokens=tokens)
            for phase in range(1, self.shares.shape[1] // size + 1)
        ]
        self.sweep: Sweep = _sweep(self.spaces, {name: weights[name] for name in self.names})

    def nearest(self, shares: Array, tried: Sequence[int]) -> int:
        """The recorded mixture next to some shares that was not tried yet."""
        distances = ((self.shares - shares) ** 2).sum(axis=1)
        distances[list(tried)] = np.inf
        return int(distances.argmin())


def _sweep(spaces: Sequence[MixtureSpace], weights: dict[str, float]) -> Sweep:
    """A sweep of these mixtures, and nothing else; natural shares are known, as where a sweep has its data."""
    mixtures = [{"phases": list(one.phases), "datasets": {name: {} for name in one.names}} for one in spaces]
    metric = {"name": "mean_loss", "weights": weights}
    sweep = sweep_of({"metric": metric, "parameters": {}}, {"mixtures": mixtures})
    return replace(sweep, space=replace(sweep.space, mixtures=tuple(spaces)))


def _tell(engine: Engine, trial: int, sweep: Sweep, losses: Array, method: str) -> None:
    """The end of a trial: its metric, and the loss of each source, float64[t], where the method is to know it."""
    known = dict(zip(sweep.weights, losses.tolist(), strict=True))
    value = sum(weight * known[name] for name, weight in sweep.weights.items())
    engine.tell(trial, value, () if method == NO_LAW else [(1, known)])


def _engine(sweep: Sweep, seed: int, method: str) -> Engine:
    return make(sweep, seed, "bayes" if method == NO_LAW else method)


def engine_search(table: Table, method: str, seed: int, count: int) -> list[int]:
    """The recorded mixtures that a method of sweeps tries, in order: natural and uniform shares are the first two.

    An engine that has what was tried in its history proposes what a sweep with that journal does.
    """
    tried: list[int] = []
    while len(tried) < count:
        engine = _engine(table.sweep, seed, method)
        for number, row in enumerate(tried):
            params = params_of(table.spaces, table.shares[row])
            engine.restore(number, params, point_of(table.spaces, table.shares[row]))
            _tell(engine, number, table.sweep, table.losses[row], method)
        _, params = engine.ask()
        tried.append(table.nearest(shares_of(table.spaces, params), tried))
    return tried


class Paused(RecordedSearch):
    """A search with `ASHA`: each trial that begins becomes a recorded mixture, as in `engine_search`."""

    def __init__(self, table: Table, seed: int) -> None:
        self.rows: list[int] = []
        """The mixture of each trial."""
        self._of = table
        super().__init__(replace(table.sweep, early_terminate=ASHA), lambda params: table.curves[self.rows[-1]], seed)
        self.each: int = table.head["every"]

    def _apply(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "ask":
            spaces = self._of.spaces
            self.rows.append(self._of.nearest(shares_of(spaces, event["params"]), self.rows))
            shares = self._of.shares[self.rows[-1]]
            event = {**event, "params": params_of(spaces, shares), "point": point_of(spaces, shares)}
        super()._apply(event)


def steps_with_asha(table: Table, seed: int) -> float:
    """The steps of all trials until one that came to its end is within `NEAR`; infinite after `PROXIES` full trials."""
    search, enough = Paused(table, seed), table.values.min() * (1 + NEAR)
    while search.history.steps < PROXIES * table.steps and search.advance(1):
        for number, trial in search.history.trials.items():
            if len(trial.reports) == table.curves.shape[1] and table.values[search.rows[number]] <= enough:
                return search.history.steps
    return float("inf")


def params_of(spaces: Sequence[MixtureSpace], shares: Array) -> dict[str, float]:
    """The parameters of a trial with these shares."""
    names = [key for space in spaces for key in space.keys]
    return {name: float(share) for name, share in zip(names, shares, strict=True)}


def shares_of(spaces: Sequence[MixtureSpace], params: dict[str, Any]) -> Array:
    """The shares of a trial, side by side."""
    return np.array([params[key] for space in spaces for key in space.keys], np.float64)


def point_of(spaces: Sequence[MixtureSpace], shares: Array) -> list[float]:
    """Where in the cube shares are."""
    ends = np.cumsum([len(space.names) for space in spaces])
    parts = np.split(shares, ends[:-1])
    return [float(x) for space, part in zip(spaces, parts, strict=True) for x in space.to_cube(part)]


def features(shares: Array, *, quadratic: bool) -> Array:
    """The shares, and their products."""
    if not quadratic:
        return shares
    first, second = np.triu_indices(shares.shape[1])
    return np.hstack([shares, shares[:, first] * shares[:, second]])


def ridge(given: Array, values: Array, asked: Array) -> Array:
    """A ridge regression's predictions, its penalty chosen by generalised cross-validation."""
    mean, middle = given.mean(axis=0), values.mean()
    u, sizes, v = np.linalg.svd(given - mean, full_matrices=False)
    along, best = u.T @ (values - middle), (np.inf, np.zeros(given.shape[1]))
    for penalty in np.geomspace(1e-6, 1e2, 25):
        kept = sizes**2 / (sizes**2 + penalty)
        error = ((values - middle - u @ (kept * along)) ** 2).sum() / (len(values) - 1 - kept.sum()) ** 2
        if error < best[0]:
            best = error, v.T @ (sizes / (sizes**2 + penalty) * along)
    return middle + (asked - mean) @ best[1]


def regmix(table: Table, seed: int, count: int, *, quadratic: bool) -> list[int]:
    """The mixtures that RegMix's recipe trains: random proxies, and what a regression on them says is best."""
    tried = np.random.default_rng(seed).permutation(len(table.shares))[:count].tolist()
    rows = features(table.shares, quadratic=quadratic)
    predicted = ridge(rows[tried], table.values[tried], rows)
    predicted[tried] = np.inf
    return [*tried, int(predicted.argmin())]


def over_best(table: Table, tried: Sequence[int], count: int) -> float:
    """How far the best of the first so many is above the best of the table, as a share of it."""
    return float(table.values[list(tried[:count])].min() / table.values.min() - 1)


def first_near(table: Table, tried: Sequence[int]) -> float:
    """After how many trials a search is within `NEAR`; infinite if it never is."""
    return next((n for n in range(1, len(tried) + 1) if over_best(table, tried, n) <= NEAR), float("inf"))


def recorded(seeds: int) -> Iterable[Result]:
    """The table of each metric."""
    for name, weights in WEIGHTS.items():
        table = Table(weights)
        size, best = len(table.values), table.values.min()
        near = int((table.values <= best * (1 + NEAR)).sum())
        what, note = f"recorded mixtures, {name}", f"{near} of {size} mixtures are within {NEAR:.1%}"
        for title, row in (("natural", 0), ("uniform", 1)):
            yield Result(what=f"{what}: {title} shares", against="% above the best of the part kept apart",
                         measured=100 * (table.values[row] / best - 1), note=note)  # fmt: skip
        found = {method: list(searches(table, method, seeds, size)) for method in METHODS}
        needs = {}
        for method, tried in found.items():
            after = [100 * over_best(table, one, PROXIES) for one in tried]
            needs[method] = statistics.median(first_near(table, one) for one in tried)
            yield Result(
                what=f"{what}: {method}, {PROXIES} proxies", against="% above the best, median",
                measured=statistics.median(after), target=100 * NEAR if method == "bayes" else None,
                at_most=True, note=f"{sum(x <= 100 * NEAR for x in after)} of {seeds} seeds within {NEAR:.1%}; "
                f"within it after {needs[method]:g} trials (median)",
            )  # fmt: skip
        yield from against_regmix(table, what, seeds, needs)


def searches(table: Table, method: str, seeds: int, size: int) -> Iterator[list[int]]:
    """What a method tries with each seed."""
    count = min(size, PROXIES)
    for seed in range(seeds):
        print(f"  {method}, seed {seed}", file=sys.stderr, flush=True)
        if method == "random":
            order = 2 + np.random.default_rng(seed).permutation(size - 2)
            yield [0, 1, *order.tolist()][:count]
        else:
            yield engine_search(table, method, seed, count)


def against_regmix(table: Table, what: str, seeds: int, needs: dict[str, float]) -> Iterable[Result]:
    """RegMix's recipe with more and more proxies, and the steps that it needs beside those of ours."""
    needed = float("inf")
    for count in REGMIX:
        if count >= len(table.values):
            break
        kinds = {
            kind: statistics.median(
                over_best(table, regmix(table, seed, count, quadratic=kind == "quadratic"), count + 1)
                for seed in range(seeds)
            )
            for kind in ("linear", "quadratic")
        }
        kind = min(kinds, key=lambda one: kinds[one])
        needed = min(needed, count + 1) if kinds[kind] <= NEAR else needed
        yield Result(what=f"{what}: RegMix's recipe, {count} proxies", against="% above the best, median",
                     measured=100 * kinds[kind], note=f"{kind} regression")  # fmt: skip
    paused = statistics.median(steps_with_asha(table, seed) for seed in range(seeds))
    for title, steps in (("bayes", needs["bayes"] * table.steps), ("bayes with asha", paused)):
        ratio = steps / (needed * table.steps)
        yield Result(
            what=f"{what}: steps of {title} to come within {NEAR:.1%}", against="x those of RegMix's recipe",
            measured=ratio if np.isfinite(ratio) else None, target=0.25 if title != "bayes" else None, at_most=True,
            failed="" if np.isfinite(ratio) else f"it did not come so near in the steps of {PROXIES} trials",
            note=f"{steps:g} steps against {needed * table.steps:g}, medians",
        )  # fmt: skip


def intervals(choices: int) -> Iterable[Result]:
    """How often a law of recorded trainings holds the others, and their differences; a source each, mean of choices."""
    table = Table(WEIGHTS["all equal"], apart=None)
    for count in FITTED:
        held = np.array([_held(table, count, np.random.default_rng([seed, count])) for seed in range(choices)])
        for what, values in zip(("trainings", "differences of two"), 100 * held.mean(axis=0), strict=True):
            each = ", ".join(f"{name} {value:.0f}" for name, value in zip(table.names, values, strict=True))
            yield Result(
                what=f"a law of {count} recorded trainings: {what} in its intervals", against="% of the others",
                measured=float(values.mean()), note=f"{each}; {choices} choices of the {count}",
            )  # fmt: skip


def _held(table: Table, count: int, rng: np.random.Generator) -> Array:
    """float64[2, t]: of trainings that the law does not know, and of differences of two, the share that it holds."""
    order = rng.permutation(len(table.shares))
    known, others = order[:count], order[count:]
    law = Law.fit(table.shares[known], table.losses[known])
    free = table.shares.shape[1] - len(table.spaces) + 1
    noise = np.sqrt(((law.trials - law.fitted()) ** 2).sum(axis=0) / (count - free))
    draws = law.draws(table.shares[others])
    draws += noise * rng.standard_normal(draws.shape)
    first, second = np.split(rng.permutation(len(others))[: len(others) // 2 * 2], 2)
    true, found = table.losses[others], []
    for said, measured in ((draws, true), (draws[:, first] - draws[:, second], true[first] - true[second])):
        low, high = np.quantile(said, (0.05, 0.95), axis=0)
        found.append(((low <= measured) & (measured <= high)).mean(axis=0))
    return np.stack(found)


class Sources:
    """Markov chains over a few symbols, and a bigram model that is trained on a blend of them.

    The model has seen `SEEN` transitions, `r_i` of them from chain i, and one more of each kind in all. Its loss on the
    text of a chain is a cross-entropy in closed form. What counts are the losses of all chains, with weights.

    Args:
        seed: of the chains, their sizes, and the weights.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        common = rng.dirichlet(np.full(SYMBOLS, 0.5), SYMBOLS)
        chains = [0.5 * common + 0.5 * rng.dirichlet(np.full(SYMBOLS, 0.2), SYMBOLS) for _ in range(CHAINS)]
        self._pairs: Array = np.stack([_stationary(chain)[:, None] * chain for chain in chains])
        self.weights: Array = rng.dirichlet(np.full(CHAINS, 0.7))
        tokens = rng.uniform(0.1, 1, CHAINS) ** 2
        self.space: MixtureSpace = mixture_space((1,), [f"chain{i}" for i in range(CHAINS)], tokens=tokens)
        self.best: float = min(self._descend(start) for start in (self.space.natural, self.space.uniform, self.weights))

    def losses(self, shares: Array) -> Array:
        """float64[CHAINS], in nats, of float64[CHAINS]."""
        seen = SEEN * np.tensordot(shares, self._pairs, 1) + 1 / SYMBOLS
        return -(self._pairs * np.log(seen / seen.sum(axis=1, keepdims=True))).sum(axis=(1, 2))

    def value(self, shares: Array) -> float:
        """The metric."""
        return float(self.losses(shares) @ self.weights)

    def regret(self, shares: Array) -> float:
        """How far the metric is above that of the best shares, in percent of it."""
        return 100 * (self.value(shares) / self.best - 1)

    def _descend(self, start: Array) -> float:
        """The least value from a start: the problem is convex, except for unseen pairs."""
        equal = {"type": "eq", "fun": lambda r: r.sum() - 1}
        found = minimize(self.value, start, method="SLSQP", bounds=[(0, 1)] * CHAINS, constraints=[equal],
                         options={"maxiter": 500, "ftol": 1e-12})  # fmt: skip
        return self.value(np.clip(found.x, 0, 1) / np.clip(found.x, 0, 1).sum())


SYMBOLS, CHAINS, SEEN, NOISE = 16, 5, 20_000, 0.002
"""Of `Sources`; the noise of a reported loss, as a share of it."""


def _stationary(chain: Array) -> Array:
    state = np.full(len(chain), 1 / len(chain))
    for _ in range(200):
        state = state @ chain
    return state


def known_sources(seeds: int) -> Iterable[Result]:
    """The regret of each search, with the best known."""
    for title, search in SEARCHES.items():
        regrets = [search(Sources(seed), seed) for seed in range(seeds)]
        yield Result(
            what=f"Markov sources: regret of {title}", against="% above the best, median",
            measured=statistics.median(regrets), note=f"the worst seed {max(regrets):.2g}",
        )  # fmt: skip


def _by_engine(method: str) -> Callable[[Sources, int], float]:
    """A method of sweeps, whose last word is its best trial."""

    def search(sources: Sources, seed: int) -> float:
        rng, spaces = np.random.default_rng(seed), [sources.space]
        sweep = _sweep(spaces, dict(zip(sources.space.names, sources.weights.tolist(), strict=True)))
        engine, found = _engine(sweep, seed, method), []
        for _ in range(PROXIES):
            trial, params = engine.ask()
            shares = shares_of(spaces, params)
            losses = _noisy(sources, shares, rng)
            found.append((float(losses @ sources.weights), shares))
            _tell(engine, trial, sweep, losses, method)
        return sources.regret(min(found, key=lambda one: one[0])[1])

    return search


def _by_regmix(sources: Sources, seed: int) -> float:
    """RegMix's recipe: the better of its two regressions chooses among ten thousand mixtures."""
    rng = np.random.default_rng(seed)
    shares = np.stack([sources.space.sample(rng) for _ in range(PROXIES)])
    values = np.array([_noisy(sources, row, rng) @ sources.weights for row in shares])
    asked = sources.space.from_cube(rng.random((10_000, sources.space.axes)))
    kinds = [(features(shares, quadratic=kind), features(asked, quadratic=kind)) for kind in (False, True)]
    return min(sources.regret(asked[ridge(given, values, rows).argmin()]) for given, rows in kinds)


def _noisy(sources: Sources, shares: Array, rng: np.random.Generator) -> Array:
    losses = sources.losses(shares)
    return losses * (1 + NOISE * rng.standard_normal(len(losses)))


SEARCHES: dict[str, Callable[[Sources, int], float]] = {
    "natural": lambda sources, seed: sources.regret(sources.space.natural),
    "uniform": lambda sources, seed: sources.regret(sources.space.uniform),
    "RegMix's recipe": _by_regmix,
    **{method: _by_engine(method) for method in METHODS},
}


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--seeds", type=int)
    asked = parser.parse_args()
    report = Lines(asked.json)
    seeds = asked.seeds or (QUICK_SEEDS if asked.quick else SEEDS)
    report.add("intervals", lambda: intervals(QUICK_CHOICES if asked.quick else CHOICES))
    report.add("recorded mixtures", lambda: recorded(seeds))
    report.add("sources whose best mixture is known", lambda: known_sources(seeds))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
