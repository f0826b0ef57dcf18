"""Mixtures and ends of phases in a sweep: passes, baselines, replays, and what a trial trains on."""

import json
import math
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searched_data import ONE, PHASES, SETS, TOKENS, base_of, entry, opened

from roxxel_dist.cli import main
from roxxel_dist.curriculum.phases import phases_of
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.units import APART
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.data_search import changed_data, with_data
from roxxel_dist.sweep.samplers import Engine, SpaceExhausted, make
from roxxel_dist.sweep.space.extras import DataExtras, MixtureSpec
from roxxel_dist.sweep.space.passes import PassBudget
from roxxel_dist.sweep.space.sweep_file import InfeasibleError, Sweep, sweep_of
from roxxel_dist.sweep.study.journal import Trial
from roxxel_dist.sweep.train_sweep import _command
from roxxel_dist.sweep.trial.trial import config_of

SWEEPS = Path(__file__).parent.parent.parent / "sweeps"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return base_of(tmp_path_factory.mktemp("data"))


def drawn(chance: random.Random) -> tuple[DataExtras, list[dict[str, Any]], dict[str, list[tuple[int, int]]]]:
    """A random search over two to five data sets in one to three phases, some with shares of their own."""
    names = ["self", "code", "math", "web", "books"][: chance.randint(2, 5)]
    ranges = {name: [(0, chance.randint(3_000, 15_000)) for _ in range(chance.randint(1, 3))] for name in names}
    phases: list[dict[str, Any]] = [
        {
            "steps": chance.randint(20, 300), "batch_size": chance.choice([2, 4, 8]),
            "seq_len": chance.choice([17, 33, 65]), "blend": chance.choice(["row", "step"]),
        }
        for _ in range(chance.randint(1, 3))
    ]  # fmt: skip
    entries, free = [], list(range(1, len(phases) + 1))
    while free and (not entries or chance.random() < 0.7):
        of = tuple(free.pop(0) for _ in range(min(len(free), chance.choice([1, 1, 2]))))
        chosen = chance.sample(names, chance.randint(2, len(names)))
        bounds = {name: (chance.choice([0.0, 0.0, 0.1]), chance.choice([1.0, 1.0, 0.6])) for name in chosen}
        entries.append(MixtureSpec(phases=of, bounds=bounds, max_passes=chance.choice([0.5, 1, 1.5, 2, 4, None])))
    for number in free:
        phases[number - 1]["weights"] = {name: chance.random() + 0.01 for name in names}
    ends = {}
    if len(phases) > 1 and chance.random() < 0.5:
        ends = sweep_of({"metric": {"name": "val_loss"}}, {"phase_ends": {1: [0.2, 0.9]}}).data.ends
    return DataExtras(mixtures=tuple(entries), ends=ends), phases, ranges


def asked(extras: DataExtras, phases: Any, ranges: Any, method: str, count: int) -> list[tuple[Any, PassBudget]]:
    """Parameters that a search over it asks for; none where nothing is left."""
    budget = PassBudget(extras=extras, phases=phases, ranges=ranges)
    plain = sweep_of({"metric": {"name": "val_loss"}}, {"phase_ends": {1: [0.2, 0.9]}})
    space = type(plain.space)(parameters=tuple(extras.ends.values()))
    sweep = Sweep(method=method, metric="val_loss", goal="minimize", space=space, data=extras)
    try:
        engine = make(sweep.with_budget(budget), 0, accept=budget.check_plan)
        return [(engine.ask()[1], budget) for _ in range(count)]
    except (SpaceExhausted, ValueError):
        return []


