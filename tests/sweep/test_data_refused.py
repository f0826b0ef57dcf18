"""What a search over the data refuses before its first trial: in the second file, with the config, and of its data."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from searched_data import LR, ONE, PHASES, base_of, entry, opened

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.data_search import refuse_led, with_data
from roxxel_dist.sweep.space.sweep_file import read_sweep, sweep_of

NAN = math.nan
BAD_EXTRAS: dict[str, tuple[Any, str]] = {
    "floors above 1": (
        entry(datasets={"self": {"min": 0.7}, "code": {"min": 0.4}}),
        "mixtures.1.datasets: the min sum to 1.1, and must sum to at most 1: 0.7 (self) + 0.4 (code)",
    ),
    "caps below 1": (
        entry(datasets={"self": {"max": 0.5}, "code": {"max": 0.3}}),
        "mixtures.1.datasets: the max sum to 0.8, and must sum to at least 1: 0.5 (self) + 0.3 (code)",
    ),
    "floor above cap": (
        entry(datasets={"self": {"min": 0.5, "max": 0.4}, "code": {}}),
        "mixtures.1.datasets.self: min 0.5 is above max 0.4",
    ),
    "one mixture": (
        entry(datasets={"self": {"min": 0.5}, "code": {"min": 0.5}}),
        "there is one mixture only (self 0.5, code 0.5)",
    ),
    "one data set": (entry(datasets={"self": {}}), "must name two data sets or more"),
    "data sets in a list": (entry(datasets=["self", "code"]), "must name two data sets or more"),
    "negative": (entry(datasets={"self": {"min": -0.1}, "code": {}}), "datasets.self.min: -0.1 must be a share"),
    "above 1": (entry(datasets={"self": {"max": 20}, "code": {}}), "datasets.self.max: 20 must be a share from 0 to 1"),
    "NaN": (entry(datasets={"self": {"min": NAN}, "code": {}}), "datasets.self.min: nan must be a share"),
    "text": (entry(datasets={"self": {"min": "a"}, "code": {}}), "datasets.self.min: 'a' must be a share"),
    "truth": (entry(datasets={"self": {"min": True}, "code": {}}), "datasets.self.min: True must be a share"),
    "a share that no phase takes": (
        entry(datasets={"self": {"min": 5e-5}, "code": {}}),
        "datasets.self.min: 5e-05 must be 0, or at least 0.0001",
    ),
    "a number for bounds": (entry(datasets={"self": 0.5, "code": {}}), "datasets.self: 0.5 must be a mapping"),
    "stray bound": (entry(datasets={"self": {"mim": 0.1}, "code": {}}), "datasets.self.mim: there is no such key"),
    "stray key": (entry(max_epochs=3), "mixtures.1.max_epochs: there is no such key: there are phases, datasets"),
    "no passes": (entry(max_passes=0), "mixtures.1.max_passes: 0 must be a number above 0"),
    "NaN passes": (entry(max_passes=NAN), "mixtures.1.max_passes: nan must be a number above 0"),
    "passes that no float holds": (entry(max_passes=10**400), "must be a number above 0"),
    "endless passes": (entry(max_passes=math.inf), "mixtures.1.max_passes: inf must be a number above 0"),
    "no phases": (entry(phases=[]), "mixtures.1.phases: [] must be a list of phases, counted from 1"),
    "phase 0": (entry(phases=[0]), "mixtures.1.phases: [0] must be a list of phases, counted from 1"),
    "a phase twice": (entry(phases=[1, 1]), "mixtures.1.phases: phase 1 is twice here"),
    "a phase in two entries": (
        {"mixtures": [ONE, {**ONE, "phases": [2, 1]}]},
        "mixtures.2.phases: phase 1 is in entry 1 too: name each phase once",
    ),
    "no list": ({"mixtures": ONE}, "must be a list of mixtures"),
    "an empty list": ({"mixtures": []}, "mixtures: [] must be a list such as"),
    "no mapping": ({"mixtures": [1]}, "mixtures.1: 1 must be a mapping with phases and datasets"),
    "a step that 1 is no multiple of": (entry(step=0.3), "step: 0.3 must be 1 over a whole number"),
    "a step that fits nothing": (
        entry(step=0.5, datasets={"self": {"min": 0.3, "max": 0.4}, "code": {}}),
        "no multiples of 0.5 sum to 1 within self 0.3 to 0.4",
    ),
    "the name of a parameter": (
        {"parameters": {"mixture.1.code": {"min": 0.0, "max": 1.0}}, **entry()},
        "mixtures: the parameter 'mixture.1.code' has the name of what mixtures searches",
    ),
    "the name of a nested parameter": (
        {"parameters": {"mixture": {"parameters": {"a": {"values": [1, 2]}}}}, **entry()},
        "mixtures: the parameter 'mixture' has the name of what mixtures searches",
    ),
    "the name of an end": (
        {"parameters": {"phase_end.1": {"min": 0.1, "max": 0.9}}, "phase_ends": {1: [0.5, 0.9]}},
        "phase_ends: the parameter 'phase_end.1' has the name of what phase_ends searches",
    ),
    "a tiny step": ({"phase_ends": {1: [0.1, 0.4, 1e-12]}}, "values, and 10,000 are the maximum"),
    "ends that fall": ({"phase_ends": {1: [0.9, 0.5]}}, "phase_ends.1: [0.9, 0.5]: the first number must be below"),
    "ends that cannot increase": (
        {"phase_ends": {1: [0.5, 0.9], 2: [0.2, 0.5]}},
        "phase_ends.2: [0.2, 0.5] is never above [0.5, 0.9], the end of phase 1",
    ),
    "an end in percent": ({"phase_ends": {1: [50, 90]}}, "phase_ends.1: [50, 90] must be two shares of all steps"),
    "one end": ({"phase_ends": {1: 0.5}}, "phase_ends.1: 0.5 must be two shares of all steps"),
    "NaN end": ({"phase_ends": {1: [NAN, 0.5]}}, "phase_ends.1: [nan, 0.5] must be two shares"),
    "a name of a phase": ({"phase_ends": {"one": [0.1, 0.5]}}, "phase_ends.one: 'one' must be the number of a phase"),
    "a wide step": ({"phase_ends": {1: [0.5, 0.6, 0.2]}}, "the third number must be at most 0.1"),
}


def test_mistakes_in_the_second_file() -> None:
    for name, (given, said) in BAD_EXTRAS.items():
        parameters = {**LR["parameters"], **given.get("parameters", {})}
        extras = {key: value for key, value in given.items() if key != "parameters"}
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            sweep_of({**LR, "parameters": parameters}, extras)
        assert said in str(caught.value), name


def test_they_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("metric: {name: val_loss}\n")
    (tmp_path / "extras.yaml").write_text(
        "mixtures:\n  - phases: [1]\n    datasets:\n      self: {min: 0.9}\n      code: {min: 2.0e-1}\n"
    )
    with pytest.raises(ValueError, match=r"extras.yaml, line 1: mixtures.1.datasets: the min sum to 1.1"):
        read_sweep(tmp_path / "sweep.yaml", tmp_path / "extras.yaml")
    with pytest.raises(ValueError, match="parameters: there must be at least one"):
        read_sweep(tmp_path / "sweep.yaml")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return base_of(tmp_path_factory.mktemp("data"))


RARE: dict[str, Any] = {"code": {}, "math": {}}
WEIGHTED = [{**PHASES[0], "weights": {"self": 0.6, "code": 0.4}}, PHASES[1]]
BAD_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no phases": (entry(), {"phases": None}, "the config has no phases: give one at least"),
    "epochs": (
        entry(),
        {"phases": [{"epochs": 1, "batch_size": 8, "seq_len": 33}]},
        "phases: phase 1 has epochs: with mixtures or phase_ends each phase must have steps",
    ),
    "no such phase": (entry(phases=[3]), {}, "mixtures.1.phases: there is no phase 3, the config has 2"),
    "shares in both": (
        entry(),
        {"phases": WEIGHTED},
        "phases: phase 1 has weights (self 0.6, code 0.4), and mixtures.1 searches its shares",
    ),
    "no such data set": (
        entry(datasets={"self": {}, "cod": {}}),
        {},
        "mixtures.1.datasets: there is no data set 'cod': the config has self, code, math",
    ),
    "no validation text": (
        entry(),
        {"validation": None},
        "val_loss would be measured on the held-out part of self alone, which has no text of code, math",
    ),
    "a repetition cap that leaves nothing": (
        entry(max_passes=0.1),
        {},
        "max_passes leaves no mixture of phases [1], which read 15,840 tokens: the shares may be self (60,000 tokens, "
        "0.0881 passes in other phases) 0.2 to 0.04083, code (12,000 tokens) 0 to 0.07292, math (6,000 tokens) 0 to "
        "0.03458, and must sum to 1: use max_passes above 0.28, fewer steps, or more data",
    ),
    "a repetition cap below a floor": (
        entry(max_passes=1, datasets={"self": {}, "math": {"min": 0.5}}),
        {},
        "math (6,000 tokens) 0.5 to 0.3646, and must sum to 1: use max_passes above 1.37, ",
    ),
    "a floor of less than a row": (
        {"mixtures": [{"phases": [2], "datasets": {"self": {}, "code": {"min": 0.005}}}]},
        {},
        "mixtures.1.datasets.code.min: 0.005 of the 160 rows of a phase (steps, where it has blend: step) is less than "
        "one, so that it might not be read: use at least 0.00625, or 0",
    ),
    "a data set without a row": (
        entry(datasets={"self": {}, "math": {}}),
        {"phases": [{**PHASES[0], "seq_len": 6001}], "max_context": 6000},
        "mixtures.1.datasets.math: it has 6,000 tokens to train on, and no row of seq_len 6001: leave it out",
    ),
    "caps that two mixtures share": (
        {"mixtures": [{**ONE, "max_passes": 1, "datasets": RARE}, {"phases": [2], "datasets": RARE}]},
        {},
        "must sum to 1 in all mixtures together: use max_passes above 1.21, fewer steps, or more data",
    ),
    "one phase": (
        {"phase_ends": {1: [0.5, 0.9]}},
        {"phases": PHASES[:1]},
        "phase_ends.1: the config has one phase, which ends with the training",
    ),
    "the last phase": ({"phase_ends": {2: [0.5, 0.9]}}, {}, "phase_ends.2: phase 2 of 2 is the last one"),
    "no such end": ({"phase_ends": {5: [0.5, 0.9]}}, {}, "phase_ends.5: phase 5 of 2 does not exist"),
    "an end before the first step": (
        {"phase_ends": {1: [0.001, 0.002]}},
        {},
        "phase_ends: phase 1 ends at step 0 of 80 or before, and has no step then",
    ),
    "an end behind one that is fixed": (
        {"phase_ends": {1: [0.8, 0.9]}},
        {"phases": [*PHASES, {**PHASES[1], "steps": 80}]},
        "phase_ends: phase 2 ends at step 80 of 160 or before, and phase 1 at step 128 or after",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_what_does_not_go_with_the_config_and_its_data(name: str, base: Config) -> None:
    extras, changes, said = BAD_CONFIGS[name]
    metric = extras.get("metric", "val_loss")
    with pytest.raises(ValueError, match=re.escape(said)):
        opened(base, {key: value for key, value in extras.items() if key != "metric"}, metric, **changes)


def test_one_data_set_under_two_names(base: Config) -> None:
    again = {**(base.datasets or {}), "again": f"{Path((base.datasets or {})['code']).parent}/./code.npy"}
    with pytest.raises(ValueError, match=r"mixtures: 'code' and 'again' are both .*: name each data set once"):
        opened(base, entry(datasets={"self": {}, "code": {}, "again": {}}), datasets=again)


def test_what_chooses_or_trains_elsewhere_is_refused() -> None:
    sweep = sweep_of(LR, entry())
    refuse_led(sweep, program=False, server=False)
    refuse_led(sweep_of(LR), program=True, server=True)
    with pytest.raises(ValueError, match="mixtures: the sweep runs a program of your own, which has no phases"):
        refuse_led(sweep, program=True, server=False)
    with pytest.raises(ValueError, match="mixtures: W&B's server leads this sweep and draws each parameter alone"):
        refuse_led(sweep, program=False, server=True)


@pytest.mark.parametrize("field", ["phases", "datasets", "validation", "passes"])
def test_fields_that_decide_the_data_are_no_parameters(field: str, base: Config) -> None:
    with pytest.raises(ValueError, match=f"parameters.{field}: mixtures needs the same {field} in all trials"):
        with_data(sweep_of(LR, entry()), base, None, {"lr", field})


def test_text_is_no_data_for_mixtures(base: Config, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words\n" * 100)
    with pytest.raises(ValueError, match=r"a.txt is text, whose tokens are not counted yet: make shards of it first"):
        with_data(sweep_of(LR, entry()), base, tmp_path / "a.txt", {"lr"})
