"""Mixtures over phases as people write them: ramps whose end is searched, and numbers that YAML takes for text."""

from typing import Any

import numpy as np
import pytest

from roxxel_dist.curriculum.phases import phases_of
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.data_search import with_data
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.space.passes import PassBudget
from roxxel_dist.sweep.space.sweep_file import sweep_of
from roxxel_dist.sweep.trial.trial import config_of

PLAIN: dict[str, Any] = {"steps": 20, "batch_size": 8, "seq_len": 33}
RAMP: dict[str, Any] = {"steps": 60, "batch_size": [2, 4, 8], "seq_len": 33}
MIXTURE = {"phases": [1], "datasets": {"self": {}, "code": {}}, "max_passes": 4}
SEARCHES: dict[str, tuple[list[dict[str, Any]], dict[int, list[float]], float]] = {
    "a ramp that may be too short": ([RAMP, PLAIN], {1: [0.01, 0.5]}, 4 / 80),
    "one that follows": ([PLAIN, RAMP], {1: [0.3, 0.99]}, 0.3),
    "steps as text": ([{**PLAIN, "steps": "1e2"}, PLAIN], {1: [0.1, 0.9]}, 0.1),
    "an end that is fixed": ([RAMP, {**PLAIN, "steps": "2e1"}], {}, 0.0),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("self", "code"):
        np.save(folder / f"{name}.npy", rng.integers(0, 64, 20_000).astype(np.uint16))
    return {name: str(folder / f"{name}.npy") for name in ("self", "code")}


@pytest.mark.parametrize("name", SEARCHES)
def test_each_trial_has_phases_that_can_be_trained(name: str, sets: dict[str, str]) -> None:
    phases, ends, first = SEARCHES[name]
    base = Config(datasets=sets, validation=sets, phases=phases, vocab_size=64, dim=16, max_context=32)
    extras = {"mixtures": [MIXTURE], **({"phase_ends": ends} if ends else {})}
    plain = sweep_of({"metric": {"name": "val_loss"}, "parameters": {"lr": {"min": 0.001, "max": 0.01}}}, extras)
    sweep = with_data(plain, base, None, {"lr"})
    budget = sweep.rules.budget
    assert isinstance(budget, PassBudget)
    engine, found = make(sweep, 0, "random", accept=budget.check_plan), set()
    for _ in range(60):
        params = engine.ask()[1]
        config = config_of(base.to_dict(), params, groups=sweep.data.groups)
        steps = [sum(phase.steps or 0 for phase in phases_of(given)) for given in config.phases]
        assert sum(steps) == sum(int(float(phase["steps"])) for phase in phases)
        found.add(params.get("phase_end.1", 0.0))
    assert min(found) >= first