def plan_counts(params: Any, budget: PassBudget) -> tuple[Plan, dict[str, float], dict[str, int]]:
    """The plan that `train` makes of it: itself, rows read over rows of a pass, and passes begun, of each data set."""
    config = config_of({"phases": budget.phases, "vocab_size": 64}, params, groups=budget.extras.groups)
    assert config.passes == "apart"
    plan = Plan([p.shape for one in config.phases for p in phases_of(one)], budget.ranges, 3, order=APART)
    passes, begun, first = dict.fromkeys(budget.ranges, 0.0), {}, 0
    for shape in plan.shapes:
        for name, rows in plan.rows_read(first, first + shape.steps).items():
            units = plan.amendments[-1].sources[name].units
            passes[name] += rows / max(1, units.count * (units.size // shape.seq_len))
        first += shape.steps
    last = plan.segment(plan.total_steps - 1)
    for name, cursor in last.after(last.steps).items():
        begun[name] = cursor.pass_index + (cursor.used > 0 or cursor.windows > 0)
    return plan, passes, begun


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_no_plan_is_over_its_passes(count: int) -> None:
    chance, plans, near, refused, over = random.Random(12), 0, 0, 0, []
    while plans < count:
        extras, phases, ranges = drawn(chance)
        asks = asked(extras, phases, ranges, "random", 5)
        refused += not asks
        for params, budget in asks:
            plan, passes, begun = plan_counts(params, budget)
            plans += 1
            near += any(passes[name] > 0.9 * limit for name, limit in budget.limits.items())
            for name, limit in budget.limits.items():
                assert math.isclose(budget.passes(params)[name], passes[name], abs_tol=1e-12)  # the closed form
                if passes[name] > limit or begun[name] > math.ceil(limit):
                    over.append((plan, name, passes[name], begun[name], limit))
    print(f"{plans} plans, {near} of them within 10 % of a limit; {refused} searches with nothing left; over: {over}")
    assert not over
    assert near > 0.05 * count  # a test that could fail


JOINT = {
    "mixtures": [
        {"phases": [1], "datasets": SETS, "max_passes": 1.2},
        {"phases": [2], "datasets": {"self": {}, "code": {}, "math": {}}},
    ],
    "phase_ends": {1: [0.5, 0.9]},
}


@pytest.mark.parametrize("method", ["random", "bayes", "tpe"])
def test_natural_and_uniform_shares_are_the_first_two_trials(method: str, base: Config) -> None:
    sweep = opened(base, JOINT)
    engine = make(sweep, 1, method)
    rows = [engine.ask()[1] for _ in range(5)]
    natural, uniform, *_ = ([sweep.space.shares_of(params)] for params in rows)
    of_tokens = np.array(list(TOKENS.values())) / sum(TOKENS.values())
    # 80 x 8 x 33 tokens are read: of math, 1.2 passes over 6,000 are the most, so that its share may move.
    assert all(np.abs(shares - of_tokens).max() < 0.03 for shares in natural[0])
    assert uniform[0][1].max() - uniform[0][1].min() < 0.2
    assert len({json.dumps(params, sort_keys=True) for params in rows}) == 5
    assert all(set(params) == {"lr", "phase_end.1", *sweep.space.mixtures[0].keys, *sweep.space.mixtures[1].keys}
               for params in rows)  # fmt: skip
    for params in rows:
        assert all(
            mixture.allows(row)
            for mixture, row in zip(sweep.space.mixtures, sweep.space.shares_of(params), strict=True)
        )
        assert sweep.rules.resolve(params) == params


def test_uniform_shares_move_as_little_as_passes_ask_for(base: Config) -> None:
    """Where caps depend on two mixtures and an end together, and no box says it."""
    sweep = opened(base, {**JOINT, "mixtures": [{**JOINT["mixtures"][0], "max_passes": 0.9}, JOINT["mixtures"][1]]})
    budget = sweep.rules.budget
    assert isinstance(budget, PassBudget)
    params = {"lr": 0.002, "phase_end.1": 0.75}
    uniform = tuple(np.full(3, 1 / 3) for _ in range(2))
    given = (np.array([0.35, 0.35, 0.3]), uniform[1])
    with pytest.raises(InfeasibleError, match=r"max_passes is 0.9, and 1.1.* passes over 'math'"):
        budget.check(params | sweep.space.params_of(given))
    moved = budget.feasible_shares(sweep.space.mixtures, given, params)
    budget.check(params | sweep.space.params_of(moved))

    def kl(shares: tuple[np.ndarray, ...]) -> float:
        return sum(float((a * np.log(np.maximum(a, 1e-12) / b)).sum()) for a, b in zip(shares, given, strict=True))

    rng, tried = np.random.default_rng(2), 0
    while tried < 100:
        shares = tuple(mixture.sample(rng) for mixture in sweep.space.mixtures)
        try:
            budget.check(params | sweep.space.params_of(shares))
        except InfeasibleError:
            continue
        tried += 1
        assert kl(shares) >= kl(moved) - 1e-4
    assert budget.passes(params | sweep.space.params_of(moved))["math"] > 0.85  # no further than they must


@pytest.mark.parametrize("method", ["random", "bayes", "tpe"])
def test_a_killed_driver_asks_for_the_same(method: str, base: Config) -> None:
    """A search that is killed after any trial and begins again from its journal, as JSON keeps it."""
    sweep, rows = opened(base, JOINT), []
    budget = sweep.rules.budget
    assert isinstance(budget, PassBudget)
    whole = make(sweep, 3, method, accept=budget.check_plan)
    for turn in range(14):
        trial, params = whole.ask()
        again = make(opened(base, JOINT), 3, method, accept=budget.check_plan)
        for number, known, point, value in rows:
            again.restore(number, known, point)
            if value is not None:
                again.tell(number, value)
        assert again.ask() == (trial, params)
        assert again.point(trial) == whole.point(trial)
        value = None if turn % 5 == 4 else sum(x * x for x in params.values())  # every fifth runs for ever
        rows.append((*json.loads(json.dumps([trial, params, whole.point(trial)])), value))
        if value is not None:
            whole.tell(trial, value)


def all_of(engine: Engine) -> Iterator[dict[str, Any]]:
    """What it asks for until nothing is left."""
    with suppress(SpaceExhausted):
        while True:
            yield engine.ask()[1]


def test_a_grid_is_the_baselines_and_the_lattice(base: Config) -> None:
    extras = {"mixtures": [{**ONE, "step": 0.1, "max_passes": 0.6}], "phase_ends": {1: [0.5, 0.9, 0.2]}}
    plain = {"metric": {"name": "val_loss"}, "method": "grid", "parameters": {"dim": {"values": [32, 64]}}}
    sweep = with_data(sweep_of(plain, extras), base, None, {"dim"})
    rows = list(all_of(make(sweep, 0)))
    lattice = {
        (end, a / 10, b / 10, c / 10, dim)
        for end in (0.5, 0.7, 0.9) for dim in (32, 64)
        for a in range(2, 11) for b in range(11) for c in range(4) if a + b + c == 10
    }  # fmt: skip
    kept = set()
    for end, a, b, c, dim in lattice:
        params = {"dim": dim, "phase_end.1": end, "mixture.1.self": a, "mixture.1.code": b, "mixture.1.math": c}
        try:
            sweep.rules.resolve(params)
            kept.add((end, a, b, c, dim))
        except InfeasibleError:
            pass
    found = {tuple(p[k] for k in ("phase_end.1", *sweep.space.mixtures[0].keys, "dim")) for p in rows[2:]}
    assert found == kept
    assert 20 < len(kept) < len(lattice)  # passes take some away, by the end of the phase
    assert [p["mixture.1.code"] for p in rows[:2]] == [row[1] for (row,) in sweep.space.baselines]
    no_step = {"mixtures": [ONE], "phase_ends": {1: [0.5, 0.9]}}
    with pytest.raises(ValueError, match=r"phase_ends.1: a grid needs a step as the third number"):
        make(sweep_of(plain, no_step), 0)
    with pytest.raises(ValueError, match=r"mixtures, phases \[1\]: a grid needs a `step`"):
        make(sweep_of(plain, entry()), 0)


def test_a_trial_trains_on_the_shares_and_ends_of_its_parameters(base: Config) -> None:
    params = {"lr": 0.002, "phase_end.1": 0.6, "mixture.1.self": 0.75, "mixture.1.code": 0.25, "mixture.1.math": 0.0}
    config = config_of(base.to_dict(), params, groups={1: (1, 2)})
    shares = {"self": 0.75, "code": 0.25, "math": 0.0}
    assert config.phases == [
        {**PHASES[0], "steps": 48, "weights": shares}, {**PHASES[1], "steps": 32, "weights": shares},
    ]  # fmt: skip
    assert (config.lr, config.passes) == (0.002, "apart")
    assert base.phases == PHASES
    # As W&B's server gives them: any weights, of one phase each.
    one = config_of(base.to_dict(), {"mixture.2.self": 3, "mixture.2.code": 1})
    assert one.phases == [PHASES[0], {**PHASES[1], "weights": {"self": 3, "code": 1}}]
    with pytest.raises(ValueError, match=r"mixture.3.self: there is no phase '3', the config has 2 phase"):
        config_of(base.to_dict(), {"mixture.3.self": 1})
    with pytest.raises(ValueError, match=r"phase 2 would end at step 80 of 80, and begin at 80"):
        config_of(base.to_dict(), {"phase_end.1": 0.999})


def test_the_example_of_the_repository_is_shown_before_it_runs(
    base: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {name.replace("math", "books"): path for name, path in (base.datasets or {}).items()}
    config = tmp_path / "proxy.yaml"
    replace(base, datasets=sets).save_yaml(config)
    files = ["--sweep_config", str(SWEEPS / "mixture.yaml"), "--extras", str(SWEEPS / "mixture_extras.yaml")]
    code = main(
        ["sweep", *files, "--config", str(config), "--study", str(tmp_path / "study"), "--count", "30", "--dry_run"]
    )
    said, error = capsys.readouterr()
    assert code == 0, error
    assert "bayes search over 8 parameters" in said
    natural, uniform = re.findall(r"example: lr .*, phase_end.1 0\.[0-9]+, (mixture.1.self .*)", said)
    assert natural.startswith("mixture.1.self 0.76")  # 60,000 of 78,000 tokens
    assert "mixture.2.books 0.07" in natural
    assert uniform.startswith("mixture.1.self 0.5, mixture.1.code 0.25")
    assert "mixture.2.code 0.3333" in uniform


def test_shares_that_w_and_b_gives_an_agents_trial_are_weights(
    base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.save_yaml(tmp_path / "base.yaml")
    (tmp_path / "params.yaml").write_text(
        "mixture.1.self: {value: 0.9}\nmixture.1.code: {value: 0.6}\nphase_end.1: {value: 0.5}\nlr: {value: 0.002}\n"
    )
    monkeypatch.chdir(tmp_path)
    env = {"WANDB_SWEEP_PARAM_PATH": "params.yaml", "ROXXEL_SWEEP_RUN_DIR": "run"}
    words = ["--config", "base.yaml", "--mixture.1.self=0.9", "--mixture.1.code=0.6", "--phase_end.1=0.5", "--lr=0.002"]
    _command(words, env)
    config = Config.from_yaml(tmp_path / "run" / "trial.yaml")
    assert config.phases == [
        {**PHASES[0], "steps": 40, "weights": {"self": 0.9, "code": 0.6}}, {**PHASES[1], "steps": 40},
    ]  # fmt: skip
    assert config.passes == "apart"


@pytest.mark.parametrize(("max_passes", "most"), [(2.0, 2e-6), (0.45, 2e-3)])
def test_shares_that_a_solver_moved_may_differ_by_more(max_passes: float, most: float, base: Config) -> None:
    """Another version of scipy ends a little beside: that is no change of the data."""
    second = {"phases": [2], "datasets": {"code": {}, "math": {}}}
    sweep = opened(base, {"mixtures": [{**ONE, "max_passes": max_passes}, second]})
    _, params = make(sweep, 0).ask()
    moved = abs(sweep.space.shares_of(params)[0] - sweep.space.baselines[0][0]).max()
    assert (moved > 0.001) == (max_passes < 1)
    for share, lines in ((0.5 * most, 0), (2 * most, 1)):
        first = Trial(number=0, params={**params, "mixture.1.self": params["mixture.1.self"] + share})
        assert len(changed_data(sweep, first)) == lines


def test_data_that_grew_is_named_at_the_next_start(base: Config, tmp_path: Path) -> None:
    """Natural shares are known of the first trial: what is trained after it reads other text."""
    sweep = opened(base, entry())
    _, params = make(sweep, 0).ask()
    first = Trial(number=0, params=params)
    assert changed_data(sweep, None) == changed_data(sweep, first) == []
    longer = {**(base.datasets or {}), "code": str(tmp_path / "code.npy")}
    np.save(longer["code"], np.zeros(24_000, np.uint16))
    (line,) = changed_data(opened(base, entry(), datasets=longer), first)
    assert "the data has changed since trial 0, whose natural shares were mixture.1.self 0.7692, now 0.6667; " in line
